"""JAX's profiles: taken, and read for when each operation ran on each device."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

Happened = tuple[str, float, float, dict[str, Any]]  # name, start and length in ns, statistics
_PREFIX = "recjax-profile-"  # of temporary folders
CONTAINERS = ("while", "call", "conditional")  # operations whose insides are events too


def profile(run: Any, folder: Path | None) -> Path:
    """Calls `run()` under the profiler: the trace file, in `folder` or a temporary one that stays."""
    folder = folder or Path(tempfile.mkdtemp(prefix=_PREFIX))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    before = set(folder.rglob("*.xplane.pb"))
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        run()
    finally:
        jax.profiler.stop_trace()
    return next(path for path in folder.rglob("*.xplane.pb") if path not in before)


def discard(trace: Path) -> None:
    """Removes a trace that `profile` put in a temporary folder."""
    shutil.rmtree(next(p for p in trace.parents if p.name.startswith(_PREFIX)))


def events(trace: Path) -> list[Happened]:
    """(name, start, length in ns, statistics) of all events of a trace.

    Those of a device's plane have its number among their statistics, as "device_ordinal".
    """
    found = []
    with warnings.catch_warnings():
        # JAX 0.12 warns of a type of its own when it first makes one, and aborts the process if that is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            of_plane = re.search(r"device:\w+:(\d+)", plane.name)
            device = {"device_ordinal": int(of_plane.group(1))} if of_plane else {}
            for line in plane.lines:
                for event in line.events:
                    found.append((event.name, event.start_ns, event.duration_ns, device | dict(event.stats)))
    return found


@dataclasses.dataclass(frozen=True)
class Span:
    """Time in which an operation ran, in ns."""

    name: str
    start: int
    end: int


def timelines(
    found_events: Iterable[Happened], module: str, devices: Sequence[Any], runs: int
) -> dict[tuple[int, int], tuple[Span, ...]]:
    """(rank, run) -> what ran then on this process's devices, by its beginning; the first run's is 0 ns.

    Args:
      found_events: as `events` gives them.
      module: what the program's name starts with, such as "jit_train_step".
      devices: of all ranks, in their order.
      runs: take the last so many; with fewer in the profile nothing is found.
    """
    mine = [(rank, d) for rank, d in enumerate(devices) if d.process_index == jax.process_index()]
    # Back ends number devices by their own ids, or by their place in this process.
    here = {d.local_hardware_id: rank for rank, d in mine} | {d.id: rank for rank, d in mine}
    found: dict[int, dict[int, list[Span]]] = {}  # run -> rank -> spans
    for name, start, length, stats in found_events:
        if "hlo_op" not in stats or not str(stats.get("hlo_module", "")).startswith(module):
            continue
        rank = here.get(int(stats["device_ordinal"])) if "device_ordinal" in stats else None
        if rank is None or name.startswith(CONTAINERS):
            continue
        span = Span(str(stats["hlo_op"]), int(start), int(start) + int(length))
        found.setdefault(int(stats.get("run_id", 0)), {}).setdefault(rank, []).append(span)
    if len(found) < runs:  # or the back end does not tell runs apart
        return {}
    first = [min(s.start for spans in run.values() for s in spans) for run in found.values()]
    ordered = [run for _, run in sorted(zip(first, found.values(), strict=True), key=lambda one: one[0])][-runs:]
    zero = sorted(first)[-runs]
    return {
        (rank, number): tuple(Span(s.name, s.start - zero, s.end - zero) for s in sorted(spans, key=lambda s: s.start))
        for number, run in enumerate(ordered)
        for rank, spans in run.items()
    }
