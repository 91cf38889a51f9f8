"""A communication trace, of any of its formats, as a workload for the simulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from recjax.errors import DataError

if TYPE_CHECKING:
    from recjax.comms.trace import Event
    from recjax.simulate.topology import Topology
    from recjax.simulate.workload import Operation, Workload


def read_workload(folder: Path, topology: Topology) -> Workload:
    """What the ranks of a trace did, each event an operation; only the collectives' own times are left out.

    An event waits for those that it names. If none of a trace's events names any, as files of others may have it, each
    waits for the one before it. True splits are taken where the trace has them.

    Args:
      folder: as for `recjax.comms.formats.read_trace`.
      topology: of as many ranks as the trace has.

    Raises:
      DataError: the trace is damaged, lacks ranks, has as many as the topology has not, its ranks do not do the same
        in the same order, or it holds a kind of event that is not simulated.
    """
    from recjax.comms.formats import read_trace
    from recjax.simulate.workload import from_operations

    trace = read_trace(folder)
    if missing := [rank for rank in range(trace.world) if rank not in trace.ranks]:
        raise DataError(
            f"{folder} lacks the file of rank {missing[0]} of {trace.world}: all are needed to simulate it."
        )
    if trace.world != topology.size:
        raise DataError(f"{folder} has {trace.world} ranks, and --topology {topology.size}. Give one of as many.")
    ranks = [trace.ranks[rank] for rank in range(trace.world)]
    if len({len(events) for events in ranks}) > 1:
        raise DataError(
            f"{folder}: its ranks have unequal numbers of events; only such that do the same are simulated."
        )
    linked = any(event.deps for events in ranks for event in events)
    names = {event.id: f"{event.id} {event.name or event.kind}" for event in ranks[0]}
    made: list[Operation] = []
    for place, events in enumerate(zip(*ranks, strict=True)):
        waits = tuple(names[dep] for dep in events[0].deps)
        if not linked and made:
            waits = (made[-1].name,)
        operation = _operation(events, names[events[0].id], f"{folder}, event {place}")
        made.append(dataclasses.replace(operation, depends_on=waits))
    return from_operations(folder.resolve().name, made)


def _operation(events: tuple[Event, ...], name: str, place: str) -> Operation:
    from recjax.comms.trace import COMPUTE
    from recjax.simulate.workload import Operation

    first = events[0]
    if len({(e.kind, len(e.group), len(e.deps)) for e in events}) > 1:
        kinds = ", ".join(sorted({e.kind for e in events}))
        raise DataError(f"{place}: its ranks do not do the same ({kinds}); only such that do are simulated.")
    layer = first.phase or first.kind
    if first.kind == COMPUTE:
        durations = tuple(float(e.duration_ns or 0) for e in events)
        return Operation(name, "compute", durations if len(set(durations)) > 1 else durations[0], layer=layer)
    sizes = {"all_reduce": first.in_bytes, "all_to_all": first.in_bytes, "reduce_scatter": first.in_bytes,
             "all_gather": first.out_bytes, "barrier": 0}  # fmt: skip
    if first.kind not in sizes:
        raise DataError(f"{place}: a {first.kind} is not simulated; there are {', '.join(sizes)}.")
    collective = "all_reduce" if first.kind == "barrier" else first.kind
    groups = tuple(sorted({e.group for e in events}))
    whole = len(groups) == 1 and groups[0] == tuple(range(len(events)))
    made = Operation(name, "collective", collective=collective, bytes=float(sizes[first.kind]), layer=layer,
                     phase=first.scope)  # fmt: skip
    if not whole:
        made = dataclasses.replace(made, ranks=groups)
    if first.kind == "all_to_all" and len(groups) == 1 and all(e.sends for e in events):
        by_rank = {rank: events[rank].sends for rank in groups[0]}
        rows = tuple(tuple(float(size) for size in by_rank[rank]) for rank in groups[0])
        made = dataclasses.replace(made, splits=rows)
    return made
