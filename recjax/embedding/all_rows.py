"""All rows of one table, which a step reads whether its batch names them or not: for a loss over all items.

Each row is read by one device that holds it: where rows are spread over the devices, by the owner; where every device
holds all rows, each reads an equal range. So no row travels, and no gradient but in the sum that copies need anyway.
Beside the table, a device holds in a step its share of the rows, their gradient, and what the optimizer makes of them:
as much as a dense optimizer does, whose rows these are in each step.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.residuals import SparseGradient
from recjax.embedding.row_order import Band, RowOrder, Split
from recjax.embedding.sharding import BoundSegment
from recjax.parallel.mesh import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class AllRows:
    """The rows of a table that lies in one segment, of whole rows (`two_sided.py` refuses others).

    Its methods run inside `jax.shard_map` over BATCH_AXES.

    Attributes:
      bound: the bound plan.
      table: its name.
      absent: rows that have no part in it, ascending: they are read by nobody, and touched by no update.
    """

    bound: BoundPlan
    table: str
    absent: tuple[int, ...] = ()

    @property
    def group(self) -> Group:
        """The table's group."""
        return self._place[0]

    @property
    def _place(self) -> tuple[Group, BoundSegment]:
        ((group, segment),) = self.bound.segments(self.table)
        return group, segment

    def share(self) -> tuple[jax.Array, jax.Array]:
        """The slots of the rows that this device reads, and their ids: int32 [c], ids -1 and slots beyond R for none.

        c is the most that a device has.
        """
        group, segment = self._place
        V, owner = segment.spec.rows, group.place(group.sharding.this_part())[0]
        held_from, _ = segment.split.bounds(owner)
        split, reader = segment.split, owner
        if not group.spread:
            split, reader = Split(V, self.bound.all_devices), jax.lax.axis_index(BATCH_AXES)
        start, stop = split.bounds(reader)
        places_c = jnp.arange(split.longest, dtype=jnp.int32)
        position_c = jnp.minimum(start + places_c, V - 1)
        _, present_c = self._present.number(position_c)
        present_c &= start + places_c < stop
        slot_c = jnp.asarray(segment.offsets, jnp.int32)[owner] + position_c - held_from
        slots_c = jnp.where(present_c, slot_c, group.rows + places_c)
        return slots_c, jnp.where(present_c, segment.order.row(position_c), -1)

    @functools.cached_property
    def _present(self) -> Band:
        """The rows that have a part in it."""
        rows = self._place[1].spec.rows
        positions_K = np.sort(RowOrder(rows).position(np.array(self.absent, np.int64)))
        return Band(rows, tuple(positions_K.tolist()), inverted=True)

    def read(self, exchange: GroupExchange, table_RxW: jax.Array) -> jax.Array:
        """The rows of this device's share, [c, D], zeros where there is none; `exchange` is that of the group."""
        slots_c, _ = self.share()
        rows_cxD = exchange.gather_local(table_RxW, slots_c, False)
        return rows_cxD.astype(jnp.float32) if rows_cxD.dtype == jnp.bfloat16 else rows_cxD

    def gradient(self, grads_cxD: jax.Array) -> dict[str, SparseGradient]:
        """Their gradient, beside the name of the group; nothing where the table stays as it is."""
        if self.group.frozen:
            return {}
        return {self.group.name: SparseGradient(self.share()[0], grads_cxD)}
