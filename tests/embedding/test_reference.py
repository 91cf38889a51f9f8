"""The oracle itself, by hand: everything else is compared with it."""

from typing import Any

import numpy as np
import pytest

from recjax.data.batch import Bags
from recjax.embedding.optim import RowWiseAdagrad, Rule, Sgd
from recjax.embedding.reference import bag_matrix, touched_rows, update

FIXED = Bags(np.array([[1, 2], [0, 0]]))
JAGGED = Bags(np.array([3, 1, 3, 0]), np.array([3, 0, 1], np.int32))


def weighted(bags: Bags, weights: list[Any]) -> Bags:
    return Bags(bags.ids, bags.lengths, np.array(weights, np.float32))


@pytest.mark.parametrize(
    ("bags", "pooling", "expected"),
    [
        (FIXED, "sum", [[0, 1, 1, 0], [2, 0, 0, 0]]),
        (FIXED, "mean", [[0, 0.5, 0.5, 0], [1, 0, 0, 0]]),
        (weighted(FIXED, [[3, -1], [0.5, 4]]), "sum", [[0, 3, -1, 0], [4.5, 0, 0, 0]]),
        # weights scale rows; the divisor of the mean is the number of ids
        (weighted(FIXED, [[3, -1], [0.5, 4]]), "mean", [[0, 1.5, -0.5, 0], [2.25, 0, 0, 0]]),
        (JAGGED, "sum", [[0, 1, 0, 2], [0, 0, 0, 0], [1, 0, 0, 0]]),
        (JAGGED, "mean", [[0, 1 / 3, 0, 2 / 3], [0, 0, 0, 0], [1, 0, 0, 0]]),
        (weighted(JAGGED, [2, 3, 4, 5]), "sum", [[0, 3, 0, 6], [0, 0, 0, 0], [5, 0, 0, 0]]),
        (weighted(JAGGED, [2, 3, 4, 5]), "mean", [[0, 1, 0, 2], [0, 0, 0, 0], [5, 0, 0, 0]]),
    ],
)
def test_bag_matrix_by_hand(bags, pooling, expected):
    matrix = bag_matrix(bags, len(expected), 4, pooling)
    assert matrix.dtype == np.float64
    np.testing.assert_allclose(matrix, expected, rtol=1e-15)


def test_touched_rows_by_hand():
    assert touched_rows(FIXED, 4).tolist() == [True, True, True, False]
    assert touched_rows(weighted(JAGGED, [0, 0, 0, 0]), 4).tolist() == [True, True, False, True]
    assert not touched_rows(Bags(np.zeros(0, np.int64), np.zeros(2, np.int32)), 4).any()


def test_update_by_hand():
    table, grad = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0, -4.0], [6.0, 8.0]])
    touched = np.array([True, False])
    new, slots = update(Sgd(0.5), table, {}, grad, touched)
    assert new.tolist() == [[0, 4], [3, 4]] and slots == {}
    # s = 6 + (4 + 16) / 2 = 16, rate 10 / (4 + 1) = 2
    adagrad = RowWiseAdagrad(10, eps=1)
    new, slots = update(adagrad, table, {"sum_of_squares": np.array([6.0, 7.0])}, grad, touched)
    assert new.tolist() == [[-3, 10], [3, 4]]
    assert slots["sum_of_squares"].tolist() == [16, 7]
    assert table.tolist() == [[1, 2], [3, 4]]  # the input is left alone
    with pytest.raises(TypeError, match="does not know Rule"):
        update(Rule(), table, {}, grad, touched)
