"""Divides things with several loads among devices, so that the fullest device has as little as possible.

Two ways: `greedy` gives the heaviest first, each to the device that it leaves least full (LPT, Graham 1969).
`largest_differencing` (Karmarkar and Karp 1982) merges, again and again, the two partial divisions whose devices differ
most, the full devices of one onto the empty ones of the other. With a single load the fullest device of the first
has at most 4/3 - 1/(3N) of what is possible, and of the second 7/6 on two devices and 4/3 - 1/(3N) on more (Michiels et
al. 2007). With several loads neither has such a bound, and `divide` takes the better of both.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to be divided.

    Attributes:
      loads: float64 [K], what each of its parts adds to a device; where it adds none of a load, what devices have of
        that does not matter to it.
      parts: equal parts, which must lie on different devices; 1 to N.
    """

    loads: np.ndarray
    parts: int = 1


Owners = list[tuple[int, ...]]  # of each item, the devices of its parts, ascending


def divide(
    items: Sequence[Item], base_NxK: np.ndarray, cost: Callable[[np.ndarray], float]
) -> tuple[Owners, str, float]:
    """The better of both ways, its name and its cost. Deterministic.

    Args:
      items: what to divide.
      base_NxK: loads that the devices have already, all in shares of what is right: 1 is a device's share.
      cost: of the loads that all have in the end, [N, K].
    """
    ways: dict[str, Callable[[Sequence[Item], np.ndarray], Owners]]
    ways = {"largest differencing": largest_differencing, "greedy": greedy}
    found = {name: way(items, base_NxK) for name, way in ways.items()}
    costs = {name: cost(loads(items, owners, base_NxK)) for name, owners in found.items()}
    best = min(costs, key=costs.__getitem__)  # the first of equals
    return found[best], best, costs[best]


def loads(items: Sequence[Item], owners: Owners, base_NxK: np.ndarray) -> np.ndarray:
    """Sums up the loads of each device: float64 [N, K]."""
    sums_NxK = base_NxK.astype(np.float64, copy=True)
    for item, devices in zip(items, owners, strict=True):
        sums_NxK[list(devices)] += item.loads
    return sums_NxK


def greedy(items: Sequence[Item], base_NxK: np.ndarray) -> Owners:
    """The heaviest item first, to the devices whose fullest load is the least with it."""
    sums_NxK = base_NxK.astype(np.float64, copy=True)
    owners: Owners = [()] * len(items)
    for n in _heaviest_first(items):
        item = items[n]
        used_K = item.loads > 0
        devices = _least(sums_NxK[:, used_K] + item.loads[used_K])[: item.parts]
        sums_NxK[devices] += item.loads
        owners[n] = tuple(sorted(devices.tolist()))
    return owners


def _heaviest_first(items: Sequence[Item]) -> list[int]:
    return sorted(range(len(items)), key=lambda n: (-float(items[n].loads.max()), -float(items[n].loads.sum()), n))


def _least(sums_NxK: np.ndarray) -> np.ndarray:
    """The devices by their fullest load, then by all their loads, then by number."""
    return np.lexsort((sums_NxK.sum(1), sums_NxK.max(1, initial=0)))


@dataclasses.dataclass(frozen=True)
class _Partial:
    """A division of some items among N devices that are not named yet.

    Attributes:
      sums_NxK: what each has.
      members: the divisions that it was merged from, each with the device there that is here the n-th; [N].
      item: the item, if it is a division of one alone, on the devices 0 to parts - 1; -1: the base.
    """

    sums_NxK: np.ndarray
    members: tuple[tuple[_Partial, np.ndarray], ...] = ()
    item: int = -1

    def difference(self) -> float:
        return float((self.sums_NxK.max(0) - self.sums_NxK.min(0)).max())


def largest_differencing(items: Sequence[Item], base_NxK: np.ndarray) -> Owners:
    """Merges the two partial divisions that differ most, until one is left."""
    N, K = base_NxK.shape
    partials = [_Partial(base_NxK.astype(np.float64))]
    for n, item in enumerate(items):
        sums_NxK = np.zeros((N, K))
        sums_NxK[: item.parts] = item.loads
        partials.append(_Partial(sums_NxK, item=n))
    heap = [(-partial.difference(), n, partial) for n, partial in enumerate(partials)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (-merged.difference(), number, merged))
        number += 1
    return _owners(heap[0][2], items, N)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Both together: the devices of the one that has fewer in use go, the fullest first, to where they fit best."""
    used_a, used_b = (np.count_nonzero(x.sums_NxK.any(1)) for x in (a, b))
    if used_a < used_b:
        a, b = b, a
    N = len(a.sums_NxK)
    of_b, sums_NxK = np.full(N, -1), a.sums_NxK.copy()
    free = np.ones(N, bool)
    order = np.lexsort((-b.sums_NxK.sum(1), -b.sums_NxK.max(1)))
    used = min(used_a, used_b)
    for device in order[:used]:
        candidates = np.flatnonzero(free)
        best = candidates[_least(a.sums_NxK[candidates] + b.sums_NxK[device])[0]]
        sums_NxK[best] += b.sums_NxK[device]
        of_b[best], free[best] = device, False
    of_b[free] = order[used:]  # which have nothing
    return _Partial(sums_NxK, ((a, np.arange(N)), (b, of_b)))


def _owners(whole: _Partial, items: Sequence[Item], N: int) -> Owners:
    """The devices of each item: those of the base are what they were."""
    device_of: dict[int, np.ndarray] = {}
    stack = [(whole, np.arange(N))]  # a division, and which of its devices the n-th of the whole is
    while stack:
        partial, place_N = stack.pop()
        for member, of_member in partial.members:
            stack.append((member, of_member[place_N]))
        if not partial.members:
            device_of[partial.item] = np.argsort(place_N)  # its devices in the whole
    name_N = np.argsort(device_of[-1])  # of each device of the whole: its number in the base
    return [tuple(sorted(name_N[device_of[n][: item.parts]].tolist())) for n, item in enumerate(items)]
