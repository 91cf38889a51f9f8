"""The sparse optimizers' arithmetic, worked by hand and against the oracle."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.embedding import reference
from recjax.embedding.optim import At, RowWiseAdagrad, Sgd
from recjax.errors import ConfigError


def at(step, rate=1):
    return At(jnp.int32(step), jnp.float32(rate), lambda x_UxD: jnp.mean(x_UxD, axis=-1))


def run(optimizer, rows, *grads):
    """Rows and slots after one update for each of `grads`."""
    rows = jnp.asarray(rows, jnp.float32)
    slots = {n: jnp.full(len(rows), s.initial, jnp.float32) for n, s in optimizer.slots(rows.shape[1]).items()}
    for step, grad in enumerate(grads):
        rows, slots = optimizer.apply(rows, slots, jnp.asarray(grad, jnp.float32), at(step))
    assert rows.dtype == jnp.float32 and all(s.dtype == jnp.float32 for s in slots.values())
    return rows.tolist(), {name: slot.tolist() for name, slot in slots.items()}


def test_sgd_by_hand():
    # 1 - 0.5 * 2 = 0, 2 + 0.5 * 4 = 4; then 0 - 0.5 = -0.5, 4 - 0.5 = 3.5
    assert run(Sgd(0.5), [[1, 2], [7, 7]], [[2, -4], [0, 0]], [[1, 1], [0, 4]]) == ([[-0.5, 3.5], [7, 5]], {})


def test_rowwise_adagrad_by_hand():
    # Row 0. Step 1: s = (1 + 49 + 25 + 25) / 4 = 25, rate 6 / (5 + 1) = 1, w = -G.
    #        Step 2: s = 25 + (256 + 64 + 64 + 0) / 4 = 121, rate 6 / (11 + 1) = 1/2, w -= G / 2.
    # Row 1. Step 1: a zero gradient; 0 / (0 + 1) moves nothing. Step 2: s = 64 / 4 = 16, rate 6 / 5.
    rows, slots = run(
        RowWiseAdagrad(6, eps=1),
        [[0, 0, 0, 0], [1, 1, 1, 1]],
        [[1, 7, 5, 5], [0, 0, 0, 0]],
        [[16, 8, 8, 0], [0, 0, 0, 8]],
    )
    assert rows[0] == [-9, -11, -9, -5]
    assert rows[1] == pytest.approx([1, 1, 1, 1 - 9.6])
    assert slots == {"sum_of_squares": [121, 16]}


def test_the_initial_accumulator_by_hand():
    # s = 9 + 16 = 25, rate 5 / 5 = 1
    optimizer = RowWiseAdagrad(5, eps=0, initial_accumulator=9)
    assert run(optimizer, [[1, 2]], [[4, -4]]) == ([[-3, 6]], {"sum_of_squares": [25]})


def test_eps_is_added_to_the_root():
    # 3 / (sqrt(0 + 4) + 1) = 1; inside the root it would be 3 / sqrt(5)
    assert run(RowWiseAdagrad(3, eps=1), [[0]], [[2]]) == ([[-2]], {"sum_of_squares": [4]})


@pytest.mark.parametrize(
    "optimizer", [Sgd(0.3), RowWiseAdagrad(0.3), RowWiseAdagrad(0.02, eps=0.1, initial_accumulator=0.5)]
)
def test_updates_equal_the_oracle(optimizer):
    rng = np.random.default_rng(0)
    rows = truth = rng.normal(size=(20, 5))
    slots = truth_slots = {n: np.full(20, float(s.initial)) for n, s in optimizer.slots(5).items()}
    with jax.enable_x64(True):
        for step in range(4):
            grad = rng.normal(size=(20, 5)) * (rng.random((20, 1)) < 0.8)
            rows, slots = optimizer.apply(jnp.asarray(rows), slots, jnp.asarray(grad), at(step))
            truth, truth_slots = reference.update(optimizer, truth, truth_slots, grad, np.ones(20, bool))
            assert rows.dtype == jnp.float64
    np.testing.assert_allclose(rows, truth, rtol=1e-13)
    assert slots.keys() == truth_slots.keys()
    for name in slots:
        np.testing.assert_allclose(slots[name], truth_slots[name], rtol=1e-13)


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("optimizer", [Sgd, RowWiseAdagrad])
def test_learning_rates_that_cannot_be(optimizer, rate):
    with pytest.raises(ConfigError, match=f"learning_rate is {rate}; it must be positive and finite"):
        optimizer(rate)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("name", ["eps", "initial_accumulator"])
def test_adagrad_settings_that_cannot_be(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be finite and not negative"):
        RowWiseAdagrad(**{name: value})


def test_adagrad_may_not_divide_zero_by_zero():
    with pytest.raises(ConfigError, match="both 0"):
        RowWiseAdagrad(eps=0, initial_accumulator=0)
