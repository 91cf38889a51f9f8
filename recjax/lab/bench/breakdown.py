"""Breakdown of the time of a step, from a profile of training steps.

On the devices every operation that XLA ran is an event with a beginning and an end, named after an instruction of the
compiled step, whose scope tells its phase. At each moment of the profiled steps the time is split evenly among the
operations that run at that moment on any device or thread; so all parts and the idle rest add up to the step time. An
operation that XLA fused out of two phases counts for the one whose name the fusion bears, and the threads that help an
operation are not events of their own.

The host's parts are annotations of the train loop, and overlap with the devices' work.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recjax.lab.replay.profile import CONTAINERS, events
from recjax.planning.compiled_collectives import phase_of
from recjax.utils.hlo import bodies

OTHER = "other"
HOST = ("input", "place", "route", "dispatch", "count")  # annotations of train/inputs.py, routers.py and trainer.py


def part_of(scope: str) -> str:
    """The part of a step that a scope (an instruction's op_name) belongs to."""
    phase = phase_of(scope)
    if "transpose(" in scope:
        return "pool_backward" if phase == "pool" else "dense_backward"
    return phase or ("dense_forward" if "jvp(" in scope else OTHER)


def scopes(hlo: str) -> dict[str, str]:
    """Instruction -> scope, for all instructions of a compiled program.

    One without a scope of its own (XLA adds some, and rewrites others) gets that of an instruction inside of it, or
    else of one that it takes its operands from, or that takes its result.
    """
    own: dict[str, str] = {}
    refers: dict[str, list[str]] = {}
    users: dict[str, list[str]] = {}
    computations, _ = bodies(hlo)
    inside = {computation: [line.name for line in lines] for computation, lines in computations.items()}
    for line in itertools.chain.from_iterable(computations.values()):
        scope = re.search(r'op_name="([^"]*)"', line.rest)
        own[line.name] = scope.group(1) if scope and part_of(scope.group(1)) != OTHER else ""
        refers[line.name] = line.names()
        for other in refers[line.name]:
            users.setdefault(other, []).append(line.name)

    def nearby(name: str) -> str:
        within = [n for other in refers[name] for n in inside.get(other, ())]
        for ring in (within, refers[name], users.get(name, [])):
            for other in ring:
                if own.get(other):
                    return own[other]
        return ""

    for _ in range(3):  # as far away as the third neighbour
        own |= {name: nearby(name) for name, scope in own.items() if not scope}
    return own


def read(trace: Path, hlo: str) -> dict[str, Any]:
    """Milliseconds a step of every part.

    Args:
      trace: an .xplane.pb of training steps.
      hlo: text of the compiled step.

    Returns:
      "steps": how many there are; "device_ms": part -> ms, with "idle", largest first; "host_ms": annotation -> ms;
      "host_hidden": annotation -> see `hidden_share`;
      "ops": the operations that take longest, each with "op", "part", "ms", "scope".
    """
    scope_of = scopes(hlo)
    intervals: list[tuple[float, float, str]] = []
    host: dict[str, list[tuple[float, float]]] = {name: [] for name in HOST}
    for name, start, length, stats in events(trace):
        operation = stats.get("hlo_op")
        if operation is None:
            if name in HOST:
                host[name].append((start, start + length))
        elif str(stats.get("hlo_module", "")).startswith("jit_train_step") and not name.startswith(CONTAINERS):
            intervals.append((start, start + length, operation))
    shares, idle = split(intervals)
    steps = len(host["dispatch"])
    host_ns = {name: sum(end - start for start, end in spans) for name, spans in host.items()}
    working = [(start, end) for start, end, _ in intervals]
    hidden = {name: share for name, spans in host.items() if (share := hidden_share(spans, working)) is not None}
    parts = {"idle": idle}
    for operation, ns in shares.items():
        part = part_of(scope_of.get(operation, ""))
        parts[part] = parts.get(part, 0.0) + ns
    ms = 1e-6 / max(1, steps)
    return {
        "steps": steps,
        "device_ms": {name: ns * ms for name, ns in sorted(parts.items(), key=lambda item: -item[1])},
        "host_ms": {name: host_ns[name] * ms for name in HOST},
        "host_hidden": hidden,
        "ops": [
            {"op": op, "part": part_of(scope_of.get(op, "")), "ms": ns * ms, "scope": scope_of.get(op, "")}
            for op, ns in sorted(shares.items(), key=lambda item: -item[1])[:40]
        ],
    }


def split(intervals: Iterable[tuple[float, float, str]]) -> tuple[dict[str, float], float]:
    """Shares each moment evenly among the intervals that are open: (name -> time, time when none was open).

    The idle time is that between the first beginning and the last end.
    """
    edges = sorted(edge for start, end, name in intervals for edge in ((start, 1, name), (end, -1, name)))
    shares: dict[str, float] = {}
    running: collections.Counter[str] = collections.Counter()
    open_now, idle, last = 0, 0.0, edges[0][0] if edges else 0.0
    for at, change, name in edges:
        if open_now:
            for other, count in running.items():
                shares[other] = shares.get(other, 0.0) + (at - last) * count / open_now
        else:
            idle += at - last
        running[name] += change
        if not running[name]:
            del running[name]
        open_now, last = open_now + change, at
    return shares, idle


def hidden_share(host: Sequence[tuple[float, float]], devices: Sequence[tuple[float, float]]) -> float | None:
    """The share of the host's time in which a device was at work, so that it delayed nothing.

    Between the devices' first beginning and last end: before, there is nothing yet to hide behind. None if the host did
    nothing then.

    Args:
      host: intervals that do not overlap.
      devices: intervals, several of which may be open at a time.
    """
    if not devices:
        return None
    first, last = min(start for start, _ in devices), max(end for _, end in devices)
    host = [(max(start, first), min(end, last)) for start, end in host if start < last and end > first]
    total = sum(end - start for start, end in host)
    _, idle = split((*span, "device") for span in devices)
    _, neither = split([*((*span, "device") for span in devices), *((*span, "host") for span in host)])
    return 1 - (idle - neither) / total if total else None
