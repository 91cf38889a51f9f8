"""Pictures of a campaign: predicted beside measured, and plans by their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recjax.lab.studies.foresight.analysis import Found
from recjax.lab.studies.report import Picture
from recjax.utils import plots

ERRORS, PLANS = "errors.png", "plans.png"
# Words, colour and hatch of measured plans: of the planner, of the plain rule, and others.
_LOOKS = (
    ("measured, the planner's", plots.GREEN, plots.HATCHES[1]),
    ("measured, the plain rule's", plots.GREY, plots.HATCHES[2]),
    ("measured, others", plots.BLUE, plots.HATCHES[0]),
)


def pictures(result: dict[str, Any], found: Sequence[Found]) -> list[Picture]:
    """Draws what there is."""
    made = []
    if configs := [one for one in found if one.kind == "config"]:
        made.append(
            Picture(
                ERRORS,
                "Predicted and measured times of random models, and errors of predictions that leave something out.",
                _errors(result, configs),
            )
        )
    if result["rankings"]:
        made.append(
            Picture(PLANS, "Measured and predicted times of every plan, the fastest first.", _plans(result["rankings"]))
        )
    return made


def _errors(result: dict[str, Any], found: Sequence[Found]) -> bytes:
    with plots.literal():
        drawn = plots.figure(11, 5)
        scatter, bars = drawn.subplots(1, 2, width_ratios=(1, 1.2))
        plots.plain(scatter, "both")
        times = [one.measured() for one in found]
        low, high = 0.5 * min(times), 2 * max(times)
        scatter.fill_between(
            [low, high], [low / 1.2, high / 1.2], [low * 1.2, high * 1.2], color="#eeeeee", label="within 20%"
        )
        scatter.plot([low, high], [low, high], color=plots.GREY, linewidth=1, label="as measured")
        looks = zip(sorted({one.devices for one in found}), plots.PALETTE, plots.MARKERS, strict=False)
        for devices, colour, marker in looks:
            own = [one for one in found if one.devices == devices]
            name = f"{devices} device{'s' if devices > 1 else ''}"
            scatter.scatter(
                [one.measured() for one in own],
                [one.predicted["step_ms"] for one in own],
                s=22,
                color=colour,
                marker=marker,
                label=name,
                zorder=3,
            )
        plots.logarithmic(scatter, ["x", "y"])
        scatter.set(xlim=(low, high), xlabel="measured ms a step", ylabel="predicted ms a step")
        scatter.set_title("each point is a random model", fontsize=10)
        plots.legend_below(scatter)
        names = {
            "step_ms": "full prediction",
            "by_clock_ms": "full, whatever the\nspeed of the machine",
            "no_overhead_ms": "without overheads",
            "kernels_ms": "kernels alone",
            "sketch_ms": "from sizes alone\n(what the planner sees)",
            "cpu_ms": "CPU time, predicted\nagainst measured",
        }
        of = result["errors"]
        width = 0.8 / max(1, len(of))
        for place, (devices, variants) in enumerate(of.items()):
            keys = [key for key in names if key in variants]
            heights = [100 * (variants[key]["ratio_mean"] - 1) for key in keys]
            at = [list(names).index(key) + place * width for key in keys]
            drawn_bars = bars.barh(
                at,
                heights,
                height=width,
                facecolor=plots.PALETTE[place],
                edgecolor="white",
                hatch=plots.HATCHES[place],
                label=f"{devices} device{'s' if devices != '1' else ''}",
            )
            bars.bar_label(drawn_bars, [f" {height:.0f}%" for height in heights], fontsize=8)
        bars.set_yticks([n + width * (len(of) - 1) / 2 for n in range(len(names))], list(names.values()), fontsize=8)
        bars.invert_yaxis()
        plots.plain(bars, "x")
        bars.margins(x=0.1)  # for the numbers
        bars.set_xlabel("off by this much in the geometric mean, %")
        bars.set_title("what is left out costs", fontsize=10)
        plots.legend_below(bars, 4)
        drawn.suptitle(result["about"]["caveat"] or "predicted and measured on this machine", fontsize=10)
        return plots.png(drawn)


def _plans(rankings: Sequence[dict[str, Any]]) -> bytes:
    with plots.literal():
        tall = max(len(row["plans"]) for row in rankings)
        drawn = plots.figure(12, 1 + len(rankings) * (0.6 + 0.24 * tall))
        panels = drawn.subplots(len(rankings), 1, squeeze=False)[:, 0]
        for panel, row in zip(panels, rankings, strict=True):
            names = [plan["plan"] for plan in row["plans"]]
            plots.plain(panel, "x")
            ours, rule, other = _LOOKS
            looks = [{"planner": ours, "auto": rule}.get(name, other) for name in names]
            _, colours, hatches = zip(*looks, strict=True)
            panel.barh(
                names,
                [plan["measured_ms"] for plan in row["plans"]],
                facecolor=colours,
                edgecolor="white",
                hatch=hatches,
            )
            for words, colour, hatch in _LOOKS:
                panel.barh([names[0]], [0], facecolor=colour, edgecolor="white", hatch=hatch, label=words)
            panel.plot(
                [plan["predicted_ms"] for plan in row["plans"]],
                names,
                "D",
                color=plots.ORANGE,
                markeredgecolor="white",
                label="predicted",
                markersize=7,
            )
            panel.invert_yaxis()
            panel.tick_params(axis="y", labelsize=7)
            panel.set_title(
                f"{row['workload']} devices: ms a step under each plan; order of both agrees to tau {row['tau']:.2f}",
                fontsize=9,
                loc="left",
            )
            panel.set_xlabel("ms a step")
        plots.legend_of_all(drawn, panels[0])
        return plots.png(drawn)
