"""A run's copy of its prepared data: all but the blocks, so that it can predict where the data are not.

    RUN/data/recjax.json      the manifest, which lists only what is kept: schema, options, fingerprint
    RUN/data/vocabulary/...   the vocabularies, as in the prepared data
    RUN/sources/00001/...     the same of the first further data that the run has gone on with, and so on

They are 4 bytes of row and 4 or 8 of value for every table row that has a value: a fraction of one checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import Batch, Rows, Schema
from recjax.data.source import BlockSource, has_blocks, rows_of
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import BLOCKS, MANIFEST, read_manifest
from recjax.errors import DataError, TrainingError
from recjax.utils.files import sha256

DATA, SOURCES = "data", "sources"  # folders of a run folder


def snapshot_of(run: Path, source: int) -> Path:
    """The folder of what a run kept of its data: those that it began with (0), or a further source of them."""
    return run / SOURCES / f"{source:05}" if source else run / DATA


def newest_snapshot(run: Path) -> Path:
    """The same of the last source that there is."""
    numbers = [int(folder.name) for folder in (run / SOURCES).glob("[0-9]" * 5) if (folder / MANIFEST).is_file()]
    return snapshot_of(run, max(numbers, default=0))


class EarlierBlocks(PreparedSource):
    """Data that a run began with, seen with the vocabularies that have grown since: ids stand for what they stood."""

    def __init__(self, grown: PreparedSource, first: BlockSource) -> None:
        """The blocks of `first`, described as `grown` is."""
        super().__init__(grown.path, grown.manifest)
        self._first = first

    @property
    def has_blocks(self) -> bool:
        """See `PreparedSource`."""
        return has_blocks(self._first)

    def row_counts(self, split: str) -> np.ndarray:
        """See `PreparedSource`."""
        return self._first.row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `PreparedSource`."""
        return self._first.read(split, index)

    def rows(self, split: str, pack: bool = False) -> Rows | None:
        """See `PreparedSource`."""
        return rows_of(self._first, split, pack)


def snapshot_data(source: BlockSource, out: Path) -> None:
    """Copies what describes prepared data to the folder `out`; nothing for data that are not on disk.

    Args:
      source: the data.
      out: may hold what an earlier call with the same data has left; what is damaged there is replaced.

    Raises:
      DataError: the data are damaged.
      TrainingError: `out` cannot be written.
    """
    if not isinstance(source, PreparedSource) or _holds(out, source):
        return
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        manifest = read_manifest(source.path)
        kept = {name: entry for name, entry in manifest["files"].items() if Path(name).parts[0] != BLOCKS}
        for name, entry in kept.items():
            copy = unfinished / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, copy)
            if sha256(copy) != entry["sha256"]:
                raise DataError(f"{source.path / name} is damaged. Prepare the data again with --overwrite.")
        (unfinished / MANIFEST).write_text(json.dumps(manifest | {"files": kept}, indent=1), "utf-8")
        shutil.rmtree(out, ignore_errors=True)
        unfinished.rename(out)
    except OSError as error:
        raise TrainingError(
            f"cannot write {out}: {error.strerror or error}. Give the run folder free space and write permission, or "
            "choose another with --out."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def open_snapshot(folder: Path) -> PreparedSource | None:
    """Opens what `snapshot_data` left in a folder, verified, as a source without blocks; None if nothing is there.

    Raises:
      DataError: it is damaged.
    """
    if not os.path.exists(folder / MANIFEST):  # Path.exists raises where a name is too long
        return None
    try:
        return open_prepared(folder).verify()
    except DataError as error:
        raise DataError(
            f"what the run kept of its data is damaged: {error} Or copy that folder's files from the prepared data."
        ) from None


def _holds(out: Path, source: PreparedSource) -> bool:
    try:
        kept = open_snapshot(out)
    except DataError:  # damaged: the same data make it whole again
        return False
    return kept is not None and kept.fingerprint == source.fingerprint and kept.about == source.about


def refuse_other_values(source: BlockSource, kept: Path) -> None:
    """Refuses data whose ids stand for other values than those of the data that `snapshot_data` left something of.

    Raises:
      DataError: saying what differs.
    """
    try:
        then = open_snapshot(kept)
    except DataError:  # damaged: `snapshot_data` replaces it
        return
    if then is not None and (what := other_encoding(then, source)):
        place = f" at {source.path}" if isinstance(source, PreparedSource) else ""
        raise DataError(
            f"the data{place} {what}: their ids stand for other values. Point data.path at the data it was trained on, "
            "or start again in another --out."
        )


def other_encoding(trained: BlockSource, other: BlockSource) -> str | None:
    """Names what gives ids of `other` other values than those of a run's data, with both; None if nothing does.

    Fingerprints do not tell: they are of the ids.
    """
    about = [source.about if isinstance(source, PreparedSource) else {} for source in (trained, other)]
    for what, then, now in (
        ("columns", _columns(trained.schema), _columns(other.schema)),
        *((key, about[0].get(key), about[1].get(key)) for key in ("vocabularies", "encoder")),
    ):
        if then != now:
            return f"have other {what} than those that the run was trained on ({_difference(then, now, what)})"
    return None


def _columns(schema: Schema) -> list[dict[str, Any]]:
    return [{"dense": name} for name in schema.dense] + [dataclasses.asdict(feature) for feature in schema.features]


def _difference(then: Any, now: Any, key: str) -> str:
    """The first place in which two JSON values differ, and both values there."""
    if isinstance(then, list) and isinstance(now, list):
        then, now = (dict(enumerate(values)) for values in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        name = next(name for name in {**then, **now} if then.get(name) != now.get(name))
        return _difference(then.get(name), now.get(name), f"{key}.{name}")
    texts = ("nothing" if value is None else json.dumps(value) for value in (then, now))
    then, now = (text if len(text) <= 40 else f"{text[:16]}..." for text in texts)
    return f"{key}: {then} there, {now} here"
