"""One device's block of a group's buffer: what the steps of a sharding hand on, and how rows are read and written.

All functions run inside `jax.shard_map` over BATCH_AXES.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recjax import kernels
from recjax.embedding.exchange import gather_rows
from recjax.embedding.layout import Group
from recjax.embedding.lines import get_rows
from recjax.embedding.low_precision import from_storage, to_storage
from recjax.embedding.optim import Slots
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.routing.sorting import in_order
from recjax.embedding.segment_sums import by_segments, segment_sums
from recjax.embedding.spec import MAX_ROWS
from recjax.errors import ConfigError
from recjax.parallel.mesh import ACROSS_GROUPS


def gather_local(group: Group, table_RxW: jax.Array, asked: jax.Array, mean: bool) -> jax.Array:
    """The rows of this device's part that it is asked for, [*asked.shape, W]; see `Sharding.fetch` for `mean`."""
    mean = mean and group.independent
    if mean:
        with jax.named_scope("replica_exchange"):
            asked = jax.lax.all_gather(asked, ACROSS_GROUPS)
    with jax.named_scope("gather"):
        if group.lines is None and kernels.available(
            table_RxW.dtype
        ):  # which fetches far rows from memory before their turn comes
            rows = kernels.bags(table_RxW, asked.reshape(-1, 1)).reshape(*asked.shape, group.width)
        else:
            rows = from_storage(get_rows(group, table_RxW, asked))
    if mean:
        with jax.named_scope("replica_exchange"):
            wide = rows.astype(jnp.float32) if rows.dtype == jnp.bfloat16 else rows
            rows = jax.lax.psum_scatter(wide, ACROSS_GROUPS) / group.replicas
    return rows


def asked_rows(routing: GroupRouting, two_step: bool) -> tuple[jax.Array, jax.Array | None]:
    """This device's part of a group's routing: the slots that it asks for, and what it hands out as a relay."""
    return routing.slots_NxOxC[0], routing.inside_NxExC[0] if two_step else None


def summed_over_devices(group: Group, residuals: FetchResiduals, arrived: jax.Array) -> SparseGradient:
    """The gradient of this device's rows, from what the devices of a replica group sent for each slot asked for."""
    slots, summed, further = residuals.slots_NxC, residuals.summed, residuals.further
    with jax.named_scope("sparse_update"):
        # Without dedup a list may hold a slot twice; the slots of a mapped group may come in any order, unless it is a
        # cache.
        ascending = group.dedup and (group.cached or not group.mapped)
        lists = len(slots) if ascending else slots.size  # of one entry each
        slots_M, arrived = slots.reshape(-1), arrived.reshape(-1, group.width)
        if further is not None:
            slots_M, arrived = jnp.concatenate([slots_M, further.touched]), jnp.concatenate([arrived, further.sums])
            lists, summed = lists + 1, summed + len(further.touched)
        gradient = coalesce(slots_M, arrived, group.rows, lists, group.atomics)
    if not group.synchronous:
        return gradient
    touched, sums = gradient
    with jax.named_scope("replica_exchange"):  # all that is in use stands before `summed`
        touched = jax.lax.all_gather(touched[:summed], ACROSS_GROUPS, to="invarying")
        sums = gather_rows(sums[:summed], group.exchange.backward, ACROSS_GROUPS)
    with jax.named_scope("sparse_update"):
        touched = jnp.minimum(touched, group.rows)
        return coalesce(
            touched.reshape(-1), sums.reshape(-1, group.width), group.rows, lists=len(touched), atomics=group.atomics
        )


def write_all(
    group: Group,
    table_RxW: jax.Array,
    slots_R: Slots,
    proposed: Proposed,
    context: UpdateContext,
    changed_R: jax.Array,
    homes_R: jax.Array,
) -> tuple[jax.Array, Slots]:
    """The rows of a table and their slots with the proposed values of those in the mask `changed_R`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [R, ...]
        return jnp.where(changed_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    new_RxW = to_storage(group, proposed.rows, homes_R, context.seed, context.step, table_RxW.dtype)
    return choose(new_RxW, table_RxW), {k: choose(v, slots_R[k]) for k, v in proposed.slots.items()}


def in_place(group: Group, table_RxW: jax.Array) -> bool:
    """Returns whether kernels may work on a table itself: they pass once over the rows in question, and copy none."""
    return group.lines is None and table_RxW.dtype == jnp.float32 and kernels.available(jnp.float32)


def coalesce(slots_M: jax.Array, grads_MxD: jax.Array, rows: int, lists: int, atomics: bool = False) -> SparseGradient:
    """Sums the gradients of equal slots.

    Sorting first keeps the order of the additions fixed, so that repeated runs agree to the bit, and
    lets the update scatter to unique, sorted slots. On a GPU that takes more: see `segment_sums.py`.

    Args:
      slots_M: int32; `rows` (out of range) marks an entry that holds nothing.
      grads_MxD: the entries' gradients.
      rows: R of the buffer.
      lists: of how many lists `slots_M` consists, each of which holds a slot once, ascending, unused entries last.
      atomics: whether a GPU may add up by atomic operations, in any order.

    Returns:
      unique slots [M], strictly ascending, those not in use at R or beyond; sums [M, D] beside them.

    Raises:
      ConfigError: R + M exceeds int32, so that marks beyond R would wrap around to real rows.
    """
    M = slots_M.shape[0]
    if rows + M > MAX_ROWS:
        raise ConfigError(
            f"a device holds {rows:,} rows of one group and receives up to {M:,} row gradients a step; together they "
            f"may be at most {MAX_ROWS:,} (int32). Use more devices or a smaller batch."
        )
    unused_M = rows + jnp.arange(M, dtype=jnp.int32)
    if lists == 1:
        return SparseGradient(jnp.where(slots_M < rows, slots_M, unused_M), grads_MxD)
    sorted_M, order_M = in_order(slots_M)
    starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
    segment_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
    unique_M = unused_M.at[segment_M].set(sorted_M, indices_are_sorted=True)
    if not by_segments(atomics):
        sums_MxD = jax.ops.segment_sum(grads_MxD[order_M], segment_M, M, indices_are_sorted=True)
        return SparseGradient(unique_M, sums_MxD)
    # A slot is in each list once; of the entries that hold nothing there may be more, whose sum nobody reads.
    return SparseGradient(unique_M, segment_sums(grads_MxD, order_M, segment_M, None, M, most=lists))
