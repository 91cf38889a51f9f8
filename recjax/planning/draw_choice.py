"""A chosen plan as a picture: its step beside those of other plans, the way of each table, and a device's memory."""

from __future__ import annotations

from typing import Any

from recjax.utils.plots import BLUE, GREEN, ORANGE, PALETTE, figure, legend_beside, legend_of_all, literal, plain, png
from recjax.utils.units import size_text

_WAYS = {
    "copy": ("a copy on each device", ORANGE),
    "rows": ("rows spread over devices", BLUE),
    "pooled": ("with devices that pool, evenly", GREEN),
    "whole": ("whole with one device, which pools", PALETTE[5]),
}
# Of the other panels: no colour of a way, so that each colour means one thing.
_CHOSEN, _OTHER = PALETTE[3], PALETTE[7]
_PARTS = {"tables": PALETTE[4], "dense": PALETTE[6], "batch": PALETTE[8], "temporaries": PALETTE[9], "rows": PALETTE[7]}
_GIB, _MIB = 2**30, 2**20
_MOST = 24  # tables that have a bar


def picture(found: dict[str, Any]) -> bytes:
    """The PNG of `recjax.train.planned.figures`."""
    tables = _ranked(found["tables"])
    with literal():
        drawn = figure(13, max(4.2, 1.8 + 0.2 * len(tables)))
        plans, ways, memory = drawn.subplots(1, 3, width_ratios=(1.1, 1.6, 0.5))
        kind = "" if found["measured_machine"] else ", from data sheets"
        drawn.suptitle(f"chosen for {found['machine']}{kind}: {found['step_ms']:.3g} ms a step predicted", fontsize=11)
        _plans(plans, found)
        _memory(memory, found["memory_bytes"])
        if tables:
            _ways(ways, tables, len(found["tables"]))
            legend_of_all(drawn, ways)
        else:  # no table can be held in another way
            ways.set_axis_off()
        return png(drawn)


def _plans(panel: Any, found: dict[str, Any]) -> None:
    plain(panel, "x")
    bars = {"chosen": found["step_ms"], "the plain rule": found["plain_step_ms"]}
    for choice in found["choices"]:
        if choice["next"] is not None:
            words = {"plan": "{}", "bucket": "buckets of {:g} MiB", "routing": "routing by the {}"}
            name = words[choice["what"]].format(choice["next"])
            bars[name] = choice["next_step_ms"]
    drawn = panel.barh(list(bars), list(bars.values()), 0.6, color=[_CHOSEN, *[_OTHER] * (len(bars) - 1)])
    panel.bar_label(drawn, [f" {ms:,.4g}" for ms in bars.values()], fontsize=8)
    panel.set_xlim(0, 1.3 * max(bars.values()))
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=8)
    panel.set_xlabel("predicted step, ms\n(within 5% the simpler one wins)", fontsize=9)
    panel.set_title("the whole step", fontsize=10)


def _memory(panel: Any, bytes_of: dict[str, float]) -> None:
    plain(panel)
    whole = bytes_of["total"]
    size_of, unit = (_GIB, "GiB") if whole >= _GIB / 10 else (_MIB, "MiB")
    below = 0.0
    for part, colour in _PARTS.items():
        if part not in bytes_of:
            continue
        size = bytes_of[part] / size_of
        panel.bar([0], [size], bottom=below, color=colour, label=f"{part}, {size_text(bytes_of[part])}", width=0.5)
        below += size
    panel.set_xlim(-0.6, 0.6)
    panel.set_xticks([])
    panel.set_ylabel(f"memory of a device, {unit}", fontsize=9)
    panel.set_title(f"memory: {size_text(whole)}", fontsize=10)
    legend_beside(panel)


def _ranked(tables: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tables whose next best way would cost most, of those that are alike the first."""
    first = {of["class"]: (name, of) for name, of in reversed(tables.items()) if of["next"] is not None}
    ranked = sorted(first.values(), key=lambda item: (item[1]["step_ms"] - (item[1]["next_step_ms"] or 1e30), item[0]))
    return ranked[:_MOST]


def _ways(panel: Any, tables: list[tuple[str, dict[str, Any]]], count: int) -> None:
    plain(panel, "x")
    names = [name if of["alike"] == 1 else f"{name} (and {of['alike'] - 1} alike)" for name, of in tables]
    costs = [max(0.0, (of["next_step_ms"] or of["step_ms"]) - of["step_ms"]) for _, of in tables]
    panel.barh(names, costs, color=[_WAYS[of["way"]][1] for _, of in tables])
    for row, (_, of) in enumerate(tables):
        text = {"copy": "as copies", "rows": "as rows", "pooled": "pooled", "whole": "pooled, whole"}.get(
            of["next"], ""
        )
        text = text if of["next_fits"] or not text else f"{text}: does not fit"
        panel.text(costs[row], row, f" {text}", va="center", fontsize=7, color="#444444")
    for way in dict.fromkeys(of["way"] for _, of in tables):
        panel.barh([0], [0], color=_WAYS[way][1], label=_WAYS[way][0])
    panel.set_xlim(0, 1.25 * max([*costs, 1e-9]))
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=7)
    panel.set_xlabel("longer step with the next best way, ms\n(which way, stands at the bar)", fontsize=9)
    shown = sum(of["alike"] for _, of in tables)
    more = f", {shown} of {count}: those that weigh most" if shown < count else ""
    panel.set_title(f"the way of each table (colour){more}", fontsize=10)
