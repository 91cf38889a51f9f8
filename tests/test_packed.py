"""Arrays that travel to the devices as one of each dtype."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import mesh_of

from recjax.parallel import packed
from recjax.parallel.mesh import sharded

DTYPES = (np.int32, np.float32, np.bool_)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 3)), max_size=6)
)
def test_they_arrive_as_each_by_itself_would(leaves: list[Any]) -> None:
    mesh, rng = mesh_of(4, hosts=2), np.random.default_rng(0)
    made = [rng.integers(-9, 9, (4 * rows, *further)).astype(dtype) for dtype, further, rows in leaves]
    tree = {"first": made[:2], "rest": tuple(made[2:])}
    jax.tree.map(equal, packed.put_together(tree, mesh), jax.device_put(tree, sharded(mesh)))


def equal(found: jax.Array, wanted: jax.Array) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert not found.size or found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_infinities_and_nan_keep_their_bits() -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x80000000], np.uint32)
    x, _ = packed.put_together([bits.view(np.float32), np.zeros(4, np.float32)], mesh_of(2))
    np.testing.assert_array_equal(np.asarray(x).view(np.uint32), bits)


def test_a_dtype_is_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(packed, "put_share", lambda x, mesh: put.append(x) or jax.device_put(x, sharded(mesh)))
    packed.put_together([np.zeros((4, k), dtype) for k in (1, 2, 3) for dtype in (np.int32, np.float32)], mesh_of(2))
    assert [(x.dtype, x.shape) for x in put] == [(np.int32, (2, 12)), (np.float32, (2, 12))]


def test_large_arrays_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(packed, "put_share", lambda x, mesh: put.append(x) or jax.device_put(x, sharded(mesh)))
    large = np.zeros((4, packed.SMALL_BYTES // 16 + 1), np.float32)
    packed.put_together([np.zeros(4, np.float32), large, np.zeros((2, 3), np.float32)], mesh_of(2))
    assert [x.shape for x in put] == [large.shape, (2, 5)]
