"""Rows spread over devices: row-wise, table-wise and table-row-wise tables, of which each device holds some rows.

Collectives of a group and step, C rows of each of O = N owners:

  id_exchange    all-to-all of the slots asked for      O * C * 4 bytes a device
  row_exchange   all-to-all of the rows                 O * C * D * itemsize
  grad_exchange  all-to-all of the row gradients        O * C * D * itemsize

The second consists of `Group.row_pieces` collectives, each of some of the C rows, which are gathered just before it.
With `Group.ragged` each sends what is asked for alone, without the padding up to C, and id_exchange also O * 4 bytes.
Which rows each device asks of which owner is found before the step: `embedding/routing/host.py` and `device.py`. In two
steps (two hosts or more) O is H and C is K, the capacity across hosts; inside a host an all-to-all of [E, C, D] follows
in row_exchange, and precedes in grad_exchange. Letters of arrays: `docs/reference/glossary.md`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import numpy as np

from recjax import kernels
from recjax.embedding.exchange import all_to_all, exchange_rows, extents_of, fetch_rows
from recjax.embedding.layout import Group
from recjax.embedding.optim import Adagrad, RowWiseAdagrad, Sgd, Slots, SparseOptimizer
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient, UpdateContext
from recjax.embedding.routing.hierarchical import reduce_within_host, scatter_within_host
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharding.base import Sharding
from recjax.embedding.sharding.local import asked_rows, gather_local, in_place, summed_over_devices
from recjax.gpu_kernels.row_update import RowRule, update_in_place


@dataclasses.dataclass(frozen=True)
class RowSharding(Sharding):
    """Each device holds some rows of the stacked tables, whole."""

    kind: ClassVar[str] = "rows"

    @property
    def owners(self) -> int:
        """O = N."""
        return self.devices

    def relayed_columns(self, group: Group, columns_N: np.ndarray) -> np.ndarray:
        """D everywhere: a relay fetches whole rows."""
        return np.full(self.devices, group.dim)

    def fetch(
        self, group: Group, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `Sharding.fetch`: each owner gets the slots that it is asked for, and sends the rows back."""
        asked_OxC, inside_ExC = asked_rows(routing, self.two_step)
        with jax.named_scope("id_exchange"):
            extents = extents_of(asked_OxC, group.rows, self.axes) if group.ragged else None
            asked_OxC = all_to_all(asked_OxC, self.axes, extents, group.rows)
        gather = functools.partial(gather_local, group, table_RxW, mean=mean)
        back = extents and extents.back
        rows = fetch_rows(asked_OxC, gather, group.exchange.forward, self.axes, back, group.row_pieces)
        if inside_ExC is not None:
            with jax.named_scope("row_exchange"):
                rows = self.from_relays(group, rows, inside_ExC, group.row_pieces)
        return rows.reshape(-1, group.dim), FetchResiduals(asked_OxC, inside_ExC, routing.summed, extents=extents)

    def send_gradients(self, group: Group, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `Sharding.send_gradients`: gradients go the way that the rows came."""
        slots, inside_ExC = residuals.slots_NxC, residuals.inside_ExC
        with jax.named_scope("grad_exchange"):
            parts = grads_UxD.reshape(group.num_row_lists, -1, group.dim)
            if inside_ExC is not None:
                parts = self.to_relays(group, parts, inside_ExC, slots.shape[1])
            arrived = exchange_rows(parts, group.exchange.backward, self.axes, residuals.extents)
        return summed_over_devices(group, residuals, arrived)

    def from_relays(self, group: Group, rows_HxKxD: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
        """Hands out what this device fetched as a relay, from each host: [E, C, D], a list from each relay."""
        return scatter_within_host(rows_HxKxD.reshape(-1, rows_HxKxD.shape[-1]), inside_ExC, pieces)

    def to_relays(
        self, group: Group, parts_ExCxD: jax.Array, inside_ExC: jax.Array, across: int, largest: bool = False
    ) -> jax.Array:
        """The way back of `from_relays`, to what this relay sends to each host: [H, K, D]; sums, or the largest."""
        sums_MxD = reduce_within_host(parts_ExCxD, inside_ExC, group.num_peers * across, largest)
        return sums_MxD.reshape(self.hosts, across, parts_ExCxD.shape[-1])

    def tell_requesters(self, group: Group, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `Sharding.tell_requesters`."""
        parts = all_to_all(numbers_NxC[..., None], self.axes)
        if residuals.inside_ExC is not None:
            parts = self.from_relays(group, parts, residuals.inside_ExC)
        return parts.reshape(-1)

    def tell_owners(self, group: Group, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `Sharding.tell_owners`."""
        parts = numbers_F.reshape(group.num_row_lists, -1, 1)
        if residuals.inside_ExC is not None:
            parts = self.to_relays(group, parts, residuals.inside_ExC, residuals.slots_NxC.shape[1], largest=True)
        return all_to_all(parts, self.axes)[..., 0]

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
        """Like `Sharding.write`; in one pass of a kernel, where there is one for the rule."""
        rule = group.optimizer
        whole_rows = group.lines is None and not group.divides_row_means
        on_gpu = whole_rows and kernels.available_on_gpu(table_RxW.dtype, group.width, table_RxW.size)
        if on_gpu and (constants := _gpu_rule(rule)) is not None:
            with jax.named_scope("sparse_update"):
                scalars = (self.scale(group, context), context.rate * rule.learning_rate, ok)
                sums = slots_R.get("sum_of_squares")
                table_RxW, sums = update_in_place(table_RxW, sums, gradient.touched, gradient.sums, scalars, constants)
                return table_RxW, slots_R if sums is None else {"sum_of_squares": sums}
        own_mean = isinstance(rule, RowWiseAdagrad) and not group.divides_row_means  # which the kernel makes itself
        if not own_mean or rule.every_row or not in_place(group, table_RxW):
            return super().write(group, table_RxW, slots_R, gradient, context, proposed, ok)
        with jax.named_scope("sparse_update"):
            table_RxW, sums_R = kernels.update_rowwise_adagrad(
                table_RxW,
                slots_R["sum_of_squares"],
                gradient.touched,
                gradient.sums,
                (self.scale(group, context), context.rate * rule.learning_rate, ok),
                eps=rule.eps,
                l2=rule.l2,
                weight_decay=rule.weight_decay,
            )
            return table_RxW, {"sum_of_squares": sums_R}


def _gpu_rule(rule: SparseOptimizer) -> RowRule | None:
    """Returns a rule as the kernel for GPUs takes it; None if it knows none like it."""
    if getattr(rule, "every_row", True):
        return None
    if isinstance(rule, Adagrad):
        return RowRule("rowwise_adagrad" if rule.row_wise else "adagrad", rule.eps, rule.l2, rule.weight_decay)
    if isinstance(rule, Sgd) and not rule.momentum:
        return RowRule("sgd", 0.0, rule.l2, rule.weight_decay)
    return None
