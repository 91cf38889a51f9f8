"""Streamed measures: the histogram's bounds against the exact AUC, everything else against measures.py."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.errors import DataError, TrainingError
from recjax.train.metrics import auc, measures
from recjax.train.metrics.binned import Binned, Exact, Histogram

MEASURES = ("auc", "logloss", "ne", "calibration", "samples")

# Logits that tie, lie in one bin, in neighbouring ones, and far beyond the outermost. Whole weights: sums are exact.
logits = st.one_of(st.sampled_from([0.0, 1e-6, -1e-6, 1.0, 33.0, 40.0, -900.0]), st.floats(-40, 40, width=32))
samples = st.lists(st.tuples(st.integers(0, 1), logits, st.integers(0, 3)), min_size=1, max_size=60)


def columns(rows):
    return tuple(np.array(column, np.float64) for column in zip(*rows, strict=True))


def fill(accumulator, labels, logits, weights, cut):
    accumulator.add(labels[:cut], logits[:cut], weights[:cut])
    accumulator.add(labels[cut:], logits[cut:], weights[cut:], first=cut)
    return accumulator.result()


@given(samples, st.integers(1, 200), st.integers(0, 60))
def test_the_true_auc_lies_within_the_bounds(rows, bins, cut):
    true = measures.evaluate(*columns(rows))["auc"]
    got = fill(Binned(bins), *columns(rows), cut)
    if math.isnan(true):
        assert math.isnan(got["auc"]) and math.isnan(got["auc_low"]) and math.isnan(got["auc_high"])
    else:
        assert 0 <= got["auc_low"] <= got["auc_high"] <= 1 + 1e-15
        assert got["auc_low"] - 1e-15 <= true <= got["auc_high"] + 1e-15
        assert got["auc"] == (got["auc_low"] + got["auc_high"]) / 2


@given(samples, st.integers(1, 200), st.integers(0, 60))
def test_the_other_measures_are_those_of_all_samples_at_once(rows, bins, cut):
    true = measures.evaluate(*columns(rows))
    binned, exact = Binned(bins), Exact()
    got, kept = fill(binned, *columns(rows), cut), fill(exact, *columns(rows), cut)
    assert kept == pytest.approx(true, rel=0, abs=0, nan_ok=True)
    for name in MEASURES[1:]:
        assert got[name] == pytest.approx(true[name], rel=1e-12, abs=1e-300, nan_ok=True), name
    labels, _, weights = columns(rows)
    share = np.sum(labels * weights) / np.sum(weights) if weights.any() else math.nan
    assert binned.positives() == pytest.approx(share, nan_ok=True)
    assert exact.positives() == pytest.approx(share, nan_ok=True)


def test_bounds_by_hand():
    # One bin from -32 to 0 and one from 0 to 32. In the upper one 2 positives and 1 negative, in the lower 1 and 2:
    # 2 * 2 of the 9 pairs are won, 1 * 2 are lost, and 2 * 1 + 1 * 2 are open.
    histogram = Histogram(2)
    histogram.add(np.array([1.0, 1, 0, 1, 0, 0]), np.array([3.0, 1, 2, -1, -2, -3]), np.ones(6))
    assert histogram.auc_bounds() == (4 / 9, 8 / 9)
    # The open pairs that are ties are no longer open.
    histogram = Histogram(2)
    histogram.add(np.array([1.0, 1, 0, 1, 0, 0]), np.array([3.0, 3, 3, -1, -2, -3]), np.ones(6))
    assert histogram.auc_bounds() == (pytest.approx(5 / 9), pytest.approx(7 / 9))


def test_the_bounds_are_reached():
    """Samples with the same counts whose AUC is the one bound, and others whose AUC is the other."""
    labels = np.array([0.0, 1.0, 0.0, 1.0])
    for logits, bound in (([0.1, 0.2, -0.2, -0.1], 1), ([0.2, 0.1, -0.1, -0.2], 0)):
        binned = Binned(2)
        binned.add(labels, logits, np.ones(4))
        result = binned.result()
        assert auc.auc(labels, logits) == (result["auc_low"], result["auc_high"])[bound]


def test_the_bounds_of_a_million_samples_are_tight():
    rng = np.random.default_rng(0)
    labels = (rng.random(1_000_000) < 0.25).astype(np.float32)
    logits = rng.normal(-1.2, 1.0, len(labels)) + labels
    result = fill(Binned(), labels, logits, rng.random(len(labels), np.float32), 300_000)
    assert result["auc_high"] - result["auc_low"] < 3e-5


def test_no_samples():
    for empty in (Exact(), Binned()):
        result = empty.result()
        assert result["samples"] == 0 and math.isnan(result["auc"]) and math.isnan(empty.positives())


@pytest.mark.parametrize("kind", [Exact, Binned])
def test_what_cannot_be_measured_is_refused_with_its_place(kind):
    with pytest.raises(TrainingError, match=r"logit of sample 7 is nan"):
        kind().add([0, 1], [0.0, np.nan], [1, 1], first=6)
    with pytest.raises(DataError, match=r"label of sample 6 is 2"):
        kind().add([2, 1], [0.0, 1.0], [1, 1], first=6)
    with pytest.raises(DataError, match=r"weight of sample 7 is -1"):
        kind().add([0, 1], [0.0, 1.0], [1, -1], first=6)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160])
def test_weights_whose_products_leave_the_range_of_floats_change_no_measure(scale):
    """A measure is a ratio: that of the same weights near 1 is the truth."""
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 2, 200).astype(np.float64), rng.normal(0, 2, 200)
    weights, groups = rng.integers(1, 4, 200).astype(np.float64), rng.integers(0, 5, 200)
    for bins in (1, 40, 2**20):
        true, got = (fill(Binned(bins), labels, logits, w, 70) for w in (weights, weights * scale))
        assert got == pytest.approx(true, rel=1e-12)
    true, got = (measures.evaluate(labels, logits, w) for w in (weights, weights * scale))
    assert got == pytest.approx(true, rel=1e-12)
    # Of groups each for itself: those of even number alone have such weights.
    mixed = np.where(groups % 2, weights, weights * scale)
    of_each = [auc.auc(labels[groups == g], logits[groups == g], weights[groups == g]) for g in range(5)]
    assert auc.group_aucs(labels, logits, groups, mixed)[1] == pytest.approx(of_each, rel=1e-12)


def test_a_class_that_outweighs_the_other_beyond_floats_has_no_normalized_entropy():
    columns = np.array([1.0, 0.0]), np.array([1.0, -1.0]), np.array([1e-323, 1e300])
    assert math.isnan(measures.evaluate(*columns)["ne"]) and math.isnan(fill(Binned(40), *columns, 1)["ne"])
