"""A trace as a program of collectives: what all ranks do together, in an order in which it can be done."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.calls import calls
from recjax.lab.formats.trace import COMPUTE, Event, Trace


@dataclasses.dataclass(frozen=True)
class Slot:
    """One collective of one group of ranks, or of several groups that do alike at a time.

    Attributes:
      kind, phase, name, step, dtype: as `Event` has them.
      groups: the ranks of each group, equally many.
      events: rank -> its event.
      deps: numbers of earlier slots that this one waits for.
      gap_ns: rank -> time that it computed before.
    """

    kind: str
    phase: str
    name: str
    step: int
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    events: Mapping[int, Event]
    deps: tuple[int, ...]
    gap_ns: Mapping[int, int]

    @property
    def padded_bytes(self) -> int:
        """The largest message of a rank."""
        return max(event.padded_bytes for event in self.events.values())

    @property
    def block_bytes(self) -> int:
        """Least size of equal blocks that hold all of an all_to_all."""
        n = len(self.groups[0])
        even = max(-(-max(e.in_bytes, e.out_bytes) // n) for e in self.events.values())
        split = max((b for e in self.events.values() for b in (*e.sends, *e.receives)), default=0)
        ragged = any(e.sends and sum(e.sends) == e.in_bytes for e in self.events.values())
        return split if ragged else max(even, split)


def slots(trace: Trace) -> list[Slot]:
    """The collectives of a trace, each after those that it waits for.

    Raises:
      DataError: ranks do not agree on the order of a group's collectives, or on what one of them is.
    """
    found: list[Slot] = []
    # Of each rank what it does next, which of its events is in which slot, and how long each time of computing was.
    queues = {r: collections.deque(e for e in events if e.kind != COMPUTE) for r, events in trace.ranks.items()}
    behind: dict[int, dict[int, set[int]]] = {rank: {} for rank in trace.ranks}  # rank -> event -> slots
    gaps = {r: {e.id: e.duration_ns or 0 for e in es if e.kind == COMPUTE} for r, es in trace.ranks.items()}
    computing = {r: {e.id: e.deps for e in es if e.kind == COMPUTE} for r, es in trace.ranks.items()}
    while any(queues.values()):
        heads = {rank: queue[0] for rank, queue in queues.items() if queue}
        ready: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        for rank, event in heads.items():
            group = event.group
            members = [r for r in group if r in trace.ranks]
            if rank != members[0] or any(r not in heads or heads[r].group != group for r in members):
                continue
            if other := next((heads[r] for r in members if heads[r].kind != event.kind), None):
                raise DataError(
                    f"ranks {list(group[:8])} do not agree: one does {event.kind} ({event.name or event.id}) where "
                    f"another one does {other.kind} ({other.name or other.id}). The trace is incomplete or damaged."
                )
            ready.setdefault((event.kind, event.phase, event.name, event.step, len(group)), []).append(group)
        if not ready:
            stuck = next(iter(heads.items()))
            raise DataError(
                f"rank {stuck[0]} does {stuck[1].kind} with ranks {list(stuck[1].group[:8])}, which do something else: "
                "the ranks' orders do not fit together. The trace is incomplete or damaged."
            )
        for groups in ready.values():
            events = {rank: queues[rank].popleft() for group in groups for rank in group if rank in queues}
            deps: set[int] = set()
            gap_ns = {}
            for rank, event in events.items():
                direct = {d for dep in event.deps for d in computing[rank].get(dep, (dep,))}
                for dep in direct | set(event.deps):
                    deps |= behind[rank].get(dep, set())
                gap_ns[rank] = sum(gaps[rank].get(dep, 0) for dep in event.deps)
                behind[rank][event.id] = {len(found)}
            one = next(iter(events.values()))
            head = (one.kind, one.phase, one.name, one.step, one.dtype)
            found.append(Slot(*head, tuple(groups), events, tuple(sorted(deps)), gap_ns))
    return found


def shrink(trace: Trace, ranks: int) -> Trace:
    """The trace as its first `ranks` ranks would have it alone.

    What a rank had for each that stays it still has, so all-to-alls and all-gathers shrink with their groups; tensors
    that are reduced keep their size. A collective of which one rank is left is gone, and its times of computing stay.
    """
    kept = {}
    for rank in range(ranks):
        if rank in trace.ranks:
            kept[rank] = tuple(_shrunk(trace.ranks[rank], ranks))
    return dataclasses.replace(trace, world=ranks, ranks=kept)


def left_out(trace: Trace, ranks: int) -> list[dict[str, Any]]:
    """The collectives that `shrink` leaves out, such as those between hosts: "phase", "kind" and "count" of calls."""
    found = collections.Counter[tuple[str, str]]()
    for call in calls(trace):
        if sum(rank < ranks for rank in call.first.group) == 1:
            found[call.first.phase, call.first.kind] += 1
    return [{"phase": phase, "kind": kind, "count": count} for (phase, kind), count in found.items()]


def _shrunk(events: Sequence[Event], ranks: int) -> list[Event]:
    gone: dict[int, tuple[int, ...]] = {}  # id -> what stands in its place
    found = []
    for event in events:
        deps = tuple(dict.fromkeys(d for dep in event.deps for d in gone.get(dep, (dep,))))
        stay = [place for place, rank in enumerate(event.group) if rank < ranks]
        if event.kind != COMPUTE and len(stay) < 2:
            gone[event.id] = deps
            continue
        old, new = len(event.group), len(stay)
        shares_in = event.kind in ("all_to_all", "scatter")
        shares_out = event.kind in ("all_to_all", "all_gather", "gather")
        in_bytes, out_bytes = event.in_bytes, event.out_bytes
        if event.kind != COMPUTE and old != new:
            in_bytes = in_bytes * new // old if shares_in else in_bytes
            out_bytes = out_bytes * new // old if shares_out else out_bytes
            if event.kind == "reduce_scatter":
                out_bytes = in_bytes // new
        sends, receives = (tuple(of[p] for p in stay) if of else () for of in (event.sends, event.receives))
        if event.kind == "all_to_all" and event.sends and sum(event.sends) == event.in_bytes:
            in_bytes, out_bytes = sum(sends), sum(receives)
        group = tuple(event.group[p] for p in stay)
        found.append(
            dataclasses.replace(
                event, group=group, in_bytes=in_bytes, out_bytes=out_bytes, sends=sends, receives=receives, deps=deps
            )
        )
    return found
