"""Sizes of the routing arrays: known before a step, tight, and few, for each set of them compiles the step anew.

A size is a rung of a fixed ladder whose rungs lie 5% apart (8 entries where that is more). It rises as soon as a batch
needs more, to a rung that leaves room for 3% above that need, since the next batches' needs vary; and it falls when a
whole period of steps would have done with a lower one. No batch is ever cut: a batch is counted before its step.

Sizes are a function of the batches seen so far. A checkpoint carries them, so that a resumed run executes the very same
programs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

PERIOD = 256  # steps after which sizes may fall
_ROOM = 1.03
_STEP = 1.05


@functools.cache
def rung(need: int) -> int:
    """The lowest rung of the ladder that holds `need` entries; a multiple of 8."""
    size = 8
    while size < need:
        size = max(size + 8, int(size * _STEP) // 8 * 8)
    return size


def grow(capacities: Mapping[str, int], needs: Mapping[str, int]) -> dict[str, int]:
    """The sizes to use from now on, by name: unchanged where they suffice."""
    short = {name: need for name, need in needs.items() if capacities.get(name, 0) < need or name not in capacities}
    return {**capacities, **{name: rung(int(need * _ROOM)) for name, need in short.items()}}


def require(capacities: Mapping[str, int], needs: Mapping[str, int]) -> None:
    """Refuses capacities that do not hold these needs (ValueError): nothing is ever cut."""
    short = {k: (need, capacities.get(k)) for k, need in needs.items() if k not in capacities or capacities[k] < need}
    if short:
        raise ValueError(f"capacities (needed, given) are short: {short}; grow them with `capacity.grow` first")


def largest(peaks: Mapping[str, int], needs: Mapping[str, int]) -> dict[str, int]:
    """The largest need of each name."""
    return {**peaks, **{name: max(need, peaks.get(name, 0)) for name, need in needs.items()}}


def shrink(capacities: Mapping[str, int], peaks: Mapping[str, int]) -> dict[str, int]:
    """The sizes to use after a period with these largest needs: none is higher than before."""
    return {name: min(size, rung(int(peaks.get(name, 0) * _ROOM))) for name, size in capacities.items()}


def advance(
    step: int, capacities: Mapping[str, int], peaks: Mapping[str, int], needs: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes for a batch with these needs after `step` steps, and the peaks of its period; before it they were these."""
    if step % PERIOD == 0:
        capacities, peaks = shrink(capacities, peaks), {}
    return grow(capacities, needs), largest(peaks, needs)
