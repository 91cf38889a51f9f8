"""Requirements of the rows of a table, and the split of each row, gathered in a pass over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recjax.data.arrow import chunk_columns, convert, splits
from recjax.data.arrow.label import Label
from recjax.data.arrow.labels import Labels
from recjax.data.arrow.row_filter import Condition
from recjax.data.arrow.splits import Split
from recjax.data.arrow.wording import Wording
from recjax.data.prepare.ids import stable_hash
from recjax.data.source import SPLITS, split_called
from recjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Choices:
    """Requirements of the rows of a table.

    Attributes:
      label: the label; of several the first.
      columns: as `roles.parse` takes them.
      split: how rows that no file of its own decides are split.
      seed: of split=random.
      time: column that orders the rows, for split=time and split=last.
      group: column whose values are the groups of split=last.
      split_column: column that names the split of each row, for split=column.
      labels: several labels; None: there is one.
      where: conditions that hold in the rows that are used.
      sides: columns of the user and the item, of which each row has both; (): there are none.
      wording: of messages about them.
    """

    label: Label
    columns: tuple[str, ...]
    split: Split
    seed: int
    time: str
    group: str
    split_column: str
    labels: Labels | None = None
    where: tuple[Condition, ...] = ()
    sides: tuple[str, ...] = ()
    wording: Wording = Wording.COMMAND


class Splitter:
    """Gathers what decides the split of each row."""

    def __init__(self, choices: Choices) -> None:
        """Starts with no rows."""
        self._choices = choices
        self._known: list[np.ndarray] = []  # uint8 of each piece; 255: of the main files, to be decided
        self._times: list[np.ndarray] = []
        self._groups: list[np.ndarray] = []

    def add(self, arrays: Mapping[str, Any], number: int, row: int, where: Callable[[int], str]) -> None:
        """Takes in rows of a file of split `number`; those of split 0 are split as the choices say."""
        choices = self._choices
        count = len(arrays[choices.label.column])
        if number:
            self._known.append(np.full(count, number, np.uint8))
            return
        way = choices.split.way
        if way == "random":
            self._known.append(splits.at_random(choices.split, choices.seed, row, count))
            return
        if way == "column":
            self._known.append(self._named(arrays[choices.split_column], where))
            return
        self._known.append(np.full(count, 255, np.uint8))
        if choices.time:
            self._times.append(self.times_of(arrays[choices.time], where))
        if way == "last":
            coded, wrong = convert.code(arrays[choices.group], _key_kind(arrays[choices.group]))
            if (missing := coded.codes == len(coded.values)).any() or wrong is not None:
                at = int(np.argmax(missing))
                raise DataError(
                    f"{where(at)}: column {choices.group!r} is {chunk_columns.shown(arrays[choices.group][at])}, so "
                    "the row is of no group. Correct it, or split otherwise."
                )
            self._groups.append(stable_hash(coded.values)[coded.codes] if len(coded.values) else np.zeros(0, np.uint64))

    def times_of(self, array: Any, where: Callable[[int], str]) -> np.ndarray:
        """The times of rows, by which they are ordered: float64 [n]; DataError if one has none."""
        times, wrong = convert.numbers(array)
        if wrong is not None and convert.kind_of(array) == "text":
            times, wrong = convert.numbers(array, "time")
        wrong = np.isnan(times) if wrong is None else wrong | np.isnan(times)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{where(at)}: column {self._choices.time!r} is {chunk_columns.shown(array[at])}, not a number or a "
                "time (ISO 8601), so the row has no place in the order. Correct it, or split otherwise."
            )
        return times

    def splits(self) -> np.ndarray:
        """The split of every row: uint8, see SPLITS."""
        found = np.concatenate(self._known)
        mine = found == 255
        if not mine.any():
            return found
        times = np.concatenate(self._times) if self._times else None
        if self._choices.split.way == "last":
            found[mine] = splits.last_of_group(self._choices.split, np.concatenate(self._groups), times)
        else:
            assert times is not None
            found[mine] = splits.by_time(self._choices.split, times)
        return found

    def out_of_order(self) -> bool:
        """True if split=time orders the rows, and a row comes after a later one."""
        return self._choices.split.way == "time" and bool(np.any(np.diff(np.concatenate(self._times)) < 0))

    def _named(self, array: Any, where: Callable[[int], str]) -> np.ndarray:
        values, at = convert.distinct(array)
        called = [chunk_columns.shown(value).strip("'\"") for value in values]
        codes = [SPLITS.index(split) if (split := split_called(name)) else 255 for name in called]
        found = np.array([*codes, 255], np.uint8)[at]
        if (found == 255).any():
            row = int(np.argmax(found == 255))
            raise DataError(
                f"{where(row)}: column {self._choices.split_column!r} is {chunk_columns.shown(array[row])}, which "
                f"names no split. They are {', '.join(SPLITS)} (valid, val and dev are validation)."
            )
        return found


def _key_kind(array: Any) -> convert.Kind:
    kind = convert.kind_of(array)
    return kind if kind in ("text", "unsigned") else "integer"
