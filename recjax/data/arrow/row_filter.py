"""Conditions on the rows that are used: the grammar of `where=`, and which rows of Arrow arrays keep to them.

    where=price>0,country=DE|FR,kind!=,day>=2026-01-01

All must hold. `=` asks for one of several values with `|` between them, and nothing stands for a missing value; `!=` is
its opposite. `<`, `<=`, `>` and `>=` compare numbers, or times (ISO 8601), and hold for no missing value. Names and
values that hold such marks stand in double quotes (`recjax.settings.items`).
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.arrow import convert
from recjax.data.text.fields import is_utf8
from recjax.errors import ConfigError
from recjax.settings import items

_FORM = re.compile(r"(.+?)(>=|<=|!=|==|=|<|>)(.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NONE = ("NaN", "nan")  # as numbers are written that are none
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # which writes nothing but a number


@dataclasses.dataclass(frozen=True)
class Condition:
    """One condition.

    Attributes:
      text: as it was given.
      column: the column that it is on.
      compare: "=", "!=", "<", "<=", ">" or ">=".
      values: the values of "=" and "!=", "" for a missing one; else the single one.
    """

    text: str
    column: str
    compare: str
    values: tuple[str, ...]

    def holds(self, array: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns where it holds in a column, bool [n]; and where the value cannot be compared: bool [n], None if none.

        Args:
          array: the Arrow array of the column.
        """
        array = convert.plain(array)
        if convert.is_list(array):
            return np.zeros(len(array), bool), np.ones(len(array), bool)
        if self.compare in _ORDER:
            bound, is_time = _bound(self.values[0]) or (math.nan, False)
            kind = convert.kind_of(array)
            numbers, wrong = convert.numbers(array, "time" if is_time and kind == "text" else "float")
            if is_time != (kind == "time") and kind not in ("text", "none"):
                wrong = ~np.isnan(numbers)
            return np.asarray(_ORDER[self.compare](numbers, bound)), wrong
        values, at = convert.distinct(array)
        found = np.append([self._is_one(value.as_py()) for value in values], "" in self.values).astype(bool)[at]
        wrong = None
        if not all(map(str.isascii, self.values)):  # which text in another encoding has, too, in other bytes
            wrong = np.append([_is_no_text(value.as_py()) for value in values], False).astype(bool)[at]
        return found if self.compare == "=" else ~found, wrong

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, datetime.date):  # or a datetime, which is one too
            bounds = [_bound(text) for text in self.values]
            return (float(convert.numbers(_one(value))[0][0]), True) in bounds
        if isinstance(value, bytes):
            value = value.decode("utf-8", "backslashreplace")
        if not isinstance(value, str):
            value = "" if value != value else str(value).lower() if isinstance(value, bool) else repr(value)
        if (value if value not in _NONE else "") in self.values:
            return True
        numbers = [float(text) for text in self.values if _NUMBER.fullmatch(text)]
        return bool(numbers) and _NUMBER.fullmatch(value) is not None and float(value) in numbers

    @property
    def asked(self) -> str:
        """Description of the values for which the condition means anything."""
        if self.compare not in _ORDER:
            return "text in UTF-8"
        bound = _bound(self.values[0])
        return "a time" if bound and bound[1] else "a number"


def parse(texts: Sequence[str]) -> tuple[Condition, ...]:
    """The conditions of `where=`.

    Raises:
      ConfigError: one of another form, or a bound that is no number and no time.
    """
    conditions = []
    for text in texts:
        form = _FORM.fullmatch(items.mask(text))
        if form is None:
            raise ConfigError(
                f"where: {text!r} is no condition. Write COLUMN, one of = != < <= > >=, and a value; several values of "
                "= with | between them: where=price>0,country=DE|FR."
            )
        column, compare, value = (text[slice(*form.span(group))].strip() for group in (1, 2, 3))
        compare = "=" if compare == "==" else compare
        if compare in _ORDER and _bound(items.unquote(value)) is None:
            raise ConfigError(
                f"where: {text!r} compares with {value!r}, which is no number and no time (ISO 8601, such as "
                "2026-11-22). Only = and != take text."
            )
        values = tuple(part.strip() for part in items.split(value, "|")) if compare in ("=", "!=") else (value,)
        conditions.append(Condition(text, items.unquote(column), compare, tuple(map(items.unquote, values))))
    return tuple(conditions)


def kept(
    conditions: Sequence[Condition], arrays: Mapping[str, Any], rows: int
) -> tuple[np.ndarray, tuple[Condition, np.ndarray] | None]:
    """Returns which rows keep to the conditions, bool [n].

    Args:
      conditions: those whose column is among the arrays count.
      arrays: Arrow array of each column.
      rows: n.

    Returns:
      The rows; and of the first condition on values that it cannot compare, itself and where: bool [n]; None if none.
    """
    keep, bad = np.ones(rows, bool), None
    for condition in conditions:
        if condition.column not in arrays:
            continue
        holds, wrong = condition.holds(arrays[condition.column])
        if wrong is not None and (wrong & keep).any() and bad is None:
            bad = condition, wrong & keep
        keep &= holds
    return keep, bad


def _is_no_text(value: Any) -> bool:
    return isinstance(value, bytes) and not is_utf8(value)


def _one(value: Any) -> Any:
    import pyarrow as pa

    return pa.array([value])


def _bound(text: str) -> tuple[float, bool] | None:
    """A number, or the seconds since 1970 of a time, and whether it is a time; None if it is neither."""
    import pyarrow as pa

    try:
        number = float(text)
    except ValueError:
        seconds, fine = convert.times(pa.array([text]))
        return (float(seconds[0]), True) if fine[0] else None
    return (number, False) if math.isfinite(number) else None
