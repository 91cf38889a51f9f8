"""Exact search against a sort of all scores, with ties, items left out, and shares of any size."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of

from recjax.parallel.mesh import BATCH_AXES
from recjax.train.top_k import USERS, ItemSearch, make_index


def search(
    users: np.ndarray, vectors: np.ndarray, items: np.ndarray, out: np.ndarray, k: int, devices: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best items by the product, from vectors that come `size` at a time, spread over the devices."""
    mesh, local = mesh_of(devices), -(-size // devices)
    spread = NamedSharding(mesh, P(BATCH_AXES))

    def padded(x: np.ndarray, rows: int) -> jax.Array:
        return jax.device_put(np.concatenate([x, np.full((rows - len(x), x.shape[1]), 7, x.dtype)]), spread)

    parts = (padded(vectors[at : at + size], local * devices) for at in range(0, len(items), size))
    index = make_index(mesh, parts, items, size, local, out.shape[1])
    groups = []
    for start in range(0, len(users), USERS):
        of_group = users[start : start + USERS]
        who, item = np.nonzero(out[start : start + USERS])
        groups.append((padded(of_group, -(-USERS // devices) * devices), who, item))
    found = list(ItemSearch(index, k).best(groups))
    n = len(users)
    return np.concatenate([x for x, _ in found])[:n], np.concatenate([s for _, s in found])[:n]


def by_sort(users: np.ndarray, vectors: np.ndarray, items: np.ndarray, out: np.ndarray, k: int) -> np.ndarray:
    """The same by sorting: by score, and then by item."""
    lists = np.full((len(users), k), -1)
    for u, user in enumerate(users):
        ranked = sorted(
            (-float(user @ v), int(item)) for v, item in zip(vectors, items, strict=True) if not out[u, item]
        )
        best = [item for _, item in ranked[:k]]
        lists[u, : len(best)] = best
    return lists


@pytest.mark.full
@pytest.mark.parametrize(("count", "k", "size"), [(700, 20, 64), (2500, 30, 1000), (30, 40, 30)])
def test_the_lists_are_those_of_a_sort_on_any_mesh(count: int, k: int, size: int) -> None:
    """Vectors of small whole numbers: products are exact, and most scores have ties."""
    rng = np.random.default_rng(count)
    users, vectors = (rng.integers(-4, 5, (n, 4)).astype(np.float32) for n in (USERS + 41, count))
    items = np.sort(rng.choice(2 * count, count, replace=False))
    out = rng.uniform(size=(len(users), 2 * count + 3)) < 0.1
    truth = by_sort(users, vectors, items, out, k)
    for devices in (1, 3, 8):
        lists, scores = search(users, vectors, items, out, k, devices, size)
        np.testing.assert_array_equal(lists, truth)
        there = truth >= 0
        at = np.searchsorted(items, truth)
        expected = np.einsum("ue,uke->uk", users, vectors[np.minimum(at, count - 1)])
        np.testing.assert_array_equal(scores[there], expected[there])


@pytest.mark.full
def test_lists_of_real_numbers_are_the_same_on_one_and_eight_devices() -> None:
    rng = np.random.default_rng(0)
    users, vectors = (rng.normal(size=(n, 64)).astype(np.float32) for n in (USERS, 5000))
    none, items = np.zeros((len(users), 5003), bool), np.arange(5000)
    one, eight = (search(users, vectors, items, none, 50, devices, 1024) for devices in (1, 8))
    np.testing.assert_array_equal(one[0], eight[0])
    np.testing.assert_array_equal(one[1], eight[1])
