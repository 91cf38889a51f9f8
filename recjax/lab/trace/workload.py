"""A communication trace, of any of its formats, as a workload for the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recjax.errors import DataError

if TYPE_CHECKING:
    from recjax.lab.formats.trace import Event
    from recjax.lab.simulate.topology import Topology
    from recjax.lab.simulate.workload import Operation, Workload


_MESSAGES = ("send", "recv")


def read_workload(folder: Path, topology: Topology | None) -> Workload:
    """Reads a trace as a workload, each event an operation; only the collectives' own times are left out.

    An event waits for those that it names. If none of a trace's events names any, as files of others may have it, each
    waits for the one before it. True splits are taken where the trace has them. Where the ranks' times of computing
    are not cut alike, or wait for different events, each is an operation of its rank alone, and a collective waits
    everywhere for the collectives that it waited for on any rank.

    Where events have times, a rank is as late for each as it was: what passed between the end of what the event waited
    for and its beginning (a thread that had no core, a program that was not launched yet) is its operation's lateness,
    which `recjax.lab.simulate.workload.without_lateness` takes away.

    The k-th message that a rank sends to another is the k-th that the other receives from it: an operation of the two,
    which both wait for.

    Args:
      folder: as for `recjax.lab.formats.read_trace`.
      topology: of as many ranks as the trace has; None for a workload of as many ranks as that may be.

    Raises:
      DataError: the trace is damaged, lacks ranks, has as many as the topology has not, its ranks do not have the same
        collectives in the same order, a message has a sender or a receiver alone, or it holds a kind of event that is
        not simulated.
      ConfigError: two ranks wait for each other, as where both send before they receive.
    """
    from recjax.lab.formats import read_trace
    from recjax.lab.simulate.workload import from_operations

    trace = read_trace(folder)
    if missing := [rank for rank in range(trace.world) if rank not in trace.ranks]:
        raise DataError(
            f"{folder} lacks the file of rank {missing[0]} of {trace.world}: all are needed to simulate it."
        )
    if topology and trace.world != topology.size:
        has = "1 rank" if trace.world == 1 else f"{trace.world} ranks"
        raise DataError(f"{folder} has {has}, and --topology {topology.size}. Give one of as many.")
    linked = any(event.deps for events in trace.ranks.values() for event in events)
    ranks = [_placed(trace.ranks[rank], linked) for rank in range(trace.world)]
    late_ns = [_late_ns(events) for events in ranks]
    alike = len({tuple((e.kind, len(e.group), e.deps) for e in events) for events in ranks}) == 1
    alike &= not any(event.kind in _MESSAGES for events in ranks for event in events)
    made = (_together if alike else _apart)(ranks, late_ns, folder)
    return dataclasses.replace(from_operations(folder.resolve().name, made), ranks=trace.world)


def _placed(events: Sequence[Event], linked: bool) -> list[Event]:
    """The events with their places as ids; each waits for the one before if they are not linked."""
    places = {event.id: place for place, event in enumerate(events)}
    return [
        dataclasses.replace(
            event, id=place, deps=tuple(places[d] for d in event.deps) if linked or not place else (place - 1,)
        )
        for place, event in enumerate(events)
    ]


def _late_ns(events: Sequence[Event]) -> list[float]:
    """Time from the end of what each event waits for to its beginning; 0 without times, or if it waits for nothing.

    It also waits for the one before it in its stream: the last computation, or the last collective. Ranks may have
    clocks of their own, so when the first event began says nothing.
    """
    from recjax.lab.formats.trace import COMPUTE

    late_ns: list[float] = []
    before: dict[bool, Event] = {}
    for event in events:
        stream = event.kind == COMPUTE
        needs = [*(events[d] for d in event.deps), *([before[stream]] if stream in before else [])]
        ends_ns = [need.end_ns for need in needs if need.end_ns is not None]
        known = event.start_ns is not None and 0 < len(ends_ns) == len(needs)
        late_ns.append(max(0.0, float((event.start_ns or 0) - max(ends_ns))) if known else 0.0)
        before[stream] = event
    return late_ns


def _together(ranks: Sequence[Sequence[Event]], late_ns: Sequence[Sequence[float]], folder: Path) -> list[Operation]:
    """An operation for each event that all ranks have."""
    names = [f"{event.id} {event.name or event.kind}" for event in ranks[0]]
    return [
        dataclasses.replace(
            _operation(events, tuple(of_rank[place] for of_rank in late_ns), names[place], f"{folder}, event {place}"),
            depends_on=tuple(names[d] for d in events[0].deps),
        )
        for place, events in enumerate(zip(*ranks, strict=True))
    ]


def _apart(ranks: Sequence[Sequence[Event]], late_ns: Sequence[Sequence[float]], folder: Path) -> list[Operation]:
    """An operation for each collective and message, and one for each rank's time of computing."""
    from recjax.lab.formats.trace import COMPUTE
    from recjax.lab.simulate.workload import Operation

    own = (COMPUTE, *_MESSAGES)
    if len({sum(event.kind not in own for event in events) for events in ranks}) > 1:
        raise DataError(
            f"{folder}: its ranks have unequal numbers of collectives; only such that do the same are simulated."
        )
    made: list[Operation] = []
    messages = _Messages(len(ranks))
    names: list[list[str]] = [[] for _ in ranks]  # of each rank's events that are made
    while any(len(names[rank]) < len(events) for rank, events in enumerate(ranks)):
        for rank, events in enumerate(ranks):
            while len(names[rank]) < len(events) and (event := events[len(names[rank])]).kind in own:
                after = tuple(names[rank][d] for d in event.deps)
                took, own_late_ns = float(event.duration_ns or 0), late_ns[rank][len(names[rank])]
                if event.kind in _MESSAGES:
                    names[rank].append(messages.add(event, rank, after, own_late_ns))
                    continue
                names[rank].append(f"{event.id} {event.name or event.kind} of rank {rank}")
                made.append(
                    Operation(
                        names[rank][-1],
                        "compute",
                        took,
                        ranks=((rank,),),
                        late_ns=own_late_ns,
                        depends_on=after,
                        layer=event.phase or event.kind,
                    )
                )
        heads = tuple(events[len(names[rank])] for rank, events in enumerate(ranks) if len(names[rank]) < len(events))
        if heads:
            name = f"{heads[0].id} {heads[0].name or heads[0].kind}"
            after = tuple(dict.fromkeys(names[rank][d] for rank, head in enumerate(heads) for d in head.deps))
            late = tuple(of_rank[len(known)] for of_rank, known in zip(late_ns, names, strict=True))
            for known in names:
                known.append(name)
            made.append(dataclasses.replace(_operation(heads, late, name, f"{folder}, {name}"), depends_on=after))
    return made + messages.operations(folder)


class _Messages:
    """Messages between two ranks, each of which has a part of it."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._count: dict[tuple[str, int, int], int] = {}
        self._ends: dict[str, dict[str, tuple[Event, tuple[str, ...], float]]] = {}  # name -> kind -> its event
        self._pairs: dict[str, tuple[int, int]] = {}

    def add(self, event: Event, rank: int, after: tuple[str, ...], late_ns: float) -> str:
        """One end of a message; returns the message's name."""
        peer = event.group[-1]
        pair = (rank, peer) if event.kind == "send" else (peer, rank)
        number = self._count[event.kind, *pair] = self._count.get((event.kind, *pair), 0) + 1
        name = f"message {number} of rank {pair[0]} to rank {pair[1]}"
        self._ends.setdefault(name, {})[event.kind] = event, after, late_ns
        self._pairs[name] = pair
        return name

    def operations(self, folder: Path) -> list[Operation]:
        """An operation for each message; DataError for one that has one end alone."""
        from recjax.lab.simulate.workload import Operation

        made = []
        for name, ends in self._ends.items():
            if lacking := [kind for kind in _MESSAGES if kind not in ends]:
                rank = self._pairs[name][_MESSAGES.index(lacking[0])]
                raise DataError(
                    f"{folder}: {name} has no {lacking[0]}. Rank {rank} lacks the event, or sends and receives are not "
                    "in the same order; only a trace whose messages have both ends is simulated."
                )
            (sent, *_), late_ns = ends["send"], [0.0] * self._world
            for kind, rank in zip(_MESSAGES, self._pairs[name], strict=True):
                late_ns[rank] = ends[kind][2]
            after = tuple(dict.fromkeys(needed for _, needs, _ in ends.values() for needed in needs))
            made.append(
                Operation(
                    name,
                    "collective",
                    collective="send_recv",
                    bytes=float(sent.padded_bytes),
                    ranks=(self._pairs[name],),
                    late_ns=tuple(late_ns) if any(late_ns) else (),
                    depends_on=after,
                    layer=sent.phase or "send_recv",
                    phase=sent.scope,
                )
            )
        return made


def _operation(events: tuple[Event, ...], late_ns: tuple[float, ...], name: str, place: str) -> Operation:
    from recjax.lab.formats.trace import COMPUTE
    from recjax.lab.simulate.workload import Operation

    first = events[0]
    if len({(e.kind, len(e.group)) for e in events}) > 1:
        kinds = ", ".join(sorted({e.kind for e in events}))
        raise DataError(f"{place}: its ranks do not do the same ({kinds}); only such that do are simulated.")
    layer = first.phase or first.kind
    late_ns = late_ns if any(late_ns) else ()
    if first.kind == COMPUTE:
        durations = tuple(float(e.duration_ns or 0) for e in events)
        took = durations if len(set(durations)) > 1 else durations[0]
        return Operation(name, "compute", took, layer=layer, late_ns=late_ns)
    sizes = {
        "all_reduce": first.in_bytes,
        "all_to_all": first.in_bytes,
        "reduce_scatter": first.in_bytes,
        "all_gather": first.out_bytes,
        "broadcast": first.padded_bytes,
        "reduce": first.padded_bytes,
        "barrier": 0,
    }
    if first.kind not in sizes:
        raise DataError(f"{place}: a {first.kind} is not simulated; there are {', '.join(sizes)}.")
    collective = "all_reduce" if first.kind == "barrier" else first.kind
    groups = tuple(sorted({e.group for e in events}))
    whole = len(groups) == 1 and groups[0] == tuple(range(len(events)))
    made = Operation(
        name,
        "collective",
        collective=collective,
        bytes=float(sizes[first.kind]),
        layer=layer,
        phase=first.scope,
        parts=tuple(map(float, first.parts)),
        late_ns=late_ns,
    )
    if not whole:
        made = dataclasses.replace(made, ranks=groups)
    if first.kind == "all_to_all" and len(groups) == 1 and all(e.sends for e in events):
        by_rank = {rank: events[rank].sends for rank in groups[0]}
        rows = tuple(tuple(float(size) for size in by_rank[rank]) for rank in groups[0])
        made = dataclasses.replace(made, splits=rows)
    return made
