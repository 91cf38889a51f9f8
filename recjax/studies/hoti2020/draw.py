"""The figures of the study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.simulate.draw import COLOURS
from recjax.studies.hoti2020.observed import ratios
from recjax.studies.hoti2020.study import DIRECT, TREE
from recjax.studies.report import Picture
from recjax.utils.plots import GREY, PALETTE, figure, legend_beside, png


def pictures(found: dict[str, Any]) -> list[Picture]:
    """Draws what was run.

    Args:
      found: of `study.run`.
    """
    drawings = {
        "systems.png": (_systems, "systems", "two iterations on each system, by all-reduce algorithm"),
        "layers.png": (_layers, "systems", "raw latency and exposed communication of every layer"),
        "flops.png": (_flops, "flops", "slowest over fastest system by the FLOP/s that a GPU reaches"),
        "in_flight.png": (_in_flight, "in_flight", "two iterations by chunks in flight and order"),
        "chunks.png": (_chunks, "chunk_counts", "two iterations by chunks a collective, copies of 1 us"),
        "copies.png": (_copies, "copies", "two iterations by memory-copy latency"),
        "lone_all_reduce.png": (_lone_all_reduce, "lone_all_reduce", "a lone all-reduce against an analytical model"),
        "transport.png": (_transport, "transport", "TCP's window and the switch's buffer"),
    }
    return [Picture(name, text, png(drawing(found))) for name, (drawing, experiment, text) in drawings.items()
            if experiment in found]  # fmt: skip


def _ms(rows: Sequence[dict[str, Any]], key: str = "time_ns") -> np.ndarray:
    return np.array([row[key] for row in rows]) / 1e6


def _bars(panel: Any, labels: Sequence[str], title: str) -> None:
    panel.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=8)
    panel.set_ylabel("ms")
    panel.set_title(title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def _systems(found: dict[str, Any]) -> Any:
    drawn = figure(10, 4.2)
    for panel, all_reduce in zip(drawn.subplots(1, 2, sharey=True), (TREE, DIRECT), strict=True):
        rows = [row for row in found["systems"] if row["all_reduce"] == all_reduce]
        compute, exposed = _ms(rows, "compute_ns"), _ms(rows, "exposed_communication_ns")
        panel.bar(range(len(rows)), compute, color=COLOURS["compute"], label="computation")
        panel.bar(range(len(rows)), exposed, bottom=compute, color=COLOURS["exposed"], label="exposed communication")
        for i, (a, b) in enumerate(zip(compute, exposed, strict=True)):
            panel.text(i, a + b, f"{a + b:.1f} ms\n{b / (a + b):.0%} exposed", ha="center", va="bottom", fontsize=8)
        _bars(panel, [row["system"] for row in rows], f"two iterations, {all_reduce}")
        panel.margins(y=0.3)
        legend_beside(panel)
    return drawn


def _layers(found: dict[str, Any]) -> Any:
    drawn = figure(11, 7)
    rows = [row for row in found["systems"] if row["all_reduce"] == DIRECT]
    names = [layer["layer"] for layer in rows[0]["layers"]]
    raw, exposed = drawn.subplots(2, 1, sharex=True)
    for i, row in enumerate(rows):
        places = np.arange(len(names)) + (i - 1.5) * 0.2
        latency = [sum(c["raw_latency_ns"] for c in layer["collectives"]) / 1e6 for layer in row["layers"]]
        raw.bar(places, latency, 0.2, label=row["system"])
        exposed.bar(places, [layer["exposed_ns"] / 1e6 for layer in row["layers"]], 0.2, label=row["system"])
    _bars(raw, names, "raw latency of a layer's collectives, two iterations, direct all-reduce")
    _bars(exposed, names, "exposed communication")
    legend_beside(raw)
    return drawn


def _flops(found: dict[str, Any]) -> Any:
    drawn = figure(6, 4)
    panel = drawn.subplots()
    of = ratios(found["flops"])
    panel.plot(list(of), list(of.values()), marker="o", markersize=4, label="slowest over fastest system")
    panel.axhline(3, color=GREY, linestyle=":", linewidth=1, label="stated: 3x")
    panel.axvline(60, color=GREY, linestyle="--", linewidth=1, label="stated: 60 TFLOP/s")
    panel.set_xlabel("reached TFLOP/s of a GPU")
    panel.set_ylabel("ratio of times of two iterations")
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    legend_beside(panel)
    return drawn


def _in_flight(found: dict[str, Any]) -> Any:
    drawn = figure(7, 4)
    panel = drawn.subplots()
    lifo = [row for row in found["in_flight"] if row["scheduling"] == "lifo"]
    _systems_by(panel, lifo, "in_flight", "chunks in flight, LIFO", 2)
    return drawn


def _chunks(found: dict[str, Any]) -> Any:
    return _against(found["chunk_counts"], "chunks", "chunks a collective", 2)


def _copies(found: dict[str, Any]) -> Any:
    drawn = figure(11, 4)
    for panel, all_reduce in zip(drawn.subplots(1, 2, sharey=True), (TREE, DIRECT), strict=True):
        rows = [row for row in found["copies"] if row["all_reduce"] == all_reduce]
        _systems_by(panel, rows, "copy_us", "memory copy, us", 10)
        panel.set_title(all_reduce, fontsize=10)
    return drawn


def _against(rows: Sequence[dict[str, Any]], key: str, label: str, base: int) -> Any:
    drawn = figure(6, 4)
    _systems_by(drawn.subplots(), rows, key, label, base)
    return drawn


def _systems_by(panel: Any, rows: Sequence[dict[str, Any]], key: str, label: str, base: int) -> None:
    x = sorted({row[key] for row in rows})
    systems = dict.fromkeys(row["system"] for row in rows)
    lines = {system: _ms([row for row in rows if row["system"] == system]).tolist() for system in systems}
    _curves(panel, x, lines, label, "two iterations, ms", base)
    panel.set_ylim(bottom=0)


def _curves(
    panel: Any, x: Sequence[float], lines: dict[str, list[float]], x_label: str, y_label: str, base: int
) -> None:
    for (name, y), marker, colour in zip(lines.items(), "osD^vP", PALETTE, strict=False):
        panel.plot(x, y, marker=marker, markersize=4, label=name, color=colour)
    panel.set_xscale("log", base=base)
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
    legend_beside(panel)


def _lone_all_reduce(found: dict[str, Any]) -> Any:
    drawn = figure(10, 4)
    times, ratios = drawn.subplots(1, 2)
    rows = found["lone_all_reduce"]
    x = sorted({row["bytes"] / 2**20 for row in rows})
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["all_reduce"], row["chunks"]), []).append(row)
    name = "{0[0]}, {0[1]} chunk(s)".format
    times_ms = {name(group): _ms(r).tolist() for group, r in groups.items()}
    _curves(times, x, times_ms, "MiB", "with congestion, ms", 2)
    by_group = {name(group): [row["ratio"] for row in r] for group, r in groups.items()}
    _curves(ratios, x, by_group, "MiB", "time over the analytical one", 2)
    ratios.axhline(50, color="#888888", linestyle=":", linewidth=1)
    for panel in (times, ratios):
        panel.set_yscale("log")
    return drawn


def _transport(found: dict[str, Any]) -> Any:
    drawn = figure(11, 7)
    alone, iterations = drawn.subplots(2, 1)
    rows = found["transport"]["alone"]
    labels = []
    for row in rows[::2]:
        window = "no TCP"
        if row["window_bytes"]:
            window = f"window {row['window_bytes'] / 1e6:g}, buffer {row['buffer_bytes'] / 1e6:g} MB"
        labels.append(f"{row['system']}\n{window}")
    for i, what in enumerate(("all_reduce", "many_to_one")):
        chosen = [row for row in rows if row["what"] == what]
        bars = alone.bar(np.arange(len(labels)) + (i - 0.5) * 0.35, _ms(chosen), 0.35, label=what)
        alone.bar_label(bars, [f"{r['lost_segments']} lost" if r["lost_segments"] else "" for r in chosen], fontsize=7)
    _bars(alone, labels, "alone: all-reduce of 8 MiB (double binary tree), and 1 MiB from every rank to one")
    alone.set_yscale("log")
    legend_beside(alone)
    alone.margins(y=0.2)
    rows = found["transport"]["iterations"]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    windows = list(dict.fromkeys(row["window_bytes"] for row in rows))
    for i, window in enumerate(windows):
        times = _ms([row for row in rows if row["window_bytes"] == window])
        label = f"window {window / 1e3:g} kB" if window else "no TCP"
        iterations.bar(np.arange(len(systems)) + (i - len(windows) / 2) * 0.16, times, 0.16, label=label)
    _bars(iterations, systems, "two iterations, direct all-reduce")
    legend_beside(iterations)
    iterations.margins(y=0.2)
    return drawn
