"""Copies of a table on every device, whose gradients travel as lists of touched rows.

Every device holds all rows, and looks up its own copy. In place of an all-reduce as long as the table, each sends the
rows that its samples touch, with their gradients, to all others; every device adds them up in the same order, and makes
the same update of the same rows. C rows of each of N devices, of all replica groups or of one that is independent:

  id_exchange    all-gather of the slots            N * C * 4 bytes a device
  grad_exchange  all-gather of the row gradients    N * C * D * itemsize
  row_statistic  all-gather of a number for each    N * C * itemsize, where a row's columns lie in several segments

An all-reduce of R rows moves 2 R (D + 1) numbers past each device, this N C (D + 1): fewer where a batch touches less
than two rows in N of the table. Against rows that are spread over the devices it takes N times the memory and half of N
times the bytes, but one exchange in place of three. Horovod does so with gradients that are tf.IndexedSlices; Parallax
(Kim et al. 2019, EuroSys) has the same two forms of all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from recjax.embedding.exchange.copies import CopyExchange
from recjax.embedding.exchange.events import Event
from recjax.embedding.residuals import FetchResiduals, SparseGradient
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.sharding import ReplicatedSharding
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class TouchedRowsSharding(ReplicatedSharding):
    """Every device holds everything; apart from what is replicated otherwise, since its gradients are lists."""


@dataclasses.dataclass(frozen=True)
class TouchedRowsExchange(CopyExchange):
    """Gradients of the rows that a device touches go to all other devices."""

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Like `GroupExchange.events`: lists of touched rows from each device to all."""
        g = self.group
        bytes_of = {Phase.ID_EXCHANGE: 4, Phase.GRAD_EXCHANGE: g.dim * item_bytes}
        if g.divides_row_means and not g.optimizer.every_row:
            bytes_of[Phase.ROW_STATISTIC] = item_bytes
        devices = g.devices if g.independent else g.all_devices
        if g.frozen or devices == 1:
            return []
        rows = devices * capacities[g.name]
        return [self.event(phase, "all-gather", self.axes, rows * size) for phase, size in bytes_of.items()]

    def sent_bytes(self, event: Event, counts: GroupRouting, samples: int, item_bytes: int) -> np.ndarray | None:
        """Like `GroupExchange.sent_bytes`: its list, to each device of its replica group, or of all."""
        row_bytes = {Phase.ID_EXCHANGE: 4, Phase.GRAD_EXCHANGE: self.group.dim * item_bytes}.get(event.phase)
        if row_bytes is None:
            return None
        rows_N = np.asarray(counts.counts_NxO, np.int64)[:, 0]
        meeting_N = np.arange(self.group.all_devices) // event.devices
        return np.where(meeting_N[: len(rows_N), None] == meeting_N, rows_N[:, None] * row_bytes, 0)

    def fetch(
        self, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `GroupExchange.fetch`, from this device's own copy; and brings the slots that all devices ask for."""
        rows, residuals = super().fetch(table_RxW, routing, mean)
        if self.group.frozen:
            return rows, residuals
        with jax.named_scope(Phase.ID_EXCHANGE):
            return rows, residuals._replace(slots_NxC=self._gathered(residuals.slots_NxC))

    def send_gradients(self, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `GroupExchange.send_gradients`: N * C slots and sums of the whole batch, alike on all devices."""
        with jax.named_scope(Phase.GRAD_EXCHANGE):
            arrived_MxD = self._gathered(grads_UxD)
        return self.summed_lists(residuals, arrived_MxD)

    def tell_requesters(self, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_requesters`: every device has the numbers for all lists."""
        return numbers_NxC[jax.lax.axis_index(self.axes)]

    def tell_owners(self, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_owners`: all devices own the rows."""
        return self._gathered(numbers_F[None])

    def _gathered(self, x: jax.Array) -> jax.Array:
        """Parts of all devices, one below the other."""
        return jax.lax.all_gather(x, self.axes, tiled=True, to="invarying")
