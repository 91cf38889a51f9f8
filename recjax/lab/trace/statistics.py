"""The figures of a communication trace: sizes, shares, imbalance and time, as studies of training systems show them.

What is shown follows C.-H. Chu's study of DLRM on 128 GPUs: counts and shares by message size, sizes by phase,
imbalance over ranks, and the share of a step's time that goes into communication, and that nothing hides.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.lab.formats import calls
from recjax.lab.formats.calls import imbalance
from recjax.lab.formats.trace import COMPUTE, Event, Trace
from recjax.utils.units import bus_factor

Spans = list[tuple[int, int]]


def figures(trace: Trace) -> dict[str, Any]:
    """All figures of a trace, as JSON values. Bytes and counts are those of one rank and step, the mean of all.

    Returns:
      "label", "source", "format", "config", "ranks" (how many the trace has), "world", "steps", "batch_size";
      "counted_ranks": None, or of how many ranks the splits were counted, which the others are taken to have, too;
      "collectives": for each kind and phase, the most bytes first: see `_line`;
      "sizes": kind -> [[b, count, bytes], ...] of messages of 2^b to 2^(b + 1) - 1 bytes, padding included;
      "moved": useful bytes of each rank, see `moved_bytes`; "imbalance": of them;
      "missing": ranks that the trace lacks; "calls" and "by_rank": see `calls.figures` and `calls.by_rank`;
      "time": None if nothing was measured, or durations alone, else see `_times`.
    """
    found = [(rank, event) for rank, event in trace.collectives()]
    per = len(trace.ranks) * trace.steps
    lines: dict[tuple[str, str], list[tuple[int, Event]]] = {}
    for rank, event in found:
        lines.setdefault((event.kind, event.phase), []).append((rank, event))
    total = sum(event.padded_bytes for _, event in found)
    single = calls.calls(trace)
    shown = calls.figures(single)
    of_line: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for call in shown:
        of_line.setdefault((call["kind"], call["phase"]), []).append(call)
    collectives = [
        _line(key, members, trace, per, len(found), total) | _of_calls(of_line.get(key, ()))
        for key, members in lines.items()
    ]
    moved = _by_rank(trace, found, moved_bytes)
    return {
        **{key: trace.about.get(key) for key in ("label", "source", "format", "config", "batch_size")},
        "ranks": len(trace.ranks),
        "world": trace.world,
        "counted_ranks": trace.about.get("counted_ranks"),
        "steps": trace.steps,
        "collectives": sorted(collectives, key=lambda line: -line["padded_bytes"]),
        "count": len(found) / per,
        "padded_bytes": total / per,
        "useful_bytes": sum(event.useful_bytes for _, event in found) / per,
        "sizes": _sizes(found, per),
        "moved": moved,
        "imbalance": imbalance(moved),
        "missing": [rank for rank in range(trace.world) if rank not in trace.ranks],
        "calls": shown,
        "by_rank": calls.by_rank(trace, single),
        "time": _times(trace) if any(event.end_ns is not None for _, event in found) else None,
    }


def _line(
    key: tuple[str, str], members: Sequence[tuple[int, Event]], trace: Trace, per: int, count: int, total: int
) -> dict[str, Any]:
    """One kind in one phase.

    Returns:
      "kind", "phase", "groups" (sizes of the groups of ranks), "dtypes"; "count" and "count_share"; "padded_bytes",
      "useful_bytes", "bytes_share" (of padded ones); "smallest", "median", "largest": sizes of the messages, padded;
      "imbalance": max/mean over ranks of `moved_bytes`; "time": None, or "ms" a rank and step, "p50_us"
      and "p95_us" of one, "imbalance", and "bus_bytes_per_s" at the median (nccl-tests' convention).
    """
    events = [event for _, event in members]
    sizes = np.array([event.padded_bytes for event in events])
    padded = int(sizes.sum())
    timed = [(rank, e) for rank, e in members if e.duration_ns is not None]
    time = None
    if timed:
        us = np.array([(e.duration_ns or 0) / 1e3 for _, e in timed])
        rates = [
            e.padded_bytes * bus_factor(e.kind, len(e.group)) / (e.duration_ns / 1e9) for _, e in timed if e.duration_ns
        ]
        time = {
            "ms": float(us.sum()) / 1e3 / per,
            "p50_us": float(np.percentile(us, 50)),
            "p95_us": float(np.percentile(us, 95)),
            "imbalance": imbalance(_by_rank(trace, timed, lambda e, rank: e.duration_ns or 0)),
            "bus_bytes_per_s": float(np.median(rates)) if rates else None,
        }
    return {
        "kind": key[0],
        "phase": key[1],
        "groups": sorted({len(event.group) for event in events}),
        "dtypes": sorted({event.dtype for event in events if event.dtype}),
        "count": len(events) / per,
        "count_share": len(events) / count,
        "padded_bytes": padded / per,
        "useful_bytes": sum(event.useful_bytes for event in events) / per,
        "bytes_share": padded / total if total else 0.0,
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "imbalance": imbalance(_by_rank(trace, members, moved_bytes)),
        "time": time,
    }


def _of_calls(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a line's single calls.

    Returns:
      "call_imbalance": "sent" and "received", the largest of any call; "waits": None, or "last_rank" (that came last
      most often; None if all came at once every time), "last_count" and "count" of calls, "late_us" (the largest), and
      "waiting_us" and "transfer_us" of a call (the mean).
    """
    timed = [call["time"] for call in found if call["time"]]
    waits = None
    if timed:
        came_last = collections.Counter(t["last_rank"] for t in timed if t["last_rank"] is not None)
        last, count = next(iter(came_last.most_common(1)), (None, 0))
        means = {key: sum(t[key] for t in timed) / len(timed) for key in ("waiting_us", "transfer_us")}
        late_us = max(t["late_us"] for t in timed)
        waits = {"last_rank": last, "last_count": count, "count": len(timed), "late_us": late_us, **means}
    worst = {way: max((c[way]["imbalance"] for c in found), default=1.0) for way in ("sent", "received")}
    return {"call_imbalance": worst, "waits": waits}


def moved_bytes(event: Event, rank: int) -> float:
    """Useful bytes that leave a rank or come to it, whichever are more.

    The larger one of both is what a rank's link is busy with (both ways go at a time).
    """
    return max(calls.sent_and_received(event, rank))


def _by_rank(trace: Trace, members: Iterable[tuple[int, Event]], value: Any) -> list[float]:
    """The sum of `value(event, rank)` on each rank, a step."""
    total = dict.fromkeys(trace.ranks, 0.0)
    for rank, event in members:
        total[rank] += value(event, rank)
    return [one / trace.steps for one in total.values()]


def _sizes(found: Iterable[tuple[int, Event]], per: int) -> dict[str, list[list[float]]]:
    bins: dict[str, dict[int, list[float]]] = collections.defaultdict(dict)
    for _, event in found:
        if event.padded_bytes:
            one = bins[event.kind].setdefault(event.padded_bytes.bit_length() - 1, [0.0, 0.0])
            one[0] += 1 / per
            one[1] += event.padded_bytes / per
    return {kind: [[b, *bins[kind][b]] for b in sorted(bins[kind])] for kind in sorted(bins)}


def _times(trace: Trace) -> dict[str, Any]:
    """Parts of the time of a step, the mean over ranks and steps.

    Returns:
      "step_ms", from the first beginning to the last end of what the trace has; "communication_ms", in which at least
      one collective ran; "exposed_ms", the part of that in which the rank did not compute; "computing_ms"; "share" of
      communication in the step, "exposed_share" of the exposed part; "phases": phase -> [ms, exposed ms].
    """
    steps: dict[tuple[int, int], tuple[Spans, Spans, dict[str, Spans]]] = {}
    for rank, events in trace.ranks.items():
        for event in events:
            if event.start_ns is None or event.end_ns is None:
                continue
            talk, work, phases = steps.setdefault((rank, event.step), ([], [], {}))
            span = (event.start_ns, event.end_ns)
            (work if event.kind == COMPUTE else talk).append(span)
            if event.kind != COMPUTE:
                phases.setdefault(event.phase, []).append(span)
    totals = collections.Counter[str]()
    by_phase: dict[str, list[float]] = {}
    for talk, work, phases in steps.values():
        totals["step"] += max(e for _, e in talk + work) - min(s for s, _ in talk + work)
        totals["communication"] += _length(talk)
        totals["computing"] += _length(work)
        totals["exposed"] += _length(talk + work) - _length(work)
        for phase, spans in phases.items():
            one = by_phase.setdefault(phase, [0.0, 0.0])
            one[0] += _length(spans) / 1e6 / len(steps)
            one[1] += (_length(spans + work) - _length(work)) / 1e6 / len(steps)
    ms = {f"{name}_ms": totals[name] / 1e6 / len(steps) for name in ("step", "communication", "exposed", "computing")}
    whole = totals["step"] or 1
    shares = {"share": totals["communication"] / whole, "exposed_share": totals["exposed"] / whole}
    return {**ms, **shares, "phases": by_phase}


def _length(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the time in which at least one of them was open."""
    total, last = 0, -1
    for start, end in sorted(spans):
        total += max(0, end - max(start, last))
        last = max(last, end)
    return total


def ordered(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Traces that differ in numbers by these: 0, 1, 4, 25, where a shell orders names otherwise; others as given."""
    keys = _differing(found)
    try:
        numbers = [tuple(float((one.get("config") or {})[key]) for key in keys) for one in found]
    except (KeyError, ValueError):
        return list(found)
    return [found[i] for i in sorted(range(len(found)), key=lambda i: numbers[i])]


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which traces differ; none where one has no settings."""
    configs = [one.get("config") or {} for one in found]
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key) for config in configs}) > 1] if all(configs) else []


def labels(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels of several traces: the settings in which they differ, or else the names of their folders."""
    configs = [one.get("config") or {} for one in found]
    if differ := _differing(found):
        return [", ".join(f"{key}={config.get(key, '-')}" for key in differ) for config in configs]
    return [str(one.get("label") or "trace") for one in found]
