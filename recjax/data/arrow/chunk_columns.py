"""Rows of Arrow columns as the raw columns of a chunk, the same for training and for rows that are only scored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from recjax.data.arrow import convert, time_parts
from recjax.data.arrow.convert import Kind
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.arrow.scan import Form
from recjax.data.prepare import short_text
from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import codes_dtype, placed
from recjax.data.prepare.dense_columns import FLOAT32, fits_float32
from recjax.data.prepare.ids import stable_hash
from recjax.data.text.fields import is_utf8

_JOINT = b"*"  # between the values of a cross


@dataclasses.dataclass(frozen=True)
class Fault:
    """Values of a column that it may not hold.

    Attributes:
      column: its name.
      rows: where they are: bool [n].
      what: what a value must be, and what to do.
    """

    column: str
    rows: np.ndarray
    what: str


@dataclasses.dataclass(frozen=True)
class RawColumns:
    """The columns of n rows.

    Attributes:
      dense: float64 [n, K], NaN where missing.
      columns: feature -> its values.
      weights: float32 [n]; None without a column of weights.
      faults: what is wrong with them; such values are as if missing.
      first_of: group of aligned columns -> its first feature.
    """

    dense: np.ndarray
    columns: dict[str, Coded]
    weights: np.ndarray | None
    faults: list[Fault]
    first_of: dict[str, str]


_WHAT = {
    "boolean": "neither true nor false",
    "integer": "not an integer of 64 bits",
    "unsigned": "not an integer from 0 to 2^64 - 1",
    "text": f"no text (UTF-8 without NUL, at most {convert.MOST_BYTES:,} bytes)",
    "float": "not a finite number",
    "time": "not a time (ISO 8601, such as 2026-11-22 20:30:00)",
}


def raw_columns(arrays: Mapping[str, Any], specs: Sequence[ColumnSpec], rows: int) -> RawColumns:
    """The columns of rows.

    Args:
      arrays: Arrow array of each column.
      specs: the columns, in the order of the schema; with a cross also all features that it joins.
      rows: n.
    """
    faults: list[Fault] = []
    dense: list[np.ndarray] = []
    columns: dict[str, Coded] = {}
    weights = None

    def note(spec: ColumnSpec, wrong: np.ndarray | None, what: str) -> None:
        if wrong is not None and wrong.any():
            faults.append(Fault(spec.columns[0], wrong, what))

    seconds: dict[str, np.ndarray] = {}  # of times, by column
    groups: dict[str, tuple[str, np.ndarray]] = {}  # group of aligned columns -> its first column, and the lengths
    for spec in specs:
        if spec.role == "cross":
            continue
        array = convert.plain(arrays[spec.columns[0]])
        kind = cast(Kind, spec.kind)
        if spec.role == "part":
            if spec.column not in seconds:
                seconds[spec.column], no_time = _seconds(array, kind, spec.per_second)
                note(spec, no_time, _WHAT["time"])
            columns[spec.name] = time_parts.coded(seconds[spec.column], spec.part, spec.zone)
        elif spec.role == "id" and spec.edges is not None:
            numbers, wrong = convert.numbers(array, kind)
            note(spec, wrong, _WHAT[kind])
            columns[spec.name] = _bucketed(numbers, spec.edges)
        elif spec.role == "id":
            coded, wrong = convert.code(array, kind)
            note(spec, wrong, _WHAT[kind])
            columns[spec.name] = _hashed(coded, spec.hashed)
        elif spec.role == "jagged":
            if not convert.is_list(array) and convert.kind_of(array) not in ("text", "none"):
                note(spec, ~convert.null(array), "not a list")
                array = array.slice(0, 0)
                lengths = np.zeros(rows, np.int32)
            else:
                array, lengths = convert.bags(array, spec.separator)
            if spec.edges is not None:
                numbers, wrong = convert.numbers(array, kind)
                coded = _bucketed(numbers, spec.edges)
            else:
                coded, wrong = convert.code(array, kind)
                coded = _hashed(coded, spec.hashed)
            note(spec, convert.of_rows(wrong, lengths), f"a list with an entry that is {_WHAT[kind]}")
            columns[spec.name] = dataclasses.replace(coded, lengths=lengths)
            if spec.group:
                first, expected = groups.setdefault(spec.group, (spec.name, lengths))
                what = f"a list of another length than that of {first!r}, which {spec.group}:list(...) has beside it"
                note(spec, lengths != expected, what)
        elif spec.role == "vector":
            matrix, wrong = _matrix(array, spec.width, rows)
            note(spec, wrong, f"not a list of {spec.width} finite numbers, each {FLOAT32}")
            dense.append(matrix)
        else:
            numbers, wrong = convert.numbers(array, kind)
            if spec.role == "weight":
                bad = np.isnan(numbers) | (numbers < 0) | (numbers > np.finfo(np.float32).max)
                note(spec, bad, "not a weight, a finite number from 0 on")
                weights = np.where(bad, 0, numbers).astype(np.float32)
            else:
                note(spec, wrong, _WHAT[kind])
                large = ~fits_float32(numbers) & ~np.isnan(numbers)
                note(spec, large, f"not {FLOAT32}")
                dense.append((np.where(large, np.nan, numbers) if large.any() else numbers)[:, None])
    for spec in specs:
        if spec.role == "cross":
            joined = _crossed([columns[source] for source in spec.sources])
            columns[spec.name] = _hashed(joined, spec.hashed)
    joined_nxK = np.concatenate(dense, axis=1) if dense else np.zeros((rows, 0))
    return RawColumns(joined_nxK, columns, weights, faults, {group: name for group, (name, _) in groups.items()})


def _seconds(array: Any, kind: Kind, per_second: int) -> tuple[np.ndarray, np.ndarray]:
    """Times as seconds since 1970, float64 [n], NaN where missing; and where a value is no time: bool [n]."""
    numbers, wrong = convert.numbers(array, kind)
    numbers = numbers / per_second
    outside = time_parts.outside(numbers)
    return numbers, outside if wrong is None else wrong | outside


def _hashed(coded: Coded, rows: int) -> Coded:
    """The same entries with `stable_hash(value) % rows` as values; as they are if rows is 0."""
    if not rows:
        return coded
    values, back = np.unique((stable_hash(coded.values) % np.uint64(rows)).astype(np.int64), return_inverse=True)
    return Coded(values, np.append(back, len(values)).astype(codes_dtype(len(values)))[coded.codes], None)


def _bucketed(numbers: np.ndarray, edges: Sequence[float]) -> Coded:
    """The buckets of numbers, [n]; none for NaN."""
    present = ~np.isnan(numbers)
    values, back = np.unique(np.searchsorted(edges, numbers[present], "right"), return_inverse=True)
    return placed(values.astype(np.int64), back, present)


def _crossed(features: Sequence[Coded]) -> Coded:
    r"""The cross of features with one value in each row: missing where one of them is.

    Its keys are text, the values with `*` between them; within text a `\` stands before each `*` and `\`, so that no
    two crosses have the same key.
    """
    return functools.reduce(_paired, [Coded(_texts(each.values), each.codes, None) for each in features])


def _paired(left: Coded, right: Coded) -> Coded:
    present = (left.codes < len(left.values)) & (right.codes < len(right.values))
    pairs = left.codes[present].astype(np.int64) * len(right.values) + right.codes[present]
    distinct, back = np.unique(pairs, return_inverse=True)
    if not len(distinct):
        return placed(np.zeros(0, "S1"), back, present)
    first, second = np.divmod(distinct, len(right.values))
    keys = np.strings.add(np.strings.add(left.values[first], _JOINT), right.values[second])
    values, rank = short_text.unique(keys)
    return placed(values, rank[back], present)


def _texts(values: np.ndarray) -> np.ndarray:
    """Values as text, S [D]."""
    if values.dtype.kind != "S":
        return values.astype(np.bytes_)
    if not (np.strings.find(values, _JOINT) >= 0).any() and not (np.strings.find(values, b"\\") >= 0).any():
        return values
    return np.strings.replace(np.strings.replace(values, b"\\", b"\\\\"), _JOINT, b"\\*")


def _matrix(array: Any, width: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as float64 [rows, width], NaN where a list is null; and where one has another width."""
    absent = convert.null(array)
    if not convert.is_list(array):
        return np.full((rows, width), np.nan), ~absent
    entries, lengths = convert.bags(array)
    values, wrong = convert.numbers(entries)
    large = ~fits_float32(values) & ~np.isnan(values)
    values = np.where(large, np.nan, values) if large.any() else values
    bad = ~absent & (lengths != width)
    if (marks := convert.of_rows(large if wrong is None else wrong | large, lengths)) is not None:
        bad |= marks
    fine = lengths == width
    matrix = np.full((rows, width), np.nan)
    matrix[fine] = values[np.repeat(fine, lengths)].reshape(-1, width)
    return matrix, bad


def first(faults: Sequence[Fault], arrays: Mapping[str, Any]) -> tuple[int, Fault, str] | None:
    """The first row that has a fault, that, and in words what stands there in the arrays; None if there are none."""
    found = [(int(np.argmax(fault.rows)), fault) for fault in faults if fault.rows.any()]
    if not found:
        return None
    at, fault = min(found, key=lambda pair: pair[0])
    return at, fault, f"column {fault.column!r} is {shown(convert.plain(arrays[fault.column])[at])}, {fault.what}"


def shown(value: Any) -> str:
    """An Arrow value as an error message shows it; of text that is not UTF-8 the bytes."""
    value = value.as_py()
    if isinstance(value, bytes) and is_utf8(value):
        value = value.decode()
    return "null" if value is None else repr(value)[:80]


def encoding_hint(value: Any, form: Form | None, option: Callable[[str, str], str]) -> str:
    """A sentence, after a blank, on what to do about an Arrow value of a text file that is not UTF-8; else "".

    Args:
      value: the value, or a list of some.
      form: the format of the file that it was read from; None if that is of no table.
      option: writes a setting as it is given, from its name and value.
    """
    value = value.as_py()
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, bytes)]
    if form != "csv" or all(map(is_utf8, texts)):
        return ""
    return f" If the file is in another encoding than UTF-8, name it: {option('encoding', 'cp1252')}."


def sliced(arrays: Mapping[str, Any], keep: np.ndarray) -> dict[str, Any]:
    """The rows of all arrays where `keep` (bool [n]) is true."""
    import pyarrow as pa

    return {name: array.filter(pa.array(keep)) for name, array in arrays.items()}


def each(specs: Sequence[ColumnSpec]) -> Iterator[str]:
    """Names of the dense columns, in their order."""
    for spec in specs:
        if spec.role in ("dense", "vector"):
            yield from spec.dense_names
