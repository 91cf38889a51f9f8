"""Synthetic data: distributions against closed forms, the planted optimum against brute force."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.batch_checks import validate
from recjax.data.source import SPLITS, concatenate
from recjax.data.synthetic.clicks import BoundedZipf, Synthetic, best_auc, expected_auc
from recjax.errors import ConfigError, DataError

MIXED = Synthetic(
    rows=(40, 2**31 - 1, 7, 300),
    ids_per_bag=(1, 5, 0, 0),
    weighted=(False, True, False, True),
    dense=3,
    train_rows=9000,
    validation_rows=100,
    test_rows=5000,
)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.5])
@pytest.mark.parametrize("rows", [1, 2, 1000, 4096, 4097, 50_000])
def test_zipf_matches_its_probabilities(rows, exponent):
    """Evenly spaced uniforms must give each id in proportion to rank^-exponent, up to rounding of one draw."""
    n = 400_000
    ids = BoundedZipf(rows, exponent).ids((np.arange(n) + 0.5) / n)
    expected = np.arange(1, rows + 1) ** -exponent
    expected *= n / expected.sum()
    assert np.abs(np.cumsum(np.bincount(ids, minlength=rows)) - np.cumsum(expected)).max() < 1.0


@pytest.mark.parametrize("exponent", [0.0, 0.99, 1.0, 1.2])
def test_zipf_stays_in_range_for_the_largest_table(exponent):
    zipf = BoundedZipf(2**31 - 1, exponent)
    assert zipf.ids(np.array([0.0, 1 - 2.0**-53])).tolist() == [0, 2**31 - 2]
    # Median by the closed form of the continuous law, which the sum over two thousand million ids approaches.
    if exponent == 0:
        assert zipf.ids(np.array([0.5]))[0] == pytest.approx(2**30, rel=1e-6)


def test_blocks_fit_the_schema_and_cover_the_split():
    source = MIXED.open()
    assert [source.row_counts(split).tolist() for split in SPLITS] == [[4096, 4096, 808], [100], [4096, 904]]
    for split in SPLITS:
        position = 0
        for i, rows in enumerate(source.row_counts(split)):
            block = source.read(split, i)
            validate(block, source.schema)
            assert (block.size, block.position) == (rows, position)
            assert all(bags.ids.dtype == np.int32 for bags in block.bags.values())
            position += rows


def test_a_block_depends_on_nothing_but_its_place():
    first, second = MIXED.open(), MIXED.open()
    second.read("test", 0)
    a, b = first.read("train", 1), second.read("train", 1)
    np.testing.assert_array_equal(a.dense, b.dense)
    np.testing.assert_array_equal(a.labels, b.labels)
    for name in a.bags:
        np.testing.assert_array_equal(a.bags[name].ids, b.bags[name].ids)
    longer = dataclasses.replace(MIXED, train_rows=20_000).open().read("train", 1)
    np.testing.assert_array_equal(a.dense, longer.dense)


def test_splits_blocks_and_features_differ():
    source = dataclasses.replace(MIXED, rows=(1000,) * 4, ids_per_bag=(1,), weighted=(False,), train_rows=9000).open()
    blocks = [source.read("train", 0), source.read("train", 1), source.read("test", 0)]
    columns = [bags.ids[:, 0] for block in blocks for bags in block.bags.values()]
    assert len({column.tobytes() for column in columns}) == 12
    assert np.abs(np.corrcoef(np.array(columns) > 20) - np.eye(12)).max() < 0.08  # 5 sigma of 4096 rows


def test_jagged_sizes_are_uniform_from_empty_to_twice_the_mean():
    sizes = MIXED.open().read("train", 0).bags["sparse_2"].lengths
    assert sizes is not None
    counts = np.bincount(sizes)
    assert len(counts) == 2 * MIXED.mean_ids + 1
    assert ((counts - 4096 / 9) ** 2 / (4096 / 9)).sum() < 26.1  # 99.9% of chi-square with 8 degrees


def test_labels_follow_their_probabilities():
    source = Synthetic(train_rows=40_000).open()
    blocks = range(len(source.row_counts("train")))
    p = np.concatenate([source.probabilities("train", i) for i in blocks])
    labels = concatenate([source.read("train", i) for i in blocks]).labels
    assert p.std() > 0.1
    for low in np.arange(0, 1, 0.1):
        bin = (p >= low) & (p < low + 0.1)
        assert abs(labels[bin].sum() - p[bin].sum()) < 4 * np.sqrt((p[bin] * (1 - p[bin])).sum()) + 1e-9


def test_ids_beyond_the_planted_rows_have_no_effect():
    """With one table and no dense features, all rows whose id is not planted must share one probability."""
    config = Synthetic(rows=(1000,), dense=0, planted_rows=10, train_rows=4096)
    source = config.open()
    ids, p = source.read("train", 0).bags["sparse_0"].ids[:, 0], source.probabilities("train", 0)
    assert np.ptp(p[ids >= 10]) == 0
    assert p[ids >= 10][0] == pytest.approx(1 / (1 + np.exp(0.5)), abs=1e-12)
    assert len(np.unique(p[ids < 10])) == 10


def test_logit_by_hand():
    """The documented formula, row by row in plain Python, for weighted jagged and fixed bags."""
    config = dataclasses.replace(MIXED, test_rows=50)
    source = config.open()
    block, p = source.read("test", 0), source.probabilities("test", 0)
    planted = source._planted[0]
    starts = {name: np.cumsum(b.lengths) - b.lengths for name, b in block.bags.items() if b.lengths is not None}
    for i in range(50):
        pooled: list[float] = []
        hidden: list[float] = []
        for f, (name, mean) in enumerate(zip(block.bags, (1, 5, 4, 4), strict=True)):
            bags = block.bags[name]
            at = slice(starts[name][i], starts[name][i] + bags.lengths[i]) if bags.lengths is not None else i
            ids = bags.ids[at]
            weights = np.ones(len(ids)) if bags.weights is None else bags.weights[at]
            for out, tables in ((pooled, planted.effects), (hidden, planted.factors)):
                if f < len(tables):
                    terms = [w * tables[f][k] for k, w in zip(ids, weights, strict=True) if k < config.planted_rows]
                    out.append(sum(terms) / mean**0.5)
        total = sum(pooled) + float(block.dense[i] @ planted.coefficients) + 0.5 * hidden[0] * hidden[1]
        assert np.log(p[i] / (1 - p[i])) == pytest.approx(-0.5 + 2.0 * total / 8**0.5, abs=1e-5)


def brute_force_auc(p):
    right = pairs = 0.0
    for i in range(len(p)):
        for j in range(len(p)):
            if i != j:
                pair = p[i] * (1 - p[j])
                pairs += pair
                right += pair * ((p[i] > p[j]) + 0.5 * (p[i] == p[j]))
    return right / pairs


@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.8, 0.81]), min_size=2, max_size=12))
def test_expected_auc_is_the_sum_over_pairs(p):
    assert expected_auc(np.array(p)) == pytest.approx(brute_force_auc(p), abs=1e-12)


def test_expected_auc_of_certain_labels_is_one():
    assert expected_auc(np.array([0.0, 1.0, 1.0, 0.0])) == 1.0


def test_best_auc_is_reached_by_the_true_probabilities():
    """The observed AUC of the true probabilities, ties counted half, within 4 standard errors (0.002 each)."""
    source = Synthetic(test_rows=65_536).open()
    blocks = range(16)
    p = np.concatenate([source.probabilities("test", i) for i in blocks])
    labels = np.concatenate([source.read("test", i).labels for i in blocks])
    positives, negatives = np.sort(p[labels == 1]), np.sort(p[labels == 0])
    below = np.searchsorted(negatives, positives, "left") + np.searchsorted(negatives, positives, "right")
    observed = below.sum() / 2 / len(positives) / len(negatives)
    assert best_auc(source, "test") == pytest.approx(observed, abs=0.008)
    assert best_auc(source, "test") > 0.75


def test_shuffling_keeps_the_labels_and_removes_the_signal():
    plain = Synthetic(test_rows=65_536).open()
    shuffled = Synthetic(test_rows=65_536, shuffle_labels=True).open()
    a = concatenate([plain.read("test", i) for i in range(16)])
    b = concatenate([shuffled.read("test", i) for i in range(16)])
    assert a.labels.sum() == b.labels.sum()
    np.testing.assert_array_equal(a.dense, b.dense)
    p = np.concatenate([plain.probabilities("test", i) for i in range(16)])
    assert np.corrcoef(p, a.labels)[0, 1] > 0.3
    assert abs(np.corrcoef(p, b.labels)[0, 1]) < 4 / 256  # 4 sigma
    assert best_auc(shuffled, "test") == 0.5


def test_fingerprint_tells_configs_apart():
    prints = {
        config.open().fingerprint
        for config in (MIXED, dataclasses.replace(MIXED, seed=1), dataclasses.replace(MIXED, signal=1.0))
    }
    assert len(prints) == 3
    assert MIXED.open().fingerprint == MIXED.open().fingerprint


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="ids_per_bag has 3 values, but rows has 4"):
        Synthetic(ids_per_bag=(1, 1, 1))
    with pytest.raises(ConfigError, match="rows is 0; it must be 1 to 2147483647"):
        Synthetic(rows=(5, 0))
    with pytest.raises(ConfigError, match="rows is 2147483648"):
        Synthetic(rows=(2**31,))
    with pytest.raises(DataError, match="no split 'tset'"):
        Synthetic().open().row_counts("tset")
