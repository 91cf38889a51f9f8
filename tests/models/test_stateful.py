"""BatchNorm and Dropout by themselves: closed forms, shares, and what happens outside of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of

from recjax.errors import ConfigError
from recjax.models import stateful
from recjax.models.stateful import BatchNorm, Dropout, number_dropouts, sum_over_batch
from recjax.parallel.mesh import BATCH_AXES
from recjax.train import module


def on_mesh(call: Any, x: Any, weights: Any, devices: int = 1, step: int = 0, seed: int = 0) -> Any:
    """`call` of each device's samples, as a step calls a module."""

    def local(x: Any, weights: Any) -> Any:
        with stateful.seeing(stateful.Step(seed, jnp.int32(step)).samples(weights)):
            return call(x)

    specs = (P(BATCH_AXES), P(BATCH_AXES))
    return jax.jit(jax.shard_map(local, mesh=mesh_of(devices), in_specs=specs, out_specs=P(BATCH_AXES)))(x, weights)


def test_batch_norm_by_hand() -> None:
    """Two samples that count, of 1 and 3: mean 2, variance 1, unbiased 2; a third has no weight."""

    def call(x: Any) -> Any:
        norm = BatchNorm(1, decay=0.75, epsilon=3.0)
        y = norm(x)
        return jnp.concatenate(
            [y, jnp.broadcast_to(norm.mean[...], y.shape), jnp.broadcast_to(norm.var[...], y.shape)], 1
        )

    found = on_mesh(call, jnp.array([[1.0], [3.0], [100.0]]), jnp.array([1.0, 2.0, 0.0]))
    np.testing.assert_allclose(found[:, 0], [-0.5, 0.5, 49.0], rtol=1e-6)
    np.testing.assert_allclose(found[0, 1:], [0.25 * 2, 0.75 * 1 + 0.25 * 2], rtol=1e-6)


def test_batch_norm_outside_of_a_step_takes_its_running_statistics() -> None:
    norm = BatchNorm(2, epsilon=0.0)
    norm.mean[...], norm.var[...], norm.scale[...] = jnp.array([1.0, 2.0]), jnp.array([4.0, 9.0]), jnp.array([2.0, 3.0])
    np.testing.assert_allclose(norm(jnp.array([[3.0, 5.0]])), [[2.0, 3.0]], rtol=1e-6)
    np.testing.assert_array_equal(norm.mean[...], [1.0, 2.0])
    assert norm(jnp.ones((2, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_dropout_drops_a_share_and_keeps_the_mean() -> None:
    x = jnp.ones((4000, 16))
    found = np.asarray(on_mesh(Dropout(0.25), x, jnp.ones(4000)))
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.75)}
    dropped = found == 0
    assert dropped.mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / dropped.size) ** 0.5)
    # No two samples, and no two places, go together.
    for columns in (dropped[:, 0] ^ dropped[:, 1], dropped[:-1, 0] ^ dropped[1:, 0]):
        assert columns.mean() == pytest.approx(2 * 0.25 * 0.75, abs=4 * (0.375 * 0.625 / len(columns)) ** 0.5)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_dropout_is_the_same_on_any_mesh(devices: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(24, 5)), jnp.float32)
    alone = on_mesh(Dropout(0.5), x, jnp.ones(24), step=3)
    np.testing.assert_array_equal(on_mesh(Dropout(0.5), x, jnp.ones(24), devices, step=3), alone)


def test_steps_seeds_and_layers_each_draw_anew() -> None:
    model = nnx.Dict(a=Dropout(0.5), b=Dropout(0.5))
    number_dropouts(model)
    x = jnp.ones((64, 8))
    found = [
        on_mesh(layer, x, jnp.ones(64), step=step, seed=seed)
        for layer, step, seed in ((model.a, 0, 0), (model.b, 0, 0), (model.a, 1, 0), (model.a, 0, 1), (model.a, 0, 0))
    ]
    assert (found[0] == found[4]).all()
    for other in found[1:4]:
        assert 0.3 < float((found[0] == other).mean()) < 0.7


def test_outside_of_a_step_nothing_is_dropped() -> None:
    x = jnp.ones((3, 4))
    assert Dropout(0.5)(x) is x
    for rate in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="dropout is"):
            Dropout(rate)


def test_sums_over_the_batch() -> None:
    x, weights = jnp.arange(12.0).reshape(6, 2), jnp.array([[1.0, 0], [0, 0], [1, 1], [0, 2], [0, 0], [1, 0]])
    np.testing.assert_array_equal(sum_over_batch(x), x.sum(axis=0))
    found = on_mesh(lambda x: jnp.broadcast_to(sum_over_batch(x)[None], x.shape), x, weights, 3)
    np.testing.assert_array_equal(found, np.broadcast_to(np.asarray(x)[[0, 2, 3, 5]].sum(axis=0), (6, 2)))


class Counting(nnx.Module):
    """A module of somebody else that keeps the mean of what it saw, in a good way and a bad one."""

    def __init__(self, over_batch: bool) -> None:
        self.w, self.seen, self.over_batch = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.zeros(2)), over_batch

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, Any]) -> jax.Array:
        self.seen[...] = sum_over_batch(dense_BxK) if self.over_batch else dense_BxK.sum(axis=0)
        return dense_BxK @ self.w[...]


def test_state_that_differs_between_devices_is_refused() -> None:
    x = jnp.ones((6, 2))
    on_mesh(lambda x: module.outputs(Counting(True), x, {}), x, jnp.ones(6), 2)
    with pytest.raises(ConfigError, match=r"assigns to model\.seen\S* what differs between devices.*sum_over_batch"):
        on_mesh(lambda x: module.outputs(Counting(False), x, {}), x, jnp.ones(6), 2)
