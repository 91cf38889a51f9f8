"""A predicted training step: the slowest of the host's threads, the devices' critical path and what they share.

Worker threads read and route batches ahead, the main thread packs, places and dispatches them while the devices work on
the step before: in the middle of a training the step takes as long as the slowest of these. All threads of the host
share the interpreter, whose lock they hold for most of their time. Where devices compute on the cores of their host
(CPU), a kernel has one of these less while a thread of the host runs, and all of it together cannot take less than its
CPU time over the cores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recjax.planning.costs import Cost, Costs
from recjax.planning.graph import Graph
from recjax.planning.machine import Machine
from recjax.planning.schedule import Schedule, schedule
from recjax.planning.step_sizes import Routed
from recjax.planning.work import Work

WORKERS, MAIN, INTERPRETER = "reading and routing", "main thread", "interpreter"
DEVICES, CORES = "devices", "CPU cores"
_ROUNDS = 4  # of finding a step's time and what of the cores the host takes in it
_AHEAD = ("host_read", "host_route")  # what worker threads do
_FAR = 8.0  # times as large as the largest point, or as small as the least
_SHARE = 0.03  # of the time of all kernels: less does not matter


@dataclasses.dataclass(frozen=True)
class HostWork:
    """Work of the host for a step.

    Attributes:
      samples: of a batch.
      ids: of a batch.
      features: that look up tables.
      placed_bytes, placed_arrays: what goes to the devices.
      arguments: arrays that the compiled step is called with.
      devices: how many it runs on.
      workers: threads that read and route ahead; 0: the main thread does.
      routes: whether the host finds the distinct rows, and not the devices.
      source: kind of the data that are read; "packed" if rows of them are taken, "resident" if their numbers suffice.
      ordered: whether samples are read as they lie, and not in an order that was drawn.
      hosts: that share all this evenly, each for its own devices.
      routed: the ids by the way in which they are routed; () if rows are listed for all of them.
      steps: K, of a call of the program.
      in_rows: whether samples travel as rows of words, which the threads that read lay out for a call.
    """

    samples: int
    ids: int
    features: int
    placed_bytes: int
    placed_arrays: int
    arguments: int
    devices: int
    workers: int
    routes: bool = True
    source: str = ""
    ordered: bool = False
    hosts: int = 1
    routed: tuple[Routed, ...] = ()
    steps: int = 1
    in_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step. Times in us.

    Attributes:
      machine: on which.
      graph: what a device does.
      schedule: when.
      host: of the host.
      stages: host stage -> time of one thread.
      bounds: what the step may wait for -> how long that takes; the longest is the step. In a training each takes
        longer than its work, see `Machine.longer`.
      missing: host stages that the machine file says nothing of; they count as nothing.
    """

    machine: Machine
    graph: Graph
    schedule: Schedule
    host: HostWork
    stages: dict[str, float]
    bounds: dict[str, float]
    missing: tuple[str, ...]

    @property
    def step_us(self) -> float:
        """Time of a step."""
        return max(self.bounds.values())

    @property
    def bound_by(self) -> str:
        """Resource that it waits for."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def samples_per_s(self) -> float:
        """Samples of all devices."""
        return self.host.samples / self.step_us * 1e6

    @property
    def cpu_us(self) -> float | None:
        """CPU time of a step, of the host's threads and the devices that share its cores; None if they do not."""
        if not self.machine.shared:
            return None
        return self.bounds[CORES] * self.machine.cores / self.machine.longer(self.host.devices)

    @property
    def exposed_us(self) -> float:
        """Time that the devices wait for collectives alone: in which no kernel runs and a collective does."""
        edges = sorted(
            edge
            for span in self.schedule.spans
            for edge in ((span.start_us, 1, span.stream), (span.end_us, -1, span.stream))
        )
        open_now = {"compute": 0, "collective": 0}
        exposed = last = 0.0
        for at, change, stream in edges:
            if open_now["collective"] and not open_now["compute"]:
                exposed += at - last
            open_now[stream] += change
            last = at
        return exposed


def predict(graph: Graph, machine: Machine, host: HostWork, costs: Costs | None = None) -> Prediction:
    """A step of a graph on a machine.

    Args:
      graph: of one device.
      machine: what the devices and the host are.
      host: what the host does.
      costs: of the machine; None makes them.
    """
    costs = costs or Costs(machine, host.devices)
    stages, missing = _stages(costs, host, graph.launches)
    ahead = stages["host_read"], stages["host_route"]
    routed = sum(cost.us for cost in ahead)
    main = sum(cost.us for stage, cost in stages.items() if stage not in _AHEAD)
    bounds = {
        WORKERS: sum(cost.us / min(cost.cores, host.workers) for cost in ahead) if host.workers else 0.0,
        MAIN: main + (0.0 if host.workers else routed),
        INTERPRETER: main + sum(cost.us / cost.cores for cost in ahead),
    }
    if not machine.shared:
        found = schedule(graph, costs)
    else:
        busy_us = machine.overhead("host_in_training", 1.0) * (routed + main)
        found, bounds[CORES] = _beside_host(graph, costs, busy_us, max(bounds.values()), host.devices)
    bounds[DEVICES] = found.end_us
    longer = machine.longer(host.devices)
    found, bounds = found.stretched(longer), {name: longer * us for name, us in bounds.items()}
    times = {stage: cost.us for stage, cost in stages.items()}
    return Prediction(machine, graph, found, host, times, bounds, missing)


def _beside_host(graph: Graph, costs: Costs, host_us: float, least_us: float, devices: int) -> tuple[Schedule, float]:
    """The schedule of devices on the cores that their host's threads leave them, and all work over all cores, us.

    Args:
      graph: of one device.
      costs: of the machine.
      host_us: CPU time for the host's stages in a step, of its own threads and of those that work for them.
      least_us: that a step takes at least.
      devices: that share the cores.
    """
    cores = costs.machine.cores
    busy = 0.0  # threads of the host, on average: a kernel finds a core taken, or not
    for _ in range(_ROUNDS):
        whole = math.floor(busy)
        left = [(1 - busy + whole, (cores - whole) / devices), (busy - whole, max(1, cores - whole - 1) / devices)]
        found = schedule(graph, costs, left)
        together = (devices * found.core_us + host_us) / cores
        step_us = max(found.end_us, together, least_us)
        before, busy = busy, min(host_us / step_us, cores - 1) if step_us else 0.0
        if math.isclose(busy, before, rel_tol=1e-3, abs_tol=1e-3):
            break
    return found, together


def _stages(costs: Costs, host: HostWork, launches: int) -> tuple[dict[str, Cost], tuple[str, ...]]:
    """Costs of the stages of one of the hosts, and which of them the machine does not know.

    What is placed and dispatched once a call counts by its share of a step. Where rows of the data are taken, or their
    numbers, a machine that was measured without that says nothing of reading: what it knows of blocks is far more.

    Args:
      costs: of the machine.
      host: what the hosts do.
      launches: of kernels in a step, by each device.
    """
    arrays = 1.0 if host.in_rows else float(max(1, host.placed_arrays) * host.steps)
    arguments, devices = max(1, host.arguments), host.devices / host.hosts
    sizes = {"ids": max(1.0, host.ids / host.hosts), "features": float(max(1, host.features))}
    wanted: dict[str, Mapping[str, float]] = {
        "host_read": {"samples": max(1.0, host.samples / host.hosts), **sizes},
        "host_route": {},
        "host_pack": {},
        "host_place": {
            "bytes": max(1.0, host.placed_bytes * host.steps / host.hosts),
            "arrays": arrays,
            "devices": devices,
        },
        "host_dispatch": {"arguments": float(arguments), "devices": devices},
    }
    read = f"host_read.{host.source}"
    by_row = host.source in ("packed", "resident")
    if host.ordered and not by_row and read not in costs.machine.kernels:
        read += "_in_order"
    stages: dict[str, Cost] = {}
    missing = []
    for stage, of_stage in wanted.items():
        name = read if stage == "host_read" else stage
        cost = Cost(0.0)
        if (stage == "host_route" and not host.routes) or (stage == "host_pack" and host.in_rows):
            pass
        elif stage == "host_read" and by_row and read not in costs.machine.kernels:
            missing.append(stage)
        elif stage == "host_dispatch" and costs.machine.knows(name):
            call = costs.host(name, arguments=float(arguments), devices=devices)
            launched_us = launches * costs.machine.overhead("launch")  # each device has a thread for that
            cost = Cost(call.us / host.steps + launched_us, call.cores)
        elif costs.machine.knows(name):
            cost = _routing(costs, host, name, devices) if not of_stage else costs.host(name, **of_stage)
            cost = Cost(cost.us / host.steps, cost.cores) if stage == "host_place" else cost
        elif stage == "host_place" and "host_link" in costs.machine.rates:
            cost = Cost(host.placed_bytes / host.devices / costs.machine.rate("host_link") * 1e6)  # each has its own
        else:
            missing.append(stage)
        stages[stage] = cost
    return stages, tuple(missing)


def _routing(costs: Costs, host: HostWork, stage: str, devices: float) -> Cost:
    """The cost of routing or packing on one of the hosts: of all ways of its ids, one after the other."""
    found = []
    for part in host.routed or (Routed("", host.ids, host.features),):
        sizes = {"ids": max(1.0, part.ids / host.hosts), "features": float(max(1, part.features))}
        name = f"{stage}.{part.by}" if part.by else stage
        found.append(costs.host(name, **sizes, devices=part.owners or devices))
    us = sum(cost.us for cost in found)
    return Cost(us, us / sum(cost.us / cost.cores for cost in found) if us else 1.0)


def figures(prediction: Prediction) -> dict[str, Any]:
    """The prediction as JSON values.

    Returns:
      "machine", "measured_machine"; "step_ms", "samples_per_s", "bound_by", "cpu_ms"; "bounds_ms"; "host_ms" by stage;
      "device": "kernels", "collectives", "gflop", "exposed_ms" of collectives; "parts_ms", each moment split among what
      runs then; "critical_path", "nodes", "parts_ms" and the "longest" of it, each with "name", "part", "kind",
      "start_ms", "ms"; "unknown" and "missing", what is not in it; "outside", see `Outside`.
    """
    spans, nodes = prediction.schedule.spans, prediction.graph.nodes
    path: list[dict[str, Any]] = [
        {
            "name": nodes[place].name,
            "part": nodes[place].part,
            "kind": nodes[place].kind,
            "start_ms": spans[place].start_us / 1e3,
            "ms": (spans[place].end_us - spans[place].start_us) / 1e3,
        }
        for place in prediction.schedule.critical
    ]
    on_path: dict[str, float] = {}
    for one in path:
        on_path[one["part"]] = on_path.get(one["part"], 0.0) + one["ms"]
    machine = prediction.machine
    return {
        "machine": machine.name,
        "measured_machine": machine.measured,
        "machine_from": dict(machine.where),
        "step_ms": prediction.step_us / 1e3,
        "samples_per_s": prediction.samples_per_s,
        "bound_by": prediction.bound_by,
        "cpu_ms": None if prediction.cpu_us is None else prediction.cpu_us / 1e3,
        "bounds_ms": {name: us / 1e3 for name, us in prediction.bounds.items()},
        "host_ms": {name.removeprefix("host_"): us / 1e3 for name, us in prediction.stages.items()},
        "device": {
            "kernels": sum(node.kind == "kernel" for node in nodes),
            "collectives": sum(node.kind == "collective" for node in nodes),
            "gflop": prediction.graph.flops / 1e9,
            "exposed_ms": prediction.exposed_us / 1e3,
        },
        "parts_ms": {name: us / 1e3 for name, us in parts(prediction).items()},
        "critical_path": {
            "nodes": len(path),
            "parts_ms": dict(sorted(on_path.items(), key=lambda item: -item[1])),
            "longest": sorted(path, key=lambda one: -one["ms"])[:10],
        },
        "unknown": list(prediction.graph.unknown),
        "missing": [name.removeprefix("host_") for name in prediction.missing],
        "outside": [dataclasses.asdict(one) for one in outside(prediction.graph, machine)],
    }


def parts(prediction: Prediction) -> dict[str, float]:
    """The time of each part of the step, us, the largest first; a moment is split among the nodes that run."""
    nodes = prediction.graph.nodes
    edges = sorted(
        edge
        for span in prediction.schedule.spans
        if span.end_us > span.start_us
        for edge in ((span.start_us, 1, span.node), (span.end_us, 0, span.node))
    )
    found: dict[str, float] = {}
    running: set[int] = set()
    last = 0.0
    for at, begins, node in edges:
        for other in running:
            part = nodes[other].part
            found[part] = found.get(part, 0.0) + (at - last) / len(running)
        if begins:
            running.add(node)
        else:
            running.discard(node)
        last = at
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclasses.dataclass(frozen=True)
class Outside:
    """A kernel class of which a step needs sizes far from those that were measured.

    Beyond these its time is carried on from the nearest, and is the roofline's where none was measured at all. Both may
    be off by a factor, which whoever reads the prediction should know.

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


def outside_text(found: Iterable[Mapping[str, Any]]) -> str:
    """One line for people, of `Outside` as JSON values; "" if there are none."""
    said = []
    for one in found:
        far = "no size measured" if one["times"] is None else f"by a factor of up to {one['times']:,.0f}"
        said.append(f"{one['kernel']} ({far}, {one['share']:.0%} of the kernels' time)")
    return f"far outside of the sizes that the machine file has: {', '.join(said)}" if said else ""
