"""Rows that every device has at hand in a step: replicated (data-parallel) tables, and hot rows.

Replicated (data-parallel) tables: every device holds all rows, and nothing is fetched from another one.

The only collective of a group and step is one all-reduce of [R, D + 1] in grad_exchange: the summed gradient, and how
many devices touched each row. It is over all replica groups, or within each where these are independent.

Hot rows: a copy on every device or on every host, and of the optimizer's slots an equal part on each device.

Within a step a device has all rows at hand, so that ids of hot rows need no list, no distinct rows and no exchange:
`fetch` gives all rows, and a device's gradient is one array as long. Collectives of a group and step, R rows on N
devices with a copy on every device (`HotSharding`):

  grad_exchange  reduce-scatter of [R, D + 1]: summed gradients, and how many devices touched each row
  row_exchange   all-gather of the new rows     R / N * D * itemsize from each device

That is what an all-reduce sends; but a device updates R / N rows alone, and holds their slots. Between replica groups
that hold the same, an all-reduce of [R / N, D + 1] follows the first, in replica_exchange.

With a copy on every one of H hosts (`HotPerHostSharding`), each of the E devices of a host holds R / E rows between
steps:

  row_exchange   all-gather of the rows, inside each host       R / E * D * itemsize from each device
  grad_exchange  reduce-scatter of [R, D + 1] inside each host, and of [R / E, D + 1] across hosts
  row_exchange   all-gather of the new rows, across hosts       R / N * D * itemsize from each device

A device sends as many bytes in either form: here the all-gather is cut in two, one at the end of a step and one at the
beginning of the next. Across hosts each device sends 1/E of the rows. All rows [R, D] are a temporary of the forward
pass, as long as the copy that a device holds in the other form; nothing is as long as the rest of a table. On one host
the rows are spread evenly over all devices, and nothing travels across; with one device a host both forms are the same.

After P2RES's two-fold parallelism, and the hybrid embedding of HugeCTR; both keep whole optimizer states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.exchange.events import Event
from recjax.embedding.optim import Slots
from recjax.embedding.quantize import from_storage
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.segment_sums import by_segments, coalesce
from recjax.parallel.mesh import ACROSS_GROUPS, BATCH_AXES, MODEL_AXES
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class CopyExchange(GroupExchange):
    """Every device holds everything, and looks rows up in its own copy."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which copies are the same, so that gradients are summed."""
        return MODEL_AXES if self.group.independent else BATCH_AXES

    def fetch(
        self, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `GroupExchange.fetch`, from this device's own copy."""
        asked_1xC, _ = self.asked_rows(routing)
        rows = self.gather_local(table_RxW, asked_1xC, mean)
        if self.group.dtype == "bfloat16":
            rows = rows.astype(jnp.float32)
        return rows.reshape(-1, self.group.dim), FetchResiduals(asked_1xC, None, routing.summed)

    def tell_requesters(self, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_requesters`: nothing travels."""
        return numbers_NxC.reshape(-1)

    def tell_owners(self, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_owners`: nothing travels."""
        return numbers_F.reshape(residuals.slots_NxC.shape)


@dataclasses.dataclass(frozen=True)
class ReplicatedExchange(CopyExchange):
    """Gradients are summed in an array of the table's size."""

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Like `GroupExchange.events`: the sum of gradients [R, D], and how many devices touched each row."""
        g = self.group
        if g.frozen or g.devices * (1 if g.independent else g.replicas) == 1:
            return []
        return [self.event(Phase.GRAD_EXCHANGE, "all-reduce", self.axes, g.rows * (g.dim + 1) * item_bytes)]

    def send_gradients(self, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """A mask of touched rows [R] and dense sums [R, D]; their size is the table's, which the plan keeps small."""
        with jax.named_scope(Phase.GRAD_EXCHANGE):
            slots_U, grads_UxD, lists = self.entries(residuals, grads_UxD)
            marked_UxE = jnp.concatenate([grads_UxD, jnp.ones_like(grads_UxD[:, :1])], axis=1)
            local_RxE = jnp.zeros((self.group.rows, self.group.dim + 1), grads_UxD.dtype)
            unique = by_segments(self.group.atomics)
            if unique:  # a row may have several places
                slots_U, marked_UxE = coalesce(slots_U, marked_UxE, self.group.rows, lists)
            local_RxE = local_RxE.at[slots_U].add(marked_UxE, mode="drop", unique_indices=unique)
            sums_RxE = jax.lax.psum(local_RxE, self.axes)
            return SparseGradient(sums_RxE[:, -1] > 0, sums_RxE[:, :-1])

    def touched_slots(self, gradient: SparseGradient) -> jax.Array:
        """Like `GroupExchange.touched_slots`: all of them."""
        return jnp.arange(self.group.rows, dtype=jnp.int32)

    def updated(
        self, table_RxW: jax.Array, gradient: SparseGradient, context: UpdateContext
    ) -> tuple[jax.Array, jax.Array]:
        """Like `GroupExchange.updated`: all rows."""
        return from_storage(table_RxW), gradient.sums * self.scale(context)

    def updated_part(self, x: jax.Array, gradient: SparseGradient) -> jax.Array:
        """Like `GroupExchange.updated_part`: all of it."""
        return x

    def changed_rows(self, gradient: SparseGradient, ok: jax.Array) -> jax.Array | None:
        """Like `GroupExchange.changed_rows`: those that are touched, unless all are."""
        every = super().changed_rows(gradient, ok)
        return gradient.touched & ok if every is None else every

    def numbers_of_asked(self, gradient: SparseGradient, residuals: FetchResiduals, numbers_U: jax.Array) -> jax.Array:
        """Like `GroupExchange.numbers_of_asked`."""
        return numbers_U.at[residuals.slots_NxC].get(mode="fill", fill_value=0)

    def largest_of_asked(
        self, gradient: SparseGradient, residuals: FetchResiduals, numbers_NxC: jax.Array
    ) -> jax.Array:
        """Like `GroupExchange.largest_of_asked`, over all devices."""
        largest_R = jnp.zeros(self.group.rows, numbers_NxC.dtype)
        largest_R = largest_R.at[residuals.slots_NxC].max(numbers_NxC, mode="drop")
        return jax.lax.pmax(largest_R, self.axes)


@dataclasses.dataclass(frozen=True)
class HotExchange(ReplicatedExchange):
    """Every device has all rows at hand in a step, and updates a part of them."""

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Like `GroupExchange.events`: all rows in a step, sums of gradients, and new rows where they are copied."""
        g, s = self.group, self.sharding
        held_bytes = g.dim * (2 if g.dtype == "bfloat16" else item_bytes)
        events = []
        if s.divided and g.devices > 1:
            events.append(self.event(Phase.ROW_EXCHANGE, "all-gather", s.divided, g.rows * held_bytes))
        if g.frozen:
            return events
        rows, row_bytes = g.rows, (g.dim + 1) * item_bytes
        for axes in filter(None, (s.divided, s.copied)):
            event = self.event(Phase.GRAD_EXCHANGE, "reduce-scatter", axes, 0)
            rows //= event.devices
            if event.devices > 1:
                events.append(dataclasses.replace(event, padded_bytes=rows * row_bytes))
        if g.synchronous:
            events.append(self.event(Phase.REPLICA_EXCHANGE, "all-reduce", ACROSS_GROUPS, rows * row_bytes))
        if s.copied and g.devices > 1:
            event = self.event(Phase.ROW_EXCHANGE, "all-gather", s.copied, 0)
            events.append(dataclasses.replace(event, padded_bytes=rows * event.devices * held_bytes))
        return events

    def fetch(
        self, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `GroupExchange.fetch`: all rows [R, D], whichever of them the samples need."""
        if self.sharding.divided:
            with jax.named_scope(Phase.ROW_EXCHANGE):
                table_RxW = jax.lax.all_gather(table_RxW, self.sharding.divided, tiled=True, to="invarying")
        rows_RxD = from_storage(table_RxW)
        if self.group.dtype == "bfloat16":
            rows_RxD = rows_RxD.astype(jnp.float32)
        if mean and self.group.independent:
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                rows_RxD = jax.lax.pmean(rows_RxD, ACROSS_GROUPS)
        # The gradient is to be this device's own: nothing may add up those of all devices on the way back.
        alike = MODEL_AXES if self.group.independent and not mean else BATCH_AXES  # along which devices have equal rows
        rows_RxD = jax.lax.pcast(rows_RxD, alike, to="varying")
        return rows_RxD, FetchResiduals(None, None, touched_R=routing.touched_NxR[0])

    def send_gradients(self, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `GroupExchange.send_gradients`: a mask [R / N] of this device's range, and sums [R / N, D]."""
        assert residuals.touched_R is not None
        with jax.named_scope(Phase.GRAD_EXCHANGE):
            mark_Rx1 = residuals.touched_R[:, None].astype(grads_UxD.dtype)
            sums_MxE = jnp.concatenate([grads_UxD, mark_Rx1], axis=1)
            for axes in filter(None, (self.sharding.divided, self.sharding.copied)):
                sums_MxE = jax.lax.psum_scatter(sums_MxE, axes, tiled=True)
        if not self.group.independent:
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                sums_MxE = jax.lax.psum(sums_MxE, ACROSS_GROUPS)
        return SparseGradient(sums_MxE[:, -1] > 0, sums_MxE[:, :-1])

    def updated(
        self, table_RxW: jax.Array, gradient: SparseGradient, context: UpdateContext
    ) -> tuple[jax.Array, jax.Array]:
        """Like `GroupExchange.updated`: all rows of this device's range."""
        return from_storage(self._own(table_RxW)), gradient.sums * self.scale(context)

    def write(self, table_RxW: jax.Array, slots_R: Slots, proposed: Proposed, ok: jax.Array) -> tuple[jax.Array, Slots]:
        """Like `GroupExchange.write`: the slots of this device's range, and all rows that it holds."""
        with jax.named_scope(Phase.SPARSE_UPDATE):
            each, touched_M = self._each(), proposed.gradient.touched
            changed_M = jnp.broadcast_to(ok, each) if self.group.optimizer.every_row else touched_M & ok
            homes_M = self._first() + jnp.arange(each, dtype=jnp.int32)
            own_MxW = self._own(table_RxW)
            rows_MxW, slots = self.write_all(own_MxW, slots_R, proposed, changed_M, homes_M)
        if not self.sharding.copied:
            return rows_MxW, slots
        with jax.named_scope(Phase.ROW_EXCHANGE):
            return jax.lax.all_gather(rows_MxW, self.sharding.copied, tiled=True, to="invarying"), slots

    def _each(self) -> int:
        return self.group.rows // self.sharding.devices

    def _first(self) -> jax.Array:
        """int32 []: the first row of the range that this device updates."""
        return self._start((*self.sharding.divided, *self.sharding.copied))

    def _own(self, table: jax.Array) -> jax.Array:
        """The range of the rows that this device updates, from those that it holds between steps."""
        if not self.sharding.copied:
            return table
        return jax.lax.dynamic_slice_in_dim(table, self._start(self.sharding.copied), self._each())

    def _start(self, axes: tuple[str, ...]) -> jax.Array:
        return (jax.lax.axis_index(axes) * self._each()).astype(jnp.int32)
