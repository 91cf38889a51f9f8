"""The figures of the study."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.lab.simulate.draw import COLOURS
from recjax.lab.studies.hoti2020.observed import NAMES, ratios
from recjax.lab.studies.hoti2020.study import DIRECT, TREE
from recjax.lab.studies.report import Picture
from recjax.utils.plots import BLUE, GREY, PALETTE, figure, legend_of_all, literal, logarithmic, plain, png
from recjax.utils.units import size_text


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
    with literal():
        return [
            Picture(name, f"{text[0].upper()}{text[1:]}.", png(drawing(found)))
            for name, (drawing, experiment, text) in drawings.items()
            if experiment in found
        ]


def _ms(rows: Sequence[dict[str, Any]], key: str = "time_ns") -> np.ndarray:
    return np.array([row[key] for row in rows]) / 1e6


def _bars(panel: Any, labels: Sequence[str], title: str, rotation: int = 0) -> None:
    turned = {"rotation": rotation, "ha": "right"} if rotation else {}
    panel.set_xticks(range(len(labels)), labels, fontsize=8, **turned)
    panel.set_ylabel("ms")
    panel.set_title(title, fontsize=10)
    plain(panel)


def _grouped(panel: Any, groups: dict[str, Any]) -> list[Any]:
    """Bars side by side, one of each group at every place; returns those of each group."""
    one = 0.8 / len(groups)
    places = [np.arange(len(heights)) + (i - (len(groups) - 1) / 2) * one for i, heights in enumerate(groups.values())]
    return [
        panel.bar(at, heights, one, label=name, color=colour)
        for at, (name, heights), colour in zip(places, groups.items(), PALETTE, strict=False)
    ]


def _systems(found: dict[str, Any]) -> Any:
    drawn = figure(9, 4.4)
    for panel, all_reduce in zip(drawn.subplots(1, 2, sharey=True), (TREE, DIRECT), strict=True):
        rows = [row for row in found["systems"] if row["all_reduce"] == all_reduce]
        compute, exposed = _ms(rows, "compute_ns"), _ms(rows, "exposed_communication_ns")
        panel.bar(range(len(rows)), compute, color=COLOURS["compute"], label="computation", width=0.7)
        panel.bar(
            range(len(rows)),
            exposed,
            bottom=compute,
            color=COLOURS["exposed"],
            label="exposed communication",
            width=0.7,
        )
        for i, (a, b) in enumerate(zip(compute, exposed, strict=True)):
            panel.text(i, a + b, f"{a + b:.1f} ms\n{b / (a + b):.0%} exposed", ha="center", va="bottom", fontsize=8)
        _bars(panel, [row["system"] for row in rows], f"two iterations, {NAMES[all_reduce]}")
        panel.yaxis.set_tick_params(labelleft=True)
        panel.margins(x=0.08, y=0.2)
    legend_of_all(drawn, panel)
    return drawn


def _layers(found: dict[str, Any]) -> Any:
    drawn = figure(11, 7)
    rows = [row for row in found["systems"] if row["all_reduce"] == DIRECT]
    names = [layer["layer"] for layer in rows[0]["layers"]]
    raw, exposed = drawn.subplots(2, 1, sharex=True)
    latency = {
        row["system"]: [sum(c["raw_latency_ns"] for c in layer["collectives"]) / 1e6 for layer in row["layers"]]
        for row in rows
    }
    _grouped(raw, latency)
    _grouped(exposed, {row["system"]: [layer["exposed_ns"] / 1e6 for layer in row["layers"]] for row in rows})
    _bars(raw, names, "raw latency of a layer's collectives, two iterations, direct all-reduce", 30)
    _bars(exposed, names, "exposed communication", 30)
    legend_of_all(drawn, raw)
    return drawn


def _flops(found: dict[str, Any]) -> Any:
    drawn = figure(6.5, 4.2)
    panel = drawn.subplots()
    of = ratios(found["flops"])
    panel.plot(list(of), list(of.values()), marker="o", markersize=4, color=BLUE, label="slowest over fastest system")
    panel.axhline(3, color=GREY, linestyle=":", linewidth=1, label="stated: 3x")
    panel.axvline(60, color=GREY, linestyle="--", linewidth=1, label="stated: 60 TFLOP/s")
    panel.set(xlabel="reached TFLOP/s of a GPU", ylabel="ratio of times of two iterations", ylim=(0, None))
    plain(panel)
    legend_of_all(drawn, panel)
    return drawn


def _in_flight(found: dict[str, Any]) -> Any:
    drawn = figure(6.5, 4.2)
    panel = drawn.subplots()
    lifo = [row for row in found["in_flight"] if row["scheduling"] == "lifo"]
    _slower_by(panel, lifo, "in_flight", "chunks in flight, LIFO")
    legend_of_all(drawn, panel, 2)
    return drawn


def _chunks(found: dict[str, Any]) -> Any:
    drawn = figure(6.5, 4.2)
    panel = drawn.subplots()
    _slower_by(panel, found["chunk_counts"], "chunks", "chunks a collective")
    legend_of_all(drawn, panel, 2)
    return drawn


def _copies(found: dict[str, Any]) -> Any:
    drawn = figure(10, 4.4)
    for panel, all_reduce in zip(drawn.subplots(1, 2, sharey=True), (TREE, DIRECT), strict=True):
        rows = [row for row in found["copies"] if row["all_reduce"] == all_reduce]
        _curves(panel, _systems_by(rows, "copy_us"), "memory copy, us", "two iterations, ms", 10)
        panel.set_ylim(bottom=0)
        panel.yaxis.set_tick_params(labelleft=True)
        panel.set_title(NAMES[all_reduce], fontsize=10)
    legend_of_all(drawn, panel)
    return drawn


def _systems_by(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[float, float]]:
    """System -> value of what varies -> ms of two iterations."""
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        lines.setdefault(row["system"], {})[row[key]] = row["time_ns"] / 1e6
    return lines


def _slower_by(panel: Any, rows: Sequence[dict[str, Any]], key: str, label: str) -> None:
    """Each system by itself, for its optimum is a matter of few percent."""
    over = {
        f"{name}, at least {min(ms.values()):.1f} ms": {x: 100 * (y / min(ms.values()) - 1) for x, y in ms.items()}
        for name, ms in _systems_by(rows, key).items()
    }
    _curves(panel, over, label, "two iterations, % above the system's least", 2)
    panel.margins(y=0.06)  # the least of each is at 0, which no axis should hide


def _curves(panel: Any, lines: dict[str, dict[float, float]], x_label: str, y_label: str, base: int) -> None:
    """Lines by name, each x -> y."""
    styles = itertools.cycle(("-", "--", "-.", ":"))  # lines may lie on each other
    for (name, points), marker, colour, style in zip(lines.items(), "osD^vP", PALETTE, styles, strict=False):
        panel.plot(list(points), list(points.values()), style, marker=marker, markersize=4, label=name, color=colour)
    panel.set_xscale("log", base=base)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panel.set(xlabel=x_label, ylabel=y_label)
    plain(panel)


def _lone_all_reduce(found: dict[str, Any]) -> Any:
    drawn = figure(10, 4.6)
    times, over = drawn.subplots(1, 2)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found["lone_all_reduce"]:
        chunks = f"{row['chunks']} chunk{'s' if row['chunks'] > 1 else ''}"
        groups.setdefault(f"{NAMES[row['all_reduce']]}, {chunks}", []).append(row)
    for panel, key, unit, what in (
        (times, "time_ns", 1e6, "with congestion, ms"),
        (over, "ratio", 1, "time over the analytical one"),
    ):
        lines = {name: {r["bytes"] / 2**20: r[key] / unit for r in rows} for name, rows in groups.items()}
        _curves(panel, lines, "size of the all-reduce", what, 2)
    sizes = sorted({row["bytes"] for row in found["lone_all_reduce"]})[::4]
    for panel in (times, over):
        panel.set_xticks([size / 2**20 for size in sizes], [size_text(size).replace(".0", "") for size in sizes])
    over.axhline(50, color=GREY, linestyle=":", linewidth=1, label="stated: up to 50x")
    logarithmic(times, ["y"])
    logarithmic(over, ["y"])
    legend_of_all(drawn, over, 3)
    return drawn


def _transport(found: dict[str, Any]) -> Any:
    drawn = figure(10, 8.4)
    panels = drawn.subplots(3, 1)
    alone = found["transport"]["alone"]
    tree = [row for row in found["transport"]["iterations"] if row["all_reduce"] == TREE]
    for panel, rows, title in (
        (
            panels[0],
            [row for row in alone if row["what"] == "all_reduce"],
            "an all-reduce of 8 MiB alone, double binary tree",
        ),
        (panels[1], [row for row in alone if row["what"] == "many_to_one"], "1 MiB from every rank to one"),
        (panels[2], tree, "two iterations, double binary tree"),
    ):
        systems = list(dict.fromkeys(row["system"] for row in rows))
        ways: dict[str, list[dict[str, Any]]] = {_way(row): [] for row in (*alone, *tree)}
        for row in rows:
            ways[_way(row)].append(row)
        given = {way: own for way, own in ways.items() if own}
        colours = dict(zip(ways, PALETTE, strict=False))
        for (way, own), bars in zip(given.items(), _grouped(panel, {w: _ms(o) for w, o in given.items()}), strict=True):
            for bar in bars:
                bar.set_color(colours[way])
            panel.bar_label(bars, [f"{r['lost_segments']:,}" if r["lost_segments"] else "" for r in own], fontsize=7)
        _bars(panel, systems, title + (" (above bars: segments lost)" if any(r["lost_segments"] for r in rows) else ""))
        panel.margins(y=0.2)
    for panel in panels[:2]:
        logarithmic(panel, ["y"])
    legend_of_all(drawn, panels[0], 4)
    return drawn


def _way(row: dict[str, Any]) -> str:
    if not row["window_bytes"]:
        return "no TCP"
    return f"window {row['window_bytes'] / 1e6:g} MB, buffer {row['buffer_bytes'] / 1e6:,g} MB"
