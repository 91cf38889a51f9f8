"""metrics.jsonl as an Arrow table, and curves.png: how the loss and the AUC went."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recjax.utils import plots
from recjax.utils.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import json
from typing import TYPE_CHECKING

from recjax.errors import ConfigError, TrainingError
from recjax.utils import strict_json

if TYPE_CHECKING:
    import pyarrow as pa


_NULLS, _ALWAYS = 100, 10**6  # places of the table for each value in the lines, and those that it may have in any case


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; without a last one that is being written.

    Raises:
      ConfigError: there is no such file, as the run has not trained yet.
      TrainingError: it cannot be read, or a line is no JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: the run has not trained yet. Train it first.") from error
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}. Make it readable for this user.") from error
    found = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            parsed = strict_json.parse(line)
        except ValueError as error:
            raise TrainingError(f"{path}, line {number}: {error}. Delete that line, or restore the file.") from error
        if not isinstance(parsed, dict):
            raise TrainingError(f"{path}, line {number} is no JSON object. Delete that line, or restore the file.")
        found.append(parsed)
    return found


def table_of(lines: list[dict[str, Any]]) -> pa.Table:
    """One row a line and one column a key, in the order in which keys first appear; null where a line lacks one.

    Integers are int64 and other numbers float64, also where some lines have integers; what is neither a number nor a
    text nor true or false is its JSON text.

    Raises:
      TrainingError: nearly all of the table would be null, as where every line has keys of its own.
    """
    import pyarrow as pa

    names = list(dict.fromkeys(name for line in lines for name in line))
    if len(names) * len(lines) > _NULLS * sum(map(len, lines)) + _ALWAYS:
        raise TrainingError(
            f"the {len(lines):,} lines of metrics have {len(names):,} different keys, most of them in few lines, which "
            "makes no table. Read metrics.jsonl line by line, or restore it."
        )
    return pa.table({name: _column([line.get(name) for line in lines]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds and kinds <= {int, float}:
        return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
    if kinds in ({str}, {bool}, set()):
        return pa.array(values)
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


_Floats = NDArray[np.float64]
_TRAIN, _VALIDATION, _CHOSEN, _GREY = plots.BLUE, plots.ORANGE, plots.GREEN, plots.GREY


def draw_curves(
    metrics_path: Path,
    out_png: Path,
    title: str,
    baselines: Mapping[str, float] | None = None,
    chosen_step: int | None = None,
) -> None:
    """Writes the picture of `figure_of` for the lines of metrics.jsonl.

    Raises:
      TrainingError: the picture cannot be written.
    """
    lines = read_lines(metrics_path)
    write_whole(out_png, plots.png(figure_of(lines, title, baselines, chosen_step)))


def figure_of(
    lines: Sequence[Mapping[str, Any]],
    title: str,
    baselines: Mapping[str, float] | None = None,
    chosen_step: int | None = None,
) -> Figure:
    """Draws training and validation loss against step and, where there is one, the validation measure.

    Args:
      lines: of metrics.jsonl, parsed; reads `step`, `split`, `loss` and `auc`, or `ndcg@20` where items are ranked.
      title: over the picture.
      baselines: name -> the same on the test split, drawn as horizontal lines.
      chosen_step: the step of the chosen checkpoint, marked by a vertical line.
    """
    train_steps, train_loss = _series(lines, "train", "loss")
    steps, loss = _series(lines, "validation", "loss")
    ranks = any("ndcg@20" in line for line in lines)
    measure = "ndcg@20" if ranks else "auc"
    auc_steps, auc = _series(lines, "validation", measure)

    panels = 2 if auc_steps.size else 1
    figure = plots.figure(6.2 * panels, 4.8)
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False, sharex=True)[0]
    of_tasks = any(key.endswith(".loss") for line in lines for key in line)
    names = ("loss of all tasks", "mean AUC of the binary tasks") if of_tasks else ("log loss (nats)", "AUC")
    if ranks:
        names = ("loss", "NDCG of the best 20")
    for panel, label in zip(axes, names, strict=False):
        plots.plain(panel)
        panel.set_xlabel("step")
        panel.set_ylabel(label)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        plots.whole_numbers(panel)
    last = max([*train_steps, *steps, chosen_step or 0, 1])
    axes[0].set_xlim(-0.03 * last, 1.03 * last)  # from the first step on, also where there is but one evaluation

    axes[0].plot(train_steps, train_loss, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes[0].plot(train_steps, _smoothed(train_loss), color=_TRAIN, linewidth=1.8, label="training (smoothed)")
    axes[0].plot(steps, loss, color=_VALIDATION, linewidth=1.6, marker="o", markersize=4, label="validation")
    losses = np.concatenate([_smoothed(train_loss), loss])
    if losses.size:  # the raw line may leave the frame, so that one bad step does not flatten the rest
        low, high = float(losses.min()), float(losses.max())
        margin = 0.08 * (high - low) or 0.05
        axes[0].set_ylim(low - margin, high + margin)

    if panels == 2:
        axes[1].plot(auc_steps, auc, color=_VALIDATION, linewidth=1.6, marker="o", markersize=4, label="validation")
        for step, value in zip(*_series(lines, "test", measure), strict=True):
            axes[1].plot(
                step, value, color=_CHOSEN, linestyle="", marker="*", markersize=13, label=f"test ({value:.4f})"
            )
        for style, (name, value) in zip(itertools.cycle(("--", ":", "-.")), (baselines or {}).items(), strict=False):
            axes[1].axhline(value, color=_GREY, linestyle=style, linewidth=1.2, label=f"{name}, test ({value:.4f})")
    for panel in axes:
        if chosen_step is not None:
            panel.axvline(chosen_step, color=_CHOSEN, linewidth=1.2, alpha=0.8, label=f"chosen: step {chosen_step:,}")
        plots.legend_below(panel, size=9)
    return figure


def _series(lines: Sequence[Mapping[str, Any]], split: str, key: str) -> tuple[_Floats, _Floats]:
    """Steps and values of the lines of `split` that have a value for `key`, both [n]."""
    points = [(line["step"], line[key]) for line in lines if line.get("split") == split and line.get(key) is not None]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _smoothed(values_n: _Floats) -> _Floats:
    """A moving mean over a twelfth of the points and at least five, taken twice, [n].

    Centred, but for the ends. At the beginning, where a loss falls steeply, the windows are narrower; at the end, where
    a last batch may be small and its loss far off, they are whole, and end with the last point.
    """
    count = len(values_n)
    half = min(max(count // 24, 2), (count - 1) // 2) if count else 0
    low = np.clip(np.arange(count) - half, 0, max(count - 1 - 2 * half, 0))
    high = np.minimum(np.arange(count) + half + 1, count)
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(values_n)])
        values_n = np.asarray((sums[high] - sums[low]) / (high - low))
    return values_n
