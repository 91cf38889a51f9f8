import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.baselines import auc, mean_baselines, naive_bayes, references
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.storage.blocks import write_prepared
from recjax.data.synthetic.clicks import Synthetic, best_auc


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=15))
def test_auc_is_the_share_of_pairs_in_order(rows):
    scores, labels = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    if pairs:
        assert auc(labels, scores) == pytest.approx(sum(pairs) / len(pairs))


def test_mean_baselines_by_hand():
    """Four known ratings, global mean 1/2; then three to predict, the last by an unseen user of an unseen movie.

    Movies: 10 -> (2 + 2.5) / 7, 20 -> (0 + 2.5) / 7, unseen -> 1/2. Users: 1 -> (1 + 2.5) / 7 = 1/2, 2 -> the same,
    unseen -> 1/2. So by movie the order is 10 > unseen > 20, and all users are equal.
    """
    users, movies = np.array([1, 1, 2, 2, 1, 2, 9]), np.array([10, 20, 10, 20, 10, 20, 99])
    labels = np.array([1, 0, 1, 0, 1, 1, 0], np.float32)
    found = mean_baselines(users, movies, labels, known=4)
    assert found == {"per-movie mean": 0.5, "per-user mean": 0.5, "per-movie + per-user mean": 0.5}
    labels[5:] = 0
    found = mean_baselines(users, movies, labels, known=4)
    assert found == {"per-movie mean": 1.0, "per-user mean": 0.5, "per-movie + per-user mean": 1.0}


def test_later_labels_do_not_enter():
    users, movies, labels = np.arange(40) % 3, np.arange(40) % 7, (np.arange(40) % 2).astype(np.float32)
    before = mean_baselines(users, movies, labels, 30)
    swapped = 1 - labels
    swapped[:30] = labels[:30]
    after = mean_baselines(users, movies, swapped, 30)
    for name in before:  # the same scores against swapped labels
        assert after[name] == pytest.approx(1 - before[name])


def test_no_baselines_where_the_auc_is_not_defined():
    ones = np.ones(4, np.int64)
    assert mean_baselines(ones, ones, np.ones(4), known=2) == {}
    assert mean_baselines(ones, ones, np.array([0, 1, 0, 1]), known=4) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3)), min_size=2, max_size=12))
def test_auc_of_weighted_rows_is_that_of_repeated_ones(rows):
    scores, labels, weights = (np.array(column) for column in zip(*rows, strict=True))
    if weights[labels].sum() and weights[~labels].sum():
        assert auc(labels, scores, weights) == pytest.approx(
            auc(np.repeat(labels, weights), np.repeat(scores, weights))
        )


def blocks_of(tmp_path, rows, test):
    """Prepared data of one id x, one bag z and one number d."""
    schema = Schema(("d",), (Feature("x", 3), Feature("z", 4, None)))

    def batch(rows):
        x, z, d, labels, weights = zip(*rows, strict=True)
        return Batch(
            np.array(d, np.float32)[:, None],
            {
                "x": Bags(np.array(x)),
                "z": Bags(np.array([i for bag in z for i in bag], np.int64), np.array([len(bag) for bag in z])),
            },
            np.array(labels, np.float32),
            np.array(weights, np.float32),
        )

    return write_prepared(tmp_path / "out", "own", schema, {"train": [batch(rows)], "test": [batch(test)]}, {})


def test_naive_bayes_by_hand(tmp_path):
    """Label 1 in 3 of 6 training rows of weight 1, so the base rate is 1/2 and a value adds the log odds of its rate.

    x: 0 has labels 1, 1, 0 -> (2 + 2.5) / 8; 1 has 1, 0, 0 -> (1 + 2.5) / 8; 2 is new -> 1/2. Bags: entry 1 has 1, 1 ->
    4.5 / 7; 2 has 1, 0, 0 -> 3.5 / 8, as it stands in three rows. The number is constant and adds the same to all rows.
    """
    train = [
        (0, [1], 5, 1, 1),
        (0, [1, 2], 5, 1, 1),
        (0, [2], 5, 0, 1),
        (1, [], 5, 1, 1),
        (1, [2], 5, 0, 1),
        (1, [], 5, 0, 1),
        (2, [3], 5, 1, 0),
    ]

    def odds(rate):
        return np.log(rate / (1 - rate))

    x, z = {0: odds(4.5 / 8), 1: odds(3.5 / 8), 2: 0}, {1: odds(4.5 / 7), 2: odds(3.5 / 8), 3: 0}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        test = [
            (int(i), [int(j) for j in rng.integers(1, 4, rng.integers(0, 3))], 5, int(rng.random() < 0.5), 1.0)
            for i in rng.integers(0, 3, 9)
        ]
        test += [(0, [], 5, 1, 1.0), (1, [], 5, 0, 2.0)]
        scores = [x[i] + (sum(z[j] for j in bag) / len(bag) if bag else 0) for i, bag, _, _, _ in test]
        _, _, _, labels, weights = zip(*test, strict=True)
        truth = auc(np.array(labels), np.round(scores, 9), np.array(weights))
        (tmp_path / str(seed)).mkdir()
        assert naive_bayes(blocks_of(tmp_path / str(seed), train, test)) == {"naive Bayes": pytest.approx(truth)}


def test_naive_bayes_of_numbers_finds_a_rate_that_is_no_line(tmp_path):
    """Label 1 where the number is near 0, so its own order tells nothing."""
    rng = np.random.default_rng(0)
    rows = [(0, [], d, int(abs(d) < 0.7), 1.0) for d in rng.normal(size=2000)]
    (found,) = naive_bayes(blocks_of(tmp_path, rows[:1500], rows[1500:])).values()
    assert found > 0.97
    (tmp_path / "one class").mkdir()
    assert naive_bayes(blocks_of(tmp_path / "one class", [(*r[:3], 1, 1) for r in rows[:9]], rows)) == {}
    (tmp_path / "one test").mkdir()
    assert naive_bayes(blocks_of(tmp_path / "one test", rows[:99], [(*r[:3], 1, 1) for r in rows[:9]])) == {}


def test_the_reference_of_synthetic_data_is_the_best_possible_auc():
    source = Synthetic(train_rows=10, test_rows=500).open()
    assert references(source) == {"best possible": best_auc(source, "test")}
    assert references(Synthetic(train_rows=10, test_rows=0).open()) == {}
