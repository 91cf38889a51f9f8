"""The oracle itself, by hand: everything else is compared with it."""

from typing import Any

import numpy as np
import pytest
from support.dense_reference import bag_matrix, clip, sequence_matrices, touched_rows, update

from recjax.data.batch import Bags
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Rule, Sgd

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


def test_sequence_matrices_by_hand():
    matrices, mask = sequence_matrices(FIXED, 2, 4)
    assert matrices.tolist() == [[[0, 1, 0, 0], [0, 0, 1, 0]], [[1, 0, 0, 0], [1, 0, 0, 0]]] and mask.all()
    matrices, mask = sequence_matrices(weighted(JAGGED, [2, 3, 4, 5]), 3, 4)
    nothing = [0, 0, 0, 0]
    assert matrices.tolist() == [
        [[0, 0, 0, 2], [0, 3, 0, 0], [0, 0, 0, 4]],
        [nothing, nothing, nothing],
        [[5, 0, 0, 0], nothing, nothing],
    ]
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, False, False]]


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


def test_clip_by_hand():
    gradients = [np.array([[3.0, 0.0], [0.0, 0.0]]), np.array([4.0])]  # norm 5
    for clip_norm in (0, 5, 6):
        assert [g.tolist() for g in clip(gradients, clip_norm)] == [[[3, 0], [0, 0]], [4]]
    assert [g.tolist() for g in clip(gradients, 2.5)] == [[[1.5, 0], [0, 0]], [2]]


TABLE, GRAD = np.array([[4.0], [4.0]]), np.array([[2.0], [0.0]])
FIRST = np.array([True, False])


@pytest.mark.parametrize(
    ("optimizer", "slots", "rows", "new_slots"),
    [
        # rate 0.5, so lr = 0.5. G = 2 + 0.5 * 4 = 4: 4 - 0.5 * 4 = 2
        (Sgd(1, l2=0.5), {}, [2, 4], {}),
        # G = 0 + 0.5 * 4 = 2 for the untouched row: 4 - 0.5 * 2 = 3
        (Sgd(1, l2=0.5, every_row=True), {}, [2, 3], {}),
        # 4 * (1 - 0.5 * 0.5) - 0.5 * 2 = 2
        (Sgd(1, weight_decay=0.5), {}, [2, 4], {}),
        # m = 0.5 * 4 + 2 = 4, 4 - 0.5 * 4 = 2; with Nesterov 4 - 0.5 * (2 + 0.5 * 4) = 2
        (Sgd(1, momentum=0.5), {"momentum": [[4.0], [4.0]]}, [2, 4], {"momentum": [[4], [4]]}),
        (Sgd(1, momentum=0.5, every_row=True), {"momentum": [[4.0], [4.0]]}, [2, 3], {"momentum": [[4], [2]]}),
        (Sgd(1, momentum=0.5, nesterov=True), {"momentum": [[2.0], [4.0]]}, [2.25, 4], {"momentum": [[3], [4]]}),
        # s = 12 + 4 = 16: 4 - 0.5 * 10 * 2 / (4 + 1)
        (Adagrad(10, eps=1), {"sum_of_squares": [[12.0], [5.0]]}, [2, 4], {"sum_of_squares": [[16], [5]]}),
        # the second step: m = 1 + 1 = 2, / (3/4); v = 4.5 + 3 = 7.5, / (15/16) = 8, root 2.83
        (
            Adam(6, b1=0.5, b2=0.25, eps=1),
            {"m": [[2.0], [9.0]], "v": [[18.0], [9.0]]},
            [4 - 3 * (8 / 3) / (8**0.5 + 1), 4],
            {"m": [[2], [9]], "v": [[7.5], [9]]},
        ),
        (
            PartialRowWiseAdam(6, b1=0.5, b2=0.25, eps=1),
            {"m": [[2.0], [9.0]], "v": [18.0, 9.0]},
            [4 - 3 * (8 / 3) / (8**0.5 + 1), 4],
            {"m": [[2], [9]], "v": [7.5, 9]},
        ),
        # n = 5 + 4 = 9; z = -20 + 0.5 * 2 - (3 - sqrt(5)) / 2 * 4; w = (|z| - 1) / ((1 + 3) / 2 + 2)
        (
            Ftrl(2, beta=1, l1=1, l2=2),
            {"z": [[-20.0], [7.0]], "n": [[5.0], [7.0]]},
            [(19 + (3 - 5**0.5) * 2 - 1) / 4, 4],
            {"z": [[-19 - (3 - 5**0.5) * 2], [7]], "n": [[9], [7]]},
        ),
    ],
)
def test_second_steps_by_hand(optimizer, slots, rows, new_slots):
    before = {name: np.array(slot) for name, slot in slots.items()}
    new, after = update(optimizer, TABLE, before, GRAD, FIRST, step=1, rate=0.5)
    np.testing.assert_allclose(new[:, 0], rows, rtol=1e-14)
    assert after.keys() == new_slots.keys()
    for name, slot in new_slots.items():
        np.testing.assert_allclose(after[name], slot, rtol=1e-14)
