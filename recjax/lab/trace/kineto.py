"""An execution trace and the profile of the same steps, made into one trace with times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from recjax.errors import DataError
from recjax.lab.formats import kineto, read_trace
from recjax.lab.formats.kineto import Profile
from recjax.lab.formats.trace import COMPUTE, Event, Trace, checked
from recjax.lab.replay.profile import Span
from recjax.lab.trace.times import Timeline


def read_timed(folder: Path, profiles: Path | None, format: str | None = None) -> Trace:
    """Reads the trace in a folder, with the times of PyTorch's profiler if there are any.

    Args:
      folder: as for `read_trace`.
      profiles: folder of the profiler's files; None: there are none.
      format: as for `read_trace`.

    Raises:
      ConfigError, DataError: as `read_trace`, `kineto.read` and `timed` have them.
    """
    trace = read_trace(folder, format)
    return trace if profiles is None else timed(trace, kineto.read(profiles))


def timed(trace: Trace, profiles: Mapping[int, Profile]) -> Trace:
    """Returns the trace with times of its collectives, and with times of computing: all other work on the GPU.

    The k-th collective of a rank is NCCL's k-th kernel there, in the order of their launch.

    Args:
      trace: as PyTorch's ExecutionTraceObserver wrote it: `recjax.lab.formats.chakra_et`.
      profiles: rank -> `recjax.lab.formats.kineto.Profile`, of all its ranks.

    Raises:
      DataError: a rank has no profile, or its kernels are not those of its collectives.
    """
    if missing := [rank for rank in trace.ranks if rank not in profiles]:
        raise DataError(f"the profiler's files lack rank {missing[0]}, which the trace has. Give one for each rank.")
    spans = [k for rank in trace.ranks for k in profiles[rank].collectives]
    zero = min((kernel.start_ns for kernel in spans), default=0)
    zero = min([zero, *(start for rank in trace.ranks for start, _ in profiles[rank].others[:1])])
    ranks = {rank: _timed(events, profiles[rank], zero) for rank, events in trace.ranks.items()}
    about = {**trace.about, "source": f"{trace.about.get('source', 'trace')} with times of PyTorch's profiler"}
    return checked(dataclasses.replace(trace, ranks=ranks, about=about), "the trace with its profile")


def _timed(events: tuple[Event, ...], profile: Profile, zero: int) -> tuple[Event, ...]:
    calls = [event for event in events if event.kind not in (COMPUTE, "barrier")]
    if len(calls) != len(profile.collectives):
        raise DataError(
            f"{profile.source}: {len(profile.collectives)} kernels of NCCL, and the trace has {len(calls)} collectives "
            "on that rank. Record both of the same steps."
        )
    spans = [Span(COMPUTE, start - zero, end - zero) for start, end in profile.others]
    named: list[Event] = []
    for number, (event, kernel) in enumerate(zip(calls, profile.collectives, strict=True)):
        if event.kind not in kernel.kinds:
            raise DataError(
                f"{profile.source}: NCCL's kernel {number} is {kernel.name[:60]}, and the trace has {event.kind} "
                f"({event.name or event.id}) there. Record both of the same steps."
            )
        named.append(dataclasses.replace(event, name=f"call {number}"))
        spans.append(Span(f"call {number}", kernel.start_ns - zero, kernel.end_ns - zero))
    kept = {event.id for event in calls}
    left_out = {event.id: event.deps for event in events if event.id not in kept}  # barriers, which send nothing
    named = [dataclasses.replace(e, deps=_through(e.deps, left_out)) for e in named]
    joined = Timeline(tuple(sorted(spans, key=lambda span: span.start))).joined(named, 0, 0)
    by_name = {event.name: calls[number] for number, event in enumerate(named)}
    found: list[Event] = []
    step = calls[-1].step if calls else 0
    for event in reversed(joined):  # computing is of the step of the collective that follows
        if event.kind != COMPUTE:
            step = by_name[event.name].step
            event = dataclasses.replace(event, name=by_name[event.name].name)
        found.append(dataclasses.replace(event, step=step))
    return tuple(reversed(found))


def _through(deps: tuple[int, ...], left_out: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Dependencies, with those of what is left out in its place."""
    found: dict[int, None] = {}
    waiting = list(deps)
    while waiting:
        dep = waiting.pop(0)
        if dep in left_out:
            waiting += left_out[dep]
        else:
            found[dep] = None
    return tuple(sorted(found))
