"""Several labels of a table: which columns they are, of which kinds, and in which rows they count.

    label=clicked,bought:weight=clicked,rating:number,stars:class

Each is COLUMN, then its kind if it is not binary, then options: weight=COLUMN, by which it counts in a row (0: not at
all, and then it may be missing); and of a binary one threshold=X or positive=VALUE, as for a single label. Names and
values that hold a comma or colon stand in double quotes (`recjax.settings.items`).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np

from recjax.data import batch
from recjax.data.arrow import convert
from recjax.data.arrow.chunk_columns import Fault, shown
from recjax.data.arrow.label import Label, one_value_each
from recjax.data.prepare.dense_columns import fits_float32
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.utils.text import first_repeated

_OPTIONS = ("weight", "threshold", "positive")
_MOST_CLASSES = 10_000
_EXAMPLE = "clicked,bought:weight=clicked,rating:number"


@dataclasses.dataclass(frozen=True)
class Column:
    """One of several labels.

    Attributes:
      meaning: its column, and of a binary one what 1 means.
      kind: see `recjax.data.batch.Label`.
      weight: the column of its weights; "": each row counts.
      classes: of a class, its values as text, in the order of their numbers; known once the rows were seen.
    """

    meaning: Label
    kind: batch.LabelKind = "binary"
    weight: str = ""
    classes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the column."""
        return self.meaning.column

    def of(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, list[Fault]]:
        """Labels and weights of rows, float32 [n] each, and what is wrong with them; 0 where it does not count."""
        array, faults = convert.plain(arrays[self.name]), list[Fault]()
        weights = np.ones(len(array), np.float32)
        if self.weight:
            given, _ = convert.numbers(convert.plain(arrays[self.weight]))
            wrong = ~(fits_float32(given) & (given >= 0))
            weights = np.where(wrong, 0, given).astype(np.float32)
            if wrong.any():
                faults.append(Fault(self.weight, wrong, "not a weight of 0 or more"))
        labels, missing = self._values(array)
        if missing is not None and (wrong := missing & (weights > 0)).any():
            what = {"binary": "a label of 0 or 1", "number": "a number", "class": "one of the classes"}[self.kind]
            faults.append(Fault(self.name, wrong, f"not {what}"))
        return np.where(weights > 0, labels, 0).astype(np.float32), weights, faults

    def _values(self, array: Any) -> tuple[np.ndarray, np.ndarray | None]:
        if self.kind == "binary":
            return self.meaning.of(array)
        if self.kind == "number":
            numbers, _ = convert.numbers(array)  # NaN where a value is none
            missing = ~fits_float32(numbers)
            return np.where(missing, 0, numbers).astype(np.float32), missing
        values, at = convert.distinct(array)
        known = {text: number for number, text in enumerate(self.classes)}
        found = np.array([known.get(self.meaning.word(value), -1) for value in values] + [-1], np.int64)[at]
        return np.maximum(found, 0).astype(np.float32), found < 0


@dataclasses.dataclass(frozen=True)
class Labels:
    """Several labels, in their order."""

    each: tuple[Column, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that they need, each once."""
        return tuple(dict.fromkeys(name for one in self.each for name in (one.name, one.weight) if name))

    @property
    def schema(self) -> tuple[batch.Label, ...]:
        """Labels as prepared data have them."""
        return tuple(batch.Label(one.name, one.kind, len(one.classes), one.weight) for one in self.each)

    def of(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, list[Fault]]:
        """Labels and weights, float32 [n, T] each, and what is wrong."""
        found = [one.of(arrays) for one in self.each]
        labels = np.stack([labels for labels, _, _ in found], axis=1)
        weights = np.stack([weights for _, weights, _ in found], axis=1)
        return labels, weights, [fault for *_, faults in found for fault in faults]

    def __str__(self) -> str:
        """In words."""
        return ", ".join(
            f"{one.meaning} ({one.kind}{f', {len(one.classes)} values' if one.classes else ''}"
            f"{f', where {one.weight} is above 0' if one.weight else ''})"
            for one in self.each
        )


def parse(text: str) -> Labels | None:
    """The labels of the setting `label`; None if it is a single binary column, which has settings of its own.

    Raises:
      ConfigError: an option or column that makes no sense.
    """
    parts = [_parse_one(part, text) for part in items.split(text, ",")]
    if len(parts) == 1 and parts[0] == Column(Label(items.unquote(text))):
        return None
    if (twice := first_repeated(["", *(part.name for part in parts)])) is not None:
        raise ConfigError(f"label {text}: {twice!r} is named twice, or not at all. Write for example {_EXAMPLE}.")
    return Labels(tuple(parts))


def _parse_one(part: str, text: str) -> Column:
    """One label; what is no kind and no option at its end belongs to the column's name, which may have colons."""
    *name, last = items.split(part, ":")
    options: dict[str, str] = {}
    kind = ""
    while name:
        key, equals, value = last.partition("=")
        if last in get_args(batch.LabelKind) and not kind:
            kind = last
        elif equals and key in _OPTIONS and value and key not in options:
            options[key] = items.unquote(value)
        else:
            break
        *name, last = name
    column = items.unquote(":".join([*name, last]))
    if (
        kind in ("number", "class")
        and options.keys() & {"threshold", "positive"}
        or len(options.keys() - {"weight"}) > 1
    ):
        raise ConfigError(
            f"label {text}: threshold and positive say which values of a binary label are 1; give one of them at most, "
            f"and none to {column!r} as a {kind or 'binary'} label."
        )
    try:
        threshold = float(options["threshold"]) if "threshold" in options else None
    except ValueError:
        raise ConfigError(f"label {text}: threshold={options['threshold']} is no number.") from None
    meaning = Label(column, threshold, options.get("positive", ""))
    return Column(meaning, cast(Literal["binary", "number", "class"], kind or "binary"), options.get("weight", ""))


class LabelsProfile:
    """Findings of a pass over the rows about several labels: classes, the first fault, and whether they ever differ."""

    def __init__(self, labels: Labels) -> None:
        """Starts with no rows."""
        self._labels = labels
        self._classes: list[dict[str, float | str]] = [{} for _ in labels.each]
        self._least = np.full(len(labels.each), np.inf)
        self._most = np.full(len(labels.each), -np.inf)
        self._first = ""

    def add(self, arrays: Mapping[str, Any], where: Any) -> None:
        """Takes in further rows; where(row) says in words where a row of these is."""
        for i, one in enumerate(self._labels.each):
            array = convert.plain(arrays[one.name])
            if convert.is_list(array):
                raise DataError(one_value_each(one.name))
            if one.kind == "class":
                self._note_classes(i, one, array)
                one = dataclasses.replace(one, classes=tuple(self._classes[i]))
            labels, weights, faults = one.of(arrays)
            if faults and not self._first:
                fault = faults[0]
                row = int(np.argmax(fault.rows))
                self._first = (
                    f"{where(row)}: column {fault.column!r} is {shown(convert.plain(arrays[fault.column])[row])}, "
                    f"{fault.what}. Correct the row; or give the label weight=COLUMN, which is 0 where it does not "
                    "count."
                )
            counted = labels[weights > 0]
            if len(counted):
                self._least[i] = min(self._least[i], counted.min())
                self._most[i] = max(self._most[i], counted.max())

    def _note_classes(self, i: int, one: Column, array: Any) -> None:
        for value in convert.distinct(array)[0]:
            if word := one.meaning.word(value):
                self._classes[i].setdefault(word, _as_number(word))
        if len(self._classes[i]) > _MOST_CLASSES:
            raise DataError(
                f"the label {one.name!r} has more than {_MOST_CLASSES:,} values, too many for classes. Is it a number? "
                f"Then write {shlex.quote(f'{items.quote(one.name)}:number')}."
            )

    def found(self) -> Labels:
        """The labels with their classes, by number where all are numbers and else by text.

        Raises:
          DataError: a row has none of the kind, or all rows have the same.
        """
        if self._first:
            raise DataError(self._first)
        for one, least, most in zip(self._labels.each, self._least, self._most, strict=True):
            if not least < most:
                what = f"{least:g} in all rows" if np.isfinite(least) else "of weight 0 in all rows"
                if one.kind == "class":
                    what = "the same in all rows"
                raise DataError(f"the label {one.meaning} is {what}: there is nothing to learn. Leave it out.")
        return Labels(
            tuple(
                dataclasses.replace(one, classes=_ordered(classes))
                for one, classes in zip(self._labels.each, self._classes, strict=True)
            )
        )


def _as_number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _ordered(classes: Mapping[str, float | str]) -> tuple[str, ...]:
    if all(isinstance(value, float) for value in classes.values()):
        return tuple(sorted(classes, key=lambda word: (float(word), word)))
    return tuple(sorted(classes))


def describe(labels: Sequence[Column]) -> list[dict[str, Any]]:
    """Returns the facts about labels that prepared data keep: JSON values."""
    return [dataclasses.asdict(one) for one in labels]
