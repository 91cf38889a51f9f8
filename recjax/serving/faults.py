"""Malformed rows of a file to score: the first one stops, or they are left out, counted, and the first few named."""

from __future__ import annotations

from pathlib import Path

from recjax.data.text.fields import Faults
from recjax.errors import DataError

_NAMED = 3


class RowFaults(Faults):
    """What happens to malformed rows.

    Attributes:
      skip: whether rows are left out.
      count: rows that were left out.
      first: what was wrong with the first few of them.
    """

    def __init__(self, skip: bool = False) -> None:
        """With `skip` rows are left out, else the first one raises."""
        super().__init__(skip)
        self.skip = skip
        self.count = 0
        self.first: list[str] = []

    def report(self, file: Path, line: int, kind: str, what: str) -> None:
        """One malformed row; `what` is a sentence or two.

        Raises:
          DataError: unless rows are left out.
        """
        if not self.skip:
            raise DataError(f"{file}:{line}: {what} Or leave such rows out of the scores with on_error=skip.")
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(f"line {line}: {what}")
