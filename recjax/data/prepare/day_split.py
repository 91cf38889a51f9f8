"""Splits of a log by day: the last days are test, the days before them validate, and the others train."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from recjax.errors import DataError


def in_words(validation_days: int, test_days: int) -> str:
    """The split convention."""
    return (
        f"by day: the last {test_days} day(s) are test, the {validation_days} before them validation and the others "
        "train; vocabularies come from train only"
    )


@dataclasses.dataclass(frozen=True)
class DaySplits:
    """First days of validation and test.

    Attributes:
      validation: first day of validation, in days since 1970.
      test: first day of test.
    """

    validation: int
    test: int

    def of(self, days: np.ndarray) -> np.ndarray:
        """The split of rows of these days (integers [n]): uint8 [n], index into SPLITS."""
        return (days >= self.validation).astype(np.uint8) + (days >= self.test).astype(np.uint8)


def choose(days: Iterable[int], validation_days: int, test_days: int, source: object) -> DaySplits:
    """The splits of a log that has rows on `days`.

    Args:
      days: since 1970, in any order.
      validation_days: how many of its days validate.
      test_days: how many are test.
      source: the file, for the error message.

    Raises:
      DataError: no day would be left to train.
    """
    found = sorted(set(days))
    train = len(found) - validation_days - test_days
    if train < 1:
        raise DataError(
            f"{source} has rows of {len(found)} day(s), but {validation_days} validate and {test_days} are test, so "
            "none is left to train. Give the whole file, or lower validation_days and test_days."
        )
    ends = [*found, found[-1] + 1]
    return DaySplits(ends[train], ends[train + validation_days])
