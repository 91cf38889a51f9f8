"""The rows of caches that a training has changed since a checkpoint: a bit for each home.

A step changes rows that its batch names and no others, so a row is marked when a batch that names it is admitted. What
is marked is also what the host may have an old record of.

A checkpoint begins with all marks so far, and later ones are set apart from them. They are dropped only when it is
complete: if it fails, or nobody says that it is complete, the next one begins with them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recjax.embedding.group import Group

_AT_ONCE = 1 << 17  # bytes of marks that are looked through, of 8 homes each


class Changes:
    """Marks of the homes of each owner of each group. One thread calls it.

    Attributes:
      since: the checkpoint since which rows are marked, as its writer names it; (): there is none that rows which are
        not marked could be taken from.
      begun: checkpoints that have begun.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        """No row is marked; a mark takes a quarter of a byte."""
        self._new, self._begun = (
            {name: [np.zeros(-(-g.home_rows // 8), np.uint8) for _ in range(g.owners)] for name, g in groups.items()}
            for _ in range(2)
        )
        self.since: tuple[Any, ...] = ()
        self.begun = 0

    def mark(self, name: str, owner: int, homes_U: np.ndarray) -> None:
        """Marks homes of an owner of a group, int32 [U], ascending and all different."""
        if len(homes_U):
            at_U, bits_U = homes_U >> 3, np.left_shift(1, homes_U & 7).astype(np.uint8)
            first = np.flatnonzero(np.diff(at_U, prepend=-1))
            self._new[name][owner][at_U[first]] |= np.bitwise_or.reduceat(bits_U, first)

    def marked(self, name: str, owner: int, homes_K: np.ndarray) -> np.ndarray:
        """Returns whether each home has been marked since a checkpoint last began, bool [K]."""
        found: np.ndarray = (self._new[name][owner][homes_K >> 3] >> (homes_K & 7)) & 1 == 1
        return found

    def begin(self) -> None:
        """Begins a checkpoint, after the host has got the records of all that is marked: `homes` are its rows."""
        self.begun += 1
        for name, of_owners in self._new.items():
            for new, begun in zip(of_owners, self._begun[name], strict=True):
                begun |= new
                new[:] = 0

    def homes(self, name: str, owner: int, first: int, last: int) -> np.ndarray:
        """The homes from `first` to below `last` that were marked when the checkpoint began, int32 [K], ascending."""
        marks, found = self._begun[name][owner][first // 8 : -(-last // 8)], [np.zeros(0, np.int32)]
        for start in range(0, len(marks), _AT_ONCE):
            bits = np.unpackbits(marks[start : start + _AT_ONCE], bitorder="little")
            found.append((np.flatnonzero(bits) + 8 * (first // 8 + start)).astype(np.int32))
        homes_K = np.concatenate(found)
        return homes_K[(homes_K >= first) & (homes_K < last)]

    def complete(self, since: tuple[Any, ...]) -> None:
        """Takes in that the checkpoint that began last is complete, under this name."""
        self.since = since
        _clear(self._begun)

    def clear(self) -> None:
        """Forgets all marks; there is no checkpoint since which there are any."""
        self.complete(())
        _clear(self._new)


def _clear(marks: Mapping[str, list[np.ndarray]]) -> None:
    for of_owners in marks.values():
        for own in of_owners:
            own[:] = 0
