"""Findings of a pass over the rows about each column: its kind, what is missing, extremes, distinct values."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from recjax.data.arrow import convert
from recjax.data.arrow.convert import EXACT, Kind
from recjax.data.prepare.ids import stable_hash

COUNTED_ROWS = 2**20  # distinct values are counted within the first so many rows

_NEARLY_ALL = 0.95  # share of distinct values
_NUMBERS: set[Kind] = {"integer", "float"}
_LOOKED_AT = 1000  # values of each array that may look like dates
_DAY = "(0?[1-9]|[12][0-9]|3[01])"  # or a month
_DATE = "|".join(
    dot.join(parts)
    for dot in ("[.]", "/", "-")
    for parts in ((_DAY, _DAY, "[0-9]{4}"), ("[0-9]{4}", _DAY, _DAY), ("[0-3][0-9]", "[0-3][0-9]", "[0-9]{2}"))
)
_SEPARATORS = (" | ", "|", "; ", ";", ", ", ",")  # that may cut text into lists
_SAMPLE = 1000  # distinct values that tell whether text is lists
_LEAST_SAMPLE = 5  # values that are needed for that
_NEARLY_ALL_CUT = 0.75  # share of them that a separator cuts: a list may have one entry, and so none
IN_WORDS = {
    "none": "nothing",
    "boolean": "true and false",
    "integer": "integers",
    "unsigned": "integers",
    "float": "numbers",
    "time": "times",
    "text": "text",
    "other": "structures, durations or mixed types",
}  # kind -> its values in words
_ORDER: tuple[Kind, ...] = ("none", "boolean", "integer", "unsigned", "float")  # each can hold the ones before it


@dataclasses.dataclass(frozen=True)
class ValueType:
    """The type of the values of a column, as a file has it.

    Attributes:
      kind: of the values; of lists, of their entries.
      lists: whether they are lists.
    """

    kind: Kind
    lists: bool = False

    @classmethod
    def of_field(cls, field: Any) -> Self:
        """The type of the values of a field of an Arrow schema."""
        import pyarrow as pa

        array = convert.plain(pa.array([], field.type))
        if convert.is_list(array):
            return cls(convert.kind_of(convert.bags(array)[0]), lists=True)
        return cls(convert.kind_of(array))

    def joins(self, other: Self, cut: bool) -> bool:
        """Returns whether values of both can be in one column; with `cut`, text is cut into lists."""
        kinds = {self.kind, other.kind} - {"none"}
        alike = len(kinds) < 2 or kinds <= set(_ORDER)
        return alike and (cut or "none" in (self.kind, other.kind) or self.lists == other.lists)

    def __str__(self) -> str:
        return f"lists of {IN_WORDS[self.kind]}" if self.lists else IN_WORDS[self.kind]


class ColumnProfile:
    """One column, whose arrays are added one after the other.

    Attributes:
      rows: of all arrays.
      missing: entries without a value, at any kind of column.
      lists: whether the rows are lists; False as long as all are null.
      least_width: of the lists, those that are null left out.
      most_width: likewise.
      least: the least number; infinity if there is none.
      most: the greatest one.
      counted_rows: rows in which distinct values were counted.
      date: of text that looks like dates all over, one of them; else "".
      unread: of text that may be numbers, the first value that is none in the file, and its row in words; else None.
      unread_values: of that text, hashes of distinct values that are none: all, or some of more than 100.
      separator: what text is cut at; "": it is not.
      as_lists: of text that looks like lists, the same column cut at the mark between their entries; else None.
    """

    def __init__(self, separator: str = "", csv: bool = False) -> None:
        """Starts with no rows.

        Args:
          separator: what text is cut at, as of a jagged column; "": it is not.
          csv: text tells its kind by what it looks like: numbers, times, booleans or nothing of these.
        """
        self.separator, self._csv = separator, csv
        self.as_lists: ColumnProfile | None = None
        self._sampled = False
        self.rows = self.missing = self._words = 0
        self.lists, self.least_width, self.most_width = False, 2**31, 0
        self.least, self.most = math.inf, -math.inf
        self._no_fractions = True
        self._kind: Kind = "none"
        self._looks: set[Kind] = {"boolean", "integer", "float", "time"} if csv else set()
        self._looked = False
        self._seen = np.zeros(0, np.uint64)
        self.counted_rows = 0
        self.date, self._dates = "", True
        self._number_like = np.zeros(0, np.uint64)  # of those seen
        self._rarely_numbers = False
        self.unread: tuple[str, str] | None = None
        self.unread_values = np.zeros(0, np.uint64)

    @classmethod
    def known(cls, kind: Kind, rows: int, missing: bool) -> Self:
        """A profile of a column without lists of which no more than this is known."""
        found = cls()
        found._kind, found.rows, found.missing = kind, rows, int(missing)
        return found

    @property
    def kind(self) -> Kind:
        """Kind of the values; of lists, of their entries."""
        kind = self._kind
        if self._csv and kind == "text":
            kind = "none"
        if self._looked:
            kind = next((kind for kind in ("integer", "boolean", "float", "time") if kind in self._looks), "text")
        if kind == "unsigned" or kind == "integer" and self.most >= 2**63:
            return "integer" if self.most < 2**63 else "unsigned" if self.least >= 0 and self.most < 2**64 else "text"
        return kind

    @property
    def whole(self) -> bool:
        """True if all numbers are integers that floats hold exactly."""
        return self._no_fractions and -EXACT < self.least and self.most < EXACT

    @property
    def optional(self) -> bool:
        """True if a value is missing in some row."""
        return self.missing > 0 or self._words > 0 and self.kind != "text"  # the latter of CSV alone

    @property
    def distinct(self) -> int:
        """Distinct values within `counted_rows`."""
        return len(self._seen)

    @property
    def mostly_numbers(self) -> int:
        """Count of distinct texts that are meant as numbers, where nearly all are, and one is not read; else 0."""
        like = len(self._number_like)
        return like if self.kind == "text" and self.unread is not None and like >= _NEARLY_ALL * self.distinct else 0

    def add(self, array: Any, count: bool = False, where: Callable[[int], str] = "row {}".format) -> None:
        """Takes in the values of further rows.

        Args:
          array: the values.
          count: whether distinct ones are counted.
          where: says in words where a row of these is.
        """
        array, rows_before = convert.plain(array), self.rows
        self.rows += len(array)
        if convert.is_list(array) or self.separator and convert.kind_of(array) == "text":
            self.lists = True
            absent = convert.null(array)
            array, lengths = convert.bags(array, self.separator)
            if (there := lengths[~absent]).size:
                self.least_width = min(self.least_width, int(there.min()))
                self.most_width = max(self.most_width, int(there.max()))
        found = convert.kind_of(array)
        self._kind = self._joined(found)
        if found in ("integer", "unsigned", "float"):
            numbers = array.drop_null().to_numpy(zero_copy_only=False)
            numbers = numbers[~np.isnan(numbers)] if found == "float" else numbers
            present = len(numbers)
            self._extremes(numbers)
        elif found == "text":
            read = bool(self._looks & _NUMBERS)
            present = self._add_text(array)
            if count and not self.lists and not self._looks & _NUMBERS:
                self._note_numbers(array, read, where)
            if count and not self.lists:
                self._note_lists(array, rows_before)
        else:
            present = len(array) - array.null_count
        self.missing += len(array) - present
        if count and self.rows <= COUNTED_ROWS and found != "other":
            self.counted_rows = self.rows
            self._seen = np.union1d(self._seen, _hashes(array, found))

    def _add_text(self, array: Any) -> int:
        """Takes in text; returns how many entries are not missing."""
        if self._dates:
            self._note_dates(convert.words(array)[:_LOOKED_AT].drop_null())
        if not self._csv and not convert.missing(convert.words(array), "text").any():
            return len(array) - array.null_count  # as text that knows its type mostly is
        values, at = convert.distinct(array)
        occurrences = np.bincount(at[at >= 0], minlength=len(values))
        empty = convert.missing(values, "text")
        words = convert.missing(values, "float") & ~empty
        self._words += int(occurrences[words].sum())
        if self._looks:
            self._look(values.filter(_mask(~empty & ~words)))
        return int(occurrences[~empty].sum())

    def _note_numbers(self, array: Any, read: bool, where: Callable[[int], str]) -> None:
        """Takes in text that may be numbers; `read`: whether all before was read as such."""
        self._number_like = self._seen if read else self._number_like
        self._rarely_numbers |= len(self._number_like) < len(self._seen) / 2
        if self._rarely_numbers:
            return
        values, at = convert.distinct(array)
        like, unread = convert.number_like(values)
        if not self._csv:  # where a number would not be text; but an id may be
            unread |= ~convert.values_matching(values, convert.INTEGER) & ~convert.missing(values, "float")
        if self.rows <= COUNTED_ROWS:
            self._number_like = np.union1d(self._number_like, _hashes(values.filter(_mask(like)), "text"))
        if len(self.unread_values) <= 100:
            self.unread_values = np.union1d(self.unread_values, _hashes(values.filter(_mask(unread)), "text"))
        rows = np.append(unread, False)[at]
        if self.unread is None and rows.any():
            row = int(np.argmax(rows))
            value = values[int(at[row])].as_py()
            self.unread = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value, where(row)

    def _note_lists(self, array: Any, rows_before: int) -> None:
        """Takes in text that may be lists, which the first of its values tell; rows before those hold none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self._sampled:
            values = convert.words(array)
            values = pc.unique(values.filter(_mask(~convert.missing(values, "float"))).drop_null())
            if not len(values):
                return
            self._sampled = True
            if separator := _list_separator(values[:_SAMPLE].cast(pa.binary()).to_pylist()):
                self.as_lists = ColumnProfile(separator, self._csv)
                self.as_lists.rows = rows_before
        if self.as_lists is not None:
            self.as_lists.add(array, count=True)

    def _note_dates(self, values: Any) -> None:
        """Takes in some of the text that may be dates."""
        import pyarrow.compute as pc

        values = values.filter(_mask(~convert.missing(values, "float")))
        if not len(values):
            return
        self._dates = pc.all(pc.match_substring_regex(values, f"^({_DATE})([ T][0-9:.]+)?$")).as_py()
        first = values[0].as_py() if self._dates else ""
        self.date = first.decode() if isinstance(first, bytes) else first

    def _joined(self, found: Kind) -> Kind:
        """The kind that holds what there was and what came."""
        kinds = {self._kind, found} - {"none"}
        if len(kinds) < 2:
            return next(iter(kinds), "none")
        return max(kinds, key=_ORDER.index) if kinds <= set(_ORDER) else "other"

    def _extremes(self, numbers: np.ndarray) -> None:
        if not len(numbers):
            return
        least, most = numbers.min().item(), numbers.max().item()
        self.least, self.most = min(self.least, least), max(self.most, most)
        if numbers.dtype.kind == "f":
            self._no_fractions &= bool((numbers == np.floor(numbers)).all())

    def _look(self, words: Any) -> None:
        """Narrows what the text of CSV may be."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not len(words):
            return
        self._looked = True
        if "integer" in self._looks:
            if pc.all(pc.match_substring_regex(words, convert.INTEGER)).as_py():
                short = pc.all(pc.less(pc.binary_length(words), 19)).as_py()
                text = words.cast(pa.string())
                whole = pc.cast(text, pa.int64()).to_numpy() if short else [int(v) for v in text.to_pylist()]
                self.least, self.most = min(self.least, int(min(whole))), max(self.most, int(max(whole)))
            else:
                self._looks.discard("integer")
        if "boolean" in self._looks and not {v.lower() for v in words[:3].to_pylist()} <= {b"true", b"false"}:
            self._looks.discard("boolean")
        if "boolean" in self._looks and not {v.lower() for v in words.to_pylist()} <= {b"true", b"false"}:
            self._looks.discard("boolean")
        if "float" in self._looks:
            numbers, wrong = convert.numbers(words)
            named = pc.any(pc.match_substring_regex(words, "(?i)^(true|false)$")).as_py()
            if wrong is not None or convert.padded(words).any() or named:
                self._looks.discard("float")
            elif "integer" not in self._looks:  # whose extremes are exact
                self._extremes(numbers)
        if "time" in self._looks and (self._looks & {"integer", "float"} or not convert.times(words)[1].all()):
            self._looks.discard("time")


def _list_separator(values: Sequence[bytes]) -> str:
    """The mark between the entries of lists, if distinct texts look like such; else "".

    It cuts nearly all of them, into unequal numbers of entries, none of them empty, half of which at least are there
    in another text too. So no "Doe, Jane", no code of two parts and no sentence is a list; nor are brackets, which a
    cut would leave on the outer entries.
    """
    if len(values) < _LEAST_SAMPLE or all(value[:1] in b"[({" for value in values):
        return ""
    for separator in _SEPARATORS:
        lists = [value.split(separator.encode()) for value in values]
        lengths = [len(entries) for entries in lists]
        if sum(length > 1 for length in lengths) < _NEARLY_ALL_CUT * len(values):
            continue
        entries = [entry for each in lists for entry in each]
        if len(set(lengths)) > 1 and all(map(bytes.strip, entries)) and 2 * len(set(entries)) <= len(entries):
            return separator
    return ""


def _mask(keep: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.array(keep)


def _hashes(array: Any, kind: Kind) -> np.ndarray:
    """Hashes of the values that are there, each once; uint64."""
    if kind in ("text", "integer", "unsigned", "boolean"):
        keys, wrong = convert.code(array, "text" if kind == "text" else "unsigned" if kind == "unsigned" else "integer")
        hashes = stable_hash(keys.values)
        if wrong is None or kind != "text":
            return hashes
        # What can be no key is a value all the same: the reader names its row, if the column becomes a feature.
        others = convert.distinct(convert.decoded(array).filter(_mask(wrong)))[0].cast("binary").to_pylist()
        digests = b"".join(hashlib.blake2b(value, digest_size=8).digest() for value in others)
        return np.union1d(hashes, np.frombuffer(digests, np.uint64))
    if kind == "none":
        return np.zeros(0, np.uint64)
    numbers = convert.numbers(array)[0]
    numbers = numbers[~np.isnan(numbers)] + 0.0  # -0.0 is 0.0
    whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < EXACT)  # which another file may hold as integers
    integers = stable_hash(np.unique(numbers[whole].astype(np.int64)))
    return np.union1d(integers, numbers[~whole].view(np.uint64))
