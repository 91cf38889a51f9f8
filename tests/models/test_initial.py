"""Initial weights are those of JAX's own initialiser, whatever the programs that draw them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.models.layers import normal


@pytest.mark.parametrize("shape", [(1,), (255,), (257,), (0, 4), (7, 16), (13, 512), (479, 255)])
def test_the_bits_are_those_of_a_draw_of_the_shape(shape):
    key = jax.random.fold_in(jax.random.key(3), len(shape))
    drawn, expected = normal(key, shape, 0.037), jax.nn.initializers.normal(0.037)(key, shape, jnp.float32)
    assert drawn.dtype == expected.dtype and drawn.shape == shape
    assert np.asarray(drawn).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("change", ["traced", "not partitionable"])
def test_so_they_are_where_a_longer_draw_would_differ_or_there_are_no_values(change):
    key, shape = jax.random.key(5), (3, 7)
    with jax.threefry_partitionable(change != "not partitionable"):
        expected = jax.nn.initializers.normal(2.0)(key, shape, jnp.float32)
        draw = functools.partial(normal, shape=shape, scale=2.0)
        np.testing.assert_allclose((jax.jit(draw) if change == "traced" else draw)(key), expected, rtol=1e-6)
