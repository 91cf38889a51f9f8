"""Protocol between a dataset's reader and the preparation: chunks of raw rows, parsed but not yet encoded.

A reader knows its files and their faults, and nothing of vocabularies; `prepare.py` knows vocabularies, and
nothing of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from recjax.data.prepare.dense_columns import FLOAT32, fits_float32
from recjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class RawFeature:
    """One categorical column of the raw data.

    Attributes:
      name: unique among the reader's features; becomes the name in the schema.
      jagged: rows have bags of any size, empty ones too; else every row has one value.
      optional: values may be missing, so the table gets a row that stands for "missing".
      values: what they are: integers, text, or integers that the raw data write as 1 to 8 hexadecimal digits.
      min_count: values that the training split holds fewer times are out of vocabulary, whatever `Frequency` allows.
      like: name of another feature, equally optional and with values of the same kind, whose vocabulary it shares; "":
        it has its own. The values of both are counted together, and min_count is that of the other.
      group: name of the group of aligned features that a jagged one is of (`recjax.data.batch.ElementGroup`); "": none.
    """

    name: str
    jagged: bool = False
    optional: bool = False
    values: Literal["integer", "hex", "text"] = "integer"
    min_count: int = 1
    like: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """The values of one categorical column for n rows.

    Attributes:
      keys: the exact value of every entry, [n], or [L] (all bags end to end) if jagged: integers of one dtype for all
        chunks, or bytes of fixed width (dtype "S", UTF-8, any width) for text. What stands where `missing` is true
        does not matter.
      lengths: int32 [n] with sum L if the feature is jagged, else None.
      missing: bool of the shape of `keys`, true where the field is empty; None if none is.
    """

    keys: np.ndarray
    lengths: np.ndarray | None = None
    missing: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Coded:
    """The same, dictionary coded: what all later stages work on, so that they cost per distinct value and not per row.

    Attributes:
      values: the D distinct values, ascending, [D].
      codes: index into `values` of every entry, D where it is missing; unsigned [n], or [L] if jagged.
      lengths: int32 [n] if jagged, else None.
    """

    values: np.ndarray
    codes: np.ndarray
    lengths: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """n raw rows in the order of the files; some 10,000 to 1,000,000 rows keep all stages efficient.

    Attributes:
      labels: float32 [n], 0 or 1; of several labels (`Reader.labels`) [n, T].
      dense: float32 or float64 [n, K] in the order of the reader's `dense`; NaN is a missing value.
      columns: feature name -> its values, for every feature of the reader.
      split: uint8 [n], index into `recjax.data.source.SPLITS`.
      weights: float32 of the shape of `labels`, or None for ones.
      skipped: what `on_error=skip` left out of this chunk: kind of fault -> lines.
      done: share of all files that is read when this chunk is (0 to 1), for the time left; None if unknown.
      label_lengths: None, or int32 [n]: how many elements of each row have labels (`Reader.label_group`), which then
        lie end to end.
    """

    labels: np.ndarray
    dense: np.ndarray
    columns: Mapping[str, Column | Coded]
    split: np.ndarray
    weights: np.ndarray | None = None
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    done: float | None = None
    label_lengths: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.split)


@dataclasses.dataclass(frozen=True)
class Unlabelled:
    """Rows of a file that are only to be scored.

    Attributes:
      chunk: the n rows; labels and splits are 0.
      numbers: which rows of the file they are, counted from 1, ascending: int64 [n].
      carried: columns to hand on: name -> the n values as the file has them.
    """

    chunk: Chunk
    numbers: np.ndarray
    carried: Mapping[str, Sequence[Any]]


class Columns(Protocol):
    """Columns that a reader reads and an encoder takes.

    Attributes:
      name: the dataset's name, as in `recjax data prepare NAME`.
      dense: names of the K dense columns. One that is also a feature's is one raw column, used in two ways.
      features: the categorical columns, in the order of the schema.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (described above)

    @property
    def dense(self) -> Sequence[str]: ...  # noqa: D102 (described above)

    @property
    def features(self) -> Sequence[RawFeature]: ...  # noqa: D102 (described above)


class Reader(Columns, Protocol):
    """Reads the raw files of one dataset.

    What it yields must be a pure function of the files' content and the reader's options, chunk boundaries included:
    an interrupted preparation goes on at a chunk's number.

    Attributes:
      label: what label 1 means, in words.
      splits: the split convention, in words.
      labels: several labels; a reader of one binary label need not have it.
      label_group: the group whose elements have labels; a reader of labels of rows need not have it.
      lines: transforms of the dense columns, where the options leave no choice; a reader need not have them.
      about: what else the prepared data shall tell of themselves, JSON values; likewise.
    """

    @property
    def label(self) -> str: ...  # noqa: D102 (described above)

    @property
    def splits(self) -> str: ...  # noqa: D102 (described above)

    def files(self) -> Mapping[str, str]:
        """File name -> sha256 (hex) of every raw file; may take a pass over them. Called beside `chunks`, in a thread.

        Raises:
          DataError: a file is missing or unreadable.
        """
        ...

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones.

        Raises:
          DataError: a malformed line (with file, line and column) unless the options say to skip it, or a file that
            cannot be read to its end.
        """
        ...


def check_chunk(chunk: Chunk, columns: Columns, may_miss: Collection[str] = ()) -> None:
    """Refuses a chunk that does not have these columns in the shapes and types described above.

    Args:
      chunk: the chunk.
      columns: the columns.
      may_miss: features whose values may be missing beside the optional ones.

    Raises:
      DataError: naming the column.
    """
    name, dense, features = columns.name, columns.dense, columns.features
    n = chunk.rows
    if chunk.labels.dtype != np.float32 or chunk.split.dtype != np.uint8:
        raise DataError(f"{name}: labels are {chunk.labels.dtype} and split {chunk.split.dtype}, not float32, uint8.")
    labelled = n if chunk.label_lengths is None else int(chunk.label_lengths.sum())
    if len(chunk.labels) != labelled:
        raise DataError(
            f"{name}: a chunk has labels {chunk.labels.shape} and split {chunk.split.shape}, where {n} rows ask for "
            f"{labelled} labels."
        )
    if chunk.split.shape != (n,) or chunk.dense.shape != (n, len(dense)):
        raise DataError(
            f"{name}: a chunk of {n} rows has split {chunk.split.shape} and dense {chunk.dense.shape}, where they must "
            f"be ({n},) and ({n}, {len(dense)})."
        )
    if not (fine := fits_float32(chunk.dense) | np.isnan(chunk.dense)).all():
        row, at = np.argwhere(~fine)[0].tolist()
        raise DataError(
            f"{name}: column {dense[at]!r} is {chunk.dense[row, at]} in row {row} of a chunk of {n}, not {FLOAT32}. "
            "Correct the value."
        )
    for feature in features:
        column = chunk.columns.get(feature.name)
        keys = column.values if isinstance(column, Coded) else None if column is None else column.keys
        kinds, wanted = ("S", "bytes") if feature.values == "text" else ("iu", "integers")
        if column is None or keys is None or keys.ndim != 1 or keys.dtype.kind not in kinds:
            raise DataError(f"{name}: column {feature.name!r} ({feature.values}) needs keys [n] of {wanted}.")
        if isinstance(column, Coded):
            held, missing = len(column.codes), column.codes == len(column.values)
        else:
            held, missing = len(column.keys), column.missing
        entries = n if column.lengths is None else int(column.lengths.sum(dtype=np.int64))
        if (column.lengths is None) == feature.jagged or held != entries:
            raise DataError(
                f"{name}: column {feature.name!r} (jagged={feature.jagged}) has {held} keys where {n} rows "
                f"ask for {entries}."
            )
        if missing is not None and missing.shape != (held,):
            raise DataError(f"{name}: column {feature.name!r} has {len(missing)} marks for {entries} keys.")
        may = feature.optional or feature.name in may_miss
        if missing is not None and missing.any() and not may:
            raise DataError(f"{name}: column {feature.name!r} has no value in a row, but every row must have one.")
        if feature.name in dense and not _same(chunk.dense[:, dense.index(feature.name)], column):
            raise DataError(
                f"{name}: {feature.name!r} is a dense column and a feature, but their raw values differ. Give both the "
                "same values, or name one of them otherwise."
            )


def _same(dense: np.ndarray, column: Column | Coded) -> bool:
    if isinstance(column, Coded):
        column = Column(np.append(column.values, 0)[column.codes], None, column.codes == len(column.values))
    if column.keys.dtype.kind == "S":
        return False
    keys = column.keys if column.missing is None else np.where(column.missing, np.nan, column.keys)
    return np.array_equal(dense, keys, equal_nan=True)
