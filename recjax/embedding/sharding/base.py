"""How the buffer of one table group is spread over devices, and what a step exchanges for that.

N are the devices of one replica group, on H hosts of E devices each; all exchanges but `replica_exchange` stay within
such a group. Only distinct rows travel, in both directions. Where both H and E are above one, the exchange with the
owners goes across hosts alone, and one within each host follows it (precedes it, for gradients): see
`routing/hierarchical.py`.

Where a group's exchange has a reduced precision, rows or gradients travel encoded (`quantize.py`), in as many
collectives. Gradients are summed over a device's samples before, and over devices after; both sums are float32.
On several hosts that is so across hosts alone: inside one, values travel as float32.

Where several replica groups hold the same tables, a device has summed the gradients of its rows over its own group.
There follows, in replica_exchange, an all-gather over the groups of K slots and their sums, K * (4 + W * itemsize)
bytes from each, which every group adds in the same order: so all make the same update, and none has to send a table.
Independent groups exchange nothing here: see `replica_groups.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.embedding.exchange import gather_rows
from recjax.embedding.layout import Group
from recjax.embedding.low_precision import from_storage, to_storage
from recjax.embedding.optim import OptimizerContext, Slots
from recjax.embedding.routing.host import GroupRouting
from recjax.embedding.spec import MAX_ROWS
from recjax.errors import ConfigError
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, BATCH_AXES, MODEL_AXES


class FetchResiduals(NamedTuple):
    """What `fetch` leaves for `send_gradients`: which way the gradients go.

    Attributes:
      slots_NxC: slots of this device's part of the buffer: [N, C] as all devices asked for them ([H, K] by a relay of
        each host in two steps), or its own [1, C] if the group is replicated.
      inside_ExC: None, or the rows that each device of its host asks of it as a relay.
      summed: as `GroupRouting` has it.
    """

    slots_NxC: jax.Array
    inside_ExC: jax.Array | None
    summed: int = 0


class SparseGradient(NamedTuple):
    """Gradients of the rows of one device's part of a buffer, summed over the global batch.

    Attributes:
      touched: unique slots [M], ascending, those at R or beyond not in use; or, of a replicated buffer, a mask [R].
      sums: [M, W] beside the slots; or [R, D].
    """

    touched: jax.Array
    sums: jax.Array


class UpdateContext(NamedTuple):
    """What an update depends on beside rows and gradients.

    Attributes:
      scale: [], what the sums are multiplied with, for the gradients of the mean loss.
      late_scale: [], the same made after the gradients of the dense part: for updates that send something themselves.
      step: int32 [], steps done before this one.
      rate: [], the schedule's factor of the learning rate.
      seed: of the run; for the rounding of bfloat16 tables.
    """

    scale: jax.Array
    late_scale: jax.Array
    step: jax.Array
    rate: jax.Array
    seed: int = 0


class Proposed(NamedTuple):
    """What an update would write, before it is known whether the step counts.

    Attributes:
      rows: new rows, float; U of them: [M, W] beside `SparseGradient.touched`, or [R, W] where all rows pass through
        the optimizer.
      slots: new slots, [U, ...] each.
      before: the slots that these take the place of.
    """

    rows: jax.Array
    slots: Slots
    before: Slots


@dataclasses.dataclass(frozen=True)
class Sharding(abc.ABC):
    """A way to spread a buffer [parts * R, W] over the devices of a replica group.

    `this_part`, `fetch`, `send_gradients`, `propose` and `write` run inside `jax.shard_map` over BATCH_AXES and see one
    device's block.

    Attributes:
      devices: N.
      hosts: H, machines in which they stand, N / H in each.
    """

    kind: ClassVar[str]
    spread: ClassVar[bool] = True  # whether devices differ in what they hold
    id_collective: ClassVar[str] = "all-to-all"  # what XLA calls the collective of id_exchange
    devices: int
    hosts: int

    @property
    def parts(self) -> int:
        """Parts of the buffer: N, or 1 if every device holds all of it."""
        return self.devices

    @property
    def per_host(self) -> int:
        """E, devices of a host."""
        return self.devices // self.hosts

    @property
    @abc.abstractmethod
    def owners(self) -> int:
        """O, parts among which a row is sought."""

    @property
    def column_parts(self) -> int:
        """Over how many devices or hosts the columns of a row are spread."""
        return 1

    @property
    def two_step(self) -> bool:
        """Whether rows travel in two steps, inside a host and across hosts."""
        return 1 < self.hosts < self.devices

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the exchange with the owners: of the whole of it, or of its step across hosts."""
        return ACROSS_HOSTS if self.two_step else MODEL_AXES

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Mesh axes that the buffer's rows are split over; the arguments are as `Group` has them."""
        return MODEL_AXES if synchronous else BATCH_AXES

    def holders(self, part: int) -> range:
        """The devices that hold a part."""
        return range(part, part + 1)

    def place(self, part: Any) -> tuple[Any, Any]:
        """(owner, number of its columns) of a part of the buffer: the rows and the columns that it holds."""
        return part % self.owners, part // self.owners

    def relayed_columns(self, group: Group, columns_N: np.ndarray) -> np.ndarray:
        """Columns of a row that each device has gathered as a relay, [N], if its own part has `columns_N`."""
        gathered_E = columns_N.reshape(self.hosts, self.per_host).sum(axis=0)
        return np.tile(gathered_E, self.hosts)

    def this_part(self) -> jax.Array:
        """int32 []: the part that this device holds."""
        return jax.lax.axis_index(MODEL_AXES)

    @abc.abstractmethod
    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
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

    @abc.abstractmethod
    def send_gradients(self, group: Group, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Brings every row's gradient to where the row lives, summed over the global batch.

        Where replica groups are independent, that is over the samples of the own group alone.

        Args:
          group: the table group.
          residuals: as `fetch` returned them.
          grads_UxD: gradients of the fetched rows, [O * C, D].

        Returns:
          M = N * C (or H * K) slots and sums of this device's rows or columns; of several synchronous groups, as many
          times `residuals.summed` as these are. Of a replicated buffer a mask and dense sums, of the table's size,
          which the plan keeps small.
        """

    def propose(
        self, group: Group, table_RxW: jax.Array, slots_R: Slots, gradient: SparseGradient, context: UpdateContext
    ) -> Proposed:
        """Makes one exact optimizer update of the touched rows, and writes nothing.

        An optimizer with `every_row` updates all rows; its tables are small enough for a dense gradient.

        Args:
          group: the table group.
          table_RxW: this device's part of the buffer.
          slots_R: optimizer slots, [R, ...] each.
          gradient: as `send_gradients` returned it.
          context: scale, step and rate.
        """
        with jax.named_scope("sparse_update"):
            touched, grads = gradient.touched, gradient.sums * self.scale(context)
            if group.optimizer.every_row:
                none_RxW = jnp.zeros_like(table_RxW, grads.dtype)
                grads = none_RxW.at[touched].set(grads, mode="drop", unique_indices=True)
                return self.proposed(group, from_storage(table_RxW), slots_R, grads, context)

            def gather(x: jax.Array) -> jax.Array:
                return x.at[touched].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)

            before = {name: gather(slot) for name, slot in slots_R.items()}
            return self.proposed(group, from_storage(gather(table_RxW)), before, grads, context)

    def proposed(
        self, group: Group, rows_UxW: jax.Array, slots_U: Slots, grads_UxW: jax.Array, context: UpdateContext
    ) -> Proposed:
        """The optimizer's update of some rows with their slots."""
        at = OptimizerContext(step=context.step, rate=context.rate, row_mean=functools.partial(self.row_mean, group))
        new_UxW, new_U = group.optimizer.apply(rows_UxW.astype(grads_UxW.dtype), slots_U, grads_UxW, at)
        return Proposed(new_UxW, new_U, slots_U)

    def write(
        self,
        group: Group,
        table_RxW: jax.Array,
        slots_R: Slots,
        gradient: SparseGradient,
        context: UpdateContext,
        proposed: Proposed,
        ok: jax.Array,
    ) -> tuple[jax.Array, Slots]:
        """Writes what `propose` gave for the same arguments, or nothing at all unless `ok`.

        Args:
          group: the table group.
          table_RxW: this device's part of the buffer; donated by the step, written in place.
          slots_R: optimizer slots, likewise.
          gradient: as for `propose`.
          context: as for `propose`.
          proposed: as it gave it. A kernel that works on the table itself makes it once more, on its way over the rows.
          ok: bool [], whether the global step is finite.
        """
        with jax.named_scope("sparse_update"):
            touched = gradient.touched
            if group.optimizer.every_row:
                return write_all(group, table_RxW, slots_R, proposed, context, jnp.broadcast_to(ok, group.rows))

            def scatter(x: jax.Array, new: jax.Array) -> jax.Array:
                return x.at[target_M].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

            # A step that is not ok aims every write past the end, which changes nothing and stays in place.
            target_M = jnp.where(ok, touched, group.rows + jnp.arange(touched.shape[0], dtype=jnp.int32))
            new_MxW = to_storage(group, proposed.rows, touched, context.seed, context.step, table_RxW.dtype)
            return scatter(table_RxW, new_MxW), {k: scatter(slots_R[k], v) for k, v in proposed.slots.items()}

    def scale(self, context: UpdateContext) -> jax.Array:
        """Returns the factor of the gradients: the late one where `row_mean` sums over devices."""
        return context.scale if self.column_parts == 1 else context.late_scale

    def row_mean(self, group: Group, x_UxW: jax.Array) -> jax.Array:
        """Means over whole rows, [U], of something that this device may hold only some columns of."""
        return jnp.mean(x_UxW, axis=-1)


def gather_local(group: Group, table_RxW: jax.Array, asked: jax.Array, mean: bool) -> jax.Array:
    """The rows of this device's part that it is asked for, [*asked.shape, W]; see `Sharding.fetch` for `mean`."""
    mean = mean and group.independent
    if mean:
        with jax.named_scope("replica_exchange"):
            asked = jax.lax.all_gather(asked, ACROSS_GROUPS)
    with jax.named_scope("gather"):
        if kernels.available(table_RxW.dtype):  # which fetches far rows from memory before their turn comes
            rows = kernels.bags(table_RxW, asked.reshape(-1, 1)).reshape(*asked.shape, group.width)
        else:
            rows = from_storage(table_RxW.at[asked].get(mode="fill", fill_value=0))
    if mean:
        with jax.named_scope("replica_exchange"):
            wide = rows.astype(jnp.float32) if rows.dtype == jnp.bfloat16 else rows
            rows = jax.lax.psum_scatter(wide, ACROSS_GROUPS) / group.replicas
    return rows


def asked_rows(sharding: Sharding, routing: GroupRouting) -> tuple[jax.Array, jax.Array | None]:
    """This device's part of a group's routing: the slots that it asks for, and what it hands out as a relay."""
    return routing.slots_NxOxC[0], routing.inside_NxExC[0] if sharding.two_step else None


def summed_over_devices(group: Group, residuals: FetchResiduals, arrived: jax.Array) -> SparseGradient:
    """The gradient of this device's rows, from what the devices of a replica group sent for each slot asked for."""
    slots, _, summed = residuals
    with jax.named_scope("sparse_update"):
        lists = len(slots) if group.dedup else slots.size  # without dedup a list may hold a slot twice
        touched, sums = coalesce(slots.reshape(-1), arrived.reshape(-1, group.width), group.rows, lists)
    if not group.synchronous:
        return SparseGradient(touched, sums)
    with jax.named_scope("replica_exchange"):  # all that is in use stands before `summed`
        touched = jax.lax.all_gather(touched[:summed], ACROSS_GROUPS, to="invarying")
        sums = gather_rows(sums[:summed], group.exchange.backward, ACROSS_GROUPS)
    with jax.named_scope("sparse_update"):
        touched = jnp.minimum(touched, group.rows)
        return SparseGradient(*coalesce(touched.reshape(-1), sums.reshape(-1, group.width), group.rows, len(touched)))


def write_all(
    group: Group,
    table_RxW: jax.Array,
    slots_R: Slots,
    proposed: Proposed,
    context: UpdateContext,
    changed_R: jax.Array,
) -> tuple[jax.Array, Slots]:
    """The table and its slots with the proposed values of the rows in the mask `changed_R`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [R, ...]
        return jnp.where(changed_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    every_R = jnp.arange(group.rows, dtype=jnp.int32)
    new_RxW = to_storage(group, proposed.rows, every_R, context.seed, context.step, table_RxW.dtype)
    return choose(new_RxW, table_RxW), {k: choose(v, slots_R[k]) for k, v in proposed.slots.items()}


def in_place(table_RxW: jax.Array) -> bool:
    """Whether kernels may work on a table itself: they pass once over the rows in question, and copy none."""
    return table_RxW.dtype == jnp.float32 and kernels.available(jnp.float32)


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
