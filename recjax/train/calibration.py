"""Calibration: whether what is predicted is what happens, as a curve, one number, and a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np

from recjax.train.binned import Histogram
from recjax.train.files import write_whole


class Point(TypedDict):
    """The samples of one bin of predicted probability."""

    predicted: float  # their weighted mean prediction
    observed: float  # the weighted share of positives among them
    samples: int  # how many they are
    weight: float  # sum of their weights


def curve(histogram: Histogram, bins: int, by: Literal["quantile", "width"]) -> list[Point]:
    """Predicted against observed positives.

    Args:
      histogram: of the logits. Its bins are dealt out whole, so that the edges are exact to their width.
      bins: how many; those without samples are left out.
      by: "quantile" gives all bins about the same weight; "width" cuts the probabilities from 0 to 1 evenly.

    Returns:
      The bins, from the least prediction to the greatest.
    """
    weights = histogram.positives + histogram.negatives
    filled = np.flatnonzero(weights)
    weights, positives, expected = weights[filled], histogram.positives[filled], histogram.expected[filled]
    if by == "quantile":
        share = (np.cumsum(weights) - weights / 2) / max(weights.sum(), 1e-300)
    else:
        share = expected / weights
    bin_of = np.minimum((share * bins).astype(np.int64), bins - 1)
    totals = [np.bincount(bin_of, x, bins) for x in (weights, positives, expected, histogram.samples[filled])]
    columns = zip(*(total.tolist() for total in totals), strict=True)
    return [{"predicted": e / w, "observed": p / w, "samples": int(n), "weight": w} for w, p, e, n in columns if n]


def expected_error(points: Sequence[Point]) -> float:
    """Expected calibration error: the mean of |predicted - observed| over the bins, by weight; nan without samples.

    It depends on the bins. Source: Naeini, Cooper, Hauskrecht, "Obtaining well calibrated probabilities using Bayesian
    binning", AAAI 2015, for the probability of label 1.
    """
    total = sum(p["weight"] for p in points)
    return sum(p["weight"] * abs(p["predicted"] - p["observed"]) for p in points) / total if total else float("nan")


def draw(curves: Mapping[str, Sequence[Point]], out_png: Path, title: str) -> None:
    """Draws observed against predicted, and below it how many samples each bin has.

    Args:
      curves: name of a split -> its curve.
      out_png: the picture to write.
      title: over the picture.

    Raises:
      TrainingError: the picture cannot be written.
    """
    # Imported here so that recjax stays light; the Figure alone needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 6.4), dpi=120, layout="constrained")
    figure.suptitle(title)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    high = max([p["predicted"] for points in curves.values() for p in points] + [1e-6])
    above.plot([0, high], [0, high], color="#777777", linestyle="--", linewidth=1.2, label="perfect")
    for color, (name, points) in zip(("#d1662c", "#4878a8", "#2f7d4f"), curves.items(), strict=False):
        predicted = [p["predicted"] for p in points]
        label = f"{name} (expected error {expected_error(points):.4f})"
        above.plot(predicted, [p["observed"] for p in points], color=color, marker="o", markersize=4, label=label)
        below.plot(predicted, [p["samples"] for p in points], color=color, marker="o", markersize=4)
    above.set_ylabel("observed share of positives")
    above.legend(fontsize=9, frameon=False)
    below.set_ylabel("samples")
    below.set_ylim(bottom=0)
    below.set_xlabel("mean predicted probability")
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(out_png, picture.getvalue())
