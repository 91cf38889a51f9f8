"""The next batch in sight that names each home, while batches come into sight at one end and are admitted at the other.

Batches in sight are two runs. Of the older one it is known which batch names each of a batch's homes next: that was
found once, backwards. Of the newer one only which of its batches names a home first. When the older run is used up, the
newer one takes its place. So a batch costs as many steps as it names homes, however many batches are in sight.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

NEVER = np.iinfo(np.int32).max  # no batch in sight names it


class NextUse:
    """The first batch in sight that names each home. Takes 8 bytes a home, and 4 for each that a batch names."""

    def __init__(self, homes: int, batch: int, window: Iterable[np.ndarray]) -> None:
        """Batches in sight, the first of which has the number `batch`: of each the distinct homes that it names."""
        self._batch = batch  # the oldest one in sight
        self._newer = list(window)
        self._in_newer = np.full(homes, NEVER, np.int32)  # of each home the first batch of that run to name it
        self._in_older = np.full(homes, NEVER, np.int32)
        self._older: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()  # homes, their next batches
        self._take_newer()  # `_in_newer` is not that of a run yet

    def see(self, homes_U: np.ndarray) -> None:
        """Has another batch in sight."""
        number = self._batch + len(self._older) + len(self._newer)
        self._newer.append(homes_U)
        self._in_newer[homes_U[self._in_newer[homes_U] == NEVER]] = number

    def admit(self) -> None:
        """Leaves out the oldest batch."""
        if not self._older:
            self._take_newer()
        homes_U, next_U = self._older.popleft()
        self._in_older[homes_U] = next_U
        self._batch += 1

    def of(self, homes_K: np.ndarray) -> np.ndarray:
        """Batches that name these homes next: int32 [K]; NEVER where none in sight does."""
        return np.minimum(self._in_older[homes_K], self._in_newer[homes_K])

    def _take_newer(self) -> None:
        """Has the newer run take the place of the older one, which is used up."""
        for number, homes_U in reversed(list(enumerate(self._newer, self._batch))):
            self._older.appendleft((homes_U, self._in_older[homes_U]))
            self._in_older[homes_U] = number
            self._in_newer[homes_U] = NEVER
        self._newer = []
