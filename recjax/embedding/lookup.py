"""What one device does with its part of the tables: fetch rows, pool them, send gradients, update.

All functions run inside `jax.shard_map` over MODEL_AXES and see one device's block. The collectives
per group and step are, for row-wise tables:

  id_exchange    all-to-all of the slots asked for      O * C * 4 bytes a device
  row_exchange   all-to-all of the rows                 O * C * D * itemsize
  grad_exchange  all-to-all of the row gradients        O * C * D * itemsize

and for data-parallel (replicated) tables one all-reduce of [R, D + 1] in grad_exchange: the summed
gradient, and how many devices touched each row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recjax.embedding.optim import At, Slots
from recjax.embedding.plan import Group
from recjax.embedding.route import FeatureRouting, GroupRouting
from recjax.embedding.spec import MAX_ROWS, FeatureSpec
from recjax.errors import ConfigError
from recjax.mesh import MODEL_AXES


def _all_to_all(x_OxCx: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x_OxCx, MODEL_AXES, split_axis=0, concat_axis=0, tiled=True)


def fetch(group: Group, table_RxD: jax.Array, routing: GroupRouting) -> tuple[jax.Array, jax.Array]:
    """Brings the rows that this device's samples need.

    Args:
      group: the table group.
      table_RxD: this device's part of the group's buffer.
      routing: with this device's slots [1, O, C].

    Returns:
      rows [O * C, D], zeros where nothing was asked for, and the slots [O, C] of `table_RxD` that
      the other devices asked of this one (its own slots if the group is replicated).
    """
    slots_OxC = routing.slots_NxOxC[0]
    if group.placement == "row_wise":
        with jax.named_scope("id_exchange"):
            slots_OxC = _all_to_all(slots_OxC)
    with jax.named_scope("gather"):
        rows_OxCxD = table_RxD.at[slots_OxC].get(mode="fill", fill_value=0)
    if group.placement == "row_wise":
        with jax.named_scope("row_exchange"):
            rows_OxCxD = _all_to_all(rows_OxCxD)
    return rows_OxCxD.reshape(-1, group.dim), slots_OxC


def pool(feature: FeatureSpec, rows_UxD: jax.Array, routing: FeatureRouting, samples: int) -> jax.Array:
    """Pools one feature's bags from the fetched rows: [b, D], zeros for an empty bag. Differentiable."""
    picked = rows_UxD.at[routing.inverse].get(mode="fill", fill_value=0)
    if routing.weights is not None:
        picked = picked * routing.weights[..., None]
    if feature.bag is not None:
        return picked.sum(axis=1) if feature.bag > 1 else picked[:, 0]
    return jax.ops.segment_sum(picked, routing.segments, samples, indices_are_sorted=False)


def coalesce(slots_M: jax.Array, grads_MxD: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of equal slots.

    Sorting first keeps the order of the additions fixed, so that repeated runs agree to the bit, and
    lets the update scatter to unique, sorted slots.

    Args:
      slots_M: int32; `rows` (out of range) marks an entry that holds nothing.
      grads_MxD: the entries' gradients.
      rows: R of the buffer.

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
    order_M = jnp.argsort(slots_M, stable=True)
    sorted_M = slots_M[order_M]
    starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
    segment_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
    sums_MxD = jax.ops.segment_sum(grads_MxD[order_M], segment_M, M, indices_are_sorted=True)
    unused_M = rows + jnp.arange(M, dtype=jnp.int32)
    unique_M = unused_M.at[segment_M].set(sorted_M, indices_are_sorted=True)
    return unique_M, sums_MxD


def send_gradients(group: Group, slots_OxC: jax.Array, grads_UxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Brings every row's gradient to where the row lives, summed over the global batch.

    Args:
      group: the table group.
      slots_OxC: as `fetch` returned them.
      grads_UxD: gradients of the fetched rows, [O * C, D].

    Returns:
      Row-wise: unique slots [M] and sums [M, D] of this device's rows.
      Data-parallel: mask of touched rows [R] and dense sums [R, D]; their size is the replicated
      table's, which the plan keeps small.
    """
    if group.placement == "row_wise":
        with jax.named_scope("grad_exchange"):
            arrived = _all_to_all(grads_UxD.reshape(*slots_OxC.shape, group.dim))
        with jax.named_scope("sparse_update"):
            return coalesce(slots_OxC.reshape(-1), arrived.reshape(-1, group.dim), group.rows)
    with jax.named_scope("grad_exchange"):
        marked_UxE = jnp.concatenate([grads_UxD, jnp.ones_like(grads_UxD[:, :1])], axis=1)
        local_RxE = jnp.zeros((group.rows, group.dim + 1), grads_UxD.dtype)
        local_RxE = local_RxE.at[slots_OxC.reshape(-1)].add(marked_UxE, mode="drop")
        sums_RxE = jax.lax.psum(local_RxE, MODEL_AXES)
        return sums_RxE[:, -1] > 0, sums_RxE[:, :-1]


def update(
    group: Group,
    table_RxD: jax.Array,
    slots_R: Slots,
    touched: jax.Array,
    grads: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    ok: jax.Array,
) -> tuple[jax.Array, Slots]:
    """Applies one exact optimizer update to the touched rows, or none at all unless `ok`.

    An optimizer with `every_row` updates all rows; its tables are small enough for a dense gradient.

    Args:
      group: the table group.
      table_RxD: this device's part of the buffer; donated by the step, written in place.
      slots_R: optimizer slots, [R, ...] each.
      touched: unique slots [M], or a mask [R] for a replicated table, as `send_gradients` returned it.
      grads: the gradients beside it, scaled to the mean loss.
      step: int32, steps done before this one.
      rate: the schedule's factor on the learning rate.
      ok: bool, whether the global step is finite.
    """
    with jax.named_scope("sparse_update"):
        at = At(step, rate, lambda x_UxD: jnp.mean(x_UxD, axis=-1))
        every_row: bool = group.optimizer.every_row
        if every_row and group.placement == "row_wise":
            grads = (
                jnp.zeros_like(table_RxD)
                .at[touched]
                .set(grads, mode="drop", unique_indices=True, indices_are_sorted=True)
            )
        if every_row or group.placement == "data_parallel":
            changed_R = jnp.broadcast_to(ok, group.rows) if every_row else touched & ok

            def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [R, ...]
                return jnp.where(changed_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            new_RxD, new_R = group.optimizer.apply(table_RxD, slots_R, grads, at)
            return choose(new_RxD, table_RxD), {k: choose(v, slots_R[k]) for k, v in new_R.items()}

        def gather(x: jax.Array) -> jax.Array:
            return x.at[touched].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)

        def scatter(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[target_M].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

        # A step that is not ok aims every write past the end, which changes nothing and stays in place.
        target_M = jnp.where(ok, touched, group.rows + jnp.arange(touched.shape[0], dtype=jnp.int32))
        rows_MxD, old_M = gather(table_RxD), {k: gather(v) for k, v in slots_R.items()}
        new_MxD, new_M = group.optimizer.apply(rows_MxD, old_M, grads, at)
        return scatter(table_RxD, new_MxD), {k: scatter(slots_R[k], v) for k, v in new_M.items()}
