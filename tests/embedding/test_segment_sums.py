"""Sums of sorted segments against NumPy, and that no scatter adds floats up where a GPU is meant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.problems import equations, mesh_of

from recjax.embedding import segment_sums
from recjax.embedding.pooling import sum_bags
from recjax.embedding.segment_sums import PIECE, coalesce, sum_sorted
from recjax.kernels import target_platform

pytestmark = pytest.mark.light_compile

D = 3


@functools.partial(jax.jit, static_argnums=(2, 3))
def summed(segment_L, values_LxD, segments, most):
    return sum_sorted(segment_L, segments, lambda at: values_LxD.at[at].get(mode="fill", fill_value=0), most)


def check(counts, nothing, most=None):
    """Segments of these many entries, and some that belong to none."""
    rng = np.random.default_rng(sum(counts) + nothing)
    segments = len(counts)
    segment_L = np.repeat(np.arange(segments + 2), [*counts, nothing - nothing // 2, nothing // 2]).astype(np.int32)
    values = rng.integers(-1000, 1000, (len(segment_L), D)).astype(np.float32)  # whole numbers add up exactly
    expected = np.zeros((segments + 2, D), np.float32)
    np.add.at(expected, segment_L, values)
    found = summed(segment_L, values, segments, most)
    np.testing.assert_array_equal(found, expected[:segments])


LENGTHS = st.sampled_from([0, 1, 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 3, PIECE**2, PIECE**2 + 1])
SIZES = (37, 131, 263, 523, 1031, 1601)  # of all entries; a program is compiled for each


@pytest.mark.full
@settings(max_examples=25)
@given(st.lists(LENGTHS, min_size=1, max_size=6), st.sampled_from([1, 2, 40]))
@example([PIECE**3 + 5, 0, 1], 3)  # three levels
@example([0, 0], 1)
def test_sums_are_those_of_numpy(counts, nothing):
    """Empty segments and entries that belong to none make up for the difference to a few shapes."""
    counts = counts + [0] * ((3 if len(counts) <= 3 else 6) - len(counts))
    check(counts, next((size - sum(counts) for size in SIZES if size >= sum(counts) + nothing), nothing))


@pytest.mark.parametrize("shift", range(PIECE + 1))
def test_long_segments_that_start_anywhere(shift):
    """Further pieces have places of their own wherever a segment starts, and beside others' pieces."""
    check([shift, PIECE + 1, PIECE * (PIECE + 1), 2 * PIECE + 1, PIECE + 1 + (PIECE - shift)], 1)


def test_a_bound_on_the_entries_saves_levels():
    counts = [3, 4, 0, 4, 1]
    check(counts, 20, most=4)  # of those that belong to none there may be more

    def gathers(most):
        segment_L = jnp.zeros(4096, jnp.int32)
        jaxpr = jax.make_jaxpr(lambda s, v: summed(s, v, 8, most))(segment_L, jnp.zeros((4096, D)))
        return sum(equation.primitive.name == "gather" for equation in equations(jaxpr.jaxpr))

    assert gathers(4) == gathers(PIECE) < gathers(PIECE + 1) < gathers(None)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(segment_sums, "target_platform", lambda: "gpu")


def float_scatters(function, *arguments):
    found = [e for e in equations(jax.make_jaxpr(function)(*arguments).jaxpr) if e.primitive.name == "scatter-add"]
    return [e for e in found if e.outvars[0].aval.dtype == jnp.float32 and not e.params["unique_indices"]]


def gradient(rows, bags, upstream, atomics=False):
    return jax.vjp(lambda r: sum_bags(r, bags, atomics), rows)[1](upstream)[0]


def test_on_a_gpu_no_scatter_adds_floats_up_unless_it_may(as_on_a_gpu):
    rows, slots = jnp.zeros((9, D)), jnp.array([1, 5, 9, 1, 9], jnp.int32)
    bags, upstream = (
        ((jnp.zeros((4, 3), jnp.int32), None), (jnp.zeros((4, 1), jnp.int32), None)),
        (jnp.zeros((4, D)),) * 2,
    )
    assert not float_scatters(gradient, rows, bags, upstream)
    assert float_scatters(functools.partial(gradient, atomics=True), rows, bags, upstream)
    assert not float_scatters(lambda s, g: coalesce(s, g, 9, 2), slots, jnp.zeros((5, D)))
    assert float_scatters(lambda s, g: coalesce(s, g, 9, 2, atomics=True), slots, jnp.zeros((5, D)))


def test_on_a_cpu_scatters_are_in_order_already():
    bags, upstream = ((jnp.zeros((4, 3), jnp.int32), None),), (jnp.zeros((4, D)),)
    assert float_scatters(gradient, jnp.zeros((9, D)), bags, upstream)


def test_the_platform_is_that_of_the_mesh(monkeypatch):
    """Whatever JAX's default back end is."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    seen = []

    def body(x):
        seen.append(target_platform())
        return x

    spec = jax.sharding.PartitionSpec()
    jax.eval_shape(jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec), jnp.zeros(3))
    assert (seen, target_platform()) == (["cpu"], "tpu")
