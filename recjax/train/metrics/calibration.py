"""Calibration: whether what is predicted is what happens, as a curve, one number, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from recjax.train.metrics.binned import Histogram
from recjax.train.metrics.measures import probabilities
from recjax.utils import plots
from recjax.utils.files import write_whole

PREDICTION_BINS = 100  # of `predictions`


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
        share = (np.cumsum(weights) - weights / 2) / (weights.sum() or 1.0)
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


def predictions(histogram: Histogram) -> list[int]:
    """Histogram of predicted probabilities: counts of PREDICTION_BINS bins of equal width from 0 to 1.

    Args:
      histogram: of the logits. Its bins are dealt out whole.
    """
    filled = np.flatnonzero(histogram.samples)
    probable = probabilities((histogram.lowest[filled] + histogram.highest[filled]) / 2)
    bin_of = np.minimum((probable * PREDICTION_BINS).astype(np.int64), PREDICTION_BINS - 1)
    counts = np.zeros(PREDICTION_BINS, np.int64)
    np.add.at(counts, bin_of, histogram.samples[filled])
    return counts.tolist()


@plots.literal()
def draw(reports: Mapping[str, Mapping[str, Any]], out_png: Path, title: str) -> None:
    """Draws observed against predicted, and below it which share of the samples has which prediction.

    Args:
      reports: name of a split -> `evaluation.report` of it: its `samples`, `calibration_curve` and `predictions`.
      out_png: the picture to write.
      title: over the picture.

    Raises:
      TrainingError: the picture cannot be written.
    """
    figure = plots.figure(6.2, 6.8)
    figure.suptitle(f"{title}\n" + ", ".join(f"{name}: {report['samples']:,} rows" for name, report in reports.items()))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    plots.plain(above, "both")
    plots.plain(below, "both")
    points = {name: report["calibration_curve"] for name, report in reports.items()}
    high = max([p["predicted"] for curve in points.values() for p in curve] + [1e-6])
    above.plot([0, high], [0, high], color=plots.GREY, linestyle="--", linewidth=1.2, label="perfect")
    for color, (name, report) in zip((plots.ORANGE, plots.BLUE, plots.GREEN), reports.items(), strict=False):
        predicted, observed = ([p[key] for p in points[name]] for key in ("predicted", "observed"))
        label = f"{name} (expected error {expected_error(points[name]):.4f})"
        above.plot(predicted, observed, color=color, marker="o", markersize=4, label=label)
        edges = np.linspace(0, 1, PREDICTION_BINS + 1)
        shares = np.array(report["predictions"]) / max(report["samples"], 1)
        below.stairs(shares, edges, color=color, fill=True, alpha=0.4)
    above.set_ylabel("observed share of positives")
    below.set_ylabel("share of rows")
    below.yaxis.set_major_formatter(lambda share, _: f"{share:.1%}")
    below.set_xlabel("predicted probability")
    plots.legend_of_all(figure, above, 2)
    write_whole(out_png, plots.png(figure))
