"""Exchange of the rows of one table group, however its buffer is spread, and their update.

N are the devices of one replica group, on H hosts of E devices each; all exchanges but `replica_exchange` stay within
such a group. Only distinct rows travel, in both directions. Where both H and E are above one, the exchange with the
owners goes across hosts alone, and one within each host follows it (precedes it, for gradients): see
`routing/keys.py`.

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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.embedding.exchange.events import Event
from recjax.embedding.exchange.wire import gather_rows
from recjax.embedding.group import Group
from recjax.embedding.layout import ROWS, SUMMED
from recjax.embedding.optim import OptimizerContext, Slots
from recjax.embedding.quantize import encoded_bytes, from_storage, nearest, random_bits, stochastic
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.segment_sums import coalesce
from recjax.embedding.sharding import homes_of
from recjax.parallel.mesh import ACROSS_GROUPS
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class GroupExchange(abc.ABC):
    """Base of the ways by which rows of a group reach the samples of a step and gradients come back; their update.

    All but `events` and `sent_bytes` run inside `jax.shard_map` over BATCH_AXES, and see one device's block.

    Attributes:
      group: the table group.
    """

    group: Group

    @property
    def name(self) -> str:
        """Name of its group, which is that of the scope of its operations."""
        return self.group.name

    @property
    def sharding(self) -> Any:
        """The way in which the group's buffer is spread."""
        return self.group.sharding

    @abc.abstractmethod
    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Returns the collectives of a step, in their order; none on one device, where nothing travels.

        Args:
          capacities: sizes of the arrays of its routing, as `RoutedBatch.required_capacities` names them.
          samples: b, of a device.
          item_bytes: of a table's element, if that is not bfloat16.
        """

    def sent_bytes(self, event: Event, counts: GroupRouting, samples: int, item_bytes: int) -> np.ndarray | None:
        """Returns what of an event is no padding: bytes that device n has for device m, itself included.

        Args:
          event: one of `events`.
          counts: the group's routing, of all devices or the first ones, in whole hosts; only counts are read.
          samples: as for `events`.
          item_bytes: likewise.

        Returns:
          int64 [N, N], N of all replica groups, each of which keeps to itself; 0 for devices that take no part. Of
          devices that asked for rows and were not counted, the column (of a row_exchange) or the row is missing. None
          where all of it is used.
        """
        del event, counts, samples, item_bytes
        return None

    def event(self, phase: Phase, kind: str, axes: tuple[str, ...], padded_bytes: float, inside: bool = False) -> Event:
        """Makes an event of this exchange; the arguments are as `Event` has them."""
        return self.group.meeting.event(phase, kind, axes, padded_bytes, inside)

    @abc.abstractmethod
    def fetch(
        self, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Brings the rows that this device's samples need.

        Args:
          table_RxW: this device's part of the group's buffer.
          routing: with this device's slots [1, O, C].
          mean: where replica groups are independent, take the mean of their rows instead of those of the own group.

        Returns:
          rows [O * C, D], float32 also of bfloat16 tables, zeros where nothing was asked for (O lists of C: see
          `FeatureRouting.inverse`); and what `send_gradients` needs to know.
        """

    @abc.abstractmethod
    def send_gradients(self, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Brings every row's gradient to where the row lives, summed over the global batch.

        Where replica groups are independent, that is over the samples of the own group alone.

        Args:
          residuals: as `fetch` returned them.
          grads_UxD: gradients of the fetched rows, [O * C, D].

        Returns:
          M = N * C (or H * K) slots and sums of this device's rows or columns; of several synchronous groups, as many
          times `residuals.summed` as these are. Of a replicated buffer a mask and dense sums, of the table's size,
          which the plan keeps small.
        """

    def propose(
        self,
        table_RxW: jax.Array,
        slots_R: Slots,
        gradient: SparseGradient,
        context: UpdateContext,
        mean_U: jax.Array | None = None,
    ) -> Proposed:
        """Makes one exact optimizer update of the touched rows, and writes nothing.

        An optimizer with `every_row` updates all rows; its tables are small enough for a dense gradient.

        Args:
          table_RxW: this device's part of the buffer.
          slots_R: optimizer slots, [R, ...] each.
          gradient: as `send_gradients` returned it.
          context: scale, step and rate.
          mean_U: where the group holds some columns of its tables' rows alone, what `row_mean` of all would give.
        """
        with jax.named_scope(Phase.SPARSE_UPDATE):
            rows, grads = self.updated(table_RxW, gradient, context)
            before = {name: self.updated_part(slot, gradient) for name, slot in slots_R.items()}
            row_mean = self.row_mean if mean_U is None else lambda _: mean_U
            lr = context.learning_rates.get(self.group.name)
            at = OptimizerContext(step=context.step, rate=context.rate, row_mean=row_mean, learning_rate=lr)
            new_UxW, new_U = self.group.optimizer.apply(rows.astype(grads.dtype), before, grads, at)
            return Proposed(new_UxW, new_U, before, gradient, context)

    def updated(
        self, table_RxW: jax.Array, gradient: SparseGradient, context: UpdateContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the rows that pass through the optimizer, [U, W], and their gradients: M of them, or all R."""
        grads = gradient.sums * self.scale(context)
        if self.group.optimizer.every_row:
            none_RxW = jnp.zeros_like(table_RxW, grads.dtype)
            grads = none_RxW.at[gradient.touched].set(grads, mode="drop", unique_indices=True)
        return from_storage(self.updated_part(table_RxW, gradient)), grads

    def updated_part(self, x: jax.Array, gradient: SparseGradient) -> jax.Array:
        """Returns what of an array [R, ...] belongs to the rows that pass through the optimizer."""
        if self.group.optimizer.every_row:
            return x
        return self.group.get_rows(x, gradient.touched, unique_indices=True, indices_are_sorted=True)

    def write(self, table_RxW: jax.Array, slots_R: Slots, proposed: Proposed, ok: jax.Array) -> tuple[jax.Array, Slots]:
        """Writes what `propose` gave, or nothing at all unless `ok`.

        Args:
          table_RxW: this device's part of the buffer; donated by the step, written in place.
          slots_R: optimizer slots, likewise.
          proposed: made of the same arrays. A kernel that works on the table itself makes it once more, on its way over
            the rows.
          ok: bool [], whether the global step is finite.
        """
        gradient, context = proposed.gradient, proposed.context
        with jax.named_scope(Phase.SPARSE_UPDATE):
            if (changed_R := self.changed_rows(gradient, ok)) is not None:
                return self.write_all(table_RxW, slots_R, proposed, changed_R)
            touched = gradient.touched
            # A step that is not ok aims every write past the end, which changes nothing and stays in place.
            target_M = jnp.where(ok, touched, self.group.rows + jnp.arange(touched.shape[0], dtype=jnp.int32))
            homes_M = homes_of(touched, context.homes.get(self.group.name))
            new_MxW = self.to_storage(proposed.rows, homes_M, context, table_RxW.dtype)
            new_slots = {k: self.group.set_rows(slots_R[k], target_M, v) for k, v in proposed.slots.items()}
            return self.group.set_rows(table_RxW, target_M, new_MxW), new_slots

    def to_storage(self, new_MxW: jax.Array, homes_M: jax.Array, context: UpdateContext, dtype: Any) -> jax.Array:
        """Returns updated rows as the group's buffer holds them.

        Args:
          new_MxW: the rows.
          homes_M: their homes in this device's part of the buffer; beyond R for what is not written.
          context: seed and step, for the rounding.
          dtype: of the buffer.
        """
        group = self.group
        if dtype != jnp.uint16 or group.rounding == "nearest":
            return nearest(new_MxW, dtype)
        part = self.sharding.this_part()
        _, column = group.place(part)
        segment_M, position_M, _ = group.locator(part)(homes_M)
        columns = group.columns.start(column) + jnp.arange(group.width, dtype=jnp.int32)
        if any(s.first for s in group.segments):
            first_T = jnp.asarray([s.first for s in group.segments], jnp.int32)
            columns = first_T[segment_M][:, None] + columns[None]
        tables = [s.spec.name for s in group.segments]
        bits_MxW = random_bits(context.seed, context.step, tables, segment_M, position_M, columns)
        return stochastic(new_MxW, bits_MxW)

    def scale(self, context: UpdateContext) -> jax.Array:
        """Returns the factor of the gradients: the late one where means over rows are made from several devices'."""
        late = self.sharding.column_parts > 1 or self.group.divides_row_means
        return context.late_scale if late else context.scale

    def row_mean(self, x_UxW: jax.Array) -> jax.Array:
        """Means over whole rows, [U], of something that this device may hold only some columns of."""
        return jnp.mean(x_UxW, axis=-1)

    def changed_rows(self, gradient: SparseGradient, ok: jax.Array) -> jax.Array | None:
        """Returns a mask of the rows that a step changes, bool [R], if all pass through the optimizer; else None."""
        return jnp.broadcast_to(ok, self.group.rows) if self.group.optimizer.every_row else None

    def touched_slots(self, gradient: SparseGradient) -> jax.Array:
        """Returns the slot of each row of a gradient's sums, int32."""
        return gradient.touched

    def numbers_of_asked(self, gradient: SparseGradient, residuals: FetchResiduals, numbers_U: jax.Array) -> jax.Array:
        """Returns a number for each row that this device was asked for, [N, C], of those of touched rows; else 0."""
        at_NxC = jnp.searchsorted(gradient.touched, residuals.slots_NxC)
        asked_NxC = residuals.slots_NxC < self.group.rows
        return jnp.where(asked_NxC, numbers_U.at[at_NxC].get(mode="fill", fill_value=0), 0)

    def largest_of_asked(
        self, gradient: SparseGradient, residuals: FetchResiduals, numbers_NxC: jax.Array
    ) -> jax.Array:
        """Returns the largest number for each touched row, [U], from those for each row asked for; none is negative."""
        at_NxC = jnp.searchsorted(gradient.touched, residuals.slots_NxC)
        unused = gradient.touched.shape[0]
        at_NxC = jnp.where(residuals.slots_NxC < self.group.rows, at_NxC, unused)
        return jnp.zeros(unused, numbers_NxC.dtype).at[at_NxC].max(numbers_NxC, mode="drop")

    @abc.abstractmethod
    def tell_requesters(self, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Sends each device one number for every row that it asked for; those of several column parts are added.

        Args:
          residuals: as `fetch` returned them.
          numbers_NxC: beside `FetchResiduals.slots_NxC`.

        Returns:
          [lists * C], beside the rows that `fetch` returned.
        """

    @abc.abstractmethod
    def tell_owners(self, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Sends the owners of the fetched rows one number for each: the inverse of `tell_requesters`.

        Of several devices that ask through one relay the largest number arrives.
        """

    def row_sum(self, x_UxW: jax.Array) -> jax.Array:
        """Sums over the columns of each row that this device holds, [U], without padding."""
        return x_UxW.sum(axis=-1)

    def asked_rows(self, routing: GroupRouting) -> tuple[jax.Array, jax.Array | None]:
        """This device's part of the routing: the slots that it asks for, and what it hands out as a relay."""
        return routing.slots_NxOxC[0], routing.inside_NxExC[0] if self.sharding.two_step else None

    def gather_local(self, table_RxW: jax.Array, asked: jax.Array, mean: bool) -> jax.Array:
        """The rows of this device's part that it is asked for, [*asked.shape, W]; `mean` as for `fetch`."""
        mean = mean and self.group.independent
        if mean:
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                asked = jax.lax.all_gather(asked, ACROSS_GROUPS)
        with jax.named_scope(Phase.GATHER):
            if self.group.lines is None and kernels.available(
                table_RxW.dtype
            ):  # which fetches far rows from memory before their turn comes
                rows = kernels.bags(table_RxW, asked.reshape(-1, 1)).reshape(*asked.shape, self.group.width)
            else:
                rows = from_storage(self.group.get_rows(table_RxW, asked))
        if mean:
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                wide = rows.astype(jnp.float32) if rows.dtype == jnp.bfloat16 else rows
                rows = jax.lax.psum_scatter(wide, ACROSS_GROUPS) / self.group.replicas
        return rows

    def summed_over_devices(self, residuals: FetchResiduals, arrived: jax.Array) -> SparseGradient:
        """The gradient of this device's rows, from what the devices of a replica group sent for each slot asked for."""
        gradient = self.summed_lists(residuals, arrived)
        if not self.group.synchronous:
            return gradient
        touched, sums = gradient
        summed = residuals.summed + (0 if residuals.further is None else len(residuals.further.touched))
        with jax.named_scope(Phase.REPLICA_EXCHANGE):  # all that is in use stands before `summed`
            touched = jax.lax.all_gather(touched[:summed], ACROSS_GROUPS, to="invarying")
            sums = gather_rows(sums[:summed], self.group.exchange.backward, ACROSS_GROUPS)
        with jax.named_scope(Phase.SPARSE_UPDATE):
            touched = jnp.minimum(touched, self.group.rows)
            slots_M, sums_MxW = touched.reshape(-1), sums.reshape(-1, self.group.width)
            return coalesce(slots_M, sums_MxW, self.group.rows, len(touched), self.group.atomics)

    def summed_lists(self, residuals: FetchResiduals, arrived: jax.Array) -> SparseGradient:
        """The sums of what arrived for equal slots."""
        with jax.named_scope(Phase.SPARSE_UPDATE):
            slots_M, grads_MxW, lists = self.entries(residuals, arrived)
            return coalesce(slots_M, grads_MxW, self.group.rows, lists, self.group.atomics)

    def entries(self, residuals: FetchResiduals, arrived: jax.Array) -> tuple[jax.Array, jax.Array, int]:
        """All gradients that this device has for its rows: slots [M], sums [M, W], and of how many lists these are.

        As `coalesce` takes them.
        """
        slots, further = residuals.slots_NxC, residuals.further
        lists = len(slots) if self.group.dedup else slots.size  # of one entry each, since a list may hold a slot twice
        slots_M, arrived = slots.reshape(-1), arrived.reshape(-1, self.group.width)
        if further is None:
            return slots_M, arrived, lists
        return jnp.concatenate([slots_M, further.touched]), jnp.concatenate([arrived, further.sums]), lists + 1

    def write_all(
        self,
        table_RxW: jax.Array,
        slots_R: Slots,
        proposed: Proposed,
        changed_R: jax.Array,
        homes_R: jax.Array | None = None,
    ) -> tuple[jax.Array, Slots]:
        """The rows of a table and their slots with the proposed values of those in the mask `changed_R`.

        The homes are by themselves those of the rows' slots.
        """
        context = proposed.context
        if homes_R is None:
            homes_R = homes_of(jnp.arange(len(table_RxW), dtype=jnp.int32), context.homes.get(self.group.name))

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [R, ...]
            return jnp.where(changed_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        new_RxW = self.to_storage(proposed.rows, homes_R, context, table_RxW.dtype)
        return choose(new_RxW, table_RxW), {k: choose(v, slots_R[k]) for k, v in proposed.slots.items()}

    def fused_operands(self, table_RxW: jax.Array, routing: GroupRouting) -> tuple[jax.Array, jax.Array] | None:
        """The table and the slots [C] of the fetched rows, if a kernel can sum bags without fetching them; else None.

        It can where this device holds all rows: then what `fetch` gives is a copy, which nothing but a sum reads. With
        bags of one it does not pay: to fetch the distinct rows in the order of their slots, and to sum from there, took
        11 ms a step for bench_mlperf64 and sums straight from the table 19; with bags of ten (bench_multihot) it was 49
        and 25.
        """
        group = self.group
        here = not group.spread or group.devices == 1
        long = sum(source.feature.bag or 2 for source in group.sources) >= 2 * len(group.sources)
        if here and group.listed and long and self.in_place(table_RxW):
            return table_RxW, routing.slots_NxOxC.reshape(-1)
        return None

    def in_place(self, table_RxW: jax.Array) -> bool:
        """Returns whether kernels may work on a table itself: they pass once over some rows, and copy none."""
        return self.group.lines is None and table_RxW.dtype == jnp.float32 and kernels.available(jnp.float32)


def replica_events(group: Group, capacities: Mapping[str, float], item_bytes: int) -> list[Event]:
    """Events by which groups of devices that hold the same agree on gradients of listed rows: see `GroupExchange`."""
    if not group.synchronous or group.frozen:
        return []
    rows = group.replicas * (capacities.get(group.name + SUMMED, 0) + capacities.get(group.name + ROWS, 0))
    row_bytes = encoded_bytes(group.width, group.exchange.backward, item_bytes)
    sizes = rows * 4, rows * row_bytes
    return [group.meeting.event(Phase.REPLICA_EXCHANGE, "all-gather", ACROSS_GROUPS, size) for size in sizes]
