"""Files of raw rows to predict on, read in their own order, with or without labels.

JSON Lines for every dataset but Avazu that was prepared from raw rows: an object a line that holds each raw column by
name. Beside it the text of the dataset itself where that is one file of rows (Criteo, Avazu), and of a table of one's
own the formats that it may have.

A value that a row lacks (null; nothing between two separators) gets what training had for it: the row of missing values
of an optional feature, else that of values which the vocabulary does not hold.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from recjax.data.arrow.convert import MOST_BYTES
from recjax.data.arrow.scan import UTF_8
from recjax.data.datasets import ratings
from recjax.data.datasets.avazu import Avazu, read_unlabelled
from recjax.data.datasets.criteo import MISSING, Criteo1TB, CriteoKaggle, as_categories
from recjax.data.datasets.movielens import MovieLens
from recjax.data.datasets.movietweetings import MovieTweetings
from recjax.data.prepare.chunk import Chunk, Column, RawFeature, Unlabelled
from recjax.data.prepare.dense_columns import FLOAT32, fits_float32
from recjax.data.prepare.encoder import Encoder
from recjax.data.text.criteo_lines import CATEGORIES, DENSE, FIELDS, fault, parse
from recjax.data.text.source_files import whole_lines
from recjax.errors import ConfigError, DataError
from recjax.serving import table_rows
from recjax.serving.faults import RowFaults, missing_key
from recjax.utils import strict_json

_T = TypeVar("_T")
_PIECE_BYTES = 1 << 21  # of text read at once
_JSON_ROWS = 8192  # lines in a chunk
_HEX = re.compile("[0-9a-fA-F]{1,8}")
_WHOLE_FLOAT = re.compile(rb"(-?[0-9]+)\.0+")  # so pandas writes integers of a column in which some are missing
_MOST_EXACT = 2**53  # beyond it floats leave integers out

# What raw rows of a dataset hold where a value is not known, for those whose training rows never miss one.
UNKNOWN: dict[str, Mapping[str, int]] = {MovieTweetings.kind: ratings.UNKNOWN, MovieLens.kind: ratings.UNKNOWN}


def read(
    file: Path,
    dataset: str,
    encoder: Encoder,
    faults: RowFaults,
    carry: Sequence[str] | None = (),
    table: Mapping[str, Any] | None = None,
    encoding: str = UTF_8,
) -> Iterator[Unlabelled]:
    """The rows of a file in its order.

    Args:
      file: JSON Lines if its name ends in .jsonl, else the dataset's own text; gzipped if it ends in .gz after that.
      dataset: the dataset's name.
      encoder: of the data that the model was trained on.
      faults: takes malformed rows.
      carry: columns to hand on as they are given, whether the model knows them or not; None: all that there are.
      table: of a table of one's own what the prepared data say of its columns; Parquet, ORC, CSV and Arrow are read
        then.
      encoding: of CSV of such a table.

    Raises:
      ConfigError: the dataset has no text format that could be read row by row.
      DataError: the file cannot be read, or has no column of `carry`; or what `faults` raises: with file, line, and
        column or key.
    """
    lines_of_json = Path(file.name.removesuffix(".gz")).suffix == ".jsonl"
    if dataset == Avazu.kind:  # whose hour becomes other columns, so there is one way to write it
        if lines_of_json:
            raise ConfigError(
                f"{file}: rows of {dataset} are read as its own CSV text only, with the header of Kaggle's files; the "
                "column click may be missing. Give them so, in a file whose name does not end in .jsonl."
            )
        return read_unlabelled(file, faults, carry)
    if table is not None:
        if lines_of_json:  # which is UTF-8 by its definition
            return json_lines_of_table(file, table, faults, carry)
        return table_rows.read(file, table, faults, carry, encoding)
    bucketed = dataset == CriteoKaggle.kind and MISSING in encoder.dense
    if lines_of_json and bucketed:
        raise ConfigError(
            f"{file}: rows of {dataset} with data.integers=categories are read as lines of the log only, which hold "
            "the integers themselves. Give them so, in a file whose name does not end in .jsonl."
        )
    if lines_of_json:
        return json_lines(file, encoder, faults, carry, UNKNOWN.get(dataset, {}))
    if dataset in (CriteoKaggle.kind, Criteo1TB.kind):
        return criteo(file, faults, carry, bucketed)
    raise ConfigError(
        f"{file}: rows of {dataset} are read as JSON Lines only, from a file whose name ends in .jsonl (or .jsonl.gz): "
        f"an object a line with the keys {', '.join(_keys(encoder))}. From pandas: "
        'frame.to_json("rows.jsonl", orient="records", lines=True).'
    )


def _keys(encoder: Encoder) -> list[str]:
    return list(dict.fromkeys((*(feature.name for feature in encoder.features), *encoder.dense)))


def criteo(
    file: Path, faults: RowFaults, carry: Sequence[str] | None = (), bucketed: bool = False
) -> Iterator[Unlabelled]:
    """Lines of the Criteo logs; a file whose first line has 39 fields is one without labels.

    With `bucketed`, integers become categories: see `criteo.as_categories`.
    """
    said: bool | None = None
    for first_line, text in _pieces(file):
        said = _is_bare(text) if said is None else said
        bare = said or False
        columns = ([] if bare else ["label"]) + [*DENSE, *CATEGORIES]
        if strange := [name for name in carry or () if name not in columns]:
            raise DataError(f"{file} has no column {strange[0]!r} to carry. Its columns are {', '.join(columns)}.")
        whole = b"0\t" + text[:-1].replace(b"\n", b"\n0\t") + b"\n" if bare else text
        lines, numbers = text.split(b"\n")[:-1], np.arange(first_line, first_line + text.count(b"\n"))
        rows = parse(whole)
        if rows is None:
            kept = _mended(file, first_line, whole, bare, faults)
            lines, numbers = [lines[i] for i in kept], numbers[list(kept)]
            rows = parse(b"".join(line + b"\n" for line in kept.values()))
        if rows is None or not len(lines):
            continue
        fields = [line.split(b"\t") for line in lines] if carry != () else []
        carried = {
            name: [row[columns.index(name)].decode("utf-8", "backslashreplace") for row in fields]
            for name in (columns if carry is None else carry)
        }
        found = {
            name: Column(keys, None, missing)
            for name, keys, missing in zip(CATEGORIES, rows.keys, rows.missing, strict=True)
        }
        dense, found = as_categories(rows.dense, found) if bucketed else (rows.dense, found)
        labels = np.zeros(len(lines), np.float32)
        yield Unlabelled(Chunk(labels, dense, found, np.zeros(len(lines), np.uint8)), numbers, carried)


def _is_bare(text: bytes) -> bool | None:
    """Returns whether lines have no label: as the first one that has as many fields as either; None if none has."""
    tabs = (line.count(b"\t") for line in text.split(b"\n"))
    first = next((count for count in tabs if FIELDS - 2 <= count <= FIELDS - 1), None)
    return None if first is None else first == FIELDS - 2


def _mended(file: Path, first_line: int, text: bytes, bare: bool, faults: RowFaults) -> dict[int, bytes]:
    """The lines (by their number in `text`, from 0) that can be parsed, once 6.0 is written 6; others are reported."""
    kept = {}
    for number, line in enumerate(text.split(b"\n")[:-1]):
        fields = line.split(b"\t")
        integers = [match[1] if (match := _WHOLE_FLOAT.fullmatch(f)) else f for f in fields[: 1 + len(DENSE)]]
        line = b"\t".join([*integers, *fields[1 + len(DENSE) :]])
        wrong = fault(line)
        if wrong is None:
            kept[number] = line
            continue
        what = wrong.text
        if wrong.kind == "field count":
            what = f"the line has {len(fields) - bare} field(s) instead of {FIELDS - bare}, as the first has them"
        elif bare:  # the columns of the user's file have one less in front of them
            what = re.sub(r"\(column (\d+)\)", lambda match: f"(column {int(match[1]) - 1})", what)
        faults.report(file, first_line + number, wrong.kind, f"{what}. Mend the line.")
    return kept


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    return whole_lines(file, _PIECE_BYTES, "It must hold a row a line.")


class WrongRowError(ValueError):
    """A row that cannot be encoded; the message says why and what to do."""


def json_lines(
    file: Path,
    encoder: Encoder,
    faults: RowFaults,
    carry: Sequence[str] | None = (),
    unknown: Mapping[str, int] | None = None,
) -> Iterator[Unlabelled]:
    """Objects with the raw columns: a value, null where it is missing; a list of values for a feature with bags.

    Args:
      file: the file.
      encoder: of the data that the model was trained on.
      faults: takes malformed rows.
      carry: keys to hand on, null in rows without them; None: those of the first row.
      unknown: raw column -> what stands for null.
    """
    reader = RowReader(encoder, unknown or {})
    for _, values, numbers, carried in _objects(file, faults, carry, reader.values):
        yield Unlabelled(reader.chunk(values), numbers, carried)


def json_lines_of_table(
    file: Path, table: Mapping[str, Any], faults: RowFaults, carry: Sequence[str] | None = ()
) -> Iterator[Unlabelled]:
    """The same of a table of one's own; `table` is what the prepared data say of its columns."""
    specs = table_rows.features(table)

    def check(row: dict[str, Any]) -> None:
        try:
            row |= table_rows.with_fields(row, specs)
        except ValueError as error:
            raise WrongRowError(str(error)) from None
        if what := table_rows.fault_of(row, specs):
            raise WrongRowError(what)

    for objects, _, numbers, carried in _objects(file, faults, carry, check):
        yield from table_rows.of_objects(file, objects, numbers, table, carried, faults)


def _objects(
    file: Path, faults: RowFaults, carry: Sequence[str] | None, take: Callable[[dict[str, Any]], _T]
) -> Iterator[tuple[list[dict[str, Any]], list[_T], np.ndarray, dict[str, list[Any]]]]:
    """Yields objects, what `take` makes of each, their lines, int64, and what is carried of them."""
    lines = ((first + i, line) for first, text in _pieces(file) for i, line in enumerate(text.split(b"\n")[:-1]))
    names: Sequence[str] | None = None
    strange: list[str] = []
    while batch := list(itertools.islice(lines, _JSON_ROWS)):
        objects, numbers, values = [], [], []
        for line, text in batch:
            try:
                row = _object(text)
                values.append(take(row))
            except WrongRowError as wrong:
                faults.report(file, line, "row", str(wrong))
                continue
            objects.append(row)
            numbers.append(line)
        if not objects:
            continue
        if names is None:
            names = list(objects[0]) if carry is None else carry
            strange = [name for name in names if not any(name in row for row in objects)]
        if strange:
            raise DataError(
                f"{file}: no row from line {numbers[0]} to {numbers[-1]} has the key {strange[0]!r}, which is to be "
                f"carried. The first of them has {', '.join(objects[0])}."
            )
        carried = {name: [row.get(name) for row in objects] for name in names}
        yield objects, values, np.array(numbers, np.int64), carried


class RowReader:
    """Takes objects apart: values for each feature, and numbers for dense columns."""

    def __init__(self, encoder: Encoder, unknown: Mapping[str, int], only: Collection[str] | None = None) -> None:
        """Reads all raw columns of an encoder's data, or those in `only`; for `unknown` see `json_lines`."""
        self._features = [f for f in encoder.features if only is None or f.name in only]
        self._dense = [name for name in encoder.dense if only is None or name in only]
        self._unknown = unknown
        self._names = list(dict.fromkeys((*(feature.name for feature in self._features), *self._dense)))
        self._never_missing = {f.name for f in encoder.features if encoder.missing_row(f.name) is None}

    def values(self, row: Mapping[str, Any]) -> tuple[list[list[int | bytes | None]], list[float]]:
        """The keys of each feature of a row, None where one is missing; and the dense values.

        Raises:
          WrongRowError: saying why it is malformed.
        """
        for name in self._names:
            if name not in row:
                raise WrongRowError(missing_key(name, row))
        return (
            [self._bag(self._known(row, feature.name), feature) for feature in self._features],
            [_number(self._known(row, name), name) for name in self._dense],
        )

    def _known(self, row: Mapping[str, Any], name: str) -> Any:
        return self._unknown.get(name) if row[name] is None else row[name]

    def _bag(self, value: Any, feature: RawFeature) -> list[int | bytes | None]:
        name = feature.name
        if feature.jagged and value is None:
            return []
        bag = value if feature.jagged else [value]
        if not isinstance(bag, list):
            raise WrongRowError(f"{name!r} is {_shown(value)}, not a list of values. Write [{_shown(value)}].")
        keys = [None if _is_missing(item, feature) else _fitting(item, feature) for item in bag]
        if None in keys and name in self._never_missing:
            raise WrongRowError(
                f"{name!r} is null, but every training row had one, and ids=hash and ids=modulo leave no row of the "
                "table to unknown values. Give a value."
            )
        return keys

    def chunk(self, values: Sequence[tuple[list[list[int | bytes | None]], list[float]]]) -> Chunk:
        """Joins what `values` gave for n rows."""
        n = len(values)
        columns = {f.name: _column([bags[i] for bags, _ in values], f) for i, f in enumerate(self._features)}
        dense = np.array([numbers for _, numbers in values], np.float64).reshape(n, -1)
        return Chunk(np.zeros(n, np.float32), dense, columns, np.zeros(n, np.uint8))


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse(text)
    except strict_json.JsonError as error:
        raise WrongRowError(f"{error}. Give one object a line.") from None
    if not isinstance(value, dict):
        raise WrongRowError(f"{text[:80].decode('utf-8', 'replace')!r} is no JSON object. Give one object a line.")
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def _number(value: Any, name: str) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_float32(value):
        raise WrongRowError(f"{name!r} is {_shown(value)}, not {FLOAT32}. Correct the value, or give null.")
    return float(value)


_FORMS = {
    "integer": "an integer of 64 bits",
    "hex": "text of 1 to 8 hexadecimal digits",
    "text": f"text (Unicode without NUL, at most {MOST_BYTES:,} bytes)",
}  # what the values of a feature are -> how they are written


def _is_missing(item: Any, feature: RawFeature) -> bool:
    """Returns whether a value is none; where texts may be missing, the raw data have an empty one then."""
    return item is None or (item == "" and feature.optional and feature.values == "text")


def _fitting(item: Any, feature: RawFeature) -> int | bytes:
    """The key of a value."""
    values = feature.values
    if values == "integer":
        if type(item) is float and item.is_integer() and abs(item) < _MOST_EXACT:  # as pandas writes it beside nulls
            item = int(item)
        if type(item) is int and -(2**63) <= item < 2**63:
            return item
    elif type(item) is str:
        if values == "hex" and _HEX.fullmatch(item):
            return int(item, 16)
        if values == "text" and "\0" not in item and len(key := item.encode()) <= MOST_BYTES:
            return key
    raise WrongRowError(
        f"{feature.name!r} is {_shown(item)}, not {_FORMS[values]}. Correct the value, or give null where it is "
        "missing."
    )


def _column(bags: Sequence[list[int | bytes | None]], feature: RawFeature) -> Column:
    empty: int | bytes = b"" if feature.values == "text" else 0
    keys = [key for bag in bags for key in bag]
    missing = np.array([key is None for key in keys], bool)
    return Column(
        np.array([empty if key is None else key for key in keys], np.bytes_ if feature.values == "text" else np.int64),
        np.array([len(bag) for bag in bags], np.int32) if feature.jagged else None,
        missing if missing.any() else None,
    )
