"""Hot rows: a copy on every device or on every host, and of the optimizer's slots an equal part on each device.

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
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.embedding.layout import Group
from recjax.embedding.low_precision import from_storage
from recjax.embedding.optim import Slots
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.local import write_all
from recjax.embedding.sharding.replicated import ReplicatedSharding
from recjax.embedding.sharding.rows import RowSharding
from recjax.parallel.mesh import ACROSS_GROUPS, BATCH_AXES, INSIDE_HOST, MODEL_AXES


@dataclasses.dataclass(frozen=True)
class RangeSharding(RowSharding):
    """Layout of hot rows or of their slots between steps: equal ranges, and the same along the other mesh axes.

    Replica groups that hold the same have the same ranges.

    Attributes:
      over: the axes, of MODEL_AXES, along which the ranges follow each other.
    """

    over: tuple[str, ...] = MODEL_AXES

    @property
    def parts(self) -> int:
        """Number of ranges."""
        sizes = dict(zip(MODEL_AXES, (self.hosts, self.per_host), strict=True))
        return math.prod(sizes[axis] for axis in self.over)

    @property
    def owners(self) -> int:
        """O: all ranges."""
        return self.parts

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Axes of the buffer's rows: what they are made of is known to be alike."""
        return (*ACROSS_GROUPS, *self.over) if independent else self.over

    def this_part(self) -> jax.Array:
        """int32 []: the number of this device's range."""
        return jax.lax.axis_index(self.over)

    def gather(self, x_M: jax.Array) -> jax.Array:
        """All rows [parts * M, ...] of an array of which devices hold ranges [M, ...]."""
        return jax.lax.all_gather(x_M, self.over, tiled=True)

    def own(self, x_R: jax.Array) -> jax.Array:
        """This device's range of an array of all rows: the inverse of `gather`."""
        each = len(x_R) // self.parts
        return jax.lax.dynamic_slice_in_dim(x_R, self.this_part() * each, each)


@dataclasses.dataclass(frozen=True)
class HotSharding(ReplicatedSharding):
    """Every device holds all rows, and updates a part of them."""

    kind: ClassVar[str] = "hot"
    listed: ClassVar[bool] = False
    updates_apart: ClassVar[bool] = True
    addressed: ClassVar[bool] = False

    @property
    def divided(self) -> tuple[str, ...]:
        """Mesh axes along which each device holds an equal range of the rows between steps: none here."""
        return ()

    @property
    def copied(self) -> tuple[str, ...]:
        """The other ones of MODEL_AXES, along which devices hold the same rows, of which each updates a range."""
        return tuple(axis for axis in MODEL_AXES if axis not in self.divided)

    def padded(self, rows: int) -> int:
        """Like `Sharding.padded`: as many for each device."""
        return -(-rows // self.devices) * self.devices

    @property
    def of_values(self) -> Sharding | None:
        """Like `Sharding.of_values`: None, or an equal range of the rows on each device of a host."""
        return RangeSharding(self.devices, self.hosts, self.divided) if self.divided else None

    @property
    def of_slots(self) -> Sharding:
        """Like `Sharding.of_slots`: an equal range of the rows on each device, within those that it holds."""
        return RangeSharding(self.devices, self.hosts, (*self.divided, *self.copied))

    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `Sharding.fetch`: all rows [R, D], whichever of them the samples need."""
        if self.divided:
            with jax.named_scope("row_exchange"):
                table_RxW = jax.lax.all_gather(table_RxW, self.divided, tiled=True, to="invarying")
        rows_RxD = from_storage(table_RxW)
        if group.dtype == "bfloat16":
            rows_RxD = rows_RxD.astype(jnp.float32)
        if mean and group.independent:
            with jax.named_scope("replica_exchange"):
                rows_RxD = jax.lax.pmean(rows_RxD, ACROSS_GROUPS)
        # The gradient is to be this device's own: nothing may add up those of all devices on the way back.
        alike = MODEL_AXES if group.independent and not mean else BATCH_AXES  # along which devices have equal rows
        rows_RxD = jax.lax.pcast(rows_RxD, alike, to="varying")
        return rows_RxD, FetchResiduals(None, None, touched_R=routing.touched_NxR[0])

    def send_gradients(self, group: Group, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `Sharding.send_gradients`: a mask [R / N] of this device's range of the rows, and sums [R / N, D]."""
        assert residuals.touched_R is not None
        with jax.named_scope("grad_exchange"):
            mark_Rx1 = residuals.touched_R[:, None].astype(grads_UxD.dtype)
            sums_MxE = jnp.concatenate([grads_UxD, mark_Rx1], axis=1)
            for axes in filter(None, (self.divided, self.copied)):
                sums_MxE = jax.lax.psum_scatter(sums_MxE, axes, tiled=True)
        if not group.independent:
            with jax.named_scope("replica_exchange"):
                sums_MxE = jax.lax.psum(sums_MxE, ACROSS_GROUPS)
        return SparseGradient(sums_MxE[:, -1] > 0, sums_MxE[:, :-1])

    def updated(
        self, group: Group, table_RxW: jax.Array, gradient: SparseGradient, context: UpdateContext
    ) -> tuple[jax.Array, jax.Array]:
        """Like `Sharding.updated`: all rows of this device's range."""
        return from_storage(self._own(group, table_RxW)), gradient.sums * self.scale(group, context)

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
        """Like `Sharding.write`: the slots of this device's range, and all rows that it holds."""
        with jax.named_scope("sparse_update"):
            each = self._each(group)
            changed_M = jnp.broadcast_to(ok, each) if group.optimizer.every_row else gradient.touched & ok
            homes_M = self._first(group) + jnp.arange(each, dtype=jnp.int32)
            own_MxW = self._own(group, table_RxW)
            rows_MxW, slots = write_all(group, own_MxW, slots_R, proposed, context, changed_M, homes_M)
        if not self.copied:
            return rows_MxW, slots
        with jax.named_scope("row_exchange"):
            return jax.lax.all_gather(rows_MxW, self.copied, tiled=True, to="invarying"), slots

    def _each(self, group: Group) -> int:
        return group.rows // self.devices

    def _first(self, group: Group) -> jax.Array:
        """int32 []: the first row of the range that this device updates."""
        return self._start(group, (*self.divided, *self.copied))

    def _own(self, group: Group, table: jax.Array) -> jax.Array:
        """The range of the rows that this device updates, from those that it holds between steps."""
        if not self.copied:
            return table
        return jax.lax.dynamic_slice_in_dim(table, self._start(group, self.copied), self._each(group))

    def _start(self, group: Group, axes: tuple[str, ...]) -> jax.Array:
        return (jax.lax.axis_index(axes) * self._each(group)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class HotPerHostSharding(HotSharding):
    """Every host holds all rows, an equal range on each of its devices, which has them all within a step."""

    kind: ClassVar[str] = "hot_per_host"

    @property
    def divided(self) -> tuple[str, ...]:
        """Like `HotSharding.divided`: those within a host, which are all if there is one host."""
        return INSIDE_HOST if self.hosts > 1 else MODEL_AXES
