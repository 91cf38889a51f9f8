"""The pictures of the study: messages by size, variations, ranks, time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recjax.lab.studies.communication.shape import BASE
from recjax.lab.studies.report import Picture
from recjax.lab.trace.draw import TIME_COLOURS, phase_bytes, time_parts
from recjax.utils import plots
from recjax.utils.units import size_text

KINDS = ("all_reduce", "all_to_all", "reduce_scatter", "all_gather")
VARIATIONS = {
    "batch": "batch size",
    "placement": "placement",
    "buckets": "bucket size",
    "dense": "dense part sharded",
    "precision": "precision of the exchange",
}
_PHASES = {
    "id_exchange": "ids (alltoallv-1)",
    "pooled_exchange": "pooled vectors (alltoallv-2)",
    "pooled_grad_exchange": "their gradients (alltoallv-2, backward)",
}
_LINES = ("-", "--", ":", "-.")
_OPAQUE: dict[str, Any] = {"framealpha": 1, "edgecolor": "none"}  # legends, through which no line of the grid goes


def of_variation(cases: Mapping[str, Any], variation: str) -> list[str]:
    """The cases of a variation by name, the base first."""
    base = [name for name, one in cases.items() if one["variation"] == BASE]
    return base + [name for name, one in cases.items() if one["variation"] == variation]


def label(variation: str, name: str) -> str:
    """Returns the name of a case within a variation, of which the base is one value."""
    named = {
        "batch": "the batch",
        "placement": "table-wise",
        "buckets": "one bucket",
        "dense": "replicated",
        "precision": "float32",
    }
    return named.get(variation, name) if name == BASE else name


@plots.literal()
def pictures(result: Mapping[str, Any]) -> dict[str, list[Picture]]:
    """Returns the pictures of each section: "sizes", "variations", "ranks", "time"."""
    made = {
        "sizes": [
            Picture(
                f"{kind}.png",
                f"{kind} of a rank in a step by message size: how many, and their share of bytes, in each variation",
                _sizes(result["compiled"], kind),
            )
            for kind in ("all_reduce", "all_to_all")
        ],
        "variations": [
            Picture("bytes.png", "bytes of a rank in a step, by phase, in every variation", _bytes(result["compiled"]))
        ],
        "ranks": [
            Picture(
                "ranks.png",
                "bytes that each rank sends and receives in the all-to-alls, ranks in order of their bytes, for both "
                "placements",
                _ranks(result["compiled"]),
            )
        ],
    }
    if result["measured"]:
        made["time"] = [
            Picture(
                "time.png",
                f"a step on {result['devices']} devices of this machine, the mean of ranks and steps",
                _time(result["measured"]),
            )
        ]
    return made


def _sizes(cases: Mapping[str, Any], kind: str) -> bytes:
    figure = plots.figure(15, 6)
    panels = figure.subplots(2, len(VARIATIONS), sharey="row", sharex=True)
    bins = sorted({int(b) for one in cases.values() for b, _, _ in one["sizes"].get(kind, ())})
    for column, (variation, title) in enumerate(VARIATIONS.items()):
        names = of_variation(cases, variation)
        width = 0.8 / len(names)
        for row, (index, unit) in enumerate(((1, "messages in a step"), (2, "share of bytes, %"))):
            panel = panels[row][column]
            plots.plain(panel)
            for place, name in enumerate(names):
                found = {int(one[0]): one[index] for one in cases[name]["sizes"].get(kind, ())}
                whole = sum(found.values()) / 100 if index == 2 else 1
                panel.bar(
                    [bins.index(b) + (place - (len(names) - 1) / 2) * width for b in found],
                    [value / (whole or 1) for value in found.values()],
                    width,
                    facecolor=plots.PALETTE[place],
                    hatch=plots.HATCHES[place],
                    edgecolor="white",
                    linewidth=0.5,
                    label=label(variation, name),
                )
            panel.set_xticks(range(len(bins)), [size_text(2.0**b) for b in bins], rotation=90, fontsize=7)
            if column == 0:
                panel.set_ylabel(unit)
            if row == 0:
                panel.set_title(title, fontsize=10)
                panel.margins(y=0.45)
                panel.legend(fontsize=7, loc="upper left", **_OPAQUE)
            else:
                panel.set_xlabel("message of at least")
    figure.suptitle(f"{kind}, a rank and step", fontsize=11)
    return plots.png(figure)


def _bytes(cases: Mapping[str, Any]) -> bytes:
    keys = dict.fromkeys((c["phase"], c["kind"]) for one in cases.values() for c in one["collectives"])
    mib = {
        f"{phase} ({kind})": [phase_bytes(one, phase, kind) / 2**20 for one in cases.values()]
        for phase, kind in keys
        if max(phase_bytes(one, phase, kind) for one in cases.values()) >= 2**10
    }
    colours = itertools.cycle(plots.PALETTE)
    return _stacked(list(cases), mib, colours, 11, "MiB of a rank in a step, padding included")


def _time(cases: Mapping[str, Any]) -> bytes:
    times = [time_parts(one["time"]) for one in cases.values()]
    ms = {part: [of[part] for of in times] for part in times[0]}
    return _stacked(list(cases), ms, [TIME_COLOURS[part] for part in ms], 10, "ms a step")


def _stacked(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], colours: Iterable[str], width: float, label: str
) -> bytes:
    """A picture with a bar for each case, the first at the top."""
    figure = plots.figure(width, 1.6 + 0.4 * len(names))
    panel = figure.subplots()
    plots.plain(panel, "x")
    plots.stacked(panel, range(len(names)), parts, colours, hatched=True, height=0.65)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.invert_yaxis()
    panel.set(xlabel=label, xlim=(0, None))
    plots.legend_of_all(figure, panel)
    return plots.png(figure)


def _ranks(cases: Mapping[str, Any]) -> bytes:
    names = of_variation(cases, "placement")
    phases = [phase for phase in _PHASES if phase in cases[names[0]]["phases"]]
    most = max(
        max(cases[name]["phases"][phase][way]) for name in names for phase in phases for way in ("sent", "received")
    )
    unit, size = ("MiB", 2**20) if most >= 2**24 else ("KiB", 2**10)
    figure = plots.figure(4.6 * len(phases), 7)
    panels = figure.subplots(2, len(phases), sharex=True, squeeze=False)
    for column, phase in enumerate(phases):
        for row, way in enumerate(("sent", "received")):
            panel = panels[row][column]
            plots.plain(panel)
            for place, name in enumerate(names):
                of = cases[name]["phases"][phase]
                uneven = of["imbalance"][way]["phase"]
                panel.plot(
                    [value / size for value in sorted(of[way], reverse=True)],
                    _LINES[place % 4],
                    color=plots.PALETTE[place],
                    linewidth=2,
                    label=f"{label('placement', name)}: max/mean {uneven:.2f}",
                )
            panel.set_ylim(0, 1.35 * max(max(cases[name]["phases"][phase][way]) for name in names) / size)
            panel.legend(fontsize=8, loc="upper right", **_OPAQUE)
            panel.set_ylabel(f"{unit} {way} in a step")
            if row == 0:
                panel.set_title(_PHASES[phase], fontsize=10)
            else:
                panel.set_xlabel("ranks, the one with the most bytes first")
            plots.whole_numbers(panel)
    return plots.png(figure)


def phase_title(phase: str) -> str:
    """A phase in the words of the study."""
    return _PHASES.get(phase, phase)


def size_rows(cases: Mapping[str, Any], names: Sequence[tuple[str, str]], kind: str) -> list[list[str]]:
    """The histogram of a kind as text: a row for each case and power of two; none for cases without messages.

    Args:
      cases: name -> figures.
      names: (what to call it, name) of each case.
      kind: of collectives.
    """
    rows = [["case", "message of at least", "count", "share of count", "bytes", "share of bytes"]]
    for called, name in names:
        found = cases[name]["sizes"].get(kind, ())
        count, total = (sum(one[i] for one in found) for i in (1, 2))
        for b, n, size in found:
            rows.append(
                [
                    called,
                    size_text(2.0 ** int(b)),
                    f"{n:.4g}",
                    f"{n / count:.1%}",
                    size_text(size),
                    f"{size / total:.1%}",
                ]
            )
    return rows
