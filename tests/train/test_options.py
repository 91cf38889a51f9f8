"""Dense optimizers: the same rules as the sparse ones of their names; and training settings that cannot be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recjax.config.train import DenseAdagrad, DenseAdam, DenseSgd, TrainConfig
from recjax.embedding.optim import Adagrad, Adam, OptimizerContext, Sgd
from recjax.errors import ConfigError

PAIRS = {
    "sgd": (DenseSgd(0.3), Sgd(0.3)),
    "sgd-decay": (DenseSgd(0.3, l2=0.1, weight_decay=0.2), Sgd(0.3, l2=0.1, weight_decay=0.2)),
    "momentum": (DenseSgd(0.3, momentum=0.9), Sgd(0.3, momentum=0.9)),
    "nesterov": (
        DenseSgd(0.3, momentum=0.9, nesterov=True, weight_decay=0.2),
        Sgd(0.3, momentum=0.9, nesterov=True, weight_decay=0.2),
    ),
    "adagrad": (
        DenseAdagrad(0.3, initial_accumulator=0.2, eps=0.1, l2=0.1),
        Adagrad(0.3, initial_accumulator=0.2, eps=0.1, l2=0.1),
    ),
    "adagrad-decay": (
        DenseAdagrad(0.3, eps=1e-8, initial_accumulator=0, weight_decay=0.2),
        Adagrad(0.3, weight_decay=0.2),
    ),
    "adam": (DenseAdam(0.3), Adam(0.3)),
    "adam-decay": (
        DenseAdam(0.3, b1=0.8, b2=0.95, eps=0.1, l2=0.1, weight_decay=0.2),
        Adam(0.3, b1=0.8, b2=0.95, eps=0.1, l2=0.1, weight_decay=0.2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_names_mean_equal_rules(name):
    """With a schedule: the dense updates are multiplied with its factor, the sparse rule is given it."""
    dense, sparse = PAIRS[name]
    assert dense.kind == sparse.kind
    rng = np.random.default_rng(0)
    tx = dense.build()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        w = rows = jnp.asarray(rng.normal(size=(4, 3)))
        state = tx.init({"w": w})
        slots = {n: jnp.full((4, *s.shape), s.initial) for n, s in sparse.slots(3).items()}
        for step, rate in enumerate((0.5, 1.0, 1.0, 0.2)):
            grad = jnp.asarray(rng.normal(size=(4, 3)))
            updates, state = tx.update({"w": grad}, state, {"w": w})
            w = w + rate * updates["w"]
            rows, slots = sparse.apply(
                rows, slots, grad, OptimizerContext(jnp.int32(step), jnp.asarray(rate), lambda x: x.mean(-1))
            )
    np.testing.assert_allclose(w, rows, rtol=1e-12)


def test_adagrad_by_hand():
    # s = 0 + 16: w = 1 - 10 * 4 / (4 + 1) = -7; eps under the root would give 1 - 40 / sqrt(17)
    tx = DenseAdagrad(10, eps=1, initial_accumulator=0).build()
    grads, w = {"w": jnp.array([4.0])}, {"w": jnp.array([1.0])}
    updates, state = tx.update(grads, tx.init(w), w)
    assert optax.apply_updates(w, updates)["w"].tolist() == [-7]
    assert [x.tolist() for x in jax.tree.leaves(state)] == [[16]]


@pytest.mark.parametrize("optimizer", [DenseSgd, DenseAdagrad, DenseAdam])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be positive and finite"),
        ({"l2": -1.0}, "l2 is -1.0; it must be finite and not negative"),
        ({"weight_decay": math.inf}, "weight_decay is inf; it must be finite and not negative"),
        ({"learning_rate": 2.0, "weight_decay": 0.5}, "must be less than 1"),
    ],
)
def test_dense_settings_that_cannot_be(optimizer, settings, message):
    with pytest.raises(ConfigError, match=message):
        optimizer(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseSgd(momentum=1.0), "momentum is 1.0"),
        (lambda: DenseSgd(nesterov=True), "momentum is 0. Give momentum"),
        (lambda: DenseAdagrad(eps=0, initial_accumulator=0), "both 0"),
        (lambda: DenseAdam(eps=0), "eps is 0"),
        (lambda: DenseAdam(b2=1.0), "b2 is 1.0"),
        (lambda: TrainConfig(clip_norm=-1.0), "clip_norm is -1.0; it must be finite and not negative"),
        (lambda: TrainConfig(accumulate=0), "accumulate is 0; it must be at least 1"),
        (lambda: TrainConfig(batch_size=8, accumulate=9), "accumulate is 9, but batch_size is 8"),
    ],
)
def test_train_settings_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
