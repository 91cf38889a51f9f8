"""Sizes of the routing arrays: known before a step, tight, and few, for each set of them compiles the step once more.

A size is a rung of a fixed ladder whose rungs lie 5% apart (8 entries where that is more). It rises as soon as a batch
needs more, to a rung that leaves room for 3% above that, since the next batches' requirements vary; and it falls when
a whole period of steps would have done with a fifth less. Periods are 256 steps, then twice as many each time: what
falls too early rises again. No batch is ever cut: a batch is routed before its step.

Sizes of a kind rise at once (`Kinds`): each of dozens of jagged features has its own largest batch, and a program for
every one of these is worth less than the padding that it saves. Where one size has to rise, all get room above the
largest batch of the period, since a program is compiled in any case. The fewer entries a size holds, the more their
number varies, so that few begin with more room than many: see `JAGGED`.

Sizes are a function of the batches seen so far. A checkpoint carries them, so that a resumed run executes the very same
programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from recjax.embedding.layout import ACROSS, IDS, PAIRS, ROWS, SUMMED, BoundPlan

PERIOD = 256  # steps after which sizes may fall
ROOM = 1.03  # that a first size leaves at least
_STEP = 1.05
_NEAR = 0.95  # of a size, that a batch of this period has needed: then the next batch may need more than the size
_WORTH = 0.8  # sizes that are not below this share of what they were do not fall: each change compiles a program


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes that rise and fall at once.

    Attributes:
      swing: standard deviations of a count, as if it were Poisson's, for which a first size leaves room.
      least: by which factor sizes rise, at least, once one of them has to.
      most: by which factor the others rise, at most.
      spare: entries of which a size leaves room for, beside: one bag may be longer than all that were seen.
      names: of the sizes.
    """

    swing: float
    least: float
    most: float
    spare: int = 0
    names: frozenset[str] = frozenset()

    def room(self, required: int) -> float:
        """The factor above what is required that a size leaves room for, at most 3."""
        n = max(1, required)
        return max(ROOM, 1 + min(2.0, self.swing / math.sqrt(n) + self.spare / n))


# Of thousands of batches the largest list of rows lies up to four standard deviations (as Poisson's) above that of the
# first batch, which may be one of the smaller ones. Ids of jagged bags vary more, with the lengths of bags: one may be
# longer than all that were before, and the longest grows with the number of batches. So sizes rise by a quarter there,
# and few programs follow each other.
JAGGED = Kind(14.0, 1.25, 1.5, 800)
LISTED_IDS = Kind(14.0, 1.15, 1.5)
LISTED_ROWS = Kind(4.0, 1.1, 1.1)
_ONE = Kind(0.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The kinds of sizes; one of none of them rises and falls alone."""

    kinds: tuple[Kind, ...] = ()

    @classmethod
    def of(cls, bound: BoundPlan) -> Kinds:
        """Makes the kinds of a bound plan."""
        specs = [lookup.spec for lookup in bound.lookups]
        jagged = [spec.name for spec in specs if spec.bag is None] + [s.name + PAIRS for s in specs if s.beside]
        lists = [group.name + step for group in bound.groups for step in ("", ACROSS, SUMMED, ROWS)]
        ids: list[str] = []
        for exchange in (exchange for exchange in bound.pooled if exchange.counted):
            ids += [exchange.name, *(group.name + IDS for group in exchange.groups)]
        return cls.of_names(jagged, ids, lists)

    @classmethod
    def of_names(cls, jagged: Iterable[str], ids: Iterable[str], rows: Iterable[str]) -> Kinds:
        """Makes kinds of jagged features, of lists of ids on the wire, and of lists of rows there."""
        named = ((JAGGED, jagged), (LISTED_IDS, ids), (LISTED_ROWS, rows))
        return cls(tuple(dataclasses.replace(kind, names=frozenset(names)) for kind, names in named))

    def split(self, names: Iterable[str]) -> Iterator[tuple[Kind, list[str]]]:
        """The kinds that some names are of, with these."""
        left = list(names)
        for kind in self.kinds:
            if own := [name for name in left if name in kind.names]:
                yield kind, own
        alone = [name for name in left if not any(name in kind.names for kind in self.kinds)]
        yield from ((dataclasses.replace(_ONE, names=frozenset({name})), [name]) for name in alone)


ALONE = Kinds()


@functools.cache
def rung(required: int) -> int:
    """The lowest rung of the ladder that holds `required` entries; a multiple of 8."""
    size = 8
    while size < required:
        size = max(size + 8, int(size * _STEP) // 8 * 8)
    return size


def grow(
    capacities: Mapping[str, int],
    required: Mapping[str, int],
    kinds: Kinds = ALONE,
    peaks: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """The sizes to use from now on, by name: unchanged where all suffice; else all have room above these peaks."""
    grown = dict(capacities)
    for kind, names in kinds.split({**capacities, **required}):
        late = [required[n] / capacities[n] for n in names if capacities.get(n, math.inf) < required.get(n, 0)]
        factor = max(kind.least, max(late) * ROOM) if late else 1.0
        for name in names:
            need, size = required.get(name, 0), capacities.get(name)
            if size is None:
                grown[name] = rung(int(need * kind.room(need)))
            elif size < need:
                grown[name] = rung(int(max(need * ROOM, size * min(kind.least, kind.most))))
            elif late:
                grown[name] = rung(int(size * min(factor, kind.most)))
    if any(grown[name] > size for name, size in capacities.items()):
        for kind, names in kinds.split(grown):
            for name in names:
                if (need := int(peaks.get(name, 0) * kind.least)) > grown[name]:
                    grown[name] = rung(need)
    return grown


def require(capacities: Mapping[str, int], required: Mapping[str, int]) -> None:
    """Refuses capacities that do not hold what is required (ValueError): nothing is ever cut."""
    short = {k: (n, capacities.get(k)) for k, n in required.items() if k not in capacities or capacities[k] < n}
    if short:
        raise ValueError(f"capacities (required, given) are short: {short}; grow them with `capacity.grow` first")


def largest(peaks: Mapping[str, int], required: Mapping[str, int]) -> dict[str, int]:
    """The largest requirement of each name."""
    return {**peaks, **{name: max(n, peaks.get(name, 0)) for name, n in required.items()}}


def shrink(capacities: Mapping[str, int], peaks: Mapping[str, int], kinds: Kinds = ALONE) -> dict[str, int]:
    """The sizes to use after a period with these largest requirements: none is higher than before."""
    fallen = dict(capacities)
    for kind, names in kinds.split(capacities):
        lower = {n: min(capacities[n], rung(int(peaks.get(n, 0) * kind.room(peaks.get(n, 0))))) for n in names}
        if sum(lower.values()) < _WORTH * sum(capacities[name] for name in names):
            fallen |= lower
    return fallen


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
        kinds: Kinds = ALONE,
    ) -> None:
        """Starts, or goes on where another ladder was.

        Args:
          capacities: as that had them.
          peaks: likewise.
          batches: likewise.
          period: batches after which sizes may fall; None: they never do.
          kinds: of the sizes.
        """
        self.capacities, self.peaks = dict(capacities or {}), dict(peaks or {})
        self.batches, self._period, self._kinds = batches, period, kinds

    def fit(self, required: Mapping[str, int]) -> dict[str, int]:
        """Returns sizes that hold the next batch, and moves on."""
        self.capacities, self.peaks = self._after(self.batches, self.capacities, self.peaks, required)
        self.batches += 1
        return self.capacities

    def raise_to(self, required: Mapping[str, int]) -> dict[str, int]:
        """Returns sizes that hold a batch which was fitted before it was known what it needs."""
        self.capacities = grow(self.capacities, required, self._kinds, self.peaks)
        self.peaks = largest(self.peaks, required)
        return self.capacities

    def next(self) -> dict[str, int] | None:
        """Returns sizes that may follow these: those after the fullest size has run out. None if none is nearly full.

        It is what `fit` gives if a batch needs little more than that size, and no more of the others than before.
        """
        filled, name = max(((self.peaks.get(n, 0) / size, n) for n, size in self.capacities.items()), default=(0.0, ""))
        if filled < _NEAR:
            return None
        return grow(self.capacities, {name: self.capacities[name] + 1}, self._kinds, self.peaks)

    def _after(
        self, number: int, capacities: dict[str, int], peaks: dict[str, int], required: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes for batch `number`, and the peaks of its period; before it they were these."""
        if self._period and number % self._period == 0 and peaks and _power_of_two(number // self._period + 1):
            capacities, peaks = shrink(capacities, peaks, self._kinds), {}
        return grow(capacities, required, self._kinds, peaks), largest(peaks, required)


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
