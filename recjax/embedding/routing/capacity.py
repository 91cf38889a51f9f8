"""Sizes of the routing arrays: known before a step, tight, and few, for each set of them compiles the step once more.

A size is a rung of a fixed ladder whose rungs lie 5% apart (8 entries where that is more). It rises as soon as a batch
needs more, to a rung that leaves room for 3% above that, since the next batches' requirements vary; and it falls when
a whole period of steps would have done with a lower one. No batch is ever cut: a batch is routed before its step.

Sizes are a function of the batches seen so far. A checkpoint carries them, so that a resumed run executes the very same
programs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

PERIOD = 256  # steps after which sizes may fall
_ROOM = 1.03
_STEP = 1.05


@functools.cache
def rung(required: int) -> int:
    """The lowest rung of the ladder that holds `required` entries; a multiple of 8."""
    size = 8
    while size < required:
        size = max(size + 8, int(size * _STEP) // 8 * 8)
    return size


def grow(capacities: Mapping[str, int], required: Mapping[str, int]) -> dict[str, int]:
    """The sizes to use from now on, by name: unchanged where they suffice."""
    short = {name: n for name, n in required.items() if capacities.get(name, 0) < n or name not in capacities}
    return {**capacities, **{name: rung(int(n * _ROOM)) for name, n in short.items()}}


def require(capacities: Mapping[str, int], required: Mapping[str, int]) -> None:
    """Refuses capacities that do not hold what is required (ValueError): nothing is ever cut."""
    short = {k: (n, capacities.get(k)) for k, n in required.items() if k not in capacities or capacities[k] < n}
    if short:
        raise ValueError(f"capacities (required, given) are short: {short}; grow them with `capacity.grow` first")


def largest(peaks: Mapping[str, int], required: Mapping[str, int]) -> dict[str, int]:
    """The largest requirement of each name."""
    return {**peaks, **{name: max(n, peaks.get(name, 0)) for name, n in required.items()}}


def shrink(capacities: Mapping[str, int], peaks: Mapping[str, int]) -> dict[str, int]:
    """The sizes to use after a period with these largest requirements: none is higher than before."""
    return {name: min(size, rung(int(peaks.get(name, 0) * _ROOM))) for name, size in capacities.items()}


class CapacityLadder:
    """Sizes for the batches of one stream, in their order.

    Attributes:
      capacities: sizes for the batch that was fitted last.
      peaks: the largest requirements of this period.
      batches: fitted so far, from which periods are counted.
    """

    def __init__(
        self,
        capacities: Mapping[str, int] | None = None,
        peaks: Mapping[str, int] | None = None,
        batches: int = 0,
        period: int | None = PERIOD,
    ) -> None:
        """Starts, or goes on where another ladder was.

        Args:
          capacities: as that had them.
          peaks: likewise.
          batches: likewise.
          period: batches after which sizes may fall; None: they never do.
        """
        self.capacities, self.peaks = dict(capacities or {}), dict(peaks or {})
        self.batches, self._period = batches, period

    def fit(self, required: Mapping[str, int]) -> dict[str, int]:
        """Returns sizes that hold the next batch, and moves on."""
        self.capacities, self.peaks = self._after(self.batches, self.capacities, self.peaks, required)
        self.batches += 1
        return self.capacities

    def foresee(self, required: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """Returns sizes that `fit` would give the last of the next batches, as far as their requirements are known."""
        capacities, peaks = self.capacities, self.peaks
        for number, of_batch in enumerate(required, self.batches):
            capacities, peaks = self._after(number, capacities, peaks, of_batch)
        return capacities

    def _after(
        self, number: int, capacities: dict[str, int], peaks: dict[str, int], required: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes for batch `number`, and the peaks of its period; before it they were these."""
        if self._period and number % self._period == 0 and peaks:
            capacities, peaks = shrink(capacities, peaks), {}
        return grow(capacities, required), largest(peaks, required)
