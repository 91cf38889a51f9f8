"""Ways to spread the buffer of one table group over devices, and what a step exchanges for that.

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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.address import homes_of
from recjax.embedding.layout import Group
from recjax.embedding.lines import get_rows, set_rows
from recjax.embedding.low_precision import from_storage, to_storage
from recjax.embedding.optim import OptimizerContext, Slots
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharding.local import write_all
from recjax.parallel.mesh import ACROSS_HOSTS, BATCH_AXES, MODEL_AXES


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
    spread: ClassVar[bool] = True  # whether devices differ in what they hold; else a gradient is a mask of all rows
    listed: ClassVar[bool] = True  # whether devices list the rows that they fetch
    updates_apart: ClassVar[bool] = True  # whether devices differ in the rows that they update
    addressed: ClassVar[bool] = True  # whether rows may lie in other slots than their homes: see `address.py`
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
        """Returns whether rows travel in two steps, inside a host and across hosts."""
        return 1 < self.hosts < self.devices

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the exchange with the owners: of the whole of it, or of its step across hosts."""
        return ACROSS_HOSTS if self.two_step else MODEL_AXES

    def padded(self, rows: int) -> int:
        """Rows that a part of the buffer has if it is to hold so many."""
        return rows

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Mesh axes that the buffer's rows are split over; the arguments are as `Group` has them."""
        return MODEL_AXES if synchronous else BATCH_AXES

    @property
    def of_slots(self) -> Sharding | None:
        """None, or how the optimizer's slots are spread where not as the rows are: see `Group.slot_group`."""
        return None

    @property
    def of_values(self) -> Sharding | None:
        """None, or how the values are spread between steps where a step has more: see `Group.value_group`."""
        return None

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
        self,
        group: Group,
        table_RxW: jax.Array,
        slots_R: Slots,
        gradient: SparseGradient,
        context: UpdateContext,
        mean_U: jax.Array | None = None,
    ) -> Proposed:
        """Makes one exact optimizer update of the touched rows, and writes nothing.

        An optimizer with `every_row` updates all rows; its tables are small enough for a dense gradient.

        Args:
          group: the table group.
          table_RxW: this device's part of the buffer.
          slots_R: optimizer slots, [R, ...] each.
          gradient: as `send_gradients` returned it.
          context: scale, step and rate.
          mean_U: where the group holds some columns of its tables' rows alone, what `row_mean` of all would give.
        """
        with jax.named_scope("sparse_update"):
            rows, grads = self.updated(group, table_RxW, gradient, context)
            before = {name: self.updated_part(group, slot, gradient) for name, slot in slots_R.items()}
            return self.proposed(group, rows, before, grads, context, mean_U)

    def updated(
        self, group: Group, table_RxW: jax.Array, gradient: SparseGradient, context: UpdateContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the rows that pass through the optimizer, [U, W], and their gradients: M of them, or all R."""
        grads = gradient.sums * self.scale(group, context)
        if group.optimizer.every_row and self.spread:
            none_RxW = jnp.zeros_like(table_RxW, grads.dtype)
            grads = none_RxW.at[gradient.touched].set(grads, mode="drop", unique_indices=True)
        return from_storage(self.updated_part(group, table_RxW, gradient)), grads

    def updated_part(self, group: Group, x: jax.Array, gradient: SparseGradient) -> jax.Array:
        """Returns what of an array [R, ...] belongs to the rows that pass through the optimizer."""
        if group.optimizer.every_row or not self.spread:
            return x
        return get_rows(group, x, gradient.touched, unique_indices=True, indices_are_sorted=True)

    def proposed(
        self,
        group: Group,
        rows_UxW: jax.Array,
        slots_U: Slots,
        grads_UxW: jax.Array,
        context: UpdateContext,
        mean_U: jax.Array | None = None,
    ) -> Proposed:
        """The optimizer's update of some rows with their slots."""
        row_mean = functools.partial(self.row_mean, group) if mean_U is None else lambda _: mean_U
        lr = context.learning_rates.get(group.name)
        at = OptimizerContext(step=context.step, rate=context.rate, row_mean=row_mean, learning_rate=lr)
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
            if group.optimizer.every_row or not self.spread:
                changed_R = jnp.broadcast_to(ok, group.rows) if group.optimizer.every_row else touched & ok
                homes_R = homes_of(jnp.arange(group.rows, dtype=jnp.int32), context.homes.get(group.name))
                return write_all(group, table_RxW, slots_R, proposed, context, changed_R, homes_R)

            # A step that is not ok aims every write past the end, which changes nothing and stays in place.
            target_M = jnp.where(ok, touched, group.rows + jnp.arange(touched.shape[0], dtype=jnp.int32))
            homes_M = homes_of(touched, context.homes.get(group.name))
            new_MxW = to_storage(group, proposed.rows, homes_M, context.seed, context.step, table_RxW.dtype)
            new_slots = {k: set_rows(group, slots_R[k], target_M, v) for k, v in proposed.slots.items()}
            return set_rows(group, table_RxW, target_M, new_MxW), new_slots

    def scale(self, group: Group, context: UpdateContext) -> jax.Array:
        """Returns the factor of the gradients: the late one where means over rows are made from several devices'."""
        return context.scale if self.column_parts == 1 and not group.divides_row_means else context.late_scale

    def row_mean(self, group: Group, x_UxW: jax.Array) -> jax.Array:
        """Means over whole rows, [U], of something that this device may hold only some columns of."""
        return jnp.mean(x_UxW, axis=-1)

    def numbers_of_asked(
        self, group: Group, gradient: SparseGradient, residuals: FetchResiduals, numbers_U: jax.Array
    ) -> jax.Array:
        """Returns a number for each row that this device was asked for, [N, C], of those of touched rows; else 0."""
        at_NxC = jnp.searchsorted(gradient.touched, residuals.slots_NxC)
        asked_NxC = residuals.slots_NxC < group.rows
        return jnp.where(asked_NxC, numbers_U.at[at_NxC].get(mode="fill", fill_value=0), 0)

    def largest_of_asked(
        self, group: Group, gradient: SparseGradient, residuals: FetchResiduals, numbers_NxC: jax.Array
    ) -> jax.Array:
        """Returns the largest number for each touched row, [U], from those for each row asked for; none is negative."""
        at_NxC = jnp.searchsorted(gradient.touched, residuals.slots_NxC)
        unused = gradient.touched.shape[0]
        at_NxC = jnp.where(residuals.slots_NxC < group.rows, at_NxC, unused)
        return jnp.zeros(unused, numbers_NxC.dtype).at[at_NxC].max(numbers_NxC, mode="drop")

    @abc.abstractmethod
    def tell_requesters(self, group: Group, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Sends each device one number for every row that it asked for; those of several column parts are added.

        Args:
          group: the table group.
          residuals: as `fetch` returned them.
          numbers_NxC: beside `FetchResiduals.slots_NxC`.

        Returns:
          [lists * C], beside the rows that `fetch` returned.
        """

    @abc.abstractmethod
    def tell_owners(self, group: Group, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Sends the owners of the fetched rows one number for each: the inverse of `tell_requesters`.

        Of several devices that ask through one relay the largest number arrives.
        """

    def row_sum(self, group: Group, x_UxW: jax.Array) -> jax.Array:
        """Sums over the columns of each row that this device holds, [U], without padding."""
        return x_UxW.sum(axis=-1)
