"""Fields of delimited text as columns of checked values: a fault is named with file, line and field.

What a field must be is checked when a reader asks for whole numbers, numbers or text. pyarrow is imported inside the
functions, for it is slow to load.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recjax.errors import DataError

Encoding = Literal["utf-8", "latin-1"]

_WHOLE = "^-?[0-9]{1,18}$"
_DECIMAL = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,2})?$"
_NIBBLES = np.full(256, 16, np.uint8)  # of the byte of a hexadecimal digit; 16 for other bytes
_NIBBLES[list(b"0123456789abcdef")] = np.arange(16)
_NIBBLES[list(b"ABCDEF")] = np.arange(10, 16)


class Faults:
    """Treatment of a malformed line: it stops the reading, or it is left out and counted."""

    def __init__(self, skip: bool = False) -> None:
        """With `skip` lines are left out, else the first one raises."""
        self._skip = skip
        self._counts: collections.Counter[str] = collections.Counter()

    def report(self, file: Path, line: int, kind: str, what: str) -> None:
        """One malformed line; `kind` is what it is counted as.

        Raises:
          DataError: unless lines are left out.
        """
        if not self._skip:
            raise DataError(f"{file}:{line}: {what} Mend the line or remove it.")
        self._counts[kind] += 1

    def drain(self) -> dict[str, int]:
        """Kind of fault -> lines left out since the last call."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts


class Rows:
    """Consecutive lines of a file, as columns of n rows.

    Attributes:
      lines: the line of each row, from 1: int64 [n].
      ok: whether nothing was found wrong with the row so far: bool [n]. All true where faults raise. What the other
        methods give for a row that is not ok means nothing.
    """

    def __init__(
        self, file: Path, lines: np.ndarray, fields: dict[str, tuple[int, Any]], encoding: Encoding, faults: Faults
    ) -> None:
        """Rows of `fields`: name -> (number of the field from 1, Arrow binary array); see `original` for its bytes."""
        self._file, self._fields, self._encoding, self._faults = file, fields, encoding, faults
        self.lines, self.ok = lines, np.ones(len(lines), bool)

    def __len__(self) -> int:
        return len(self.lines)

    def missing(self, name: str, *texts: str) -> np.ndarray:
        """Marks fields that are empty or one of `texts`: bool [n]. They read as zeros from now on."""
        import pyarrow as pa
        import pyarrow.compute as pc

        number, raw = self._fields[name]
        absent = pc.is_in(raw, pa.array([b"", *(text.encode() for text in texts)], pa.binary()))
        self._fields[name] = (number, pc.if_else(absent, pa.scalar(b"0" * 8, pa.binary()), raw))
        return _booleans(absent)

    def integers(self, name: str, least: int = 0, most: int = 10**18 - 1) -> np.ndarray:
        """A field of decimal digits: int64 [n]."""
        return self._numbers(name, np.int64, _WHOLE, least, most, "a whole number")

    def numbers(self, name: str, least: float, most: float) -> np.ndarray:
        """A field like 4, 4.5 or 1e-3: float64 [n], finite."""
        return self._numbers(name, np.float64, _DECIMAL, least, most, "a number")

    def hexadecimals(self, name: str) -> np.ndarray:
        """A field of eight hexadecimal digits: int64 [n]."""
        import pyarrow as pa
        import pyarrow.compute as pc

        raw = self._fields[name][1]
        fine = pc.equal(pc.binary_length(raw), 8)
        padded = pc.if_else(fine, raw, pa.scalar(b"0" * 8, pa.binary()))
        nibbles_Nx8 = _NIBBLES[_content(padded)].reshape(-1, 8)
        self.refuse(~_booleans(fine) | (nibbles_Nx8 > 15).any(axis=1), name, "not eight hexadecimal digits")
        values = np.zeros(len(self), np.int64)
        for nibbles_N in nibbles_Nx8.T:
            values = 16 * values + nibbles_N
        return values

    def text(self, name: str) -> np.ndarray:
        """A field as UTF-8: bytes of fixed width [n]. A NUL byte is refused, for numpy drops it at the end."""
        import pyarrow.compute as pc

        raw = self._fields[name][1]
        content = _content(raw)
        if (content == 0).any():
            self.refuse(_booleans(pc.match_substring(raw, b"\0")), name, "with a NUL byte in it")
        if self._encoding == "latin-1" or (content < 128).all():
            return np.array(raw.to_pylist(), np.bytes_)
        values = [original(value, self._encoding) for value in raw.to_pylist()]
        self.refuse(np.array([not is_utf8(value) for value in values]), name, "which is not UTF-8 text")
        return np.array(values, np.bytes_)

    def raw(self, name: str) -> list[str]:
        """A field of every row, as it is written; what is not of the encoding is escaped."""
        values = self._fields[name][1].to_pylist()
        return [original(value, self._encoding).decode("utf-8", "backslashreplace") for value in values]

    def refuse(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Reports the rows where `wrong` (bool [n]) as faults of the field `name`."""
        number, raw = self._fields[name]
        for row in np.flatnonzero(wrong & self.ok).tolist():
            what = f"{name} (field {number}) is {shown(raw[row].as_py(), self._encoding)}, {reason}."
            self._faults.report(self._file, int(self.lines[row]), name, what)
            self.ok[row] = False

    def refuse_open_quotes(self) -> None:
        """Refuses fields that go on after the end of their line.

        Raises:
          DataError: also if malformed lines are left out, since nobody knows how many lines the quote swallowed.
        """
        for _, raw in self._fields.values():
            if (_content(raw) == ord("\n")).any():
                row = next(row for row, value in enumerate(raw) if b"\n" in value.as_py())
                raise open_quote(self._file, int(self.lines[row]))

    def _numbers(self, name: str, dtype: type, pattern: str, least: float, most: float, what: str) -> np.ndarray:
        import pyarrow as pa
        import pyarrow.compute as pc

        raw = self._fields[name][1]
        try:
            if (_content(raw) | 32 == ord("x")).any():
                raise pa.ArrowInvalid("0x10 is a number for Arrow")
            values, wrong = _cast(raw, dtype), np.zeros(len(self), bool)
        except pa.ArrowInvalid:
            fine = pc.match_substring_regex(raw, pattern)
            values, wrong = _cast(pc.if_else(fine, raw, pa.scalar(b"0", pa.binary())), dtype), ~_booleans(fine)
        self.refuse(wrong | ~((values >= least) & (values <= most)), name, f"not {what} from {least} to {most}")
        return values


def original(raw: bytes, encoding: Encoding) -> bytes:
    """A field of a file of this encoding as UTF-8. Arrow took every file for latin-1, and gave that as UTF-8."""
    return raw if encoding == "latin-1" else raw.decode().encode("latin-1")


def shown(raw: bytes, encoding: Encoding) -> str:
    """The beginning of a field or line as an error message shows it."""
    return repr(original(raw, encoding).decode("utf-8", "backslashreplace")[:80])


def open_quote(file: Path, line: int) -> DataError:
    """The error for a quoted field that goes on after the end of its line."""
    return DataError(
        f"{file}:{line}: a double quote is opened, but not closed on this line, so nobody knows where the next line "
        "begins. Close it, or write the field without quotes."
    )


def _cast(raw: Any, dtype: type) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    return np.asarray(pc.cast(pc.cast(raw, pa.string()), pa.from_numpy_dtype(dtype)).to_numpy())


def _booleans(array: Any) -> np.ndarray:
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _content(raw: Any) -> np.ndarray:
    """The bytes of all values of a binary array, end to end: uint8."""
    _, offsets, data = raw.buffers()
    if data is None or not len(raw):
        return np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[raw.offset : raw.offset + len(raw) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def is_utf8(value: bytes) -> bool:
    """Returns whether bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
