import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.baselines import auc, mean_baselines, references
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


def test_the_reference_of_synthetic_data_is_the_best_possible_auc():
    source = Synthetic(train_rows=10, test_rows=500).open()
    assert references(source) == {"best possible": best_auc(source, "test")}
    assert references(Synthetic(train_rows=10, test_rows=0).open()) == {}
