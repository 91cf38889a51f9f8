"""Arrays that travel to the devices as one of each dtype."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import mesh_of

from recjax.parallel import packed
from recjax.parallel.mesh import sharded

pytestmark = pytest.mark.light_compile

DTYPES = (np.int32, np.float32, np.bool_)
SHAPES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 3))


@pytest.mark.full
@settings(max_examples=12)
@given(st.lists(SHAPES, max_size=8), st.integers(1, 3))
def test_they_arrive_as_each_by_itself_would(leaves: list[Any], least: int) -> None:
    mesh, rng = mesh_of(4, hosts=2), np.random.default_rng(0)
    made = [rng.integers(-9, 9, (4 * rows, *further)).astype(dtype) for dtype, further, rows in leaves]
    tree = {"first": made[:2], "rest": tuple(made[2:])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "LEAST", least)
        found = packed.put_together(tree, mesh)
    jax.tree.map(equal, found, jax.device_put(tree, sharded(mesh)))


def equal(found: jax.Array, wanted: jax.Array) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert not found.size or found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_infinities_and_nan_keep_their_bits() -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x80000000], np.uint32)
    found = packed.put_together([bits.view(np.float32)] * packed.LEAST, mesh_of(2))
    for x in found:
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), bits)


def test_small_ones_of_a_dtype_are_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []

    def put_share(arrays: Any, mesh: Any) -> Any:
        put.extend(jax.tree.leaves(arrays))
        return jax.device_put(arrays, sharded(mesh))

    monkeypatch.setattr(packed, "put_share", put_share)
    large = np.zeros((4, packed.SMALL_BYTES // 16 + 1), np.float32)
    many, few = packed.LEAST, packed.LEAST - 1
    floats, integers = [np.zeros((4, k), np.float32) for k in range(1, many + 1)], [np.zeros(2, np.int32)] * few
    packed.put_together([*floats, large, *integers], mesh_of(2))
    assert [x.shape for x in put] == [large.shape, *[(2,)] * few, (2, many * (many + 1))]
