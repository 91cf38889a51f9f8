"""What came of a sweep: the table, and a picture of every measure against everything that varied."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recjax.columns import aligned
from recjax.sweep.file import SORTS, Axis, Sweep
from recjax.train.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = ("validation.auc", "test.auc", "test.logloss", "samples_per_s")  # of the table
_PANELS = {"test.auc": "test AUC", "test.logloss": "test log loss (nats)", "samples_per_s": "samples/s"}
_MOST_LABELS = 12  # lines that a legend can still tell apart


def measure(result: dict[str, Any], name: str) -> float:
    """One measure of a run, a key of SORTS; nan if it has none.

    Args:
      result: from `run.result`.
      name: for example "test.auc" or "samples_per_s".
    """
    value: Any = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return math.nan if value is None else float(value)


def ordered(sweep: Sweep, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results, the best by `sweep.sort` first and those that have no value last."""
    if sweep.sort is None:
        return list(results)
    sort, sign = sweep.sort, -1 if SORTS[sweep.sort] else 1

    def key(result: dict[str, Any]) -> tuple[bool, float]:
        value = measure(result, sort)
        return (True, 0.0) if math.isnan(value) else (False, sign * value)

    return sorted(results, key=key)


def table(sweep: Sweep, results: Sequence[dict[str, Any]]) -> str:
    """The results as aligned plain text, a line a run."""
    keys = [key for axis in sweep.axes for key in axis.keys]
    names = _short(keys)
    columns = [*_COLUMNS, *([sweep.sort] if sweep.sort and sweep.sort not in _COLUMNS else [])]
    cells = [["run", *(names[key] for key in keys), *columns, ""]]
    for result in ordered(sweep, results):
        values = [_written(column, measure(result, column)) for column in columns]
        status = "" if result["status"] == "done" else result["status"]
        cells.append([str(result["index"]), *(result["swept"][key] for key in keys), *values, status])
    lines = aligned(cells, left=())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def draw(sweep: Sweep, results: Sequence[dict[str, Any]], out_png: Path) -> bool:
    """Draws test AUC, log loss and samples/s against every axis with two values or more.

    A line joins the runs that agree in all other axes. Seeds are no axis: a point is their mean, a bar shows the
    lowest and the highest.

    Args:
      sweep: of these results.
      results: from `run.train_all`; only those that are done are drawn.
      out_png: the picture to write.

    Returns:
      Whether there was anything to draw.

    Raises:
      TrainingError: the picture cannot be written.
    """
    done = [result for result in results if result["status"] == "done"]
    axes = [axis for axis in sweep.axes if axis.keys != ("seed",)]
    drawn = [axis for axis in axes if len(axis.points) > 1]
    if not done or not drawn:
        return False
    # Imported here so that recjax stays light; the Figure alone needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(drawn), 3.4 * len(_PANELS)), dpi=110, layout="constrained")
    figure.suptitle(f"{sweep.file.stem}: {sweep.runs[0].preset}")
    panels = figure.subplots(len(_PANELS), len(drawn), squeeze=False)
    for column, axis in enumerate(drawn):
        others = [other for other in axes if other is not axis]
        for row, (name, label) in enumerate(_PANELS.items()):
            panel = panels[row][column]
            _draw_panel(panel, axis, others, name, done)
            panel.set_ylabel(label if column == 0 else "")
        panel.set_xlabel(_title(axis))
        if 1 < len(panel.containers) <= _MOST_LABELS:  # below, where it hides nothing
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7, edgecolor="none")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(out_png, picture.getvalue())
    return True


def points(
    axis: Axis, others: Sequence[Axis], name: str, results: Sequence[dict[str, Any]]
) -> dict[tuple[tuple[str, ...], ...], dict[int, list[float]]]:
    """The values of a measure along an axis, line by line.

    Returns:
      The positions on the other axes -> position on this axis -> values, one for each seed.
    """
    lines: dict[tuple[tuple[str, ...], ...], dict[int, list[float]]] = {}
    for result in results:
        if math.isnan(value := measure(result, name)):
            continue
        place = {a: tuple(result["swept"][key] for key in a.keys) for a in (axis, *others)}
        line = lines.setdefault(tuple(place[a] for a in others), {})
        line.setdefault(axis.points.index(place[axis]), []).append(value)
    return lines


def _draw_panel(panel: Axes, axis: Axis, others: Sequence[Axis], name: str, results: Sequence[dict[str, Any]]) -> None:
    lines = points(axis, others, name, results)
    names = _short([key for other in others for key in other.keys])
    for style, (place, line) in zip(itertools.cycle(("-", "--", ":")), lines.items(), strict=False):
        x = sorted(line)
        means = [sum(line[i]) / len(line[i]) for i in x]
        spread = [[m - min(line[i]) for m, i in zip(means, x, strict=True)],
                  [max(line[i]) - m for m, i in zip(means, x, strict=True)]]  # fmt: skip
        label = ", ".join(f"{names[o.keys[0]]}={_tick(o, point)}" for o, point in zip(others, place, strict=True))
        panel.errorbar(x, means, yerr=spread, label=label, linestyle=style, marker="o", markersize=4, capsize=2)
    panel.set_xticks(range(len(axis.points)), [_tick(axis, point) for point in axis.points], fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    if name == "samples_per_s":
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:,.0f}")


def _short(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key where that tells them apart, else the key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)}


def _title(axis: Axis) -> str:
    first, *rest = axis.keys
    return f"{first} (with {', '.join(_short(axis.keys)[key] for key in rest)})" if rest else first


def _tick(axis: Axis, point: tuple[str, ...]) -> str:
    """The value of the first key, and of as many more as it takes to tell the points apart."""
    count = next((n for n in range(1, len(point)) if len({p[:n] for p in axis.points}) == len(axis.points)), len(point))
    return " / ".join(point[:count])


def _written(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if name == "samples_per_s" else f"{value:.1f}" if name == "seconds" else f"{value:.4f}"
