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

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.embedding.exchange.base import GroupExchange, replica_events
from recjax.embedding.exchange.events import Event
from recjax.embedding.exchange.wire import (
    Extents,
    all_to_all,
    cuts,
    exchange_rows,
    extents_of,
    fetch_rows,
    reduce_within_host,
    scatter_within_host,
)
from recjax.embedding.layout import ACROSS, ROWS, SUMMED
from recjax.embedding.optim import Adagrad, RowWiseAdagrad, Sgd, Slots, SparseOptimizer
from recjax.embedding.quantize import encoded_bytes
from recjax.embedding.residuals import FetchResiduals, Proposed, SparseGradient
from recjax.embedding.routing.routed import GroupRouting
from recjax.gpu_kernels.row_update import RowRule, update_in_place
from recjax.parallel.mesh import INSIDE_HOST
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class SpreadExchange(GroupExchange):
    """Each device holds some rows, or some columns: the holders get the slots asked for, and send what they have."""

    id_kind: ClassVar[str] = "all-to-all"  # the collective by which the holders get slots

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Like `GroupExchange.events`: ids, rows and gradients with the holders, and inside hosts what relays hand on.

        In pieces of the lists where `Group.row_pieces` says so; padding up to the capacities is counted even where
        `Group.ragged` leaves it out. Then statistics of rows whose columns lie with several, and replica groups.
        """
        g, s = self.group, self.sharding
        if g.devices == 1:
            return replica_events(g, capacities, item_bytes)
        C = capacities[g.name]
        K, partners = (capacities[g.name + ACROSS], s.hosts) if s.two_step else (C, s.devices)
        there = encoded_bytes(g.width, g.exchange.forward, 2 if g.dtype == "bfloat16" else item_bytes)
        back = encoded_bytes(g.width, g.exchange.backward, item_bytes)
        events = [self.event(Phase.ID_EXCHANGE, self._name(self.id_kind), s.axes, partners * K * 4)]
        if g.ragged:
            events.append(self.event(Phase.ID_EXCHANGE, "all-to-all", s.axes, partners * 4))
        gradients = [self.event(Phase.GRAD_EXCHANGE, self._name("all-to-all"), s.axes, partners * K * back)]
        events += self._pieces(self._name("all-to-all"), s.axes, K, partners * there)
        if s.two_step:
            row_bytes = s.per_host * self.relayed_columns * item_bytes
            events += self._pieces("all-to-all", INSIDE_HOST, C, row_bytes, inside=True)
            gradients.insert(0, self._inside(Phase.GRAD_EXCHANGE, C * row_bytes))
        if g.frozen:
            return events
        events += gradients
        if g.divides_row_means and not g.optimizer.every_row:
            for inside_first in (False, True):
                both = [self.event(Phase.ROW_STATISTIC, "all-to-all", s.axes, partners * K * item_bytes)]
                if s.two_step:
                    numbers = s.per_host * C * item_bytes * self.relayed_parts
                    both.insert(0 if inside_first else 1, self._inside(Phase.ROW_STATISTIC, numbers))
                events += both
        return events + replica_events(g, capacities, item_bytes)

    @property
    def relayed_columns(self) -> int:
        """Columns, padding included, of a row that a relay hands to a device of its host."""
        return self.relayed_parts * self.group.width

    @property
    @abc.abstractmethod
    def relayed_parts(self) -> int:
        """Parts of columns of which these are."""

    def _name(self, kind: str) -> str:
        return "ragged-" + kind if self.group.ragged and kind == "all-to-all" else kind

    def _inside(self, phase: Phase, size: float) -> Event:
        return self.event(phase, "all-to-all", INSIDE_HOST, size, inside=True)

    def _pieces(
        self, kind: str, axes: tuple[str, ...], entries: float, entry_bytes: float, inside: bool = False
    ) -> list[Event]:
        """The events of rows that travel in lists of so many entries."""
        if self.group.row_pieces == 1:
            return [self.event(Phase.ROW_EXCHANGE, kind, axes, entries * entry_bytes, inside=inside)]
        events = []
        for piece, (first, last) in enumerate(cuts(int(entries), self.group.row_pieces)):
            event = self.event(Phase.ROW_EXCHANGE, kind, axes, (last - first) * entry_bytes, inside)
            events.append(dataclasses.replace(event, places=(first, last), piece=piece))
        return events

    def sent_bytes(self, event: Event, counts: GroupRouting, samples: int, item_bytes: int) -> np.ndarray | None:
        """Like `GroupExchange.sent_bytes`."""
        lengths = self.group.ragged and event.phase == Phase.ID_EXCHANGE and event.kind == "all-to-all"
        if event.phase not in (Phase.ID_EXCHANGE, Phase.ROW_EXCHANGE, Phase.GRAD_EXCHANGE) or lengths:
            return None
        asked_NxN = self._handed(counts) if event.inside else self._asked(counts)
        if event.places is not None:  # a list is filled from its first place on
            first, last = event.places
            asked_NxN = np.clip(asked_NxN - first, 0, last - first)
        if event.phase == Phase.ID_EXCHANGE:
            return asked_NxN * 4
        forward = event.phase == Phase.ROW_EXCHANGE
        precision = self.group.exchange.forward if forward else self.group.exchange.backward
        size = 2 if forward and self.group.dtype == "bfloat16" else item_bytes
        if event.inside:  # decoded already, or not yet encoded
            precision, size = "float32", item_bytes
        columns_N = self._used_relayed_columns() if event.inside else self._used_columns()
        row_N = np.array([int(encoded_bytes(int(columns), precision, size)) for columns in columns_N])
        moved_NxN = asked_NxN * np.tile(row_N, self.group.replicas)  # from the owner in the second place to who asked
        return moved_NxN.T if forward else moved_NxN

    def _asked(self, counts: GroupRouting) -> np.ndarray:
        """Rows that device n asks of device m, [N, N]; of the first devices, if no others were counted."""
        g = self.group
        counts_NxA = np.asarray(counts.counts_NxO, np.int64)
        N, E = len(counts_NxA), g.per_host if g.two_step else 1
        # Where columns are spread everyone is asked for the same rows; otherwise the m-th partner has its own number.
        partners = g.devices // E
        counts_NxP = np.broadcast_to(counts_NxA, (N, partners)) if counts_NxA.shape[1] == 1 else counts_NxA
        rows_NxN = np.zeros((N, g.all_devices), np.int64)
        for n in range(N):
            first = n // g.devices * g.devices  # of its replica group
            rows_NxN[n, first + n % E : first + g.devices : E] = counts_NxP[n]
        return rows_NxN

    def _handed(self, counts: GroupRouting) -> np.ndarray:
        """Rows that device n asks of relay m of its host, [N, N]; of the first devices, if no others were counted."""
        handed_NxE = np.asarray(counts.handed_NxE, np.int64)
        N, E = len(handed_NxE), self.group.per_host
        rows_NxN = np.zeros((N, self.group.all_devices), np.int64)
        for relay in range(N):
            first = relay // E * E
            rows_NxN[first : first + E, relay] = handed_NxE[relay]
        return rows_NxN

    def _used_columns(self) -> np.ndarray:
        """Columns of a row that each device of a replica group holds, without padding, [N]."""
        split = self.group.columns
        widths = np.diff([int(split.start(k)) for k in range(split.owners + 1)])
        return widths[[int(self.group.place(n)[1]) for n in range(self.group.devices)]]

    @abc.abstractmethod
    def _used_relayed_columns(self) -> np.ndarray:
        """Columns of a row that each device has gathered as a relay, without padding, [N]."""

    @abc.abstractmethod
    def ask(self, asked_OxC: jax.Array) -> tuple[jax.Array, Extents | None]:
        """Brings the holders the slots that they are asked for, [N, C], and how many are no padding, if that counts."""

    @abc.abstractmethod
    def assembled(self, parts: jax.Array) -> jax.Array:
        """The rows that this device fetched, of D columns, from what the holders sent."""

    @abc.abstractmethod
    def divided(self, grads_UxD: jax.Array) -> jax.Array:
        """The inverse of `assembled`: what of gradients goes to each holder."""

    @abc.abstractmethod
    def from_relays(self, rows_HxKxW: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
        """Hands out what this device fetched as a relay, from each host, as it would have come in one step."""

    @abc.abstractmethod
    def to_relays(self, parts: jax.Array, inside_ExC: jax.Array, across: int, largest: bool = False) -> jax.Array:
        """The way back of `from_relays`, to what this relay sends to each host: [H, K, W]; sums, or the largest."""

    def fetch(
        self, table_RxW: jax.Array, routing: GroupRouting, mean: bool = False
    ) -> tuple[jax.Array, FetchResiduals]:
        """Like `GroupExchange.fetch`: the holders get the slots that they are asked for, and send the rows back."""
        asked_OxC, inside_ExC = self.asked_rows(routing)
        with jax.named_scope(Phase.ID_EXCHANGE):
            slots_NxC, extents = self.ask(asked_OxC)
        gather = functools.partial(self.gather_local, table_RxW, mean=mean)
        back, pieces = extents and extents.back, self.group.row_pieces
        rows = fetch_rows(slots_NxC, gather, self.group.exchange.forward, self.sharding.axes, back, pieces)
        with jax.named_scope(Phase.ROW_EXCHANGE):
            if inside_ExC is not None:
                rows = self.from_relays(rows, inside_ExC, pieces)
            rows = self.assembled(rows)
        return rows.reshape(-1, self.group.dim), FetchResiduals(slots_NxC, inside_ExC, routing.summed, extents=extents)

    def send_gradients(self, residuals: FetchResiduals, grads_UxD: jax.Array) -> SparseGradient:
        """Like `GroupExchange.send_gradients`: gradients go the way that the rows came."""
        with jax.named_scope(Phase.GRAD_EXCHANGE):
            parts = self.divided(grads_UxD)
            if residuals.inside_ExC is not None:
                parts = self.to_relays(parts, residuals.inside_ExC, residuals.slots_NxC.shape[1])
            arrived = exchange_rows(parts, self.group.exchange.backward, self.sharding.axes, residuals.extents)
        return self.summed_over_devices(residuals, arrived)

    def tell_requesters(self, residuals: FetchResiduals, numbers_NxC: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_requesters`."""
        parts = all_to_all(numbers_NxC[..., None], self.sharding.axes)
        if residuals.inside_ExC is not None:
            parts = self.from_relays(parts, residuals.inside_ExC)
        return self.added(parts)

    def tell_owners(self, residuals: FetchResiduals, numbers_F: jax.Array) -> jax.Array:
        """Like `GroupExchange.tell_owners`."""
        parts = self.repeated(numbers_F)
        if residuals.inside_ExC is not None:
            parts = self.to_relays(parts, residuals.inside_ExC, residuals.slots_NxC.shape[1], largest=True)
        return all_to_all(parts, self.sharding.axes)[..., 0]

    @abc.abstractmethod
    def added(self, parts: jax.Array) -> jax.Array:
        """A number for each row that this device fetched, [lists * C], from one of each holder."""

    @abc.abstractmethod
    def repeated(self, numbers_F: jax.Array) -> jax.Array:
        """Returns what goes to each holder, [..., 1], of a number for each row that this device fetched."""


@dataclasses.dataclass(frozen=True)
class RowExchange(SpreadExchange):
    """Each device holds some rows, whole."""

    @property
    def relayed_parts(self) -> int:
        """One: a relay fetches whole rows."""
        return 1

    def _used_relayed_columns(self) -> np.ndarray:
        return np.full(self.sharding.devices, self.group.dim)

    def ask(self, asked_OxC: jax.Array) -> tuple[jax.Array, Extents | None]:
        """Each owner gets the slots of its own rows."""
        extents = extents_of(asked_OxC, self.group.rows, self.sharding.axes) if self.group.ragged else None
        return all_to_all(asked_OxC, self.sharding.axes, extents, self.group.rows), extents

    def assembled(self, parts: jax.Array) -> jax.Array:
        """Whole rows, as they came."""
        return parts

    def divided(self, grads_UxD: jax.Array) -> jax.Array:
        """A list for each owner, or relay."""
        return grads_UxD.reshape(self.group.num_row_lists, -1, self.group.dim)

    def from_relays(self, rows_HxKxW: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
        """Like `SpreadExchange.from_relays`: [E, C, D], a list from each relay."""
        return scatter_within_host(rows_HxKxW.reshape(-1, rows_HxKxW.shape[-1]), inside_ExC, pieces)

    def to_relays(self, parts: jax.Array, inside_ExC: jax.Array, across: int, largest: bool = False) -> jax.Array:
        """Like `SpreadExchange.to_relays`, of [E, C, D]."""
        sums_MxD = reduce_within_host(parts, inside_ExC, self.group.num_peers * across, largest)
        return sums_MxD.reshape(self.sharding.hosts, across, parts.shape[-1])

    def added(self, parts: jax.Array) -> jax.Array:
        """Each row has one holder."""
        return parts.reshape(-1)

    def repeated(self, numbers_F: jax.Array) -> jax.Array:
        """A list for each owner, or relay."""
        return numbers_F.reshape(self.group.num_row_lists, -1, 1)

    def write(self, table_RxW: jax.Array, slots_R: Slots, proposed: Proposed, ok: jax.Array) -> tuple[jax.Array, Slots]:
        """Like `GroupExchange.write`; in one pass of a kernel, where there is one for the rule."""
        group, rule, gradient, context = self.group, self.group.optimizer, proposed.gradient, proposed.context
        lr: Any = context.learning_rates.get(group.name, getattr(rule, "learning_rate", None))
        whole_rows = group.lines is None and not group.divides_row_means
        on_gpu = whole_rows and kernels.available_on_gpu(table_RxW.dtype, group.width, table_RxW.size)
        if on_gpu and (constants := _gpu_rule(rule)) is not None:
            with jax.named_scope(Phase.SPARSE_UPDATE):
                scalars = (self.scale(context), context.rate * lr, ok)
                sums = slots_R.get("sum_of_squares")
                table_RxW, sums = update_in_place(table_RxW, sums, gradient.touched, gradient.sums, scalars, constants)
                return table_RxW, slots_R if sums is None else {"sum_of_squares": sums}
        own_mean = isinstance(rule, RowWiseAdagrad) and not group.divides_row_means  # which the kernel makes itself
        if not own_mean or rule.every_row or not self.in_place(table_RxW):
            return super().write(table_RxW, slots_R, proposed, ok)
        with jax.named_scope(Phase.SPARSE_UPDATE):
            table_RxW, sums_R = kernels.update_rowwise_adagrad(
                table_RxW,
                slots_R["sum_of_squares"],
                gradient.touched,
                gradient.sums,
                (self.scale(context), context.rate * lr, ok),
                eps=rule.eps,
                l2=rule.l2,
                weight_decay=rule.weight_decay,
            )
            return table_RxW, {"sum_of_squares": sums_R}


@dataclasses.dataclass(frozen=True)
class ColumnExchange(SpreadExchange):
    """Each device holds some columns: of all rows, or in a grid of those of its number within its host."""

    id_kind: ClassVar[str] = "all-gather"

    @property
    def relayed_parts(self) -> int:
        """H: a relay fetches the columns of the devices of its number on all hosts."""
        return int(self.sharding.hosts)

    def _used_relayed_columns(self) -> np.ndarray:
        gathered_E = self._used_columns().reshape(self.sharding.hosts, self.sharding.per_host).sum(axis=0)
        return np.tile(gathered_E, self.sharding.hosts)

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Like `SpreadExchange.events`; and the means over whole rows, if the optimizer asks for them."""
        g, events = self.group, super().events(capacities, samples, item_bytes)
        whole = g.optimizer.row_wise and not g.divides_row_means and not g.frozen
        if not whole or self.sharding.column_parts == 1:
            return events
        rows = events[0].padded_bytes / 4
        if g.synchronous:
            rows = g.replicas * (capacities.get(g.name + SUMMED, 0) + capacities.get(g.name + ROWS, 0))
        return [*events, self.event(Phase.SPARSE_UPDATE, "all-reduce", self.sharding.column_axes, rows * item_bytes)]

    def ask(self, asked_OxC: jax.Array) -> tuple[jax.Array, Extents | None]:
        """All holders get all slots."""
        return jax.lax.all_gather(asked_OxC, self.sharding.axes, axis=0, tiled=True), None

    def assembled(self, parts: jax.Array) -> jax.Array:
        """Whole rows [C, D] from the columns [N, C, W] of each device, or host, without their padding."""
        split = self.group.columns
        used = [parts[n, :, : split.start(n + 1) - split.start(n)] for n in range(split.owners)]
        return jnp.concatenate(used, axis=1)

    def divided(self, grads_UxD: jax.Array) -> jax.Array:
        """The columns of each device, or host, [N, C, W], padded with zeros."""
        split = self.group.columns
        parts = [grads_UxD[:, split.start(n) : split.start(n + 1)] for n in range(split.owners)]
        return jnp.stack([jnp.pad(part, ((0, 0), (0, self.group.width - part.shape[1]))) for part in parts])

    def from_relays(self, rows_HxKxW: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
        """Like `SpreadExchange.from_relays`: [parts of columns, lists * C, W]."""
        H, K, W = rows_HxKxW.shape
        E, C = inside_ExC.shape
        got_ExCxV = scatter_within_host(rows_HxKxW.transpose(1, 0, 2).reshape(K, H * W), inside_ExC, pieces)
        got_HxExCxW = got_ExCxV.reshape(E, C, H, W).transpose(2, 0, 1, 3)
        return got_HxExCxW.reshape(self.sharding.column_parts, self.group.num_row_lists * C, W)

    def to_relays(self, parts: jax.Array, inside_ExC: jax.Array, across: int, largest: bool = False) -> jax.Array:
        """Like `SpreadExchange.to_relays`, of [parts of columns, lists * C, W]."""
        (E, C), H, W = inside_ExC.shape, self.sharding.hosts, parts.shape[-1]
        parts = parts.reshape(H, E, C, W).transpose(1, 2, 0, 3).reshape(E, C, H * W)
        sums_MxV = reduce_within_host(parts, inside_ExC, self.group.num_peers * across, largest)
        return sums_MxV.reshape(across, H, W).transpose(1, 0, 2)

    def added(self, parts: jax.Array) -> jax.Array:
        """Sums over the holders of each row."""
        return parts.sum(axis=0).reshape(-1)

    def repeated(self, numbers_F: jax.Array) -> jax.Array:
        """The same number for each holder of a row."""
        return jnp.broadcast_to(numbers_F[None, :, None], (self.sharding.column_parts, len(numbers_F), 1))

    def row_mean(self, x_UxW: jax.Array) -> jax.Array:
        """Sums over the devices that hold the other columns of the same rows."""
        if self.sharding.column_parts == 1:
            return super().row_mean(x_UxW)
        # Along these axes all devices hold the same rows in the same order, since each was asked for all of them.
        return jax.lax.psum(self.row_sum(x_UxW), self.sharding.column_axes) / self.group.dim

    def row_sum(self, x_UxW: jax.Array) -> jax.Array:
        """Like `GroupExchange.row_sum`."""
        split, part = self.group.columns, jax.lax.axis_index(self.sharding.column_axes)
        used_W = jnp.arange(self.group.width, dtype=jnp.int32) < split.start(part + 1) - split.start(part)
        return jnp.where(used_W[None], x_UxW, 0).sum(axis=-1)


def _gpu_rule(rule: SparseOptimizer) -> RowRule | None:
    """Returns a rule as the kernel for GPUs takes it; None if it knows none like it."""
    if getattr(rule, "every_row", True):
        return None
    if isinstance(rule, Adagrad):
        return RowRule("rowwise_adagrad" if rule.row_wise else "adagrad", rule.eps, rule.l2, rule.weight_decay)
    if isinstance(rule, Sgd) and not rule.momentum:
        return RowRule("sgd", 0.0, rule.l2, rule.weight_decay)
    return None
