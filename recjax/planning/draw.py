"""A predicted step as a picture, and as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from recjax.planning.predict import Prediction
from recjax.utils.plots import BLUE, GREY, ORANGE, PALETTE, figure, literal, plain, png

_PARTS = 9  # that have a colour of their own


def picture(prediction: Prediction, found: dict[str, Any]) -> bytes:
    """The PNG: what the step may wait for, and when a device does what.

    Args:
      prediction: of the step.
      found: `predict.figures` of it; with what was measured, if it was.
    """
    with literal():
        drawn = figure(11, 6.5)
        bounds, line = drawn.subplots(2, 1, height_ratios=(1, 2))
        names = list(found["bounds_ms"])
        values = [found["bounds_ms"][name] for name in names]
        colours = [ORANGE if name == found["bound_by"] else BLUE for name in names]
        plain(bounds, "x")
        bounds.barh(names, values, color=colours)
        if "measured" in found:
            bounds.axvline(found["measured"]["step_ms"], color=GREY, linestyle="--", label="measured step")
            bounds.legend(fontsize=8, frameon=False)
        bounds.invert_yaxis()
        bounds.set_xlabel("ms of a step")
        kind = "" if found["measured_machine"] else ", not measured"
        bounds.set_title(
            f"{found['step_ms']:.3g} ms a step predicted on {prediction.machine.name}{kind}: "
            f"bound by {found['bound_by']}",
            fontsize=10,
        )
        _lanes(line, prediction, list(found["parts_ms"]))
        return png(drawn)


def _lanes(line: Any, prediction: Prediction, parts: list[str]) -> None:
    colour = dict(zip(parts[:_PARTS], PALETTE, strict=False))
    critical = set(prediction.schedule.critical)
    rows = _rows(prediction)
    plain(line, "x")
    for span in prediction.schedule.spans:
        if span.end_us > span.start_us:
            part = prediction.graph.nodes[span.node].part
            line.barh(
                rows[span.stream, span.lane], (span.end_us - span.start_us) / 1e3, left=span.start_us / 1e3, height=0.8,
                color=colour.get(part, "#cccccc"), alpha=1.0 if span.node in critical else 0.55,
            )  # fmt: skip
    for part in colour:
        line.barh(0, 0, color=colour[part], label=part)
    line.set_yticks(list(rows.values()), [f"{stream} {lane}" for stream, lane in rows], fontsize=8)
    line.invert_yaxis()
    line.set_xlabel("ms, on a device that stands for all; faint: not on the critical path")
    line.legend(fontsize=7, ncols=5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _rows(prediction: Prediction) -> dict[tuple[str, int], int]:
    lanes = sorted({(span.stream, span.lane) for span in prediction.schedule.spans}, key=lambda lane: lane[::-1])
    lanes.sort(key=lambda lane: lane[0] == "collective")
    return {lane: row for row, lane in enumerate(lanes)}


def trace(prediction: Prediction) -> dict[str, Any]:
    """What happens when, in the trace event format: a process for a device, for all alike, and one for the host."""
    rows, critical = _rows(prediction), set(prediction.schedule.critical)
    events: list[dict[str, Any]] = []

    def named(pid: int, name: str, threads: dict[int, str]) -> None:
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for tid, thread in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}})

    devices = prediction.host.devices
    name = f"a device, for all {devices}" if devices > 1 else "the device"
    named(0, name, {row: f"{stream} {lane}" for (stream, lane), row in rows.items()})
    for span in prediction.schedule.spans:
        node = prediction.graph.nodes[span.node]
        works = [{"kernel": w.kernel, **w.sizes, "flops": w.flops, "bytes": w.bytes} for w in node.works]
        events.append({
            "name": node.name, "cat": node.part, "ph": "X", "pid": 0, "tid": rows[span.stream, span.lane],
            "ts": span.start_us, "dur": span.end_us - span.start_us,
            "args": {"part": node.part, "critical": span.node in critical, "turns": node.trips, "works": works},
        })  # fmt: skip
    named(1, "the host, a batch ahead", {0: "main thread", 1: "a worker"})
    main_at = worker_at = 0.0
    for stage, us in prediction.stages.items():
        worker = stage in ("host_read", "host_route") and prediction.host.workers > 0
        at = worker_at if worker else main_at
        events.append({"name": stage.removeprefix("host_"), "cat": "host", "ph": "X", "pid": 1, "tid": int(worker),
                       "ts": at, "dur": us})  # fmt: skip
        if worker:
            worker_at += us
        else:
            main_at += us
    return {"traceEvents": events, "displayTimeUnit": "ms"}
