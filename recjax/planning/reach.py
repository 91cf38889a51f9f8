"""Distance of a prediction from what was measured on its machine.

Beyond the largest size of a kernel class, and below the least, its time is carried on from there; of a class that was
not measured at all it is the roofline's. Both may be off by a factor, which whoever reads the prediction should know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recjax.planning.costs import Costs
from recjax.planning.graph import Graph
from recjax.planning.machine import Machine
from recjax.planning.work import Work

_FAR = 8.0  # times as large as the largest point, or as small as the least
_SHARE = 0.03  # of the time of all kernels: less does not matter


@dataclasses.dataclass(frozen=True)
class Outside:
    """A kernel class of which a step needs sizes far from those that were measured.

    Attributes:
      kernel: name of the class.
      times: how far outside, the most of all its kernels; None if no size of the class was measured.
      share: of the time of all kernels and collectives that these take.
    """

    kernel: str
    times: float | None
    share: float


def outside(graph: Graph, machine: Machine) -> list[Outside]:
    """Classes that the prediction of a graph carries on far beyond their points, those that take longest first.

    Args:
      graph: of one device.
      machine: that it is predicted on; of one that was not measured there is nothing to say.
    """
    if not machine.measured:
        return []
    costs = Costs(machine)
    total, far = 0.0, dict[str, tuple[float, float]]()
    for work, count in _works(graph, 1):
        us, times = count * costs.of(work).us, costs.outside(work)
        total += us
        if times > _FAR:
            before, most = far.get(work.kernel, (0.0, 0.0))
            far[work.kernel] = before + us, max(most, times)
    found = [
        Outside(kernel, times if math.isfinite(times) else None, us / total)
        for kernel, (us, times) in far.items()
        if us > _SHARE * total
    ]
    return sorted(found, key=lambda one: -one.share)


def _works(graph: Graph, count: int) -> Iterator[tuple[Work, int]]:
    for node in graph.nodes:
        if node.body is not None:
            yield from _works(node.body, count * node.trips)
        for work in node.works:
            yield work, count * node.trips


def to_text(found: Iterable[Mapping[str, Any]]) -> str:
    """One line for people, of `Outside` as JSON values; "" if there are none."""
    said = []
    for one in found:
        far = "no size measured" if one["times"] is None else f"by a factor of up to {one['times']:,.0f}"
        said.append(f"{one['kernel']} ({far}, {one['share']:.0%} of the kernels' time)")
    return f"far outside of the sizes that the machine file has: {', '.join(said)}" if said else ""
