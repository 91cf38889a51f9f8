"""Sums of gradients of equal rows, and how fetched rows are pooled: by hand, and against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.embedding import segment_sums
from recjax.embedding.pooling import pool
from recjax.embedding.routing.routed import FeatureRouting
from recjax.embedding.segment_sums import coalesce
from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError

pytestmark = pytest.mark.light_compile

D = 3


jit_coalesce = functools.partial(jax.jit, static_argnums=(2, 3))(coalesce)


@functools.partial(jax.jit, static_argnums=(2,))
def jit_coalesce_by_segments(slots, grads, rows):
    with pytest.MonkeyPatch.context() as patch:  # while it is traced
        patch.setattr(segment_sums, "target_platform", lambda: "gpu")
        return coalesce(slots, grads, rows, slots.shape[0] + 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(1, 1), (9, 1000), (64, 5), (64, 1000)]), st.floats(0, 1), st.integers(0, 2**32))
@example((1, 1), 1.0, 0)
@example((64, 5), 1.0, 0)  # nothing but marks of "nothing here"
@example((64, 1000), 0.0, 0)  # mostly distinct
@example((64, 5), 0.0, 0)  # mostly duplicates
def test_coalesce_sums_equal_slots(sizes, empty, seed):
    M, rows = sizes
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, rows, M).astype(np.int32)
    slots[rng.random(M) < empty] = rows
    grads = rng.integers(-1000, 1000, (M, D)).astype(np.float32)  # whole numbers add up exactly in any order
    unique, sums = map(np.asarray, jit_coalesce(slots, grads, rows, 2))
    assert unique.dtype == np.int32 and unique.shape == (M,) and sums.shape == (M, D)
    assert (np.diff(unique) > 0).all()  # what the scatter is promised
    used = unique < rows
    np.testing.assert_array_equal(unique[used], np.unique(slots[slots < rows]))
    expected = np.zeros((rows + 1, D), np.float32)
    np.add.at(expected, slots, grads)
    np.testing.assert_array_equal(sums[used], expected[unique[used]])
    same, by_segments = jit_coalesce_by_segments(slots, grads, rows)
    np.testing.assert_array_equal(same, unique)
    np.testing.assert_array_equal(by_segments[used], sums[used])


def test_coalesce_adds_in_the_order_of_arrival():
    """A fixed order keeps repeated runs bit-identical; float32 sums of thousands of numbers show any other order."""
    rng = np.random.default_rng(0)
    slots, grads = rng.integers(0, 3, 4096).astype(np.int32), rng.normal(size=(4096, D)).astype(np.float32)
    expected = np.zeros((3, D), np.float32)
    np.add.at(expected, slots, grads)
    assert (expected != np.array([grads[slots == i][::-1].cumsum(axis=0)[-1] for i in range(3)])).any()
    np.testing.assert_array_equal(np.asarray(jit_coalesce(slots, grads, 9, 2)[1])[:3], expected)


def test_a_single_list_is_coalesced_already():
    slots = np.array([1, 4, 7, 9, 9], np.int32)
    grads = np.arange(5 * D, dtype=np.float32).reshape(5, D) * (slots < 9)[:, None]
    unique, sums = map(np.asarray, jit_coalesce(slots, grads, 9, 1))
    assert unique.tolist() == [1, 4, 7, 12, 13]
    np.testing.assert_array_equal(sums, grads)


def test_slots_beyond_the_buffer_stay_within_int32():
    slots, grads = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, D), jnp.float32)
    with pytest.raises(ConfigError, match=r"2,147,483,632 rows .* 16 row gradients .*at most 2,147,483,647 \(int32\)"):
        jax.eval_shape(lambda s, g: coalesce(s, g, 2**31 - 16, 2), slots, grads)
    jax.eval_shape(lambda s, g: coalesce(s, g, 2**31 - 17, 2), slots, grads)


def pooled_alone(feature, rows, routing, samples):
    return pool((feature,), rows, {feature.name: routing}, samples)[feature.name]


def test_an_empty_bag_pools_to_zeros_even_beside_nan():
    rows = jnp.asarray([[1.0, 2.0], [np.nan, np.nan]])
    jagged = FeatureRouting(np.array([0, 0, 2, 2]), None, np.array([0, 0, 3, 3]))  # bags of 2, 0 and 0 ids
    assert pooled_alone(FeatureSpec("f", "t", None), rows, jagged, 3).tolist() == [[2, 4], [0, 0], [0, 0]]
    fixed = FeatureRouting(np.array([[0], [2]]), np.array([[3.0], [0.0]], np.float32), None)
    assert pooled_alone(FeatureSpec("f", "t", 1), rows, fixed, 2).tolist() == [[3, 6], [0, 0]]


def test_a_feature_that_is_not_pooled_keeps_its_rows_apart():
    rows = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    routing = FeatureRouting(np.array([1, 0, 1, 2]), None, np.array([0, 0, 2, 3]))  # bags of 2, 0 and 1 ids; one more
    elements = pooled_alone(FeatureSpec("f", "t", None, "none"), rows, routing, 3)
    assert elements.rows_LxD.tolist() == [[3, 4], [1, 2], [3, 4], [0, 0]]
    assert elements.segments_L.tolist() == [0, 0, 2, 3]
