"""Report of a replay, beside the trace that was replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.lab.replay.program import Slot
from recjax.lab.replay.replay import Times
from recjax.utils.units import bus_factor


def figures(slots: Sequence[Slot], times: Times) -> dict[str, Any]:
    """Figures of a replay, as JSON values.

    Returns:
      "collectives": for each kind, phase, group size and message size: "count", "padded_bytes", "useful_bytes" (largest
        of the ranks), "p50_us" and "p95_us" over ranks and repeats, "last_us", the median of the rank that came last
        and so waited for none, "bus_bytes_per_s" at "p50_us", and "original_us" and "original_last_us", the same of
        the trace, None if it has no times; "sum_us": "replayed", "original", "replayed_last" and "original_last", the
        sums of all slots' medians; "wall_us": of a whole replay, "p50" and "p95".
    """
    lines: dict[tuple[Any, ...], list[tuple[Slot, Any]]] = {}
    measured: Sequence[Any] = times.slots if times.slots is not None else [None] * len(slots)
    for slot, ns in zip(slots, measured, strict=True):
        lines.setdefault((slot.kind, slot.phase, len(slot.groups[0]), slot.padded_bytes), []).append((slot, ns))
    found = []
    for (kind, phase, n, padded), members in lines.items():
        ours = np.concatenate([ns[~np.isnan(ns)] for _, ns in members if ns is not None] or [np.zeros(0)]) / 1e3
        last = np.concatenate([np.nanmin(ns, axis=1) for _, ns in members if ns is not None] or [np.zeros(0)]) / 1e3
        theirs = np.array([_original_us(slot) for slot, _ in members])
        p50 = float(np.percentile(ours, 50)) if ours.size else None
        found.append(
            {
                "kind": kind,
                "phase": phase,
                "group_size": n,
                "count": len(members),
                "padded_bytes": padded,
                "useful_bytes": max(e.useful_bytes for slot, _ in members for e in slot.events.values()),
                "p50_us": p50,
                "p95_us": float(np.percentile(ours, 95)) if ours.size else None,
                "last_us": float(np.median(last)) if last.size else None,
                "bus_bytes_per_s": padded * bus_factor(kind, n) / (p50 / 1e6) if p50 else None,
                "original_us": _median(theirs[:, 0]),
                "original_last_us": _median(theirs[:, 1]),
            }
        )
    known = [ns / 1e3 for ns in times.slots or ()]
    medians = np.array([(np.nanmedian(us), np.median(np.nanmin(us, axis=1))) for us in known])
    originals = np.array([_original_us(slot) for slot in slots])
    sums = {
        f"{who}{which}": float(np.nansum(of[:, at])) if of.size and not np.isnan(of[:, at]).all() else None
        for who, of in (("replayed", medians), ("original", originals))
        for at, which in enumerate(("", "_last"))
    }
    wall_us = np.array(times.wall_ns) / 1e3
    wall = {"p50": float(np.percentile(wall_us, 50)), "p95": float(np.percentile(wall_us, 95))}
    return {"collectives": found, "sum_us": sums, "wall_us": wall}


def _median(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if values.size else None


def _original_us(slot: Slot) -> tuple[float, float]:
    """The median over ranks of what the trace has measured, and the least; nan if it has nothing."""
    found = [e.duration_ns / 1e3 for e in slot.events.values() if e.duration_ns is not None]
    return (float(np.median(found)), min(found)) if found else (np.nan, np.nan)
