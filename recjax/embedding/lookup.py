"""What one device does with its part of the tables: fetch rows, send gradients, update.

All functions run inside `jax.shard_map` over BATCH_AXES and see one device's block. N are the devices of one replica
group, within which all exchanges stay but one. The collectives per group and step are, for row-wise and table-wise
tables, of which each device holds some rows:

  id_exchange    all-to-all of the slots asked for      O * C * 4 bytes a device
  row_exchange   all-to-all of the rows                 O * C * D * itemsize
  grad_exchange  all-to-all of the row gradients        O * C * D * itemsize

for column-wise tables, of which each device holds ceil(D / N) columns W of every row:

  id_exchange    all-gather of the slots asked for      N * C * 4 bytes a device
  row_exchange   all-to-all of the columns              N * C * W * itemsize
  grad_exchange  all-to-all of the columns' gradients   N * C * W * itemsize
  sparse_update  all-reduce of [N * C], only if the optimizer asks for means over whole rows

and for data-parallel (replicated) tables one all-reduce of [R, D + 1] in grad_exchange: the summed
gradient, and how many devices touched each row. Only distinct rows travel, in both directions.

On H hosts of E devices each, both more than one, all exchanges but the last go across hosts alone: O and N above are
H, C is the capacity K across hosts. Inside a host there follows an all-to-all in row_exchange, and there precedes one
in grad_exchange, of [E, C, D], or [E, C, H * W] where columns are spread: see `hierarchical.py`. Tables in a grid,
where a device holds ceil(D / H) columns of some rows, travel as column-wise ones; means over rows are summed across
hosts.

Where several replica groups hold the same tables, a device has summed the gradients of its rows over its own group.
There follows, in replica_exchange, an all-gather over the groups of K slots and their sums, K * (4 + W * itemsize)
bytes from each, which every group adds in the same order: so all make the same update, and none has to send a table. Of
replicated tables the all-reduce is over all groups. Independent groups exchange nothing here: see `replica_groups.py`.

Where a group's exchange has a reduced precision, rows or gradients travel encoded (`comms/quantize.py`), in as many
collectives. Gradients are summed over a device's samples before, and over devices after; both sums are float32.
On several hosts that is so across hosts alone: inside one, values travel as float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from recjax import kernels
from recjax.embedding.exchange import all_to_all, exchange_rows, gather_rows
from recjax.embedding.layout import Group
from recjax.embedding.low_precision import values, write
from recjax.embedding.optim import At, RowWiseAdagrad, Slots
from recjax.embedding.routing.hierarchical import hand_in, hand_out
from recjax.embedding.routing.host import GroupRouting
from recjax.embedding.spec import MAX_ROWS
from recjax.errors import ConfigError
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, BATCH_AXES, MODEL_AXES


class Asked(NamedTuple):
    """What is asked of a device, which decides the way of the gradients.

    Attributes:
      slots_NxC: slots of its part of the buffer: [N, C] by all devices ([H, K] by a relay of each host in two steps),
        or its own [1, C] if the group is replicated.
      inside_ExC: None, or the rows that each device of its host asks of it as a relay.
      summed: as `GroupRouting` has it.
    """

    slots_NxC: jax.Array
    inside_ExC: jax.Array | None
    summed: int = 0


def fetch(group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False) -> tuple[jax.Array, Asked]:
    """Brings the rows that this device's samples need.

    Args:
      group: the table group.
      table_RxW: this device's part of the group's buffer.
      routing: with this device's slots [1, O, C].
      mean: where replica groups are independent, take the mean of their rows instead of those of the own group.

    Returns:
      rows [O * C, D], float32 also of bfloat16 tables, zeros where nothing was asked for (O lists of C: see
      `FeatureRouting.inverse`); and what `send_gradients` needs to know.
    """
    asked = routing.slots_NxOxC[0]
    inside = routing.inside_NxExC[0] if group.two_step else None
    with jax.named_scope("id_exchange"):
        if group.sharding == "rows":
            asked = all_to_all(asked, group.axes)
        elif group.sharding != "copies":
            asked = jax.lax.all_gather(asked, group.axes, axis=0, tiled=True)
    own, mean = asked, mean and group.independent
    if mean:
        with jax.named_scope("replica_exchange"):
            asked = jax.lax.all_gather(asked, ACROSS_GROUPS)
    with jax.named_scope("gather"):
        if kernels.available(table_RxW.dtype):  # which fetches far rows from memory before their turn comes
            rows = kernels.bags(table_RxW, asked.reshape(-1, 1)).reshape(*asked.shape, group.width)
        else:
            rows = values(table_RxW.at[asked].get(mode="fill", fill_value=0))
    if mean:
        with jax.named_scope("replica_exchange"):
            wide = rows.astype(jnp.float32) if rows.dtype == jnp.bfloat16 else rows
            rows = jax.lax.psum_scatter(wide, ACROSS_GROUPS) / group.replicas
    if group.sharding != "copies":
        with jax.named_scope("row_exchange"):
            rows = exchange_rows(rows, group.exchange.forward, group.axes)
            if inside is not None:
                rows = hand_out(group, rows, inside)
            if group.sharding != "rows":
                rows = _join_columns(group, rows)
    elif group.dtype == "bfloat16":
        rows = rows.astype(jnp.float32)
    return rows.reshape(-1, group.dim), Asked(own, inside, routing.summed)


def at_home(group: Group, table_RxW: jax.Array, routing: GroupRouting) -> tuple[jax.Array, jax.Array] | None:
    """The table and the slots [C] of the fetched rows, if a kernel can sum bags without fetching them; else None.

    It can where this device holds all rows: then what `fetch` gives is a copy, which nothing but a sum reads. With bags
    of one it does not pay: to fetch the distinct rows in the order of their slots, and to sum from there, took 11 ms a
    step for bench_mlperf64 and sums straight from the table 19; with bags of ten (bench_multihot) it was 49 and 25.
    """
    here = group.sharding == "copies" or group.devices == 1
    long = sum(f.bag or 2 for f in group.features) >= 2 * len(group.features)
    if here and long and _in_place(table_RxW):
        return table_RxW, routing.slots_NxOxC.reshape(-1)
    return None


def _join_columns(group: Group, parts_NxCxW: jax.Array) -> jax.Array:
    """Whole rows [C, D] from the columns of each device, or host, without their padding."""
    split = group.columns
    kept = [parts_NxCxW[n, :, : split.start(n + 1) - split.start(n)] for n in range(split.owners)]
    return jnp.concatenate(kept, axis=1)


def _split_columns(group: Group, rows_CxD: jax.Array) -> jax.Array:
    """The columns of each device, or host, [N, C, W], padded with zeros: the inverse of `_join_columns`."""
    split = group.columns
    parts = [rows_CxD[:, split.start(n) : split.start(n + 1)] for n in range(split.owners)]
    return jnp.stack([jnp.pad(part, ((0, 0), (0, group.width - part.shape[1]))) for part in parts])


def coalesce(slots_M: jax.Array, grads_MxD: jax.Array, rows: int, lists: int) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of equal slots.

    Sorting first keeps the order of the additions fixed, so that repeated runs agree to the bit, and
    lets the update scatter to unique, sorted slots.

    Args:
      slots_M: int32; `rows` (out of range) marks an entry that holds nothing.
      grads_MxD: the entries' gradients.
      rows: R of the buffer.
      lists: of how many lists `slots_M` consists, each of which holds a slot once, ascending, unused entries last.

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
        return jnp.where(slots_M < rows, slots_M, unused_M), grads_MxD
    order_M = jnp.argsort(slots_M, stable=True)
    sorted_M = slots_M[order_M]
    starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
    segment_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
    sums_MxD = jax.ops.segment_sum(grads_MxD[order_M], segment_M, M, indices_are_sorted=True)
    unique_M = unused_M.at[segment_M].set(sorted_M, indices_are_sorted=True)
    return unique_M, sums_MxD


def send_gradients(group: Group, asked: Asked, grads_UxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Brings every row's gradient to where the row lives, summed over the global batch.

    Where replica groups are independent, that is over the samples of the own group alone.

    Args:
      group: the table group.
      asked: as `fetch` returned it.
      grads_UxD: gradients of the fetched rows, [O * C, D].

    Returns:
      Replicated tables: mask of touched rows [R] and dense sums [R, D]; their size is the replicated
      table's, which the plan keeps small.
      All others: unique slots [M] and sums [M, W] of this device's rows or columns, M = N * C (or H * K; of several
      synchronous groups, as many times `asked.summed` as these are).
    """
    slots, inside, summed = asked
    if group.sharding != "copies":
        with jax.named_scope("grad_exchange"):
            if group.sharding == "rows":
                parts = grads_UxD.reshape(group.lists, -1, group.dim)
            else:
                parts = _split_columns(group, grads_UxD)
            if inside is not None:
                parts = hand_in(group, parts, inside, slots.shape[1])
            arrived = exchange_rows(parts, group.exchange.backward, group.axes)
        with jax.named_scope("sparse_update"):
            lists = len(slots) if group.dedup else slots.size  # without dedup a list may hold a slot twice
            touched, sums = coalesce(slots.reshape(-1), arrived.reshape(-1, group.width), group.rows, lists)
        if not group.synchronous:
            return touched, sums
        with jax.named_scope("replica_exchange"):  # all that is in use stands before `summed`
            touched = jax.lax.all_gather(touched[:summed], ACROSS_GROUPS, to="invarying")
            sums = gather_rows(sums[:summed], group.exchange.backward, ACROSS_GROUPS)
        with jax.named_scope("sparse_update"):
            touched = jnp.minimum(touched, group.rows)
            return coalesce(touched.reshape(-1), sums.reshape(-1, group.width), group.rows, len(touched))
    with jax.named_scope("grad_exchange"):
        marked_UxE = jnp.concatenate([grads_UxD, jnp.ones_like(grads_UxD[:, :1])], axis=1)
        local_RxE = jnp.zeros((group.rows, group.dim + 1), grads_UxD.dtype)
        local_RxE = local_RxE.at[slots.reshape(-1)].add(marked_UxE, mode="drop")
        sums_RxE = jax.lax.psum(local_RxE, MODEL_AXES if group.independent else BATCH_AXES)
        return sums_RxE[:, -1] > 0, sums_RxE[:, :-1]


class Proposed(NamedTuple):
    """What an update would write, before it is known whether the step counts.

    Attributes:
      rows: new rows, float; U of them: [M, W] beside `touched`, or [R, W] where all rows pass through the optimizer.
      slots: new slots, [U, ...] each.
      before: the slots that these take the place of.
    """

    rows: jax.Array
    slots: Slots
    before: Slots


def propose(
    group: Group,
    table_RxW: jax.Array,
    slots_R: Slots,
    touched: jax.Array,
    grads: jax.Array,
    scale: jax.Array,
    step: jax.Array,
    rate: jax.Array,
) -> Proposed:
    """One exact optimizer update of the touched rows, not written yet.

    An optimizer with `every_row` updates all rows; its tables are small enough for a dense gradient.

    Args:
      group: the table group.
      table_RxW: this device's part of the buffer.
      slots_R: optimizer slots, [R, ...] each.
      touched: unique slots [M], or a mask [R] for a replicated table, as `send_gradients` returned it.
      grads: the gradients beside it.
      scale: what they are multiplied with, for the gradients of the mean loss.
      step: int32, steps done before this one.
      rate: the schedule's factor of the learning rate.
    """
    at = At(step=step, rate=rate, row_mean=functools.partial(_row_mean, group))
    with jax.named_scope("sparse_update"):
        grads = grads * scale
        if group.optimizer.every_row and group.sharding != "copies":
            none_RxW = jnp.zeros_like(table_RxW, grads.dtype)
            grads = none_RxW.at[touched].set(grads, mode="drop", unique_indices=True)
        if group.optimizer.every_row or group.sharding == "copies":
            rows, before = values(table_RxW), slots_R
        else:

            def gather(x: jax.Array) -> jax.Array:
                return x.at[touched].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)

            rows, before = values(gather(table_RxW)), {k: gather(v) for k, v in slots_R.items()}
        new, slots = group.optimizer.apply(rows.astype(grads.dtype), before, grads, at)
        return Proposed(new, slots, before)


def update(
    group: Group,
    table_RxW: jax.Array,
    slots_R: Slots,
    touched: jax.Array,
    grads: jax.Array,
    scale: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    proposed: Proposed,
    ok: jax.Array,
    seed: int = 0,
) -> tuple[jax.Array, Slots]:
    """Writes what `propose` gave for the same arguments, or nothing at all unless `ok`.

    Args:
      group: the table group.
      table_RxW: this device's part of the buffer; donated by the step, written in place.
      slots_R: optimizer slots, likewise.
      touched: as for `propose`, as the next four.
      grads: not scaled.
      scale: of the gradients.
      step: steps done before this one.
      rate: the schedule's factor.
      proposed: what it gave. A kernel that works on the table itself makes it once more, on its way over the rows.
      ok: bool, whether the global step is finite.
      seed: of the run; for the rounding of bfloat16 tables.
    """
    with jax.named_scope("sparse_update"):
        rule = group.optimizer
        if (
            isinstance(rule, RowWiseAdagrad)
            and group.sharding == "rows"
            and not rule.every_row
            and _in_place(table_RxW)
        ):
            table_RxW, sums_R = kernels.update_rowwise_adagrad(
                table_RxW,
                slots_R["sum_of_squares"],
                touched,
                grads,
                (scale, rate * rule.learning_rate, ok),
                eps=rule.eps,
                l2=rule.l2,
                weight_decay=rule.weight_decay,
            )
            return table_RxW, {"sum_of_squares": sums_R}
        if rule.every_row or group.sharding == "copies":
            changed_R = jnp.broadcast_to(ok, group.rows) if rule.every_row else touched & ok

            def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [R, ...]
                return jnp.where(changed_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            every_R = jnp.arange(group.rows, dtype=jnp.int32)
            new_RxW = write(group, proposed.rows, every_R, seed, step, table_RxW.dtype)
            return choose(new_RxW, table_RxW), {k: choose(v, slots_R[k]) for k, v in proposed.slots.items()}

        def scatter(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[target_M].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

        # A step that is not ok aims every write past the end, which changes nothing and stays in place.
        target_M = jnp.where(ok, touched, group.rows + jnp.arange(touched.shape[0], dtype=jnp.int32))
        new_MxW = write(group, proposed.rows, touched, seed, step, table_RxW.dtype)
        return scatter(table_RxW, new_MxW), {k: scatter(slots_R[k], v) for k, v in proposed.slots.items()}


def _in_place(table_RxW: jax.Array) -> bool:
    """Whether kernels may work on a table itself: they pass once over the rows in question, and copy none."""
    return table_RxW.dtype == jnp.float32 and kernels.available(jnp.float32)


def _row_mean(group: Group, x_UxW: jax.Array) -> jax.Array:
    """Means over whole rows, [U], of something that this device may hold only some columns of."""
    if group.columns.owners == 1:
        return jnp.mean(x_UxW, axis=-1)
    axes = MODEL_AXES if group.sharding == "columns" else ACROSS_HOSTS
    split, part = group.columns, jax.lax.axis_index(axes)
    used_W = jnp.arange(group.width, dtype=jnp.int32) < split.start(part + 1) - split.start(part)
    # Along these axes all devices hold the same rows in the same order, since each was asked for all of them.
    return jax.lax.psum(jnp.where(used_W[None], x_UxW, 0).sum(axis=-1), axes) / group.dim
