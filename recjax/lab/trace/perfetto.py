"""A measured trace for ui.perfetto.dev and chrome://tracing: a process a rank, computing and collectives apart."""

from __future__ import annotations

import json
from typing import Any

from recjax.errors import DataError
from recjax.lab.formats.calls import waiting_of
from recjax.lab.formats.trace import COMPUTE, Trace
from recjax.lab.formats.trace_events import names, span

FILE = "timeline.json"
_COMPUTING = 0  # thread; collectives take the first free one above


def write(trace: Trace) -> dict[str, bytes]:
    """File name -> content. Times are those of each rank's own clock.

    Raises:
      DataError: nothing in the trace was measured.
    """
    waiting_ns = waiting_of(trace)
    found: list[dict[str, Any]] = []
    for rank, events in trace.ranks.items():
        free: list[int] = []  # until when each thread of collectives is taken
        for event in sorted(events, key=lambda e: (e.start_ns or 0, e.id)):
            if event.start_ns is None or event.end_ns is None:
                continue
            thread = _COMPUTING
            args: dict[str, Any] = {"step": event.step}
            if event.kind != COMPUTE:
                thread = next((t for t, until in enumerate(free) if until <= event.start_ns), len(free)) + 1
                free[thread - 1 : thread] = [event.end_ns]
                waits = waiting_ns.get((rank, event.id))
                args |= {
                    "phase": event.phase,
                    "scope": event.scope,
                    "name": event.name,
                    "ranks": len(event.group),
                    "bytes": event.padded_bytes,
                    "useful_bytes": event.useful_bytes,
                    "waiting_us": None if waits is None else waits / 1e3,
                }
            name, took_ns = event.phase or event.name or event.kind, event.end_ns - event.start_ns
            found.append(span(name, event.kind, (rank, thread), event.start_ns / 1e3, took_ns / 1e3, args))
        collectives = {thread: f"collectives {thread}" for thread in range(1, len(free) + 1)}
        found += names(rank, f"rank {rank}", {_COMPUTING: "computing"} | collectives)
    if not any(event["ph"] == "X" for event in found):
        raise DataError(
            "nothing in the trace has both a beginning and a duration, so there is no timeline of it. Record it with "
            "`recjax trace`; for one of PyTorch give the profiler's files, too (--kineto DIR)."
        )
    return {FILE: json.dumps({"traceEvents": found, "displayTimeUnit": "ns"}).encode()}
