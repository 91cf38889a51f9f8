"""A predicted step as a picture, and as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from recjax.lab.formats import trace_events
from recjax.planning.predict import Prediction
from recjax.utils import plots

# Families of parts of a step, and their colours.
FAMILIES = {
    "dense part": plots.BLUE,
    "embedding tables": plots.GREEN,
    "communication": plots.ORANGE,
    "checks and other": plots.GREY,
}
_BOUNDS = {
    "reading and routing": "worker threads: read and route",
    "main thread": "main thread: pack, place, dispatch",
    "interpreter": "all threads of Python together",
    "devices": "devices: kernels and communication",
    "CPU cores": "CPU cores: everything together",
}


def picture(prediction: Prediction, found: dict[str, Any]) -> bytes:
    """The PNG: what the step may wait for, and when a device does what.

    Args:
      prediction: of the step.
      found: `predict.figures` of it; with what was measured, if it was.
    """
    with plots.literal():
        drawn = plots.figure(11, 6.5)
        bounds, line = drawn.subplots(2, 1, height_ratios=(1, 2))
        names = [name for name in found["bounds_ms"] if found["bounds_ms"][name] > 0]
        values = [found["bounds_ms"][name] for name in names]
        # No colour of a family of the other panel, so that each colour means one thing.
        colours = [plots.PALETTE[3] if name == found["bound_by"] else plots.PALETTE[7] for name in names]
        plots.plain(bounds, "x")
        bars = bounds.barh([_BOUNDS.get(name, name) for name in names], values, color=colours)
        bounds.bar_label(bars, [f" {value:,.3g}" if value >= 1e-3 else " < 0.001" for value in values], fontsize=8)
        bounds.tick_params(axis="y", labelsize=8)
        if "measured" in found:
            bounds.axvline(found["measured"]["step_ms"], color=plots.GREY, linestyle="--", label="measured step")
            plots.legend_beside(bounds)
        bounds.invert_yaxis()
        bounds.set_xlim(0, 1.12 * max([*values, found.get("measured", {}).get("step_ms", 0.0)]))
        bounds.set_xlabel(
            "time of a step, ms; all go on at once, so that a step takes as long as the longest", fontsize=9
        )
        kind = "" if found["measured_machine"] else ", not measured"
        bounds.set_title(
            f"{found['step_ms']:.3g} ms a step predicted on {prediction.machine.name}{kind}: "
            f"bound by {found['bound_by']}",
            fontsize=10,
        )
        _lanes(line, prediction)
        return plots.png(drawn)


def _lanes(line: Any, prediction: Prediction) -> None:
    """Blocks of a device's timeline; neighbours of one part are one block, which is named if there is room."""
    rows = _rows(prediction)
    plots.plain(line, "x")
    whole = prediction.schedule.end_us / 1e3
    for (stream, lane), blocks in _blocks(prediction).items():
        for part, start, end, on_path in blocks:
            row = rows[stream, lane]
            colour = FAMILIES[family(part)]
            line.barh(row, end - start, left=start, height=0.8, color=colour, alpha=1.0 if on_path else 0.45)
            if end - start > 0.009 * whole * len(part):
                line.text(
                    (start + end) / 2,
                    row,
                    part,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if on_path else "#222222",
                )
    for name, colour in FAMILIES.items():
        line.barh(0, 0, color=colour, label=name)
    line.set_yticks(list(rows.values()), [_lane_name(stream, lane, rows) for stream, lane in rows], fontsize=8)
    line.invert_yaxis()
    line.set_xlabel("time since the start of the step, ms", fontsize=9)
    line.set_title("what runs when on a device, all alike (faint: not on the critical path)", fontsize=10)
    plots.legend_of_all(line.figure, line)


def family(part: str) -> str:
    """The family of a part of the step, a key of `FAMILIES`."""
    if part.endswith("exchange") or part in ("dense_grads", "dense_gather"):
        return "communication"
    if part.startswith("dense") or part == "loss":
        return "dense part"
    if part in ("gather", "pool", "pool_backward", "sparse_update", "row_statistic", "route"):
        return "embedding tables"
    return "checks and other"


def _blocks(prediction: Prediction) -> dict[tuple[str, int], list[tuple[str, float, float, bool]]]:
    """Part, start and end in ms and whether on the critical path, of neighbours joined, for each lane."""
    critical = set(prediction.schedule.critical)
    found: dict[tuple[str, int], list[tuple[str, float, float, bool]]] = {}
    close = prediction.schedule.end_us / 1e3 / 2000  # below what a picture shows
    for span in sorted(prediction.schedule.spans, key=lambda span: span.start_us):
        start, end = span.start_us / 1e3, span.end_us / 1e3
        if end <= start:
            continue
        part, on_path = prediction.graph.nodes[span.node].part, span.node in critical
        lane = found.setdefault((span.stream, span.lane), [])
        if lane and lane[-1][0] == part and lane[-1][3] == on_path and start - lane[-1][2] < close:
            lane[-1] = part, lane[-1][1], end, on_path
        else:
            lane.append((part, start, end, on_path))
    return found


def _lane_name(stream: str, lane: int, rows: dict[tuple[str, int], int]) -> str:
    if stream == "collective":
        return "communication"
    return "kernels" if sum(other == "compute" for other, _ in rows) == 1 else f"kernels {lane + 1}"


def _rows(prediction: Prediction) -> dict[tuple[str, int], int]:
    lanes = sorted({(span.stream, span.lane) for span in prediction.schedule.spans}, key=lambda lane: lane[::-1])
    lanes.sort(key=lambda lane: lane[0] == "collective")
    return {lane: row for row, lane in enumerate(lanes)}


def trace(prediction: Prediction) -> dict[str, Any]:
    """Events of a step in the trace event format: a process for a device, for all alike, and one for the host."""
    rows, critical = _rows(prediction), set(prediction.schedule.critical)
    devices = prediction.host.devices
    name = f"a device, for all {devices}" if devices > 1 else "the device"
    events = trace_events.names(0, name, {row: f"{stream} {lane}" for (stream, lane), row in rows.items()})
    for span in prediction.schedule.spans:
        node = prediction.graph.nodes[span.node]
        works = [{"kernel": w.kernel, **w.sizes, "flops": w.flops, "bytes": w.bytes} for w in node.works]
        about = {"part": node.part, "critical": span.node in critical, "turns": node.trips, "works": works}
        place, took_us = (0, rows[span.stream, span.lane]), span.end_us - span.start_us
        events.append(trace_events.span(node.name, node.part, place, span.start_us, took_us, about))
    events += trace_events.names(1, "the host, a batch ahead", {0: "main thread", 1: "a worker"})
    main_at = worker_at = 0.0
    for stage, us in prediction.stages.items():
        worker = stage in ("host_read", "host_route") and prediction.host.workers > 0
        at = worker_at if worker else main_at
        events.append(trace_events.span(stage.removeprefix("host_"), "host", (1, int(worker)), at, us))
        if worker:
            worker_at += us
        else:
            main_at += us
    return {"traceEvents": events, "displayTimeUnit": "ms"}
