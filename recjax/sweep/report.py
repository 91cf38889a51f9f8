"""Results of a sweep: the table, and a picture of every measure against everything that varied."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recjax.sweep.file import Axis, Sweep, direction
from recjax.utils import plots
from recjax.utils.files import write_whole
from recjax.utils.text import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = ("validation.auc", "test.auc", "test.logloss", "samples_per_s")  # of the table
_MOST_LABELS = 12  # lines that a legend can still tell apart


def measure(result: dict[str, Any], name: str) -> float:
    """One measure of a run, a key of SORTS; nan if it has none.

    Args:
      result: from `run.result`.
      name: for example "test.auc" or "samples_per_s".
    """
    split, _, inner = name.partition(".")
    value: Any = result.get(split)
    if inner:  # which has a dot itself where there are several labels
        value = value.get(inner) if isinstance(value, dict) else None
    return math.nan if value is None else float(value)


def ordered(sweep: Sweep, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results, the best by `sweep.sort` first and those that have no value last."""
    if sweep.sort is None:
        return list(results)
    sort, sign = sweep.sort, -1 if direction(sweep.sort) else 1

    def key(result: dict[str, Any]) -> tuple[bool, float]:
        value = measure(result, sort)
        return (True, 0.0) if math.isnan(value) else (False, sign * value)

    return sorted(results, key=key)


def table(sweep: Sweep, results: Sequence[dict[str, Any]]) -> str:
    """The results as aligned plain text, a line a run."""
    keys = [key for axis in sweep.axes for key in axis.keys]
    names = _short(keys)
    columns = _columns(sweep)
    cells = [["run", *(names[key] for key in keys), *columns, ""]]
    for result in ordered(sweep, results):
        values = [_written(column, measure(result, column)) for column in columns]
        status = "" if result["status"] == "done" else result["status"]
        swept = [_shortened(result["swept"][key]) for key in keys]
        cells.append([str(result["index"]), *swept, *values, status])
    lines = aligned(cells, left=())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _columns(sweep: Sweep) -> list[str]:
    """Measures that tables show."""
    return [*_COLUMNS, *([sweep.sort] if sweep.sort and sweep.sort not in _COLUMNS else [])]


def over_seeds(sweep: Sweep, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, standard deviation and number of runs of each measure over the seeds, for all other settings of a sweep.

    Returns:
      One for each setting, the best mean of `sweep.sort` first: "swept", its settings without the seed, and measure ->
      "mean", "std" (of the runs as a sample; None of one run) and "n", of the runs that are done. Empty if the sweep
      does not vary the seed.
    """
    if not any("seed" in axis.keys and len(axis.points) > 1 for axis in sweep.axes):
        return []
    columns, groups = _columns(sweep), dict[tuple[tuple[str, str], ...], list[dict[str, Any]]]()
    for result in results:
        settings = tuple((key, text) for key, text in result["swept"].items() if key != "seed")
        groups.setdefault(settings, []).append(result)
    rows = []
    for settings, runs in groups.items():
        row: dict[str, Any] = {"swept": dict(settings)}
        for column in columns:
            values = [value for run in runs if not math.isnan(value := measure(run, column))]
            mean = statistics.fmean(values) if values else None
            std = statistics.stdev(values) if len(values) > 1 else None
            row[column] = {"mean": mean, "std": std, "n": len(values)}
        rows.append(row)
    if sweep.sort is not None:
        sort, sign = sweep.sort, -1 if direction(sweep.sort) else 1
        rows.sort(key=lambda row: (row[sort]["mean"] is None, sign * (row[sort]["mean"] or 0.0)))
    return rows


def seeds_table(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> str:
    """Returns what `over_seeds` gives as aligned plain text: a line for each setting, "mean (deviation)" in a cell."""
    keys = [key for axis in sweep.axes for key in axis.keys if key != "seed"]
    names, columns = _short(keys), _columns(sweep)
    cells = [[*(names[key] for key in keys), "n", *columns]]
    for row in rows:
        swept = [_shortened(row["swept"][key]) for key in keys]
        cells.append([*swept, str(max(row[column]["n"] for column in columns)), *(_spread(c, row[c]) for c in columns)])
    lines = aligned(cells, left=())
    return "\n".join(["over the seeds, mean (standard deviation):", lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _spread(column: str, figures: dict[str, Any]) -> str:
    if figures["mean"] is None:
        return "-"
    mean = _written(column, figures["mean"])
    return mean if figures["std"] is None else f"{mean} ({_written(column, figures['std'])})"


@plots.literal()
def draw(sweep: Sweep, results: Sequence[dict[str, Any]], out_png: Path) -> bool:
    """Draws AUC, log loss and samples/s against every axis with two values or more.

    AUC and log loss are those of the validation split, by which settings are chosen; of the test split if no run has
    the other. A line joins the runs that agree in all other axes, if the values are numbers. Seeds are no axis: a point
    is their mean, a bar shows the lowest and the highest.

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
    split = "test" if all(math.isnan(measure(result, "validation.auc")) for result in done) else "validation"
    panels_of = {
        f"{split}.auc": f"{split} AUC",
        f"{split}.logloss": f"{split} log loss (nats)",
        "samples_per_s": "samples/s",
    }
    figure = plots.figure(4.8 * len(drawn), 3.4 * len(panels_of))
    missing = len(results) - len(done)
    left_out = f"\n(without {missing} of {len(results)} runs, not done)" if missing else ""
    figure.suptitle(f"{sweep.file.stem}: {sweep.runs[0].preset}{left_out}")
    panels = figure.subplots(len(panels_of), len(drawn), squeeze=False)
    for column, axis in enumerate(drawn):
        others = [other for other in axes if other is not axis]
        for row, (name, label) in enumerate(panels_of.items()):
            panel = panels[row][column]
            _draw_panel(panel, axis, others, name, done)
            panel.set_ylabel(label if column == 0 else "")
        panel.set_xlabel(_title(axis))
        if 1 < len(panel.get_legend_handles_labels()[0]) <= _MOST_LABELS:
            plots.legend_below(panel, size=7)
    write_whole(out_png, plots.png(figure))
    return True


def points(
    axis: Axis, others: Sequence[Axis], name: str, results: Sequence[dict[str, Any]]
) -> dict[tuple[tuple[str, ...], ...], dict[int, list[float]]]:
    """The values of a measure along an axis, line by line.

    Returns:
      The positions on the other axes -> position on this axis -> values, one for each seed.
    """
    lines: dict[tuple[tuple[str, ...], ...], dict[int, list[float]]] = {}
    positions = {point: position for position, point in enumerate(axis.points)}
    for result in results:
        if math.isnan(value := measure(result, name)):
            continue
        place = {a: tuple(result["swept"][key] for key in a.keys) for a in (axis, *others)}
        line = lines.setdefault(tuple(place[a] for a in others), {})
        line.setdefault(positions[place[axis]], []).append(value)
    return lines


def _draw_panel(panel: Axes, axis: Axis, others: Sequence[Axis], name: str, results: Sequence[dict[str, Any]]) -> None:
    plots.plain(panel)
    lines = points(axis, others, name, results)
    names = _short([key for other in others for key in other.keys])
    shown = sorted({i for line in lines.values() for i in line})  # no place for a value of which no run is done
    place_of = {i: place for place, i in enumerate(shown)}
    numbers = all(_is_number(axis.points[i][0]) for i in shown)
    for style, (place, line) in zip(itertools.cycle(("-", "--", ":")), lines.items(), strict=False):
        x = sorted(line)
        means = [sum(line[i]) / len(line[i]) for i in x]
        low = [m - min(line[i]) for m, i in zip(means, x, strict=True)]
        high = [max(line[i]) - m for m, i in zip(means, x, strict=True)]
        label = ", ".join(f"{names[o.keys[0]]}={_tick(o, point)}" for o, point in zip(others, place, strict=True))
        look: dict[str, Any] = {"label": label, "linestyle": style if numbers else "", "marker": "o", "markersize": 4}
        if any(low + high):
            panel.errorbar([place_of[i] for i in x], means, yerr=[low, high], capsize=2, **look)
        else:
            panel.plot([place_of[i] for i in x], means, **look)
    panel.set_xticks(range(len(shown)), [_tick(axis, axis.points[i]) for i in shown], fontsize=8)
    panel.margins(x=0.1)
    if name == "samples_per_s":
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:,.0f}")


def _shortened(text: str) -> str:
    """A number that was drawn, to four digits."""
    return f"{float(text):.4g}" if len(text) > 8 and _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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
