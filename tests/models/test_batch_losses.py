"""Losses over the batch against NumPy in float64, and gradients against differences; on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import equations, mesh_of

from recjax.models.batch_losses import BatchSoftmax, Bpr, CosineContrastive, Pairs
from recjax.parallel.mesh import BATCH_AXES

B, E = 24, 5
LOSSES = [
    BatchSoftmax(temperature=0.3),
    BatchSoftmax(temperature=2.0, log_q=False),
    Bpr(),
    CosineContrastive(margin=0.1, weight=7.0),
]


def make_pairs(seed: int = 0) -> dict[str, np.ndarray]:
    """Users, items, weights of which some are 0, ids of which some are equal, and logarithms of shares."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 9, B).astype(np.int32)
    vectors = rng.normal(size=(9, E))
    weights = rng.uniform(0.5, 2, B) * (rng.uniform(size=B) > 0.2)
    return {
        "user": rng.normal(size=(B, E)),
        "item": vectors[ids],
        "weights": weights,
        "ids": ids,
        "log_q": np.log(rng.dirichlet(np.ones(9)))[ids],
    }


def by_hand(loss: Any, pairs: dict[str, np.ndarray]) -> float:
    """The sum of weight * loss, a pair at a time, as the formulas have it."""
    user, item, weights, ids, log_q = (pairs[name] for name in ("user", "item", "weights", "ids", "log_q"))
    total = 0.0
    for i in range(B):
        if weights[i] == 0:
            continue
        others = [j for j in range(B) if weights[j] > 0 and ids[j] != ids[i]]
        own, against = user[i] @ item[i], np.array([user[i] @ item[j] for j in others])
        if isinstance(loss, BatchSoftmax):
            shift = log_q if loss.log_q else np.zeros(B)
            logits = np.array([own / loss.temperature - shift[i], *(against / loss.temperature - shift[others])])
            value = np.log(np.exp(logits).sum()) - logits[0]
        elif isinstance(loss, Bpr):
            value = np.mean(-np.log(1 / (1 + np.exp(-(own - against)))))
        else:
            value = 1 - own + loss.weight * np.mean(np.maximum(0, against - loss.margin))
        total += weights[i] * value
    return float(total)


def on_mesh(
    loss: Any, pairs: dict[str, np.ndarray], devices: int, **options: Any
) -> tuple[float, np.ndarray, np.ndarray]:
    """The sum over all devices, and its gradients by users and items."""

    def local(user: Any, item: Any, weights: Any, ids: Any, log_q: Any) -> Any:
        def of(user: Any, item: Any) -> Any:
            return loss.sum_losses(Pairs(user, item, weights, ids, log_q, **options))

        value, gradients = jax.value_and_grad(of, argnums=(0, 1))(user, item)
        return jax.lax.psum(value, BATCH_AXES), *gradients

    spread = P(BATCH_AXES)
    step = jax.shard_map(local, mesh=mesh_of(devices), in_specs=(spread,) * 5, out_specs=(P(), spread, spread))
    value, user, item = jax.jit(step)(*pairs.values())
    return float(value), np.asarray(user), np.asarray(item)


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_the_loss_and_its_gradients_are_those_of_the_formula(loss: Any, devices: int) -> None:
    with jax.enable_x64(True):
        pairs = make_pairs()
        value, *gradients = on_mesh(loss, pairs, devices)
    assert value == pytest.approx(by_hand(loss, pairs), rel=1e-12)
    rng = np.random.default_rng(1)
    for name, gradient in zip(("user", "item"), gradients, strict=True):
        for i, e in zip(rng.integers(0, B, 8), rng.integers(0, E, 8), strict=True):
            ends = []
            for change in (1e-6, -1e-6):
                moved = pairs[name].copy()
                moved[i, e] += change
                ends.append(by_hand(loss, pairs | {name: moved}))
            assert gradient[i, e] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_blocks_of_users_change_nothing_and_bound_the_scores(loss: Any) -> None:
    with jax.enable_x64(True):
        pairs = make_pairs(3)
        whole = on_mesh(loss, pairs, 2)
        few = {"scores_at_once": 5 * B // 2}
        blocks = on_mesh(loss, pairs, 2, **few)
        spread = P(BATCH_AXES)
        local = jax.grad(lambda u, v, w, i, q: loss.sum_losses(Pairs(u, v, w, i, q, **few)))
        mapped = jax.shard_map(local, mesh=mesh_of(2), in_specs=(spread,) * 5, out_specs=spread)
        sizes = [v.aval.size for e in equations(jax.make_jaxpr(mapped)(*pairs.values()).jaxpr) for v in e.outvars]
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert max(sizes) < B * B // 2


def test_a_pair_without_weight_counts_neither_as_pair_nor_as_candidate() -> None:
    """Of two pairs one weighs 0: nothing is left to tell the other from."""
    pairs = {name: x[:2] for name, x in make_pairs().items()}
    pairs |= {"weights": np.array([1.0, 0.0]), "ids": np.array([0, 1], np.int32)}
    value, user, item = on_mesh(BatchSoftmax(), {name: jnp.asarray(x) for name, x in pairs.items()}, 1)
    assert value == 0
    assert not user.any() and not item.any()
