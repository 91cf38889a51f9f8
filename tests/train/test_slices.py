"""Slices and groups against the same measures of hand-picked samples, and grouped AUC against all pairs."""

import dataclasses
import functools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.config.tasks import DEFAULTS
from recjax.data.batch import Bags, Batch, Feature, Label, Schema
from recjax.data.source import between
from recjax.errors import ConfigError
from recjax.train.metrics import measures
from recjax.train.metrics.binned import SLICE_BINS, Binned, Exact
from recjax.train.metrics.slices import Groups, Slices, find_feature
from recjax.train.tasks import Task

# A sample: label, logit, weight, the ids of a jagged bag, the id of a bag of one.
samples = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(-3, 3),
        st.integers(0, 3),
        st.lists(st.integers(0, 5), max_size=4),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=40,
)
JAGGED, SINGLE = Feature("genres", 6, None), Feature("user", 6)


def batch_of(rows):
    lengths = np.array([len(row[3]) for row in rows], np.int32)
    genres = np.array([id for row in rows for id in row[3]], np.int32)
    bags = {"genres": Bags(genres, lengths), "user": Bags(np.array([[row[4]] for row in rows], np.int32))}
    labels, weights = (np.array([row[n] for row in rows], np.float32) for n in (0, 2))
    return Batch(np.zeros((len(rows), 0), np.float32), bags, labels, weights)


def parts(rows, cut):
    """The samples as two batches, each with its logits."""
    whole, logits = batch_of(rows), np.array([row[1] for row in rows], np.float64)
    cut = min(cut, len(rows))
    return [(between(whole, a, b), logits[a:b]) for a, b in ((0, cut), (cut, len(rows))) if a < b]


def measured(rows):
    labels, logits, weights = (np.array([row[n] for row in rows], np.float64) for n in range(3))
    return measures.evaluate(labels, logits, weights)


def values(row, feature):
    return set(row[3]) if feature is JAGGED else {row[4]}


@given(samples, st.sampled_from([JAGGED, SINGLE]), st.integers(1, 7), st.integers(0, 40), st.booleans())
def test_a_slice_has_the_measures_of_its_samples(rows, feature, top, cut, exact):
    batches = parts(rows, cut)
    slices = Slices(
        feature, [batch for batch, _ in batches], top, Exact if exact else functools.partial(Binned, SLICE_BINS)
    )
    for batch, logits in batches:
        slices.add(batch, logits)
    result = slices.result()

    count = {id: sum(id in values(row, feature) and row[2] > 0 for row in rows) for id in range(6)}
    ranked = [id for id in sorted(count, key=lambda id: (-count[id], id)) if count[id]]
    members = {str(id): [row for row in rows if id in values(row, feature)] for id in ranked[:top]}
    members["rest"] = [row for row in rows if values(row, feature) & set(ranked[top:])]
    members["no value"] = [row for row in rows if not values(row, feature)]
    members = {name: kept for name, picked in members.items() if (kept := [row for row in picked if row[2]])}

    assert [row["value"] for row in result] == list(members)
    for row, picked in zip(result, members.values(), strict=True):
        assert row["id"] == (int(row["value"]) if row["value"].isdigit() else None)
        truth = measured(picked)
        share = sum(r[0] * r[2] for r in picked) / sum(r[2] for r in picked)
        assert row["positive_share"] == pytest.approx(share)
        for name in ("logloss", "ne", "calibration", "samples"):
            assert row[name] == pytest.approx(truth[name], nan_ok=True), name
        # Whole logits are ties or far apart: the histogram too is exact.
        assert row["auc"] == pytest.approx(truth["auc"], nan_ok=True)
        assert ("auc_low" in row) == (not exact)


def brute_force(rows, shared):
    """(gAUC, groups, one-class groups, share, share of the shared) in exact fractions, pair by pair."""
    won, counted, both, single = Fraction(0), 0, 0, 0
    for group in range(6):
        members = [row for row in rows if row[4] == group and row[2] > 0 and group not in shared]
        pairs, gain = 0, Fraction(0)
        for p in (row for row in members if row[0]):
            for q in (row for row in members if not row[0]):
                pairs += p[2] * q[2]
                gain += p[2] * q[2] * (Fraction(p[1] > q[1]) + Fraction(p[1] == q[1], 2))
        if pairs:
            weight = sum(row[2] for row in members)
            won, counted, both = won + weight * gain / pairs, counted + weight, both + 1
        elif members:
            single += 1
    total = sum(row[2] for row in rows)
    outside = sum(row[2] for row in rows if row[4] in shared)
    nan = math.nan
    return (
        won / counted if counted else nan,
        both,
        single,
        counted / total if total else nan,
        outside / total if total else nan,
    )


@given(samples, st.integers(1, 4), st.integers(0, 40), st.sampled_from([(), (0,), (0, 3)]))
def test_grouped_auc_is_that_of_all_pairs(rows, partitions, cut, shared):
    groups = Groups(SINGLE, partitions, shared)
    for batch, logits in parts(rows, cut):
        groups.add(batch, logits)
    result = groups.result()
    assert result.pop("feature") == "user"
    expected = dict(
        zip(("gauc", "groups", "one_class_groups", "share", "shared_share"), brute_force(rows, shared), strict=True)
    )
    assert result == pytest.approx({name: float(value) for name, value in expected.items()}, nan_ok=True)


@given(samples, st.integers(0, 40))
def test_grouped_auc_of_a_task_is_that_of_its_samples(rows, cut):
    """The second of two labels, whose output is the third: rows without weight for it are as if they were not there."""
    task = Task(Label("b"), DEFAULTS["binary"], 1.0, column=1, first=2)
    groups, alone = Groups(SINGLE, 2, task=task), Groups(SINGLE, 1)
    for batch, logits in parts([row for row in rows if row[2]], cut):
        alone.add(batch, logits)
    for batch, logits in parts(rows, cut):
        labels, weights = (np.stack([1 - x, x], axis=1) for x in (batch.labels, batch.weights))
        outputs = np.stack([-logits, logits * 0, logits], axis=1)
        groups.add(dataclasses.replace(batch, labels=labels, weights=weights), outputs)
    assert groups.result() == pytest.approx(alone.result(), nan_ok=True)


def test_grouped_auc_by_hand():
    # User 0 has 3 impressions and an AUC of 1, user 1 has 2 and one of 0, user 2 has only a positive: (3 + 0) / 5.
    rows = [(1, 2, 1, [], 0), (0, 1, 1, [], 0), (0, 0, 1, [], 0), (1, 0, 1, [], 1), (0, 1, 1, [], 1), (1, 0, 1, [], 2)]
    groups = Groups(SINGLE, 1)
    groups.add(*parts(rows, 6)[0])
    assert groups.result() == {
        "feature": "user",
        "gauc": pytest.approx(0.6),
        "groups": 2,
        "one_class_groups": 1,
        "share": pytest.approx(5 / 6),
        "shared_share": 0,
    }


def test_features_that_do_not_fit():
    schema = Schema((), (JAGGED, SINGLE))
    assert find_feature(schema, "user") is SINGLE
    with pytest.raises(ConfigError, match=r"no categorical feature 'genre'\. Did you mean genres\? .* genres, user"):
        find_feature(schema, "genre")
    with pytest.raises(ConfigError, match="cannot be grouped by 'genres'.* several values a sample"):
        Groups(JAGGED, 1)
