"""curves.png: how the loss and the AUC went, from metrics.jsonl."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recjax.train.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Floats = NDArray[np.float64]
_TRAIN, _VALIDATION, _CHOSEN, _GREY = "#4878a8", "#d1662c", "#2f7d4f", "#777777"


def draw_curves(
    metrics_path: Path,
    out_png: Path,
    title: str,
    baselines: Mapping[str, float] | None = None,
    chosen_step: int | None = None,
) -> None:
    """Draws training and validation loss against step and, where there is one, the validation AUC.

    Args:
      metrics_path: metrics.jsonl; reads `step`, `split`, `loss` and `auc`.
      out_png: the picture to write.
      title: over the picture.
      baselines: name -> AUC on the test split, drawn as horizontal lines.
      chosen_step: the step of the chosen checkpoint, marked by a vertical line.

    Raises:
      TrainingError: the picture cannot be written.
    """
    # Imported here so that recjax stays light; the Figure alone needs no display and no global state.
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics_path.read_text().splitlines()]
    train_steps, train_loss = _series(lines, "train", "loss")
    steps, loss = _series(lines, "validation", "loss")
    auc_steps, auc = _series(lines, "validation", "auc")

    panels = 2 if auc_steps.size else 1
    figure = Figure(figsize=(6.2 * panels, 4.4), dpi=120, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False)[0]

    _prepare(axes[0], "log loss (nats)")
    axes[0].plot(train_steps, train_loss, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes[0].plot(train_steps, _smoothed(train_loss), color=_TRAIN, linewidth=1.8, label="training (smoothed)")
    axes[0].plot(steps, loss, color=_VALIDATION, linewidth=1.6, marker="o", markersize=4, label="validation")
    losses = np.concatenate([_smoothed(train_loss), loss])
    if losses.size:  # the raw line may leave the frame, so that one bad step does not flatten the rest
        low, high = float(losses.min()), float(losses.max())
        margin = 0.08 * (high - low) or 0.05
        axes[0].set_ylim(low - margin, high + margin)

    if panels == 2:
        _prepare(axes[1], "AUC")
        axes[1].plot(auc_steps, auc, color=_VALIDATION, linewidth=1.6, marker="o", markersize=4, label="validation")
        for step, value in zip(*_series(lines, "test", "auc"), strict=True):
            axes[1].plot(
                step, value, color=_CHOSEN, linestyle="", marker="*", markersize=13, label=f"test ({value:.4f})"
            )
        for style, (name, value) in zip(itertools.cycle(("--", ":", "-.")), (baselines or {}).items(), strict=False):
            axes[1].axhline(value, color=_GREY, linestyle=style, linewidth=1.2, label=f"{name}, test ({value:.4f})")
    for panel in axes:
        if chosen_step is not None:
            panel.axvline(chosen_step, color=_CHOSEN, linewidth=1.2, alpha=0.8, label=f"chosen: step {chosen_step:,}")
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=9, framealpha=0.9, edgecolor="none")  # lines behind it do not cross its text

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(out_png, picture.getvalue())


def _series(lines: list[dict[str, float | str | None]], split: str, key: str) -> tuple[_Floats, _Floats]:
    """Steps and values of the lines of `split` that have a value for `key`, both [n]."""
    points = [(line["step"], line[key]) for line in lines if line.get("split") == split and line.get(key) is not None]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _smoothed(values_n: _Floats) -> _Floats:
    """A centred moving mean over a 25th of the points, narrower at the ends, [n]."""
    half = len(values_n) // 50
    sums = np.concatenate([[0.0], np.cumsum(values_n)])
    low = np.maximum(np.arange(len(values_n)) - half, 0)
    high = np.minimum(np.arange(len(values_n)) + half + 1, len(values_n))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def _prepare(panel: Axes, label: str) -> None:
    panel.set_xlabel("step")
    panel.set_ylabel(label)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_formatter("{x:,.0f}")
