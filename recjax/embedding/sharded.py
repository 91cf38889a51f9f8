"""All tables of a model, spread over the mesh: what the jitted steps call, inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from recjax.embedding.all_rows import AllRows
from recjax.embedding.buffers import GroupSlots, Tables
from recjax.embedding.elements import Elements
from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.exchange.copies import HotExchange, ReplicatedExchange
from recjax.embedding.exchange.pooled import PoolingExchange
from recjax.embedding.exchange.rows import ColumnExchange, RowExchange
from recjax.embedding.exchange.touched_rows import TouchedRowsExchange, TouchedRowsSharding
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan, Pool
from recjax.embedding.pooling import SortedIds, pool
from recjax.embedding.residuals import (
    FetchResiduals,
    Gradients,
    LookedUp,
    Proposed,
    Residuals,
    Rows,
    UpdateContext,
    Vectors,
)
from recjax.embedding.routing.routed import Routing
from recjax.embedding.row_statistic import row_means
from recjax.embedding.sharding import (
    ColumnSharding,
    GridSharding,
    Homes,
    HotPerHostSharding,
    HotSharding,
    ReplicatedSharding,
    RowSharding,
    Sharding,
    homes_of,
)
from recjax.parallel.mesh import BATCH_AXES, MODEL_AXES

ALL_ROWS = " all rows"  # names them among the vectors that were looked up


# Exchanges by the placement of a plan: all of them.
EXCHANGES: dict[str, tuple[type[Sharding], type[GroupExchange]]] = {
    "row_wise": (RowSharding, RowExchange),
    "table_wise": (RowSharding, RowExchange),
    "table_row_wise": (RowSharding, RowExchange),
    "column_wise": (ColumnSharding, ColumnExchange),
    "grid": (GridSharding, ColumnExchange),
    "data_parallel": (ReplicatedSharding, ReplicatedExchange),
    "data_parallel_sparse": (TouchedRowsSharding, TouchedRowsExchange),
    "hot": (HotSharding, HotExchange),
    "hot_per_host": (HotPerHostSharding, HotExchange),
}
_OF_SHARDING = dict(EXCHANGES.values())


def exchange_of(group: Group) -> GroupExchange:
    """Returns the exchange of a group's rows."""
    return _OF_SHARDING[type(group.sharding)](group)


def exchanges_of(bound: BoundPlan) -> list[GroupExchange | PoolingExchange]:
    """Returns all exchanges of a plan: those of rows, or of their gradients, and those of vectors that owners pool."""
    return [*(exchange_of(group) for group in bound.fetching), *(PoolingExchange(layout) for layout in bound.pooled)]


@dataclasses.dataclass(frozen=True)
class ShardedEmbeddings:
    """The tables of a bound plan. Its methods go over the table groups; each group's exchange does the work.

    Attributes:
      bound: the bound plan.
      all_rows: a table of which all rows are looked up; None: there is none.
    """

    bound: BoundPlan
    all_rows: AllRows | None = None

    @property
    def learning(self) -> list[Group]:
        """The groups that a step updates: all but those of frozen tables, whose gradients nobody asks for."""
        return [group for group in self.bound.groups if not group.frozen]

    def partition_specs(self) -> dict[str, P]:
        """Group name -> how its buffer is split over the mesh."""
        return {group.name: P(group.value_group.partition_axes) for group in self.bound.groups}

    def slot_specs(self) -> dict[str, P]:
        """Group name -> how each of its slots is split over the mesh."""
        return {group.name: P(group.slot_group.partition_axes) for group in self.bound.groups}

    def fetch(self, tables: Tables, routing: Routing, samples: int, mean: bool = False) -> tuple[LookedUp, Residuals]:
        """Brings what this device's samples need, distinct rows or pooled vectors: see `GroupExchange.fetch`.

        And its share of `all_rows`.

        Args:
          tables: this device's parts.
          routing: of the batch.
          samples: b, of this device.
          mean: as for `GroupExchange.fetch`.
        """
        rows: Rows = {}
        residuals = Residuals({}, {})
        for group in self.bound.fetching:
            with jax.named_scope(group.name):  # sets the collectives of several groups apart
                found = exchange_of(group).fetch(tables[group.name], routing.groups[group.name], mean)
            rows[group.name], residuals.groups[group.name] = found
        vectors: Vectors = {}
        for exchange in self.bound.pooled:
            of, entries = PoolingExchange(exchange).look_up(tables, routing.pooled[exchange.name], samples, mean)
            vectors |= of
            residuals.pooled[exchange.name] = entries
        if self.all_rows is not None:
            group = self.all_rows.group
            vectors[ALL_ROWS] = self.all_rows.read(exchange_of(group), tables[group.name])
        return LookedUp(rows, vectors), residuals

    def pool(self, found: LookedUp, tables: Tables | None, routing: Routing, samples: int) -> dict[str, Any]:
        """Pools each feature's bags: feature name -> [samples, D], or the rows of the bags where they stay apart.

        Args:
          found: as `fetch` brought it.
          tables: None, or this device's parts, from which a kernel may sum bags where they hold all rows.
          routing: of the same batch.
          samples: of this device.
        """
        parts: dict[str, Any] = {}
        for place in self.bound.pools:
            operands = None
            if tables and len(place.rows) == 1 and (group := self.bound.group(place.rows[0].group)).dim == place.width:
                operands = exchange_of(group).fused_operands(tables[group.name], routing.groups[group.name])
            specs = [lookup.spec for lookup in place.lookups]
            atomics = any(self.bound.group(fetched.group).atomics for fetched in place.rows)
            rows, order = _concatenated(place, found.rows), self._order(place, routing, tables)
            parts |= pool(specs, rows, routing.features, samples, operands, atomics, order)
        elsewhere = {feature.name for exchange in self.bound.pooled for feature in exchange.features}
        pooled: dict[str, Any] = {}
        pieces: dict[str, list[tuple[int, jax.Array]]] = {name: [] for name in elsewhere}
        for lookup in sorted(self.bound.lookups, key=lambda lookup: lookup.first):
            part, name = parts[lookup.name], lookup.feature
            if name in elsewhere:
                pieces[name].append((lookup.first, part))
            else:
                pooled[name] = _beside(pooled[name], part) if name in pooled else part
        for exchange in self.bound.pooled:
            for stream in (stream for of_group in exchange.streams for stream in of_group):
                pieces[stream.feature.name].append((stream.first, found.vectors[stream.name]))
        return pooled | {name: _assembled(of_feature) for name, of_feature in pieces.items()}

    def _order(self, place: Pool, routing: Routing, tables: Tables | None) -> SortedIds | None:
        """Returns the order in which a pool's ids were sorted by rows: None unless they are those of one group.

        With the table where a device holds all its rows as they are; then nothing needs those that `fetch` gave.
        """
        group = self.bound.group(place.rows[0].group)
        sorted_ids = routing.groups[group.name]
        if len(place.rows) > 1 or sorted_ids.order_M is None:
            return None
        lookups = {lookup.sources[0]: lookup.name for lookup in place.lookups if len(lookup.sources) == 1}
        if len(lookups) != len(place.lookups) or set(lookups) != {source.name for source in group.sources}:
            return None
        features = tuple(lookups[source.name] for source in group.sources)
        if sum(routing.features[name].inverse.size for name in features) != len(sorted_ids.order_M):
            return None  # a part of the samples
        plain = group.dtype == "float32" and group.lines is None and group.dim == place.width
        table, ids = tables[group.name] if tables and plain else None, sorted_ids
        return SortedIds(features, ids.order_M, ids.row_M, ids.start_U, table, ids.slot_M)

    def squares(self, gradients: Gradients, scale: jax.Array, homes: Homes) -> dict[str, jax.Array]:
        """Sums the squares of each group's gradients on this device, in an order that no slot has a part in: [] each.

        Args:
          gradients: of the rows.
          scale: [], what these are multiplied with.
          homes: of the slots of caches.
        """
        found = {}
        for group in self.learning:
            sums = gradients[group.name].sums
            if group.cached:
                slots = exchange_of(group).touched_slots(gradients[group.name])
                beyond = group.home_rows - group.rows
                sums = sums[jnp.argsort(homes_of(slots, homes[group.name], beyond))]
            found[group.name] = jnp.sum(jnp.square(sums * scale))
        return found

    def send_gradients(self, residuals: Residuals, routing: Routing, grads: LookedUp) -> Gradients:
        """Brings every row's gradient, summed over the batch, to where it lives: see `GroupExchange.send_gradients`.

        Args:
          residuals: as `fetch` left them.
          routing: as it got it.
          grads: gradients of what it brought.
        """
        pooled: Gradients = {} if self.all_rows is None else self.all_rows.gradient(grads.vectors[ALL_ROWS])
        for exchange in self.bound.pooled:
            name = exchange.name
            of, entries = routing.pooled[name], residuals.pooled[name]
            pooled |= PoolingExchange(exchange).send_gradients(of, entries, grads.vectors)
        gradients: Gradients = {}
        for group in self.learning:
            own, further = residuals.groups.get(group.name), pooled.get(group.name)
            with jax.named_scope(group.name):
                if own is not None:
                    own = own._replace(further=further)
                    found = exchange_of(group).send_gradients(own, grads.rows[group.name])
                else:
                    assert further is not None
                    asked = FetchResiduals(further.touched[None], None, len(further.touched))
                    found = exchange_of(group).summed_over_devices(asked, further.sums)
            gradients[group.name] = found
        return gradients

    def total(self, of_groups: Mapping[str, jax.Array], replicated: jax.Array) -> jax.Array:
        """Sums something that each device counted of its own rows over groups and devices, each distinct row once.

        Args:
          of_groups: group name -> an array of this device, [...].
          replicated: [...], that all devices have alike; added once.

        Returns:
          [...], the same on all devices (of synchronous replica groups: on all of a group). One all-reduce, unless
          every device holds all rows. What all devices hold alike, or all of a replica group, is one device's part of
          the sum. So it depends on all of `replicated`, or XLA would combine it with one of the all-reduces that this
          came from, which would then wait for the row gradients.
        """
        bound = self.bound
        spread = [of_groups[g.name] for g in self.learning if g.sharding.updates_apart]
        every = [g for g in self.learning if not g.sharding.updates_apart]
        in_group = [of_groups[g.name] for g in every if g.independent]
        alike = sum((of_groups[g.name] for g in every if not g.independent), replicated)
        if not spread and not in_group:
            return alike
        axes = MODEL_AXES if bound.synchronous else BATCH_AXES  # along which devices hold other rows, or rows of others
        total = sum(spread) + jnp.where(jax.lax.axis_index(axes) == 0, alike, 0)
        if in_group:
            total = total + jnp.where(jax.lax.axis_index(MODEL_AXES) == 0, sum(in_group), 0)
        return jax.lax.psum(total, axes)

    def propose(
        self,
        tables: Tables,
        slots: GroupSlots,
        routing: Routing,
        residuals: Residuals,
        gradients: Gradients,
        context: UpdateContext,
    ) -> dict[str, Proposed]:
        """Makes one exact update of the touched rows of all tables, and writes nothing: see `GroupExchange.propose`."""
        divided = {group.name: exchange_of(group) for group in self.bound.groups if group.divides_row_means}
        means = row_means(self.bound, divided, tables, routing, residuals, gradients, context) if divided else {}
        proposed: dict[str, Proposed] = {}
        for group in self.learning:
            name = group.name
            with jax.named_scope(name):
                proposed[name] = exchange_of(group).propose(
                    tables[name], slots[name], gradients[name], context, means.get(name)
                )
        return proposed

    def write(
        self, tables: Tables, slots: GroupSlots, proposed: Mapping[str, Proposed], ok: jax.Array
    ) -> tuple[Tables, GroupSlots]:
        """Writes what `propose` gave, in place, or nothing unless `ok`: see `GroupExchange.write`."""
        new_tables: Tables = dict(tables)
        new_slots: GroupSlots = dict(slots)
        for group in self.learning:
            name = group.name
            with jax.named_scope(name):
                new = exchange_of(group).write(tables[name], slots[name], proposed[name], ok)
                new_tables[name], new_slots[name] = new
        return new_tables, new_slots


def _concatenated(place: Pool, rows: Rows) -> jax.Array:
    """The rows that a pool's lookups index, [sum of U, columns]."""
    found = []
    for part in place.rows:
        of_group = rows[part.group]
        found.append(of_group if part.columns == of_group.shape[1] else of_group[:, part.first : part.last])
    return found[0] if len(found) == 1 else jnp.concatenate(found)


def _assembled(pieces: list[tuple[int, jax.Array]]) -> jax.Array:
    """All columns of a feature, [samples, D], from pieces that start at some of them; where these overlap, sums."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    cuts = sorted({cut for first, part in pieces for cut in (first, first + part.shape[1])})
    columns = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        over = [
            part[:, start - first : stop - first]
            for first, part in pieces
            if first <= start and stop <= first + part.shape[1]
        ]
        columns.append(functools.reduce(jnp.add, over))
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)


def _beside(left: Any, right: Any) -> Any:
    """The columns of a feature that was looked up in two parts."""
    if isinstance(left, Elements):
        return dataclasses.replace(left, rows_LxD=jnp.concatenate([left.rows_LxD, right.rows_LxD], axis=1))
    return jnp.concatenate([left, right], axis=1)
