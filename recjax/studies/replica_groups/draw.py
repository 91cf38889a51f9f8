"""The figures of the study of replica groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recjax.studies.replica_groups.cost import PARTS, PRECISIONS
from recjax.utils import plots
from recjax.utils.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {1: plots.GREY, 2: plots.ORANGE, 4: plots.BLUE}  # by number of groups
_STYLES = {"exact": "-", "never": "--", "average": ":"}
_PARTS = {"random": "drawn anew", "fixed": "fixed parts, random", "by_feature": "fixed parts, by item"}
_STACK = ("#4878a8", "#a3c1dd", "#2f7d4f", "#d1662c", "#e6b89c", "#8a6bb1", "#cccccc", "#eeeeee")


def figures(result: dict[str, Any], out: Path) -> list[Path]:
    """Draws all: the paths of the pictures.

    Raises:
      TrainingError: one cannot be written.
    """
    made = [_accuracy(result, out / "accuracy.png"), _distance(result, out / "distance.png")]
    if result["times"]:
        made.append(_times(result, out / "times.png"))
    return [*made, _bytes(result, out / "bytes.png")]


def _figure(panels: int, width: float = 5.6) -> tuple[Figure, Sequence[Axes]]:
    figure = plots.figure(width * panels, 4.2)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        plots.plain(axis)
    return figure, axes


def _legend(figure: Figure, of: Axes) -> None:
    """Below the panels, where it hides nothing."""
    handles, labels = of.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, edgecolor="none")


def _saved(figure: Figure, path: Path) -> Path:
    write_whole(path, plots.png(figure))
    return path


def _title(result: dict[str, Any]) -> str:
    about = result["about"]
    return f"{about['model']} on {about['data']}, {about['batch_size_of_a_group']:,} samples a group and iteration"


def _accuracy(result: dict[str, Any], path: Path) -> Path:
    figure, axes = _figure(2)
    figure.suptitle(_title(result))
    for name, axis in zip(("accuracy", "auc"), axes, strict=True):
        for t in result["trainings"]:
            found = t["measures"]
            if t["parts"] != "random":
                continue
            colour, label = _COLOURS[t["groups"]], t["label"]
            style = _STYLES[t["sync"]]
            if t["sync"] == "never":
                axis.plot(found["iteration"], found[f"own_{name}"], "-.", color=colour, lw=1, label=f"{label}, each")
                label += ", mean"
            axis.plot(found["iteration"], found[name], style, color=colour, lw=1.6, label=label)
        axis.set_xlabel("iteration")
        axis.set_ylabel(f"test {'AUC' if name == 'auc' else name}")
    _legend(figure, axes[0])
    return _saved(figure, path)


def _distance(result: dict[str, Any], path: Path) -> Path:
    figure, axes = _figure(2)
    figure.suptitle(_title(result))
    for t in result["trainings"]:
        found = t["measures"]
        if "distance" not in found:
            continue
        style = {"random": "-", "fixed": "--", "by_feature": ":"}[t["parts"]]
        colour = plots.GREEN if t["sync"] == "average" else _COLOURS[t["groups"]]
        label = f"{t['label']}, {_PARTS[t['parts']]}"
        axes[0].plot(found["iteration"], found["distance"], style, color=colour, label=label)
        axes[1].plot(found["iteration"], found["own_accuracy"], style, color=colour, label=label)
    labels = ("norm of the difference of tables", "test accuracy, mean of the groups' own")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel("iteration")
        axis.set_ylabel(label)
    _legend(figure, axes[0])
    return _saved(figure, path)


def _times(result: dict[str, Any], path: Path) -> Path:
    varied = list(dict.fromkeys(case["varied"] for case in result["times"]))
    keys = {"groups": "groups", "batch of a group": "batch", "columns D": "dim"}
    figure, axes = _figure(len(varied))
    figure.suptitle(f"an iteration on {result['about']['device']}, one device a group")
    for axis, what in zip(axes, varied, strict=True):
        cases = [c for c in result["times"] if c["varied"] == what]
        if what != "groups":  # the middle belongs to each
            cases += [c for c in result["times"] if c["varied"] == "groups" and c["groups"] == 2]
        cases.sort(key=lambda c: (c[keys[what]], c["sync"]))
        bottom = [0.0] * len(cases)
        for part, colour in zip((*PARTS, "other", "idle"), _STACK, strict=True):
            ms = [c["ms"][part] for c in cases]
            axis.bar(range(len(cases)), ms, bottom=bottom, color=colour, label=part, width=0.7)
            bottom = [a + b for a, b in zip(bottom, ms, strict=True)]
        short = {"never": "own", "exact": "exact"}
        axis.set_xticks(range(len(cases)), [f"{c[keys[what]]}\n{short[c['sync']]}" for c in cases], fontsize=8)
        axis.set_xlabel(f"{what}; tables own to each group, or exact")
        axis.set_ylabel("ms")
    _legend(figure, axes[-1])
    return _saved(figure, path)


def _bytes(result: dict[str, Any], path: Path) -> Path:
    found = result["bytes"]
    figure, axes = _figure(len(found), 6.4)
    figure.suptitle("bytes an iteration that a device sends to keep tables synchronous")
    for axis, (groups, of) in zip(axes, found.items(), strict=True):
        names = [name.replace(" float32", "") for name in of["sent"] if "float32" in name]
        for i, (precision, colour) in enumerate(zip(PRECISIONS, ("#4878a8", "#a3c1dd", "#d1662c"), strict=True)):
            at = [j + (i - 1) * 0.27 for j in range(len(names))]
            sizes = [of["sent"][_with(name, precision)] for name in names]
            axis.bar(at, sizes, width=0.25, color=colour, label=precision)
        labels = ["row gradients,\nexact" if name == "rows" else name.replace(", ", ",\n") for name in names]
        axis.set_xticks(range(len(names)), labels, fontsize=8)
        axis.set_yscale("log")
        axis.set_title(f"{groups} groups", fontsize=9)
    _legend(figure, axes[0])
    return _saved(figure, path)


def _with(name: str, precision: str) -> str:
    what, comma, rest = name.partition(",")
    return f"{what} {precision}{comma}{rest}"
