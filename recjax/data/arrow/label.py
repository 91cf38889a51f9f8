"""The label of a row, 0 or 1: as a column says it, by a threshold of its numbers, or by the word that means 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from recjax.data.arrow import convert
from recjax.data.arrow.chunk_columns import shown
from recjax.data.arrow.wording import Wording
from recjax.errors import DataError
from recjax.settings import items
from recjax.utils.text import did_you_mean

_PAIRS = (
    " Or if each row is a user and an item that belong together, as clicks are, learn from these alone: recjax train "
    "two_tower data.from=FILE data.user=COLUMN data.item=COLUMN."
)
_LISTED = 6  # values of a label that a message lists


@dataclasses.dataclass(frozen=True)
class Label:
    """Meaning of label 1.

    Attributes:
      column: its name.
      threshold: 1 where the column is at least this; None: see `positive`.
      positive: 1 where the column is this, as text writes it; "": the column holds 0 and 1.
      everywhere: 1 in every row, whatever the column is: rows are pairs of a user and an item that belong together.
    """

    column: str
    threshold: float | None = None
    positive: str = ""
    everywhere: bool = False

    def __str__(self) -> str:
        if self.everywhere:
            return "1 in every row"
        if self.threshold is not None:
            return f"{self.column} >= {self.threshold:g}"
        return f"{self.column} is {self.positive}" if self.positive else self.column

    def of(self, array: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Labels of a plain array, float32 [n]; and where there is none, bool [n], None if there always is one."""
        if self.everywhere:
            return np.ones(len(array), np.float32), None
        if self.positive:
            values, at = convert.distinct(array)
            words = [self.word(value) for value in values]
            labels = np.append([word == self.positive for word in words], False)[at].astype(np.float32)
            wrong = np.append([word == "" for word in words], True)[at]
            return labels, wrong if wrong.any() else None
        numbers, bad = convert.numbers(array)
        wrong = np.isnan(numbers) if bad is None else bad | np.isnan(numbers)
        if self.threshold is not None:
            return np.where(wrong, 0, numbers >= self.threshold).astype(np.float32), wrong if wrong.any() else None
        wrong |= (numbers != 0) & (numbers != 1)
        return np.where(wrong, 0, numbers).astype(np.float32), wrong if wrong.any() else None

    def word(self, value: Any) -> str:
        """An Arrow value as text; "" for what is none."""
        value = value.as_py()
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return "" if value != value else f"{value:g}"
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def one_value_each(column: str) -> str:
    """The message about a column of lists that is named as the label of rows."""
    return (
        f"the label {column!r} holds lists. Name a column with one value for each row; or if each entry is the label "
        f"of an element, list it with what that is: columns=GROUP:list(item,{items.quote(column)})."
    )


def _by_number(text: str) -> tuple[float, str]:
    """The order of values that are shown: by number, and what is none last."""
    try:
        return float(text.strip("'")), text
    except ValueError:
        return math.inf, text


class LabelProfile:
    """Findings of a pass over the rows about the label: its values, and the first row that has none."""

    def __init__(self, label: Label, wording: Wording = Wording.COMMAND) -> None:
        """Starts with no rows; `wording` is that of messages."""
        self._label = label
        self._option = wording.option
        self._values: dict[str, None] = {}
        self._first: tuple[str, str, bool] | None = None
        self._sum = self._rows = 0

    def add(self, array: Any, where: Any) -> None:
        """Takes in further rows; where(row) says in words where a row of these is."""
        array = convert.plain(array)
        if convert.is_list(array):
            raise DataError(one_value_each(self._label.column))
        labels, wrong = self._label.of(array)
        self._rows, self._sum = self._rows + len(labels), self._sum + int(labels.sum())
        if len(self._values) <= _LISTED:
            self._values |= dict.fromkeys(shown(value) for value in convert.distinct(array)[0][: _LISTED + 1])
        if wrong is not None and self._first is None:
            row = int(np.argmax(wrong))
            value = array[row]
            missing = not value.is_valid or value.as_py() in ("", b"") or value.as_py() != value.as_py()
            self._first = (where(row), shown(value), missing)

    def check(self) -> None:
        """Refuses a label that is not 0 or 1 in every row, or the same in all.

        Raises:
          DataError: saying where it is none, and which values it has.
        """
        name = self._label.column
        listed = sorted(self._values, key=_by_number)
        values = ", ".join(listed[:_LISTED]) + (", ..." if len(listed) > _LISTED else "")
        if self._first is not None:
            where, value, missing = self._first
            if missing:
                raise DataError(
                    f"{where}: the label {name!r} is missing. A row without a label teaches nothing: leave such rows "
                    f"out with {self._option('where', f'{items.quote(name)}!=')}, or fill them in."
                )
            advice = (
                f"Say which values count as 1: {self._option('threshold', 'X')} (X and more), or "
                f"{self._option('positive', 'VALUE')} (that one)."
                if self._label.threshold is None and not self._label.positive
                else "Correct the row."
            )
            if all(_by_number(each)[0] < math.inf for each in listed):
                advice += (
                    f" To learn the numbers themselves give {self._option('label', f'{items.quote(name)}:number')}."
                )
            what = "not 0 or 1"
            if self._label.threshold is not None:
                threshold = self._option("threshold", f"{self._label.threshold:g}")
                what = f"no number, which {threshold} compares"
                positive = self._option("positive", "VALUE")
                advice = f"Correct the row; or if one of its texts means 1, give {positive} instead."
            raise DataError(f"{where}: the label {name!r} is {value}, {what}; its values are {values}. {advice}")
        if self._sum in (0, self._rows):
            only = "0" if self._sum == 0 else "1"
            words = [self._option("positive", each.replace("'", "")) for each in listed]
            given = self._option("positive", self._label.positive)
            near = did_you_mean(given, words) if self._label.positive else ""
            raise DataError(
                f"the label, {self._label}, is {only} in all {self._rows:,} rows (the values of {name!r} are "
                f"{values}): there is nothing to tell apart.{near} Name another label, threshold or positive value."
                + (_PAIRS if only == "1" else "")
            )
