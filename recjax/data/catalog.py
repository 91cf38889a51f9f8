"""The datasets by name, and what the verbs `recjax data prepare` and `recjax data info` do with them.

A config is a factory: `DATASETS[kind]().open()` is a `BlockSource`.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recjax import settings
from recjax.data import own
from recjax.data.arrow.wording import Wording
from recjax.data.datasets import avazu, criteo, movielens, movietweetings, own_table, taobao, tfds, yelp
from recjax.data.datasets.avazu import Avazu
from recjax.data.datasets.criteo import Criteo1TB, CriteoKaggle
from recjax.data.datasets.movielens import MovieLens
from recjax.data.datasets.movietweetings import MovieTweetings
from recjax.data.datasets.options import prepare_as
from recjax.data.datasets.own_table import Table, prepare_files
from recjax.data.datasets.prepared import Prepared
from recjax.data.datasets.sequences import Sequences
from recjax.data.datasets.taobao import Taobao
from recjax.data.datasets.tfds import Tfds
from recjax.data.datasets.yelp import Yelp
from recjax.data.prepare.chunk import Reader
from recjax.data.source import SPLITS, BlockSource
from recjax.data.storage.blocks import PreparedSource, open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.data.synthetic.clicks import Synthetic
from recjax.data.synthetic.stream import ZipfStream, ZipfStreamSource
from recjax.errors import ConfigError, DataError
from recjax.utils import log
from recjax.utils.paths import is_remote, place
from recjax.utils.text import did_you_mean

Dataset = (
    MovieTweetings
    | MovieLens
    | CriteoKaggle
    | Criteo1TB
    | Avazu
    | Taobao
    | Yelp
    | Tfds
    | Table
    | Sequences
    | Synthetic
    | ZipfStream
    | Prepared
)

DATASETS: dict[str, type[Dataset]] = {kind.kind: kind for kind in typing.get_args(Dataset)}

_WITHOUT_FOLDER = (MovieTweetings.kind, Synthetic.kind, ZipfStream.kind)  # shipped or generated

# The readers of raw files. Datasets that are absent here have none, so they need no preparation.
_OPEN_RAW: dict[str, Callable[..., Reader]] = {
    MovieTweetings.kind: movietweetings.open_raw,
    MovieLens.kind: movielens.open_raw,
    CriteoKaggle.kind: criteo.open_raw,
    Criteo1TB.kind: criteo.open_raw,
    Avazu.kind: avazu.open_raw,
    Taobao.kind: taobao.open_raw,
    Yelp.kind: yelp.open_raw,
    Tfds.kind: tfds.open_raw,
    Table.kind: own_table.open_raw,
    Sequences.kind: own_table.open_raw,
}


def default(name: str) -> Dataset:
    """The default config of a dataset; ConfigError with the nearest names if there is no such dataset."""
    if name not in DATASETS:
        hint = f" {of_data.rstrip()}" if (of_data := own.hint(name)) else did_you_mean(name, DATASETS)
        raise ConfigError(f"unknown dataset {name!r}.{hint} The datasets are {', '.join(DATASETS)}.")
    return DATASETS[name]()


def open_raw(config: Dataset, source: str | os.PathLike[str] | None) -> Reader:
    """The reader of a dataset's raw files.

    Raises:
      ConfigError: the dataset has none.
      DataError: the raw files are at fault.
    """
    if config.kind not in _OPEN_RAW:
        raise ConfigError(_nothing_to_prepare(config.kind))
    return _OPEN_RAW[config.kind](config, source)


def _nothing_to_prepare(kind: str) -> str:
    if kind == Prepared.kind:
        return f"prepared data are prepared already: give their folder as data.path. {own.HOW}"
    if kind == ZipfStream.kind:
        return f"{kind} data have no raw files, for their rows are drawn. Leave out --from and --beam to write them."
    return (
        f"{kind} data have no raw files, so there is nothing to prepare. Datasets to prepare: {', '.join(_OPEN_RAW)}."
    )


def prepare(
    config: Dataset,
    source: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    beam: str | None = None,
    wording: Wording = Wording.COMMAND,
) -> dict[str, Any]:
    """Raw files, or drawn rows, to prepared blocks.

    Args:
      config: the dataset and its options.
      source: folder of the raw files; None for those that ship with recjax, and for rows that are drawn.
      out: the folder to make.
      overwrite: replace prepared data of other content in `out`.
      beam: do it on Apache Beam, with these pipeline options; None: in this process.
      wording: of messages about the options of a table.

    Returns:
      JSON values: dataset, path, fingerprint, rows (split -> rows), skipped (kind of malformed line -> lines left out).

    Raises:
      ConfigError: the dataset needs no preparation.
      DataError: the raw files are at fault, or `out` holds something else.
      TrainingError: `out` cannot be written.
    """
    if isinstance(config, Synthetic | Prepared) or (
        isinstance(config, ZipfStream) and (source is not None or beam is not None)
    ):
        raise ConfigError(_nothing_to_prepare(config.kind))
    if beam is None and is_remote(place(out)):
        raise ConfigError(
            f"{out} is object storage. Prepare to a folder of this machine and copy it there as it is, or prepare with "
            "--beam, which writes there."
        )
    if beam is not None and isinstance(config, Table):
        raise ConfigError("a table is prepared in this process, in two passes with bounded memory: leave out --beam.")
    if beam is not None:
        from recjax.data.prepare.beam import prepare_on_beam

        raw = None if source is None else str(source)
        made = prepare_on_beam(config, raw, open_raw, str(out), beam, overwrite=overwrite)
    elif isinstance(config, ZipfStream):
        stream = ZipfStreamSource(config)
        splits = {split: stream.blocks(split) for split in SPLITS}
        made = write_prepared(out, stream.name, stream.schema, splits, {}, overwrite=overwrite)
    elif isinstance(config, Table):
        made = prepare_files(config, source, out, wording, overwrite=overwrite)
    else:
        made = prepare_as(config, open_raw(config, source), out, overwrite=overwrite)
    return described(made)


def prepare_object(
    data: Any, label: str, out: str | os.PathLike[str], overrides: Sequence[str], **more: Any
) -> dict[str, Any]:
    """A table from Python to prepared blocks: `recjax.prepare`, of texts; the result is that of `prepare`."""
    config = settings.override(Table(label=label), overrides)
    if isinstance(data, (str, os.PathLike)) and more["validation"] is None and more["test"] is None:
        return prepare(config, data, out, overwrite=more["overwrite"], wording=Wording.PYTHON)
    return described(own_table.prepare_object(config, data, out, **more))


def described(made: PreparedSource) -> dict[str, Any]:
    """Describes what was prepared, as JSON values; see `prepare`."""
    return {
        "dataset": made.name,
        "path": str(made.path),
        "fingerprint": made.fingerprint,
        "rows": {split: int(made.row_counts(split).sum()) for split in SPLITS},
        "skipped": made.about.get("skipped", {}),
    }


def open_verified(name_or_folder: str, overrides: Sequence[str] = ()) -> BlockSource:
    """Opens a dataset by name (with `overrides` of its config), or a folder of prepared data.

    A name that is also that of such a folder here means the folder, unless the dataset needs none or has overrides.
    Every checksum of prepared data is verified first.

    Raises:
      ConfigError: no such dataset, or overrides for a folder.
      DataError: the data are missing or damaged.
    """
    source: BlockSource
    is_folder = is_remote(name_or_folder) or place(name_or_folder).is_dir()
    if name_or_folder in DATASETS and is_folder and not overrides and (Path(name_or_folder) / MANIFEST).is_file():
        alone = name_or_folder in _WITHOUT_FOLDER
        which = f"this is the dataset; give ./{name_or_folder} for the folder" if alone else "this is the folder"
        log.info(f"{name_or_folder} is the name of a dataset and of a folder here: {which}")
        source = default(name_or_folder).open() if alone else open_prepared(name_or_folder)
    elif name_or_folder in DATASETS or not is_folder:
        if Path(name_or_folder).is_file():
            raise DataError(f"{name_or_folder} is a file, not a folder of prepared data. {own.HOW}")
        config = settings.override(default(name_or_folder), overrides)
        source = config.open(Wording.COMMAND) if isinstance(config, Table) else config.open()
    elif overrides:
        raise ConfigError(
            f"{name_or_folder} is a folder of prepared data, whose options are fixed. Leave out {overrides[0]!r}, or "
            "name a dataset instead of the folder."
        )
    else:
        source = open_prepared(name_or_folder)
    if isinstance(source, PreparedSource):
        source.verify()
    return source
