"""A table of a person's own: Parquet, ORC, CSV or Arrow files, whose columns get roles by name or by their looks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, cast

from recjax.data.arrow import labels, proposals, roles, row_filter, scan, splits
from recjax.data.arrow.label import Label
from recjax.data.arrow.reader import LabelledReader, TableReader
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.splitter import Choices
from recjax.data.arrow.spool import folder_beside, spool
from recjax.data.arrow.wording import Wording
from recjax.data.datasets.options import cache_key, cached, open_as, options_of, prepare_as, prepare_command
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.earlier import EarlierData, open_earlier
from recjax.data.prepare.encoder import options_of_ids
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.prepare.prepare import prepare_data
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import FORMAT
from recjax.data.storage.remote import cache_folder
from recjax.data.text.source_files import sha256
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.settings import items
from recjax.settings.values import check_ranges
from recjax.utils import log
from recjax.utils.locks import locked
from recjax.utils.paths import located

ALONE = "none"
_VERSION = 2  # raise it when the same files and options start to give other data


@dataclasses.dataclass(frozen=True)
class Table:
    """Config of tables of one's own."""

    kind: ClassVar[str] = "table"
    # Not in the options of data from before they came
    later: ClassVar[tuple[str, ...]] = ("where", "encoding", "base_values", "user", "item")

    path: str = ""  # folder of prepared data; empty: those of `from`, prepared once into the cache folder
    from_: str = ""  # a file, a folder of files or a pattern of names: Parquet, ORC, CSV or Arrow
    # Column of the label; or several, with kinds and weights: clicked,bought:weight=clicked,rating:number,stars:class
    label: str = ""
    threshold: float | None = None  # label 1 means that the column is at least this; none: see positive
    positive: str = ""  # label 1 means that the column is this; empty: the column holds 0 and 1
    # COLUMN:ROLE each; roles: id, jagged (lists of ids), dense, vector (lists of numbers), time (its hour, ...),
    # weight, skip; and A*B:cross of features. auto: what the other columns look like. A name with a comma or colon
    # stands in double quotes: "a,b":id
    columns: tuple[str, ...] = (roles.AUTO,)
    # Conditions that all hold in the rows that are used: price>0,country=DE|FR,kind!=,day>=2026-01-01
    where: tuple[str, ...] = ()
    # random:0.8,0.1,0.1, time:0.8,0.1,0.1, last:1,1 or column; empty: by what is named below, or random
    split: str = ""
    split_seed: int = 0  # seed of split=random
    time: str = ""  # column of split=time, and of the order of split=last
    group: str = ""  # column of the groups of split=last
    split_column: str = ""  # column of split=column: train, validation or test in each row
    validation: str = ""  # files that validate, as `from`; empty: rows of `from` do
    test: str = ""  # files that are the test, as `from`; empty: rows of `from` are
    delimiter: str = ""  # delimiter of CSV; empty: comma, tab, semicolon or bar, as the first line has it
    encoding: str = scan.UTF_8  # encoding of CSV, by its name in Python: utf-8, cp1252, latin-1, utf-16, shift_jis, ...
    ids: Frequency | Hash | Modulo = Frequency()  # mapping of values to rows of tables
    dense: DenseTransform = "standard"  # transform of the dense columns; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # as many dense columns more: 1 where the value is missing
    # Run folder, or prepared data, that these go on from: roles of columns and statistics of dense ones are theirs.
    # Empty: that of train.init_from, where there is one; none: these data stand alone
    base: str = ""
    base_values: Literal["drop", "keep"] = "drop"  # keep: values of base keep their rows, new ones come after them
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one
    # Column of the user, for models that find items for users. Without a label each row is a user and an item that
    # belong together
    user: str = ""
    item: str = ""  # column of the item, likewise

    def __post_init__(self) -> None:
        check_ranges(self, split_seed=(0, 2**32 - 1))
        object.__setattr__(self, "encoding", scan.encoding_named(self.encoding))  # by one name, as options are compared
        _, requests = roles.parse(self.columns)
        row_filter.parse(self.where)
        if not isinstance(self.ids, Frequency) and any(each.min_count > 1 for each in requests.values()):
            raise ConfigError(f"columns: min_count counts values, and ids={self.ids.kind} does not. Leave one out.")
        if not isinstance(self.ids, Frequency) and any(each.like for each in requests.values()):
            raise ConfigError(f"columns: like shares a vocabulary, and ids={self.ids.kind} makes none. Leave one out.")
        splits.parse(self.split, self.apart, self._named)
        if self.threshold is not None and self.positive:
            raise ConfigError("threshold and positive both say which labels are 1. Give one of them.")
        if labels.parse(self.label) is not None and (self.threshold is not None or self.positive):
            raise ConfigError(
                f"threshold and positive are of a single binary label, and label is {self.label}. Give them to a label "
                "of its own: rating:threshold=4,clicked."
            )
        if bool(self.user) != bool(self.item) or (self.user and self.user == self.item):
            raise ConfigError(
                f"user is {self.user!r} and item is {self.item!r}: name the columns of both, user=COLUMN item=COLUMN."
            )
        if len(self.delimiter) > 1:
            raise ConfigError(f"delimiter is {self.delimiter!r}; it must be one character.")

    @property
    def roles(self) -> tuple[str, ...]:
        """`columns`, with those of the user and the item as ids unless they have another role there."""
        _, requests = roles.parse(self.columns)
        names = [name for name in (self.user, self.item) if name and name not in requests]
        return (*self.columns, *(roles.column_text(name, "id") for name in names))

    def column_names(self) -> list[str]:
        """The columns of `from`, of its first file; raises what `recjax.data.arrow.scan.find` and `schema` raise."""
        return list(scan.schema(scan.find(self.from_, self.delimiter, self.encoding)[0]).names)

    def unnamed_columns(self, names: Collection[str]) -> list[str]:
        """The columns of `from` that only `auto` makes features of: no option names them, nor are they in `names`."""
        auto, requests = roles.parse(self.roles)
        several = labels.parse(self.label)
        of_labels = (items.unquote(self.label),) if several is None else several.columns
        used = {*names, *requests, *of_labels, self.time, self.group, self.split_column}
        return [name for name in self.column_names() if name not in used] if auto else []

    @property
    def apart(self) -> tuple[str, ...]:
        """The splits that have files of their own."""
        return tuple(split for split in ("validation", "test") if getattr(self, split))

    @property
    def _named(self) -> tuple[str, ...]:
        """The settings of the split that name a column."""
        return tuple(name for name in ("time", "group", "split_column") if getattr(self, name))

    def open(self, wording: Wording = Wording.CONFIG) -> PreparedSource:
        """The prepared data; those of `from` are prepared first, unless the cache has them.

        `wording` is that of messages about the options.

        Raises:
          ConfigError: what `open_raw` raises.
          DataError: neither `path` nor `from`; `path` holds no intact data of these options; or the files are at fault.
          TrainingError: the cache folder cannot be written.
        """
        if self.path and options_of(self) == options_of(type(self)()):  # nothing is asked of the data: they tell
            return open_prepared(self.path, self.kind, self.cache)
        if self.path:
            return open_as(self)
        if not self.from_:
            option = wording.option
            raise DataError(
                f"a table needs its file: give {option('from', 'FILE')} {option('label', 'COLUMN')}. Or prepare it "
                f"once with: {prepare_command(self)} and give that folder as {option('path', 'DIR')}."
            )
        folder = cache_folder() / f"{self.kind}-{_stem(self.from_)}-{self._key()}"
        if (found := cached(folder, self.kind)) is not None:
            return found
        with contextlib.ExitStack() as stack:
            _wait(folder, stack)
            if (found := cached(folder, self.kind)) is not None:  # another process has prepared them meanwhile
                return found
            return prepare_files(self, self.from_, folder, wording, overwrite=True)

    def tables(
        self, files: Mapping[str, list[TableFile]], out: Path
    ) -> AbstractContextManager[Mapping[str, list[TableFile]]]:
        """The files of each split that are read, while they are: those of the config as they are."""
        del out
        return contextlib.nullcontext(files)

    def as_read(self) -> Table:
        """The options by which `tables` are read."""
        return self

    @property
    def split_in_words(self) -> str:
        """The split of `tables`; "": as `as_read` says."""
        return ""

    def _key(self) -> str:
        """Changes with the options, the files, the preparation and the format, so that none are ever mixed."""
        of_splits = _files(self, self.from_).items()
        contents = ["".join([split, *(sha256(file.path) for file in files)]).encode() for split, files in of_splits]
        earlier = self.earlier()
        return cache_key(self, _VERSION, [*contents, *([earlier.sha256.encode()] if earlier else [])])

    def earlier(self) -> EarlierData | None:
        """The data of `base`; None: these stand alone. Raises what `open_earlier` raises."""
        return open_earlier(located(self.base), "data.base") if self.base not in ("", ALONE) else None


def _wait(folder: Path, stack: contextlib.ExitStack) -> None:
    """Waits until no other process prepares data in a folder of the cache, and keeps others from it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder.with_name(f".{folder.name}.lock")))
    except OSError as error:
        raise TrainingError(
            f"cannot write to {folder.parent}: {error.strerror or error}. Make space or mend permissions, or set "
            "RECJAX_CACHE to another folder."
        ) from error


def open_raw(config: Table, source: str | os.PathLike[str] | None, wording: Wording = Wording.COMMAND) -> TableReader:
    """The reader of the tables, after a pass over them.

    Args:
      config: the options.
      source: as `Table.from_`; None: that.
      wording: of messages about the options.

    Raises:
      ConfigError: there is no source, or a column or format that is not known.
      DataError: the files are at fault.
    """
    return open_files(config, _files(config, _source(config, source)), wording)


def _source(config: Table, source: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns where the rows are: `source`, or else as the config says (ConfigError: nowhere)."""
    if not (source := source or config.from_):
        raise ConfigError(
            f"{config.kind}: no such data ship with recjax. Give its file with --from FILE, and name its columns: "
            f"{'user=COLUMN item=COLUMN time=COLUMN' if config.kind != Table.kind else 'label=COLUMN'}."
        )
    return source


def open_files(config: Table, files: Mapping[str, list[TableFile]], wording: Wording = Wording.COMMAND) -> TableReader:
    """The reader of these files of each split."""
    earlier = config.earlier()
    several = labels.parse(config.label)
    single = Label(items.unquote(config.label), config.threshold, config.positive)
    if config.item and not config.label:
        single = Label(config.item, everywhere=True)
    choices = Choices(
        single if several is None else several.each[0].meaning,
        config.roles if earlier is None else _columns_as_then(config, earlier, scan.schema(files["train"][0]).names),
        splits.parse(config.split, [split for split in files if split != "train"], config._named),
        config.split_seed,
        config.time,
        config.group,
        config.split_column,
        several,
        row_filter.parse(config.where),
        (config.user, config.item) if config.item else (),
        wording,
    )
    reader = TableReader(files, choices)
    if earlier is not None:
        reader.use_specs(earlier.adopted(reader.specs))
    if reader.proposals:
        log.info(proposals.to_text(reader.proposals, config.columns, wording))
    return reader


def _columns_as_then(config: Table, earlier: EarlierData, names: Sequence[str]) -> tuple[str, ...]:
    """`Table.roles`, in which columns that nothing is asked of have the roles that they had in earlier data.

    Args:
      config: the options.
      earlier: those data.
      names: of the columns that there are.
    """
    auto, requests = roles.parse(config.roles)
    if not auto:
        return config.roles
    requests = roles.by_names(requests, names)
    several = labels.parse(config.label)
    of_labels = (items.unquote(config.label),) if several is None else several.columns
    taken = {*requests, config.time, config.group, config.split_column, *of_labels}
    crosses = {spec.name: spec.sources for spec in earlier.specs if spec.role == "cross"}
    then = roles.texts_of(earlier.specs)
    skipped = {name: roles.column_text(name, "skip") for name in earlier.table.get("names", ()) if name not in then}
    more = {
        name: text
        for name, text in (then | skipped).items()
        if name not in taken and (name in names or (name in crosses and set(crosses[name]) <= set(names)))
    }
    return (*config.roles, *more.values())


def prepare_files(
    config: Table,
    source: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    wording: Wording = Wording.COMMAND,
    *,
    overwrite: bool = False,
) -> PreparedSource:
    """Prepares the files of a table; arguments and errors are those of `open_raw` and `prepare_table`."""
    with config.tables(_files(config, _source(config, source)), located(out)) as files:
        reader = open_files(config.as_read(), files, wording)
        reader.splits = config.split_in_words or reader.splits
        return prepare_table(config, reader, out, overwrite=overwrite)


def prepare_table(
    config: Table, reader: TableReader, out: str | os.PathLike[str], *, overwrite: bool = False
) -> PreparedSource:
    """`prepare_as`, with a description of the columns by which raw rows are read later."""
    own = any(spec.transform for spec in reader.specs)
    by_name = [spec.transform or config.dense for spec in reader.specs for _ in spec.dense_names]
    dense = cast(tuple[DenseTransform, ...], tuple(by_name)) if own else None
    proposed = {name: [one.role, one.why] for name, one in reader.proposals.items()}
    described: dict[str, Any] = {"columns": roles.to_json(reader.specs), "proposed": proposed, "names": reader.names}
    reader.name = config.kind
    if reader.conditions:
        described["where"] = {"conditions": [each.text for each in reader.conditions], "left_out": reader.left_out}
    if reader.labels:
        described["labels"] = reader.described_labels
    elif reader.label_group:
        described["label_column"] = reader.label_column
    more = {"table": described}
    return prepare_as(config, reader, out, dense=dense, more=more, overwrite=overwrite, earlier=config.earlier())


def prepare_object(
    config: Table,
    data: Any,
    out: str | os.PathLike[str],
    *,
    validation: Any = None,
    test: Any = None,
    overwrite: bool = False,
) -> PreparedSource:
    """Prepares a table that Python holds; arguments are those of `recjax.prepare`, and what is raised."""
    given = {"train": data, "validation": validation, "test": test}
    given = {split: table for split, table in given.items() if table is not None or split == "train"}
    if both := [split for split in given if split in config.apart]:
        raise ConfigError(f"{both[0]} is given as a table and as files. Give one of them.")
    place = located(out)
    with folder_beside(place) as folder:
        files = {}
        for split, table in given.items():
            title = "the table" if split == "train" else f"the {split} table"
            files[split] = [spool(table, folder / f"{split}.arrow", title)]
        files |= {split: scan.find(getattr(config, split), config.delimiter, config.encoding) for split in config.apart}
        if not config.apart and config.encoding != scan.UTF_8:
            raise ConfigError(f"encoding={config.encoding} is of CSV files, and the table is none. Leave it out.")
        return prepare_table(config, open_files(config, files, Wording.PYTHON), place, overwrite=overwrite)


def _files(config: Table, source: str | os.PathLike[str]) -> dict[str, list[TableFile]]:
    places = {"train": source} | {split: getattr(config, split) for split in config.apart}
    return {split: scan.find(place, config.delimiter, config.encoding) for split, place in places.items()}


def prepare_further(source: str | os.PathLike[str], earlier: EarlierData) -> PreparedSource:
    """Prepares rows that a run goes on with, in the cache: all as training rows, by the columns that it was trained on.

    Values that the run knows keep their rows, and new ones get rows after these.

    Args:
      source: as `Table.from_`.
      earlier: the data that the run was trained on last, of a table of one's own.

    Raises:
      ConfigError: a format that is not known.
      DataError: the files are at fault.
      TrainingError: the cache folder cannot be written.
    """
    files, about = further_files(source, earlier), earlier.source.about
    digest = hashlib.sha256(json.dumps([_VERSION, FORMAT, earlier.sha256, [sha256(f.path) for f in files]]).encode())
    folder = cache_folder() / f"more-{_stem(os.fspath(source))}-{digest.hexdigest()[:16]}"
    with contextlib.ExitStack() as stack:
        if (there := cached(folder, Table.kind)) is None:
            _wait(folder, stack)
            there = cached(folder, Table.kind)
        return there or prepare_data(
            LabelledReader(files, earlier.source),
            folder,
            ids=options_of_ids(about["encoder"]["ids"]),
            dense=earlier.encoder.by.transform,
            missing_indicators=earlier.encoder.by.indicators,
            options=about["options"],
            more={"table": earlier.table},
            overwrite=True,
            earlier=earlier,
            keep_values=True,
        )


def further_files(source: str | os.PathLike[str], earlier: EarlierData) -> list[TableFile]:
    """The files of such rows, in the delimiter and encoding of those that the run was trained on."""
    options = earlier.source.about.get("options", {})
    return scan.find(source, options.get("delimiter", ""), options.get("encoding", scan.UTF_8))


def _stem(source: str) -> str:
    """A short name for the data of a file."""
    name = PurePath(source).name.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40].strip("-") or "files"
