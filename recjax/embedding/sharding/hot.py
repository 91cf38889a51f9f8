"""Hot rows: a copy on every device, and of the optimizer's slots an equal part on each.

A device has all rows at hand, so that ids of hot rows need no list, no distinct rows and no exchange: `fetch` gives the
copy itself, and a device's gradient is one array as long. Collectives of a group and step, R rows on N devices:

  grad_exchange  reduce-scatter of [R, D + 1]: summed gradients, and how many devices touched each row
  row_exchange   all-gather of the new rows     R / N * D * itemsize from each device

That is what an all-reduce sends; but a device updates R / N rows alone, and holds their slots. Between replica groups
that hold the same, an all-reduce of [R / N, D + 1] follows the first, in replica_exchange.

After P2RES's two-fold parallelism, and the hybrid embedding of HugeCTR; both keep whole optimizer states.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.embedding.layout import Group
from recjax.embedding.low_precision import from_storage, to_storage
from recjax.embedding.optim import Slots
from recjax.embedding.routing.host import GroupRouting
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.local import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.sharding.replicated import ReplicatedSharding
from recjax.embedding.sharding.rows import RowSharding
from recjax.parallel.mesh import ACROSS_GROUPS, BATCH_AXES, MODEL_AXES


class _SlotSharding(RowSharding):
    """Layout of the slots of hot rows: by ranges, and alike in replica groups that hold the same."""

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Axes of the buffer's rows: what they are made of is known to be alike."""
        return BATCH_AXES if independent else MODEL_AXES


@dataclasses.dataclass(frozen=True)
class HotSharding(ReplicatedSharding):
    """Every device holds all rows, and updates a part of them."""

    kind: ClassVar[str] = "hot"
    listed: ClassVar[bool] = False
    updates_apart: ClassVar[bool] = True
    addressed: ClassVar[bool] = False

    def padded(self, rows: int) -> int:
        """Like `Sharding.padded`: as many for each device."""
        return -(-rows // self.devices) * self.devices

    @property
    def of_slots(self) -> Sharding:
        """Like `Sharding.of_slots`: an equal range of the rows on each device."""
        return _SlotSharding(self.devices, self.hosts)

    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `Sharding.fetch`: all rows [R, D], whichever of them the samples need."""
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
            marked_RxE = jnp.concatenate([grads_UxD, mark_Rx1], axis=1)
            sums_MxE = jax.lax.psum_scatter(marked_RxE, MODEL_AXES, tiled=True)
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
        """Like `Sharding.write`: the slots of this device's range, and the rows of all."""
        with jax.named_scope("sparse_update"):
            each = self._each(group)
            changed_M = jnp.broadcast_to(ok, each) if group.optimizer.every_row else gradient.touched & ok

            def choose(new: jax.Array, old: jax.Array) -> jax.Array:  # both [M, ...]
                return jnp.where(changed_M.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            homes_M = self._first(group) + jnp.arange(each, dtype=jnp.int32)
            new_MxW = to_storage(group, proposed.rows, homes_M, context.seed, context.step, table_RxW.dtype)
            rows_MxW = choose(new_MxW, self._own(group, table_RxW))
            slots = {name: choose(new, slots_R[name]) for name, new in proposed.slots.items()}
        with jax.named_scope("row_exchange"):
            return jax.lax.all_gather(rows_MxW, MODEL_AXES, tiled=True, to="invarying"), slots

    def _each(self, group: Group) -> int:
        return group.rows // self.devices

    def _first(self, group: Group) -> jax.Array:
        """int32 []: the first row of this device's range."""
        return (jax.lax.axis_index(MODEL_AXES) * self._each(group)).astype(jnp.int32)

    def _own(self, group: Group, table_RxW: jax.Array) -> jax.Array:
        """This device's range of the rows."""
        return jax.lax.dynamic_slice_in_dim(table_RxW, self._first(group), self._each(group))
