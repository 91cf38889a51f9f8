"""Times of the nodes of a step's graph: list scheduling on the streams of a device, and the critical path.

All devices run one program on parts of equal size, so one device stands for all. Where devices compute on the cores of
their host, each has its share of them: nodes that run at a time and would keep more cores busy are slowed down alike.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

from recjax.planning.costs import Cost, Costs
from recjax.planning.graph import Graph, Node

Stream = Literal["compute", "collective"]
Cores = Sequence[tuple[float, float]]  # shares of the time, and CPU cores that may be kept busy in each
ANY: Cores = ((1.0, math.inf),)


@dataclasses.dataclass(frozen=True)
class Span:
    """Time in which a node ran.

    Attributes:
      node: its place in the graph.
      stream: "compute" or "collective".
      lane: of the stream's, from 0.
      start_us, end_us: from the beginning of the graph.
      after: the node whose end let it begin, by its place; None for what could begin at once.
    """

    node: int
    stream: Stream
    lane: int
    start_us: float
    end_us: float
    after: int | None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The spans of a graph, in the order of its nodes, when the last one ends, and what they cost together.

    Attributes:
      spans: one for each node.
      end_us: of the last one.
      core_us: the time of all nodes, each times the cores that it keeps busy.
      critical: places of the nodes that led to the end, each the reason why the next began when it did.
    """

    spans: tuple[Span, ...]
    end_us: float
    core_us: float
    critical: tuple[int, ...]

    def stretched(self, times: float) -> Schedule:
        """The schedule with every time so many times as long, and no more work in it."""
        if times == 1:
            return self
        spans = tuple(
            dataclasses.replace(span, start_us=times * span.start_us, end_us=times * span.end_us) for span in self.spans
        )
        return dataclasses.replace(self, spans=spans, end_us=times * self.end_us)


def schedule(graph: Graph, costs: Costs, cores: Cores = ANY) -> Schedule:
    """The schedule of a graph on a machine.

    Args:
      graph: of a step.
      costs: of the machine.
      cores: that a device may keep busy; without limit where it does not compute on them.
    """
    machine = costs.machine

    return list_schedule(
        graph.nodes, lambda node: node_cost(node, costs), machine.streams, cores, in_order=not machine.shared
    )


def node_cost(node: Node, costs: Costs) -> Cost:
    """Cost of a node alone: its works one after the other and the overhead of starting it, or that of each turn."""
    machine = costs.machine
    if node.kind == "wait":
        return Cost(0.0)
    if node.body is not None:
        turn = schedule(node.body, costs)  # the schedule around it limits its cores
        us = node.trips * (turn.end_us + machine.overhead("loop"))
        return Cost(us, max(1.0, node.trips * turn.core_us / us) if us else 1.0)
    found = [*(costs.of(work) for work in node.works), costs.reuse(node.uses)]
    longer = machine.overhead("kernels_in_training", 1.0) if node.kind == "kernel" else 1.0
    started = node.launches * machine.overhead("kernel")
    us = started + longer * sum(cost.us for cost in found)
    return Cost(us, (started + longer * sum(cost.us * cost.cores for cost in found)) / us if us else 1.0)


def list_schedule(
    nodes: Sequence[Node], cost: Callable[[Node], Cost], lanes: int, cores: Cores, in_order: bool
) -> Schedule:
    """The schedule of nodes: of those that are ready, the first of the program goes next.

    Args:
      nodes: each after those that it waits for.
      cost: of a node alone.
      lanes: kernels that run at a time; collectives have one lane of their own.
      cores: that those which run may keep busy together; they find each share of the time in turn, and many times over.
      in_order: whether a stream takes its nodes in the order of the program, and waits for each; so it is on
        accelerators. Otherwise what is ready first may go first.
    """
    costs = [cost(node) for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    missing = [len(node.waits_for) for node in nodes]
    for place, node in enumerate(nodes):
        for needed in node.waits_for:
            users[needed].append(place)
    queues: dict[Stream, list[int]] = {"compute": [], "collective": []}
    order: dict[Stream, list[int]] = {"compute": [], "collective": []}
    free: dict[Stream, list[tuple[int, int | None]]] = {
        "compute": [(lane, None) for lane in range(lanes)],
        "collective": [(0, None)],
    }
    for place, node in enumerate(nodes):
        order[_stream(node)].append(place)
    next_in: dict[Stream, int] = {"compute": 0, "collective": 0}
    ready_after: list[int | None] = [None] * len(nodes)
    starts: dict[int, tuple[float, int, int | None]] = {}
    ends = [0.0] * len(nodes)
    running: dict[int, float] = {}  # place -> us left, if it had the cores that it wants
    for place, count in enumerate(missing):
        if not count:
            heapq.heappush(queues[_stream(nodes[place])], place)
    now = 0.0
    spans: list[Span] = []
    while len(spans) < len(nodes):
        for stream, queue in queues.items():
            while queue and free[stream]:
                if in_order and queue[0] != order[stream][next_in[stream]]:
                    break
                place = heapq.heappop(queue)
                next_in[stream] += 1
                lane, before = free[stream].pop(0)
                starts[place] = now, lane, _later(ready_after[place], before, ends)
                running[place] = costs[place].us
        wanted = sum(costs[place].cores for place in running)
        speed = sum(share * min(1.0, held / wanted) for share, held in cores) if wanted else 1.0
        done = min(running, key=lambda place: (running[place], place))
        left = running[done]
        now += left / speed
        for place in running:
            running[place] = max(0.0, running[place] - left)
        del running[done]
        ends[done] = now
        start, lane, after = starts[done]
        stream = _stream(nodes[done])
        spans.append(Span(done, stream, lane, start, now, after))
        free[stream].append((lane, done))
        free[stream].sort(key=lambda item: item[0])
        for user in users[done]:
            missing[user] -= 1
            if not missing[user]:
                ready_after[user] = done
                heapq.heappush(queues[_stream(nodes[user])], user)
    spans.sort(key=lambda span: span.node)
    return Schedule(tuple(spans), now, sum(c.us * c.cores for c in costs), _critical(spans))


def _stream(node: Node) -> Stream:
    return "collective" if node.kind == "collective" else "compute"


def _later(one: int | None, other: int | None, ends: Sequence[float]) -> int | None:
    """The one of two nodes that ended last."""
    known = [place for place in (one, other) if place is not None]
    return max(known, key=lambda place: ends[place], default=None)


def _critical(spans: Sequence[Span]) -> tuple[int, ...]:
    """From the first to the last node of the chain that ends last."""
    if not spans:
        return ()
    place: int | None = max(spans, key=lambda span: (span.end_us, span.node)).node
    chain = []
    while place is not None:
        chain.append(place)
        place = spans[place].after
    return tuple(reversed(chain))
