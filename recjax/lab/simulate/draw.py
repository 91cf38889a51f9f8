"""Pictures of a simulation, and a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recjax.lab.formats import trace_events
from recjax.lab.simulate.system import Played
from recjax.utils.files import write_whole
from recjax.utils.plots import GREY, PALETTE, figure, legend_beside, png, stacked
from recjax.utils.units import time_text

_RANKS = 16  # whose operations the trace shows at most
_KINDS = (
    "compute",
    "all_reduce",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "exposed",
    "broadcast",
    "reduce",
    "send_recv",
)
COLOURS = dict(zip(_KINDS, PALETTE, strict=False))


def draw_workload(result: Played, found: dict[str, Any], path: Path) -> None:
    """Computation and exposed communication of every layer, raw latencies, and the time line of a rank.

    Args:
      result: of `simulate` or `calibrated.play`.
      found: `report.of_workload` or `of_calibrated` of it.
      path: of the PNG.
    """
    drawn = figure(11, 9)
    drawn.suptitle(f"{found['workload']} on {found['topology']}: {time_text(found['time_ns'])}")
    layers, raw, line = drawn.subplots(3, 1)
    names = [layer["layer"] for layer in found["layers"]]
    places = np.arange(len(names))
    compute = np.array([layer["compute_ns"] for layer in found["layers"]]) / 1e3
    exposed = np.array([layer["exposed_ns"] for layer in found["layers"]]) / 1e3
    late = np.array([layer["late_ns"] for layer in found["layers"]]) / 1e3
    layers.bar(places, compute, color=COLOURS["compute"], label="computation")
    if late.any():
        layers.bar(places, late, bottom=compute, color=GREY, label="lateness")
    layers.bar(places, exposed, bottom=compute + late, color=COLOURS["exposed"], label="exposed communication")
    layers.set(ylabel="time of a layer, us", ylim=(0, None))
    legend_beside(layers)
    kinds = dict.fromkeys(c["collective"] for layer in found["layers"] for c in layer["collectives"])
    latencies = {
        kind: [
            sum(c["raw_latency_ns"] for c in layer["collectives"] if c["collective"] == kind) / 1e3
            for layer in found["layers"]
        ]
        for kind in kinds
    }
    stacked(raw, list(places), latencies, [COLOURS[kind] for kind in kinds], upright=True)
    raw.set_ylabel("raw latency, us")
    if kinds:
        legend_beside(raw)
    for panel in (layers, raw):
        upright = sum(map(len, names)) < 120  # they then stand side by side
        panel.set_xticks(places, names, fontsize=7, **({} if upright else {"rotation": 60, "ha": "right"}))
        panel.spines[["top", "right"]].set_visible(False)
    rows = 1
    for i, row, start, end in spans(result, int(result.finished.max(axis=0).argmax())):
        operation = result.workload.operations[i]
        colour = COLOURS["compute"] if operation.kind == "compute" else COLOURS[operation.collective]
        edge = {"edgecolor": "white", "linewidth": 0.3}  # so that spans which follow each other can be told apart
        line.barh(row, (end - start) / 1e3, left=start / 1e3, height=0.8, color=colour, **edge)
        rows = max(rows, row + 1)
    several = [f"collectives {i}" for i in range(1, rows)] if rows > 2 else ["collectives"]
    line.set_yticks(range(rows), ["computation", *several][:rows], fontsize=7)
    line.spines[["top", "right"]].set_visible(False)
    line.invert_yaxis()
    line.set_xlabel("time, us")
    write_whole(path, png(drawn))


def spans(result: Played, actor: int) -> list[tuple[int, int, float, float]]:
    """(operation, row, start, end) of an actor, in ns: row 0 holds computations, a collective takes the first free."""
    free: list[float] = []
    found = []
    order = np.argsort(np.nan_to_num(result.started[:, actor]), kind="stable")
    for i in order.tolist():
        start, end = float(result.started[i, actor]), float(result.finished[i, actor])
        if not end > start:
            continue
        row = 0
        if result.workload.operations[i].kind == "collective":
            row = next((r for r, until in enumerate(free) if until <= start), len(free)) + 1
            free[row - 1 : row] = [end]
        found.append((i, row, start, end))
    return found


def chrome_trace(result: Played) -> dict[str, Any]:
    """Events in the trace event format: a process for each rank (16 at most), a thread for each row."""
    events: list[dict[str, Any]] = []
    for actor in range(min(result.finished.shape[1], _RANKS)):
        rows = 0
        for i, row, start, end in spans(result, actor):
            operation = result.workload.operations[i]
            kind = operation.collective or "compute"
            details: dict[str, Any] = {"layer": operation.layer, "phase": operation.phase}
            if operation.kind == "collective":
                ready = float(result.ready[i, actor])
                details |= {"bytes": operation.bytes, "queued_us": (start - ready) / 1e3}
            details["exposed_us"] = float(result.waited[i, actor]) / 1e3
            place = (actor, row)
            events.append(trace_events.span(operation.name, kind, place, start / 1e3, (end - start) / 1e3, details))
            rows = max(rows, row)
        whole = f"rank {actor}" + (" (stands for all)" if getattr(result, "shortcut", "") else "")
        collectives = {row: f"collectives {row}" for row in range(1, rows + 1)}
        events += trace_events.names(actor, whole, {0: "computation"} | collectives)
    return {"traceEvents": events, "displayTimeUnit": "ns"}
