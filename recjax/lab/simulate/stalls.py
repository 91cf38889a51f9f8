"""Collectives that a rank's stream stood still for.

While a stream stands still, it waits for an operation, which waited for others before. Every moment belongs to those of
these collectives that are under way then, in equal parts; where none is, to those that wait to begin. What passes then
because ranks came late to them is kept apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stall:
    """A time in which a rank's stream stood still.

    Attributes:
      actor: the rank.
      begin, end: in any unit.
      needs: numbers of the operations whose end it waited for.
    """

    actor: int
    begin: float
    end: float
    needs: Sequence[int]


def shared(
    stalls: Sequence[Stall],
    needs: Sequence[Sequence[int]],
    ready: np.ndarray,
    started: np.ndarray,
    finished: np.ndarray,
    late: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how long each actor's stream stood still for each operation, and how long because it came late to it.

    Args:
      stalls: of all actors.
      needs: of each operation, numbers of those that it depends on.
      ready: float [operations, actors], in the stalls' unit, as in `Played`.
      started: likewise.
      finished: likewise.
      late: from when and until when each actor came late to each operation, likewise.

    Returns:
      Two float [operations, actors], whose sums together are that of the stalls.
    """
    waited, lateness = np.zeros(finished.shape), np.zeros(finished.shape)
    for stall in stalls:
        a = stall.actor
        last = max(stall.needs, key=lambda i: finished[i, a])
        open_then = _open_then(stall, needs, finished)
        times = [(ready[i, a], started[i, a], finished[i, a], i) for i in open_then]
        comes_late = {i: (late[0][i, a], late[1][i, a]) for i in open_then if late[1][i, a] > late[0][i, a]}
        inside = {t for of in (*(of[:3] for of in times), *comes_late.values()) for t in of}
        edges = [stall.begin, *sorted(t for t in inside if stall.begin < t < stall.end), stall.end]
        for low, high in zip(edges, edges[1:], strict=False):
            there = [i for came, _, end, i in times if came <= low and end >= high]
            under_way = [i for _, begun, end, i in times if begun <= low and end >= high]
            overdue = [i for i, (since, until) in comes_late.items() if since <= low and until >= high]
            charged = under_way or overdue or there or [last]
            of = lateness if overdue and not under_way else waited
            of[charged, a] += (high - low) / len(charged)
    return waited, lateness


def _open_then(stall: Stall, needs: Sequence[Sequence[int]], finished: np.ndarray) -> list[int]:
    """The operations that the stall waited for, directly or not, and that were not done when it began."""
    found: dict[int, None] = {}
    left = list(stall.needs)
    while left:
        i = left.pop()
        if i not in found and finished[i, stall.actor] > stall.begin:
            found[i] = None
            left += needs[i]
    return list(found)
