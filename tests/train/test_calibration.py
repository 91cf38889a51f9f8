"""The calibration curve and its expected error against hand-worked bins."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.train.metrics import measures
from recjax.train.metrics.binned import Histogram
from recjax.train.metrics.calibration import curve, draw, expected_error, predictions


def odds(*probabilities):
    p = np.array(probabilities)
    return np.log(p / (1 - p))


def histogram(labels, probabilities, weights=None):
    made = Histogram()
    weights = np.ones(len(labels)) if weights is None else np.array(weights, np.float64)
    made.add(np.array(labels, np.float64), odds(*probabilities), weights)
    return made


def points(curve):
    return [tuple(round(point[key], 9) for key in ("predicted", "observed", "samples", "weight")) for point in curve]


def test_quantiles_by_hand():
    counts = histogram([0, 1, 0, 1, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.7, 0.8])
    assert points(curve(counts, 2, "quantile")) == [(0.2, 0.333333333, 3, 3), (0.7, 1, 3, 3)]
    assert points(curve(counts, 3, "quantile")) == [(0.15, 0.5, 2, 2), (0.45, 0.5, 2, 2), (0.75, 1, 2, 2)]
    # (0.4/3 + 0.9/3) / 2
    assert expected_error(curve(counts, 2, "quantile")) == pytest.approx((abs(0.2 - 1 / 3) + 0.3) / 2)


def test_widths_by_hand():
    counts = histogram([0, 1, 0, 1, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.7, 0.95])
    # 0 to 0.25, (nothing from 0.25 ...) 0.3 is in 0.25 to 0.5, then 0.5 to 0.75, and 0.75 to 1
    assert points(curve(counts, 4, "width")) == [
        (0.15, 0.5, 2, 2),
        (0.3, 0, 1, 1),
        (0.65, 1, 2, 2),
        (0.95, 1, 1, 1),
    ]
    assert [point["samples"] for point in curve(counts, 20, "width")] == [1] * 6, "bins without samples are left out"


def test_weights_count():
    # 3 * 0.2 + 0.4 over 4, of which 1 is positive.
    counts = histogram([0, 1], [0.2, 0.4], [3, 1])
    assert points(curve(counts, 1, "quantile")) == [(0.25, 0.25, 2, 4)]
    assert expected_error(curve(counts, 1, "quantile")) == pytest.approx(0)
    # Bins of equal weight: the first sample alone has half of all.
    counts = histogram([0, 1, 0, 1], [0.2, 0.4, 0.6, 0.8], [3, 1, 1, 1])
    assert [point["weight"] for point in curve(counts, 2, "quantile")] == [3, 3]
    small = histogram([0, 1, 0, 1], [0.2, 0.4, 0.6, 0.8], [3e-305, 1e-305, 1e-305, 1e-305])
    assert [point["samples"] for point in curve(small, 2, "quantile")] == [1, 3]
    assert curve(histogram([0, 1], [0.2, 0.4], [0, 0]), 5, "quantile") == []
    assert math.isnan(expected_error([]))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(-40, 40), st.floats(0.1, 2)), min_size=1, max_size=50),
    st.integers(1, 30),
    st.sampled_from(["quantile", "width"]),
)
def test_every_sample_is_in_one_bin(rows, bins, by):
    labels, logits, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    counts = Histogram()
    counts.add(labels, logits, weights)
    made = curve(counts, bins, by)
    assert len(made) <= bins
    assert sum(point["samples"] for point in made) == len(rows)
    for key, total in (("predicted", measures.probabilities(logits)), ("observed", labels)):
        assert sum(point["weight"] * point[key] for point in made) == pytest.approx(np.sum(weights * total))
    predicted = [point["predicted"] for point in made]
    assert predicted == sorted(predicted)


def test_a_calibrated_model_has_a_small_error_and_a_skewed_one_has_not():
    rng = np.random.default_rng(1)
    logits = rng.normal(-1, 1, 200_000)
    labels = (rng.random(len(logits)) < measures.probabilities(logits)).astype(np.float64)
    errors = []
    for shift in (0, 0.5):
        counts = Histogram()
        counts.add(labels, logits + shift, np.ones(len(labels)))
        errors.append(expected_error(curve(counts, 20, "quantile")))
    assert errors[0] < 0.006  # about sqrt(p (1 - p) / 10,000) a bin
    shifted = np.mean(measures.probabilities(logits + 0.5) - measures.probabilities(logits))
    assert errors[1] == pytest.approx(shifted, abs=0.003)


def test_predictions_are_counted_by_hand():
    counts = predictions(histogram([0, 1, 0, 1, 1], [0.001, 0.205, 0.207, 0.605, 0.9999999], [1, 2, 3, 4, 0]))
    assert {bin: count for bin, count in enumerate(counts) if count} == {0: 1, 20: 2, 60: 1, 99: 1}
    assert len(counts) == 100 and sum(predictions(Histogram())) == 0


def report(counts):
    samples = int(counts.samples.sum())
    return {"samples": samples, "calibration_curve": curve(counts, 4, "quantile"), "predictions": predictions(counts)}


def test_the_picture(tmp_path, monkeypatch):
    """Also of a split without rows; below the curve a histogram, which of bins of equal counts would be flat."""
    from matplotlib.figure import Figure

    drawn = []
    reports = {"test": report(histogram([0, 1, 0, 1], [0.205, 0.206, 0.605, 0.805])), "validation": report(Histogram())}
    draw(reports, tmp_path / "calibration.png", "title")
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    draw(reports, tmp_path / "calibration.png", "title")
    assert drawn[0].get_suptitle() == "title\ntest: 4 rows, validation: 0 rows"
    shares, edges, _ = drawn[0].axes[1].patches[0].get_data()
    assert {round(float(edges[bin]), 2): share for bin, share in enumerate(shares) if share} == {
        0.2: 0.5,
        0.6: 0.25,
        0.8: 0.25,
    }
