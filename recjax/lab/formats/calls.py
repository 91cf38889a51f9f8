"""Single calls of a trace: who sent and received how much, who came last, and who waited for how long.

A call is one collective on all ranks of its group: the k-th of that group on each. The rank that came last waited for
none, so of all ranks it spent the least time in the call; that time is the transfer, and what the others spent beyond
it they waited. Only durations are compared, for ranks may have clocks of their own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.utils.units import bus_factor


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective on all ranks of its group.

    Attributes:
      events: rank -> its event, of the ranks that the trace has.
    """

    events: Mapping[int, Event]

    @property
    def first(self) -> Event:
        """The event of the least rank."""
        return self.events[min(self.events)]

    def sent(self) -> dict[int, float]:
        """Rank -> useful bytes that leave it; of reductions and gathers those that a ring sends."""
        return {rank: sent_and_received(event, rank)[0] for rank, event in self.events.items()}

    def received(self) -> dict[int, float]:
        """Rank -> useful bytes that come to it, likewise."""
        return {rank: sent_and_received(event, rank)[1] for rank, event in self.events.items()}

    def waiting_ns(self) -> dict[int, int] | None:
        """Rank -> how long it waited for the one that came last; None unless all ranks have times."""
        took = {rank: event.duration_ns for rank, event in self.events.items() if event.duration_ns is not None}
        if len(took) < len(self.first.group):
            return None
        return {rank: ns - min(took.values()) for rank, ns in took.items()}

    def last_rank(self) -> int | None:
        """The rank that came last, and so waited for none; None without times, or if all came at once."""
        waiting = self.waiting_ns()
        return min(waiting, key=lambda rank: (waiting[rank], rank)) if waiting and any(waiting.values()) else None


def sent_and_received(event: Event, rank: int) -> tuple[float, float]:
    """Useful bytes that leave a rank, and that come to it; of reductions and gathers those that a ring sends."""
    n = len(event.group)
    if event.kind != "all_to_all":
        moved = event.useful_bytes * bus_factor(event.kind, n)
    elif event.sends or event.receives:
        ways = (event.sends or event.receives, event.receives or event.sends)
        there, back = (sum(b for to, b in zip(event.group, way, strict=True) if to != rank) for way in ways)
        return float(there), float(back)
    else:
        moved = event.in_bytes * (n - 1) / n
    return moved, moved


def waiting_of(trace: Trace) -> dict[tuple[int, int], int]:
    """(rank, id of an event) -> how long it waited there for the one that came last, in ns, where that is known."""
    waits = ((call, call.waiting_ns() or {}) for call in calls(trace))
    return {(rank, call.events[rank].id): ns for call, of in waits for rank, ns in of.items()}


def calls(trace: Trace) -> list[Call]:
    """Returns the calls of a trace, by step; messages between two ranks (send, recv) are none."""
    found: dict[tuple[tuple[int, ...], int], dict[int, Event]] = {}
    for rank, events in trace.ranks.items():
        count = collections.Counter[tuple[int, ...]]()
        for event in events:
            if event.kind in (COMPUTE, "send", "recv"):
                continue
            found.setdefault((event.group, count[event.group]), {})[rank] = event
            count[event.group] += 1
    return sorted((Call(events) for events in found.values()), key=lambda call: (call.first.step, call.first.id))


def imbalance(values: Sequence[float]) -> float:
    """Max over mean; 1 where there is nothing."""
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean else 1.0


def figures(found: Sequence[Call]) -> list[dict[str, Any]]:
    """Returns every call as JSON values.

    Returns:
      "step", "kind", "phase", "name", "ranks" (how many); "sent" and "received": "imbalance" (max over mean of the
      ranks) and "most_rank"; "time": None, or "last_rank" (None if all came at once), "late_us" (how long the first
      rank waited for it), "waiting_us" (mean of the ranks) and "transfer_us".
    """
    shown = []
    for call in found:
        first, waiting = call.first, call.waiting_ns()
        ways = {"sent": call.sent(), "received": call.received()}
        time = None
        if waiting is not None:
            time = {
                "last_rank": call.last_rank(),
                "late_us": max(waiting.values()) / 1e3,
                "waiting_us": sum(waiting.values()) / len(waiting) / 1e3,
                "transfer_us": min(event.duration_ns or 0 for event in call.events.values()) / 1e3,
            }
        shown.append(
            {
                **{key: getattr(first, key) for key in ("step", "kind", "phase", "name")},
                "ranks": len(first.group),
                **{
                    way: {"imbalance": imbalance([*of.values()]), "most_rank": max(of, key=lambda r: (of[r], -r))}
                    for way, of in ways.items()
                },
                "time": time,
            }
        )
    return shown


def by_rank(trace: Trace, found: Sequence[Call]) -> list[dict[str, Any]]:
    """Returns each rank's part in the calls, in a step.

    Returns:
      For each rank "rank", "sent_bytes", "received_bytes"; and of the calls that have times "calls", "last" (in how
      many it came last), "last_phases" (phase -> in how many), both of all steps, "waiting_ms", "transfer_ms" and
      "kept_waiting_ms": what the other ranks, on average, waited for this one.
    """
    total: dict[int, dict[str, float]] = {rank: collections.defaultdict(float) for rank in trace.ranks}
    phases: dict[int, collections.Counter[str]] = {rank: collections.Counter() for rank in trace.ranks}
    for call in found:
        for key, of in (("sent_bytes", call.sent()), ("received_bytes", call.received())):
            for rank, size in of.items():
                total[rank][key] += size
        waiting, last = call.waiting_ns(), call.last_rank()
        if waiting is None:
            continue
        if last is not None:
            phases[last][call.first.phase or call.first.kind] += 1
            total[last]["kept_waiting_ms"] += sum(waiting.values()) / max(1, len(waiting) - 1) / 1e6
        for rank, ns in waiting.items():
            total[rank]["calls"] += 1
            total[rank]["waiting_ms"] += ns / 1e6
            total[rank]["transfer_ms"] += ((call.events[rank].duration_ns or 0) - ns) / 1e6
    return [
        {
            "rank": rank,
            **{key: total[rank][key] / trace.steps for key in ("sent_bytes", "received_bytes")},
            "calls": int(total[rank]["calls"]),
            "last": sum(phases[rank].values()),
            "last_phases": dict(phases[rank].most_common()),
            **{key: total[rank][key] / trace.steps for key in ("waiting_ms", "transfer_ms", "kept_waiting_ms")},
        }
        for rank in sorted(trace.ranks)
    ]
