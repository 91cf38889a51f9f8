"""Malformed rows of a file to score: the first ends the command, or all are left out and counted."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from recjax.data.text.fields import Faults
from recjax.errors import DataError
from recjax.utils.text import nearest

_NAMED = 3


def missing_key(name: str, there: Collection[str]) -> str:
    """Returns the fault of a row that lacks a key, and has others."""
    near = nearest(name, there)
    mend = "Add it" if near is None else f"Rename {near!r}, or add {name!r}"
    has = ", ".join(there)[:200] or "none"
    return f"the key {name!r} is missing; the row has {has}. {mend}, with null where there is no value."


class RowFaults(Faults):
    """Handles malformed rows: raises at the first one, or leaves them out and counts them.

    Attributes:
      skip: True if rows are left out.
      count: rows left out so far.
      first: line and fault of the first few of these.
      left_out: rows that conditions on the data leave out (see recjax.data.arrow.row_filter); they are no faults.
    """

    def __init__(self, skip: bool = False) -> None:
        """Leaves malformed rows out with `skip`; else the first one raises."""
        super().__init__(skip)
        self.skip = skip
        self.count = 0
        self.first: list[str] = []
        self.left_out = 0

    def report(self, file: Path, line: int, kind: str, what: str) -> None:
        """Takes in one malformed row.

        Args:
          file: the file.
          line: the row's line in it, from 1.
          kind: kind of the fault; not used here.
          what: the fault, a sentence or two.

        Raises:
          DataError: rows are not left out.
        """
        if not self.skip:
            raise DataError(f"{file}:{line}: {what} Or leave such rows out of the scores with on_error=skip.")
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(f"line {line}: {what}")
