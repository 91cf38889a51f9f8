"""Handing rows out and gradients in, inside a host. Routing in two steps is read back in test_routing_host.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import mesh_of

from recjax.embedding.bind import bind
from recjax.embedding.layout import Group
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.routing.hierarchical import merge
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import BATCH_AXES, sharded

H, E, C, K, D = 2, 3, 5, 7, 3


def group_of(placement: str) -> Group:
    tables = (TableSpec("t", 40, D, Sgd()),)
    (group,) = bind(make_plan(placement, tables), tables, (FeatureSpec("f", "t"),), H * E, hosts=H).groups
    return group


@pytest.mark.parametrize("placement", ["row_wise", "column_wise", "grid"])
def test_rows_go_to_those_who_asked_and_gradients_come_back_summed(placement: str) -> None:
    """Whole numbers, which add up exactly. What comes back is by brute force the transpose of what went out."""
    group, N = group_of(placement), H * E
    rng = np.random.default_rng(0)
    M = group.num_peers * K
    inside = np.tile(M + np.arange(C, dtype=np.int32), (N, E, 1))
    for n, e in np.ndindex(N, E):
        used = rng.integers(0, C + 1)
        inside[n, e, :used] = np.sort(rng.choice(M, used, replace=False))
    if placement == "column_wise":  # all relays of a host have the same rows
        inside = np.repeat(inside.reshape(H, E, E, C)[:, :1], E, axis=1).reshape(N, E, C)
    W = group.width
    rows = rng.integers(-99, 99, (N, H, K, W)).astype(np.float32)
    # what devices get: (lists, C, columns), columns from the hosts one after the other
    blocks, V = (1, D) if placement == "row_wise" else (H, W)
    grads = rng.integers(-99, 99, (N, blocks, E, C, V)).astype(np.float32)

    def both(rows, inside, grads):
        got = group.sharding.from_relays(group, rows[0], inside[0])
        return got[None], group.sharding.to_relays(group, grads[0].reshape(got.shape), inside[0], K)[None]

    split = P(BATCH_AXES)
    mapped = jax.jit(jax.shard_map(both, mesh=mesh_of(N, H), in_specs=split, out_specs=split))
    placed = jax.device_put((rows, inside, grads), sharded(mesh_of(N, H), BATCH_AXES))
    got, sums = map(np.asarray, mapped(*placed))

    expected, back = np.zeros_like(grads), np.zeros_like(rows)
    for h, relay, e, c in np.ndindex(H, E, E, C):
        m, n = int(inside[h * E + relay, e, c]), h * E + e
        if m >= M:
            continue
        if placement == "row_wise":
            at = h * E + relay, m // K, m % K
            expected[n, 0, relay, c] = rows[at]
            back[at] += grads[n, 0, relay, c]
        else:
            for other in range(H):
                at = h * E + relay, other, m
                expected[n, other, relay, c] = rows[at]
                back[at] += grads[n, other, relay, c]
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    np.testing.assert_array_equal(sums, back)


def test_gradients_are_added_in_the_order_of_the_devices() -> None:
    """In float32 1 + 1e8 - 1e8 is 0, but backwards it is 1."""
    group, N = group_of("row_wise"), H * E
    inside = jnp.tile(jnp.arange(C, dtype=jnp.int32), (N, E, 1))  # all devices ask for the same rows
    value = jnp.tile(jnp.array([1, 1e8, -1e8]), H)
    grads = jnp.broadcast_to(value[:, None, None, None], (N, E, C, D))

    def summed(grads, inside):
        return group.sharding.to_relays(group, grads[0], inside[0], K)[None]

    split = P(BATCH_AXES)
    mapped = jax.jit(jax.shard_map(summed, mesh=mesh_of(N, H), in_specs=split, out_specs=split))
    placed = jax.device_put((grads, inside), sharded(mesh_of(N, H), BATCH_AXES))
    assert not np.asarray(mapped(*placed)).any()


def test_merging_by_hand() -> None:
    """Two hosts of three devices; keys are (device, bucket, slot), and R is 7 (40 rows over 6 devices)."""
    group = group_of("row_wise")
    assert (group.rows, group.owners, group.num_row_lists, group.num_peers) == (7, 6, 3, 2)
    # device 4 of host 1 has number 1 there: list 1 has the owners 1 and 4, so owner 4 is bucket 3
    assert [group.destination(o) for o in range(6)] == [0, 2, 4, 1, 3, 5]
    keys = [(0, 3, 2), (0, 3, 5), (1, 3, 2), (2, 0, 6), (3, 3, 2), (5, 3, 2), (5, 3, 4)]
    merged = merge(group, np.array([(n * 6 + b) * 7 + s for n, b, s in keys]), 6, 7)
    by_host = [(0, 0, 6), (0, 3, 2), (0, 3, 5), (1, 3, 2), (1, 3, 4)]
    assert merged.keys_M.tolist() == [(h * 6 + b) * 7 + s for h, b, s in by_host]
    assert merged.index_U.tolist() == [1, 2, 1, 0, 3, 3, 4]
    assert merged.counts.tolist() == [1, 0, 0, 2, 0, 0] + [0, 0, 0, 2, 0, 0]
