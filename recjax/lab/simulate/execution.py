"""The system of a rank: collectives are cut into chunks, chunks are admitted by a schedule, computation goes on beside.

An operation's chunks go through the phases of its algorithm one after the other; a rank works on at most `in_flight`
chunks of each set of dimensions at a time. Which chunk is next is decided once, by the first rank that has room for
one: the others follow in the same order, as in a real library, or ranks could wait for each other forever.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from recjax.errors import ConfigError
from recjax.lab.simulate import compiled
from recjax.lab.simulate.collectives import Phase, Schedule, Send, phases
from recjax.lab.simulate.engine import Run
from recjax.lab.simulate.lower import TICKS_PER_NS, Network, NotSymmetricError, Program, Quotient, groups_of
from recjax.lab.simulate.stalls import Stall, shared
from recjax.lab.simulate.system import DEFAULT_ALGORITHMS, Result, System
from recjax.lab.simulate.topology import Topology
from recjax.lab.simulate.workload import Operation, Workload

Watch = Callable[[float, float], None]
_COMPUTE = -(1 << 60)  # labels of computations: before all messages of the same time


def simulate(
    workload: Workload,
    topology: Topology,
    system: System,
    shortcut: Literal["auto", "never", "always"] = "auto",
    watch: Watch | None = None,
) -> Result:
    """Plays a workload.

    Args:
      workload: from `workload`, `dlrm` or `astra_text`.
      topology: of all ranks.
      system: how they communicate.
      shortcut: whether one rank may stand for all: where that is exact ("auto"), "never", or "always": an error where
        it is not.
      watch: called whenever a rank is done with an operation: the share of all that is done, and the time in ns.

    Raises:
      ConfigError: an algorithm that does not fit, or a shortcut that would not be exact.
    """
    refused = ""
    if shortcut != "never":
        try:
            one = functools.partial(Quotient, topology, system.tcp is not None)
            return _played(workload, topology, system, one, watch, "rank 0 stands for all", "")
        except NotSymmetricError as why:
            refused = str(why)
            if shortcut == "always":
                raise ConfigError(
                    f"one rank cannot stand for all of this: {refused}. Without --shortcut always every rank is "
                    "simulated."
                ) from why
    return _played(workload, topology, system, functools.partial(Network, topology), watch, "", refused)


def _played(
    workload: Workload,
    topology: Topology,
    system: System,
    network: Callable[[], Network],
    watch: Watch | None,
    *how: str,
) -> Result:
    """Plays it on such a network; `how`: as in `_Execution.result`."""
    try:
        return _Execution(workload, topology, system, network(), watch).result(*how)
    except compiled.TooLateError:  # Python's integers have no end
        return _Execution(workload, topology, system, network(), watch, plain=True).result(*how)


class _Lane:
    """The chunks of one set of dimensions: the order in which they are admitted, and each actor's place in it."""

    def __init__(self, actors: int) -> None:
        self.order: list[_Chunk] = []
        self.place = [0] * actors
        self.active = [0] * actors
        self.ready: list[list[tuple[Any, int, _Chunk]]] = [[] for _ in range(actors)]


class _Chunk:
    """A phase of a chunk of an operation."""

    __slots__ = ("issue", "left", "number", "operation", "phase", "run", "state")
    run: Any  # of the engine

    def __init__(self, operation: int, number: int, phase: int, issue: int, actors: int) -> None:
        self.operation, self.number, self.phase = operation, number, phase
        self.issue = issue  # the operation's place among those that its first rank has issued
        self.left = actors
        self.state = bytearray(actors)  # of each actor: _NOT_YET, _READY, _ADMITTED


_NOT_YET, _READY, _ADMITTED = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """A phase of an operation on the network: its lane, and a program for each chunk number modulo their count."""

    dims: Any
    programs: tuple[Program, ...]
    label: int  # of the first chunk's first event
    labels: int  # of a chunk


class _Execution:
    """One play of a workload."""

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        system: System,
        network: Network,
        watch: Watch | None,
        plain: bool = False,
    ) -> None:
        self.workload, self.topology, self.system, self.network = workload, topology, system, network
        operations, actors = workload.operations, network.actors
        self.durations = [self._ticks(operation, operation.duration_ns) for operation in operations]
        self.late = [self._ticks(operation, operation.late_ns or 0.0) for operation in operations]
        self.members = [self._members(operation) for operation in operations]
        label = 0
        self.plans: list[list[_Plan]] = []
        for operation in operations:
            plans, label = self._plans(operation, label)
            self.plans.append(plans)
        delays = round(system.endpoint_delay_ns * TICKS_PER_NS), round(system.copy_latency_ns * TICKS_PER_NS)
        self.engine: Any = compiled.engine(network, *delays, system.congestion, system.tcp, plain)
        places = {operation.name: i for i, operation in enumerate(operations)}
        self.needs = [sorted({places[name] for name in operation.depends_on}) for operation in operations]
        self.followers: list[list[int]] = [[] for _ in operations]
        for i, needs in enumerate(self.needs):
            for need in needs:
                self.followers[need].append(i)
        computes = [i for i, operation in enumerate(operations) if operation.kind == "compute"]
        self.streams = [[i for i in computes if self.members[i][actor]] for actor in range(actors)]
        shape = (len(operations), actors)
        self.ready, self.started, self.finished = (np.full(shape, np.nan) for _ in range(3))
        self.stalls: list[Stall] = []  # in ticks
        self.missing = [[len(needs)] * actors for needs in self.needs]
        self.watch, self.done = watch, 0
        self.next = [0] * actors  # in the stream
        self.busy = [False] * actors
        self.idle_since = [0] * actors
        self.issued = [0] * actors
        self.chunks_left = [[system.chunks] * actors for _ in operations]
        self.chunks: dict[tuple[int, int, int], _Chunk] = {}
        self.lanes: dict[Any, _Lane] = {plan.dims: _Lane(actors) for plans in self.plans for plan in plans}

    def result(self, shortcut: str, refused: str) -> Result:
        """Plays it."""
        for i, needs in enumerate(self.needs):
            if not needs:
                for actor in range(self.network.actors):
                    self.engine.at(0, _COMPUTE + i, actor, functools.partial(self._unblock, i))
        self.engine.play()
        if np.isnan(self.finished).any():
            stuck = self.workload.operations[int(np.isnan(self.finished).any(axis=1).argmax())].name
            raise RuntimeError(f"the simulation stood still before {stuck!r} was done")
        end = self.finished.max(axis=0, initial=0)
        self._wait_at_the_end(end)
        late = np.array(self.late, float).reshape(self.finished.shape)
        came = self.ready, self.ready + late
        waited, lateness = shared(self.stalls, self.needs, self.ready, self.started, self.finished, came)
        computes = np.array([operation.kind == "compute" for operation in self.workload.operations], bool)
        lateness[computes] = (late * np.array(self.members, float).reshape(late.shape))[computes]
        used = {link: size for link, size in enumerate(self.engine.bytes_on) if size}
        scale, lost = 1 / TICKS_PER_NS, self.engine.lost * self.network.stands_for
        return Result(
            self.workload,
            float(end.max()) * scale,
            self.ready * scale,
            self.started * scale,
            self.finished * scale,
            waited * scale,
            lateness * scale,
            self.topology,
            self.system,
            shortcut,
            refused,
            used,
            self.network,
            self.engine.events,
            lost,
        )

    # --- before it starts ---

    def _ticks(self, operation: Operation, of_ranks_ns: float | tuple[float, ...]) -> list[int]:
        durations = np.atleast_1d(of_ranks_ns)
        if len(durations) not in (1, self.topology.size):
            raise ConfigError(
                f"workload {self.workload.name}: {operation.name!r} has {len(durations)} durations for "
                f"{self.topology.size} ranks."
            )
        if self.network.actors == 1 and len(np.unique(durations)) > 1:
            raise NotSymmetricError("the ranks compute for different times")
        return [round(d * TICKS_PER_NS) for d in np.resize(durations, self.network.actors).tolist()]

    def _members(self, operation: Operation) -> list[bool]:
        if not operation.ranks:
            return [True] * self.network.actors
        return self.network.member(np.array(operation.ranks))

    def _plans(self, operation: Operation, label: int) -> tuple[list[_Plan], int]:
        if operation.kind == "compute":
            return [], label
        plans, chunks = [], self.system.chunks
        for phase in self._phases(operation):
            groups = groups_of(self.topology, phase, np.array(operation.ranks) if operation.ranks else None)
            if operation.splits and len(operation.splits) != groups.shape[1]:
                raise ConfigError(
                    f"workload {self.workload.name}: {operation.name!r} has splits of {len(operation.splits)} ranks, "
                    f"its groups have {groups.shape[1]}."
                )
            size = 1.0 if operation.splits else operation.bytes
            programs = tuple(self.network.program(s, groups, size * phase.share / chunks) for s in phase.schedules)
            labels = max(Run(program, 0, 0, lambda actor, time: None).labels for program in programs)
            plans.append(_Plan(phase.dims if not operation.ranks else operation.ranks, programs, label, labels))
            label += labels * chunks
        return plans, label

    def _phases(self, operation: Operation) -> list[Phase]:
        shape = self.topology.shape
        if operation.splits:
            return [Phase(tuple(range(len(shape))), (_exchange(operation.splits),), 1.0)]
        algorithm = self.system.algorithms.get(operation.collective, DEFAULT_ALGORITHMS.get(operation.collective, ""))
        if not operation.ranks:
            return phases(operation.collective, algorithm, shape, operation.group)
        if "hierarchical" in algorithm or "," in algorithm:
            algorithm = DEFAULT_ALGORITHMS[operation.collective]  # groups by rank have no dimensions
        return phases(operation.collective, algorithm, (len(operation.ranks[0]),))

    # --- while it runs ---

    def _unblock(self, i: int, actor: int, now: int) -> None:
        """All that operation i depends on is done."""
        self.ready[i, actor] = now
        computes = self.workload.operations[i].kind == "compute"
        if not self.members[i][actor] or not (computes or self.plans[i]):
            self.started[i, actor] = now
            self._finish(i, actor, now)
        elif computes:
            self._compute(actor, now)
        elif self.late[i][actor]:
            self.engine.at(now + self.late[i][actor], _COMPUTE + i, actor, lambda a, t: self._issue(i, a))
        else:
            self._issue(i, actor)

    def _issue(self, i: int, actor: int) -> None:
        """A collective begins."""
        self.issued[actor] += 1
        for number in range(self.system.chunks):
            self._chunk_ready(i, number, 0, actor, self.issued[actor])
        self._admit(self.lanes[self.plans[i][0].dims], actor)

    def _compute(self, actor: int, now: int) -> None:
        if self.busy[actor] or self.next[actor] == len(self.streams[actor]):
            return
        i = self.streams[actor][self.next[actor]]
        if self.missing[i][actor]:
            return
        if self.needs[i] and now > self.idle_since[actor]:
            self.stalls.append(Stall(actor, self.idle_since[actor], now, self.needs[i]))
        self.busy[actor] = True
        start = now + self.late[i][actor]
        self.started[i, actor] = start
        self.engine.at(start + self.durations[i][actor], _COMPUTE + i, actor, lambda a, t: self._computed(i, a, t))

    def _computed(self, i: int, actor: int, now: int) -> None:
        self.busy[actor] = False
        self.idle_since[actor] = now
        self.next[actor] += 1
        self._finish(i, actor, now)
        self._compute(actor, now)

    def _finish(self, i: int, actor: int, now: int) -> None:
        self.finished[i, actor] = now
        if self.watch:
            self.done += 1
            self.watch(self.done / self.finished.size, now / TICKS_PER_NS)
        for follower in self.followers[i]:
            self.missing[follower][actor] -= 1
            if not self.missing[follower][actor]:
                self._unblock(follower, actor, now)

    def _wait_at_the_end(self, end: np.ndarray) -> None:
        """After its last computation a rank waits for what is still under way."""
        for actor, done in enumerate(end):
            if done > self.idle_since[actor] and len(self.finished):
                open_then = np.flatnonzero(self.finished[:, actor] > self.idle_since[actor])
                self.stalls.append(Stall(actor, self.idle_since[actor], float(done), open_then.tolist()))

    # --- chunks ---

    def _chunk_ready(self, i: int, number: int, phase: int, actor: int, issue: int) -> None:
        plan = self.plans[i][phase]
        chunk = self.chunks.get((i, number, phase))
        if chunk is None:
            chunk = self.chunks[i, number, phase] = _Chunk(i, number, phase, issue, self.network.actors)
            program, label = plan.programs[number % len(plan.programs)], plan.label + number * plan.labels
            done = functools.partial(self._chunk_done, chunk)
            chunk.run = self.engine.run(program, label, done)
        chunk.state[actor] = _READY
        turn = issue if self.system.scheduling == "fifo" else -issue
        key = (-self.workload.operations[i].priority, turn, number, phase)
        heapq.heappush(self.lanes[plan.dims].ready[actor], (key, i, chunk))

    def _admit(self, lane: _Lane, actor: int) -> None:
        """Starts chunks while there is room."""
        ready = lane.ready[actor]
        while lane.active[actor] < self.system.in_flight:
            place = lane.place[actor]
            if place < len(lane.order):
                chunk = lane.order[place]
                if not self.members[chunk.operation][actor]:
                    lane.place[actor] += 1
                    continue
                if chunk.state[actor] != _READY:
                    return
            else:
                while ready and ready[0][2].state[actor] != _READY:
                    heapq.heappop(ready)
                if not ready:
                    return
                chunk = heapq.heappop(ready)[2]
                lane.order.append(chunk)
            lane.place[actor] += 1
            lane.active[actor] += 1
            chunk.state[actor] = _ADMITTED
            if np.isnan(self.started[chunk.operation, actor]):
                self.started[chunk.operation, actor] = self.engine.now
            self.engine.begin(chunk.run, actor)

    def _chunk_done(self, chunk: _Chunk, actor: int, now: int) -> None:
        i, phase = chunk.operation, chunk.phase + 1
        lane = self.lanes[self.plans[i][chunk.phase].dims]
        lane.active[actor] -= 1
        chunk.left -= 1
        if not chunk.left:
            chunk.run.forget()
        if phase < len(self.plans[i]):
            self._chunk_ready(i, chunk.number, phase, actor, chunk.issue)
            self._admit(self.lanes[self.plans[i][phase].dims], actor)
        else:
            self.chunks_left[i][actor] -= 1
            if not self.chunks_left[i][actor]:
                self._finish(i, actor, now)
        self._admit(lane, actor)


def _exchange(splits: tuple[tuple[float, ...], ...]) -> Schedule:
    """A direct all-to-all of unequal parts; parts of nothing are not sent."""
    sizes = np.array(splits, float)
    ranks = np.arange(len(sizes))
    sends = []
    for offset in range(1, len(sizes)):
        to = (ranks + offset) % len(sizes)
        part = sizes[ranks, to]
        sends.append(Send(np.where(part > 0, to, -1), part))
    return Schedule((tuple(sends),))
