"""Columns spread over devices: column-wise tables, of which each device holds ceil(D / N) columns W of every row.

Collectives of a group and step, C distinct rows a device:

  id_exchange    all-gather of the slots asked for      N * C * 4 bytes a device
  row_exchange   all-to-all of the columns              N * C * W * itemsize
  grad_exchange  all-to-all of the columns' gradients   N * C * W * itemsize
  sparse_update  all-reduce of [N * C], only if the optimizer asks for means over whole rows

The second consists of `Group.row_pieces` collectives, each of some of the C rows, which are gathered just before it.
In two steps N is H and C is K, the capacity across hosts; inside a host an all-to-all of [E, C, H * W] follows in
row_exchange, and precedes in grad_exchange.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from recjax.embedding.exchange import all_to_all, exchange_rows, fetch_rows
from recjax.embedding.layout import Group
from recjax.embedding.residuals import FetchResiduals, SparseGradient
from recjax.embedding.routing.hierarchical import reduce_within_host, scatter_within_host
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.local import asked_rows, gather_local, summed_over_devices
from recjax.parallel.mesh import MODEL_AXES


@dataclasses.dataclass(frozen=True)
class ColumnSharding(Sharding):
    """Each device holds some columns of all rows."""

    kind: ClassVar[str] = "columns"
    id_collective: ClassVar[str] = "all-gather"
    column_axes: ClassVar[tuple[str, ...]] = MODEL_AXES  # along which devices hold other columns of the same rows

    @property
    def owners(self) -> int:
        """O = 1: all devices have every row."""
        return 1

    @property
    def column_parts(self) -> int:
        """N."""
        return self.devices

    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `Sharding.fetch`: all devices get all slots, and send their columns of these rows."""
        asked_NxC, inside_ExC = asked_rows(routing, self.two_step)
        with jax.named_scope("id_exchange"):
            asked_NxC = jax.lax.all_gather(asked_NxC, self.axes, axis=0, tiled=True)
        gather = functools.partial(gather_local, group, table_RxW, mean=mean)
        rows = fetch_rows(asked_NxC, gather, group.exchange.forward, self.axes, pieces=group.row_pieces)
        with jax.named_scope("row_exchange"):
            if inside_ExC is not None:
                rows = self.from_relays(group, rows, inside_ExC, group.row_pieces)
            rows = _join_columns(group, rows)
        return rows.reshape(-1, group.dim), FetchResiduals(asked_NxC, inside_ExC, routing.summed)

    def send_gradients(self, group: Group, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `Sharding.send_gradients`: each device gets its columns' gradients."""
        slots, inside_ExC = residuals.slots_NxC, residuals.inside_ExC
        with jax.named_scope("grad_exchange"):
            parts = _split_columns(group, grads_UxD)
            if inside_ExC is not None:
                parts = self.to_relays(group, parts, inside_ExC, slots.shape[1])
            arrived = exchange_rows(parts, group.exchange.backward, self.axes)
        return summed_over_devices(group, residuals, arrived)

    def from_relays(self, group: Group, rows_HxKxW: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
        """Hands out what this device fetched as a relay, from each host: [parts of columns, lists * C, W]."""
        H, K, W = rows_HxKxW.shape
        E, C = inside_ExC.shape
        got_ExCxV = scatter_within_host(rows_HxKxW.transpose(1, 0, 2).reshape(K, H * W), inside_ExC, pieces)
        got_HxExCxW = got_ExCxV.reshape(E, C, H, W).transpose(2, 0, 1, 3)
        return got_HxExCxW.reshape(self.column_parts, group.num_row_lists * C, W)

    def to_relays(
        self, group: Group, parts: jax.Array, inside_ExC: jax.Array, across: int, largest: bool = False
    ) -> jax.Array:
        """The way back of `from_relays`, to what this relay sends to each host: [H, K, W]; sums, or the largest."""
        (E, C), H, W = inside_ExC.shape, self.hosts, parts.shape[-1]
        parts = parts.reshape(H, E, C, W).transpose(1, 2, 0, 3).reshape(E, C, H * W)
        sums_MxV = reduce_within_host(parts, inside_ExC, group.num_peers * across, largest)
        return sums_MxV.reshape(across, H, W).transpose(1, 0, 2)

    def tell_requesters(self, group: Group, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `Sharding.tell_requesters`."""
        parts = all_to_all(numbers_NxC[..., None], self.axes)
        if residuals.inside_ExC is not None:
            parts = self.from_relays(group, parts, residuals.inside_ExC)
        return parts.sum(axis=0).reshape(-1)

    def tell_owners(self, group: Group, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `Sharding.tell_owners`."""
        parts = jnp.broadcast_to(numbers_F[None, :, None], (self.column_parts, len(numbers_F), 1))
        if residuals.inside_ExC is not None:
            parts = self.to_relays(group, parts, residuals.inside_ExC, residuals.slots_NxC.shape[1], largest=True)
        return all_to_all(parts, self.axes)[..., 0]

    def row_mean(self, group: Group, x_UxW: jax.Array) -> jax.Array:
        """Sums over the devices that hold the other columns of the same rows."""
        if self.column_parts == 1:
            return super().row_mean(group, x_UxW)
        # Along these axes all devices hold the same rows in the same order, since each was asked for all of them.
        return jax.lax.psum(self.row_sum(group, x_UxW), self.column_axes) / group.dim

    def row_sum(self, group: Group, x_UxW: jax.Array) -> jax.Array:
        """Like `Sharding.row_sum`."""
        split, part = group.columns, jax.lax.axis_index(self.column_axes)
        used_W = jnp.arange(group.width, dtype=jnp.int32) < split.start(part + 1) - split.start(part)
        return jnp.where(used_W[None], x_UxW, 0).sum(axis=-1)


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
