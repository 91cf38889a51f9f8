"""Rows that train, validate and test: by chance, by time, the last of each group, as a column says, or by file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, cast, get_args

import numpy as np

from recjax.data import counter_rng
from recjax.data.source import SPLITS
from recjax.errors import ConfigError, DataError

Way = Literal["random", "time", "last", "column"]
WAYS = get_args(Way)
ROWS = 2**16  # rows that are drawn together; part of what a seed means
_USES: dict[str, tuple[str, ...]] = {  # way -> the settings by which it needs, or takes, a column
    "random": (),
    "time": ("time",),
    "last": ("group", "time"),
    "column": ("split_column",),
}
_PURPOSE = 0x7AB1E  # of the random numbers
_SHARES = (0.8, 0.1, 0.1)
_LAST = (1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Split:
    """Split of the rows of the main files.

    Attributes:
      way: which way.
      amounts: of random and time the shares of training, validation and test; of last the validation and the test rows
        of each group.
    """

    way: Way
    amounts: tuple[float, ...]


def parse(text: str, apart: Sequence[str] = (), named: Sequence[str] = ()) -> Split:
    """The meaning of `split=`: "random:0.8,0.1,0.1", "time:0.8,0.1,0.1", "last:1,1", "column"; "" is by what is named.

    Args:
      text: the setting.
      apart: the splits that have files of their own, which "" leaves to them.
      named: those of "time", "group" and "split_column" for which a column is named.

    Raises:
      ConfigError: another form, shares that are not 1 together, no training rows, or a column without a use.
    """
    by_name = next((way for way in ("column", "last", "time") if _USES[way][0] in named), "random")
    way, colon, given = (text or by_name).partition(":")
    problem = f"split={text} is not understood."
    if way not in WAYS:
        raise ConfigError(f"{problem} {_FORMS}")
    if idle := [name for name in named if name not in _USES[way]]:
        raise ConfigError(
            f"{idle[0]} names a column, which split={way} does not use. Leave it out, or split otherwise."
        )
    if way == "column" and colon:
        raise ConfigError(f"{problem} Name the column apart: split=column split_column={given or 'COLUMN'}.")
    try:
        amounts = tuple(float(part) for part in given.split(",")) if colon else ()
    except ValueError:
        raise ConfigError(f"{problem} {_FORMS}") from None
    if not amounts and way in ("random", "time"):
        amounts = _SHARES
        if not text and apart:
            validation = 0.0 if "validation" in apart else 0.1
            test = 0.0 if "test" in apart or "validation" in apart else 0.1
            amounts = (round(1 - validation - test, 3), validation, test)
    elif way == "last" and not amounts:
        amounts = _LAST
    if any(not 0 <= amount < np.inf for amount in amounts):
        raise ConfigError(f"{problem} {_FORMS}")
    if way in ("random", "time") and (len(amounts) != 3 or abs(sum(amounts) - 1) > 1e-6 or amounts[0] == 0):
        raise ConfigError(
            f"{problem} Give the shares of training, validation and test, which are 1 together, the first above 0: "
            f"split={way}:0.8,0.1,0.1."
        )
    if way == "last" and (len(amounts) != 2 or any(amount != int(amount) for amount in amounts)):
        raise ConfigError(f"{problem} Give the validation and the test rows of each group: split=last:1,1.")
    return Split(cast(Way, way), amounts)


_FORMS = (
    "It is random:0.8,0.1,0.1 (shares of training, validation and test), time:0.8,0.1,0.1 (with time=COLUMN), last:1,1 "
    "(the last rows of each group, with group=COLUMN and time=COLUMN) or column (with split_column=COLUMN)."
)


def at_random(split: Split, seed: int, start: int, count: int) -> np.ndarray:
    """The splits of rows `start` to `start + count` by a random number for each row: uint8 [count], see SPLITS."""
    first, last = start // ROWS, (start + count - 1) // ROWS
    drawn = [counter_rng.uniform(ROWS, seed, _PURPOSE, block) for block in range(first, last + 1)]
    numbers = np.concatenate(drawn)[start - first * ROWS :][:count]
    return _at(numbers, _edges(split))


def by_time(split: Split, times: np.ndarray) -> np.ndarray:
    """The splits of rows by their times: uint8 [n]. The latest are the test; rows of one time stay together.

    Args:
      split: the shares.
      times: float64 [n], in any order.

    Raises:
      DataError: no row would train.
    """
    places = np.round(_edges(split) * len(times)).astype(np.int64)
    ordered = np.append(np.sort(times), np.inf)
    found = _at(times, ordered[places])
    if len(times) and not (found == 0).any():
        raise DataError(
            f"split=time leaves no row to train on: the earliest time, {ordered[0]:g}, is that of too many rows. Take "
            "another column as time, or split=random."
        )
    return found


def last_of_group(split: Split, groups: np.ndarray, times: np.ndarray | None) -> np.ndarray:
    """The last rows of each group as test, those before them as validation: uint8 [n].

    A group that would have nothing left to train on trains as a whole.

    Args:
      split: how many rows of each.
      groups: integers [n].
      times: float64 [n], by which rows are ordered, and then as they come; None: as they come.
    """
    validation, test = (int(amount) for amount in split.amounts)
    n = len(groups)
    keys = (np.arange(n), groups) if times is None else (np.arange(n), times, groups)
    order = np.lexsort(keys)
    ordered = groups[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if n else np.zeros(0, np.int64)
    sizes = np.diff(np.r_[starts, n])
    left = np.repeat(starts + sizes, sizes) - np.arange(n)  # rows of the group from this one on
    splits = np.where(left <= test, 2, np.where(left <= test + validation, 1, 0))
    splits[np.repeat(sizes, sizes) <= validation + test] = 0
    found = np.empty(n, np.uint8)
    found[order] = splits
    return found


def in_words(split: Split, seed: int, time: str, group: str, column: str, apart: Sequence[str]) -> str:
    """The convention, for `recjax data info`."""
    amounts = ", ".join(f"{name} {a:g}" for name, a in zip(SPLITS[-len(split.amounts) :], split.amounts, strict=False))
    ways: dict[Way, str] = {
        "random": f"by chance (seed {seed}): {amounts}",
        "time": f"by {time}, the latest last: {amounts}",
        "last": f"rows of each {group} that are the last by {time or 'their order'}: {amounts}",
        "column": f"as {column} says",
    }
    return ways[split.way] + (f"; {' and '.join(apart)} from files of their own" if apart else "")


def _edges(split: Split) -> np.ndarray:
    """The shares at which validation and test begin; exactly 1 where there is no test."""
    train, _, test = split.amounts
    return np.array([train, max(train, 1 - test)])


def _at(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts the edges that each value reaches: uint8 [n]."""
    found = values[:, None] >= edges
    return np.asarray(found.sum(axis=1), np.uint8)
