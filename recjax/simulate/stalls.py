"""Which collectives a rank's stream stood still for.

While a stream stands still, it waits for an operation, which waited for others before. Every moment belongs to those of
these collectives that are under way then, in equal parts; where none is, to those that wait to begin.
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
) -> np.ndarray:
    """How long each actor's stream stood still for each operation.

    Args:
      stalls: of all actors.
      needs: of each operation, numbers of those that it depends on.
      ready: float [operations, actors], in the stalls' unit, as in `Played`.
      started: likewise.
      finished: likewise.

    Returns:
      float [operations, actors]; its sum is that of the stalls.
    """
    waited = np.zeros(finished.shape)
    for stall in stalls:
        a = stall.actor
        last = max(stall.needs, key=lambda i: finished[i, a])
        open_then = _open_then(stall, needs, finished)
        times = [(ready[i, a], started[i, a], finished[i, a], i) for i in open_then]
        inside = {t for of in times for t in of[:3] if stall.begin < t < stall.end}
        edges = sorted({stall.begin, stall.end, *inside})
        for low, high in zip(edges, edges[1:], strict=False):
            there = [i for came, _, end, i in times if came <= low and end >= high]
            under_way = [i for _, begun, end, i in times if begun <= low and end >= high]
            charged = under_way or there or [last]
            waited[charged, a] += (high - low) / len(charged)
    return waited


def _open_then(stall: Stall, needs: Sequence[Sequence[int]], finished: np.ndarray) -> list[int]:
    """What the stall waited for and what that waited for, as far as it was not done when the stall began."""
    found: dict[int, None] = {}
    left = list(stall.needs)
    while left:
        i = left.pop()
        if i not in found and finished[i, stall.actor] > stall.begin:
            found[i] = None
            left += needs[i]
    return list(found)
