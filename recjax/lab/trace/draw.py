"""The picture of communication traces: sizes, phases, balance and time, of several side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recjax.lab.trace.statistics import labels
from recjax.utils import plots
from recjax.utils.units import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST = len(plots.PALETTE)  # traces that a picture can still tell apart
# Of the parts of a step's time: see `time_parts`.
TIME_COLOURS = {
    "exposed communication": plots.ORANGE,
    "communication beside computing": "#e6b89c",
    "computing alone": plots.BLUE,
    "neither": "#dddddd",
}
_MARKERS = "osD^vP*X<>"
_PANEL_IN, _LETTER_IN, _HANDLE_IN = 5.2, 0.052, 0.5  # of a legend of this size


@plots.literal()
def picture(found: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: message sizes, bytes by phase, balance over ranks, and where the time goes, of all traces together."""
    shown, names = list(found)[:WIDEST], [name.replace(", ", ",\n") for name in labels(found)[:WIDEST]]
    lines = sum(name.count("\n") + 1 for name in names)
    figure = plots.figure(12, 8.5 + 0.3 * max(0, lines - 4))
    if len(found) > WIDEST:
        figure.suptitle(f"the first {WIDEST} of {len(found)} traces")
    _draw(figure, shown, names)
    return plots.png(figure)


def _draw(figure: Figure, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    (sizes, phases), (ranks, times) = figure.subplots(2, 2)
    for panel in (sizes, phases, ranks, times):
        plots.plain(panel, "x" if panel in (phases, times) else "y")
    _draw_sizes(sizes, found, names)
    _draw_phases(phases, found, names)
    _draw_ranks(ranks, found, names)
    _draw_times(times, found, names)


def _draw_sizes(panel: Axes, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    kinds = list(dict.fromkeys(kind for one in found for kind in one["sizes"]))
    width = 0.8 / max(1, sum(len(one["sizes"]) for one in found))
    number, last = 0, 1
    for trace, one in enumerate(found):
        for kind, bins in one["sizes"].items():
            place = kinds.index(kind)
            color = plots.PALETTE[place if len(found) == 1 else trace]
            hatch = "" if len(found) == 1 else plots.HATCHES[place % len(plots.HATCHES)]
            # a gap between neighbours, which differ by a hatch alone where they are of one trace
            panel.bar(
                [b + number * width for b, _, _ in bins],
                [c for _, c, _ in bins],
                0.8 * width,
                align="edge",
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
            )
            number, last = number + 1, max([last, *(b for b, _, _ in bins)])
    ticks = list(range(0, last + 2, 4))
    panel.set_xticks(ticks, [size_text(2**b) for b in ticks], fontsize=7)
    panel.set(
        title="messages by size",
        xlabel="message size; the bars of one power of two stand side by side",
        ylabel="messages of a rank in a step",
    )
    if len(found) == 1:
        handles = [Patch(color=color, label=kind) for kind, color in zip(kinds, plots.PALETTE, strict=False)]
    else:
        handles = [Patch(color=color, label=name) for name, color in zip(names, plots.PALETTE, strict=False)]
        if len(kinds) > 1:
            handles += [
                Patch(facecolor=plots.GREY, hatch=plots.HATCHES[i % len(plots.HATCHES)], edgecolor="white", label=kind)
                for i, kind in enumerate(kinds)
            ]
    _legend(panel, handles)


def _draw_phases(panel: Axes, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    at = range(len(found))
    most = max((sum(c["padded_bytes"] for c in one["collectives"]) for one in found), default=0.0)
    unit = max(n for n in range(3) if n == 0 or most >= 1024**n)
    parts = {
        f"{phase or 'elsewhere'} ({kind})": [phase_bytes(one, phase, kind) / 1024**unit for one in found]
        for phase, kind in dict.fromkeys((c["phase"], c["kind"]) for one in found for c in one["collectives"])
    }
    plots.stacked(panel, at, parts, itertools.cycle(plots.PALETTE), height=0.6)
    panel.set_yticks(list(at), names, fontsize=7)
    panel.set_ylim(len(found), -1)
    panel.set(title="bytes by phase", xlabel=f"{('bytes', 'KiB', 'MiB')[unit]} of a rank in a step")
    _legend(panel)


def _draw_ranks(panel: Axes, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    highest = 1.0
    for number, (name, one) in enumerate(zip(names, found, strict=True)):
        mean = sum(one["moved"]) / len(one["moved"]) or 1
        beside = (number - (len(found) - 1) / 2) * 0.7 / len(found)  # else equal traces would hide each other
        highest = max([highest, *(b / mean for b in one["moved"])])
        panel.plot(
            [of["rank"] + beside for of in one["by_rank"]],
            [b / mean for b in one["moved"]],
            markersize=4,
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="",
            label=f"{name}: max/mean {one['imbalance']:.2f}",
        )
    panel.set(title="useful bytes that a rank sends or receives", xlabel="rank", ylabel="over the mean of all ranks")
    panel.set_ylim(0, 1.1 * highest)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(panel)


def _draw_times(panel: Axes, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    panel.set_title("time of a step")
    timed = [(name, one["time"]) for name, one in zip(names, found, strict=True) if one["time"]]
    if not timed:
        panel.text(0.5, 0.5, "no times were measured", ha="center", transform=panel.transAxes)
        panel.set_axis_off()
        return
    parts = {what: [time_parts(t)[what] for _, t in timed] for what in TIME_COLOURS}
    plots.stacked(panel, range(len(timed)), parts, TIME_COLOURS.values())
    panel.set_yticks(range(len(timed)), [name for name, _ in timed], fontsize=7)
    panel.set(xlabel="ms, mean of ranks and steps", ylim=(len(timed), -1))
    _legend(panel)


def phase_bytes(one: Mapping[str, Any], phase: str, kind: str) -> float:
    """Bytes of a trace's collectives of a kind in a phase, of a rank in a step, padding included."""
    return float(sum(c["padded_bytes"] for c in one["collectives"] if (c["phase"], c["kind"]) == (phase, kind)))


def time_parts(time: Mapping[str, float]) -> dict[str, float]:
    """The parts of a step's time, ms, which add up to the step."""
    hidden = time["communication_ms"] - time["exposed_ms"]
    rest = time["step_ms"] - time["exposed_ms"] - time["computing_ms"]
    return {
        "computing alone": time["computing_ms"] - hidden,
        "communication beside computing": hidden,
        "exposed communication": time["exposed_ms"],
        "neither": max(0.0, rest),
    }


def _legend(panel: Axes, handles: Sequence[Any] | None = None) -> None:
    """Below the panel, if it has entries, in as many columns as fit."""
    handles = panel.get_legend_handles_labels()[0] if handles is None else handles
    if handles:
        longest = max(len(line) for handle in handles for line in str(handle.get_label()).split("\n"))
        columns = max(1, min(3, int(_PANEL_IN / (_HANDLE_IN + _LETTER_IN * longest))))
        plots.legend_below(panel, columns=columns, size=6, handles=handles)
