"""A communication trace, of any of its formats, as a workload for the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recjax.errors import DataError

if TYPE_CHECKING:
    from recjax.comms.trace import Event
    from recjax.simulate.topology import Topology
    from recjax.simulate.workload import Operation, Workload


def read_workload(folder: Path, topology: Topology | None) -> Workload:
    """Reads a trace as a workload, each event an operation; only the collectives' own times are left out.

    An event waits for those that it names. If none of a trace's events names any, as files of others may have it, each
    waits for the one before it. True splits are taken where the trace has them. Where the ranks' times of computing
    are not cut alike, or wait for different events, each is an operation of its rank alone, and a collective waits
    everywhere for the collectives that it waited for on any rank.

    Where events have times, a rank is as late for each as it was: what passed between the end of what the event waited
    for and its beginning (a thread that had no core, a program that was not launched yet) is its operation's lateness,
    which `recjax.simulate.workload.without_lateness` takes away.

    Args:
      folder: as for `recjax.comms.formats.read_trace`.
      topology: of as many ranks as the trace has; None for a workload of as many ranks as that may be.

    Raises:
      DataError: the trace is damaged, lacks ranks, has as many as the topology has not, its ranks do not have the same
        collectives in the same order, or it holds a kind of event that is not simulated.
    """
    from recjax.comms.formats import read_trace
    from recjax.simulate.workload import from_operations

    trace = read_trace(folder)
    if missing := [rank for rank in range(trace.world) if rank not in trace.ranks]:
        raise DataError(
            f"{folder} lacks the file of rank {missing[0]} of {trace.world}: all are needed to simulate it."
        )
    if topology and trace.world != topology.size:
        raise DataError(f"{folder} has {trace.world} ranks, and --topology {topology.size}. Give one of as many.")
    linked = any(event.deps for events in trace.ranks.values() for event in events)
    ranks = [_placed(trace.ranks[rank], linked) for rank in range(trace.world)]
    late_ns = [_late_ns(events) for events in ranks]
    alike = len({tuple((e.kind, len(e.group), e.deps) for e in events) for events in ranks}) == 1
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
    from recjax.comms.trace import COMPUTE

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
    """An operation for each collective, and one for each rank's time of computing."""
    from recjax.comms.trace import COMPUTE
    from recjax.simulate.workload import Operation

    if len({sum(event.kind != COMPUTE for event in events) for events in ranks}) > 1:
        raise DataError(
            f"{folder}: its ranks have unequal numbers of collectives; only such that do the same are simulated."
        )
    made: list[Operation] = []
    names: list[list[str]] = [[] for _ in ranks]  # of each rank's events that are made
    while any(len(names[rank]) < len(events) for rank, events in enumerate(ranks)):
        for rank, events in enumerate(ranks):
            while len(names[rank]) < len(events) and (event := events[len(names[rank])]).kind == COMPUTE:
                after = tuple(names[rank][d] for d in event.deps)
                took, own_late_ns = float(event.duration_ns or 0), late_ns[rank][len(names[rank])]
                names[rank].append(f"{event.id} {event.name or event.kind} of rank {rank}")
                made.append(
                    Operation(names[rank][-1], "compute", took, ranks=((rank,),), late_ns=own_late_ns,
                              depends_on=after, layer=event.phase or event.kind)
                )  # fmt: skip
        heads = tuple(events[len(names[rank])] for rank, events in enumerate(ranks) if len(names[rank]) < len(events))
        if heads:
            name = f"{heads[0].id} {heads[0].name or heads[0].kind}"
            after = tuple(dict.fromkeys(names[rank][d] for rank, head in enumerate(heads) for d in head.deps))
            late = tuple(of_rank[len(known)] for of_rank, known in zip(late_ns, names, strict=True))
            for known in names:
                known.append(name)
            made.append(dataclasses.replace(_operation(heads, late, name, f"{folder}, {name}"), depends_on=after))
    return made


def _operation(events: tuple[Event, ...], late_ns: tuple[float, ...], name: str, place: str) -> Operation:
    from recjax.comms.trace import COMPUTE
    from recjax.simulate.workload import Operation

    first = events[0]
    if len({(e.kind, len(e.group)) for e in events}) > 1:
        kinds = ", ".join(sorted({e.kind for e in events}))
        raise DataError(f"{place}: its ranks do not do the same ({kinds}); only such that do are simulated.")
    layer = first.phase or first.kind
    if first.kind == COMPUTE:
        durations = tuple(float(e.duration_ns or 0) for e in events)
        return Operation(name, "compute", durations if len(set(durations)) > 1 else durations[0], layer=layer,
                         late_ns=late_ns if any(late_ns) else ())  # fmt: skip
    sizes = {"all_reduce": first.in_bytes, "all_to_all": first.in_bytes, "reduce_scatter": first.in_bytes,
             "all_gather": first.out_bytes, "broadcast": first.padded_bytes, "reduce": first.padded_bytes,
             "barrier": 0}  # fmt: skip
    if first.kind not in sizes:
        raise DataError(f"{place}: a {first.kind} is not simulated; there are {', '.join(sizes)}.")
    collective = "all_reduce" if first.kind == "barrier" else first.kind
    groups = tuple(sorted({e.group for e in events}))
    whole = len(groups) == 1 and groups[0] == tuple(range(len(events)))
    made = Operation(name, "collective", collective=collective, bytes=float(sizes[first.kind]), layer=layer,
                     phase=first.scope, parts=tuple(map(float, first.parts)),
                     late_ns=late_ns if any(late_ns) else ())  # fmt: skip
    if not whole:
        made = dataclasses.replace(made, ranks=groups)
    if first.kind == "all_to_all" and len(groups) == 1 and all(e.sends for e in events):
        by_rank = {rank: events[rank].sends for rank in groups[0]}
        rows = tuple(tuple(float(size) for size in by_rank[rank]) for rank in groups[0])
        made = dataclasses.replace(made, splits=rows)
    return made
