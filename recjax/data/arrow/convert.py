"""Arrow arrays as what the preparation works on: dictionary coded keys, numbers, bags. Faults are marks, not errors.

What counts as missing is the same in every format: null, NaN and empty text; and where a text column holds numbers or
times, `NA` and its kin. Everything is done on distinct values where that is less work.
"""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal

import numpy as np

from recjax.data.prepare import short_text
from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import codes_dtype
from recjax.data.text.fields import is_utf8

Kind = Literal["none", "boolean", "integer", "unsigned", "float", "time", "text", "other"]

MOST_BYTES = 1024  # of a text that is an id
EXACT = 2**53  # beyond it floats leave integers out
NO_NUMBER = (b"", b"NaN", b"nan", b"NA", b"N/A", b"null", b"NULL", b"None")  # where numbers stand in text
INTEGER = r"^(0|-?[1-9][0-9]{0,19})$"  # which gives its own text back; up to 2^64
_PADDED = "^[-+]?0[0-9]"  # which no number would give back
_COMMA = r"^[-+]?([0-9]+,[0-9]+|[0-9]{1,3}([.,][0-9]{3})+([.,][0-9]+)?)$"  # 3,50 or 1.234,50
_SHORT = "^-?[0-9]{1,18}$"  # what fits into 64 bits for certain
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?$"
_WHOLE = re.compile(rb"([-+]?[0-9]+)(?:\.0*)?")  # as pandas writes integers of a column in which some are missing
_LIMITS = {"boolean": (0, 2), "integer": (-(2**63), 2**63), "unsigned": (0, 2**64)}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def plain(array: Any) -> Any:
    """The same values without ways of storing them that say nothing: runs, extensions, dictionaries but those of text.

    A dictionary of text stays, with strings or bytes and no null in it: what follows works on distinct values anyway.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_dictionary(kind):
        given = array.dictionary
        words = plain(given)
        if kind_of(words) != "text" or pa.types.is_dictionary(words.type) or words.null_count:
            return plain(array.dictionary_decode())
        if words is given:  # to make it again would check all indices
            return array
        return pa.DictionaryArray.from_arrays(array.indices, words)
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return array.cast(pa.string())
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    if pa.types.is_decimal(kind):
        return pc.cast(pc.cast(array, pa.string()), pa.float64())  # directly it would not give the nearest number
    if pa.types.is_float16(kind):
        return pc.cast(array, pa.float32())
    return array


def decoded(array: Any) -> Any:
    """A plain array without a dictionary."""
    import pyarrow.types as t

    array = plain(array)
    return array.dictionary_decode() if t.is_dictionary(array.type) else array


def kind_of(array: Any) -> Kind:
    """Returns the kind of the values of an array without lists, by its type."""
    return kind_of_type(array.type)


def kind_of_type(kind: Any) -> Kind:
    """Returns the kind of values of a plain type without lists."""
    import pyarrow.types as t

    kind = kind.value_type if t.is_dictionary(kind) else kind
    if t.is_boolean(kind):
        return "boolean"
    if t.is_integer(kind):
        return "unsigned" if t.is_uint64(kind) else "integer"
    if t.is_floating(kind):
        return "float"
    if t.is_timestamp(kind) or t.is_date(kind):
        return "time"
    if t.is_string(kind) or t.is_binary(kind):
        return "text"
    return "none" if t.is_null(kind) else "other"


def is_list(array: Any) -> bool:
    """Returns whether each value of a plain array is a list."""
    import pyarrow.types as t

    kind = array.type  # views are taken as they are: Arrow 26 drops entries when it casts [[null]] to a list
    views = t.is_list_view(kind) or t.is_large_list_view(kind)
    return views or t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def distinct(array: Any) -> tuple[Any, np.ndarray]:
    """The distinct values of a plain array, without null, and the index of each entry in them, -1 for null.

    Where the array had a dictionary, a value may be there twice.
    """
    import pyarrow as pa

    if kind_of(array) == "none":
        return array.slice(0, 0), np.full(len(array), -1, np.int32)
    if kind_of(array) == "other":  # structures, of which Arrow has no distinct ones
        return array, np.where(null(array), -1, np.arange(len(array)))
    if not pa.types.is_dictionary(array.type):
        coded = array.dictionary_encode()
        return coded.dictionary, coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    values, indices = array.dictionary, array.indices.cast(pa.int32())
    indices = indices.fill_null(-1) if indices.null_count else indices
    at = indices.to_numpy().astype(np.intp)  # as what follows needs them, each time
    used = np.zeros(len(values) + 1, bool)
    used[at] = True
    if used[:-1].all():
        return values, at
    ranks = np.cumsum(used) - 1
    ranks[-1] = -1
    return values.filter(pa.array(used[:-1])), ranks[at]


def words(array: Any) -> Any:
    """The values of a plain array of text, in any order and number; null and what no row holds may be among them."""
    import pyarrow.types as t

    return array.dictionary if t.is_dictionary(array.type) else array


def missing(values: Any, kind: Kind) -> np.ndarray:
    """Marks the distinct values that are none, where the column is of this kind: bool [D]."""
    found = kind_of(values)
    if found == "float":
        return np.isnan(values.to_numpy())
    if found != "text":
        return np.zeros(len(values), bool)
    return _is_in(values, NO_NUMBER[:1] if kind == "text" else NO_NUMBER)


def code(array: Any, kind: Kind) -> tuple[Coded, np.ndarray | None]:
    """Keys of a plain array as ids of this kind: "boolean", "integer", "unsigned" or "text".

    Returns:
      The coded column (without lengths), and where the value is none of the kind: bool [n]; None if it always is one.
      Such entries are coded as missing.
    """
    values, at = distinct(array)
    keys, fine, none = (_texts if kind == "text" else _integers)(values, kind)
    good = fine & ~none
    found, back = short_text.unique(keys if good.all() else keys[good])
    rank = np.full(len(keys) + 1, len(found), codes_dtype(len(found)))  # the last is of null, whose index is -1
    rank[:-1][good] = back
    wrong = np.append(~fine & ~none, False)
    return Coded(found, np.take(rank, at), None), wrong[at] if wrong.any() else None


def _texts(values: Any, _: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys of distinct values as text, S [D]; which of them can be keys, and which are missing: bool [D]."""
    import pyarrow as pa

    kind = kind_of(values)
    none = missing(values, "text")
    if kind == "text" and (keys := _fine_texts(values)) is not None:
        return keys, np.ones(len(keys), bool), none
    if kind == "text":
        texts = values.cast(pa.binary()).to_pylist()
        fine = np.array([len(v) <= MOST_BYTES and b"\0" not in v and is_utf8(v) for v in texts], bool)
    elif kind in ("integer", "unsigned", "boolean", "float"):
        texts = [_written(v).encode() for v in values.to_pylist()]
        fine = np.ones(len(texts), bool)
    else:
        texts, fine = [b""] * len(values), np.zeros(len(values), bool)
    texts = [v if good else b"" for v, good in zip(texts, fine, strict=True)]
    return np.array(texts, np.bytes_), fine, none


def _fine_texts(values: Any) -> np.ndarray | None:
    """An array of text without null as keys, S [D], in a few passes over its bytes; None where one can be no key."""
    import pyarrow as pa

    try:  # the cast of bytes and the validation of strings look for what is not UTF-8
        (values.cast(pa.string()) if pa.types.is_binary(values.type) else values).validate(full=True)
    except pa.ArrowInvalid:
        return None
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    lengths = np.diff(ends)
    width = int(lengths.max(initial=0))
    if not width:
        return np.zeros(len(values), "S1")
    text = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    if width > MOST_BYTES or not text.all():  # a NUL
        return None
    if len(text) == width * len(lengths):
        return text.view(f"S{width}")
    keys = np.zeros((len(lengths), width), np.uint8)
    keys[np.arange(width) < lengths[:, None]] = text
    return keys.ravel().view(f"S{width}")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _integers(values: Any, wanted: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same as integers: int64, or uint64 if they are wanted "unsigned"."""
    import pyarrow as pa
    import pyarrow.compute as pc

    dtype = np.uint64 if wanted == "unsigned" else np.int64
    kind, none = kind_of(values), missing(values, wanted)
    least, beyond = _LIMITS[wanted]
    if kind in ("integer", "boolean", "unsigned"):
        given = pc.cast(values, pa.uint64() if kind == "unsigned" else pa.int64()).to_numpy(zero_copy_only=False)
        fine = (given >= least) & (given < beyond) if wanted == "boolean" or kind == "unsigned" else given >= least
        return np.where(fine, given, 0).astype(dtype), fine, none
    if kind == "float":
        given = np.where(none, 0, values.to_numpy())
        fine = (given == np.floor(given)) & (np.abs(given) < EXACT) & (given >= least) & (given < beyond)
        return np.where(fine, given, 0).astype(np.int64).astype(dtype), fine, none
    if kind == "text":
        if pc.all(pc.match_substring_regex(values, _SHORT)).as_py() and wanted == "integer":
            keys = pc.cast(pc.cast(values, pa.string()), pa.int64()).to_numpy(zero_copy_only=False)
            return keys, np.ones(len(keys), bool), none
        texts = [v if isinstance(v, bytes) else v.encode() for v in values.to_pylist()]
        words = {b"true": 1, b"false": 0} if wanted == "boolean" else {}
        parsed = [words.get(v.strip().lower(), _whole(v)) for v in texts]
        fine = np.array([v is not None and least <= v < beyond for v in parsed], bool)
        keys = np.array([v if good else 0 for v, good in zip(parsed, fine, strict=True)], dtype)
        return keys, fine, none
    return np.zeros(len(values), dtype), np.zeros(len(values), bool), none


def _whole(text: bytes) -> int | None:
    match = _WHOLE.fullmatch(text.strip()) if len(text) < 80 else None
    return int(match[1]) if match else None


def numbers(array: Any, kind: Kind = "float") -> tuple[np.ndarray, np.ndarray | None]:
    """A plain array as numbers: float64 [n], NaN where missing; a time as seconds since 1970 (UTC, if it has no zone).

    Args:
      array: the array.
      kind: "time" if text is to be read as times.

    Returns:
      The numbers, and where the value is none, or infinite: bool [n]; None if it always is one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found = kind_of(array)
    if found in ("boolean", "integer", "unsigned", "float"):
        array = pc.cast(array, pa.int8()) if found == "boolean" else array
        given = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        wrong = np.isinf(given) if found == "float" else np.zeros(0, bool)
        return (np.where(wrong, np.nan, given), wrong) if wrong.any() else (given, None)
    if found == "none":
        return np.full(len(array), np.nan), None
    values, at = distinct(array)
    if found == "time":
        given, fine = _seconds(values), np.ones(len(values), bool)
    elif found != "text":
        given, fine = np.full(len(values), np.nan), np.zeros(len(values), bool)
    elif kind == "time":
        given, fine = times(values)
    else:
        trimmed = pc.utf8_trim_whitespace(_as_string(values))
        fine = _booleans(pc.match_substring_regex(trimmed, _NUMBER))
        cleaned = pc.if_else(pa.array(fine), pc.utf8_ltrim(trimmed, "+"), pa.scalar("0"))
        given = pc.cast(cleaned, pa.float64()).to_numpy(zero_copy_only=False)
        words = trimmed.to_pylist() if not fine.all() else []
        for word, number in (("true", 1.0), ("false", 0.0)):
            same = np.array([not good and v.lower() == word for good, v in zip(fine, words, strict=False)], bool)
            if same.any():
                given, fine = np.where(same, number, given), fine | same
        fine &= np.isfinite(given)
    none = missing(values, kind)
    given = np.append(np.where(fine & ~none, given, np.nan), np.nan)  # the last is of null, whose index is -1
    wrong = np.append(~fine & ~none, False)[at]
    return given[at], wrong if wrong.any() else None


def number_like(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Marks texts, bool [D] each: those that people mean as numbers; and those that no number is read from.

    Meant as one, and not read, is a number with a decimal comma or with marks between thousands. A code that begins
    with 0 is not meant as one, and is not read. What stands for a missing number is meant as one, and read.
    """
    import pyarrow.compute as pc

    text = pc.utf8_trim_whitespace(_as_string(values))
    _, wrong = numbers(values)
    unread = padded(values) if wrong is None else wrong | padded(values)
    return ~unread | values_matching(text, _COMMA) & ~padded(values), unread


def padded(values: Any) -> np.ndarray:
    """Marks texts that begin with a 0 which a number would not: bool [D]."""
    return values_matching(values, _PADDED)


def values_matching(values: Any, pattern: str) -> np.ndarray:
    """Marks texts that a pattern matches: bool [D]."""
    import pyarrow.compute as pc

    return _booleans(pc.match_substring_regex(values, pattern))


def times(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Texts as times, ISO 8601: seconds since 1970 (UTC, if there is no zone), float64 [D]; and which are: bool [D]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = _as_string(values)
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return _seconds(pc.cast(text, kind)), np.ones(len(text), bool)
        except pa.ArrowInvalid:
            continue
    given, fine = np.full(len(text), np.nan), np.zeros(len(text), bool)
    for i, value in enumerate(text.to_pylist()):
        try:
            time = datetime.datetime.fromisoformat(value.strip())
        except ValueError:
            continue
        time = time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time
        given[i], fine[i] = (time - _EPOCH).total_seconds(), True
    return given, fine


def _seconds(values: Any) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_date(values.type):
        values = pc.cast(values, pa.timestamp("ms"))
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[values.type.unit]
    return pc.cast(values, pa.int64()).to_numpy(zero_copy_only=False) / per_s


def bags(array: Any, separator: str = "") -> tuple[Any, np.ndarray]:
    """The entries of a plain array of lists, end to end, as a plain array; and how many each row has: int32 [n].

    A null list has none, and so has an empty text. Text is cut at the separator.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind_of(array) == "text":
        array = decoded(array)
        empty = pa.scalar(None, array.type)
        array = pc.split_pattern(pc.if_else(_is_empty(array), empty, array), separator)
    elif kind_of(array) == "none":
        return array.slice(0, 0), np.zeros(len(array), np.int32)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int32)
    return plain(array.flatten()), lengths


def null(array: Any) -> np.ndarray:
    """Returns a mask of the places where an array has no value at all: bool [n]."""
    return _booleans(array.is_null())


def of_rows(wrong: np.ndarray | None, lengths: np.ndarray) -> np.ndarray | None:
    """Marks of entries, bool [L], as marks of rows, bool [n]."""
    if wrong is None:
        return None
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), wrong, len(lengths)) > 0


def _is_empty(array: Any) -> Any:
    import pyarrow.compute as pc

    return pc.equal(pc.binary_length(array), 0)


def _is_in(values: Any, words: tuple[bytes, ...]) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    return _booleans(pc.is_in(values, pa.array([word.decode() for word in words], pa.string()).cast(values.type)))


def _as_string(values: Any) -> Any:
    """Texts as Arrow strings; what is not UTF-8 becomes text that is no number."""
    import pyarrow as pa

    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([v.decode("utf-8", "backslashreplace") for v in values.to_pylist()], pa.string())


def _booleans(array: Any) -> np.ndarray:
    return np.asarray(array.to_numpy(zero_copy_only=False), bool)
