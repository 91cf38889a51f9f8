"""Files of JSON lines, an object a line, as columns of a few of its keys; some megabytes at a time.

Arrow parses what is as it should be. It does not say which line is at fault, and takes several objects on one line (and
a lone `null`, over which Arrow 26 crashes), so that a piece in which anything is wrong is read again line by line.
pyarrow is imported inside the functions, for it is slow to load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recjax.data.text.fields import Faults
from recjax.data.text.source_files import whole_lines

_PIECE_BYTES = 2**23
_LONGEST = 2**26  # bytes of a line; the longest of Yelp's, of users with many friends, have less than one million

Kind = Literal["text", "number"]


class Objects:
    """Consecutive lines of a file, as columns of n rows.

    Attributes:
      lines: the line of each row, from 1: int64 [n].
      ok: whether nothing was found wrong with the row so far: bool [n]. All true where faults raise.
    """

    def __init__(self, file: Path, lines: np.ndarray, columns: Mapping[str, Any], faults: Faults) -> None:
        """Rows of `columns`: key -> Arrow array of string or float64, null where the key is absent or null."""
        self._file, self._columns, self._faults = file, columns, faults
        self.lines, self.ok = lines, np.ones(len(lines), bool)

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, name: str, *, optional: bool = False) -> Any:
        """The texts of a key: an Arrow string array [n], null where missing. NUL and, unless optional, null are faults.

        (NumPy drops a NUL at the end of a text, and two texts would become one.)
        """
        import pyarrow.compute as pc

        values = self._columns[name]
        with_nul = np.asarray(pc.fill_null(pc.match_substring(values, "\0"), False).to_numpy(zero_copy_only=False))
        self.refuse(with_nul, name, "with a NUL character in it")
        if not optional:
            empty = np.asarray(pc.fill_null(pc.equal(values, ""), True).to_numpy(zero_copy_only=False))
            self.refuse(empty, name, "missing or empty")
        return values

    def numbers(self, name: str, least: float, most: float, *, optional: bool = False) -> np.ndarray:
        """The numbers of a key: float64 [n], within a range; a missing one is NaN if optional, else a fault."""
        values = np.asarray(self._columns[name].to_numpy(zero_copy_only=False), np.float64)
        wrong = ~((values >= least) & (values <= most))
        if optional:
            wrong &= ~np.asarray(self._columns[name].is_null())
        self.refuse(wrong, name, f"not a number from {least:g} to {most:g}")
        return values

    def seconds(self, name: str) -> np.ndarray:
        """Times like 2018-07-07 22:09:11, or days like 2018-07-07: int64 [n], seconds since 1970."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = self.text(name)
        times = pc.strptime(texts, "%Y-%m-%d %H:%M:%S", "s", error_is_null=True)
        if times.null_count:
            times = pc.coalesce(times, pc.strptime(texts, "%Y-%m-%d", "s", error_is_null=True))
        # strptime takes a day 30 of February for one of March, and a 7 for 07.
        whole = pc.binary_length(pc.fill_null(texts, ""))
        seconds = np.asarray(pc.fill_null(times.cast(pa.int64()), -1).to_numpy(zero_copy_only=False))
        back = pc.strftime(pa.array(seconds.astype("datetime64[s]")), "%Y-%m-%d %H:%M:%S")
        same = pc.or_(
            pc.and_(pc.equal(whole, 19), pc.equal(back, texts)),
            pc.and_(pc.equal(whole, 10), pc.equal(pc.utf8_slice_codeunits(back, 0, 10), texts)),
        )
        wrong = ~np.asarray(pc.fill_null(same, False).to_numpy(zero_copy_only=False)) | (seconds < 0)
        self.refuse(wrong, name, "not a time like 2018-07-07 22:09:11")
        return seconds

    def refuse(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Reports the rows where `wrong` (bool [n]) as faults of the key `name`."""
        for row in np.flatnonzero(wrong & self.ok).tolist():
            shown = json.dumps(self._columns[name][row].as_py())[:80]
            self._faults.report(self._file, int(self.lines[row]), name, f"{name!r} is {shown}, {reason}.")
            self.ok[row] = False


def read_objects(file: Path, columns: Mapping[str, Kind], faults: Faults) -> Iterator[Objects]:
    """The objects of a file of JSON lines, gzipped if its name ends in .gz.

    Args:
      file: the file; larger than memory, for all that this function cares.
      columns: the keys to read, and what their values must be if they are not null. Other keys may hold anything.
      faults: takes malformed lines.

    Raises:
      DataError: missing, unreadable, truncated or empty, or what `faults` raises.
    """
    for first, text in whole_lines(file, _PIECE_BYTES, "Download or copy it again.", _LONGEST):
        parsed = _parsed(text, columns)
        lines = first + np.arange(text.count(b"\n"))
        if parsed is None:
            parsed, good = _line_by_line(file, first, text, columns, faults)
            lines = lines[good]
        yield Objects(file, lines, parsed, faults)


def _parsed(text: bytes, columns: Mapping[str, Kind]) -> dict[str, Any] | None:
    """The columns of whole lines; None if anything is wrong with them, or may be."""
    import pyarrow as pa
    import pyarrow.json

    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends == starts).any() or (data[starts] != ord("{")).any() or (data[ends - 1] != ord("}")).any():
        return None
    types = {"text": pa.string(), "number": pa.float64()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(text),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        table.validate(full=True)  # that texts are UTF-8, too
    except pa.ArrowInvalid:
        return None
    if table.num_rows != len(ends):
        return None
    return {name: table[name].combine_chunks() for name in columns}


def _line_by_line(
    file: Path, first: int, text: bytes, columns: Mapping[str, Kind], faults: Faults
) -> tuple[dict[str, Any], np.ndarray]:
    """The columns of the good lines, and which those are: bool [lines]."""
    import pyarrow as pa

    values: dict[str, list[Any]] = {name: [] for name in columns}
    good = []
    for number, line in enumerate(text.split(b"\n")[:-1], first):
        wrong, found = _object(line, columns)
        if wrong:
            faults.report(file, number, "JSON", wrong)
        else:
            for name in columns:
                values[name].append(found[name])
        good.append(not wrong)
    types = {"text": pa.string(), "number": pa.float64()}
    return {name: pa.array(values[name], types[kind]) for name, kind in columns.items()}, np.array(good, bool)


def _object(line: bytes, columns: Mapping[str, Kind]) -> tuple[str, dict[str, Any]]:
    """(what is wrong with a line, or nothing; the values of its keys)."""
    try:  # not strict_json: what other keys hold is no fault here, as it is none to Arrow
        found = json.loads(line, object_pairs_hook=_Pairs)
    except RecursionError:
        return "the object is nested too deeply.", {}
    except ValueError as error:
        return f"not valid JSON ({' '.join(str(error).split())[:100]}).", {}
    if not isinstance(found, _Pairs):
        return f"{line[:80].decode('utf-8', 'replace')!r} is no JSON object.", {}
    values: dict[str, Any] = dict.fromkeys(columns)
    seen = set()
    for name, value in found:
        if name not in columns:
            continue
        if name in seen:
            return f"the key {name!r} stands twice in the object.", {}
        seen.add(name)
        if value is None:
            continue
        if columns[name] == "text":
            if not isinstance(value, str) or not _is_unicode(value):
                return f"{name!r} is no text.", {}
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{name!r} is no number.", {}
        else:
            value = _float(value)
        values[name] = value
    return "", values


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, in their order: a key that stands twice is not lost."""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write
        return False
    return True


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # as Arrow has it
        return math.inf
