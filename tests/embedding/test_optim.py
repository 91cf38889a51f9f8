"""The sparse optimizers' arithmetic: worked by hand, against the oracle, and against optax where it has the rule."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import dense_reference as reference

from recjax.embedding.optim import Adagrad, Adam, Ftrl, OptimizerContext, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.errors import ConfigError


def at(step, rate=1.0):
    return OptimizerContext(jnp.int32(step), jnp.asarray(rate), lambda x_UxD: jnp.mean(x_UxD, axis=-1))


def fresh(optimizer, rows):
    return {
        n: jnp.full((len(rows), *s.shape), s.initial, rows.dtype) for n, s in optimizer.slots(rows.shape[1]).items()
    }


def run(optimizer, rows, *grads, rate=1.0):
    """Rows and slots after one update for each of `grads`."""
    rows = jnp.asarray(rows, jnp.float32)
    slots = fresh(optimizer, rows)
    for step, grad in enumerate(grads):
        rows, slots = optimizer.apply(rows, slots, jnp.asarray(grad, jnp.float32), at(step, rate))
    assert rows.dtype == jnp.float32 and all(s.dtype == jnp.float32 for s in slots.values())
    return rows.tolist(), {name: slot.tolist() for name, slot in slots.items()}


# By hand.


def test_sgd_by_hand():
    # 1 - 0.5 * 2 = 0, 2 + 0.5 * 4 = 4; then 0 - 0.5 = -0.5, 4 - 0.5 = 3.5
    assert run(Sgd(0.5), [[1, 2], [7, 7]], [[2, -4], [0, 0]], [[1, 1], [0, 4]]) == ([[-0.5, 3.5], [7, 5]], {})


def test_momentum_by_hand():
    # m = 4, w = 10 - 2 = 8; m = 2 + 6 = 8, w = 8 - 4 = 4; m = 4 + 0 = 4, w = 4 - 2 = 2: a zero gradient still moves
    assert run(Sgd(0.5, momentum=0.5), [[10]], [[4]], [[6]], [[0]]) == ([[2]], {"momentum": [[4]]})


def test_nesterov_by_hand():
    # m = 4, w = 10 - (4 + 2) / 2 = 7; m = 2 + 6 = 8, w = 7 - (6 + 4) / 2 = 2
    assert run(Sgd(0.5, momentum=0.5, nesterov=True), [[10]], [[4]], [[6]]) == ([[2]], {"momentum": [[8]]})


def test_adagrad_by_hand():
    # s = 9, 16: 12 / (3 + 1) * 3 = 9, 12 / (4 + 1) * 4 = 9.6; then s = 25, 16: 12 / 6 * 4 = 8, 0
    rows, slots = run(Adagrad(12, eps=1), [[20, 0]], [[3, -4]], [[4, 0]])
    assert rows[0] == pytest.approx([20 - 9 - 8, 9.6])
    assert slots == {"sum_of_squares": [[25, 16]]}


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
    assert rows[0] == pytest.approx([-9, -11, -9, -5])
    assert rows[1] == pytest.approx([1, 1, 1, 1 - 9.6])
    assert slots == {"sum_of_squares": [121, 16]}


@pytest.mark.parametrize(("optimizer", "sums"), [(RowWiseAdagrad, [25]), (Adagrad, [[25, 25]])])
def test_the_initial_accumulator_by_hand(optimizer, sums):
    # s = 9 + 16 = 25, rate 5 / 5 = 1
    optimizer = optimizer(5, eps=0, initial_accumulator=9)
    assert run(optimizer, [[1, 2]], [[4, -4]]) == ([[-3, 6]], {"sum_of_squares": sums})


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad, Adagrad])
def test_eps_is_added_to_the_root(optimizer):
    # 3 / (sqrt(0 + 4) + 1) = 1; inside the root it would be 3 / sqrt(5)
    assert run(optimizer(3, eps=1), [[0]], [[2]])[0] == [[-2]]


def test_adam_by_hand():
    # Step 1: m = 2, v = 12; corrected 2 / (1/2) = 4 and 12 / (3/4) = 16; 10 * 4 / (4 + 1) = 8.
    # Step 2, no gradient: m = 1, v = 3; corrected 1 / (3/4) = 4/3 and 3 / (15/16) = 3.2.
    adam = Adam(10, b1=0.5, b2=0.25, eps=1)
    rows, slots = run(adam, [[0]], [[4]])
    assert rows[0] == pytest.approx([-8]) and slots == {"m": [[2]], "v": [[12]]}
    rows, slots = run(adam, [[0]], [[4]], [[0]])
    assert rows[0] == pytest.approx([-8 - 10 * (4 / 3) / (math.sqrt(3.2) + 1)]) and slots == {"m": [[1]], "v": [[3]]}


def test_partial_rowwise_adam_by_hand():
    # m = 1, 7; v = 3/4 * (4 + 196) / 2 = 75, corrected 100: 11 * (2, 14) / (10 + 1)
    rows, slots = run(PartialRowWiseAdam(11, b1=0.5, b2=0.25, eps=1), [[0, 0]], [[2, 14]])
    assert rows[0] == pytest.approx([-2, -14]) and slots == {"m": [[1, 7]], "v": [75]}


@pytest.mark.parametrize("optimizer", [Adam, PartialRowWiseAdam])
def test_bias_correction_counts_the_global_step(optimizer):
    """A row that is touched first at step 1000 starts from zero means, hardly corrected: 0.1 / sqrt(0.001) = 3.16."""
    rows, slots = jnp.zeros((1, 1)), {n: jnp.zeros((1, *s.shape)) for n, s in optimizer().slots(1).items()}
    first, _ = optimizer(1.0).apply(rows, slots, jnp.ones((1, 1)), at(0))
    late, _ = optimizer(1.0).apply(rows, slots, jnp.ones((1, 1)), at(99_999))
    assert float(first[0, 0]) == pytest.approx(-1)
    assert float(late[0, 0]) == pytest.approx(-math.sqrt(10))


def test_the_first_bias_corrections_keep_float32s_precision():
    """1 - 0.999 computed in float32 is off by 5e-5."""
    slots = {"m": jnp.zeros((1, 1)), "v": jnp.zeros((1, 1))}
    rows, _ = Adam(1.0).apply(jnp.zeros((1, 1)), slots, jnp.ones((1, 1)), at(0))
    assert abs(float(rows[0, 0]) + 1) < 1e-6


def test_decays_of_zero_take_only_the_newest_gradient():
    assert run(Adam(1, b1=0, b2=0, eps=1), [[0]], [[9]], [[3]])[0][0] == pytest.approx([-9 / 10 - 3 / 4])


def test_ftrl_by_hand():
    # alpha 2. n = 9, z = 3 - 3/2 * w = 3 - 3/2 * 4 = -3; (|z| - 1) / ((1 + 3) / 2 + 2) = 2/4 = 0.5.
    # Then n = 25, sigma = (5 - 3) / 2 = 1, z = -3 + 4 - 1 * 0.5 = 0.5: below l1, so w = 0.
    ftrl = Ftrl(2, beta=1, l1=1, l2=2)
    assert run(ftrl, [[4]], [[3]]) == ([[0.5]], {"z": [[-3]], "n": [[9]]})
    assert run(ftrl, [[4]], [[3]], [[4]]) == ([[0]], {"z": [[0.5]], "n": [[25]]})


def test_ftrl_without_regularisation_is_adagrad():
    """From w = 0; here with beta = 0, as Adagrad's eps enters the curvature in another way."""
    grads = np.random.default_rng(0).normal(size=(5, 4, 3))
    with jax.enable_x64(True):
        ftrl, sgd = Ftrl(0.3, beta=0, initial_accumulator=0.7), Adagrad(0.3, eps=0, initial_accumulator=0.7)
        a = b = jnp.zeros((4, 3))
        slots_a, slots_b = fresh(ftrl, a), fresh(sgd, b)
        for step, grad in enumerate(grads):
            a, slots_a = ftrl.apply(a, slots_a, jnp.asarray(grad), at(step))
            b, slots_b = sgd.apply(b, slots_b, jnp.asarray(grad), at(step))
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_l2_is_added_to_the_gradient():
    # G = 2 + 0.5 * 4 = 4: 4 - 0.5 * 4 = 2
    assert run(Sgd(0.5, l2=0.5), [[4]], [[2]])[0] == [[2]]


def test_l2_counts_in_the_mean_over_a_row():
    # G = 1 + 6 = 7, 1 + 0: s = 50 / 2 = 25, rate 6 / (5 + 1) = 1
    rows, slots = run(RowWiseAdagrad(6, eps=1, l2=2), [[3, 0]], [[1, 1]])
    assert rows[0] == pytest.approx([-4, -1]) and slots == {"sum_of_squares": [25]}


def test_weight_decay_is_beside_the_step():
    # 4 * (1 - 0.5 * 0.5) - 0.5 * 2 = 2; Adagrad: s = 16, unchanged by decay: 4 * 3/4 - 0.5 * 4 / (4 + 1)
    assert run(Sgd(0.5, weight_decay=0.5), [[4]], [[2]])[0] == [[2]]
    rows, slots = run(Adagrad(0.5, eps=1, weight_decay=0.5), [[4]], [[4]])
    assert rows[0] == pytest.approx([2.6]) and slots == {"sum_of_squares": [[16]]}


def test_the_rate_multiplies_step_and_decay():
    # lr = 0.5 / 2: 8 * (1 - 0.25 * 0.5) - 0.25 * 4 = 6
    assert run(Sgd(0.5, weight_decay=0.5), [[8]], [[4]], rate=0.5)[0] == [[6]]


RULES = {
    "sgd": Sgd(0.3),
    "sgd-l2": Sgd(0.3, l2=0.1, weight_decay=0.2),
    "momentum": Sgd(0.3, momentum=0.9, l2=0.01),
    "nesterov": Sgd(0.3, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adagrad": Adagrad(0.3, l2=0.1),
    "adagrad-start": Adagrad(0.02, eps=0.1, initial_accumulator=0.5, weight_decay=0.3),
    "rowwise_adagrad": RowWiseAdagrad(0.3),
    "rowwise_adagrad-start": RowWiseAdagrad(0.02, eps=0.1, initial_accumulator=0.5, l2=0.1, weight_decay=0.3),
    "adam": Adam(0.3),
    "adam-l2": Adam(0.3, b1=0.8, b2=0.95, eps=1e-3, l2=0.1, weight_decay=0.2),
    "partial_rowwise_adam": PartialRowWiseAdam(0.3, b2=0.9),
    "partial_rowwise_adam-l2": PartialRowWiseAdam(0.3, l2=0.1, weight_decay=0.2),
    "ftrl": Ftrl(0.3),
    "ftrl-l1": Ftrl(0.3, beta=0.5, l1=0.2, l2=0.1, initial_accumulator=0.4),
}


@pytest.mark.parametrize("name", RULES)
def test_updates_equal_the_oracle(name):
    optimizer = RULES[name]
    rng = np.random.default_rng(0)
    rows = truth = rng.normal(size=(20, 5))
    with jax.enable_x64(True):
        slots = fresh(optimizer, jnp.asarray(rows))
        truth_slots = {n: np.asarray(s) for n, s in slots.items()}
        for step, rate in enumerate((0.25, 0.5, 1.0, 0.3)):
            grad = rng.normal(size=(20, 5)) * (rng.random((20, 1)) < 0.8)
            rows, slots = optimizer.apply(jnp.asarray(rows), slots, jnp.asarray(grad), at(step, rate))
            truth, truth_slots = reference.update(
                optimizer, truth, truth_slots, grad, np.ones(20, bool), step=step, rate=rate
            )
            assert rows.dtype == jnp.float64
    np.testing.assert_allclose(rows, truth, rtol=1e-12, atol=1e-15)
    assert slots.keys() == truth_slots.keys() == optimizer.slots(5).keys()
    for slot, spec in optimizer.slots(5).items():
        assert slots[slot].shape == (20, *spec.shape)
        np.testing.assert_allclose(slots[slot], truth_slots[slot], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", RULES)
def test_a_rate_of_zero_moves_nothing(name):
    """The end of a schedule, after a step that has brought the row where the rule itself would have it."""
    optimizer = RULES[name]
    rng = np.random.default_rng(0)
    rows, grads = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32), jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)
    rows, slots = optimizer.apply(rows, fresh(optimizer, rows), grads, at(0))
    still, _ = optimizer.apply(rows, slots, grads, at(1, 0.0))
    np.testing.assert_allclose(still, rows, rtol=1e-6, atol=1e-7)


OPTAX = {
    "sgd": (Sgd(0.3), optax.sgd(0.3)),
    "momentum": (Sgd(0.3, momentum=0.9), optax.sgd(0.3, 0.9)),
    "nesterov": (Sgd(0.3, momentum=0.9, nesterov=True), optax.sgd(0.3, 0.9, nesterov=True)),
    "adam": (Adam(0.3, b1=0.8, b2=0.95, eps=1e-3), optax.adam(0.3, 0.8, 0.95, 1e-3)),
    "adamw": (Adam(0.3, weight_decay=0.1), optax.adamw(0.3, weight_decay=0.1)),
    # optax adds eps under the root: both are the same where there is none
    "adagrad": (Adagrad(0.3, eps=0, initial_accumulator=0.2), optax.adagrad(0.3, 0.2, 0)),
    "l2": (Adam(0.3, l2=0.1), optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.3))),
}


@pytest.mark.parametrize("name", OPTAX)
def test_with_every_row_touched_it_is_the_dense_optimizer_of_optax(name):
    optimizer, tx = OPTAX[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        rows = dense = jnp.asarray(rng.normal(size=(6, 3)))
        slots, state = fresh(optimizer, rows), tx.init(dense)
        for step in range(5):
            grad = jnp.asarray(rng.normal(size=(6, 3)))
            rows, slots = optimizer.apply(rows, slots, grad, at(step))
            with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
                updates, state = tx.update(grad, state, dense)
            dense = optax.apply_updates(dense, updates)
    np.testing.assert_allclose(rows, dense, rtol=1e-12)


# Settings that cannot be.

ALL = (Sgd, Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam, Ftrl)


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("optimizer", ALL)
def test_learning_rates_that_cannot_be(optimizer, rate):
    with pytest.raises(ConfigError, match=f"learning_rate is {rate}; it must be positive and finite"):
        optimizer(rate)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        *((cls, name) for cls in ALL[:-1] for name in ("l2", "weight_decay")),
        *((cls, name) for cls in (Adagrad, RowWiseAdagrad) for name in ("eps", "initial_accumulator")),
        *((Ftrl, name) for name in ("beta", "l1", "l2", "initial_accumulator")),
    ],
)
def test_settings_that_must_be_finite_and_not_negative(optimizer, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be finite and not negative"):
        optimizer(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
@pytest.mark.parametrize(
    ("optimizer", "name"), [(Sgd, "momentum"), *((cls, b) for cls in (Adam, PartialRowWiseAdam) for b in ("b1", "b2"))]
)
def test_settings_that_must_be_fractions(optimizer, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be at least 0 and below 1"):
        optimizer(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adagrad(eps=0), "eps and initial_accumulator are both 0"),
        (lambda: RowWiseAdagrad(eps=0), "eps and initial_accumulator are both 0"),
        (lambda: Ftrl(beta=0), "beta and initial_accumulator are both 0"),
        (lambda: Adam(eps=0), "eps is 0; it must be positive"),
        (lambda: PartialRowWiseAdam(eps=0), "eps is 0; it must be positive"),
        (lambda: Sgd(nesterov=True), "momentum is 0. Give momentum"),
        (lambda: Sgd(2.0, weight_decay=0.5), "weight_decay is 0.5 and learning_rate 2.0.*less than 1"),
    ],
)
def test_settings_that_contradict_each_other(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
