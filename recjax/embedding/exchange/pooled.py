"""The exchange of pooled vectors in a step: bags are summed where their rows are.

All functions run inside `jax.shard_map` over BATCH_AXES. Collectives of an exchange and step, N devices of b samples, C
entries of a list, q * `blocks` columns (see `layout.py`):

  id_exchange           all-to-all of the lists          N * C * 4 bytes a device; weights beside them, if any
  pooled_exchange       all-to-all of the sums           N * b * q * blocks * itemsize
  pooled_grad_exchange  all-to-all of their gradients    as much, back

Partial sums of shared streams go by a reduce-scatter of N * b * q * `shared_blocks` values inside a host, and what that
leaves, 1/E of them, by an all-to-all across hosts; gradients by these in the other order, with an all-gather.

An owner sorts the ids that it got, to know its distinct rows, and adds up the gradient of each: no row, and no gradient
of one, travels.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.exchange.base import replica_events
from recjax.embedding.exchange.events import Event, Meeting
from recjax.embedding.exchange.wire import all_to_all, exchange_rows, extents_of
from recjax.embedding.layout import PooledExchange
from recjax.embedding.quantize import encoded_bytes, from_storage
from recjax.embedding.residuals import Entries, SparseGradient, Vectors
from recjax.embedding.routing.pooled import PooledRouting
from recjax.embedding.routing.routed import GroupRouting
from recjax.embedding.segment import Exchange
from recjax.embedding.segment_sums import in_order, segment_sums
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, INSIDE_HOST, MODEL_AXES
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class PoolingExchange:
    """Owners of rows pool them for the samples of a step, and gradients of the vectors come back.

    Attributes:
      layout: its groups, their streams, and the place of each sum in what travels.
    """

    layout: PooledExchange

    @property
    def name(self) -> str:
        """Name of the scope of its operations."""
        return self.layout.name

    def events(self, capacities: Mapping[str, float], samples: int, item_bytes: int) -> list[Event]:
        """Returns the collectives of a step: see `GroupExchange.events`."""
        e = self.layout
        columns = (e.blocks * e.block, e.shared_blocks * e.block)
        divided = any(g.divides_row_means and own for g, own in zip(e.groups, e.streams, strict=True))
        entries = capacities[e.name]
        meeting, ragged = e.groups[0].meeting, e.groups[0].ragged
        events = vector_events(meeting, entries, samples, columns, e.block, e.weighted, e.exchange, item_bytes, ragged)
        if divided and e.devices > 1:
            size = e.devices * entries * item_bytes
            events += [meeting.event(Phase.ROW_STATISTIC, "all-to-all", MODEL_AXES, size)] * 2
        alone = (group for group in e.groups if not group.sources)  # an exchange of rows tells it of the others
        return events + [event for group in alone for event in replica_events(group, capacities, item_bytes)]

    def sent_bytes(self, event: Event, counts: GroupRouting, samples: int, item_bytes: int) -> np.ndarray | None:
        """Returns what of an event is no padding: see `GroupExchange.sent_bytes`.

        Args:
          event: one of `events`.
          counts: entries of the lists of ids, of all devices or the first ones: see `PooledRouting`.
          samples: b.
          item_bytes: of a table's element, if that is not bfloat16, and of a weight.
        """
        e, group = self.layout, self.layout.groups[0]
        listed_NxO = np.asarray(counts.counts_NxO, np.int64)
        N, devices, E = len(listed_NxO), e.devices, group.per_host
        lengths = group.ragged and event.phase == Phase.ID_EXCHANGE and event.kind == "all-to-all"
        if not event.kind.endswith("all-to-all") or event.phase == Phase.ROW_STATISTIC or lengths:
            return None
        if event.phase == Phase.ID_EXCHANGE:
            each = listed_NxO * (item_bytes if event.piece else 4)
        else:
            forward, shared = event.phase == Phase.POOLED_EXCHANGE, event.axes == ACROSS_HOSTS
            block = int(encoded_bytes(e.block, e.exchange.forward if forward else e.exchange.backward, item_bytes))
            columns = np.array([e.columns(owner, shared) for owner in range(devices)])
            each = np.broadcast_to(samples * columns // e.block * block, (N, devices))
            if shared:  # only devices of equal numbers within their hosts
                each = np.where(np.arange(N)[:, None] % E == np.arange(devices)[None] % E, each, 0)
        found = np.zeros((N, group.all_devices), np.int64)
        for n in range(N):
            first = n // devices * devices  # of its replica group
            found[n, first : first + devices] = each[n]
        return found.T if event.phase == Phase.POOLED_EXCHANGE else found

    def look_up(
        self, tables: Mapping[str, jax.Array], routing: PooledRouting, samples: int, mean: bool = False
    ) -> tuple[Vectors, tuple[Entries, ...]]:
        """Brings the pooled vectors of this device's samples.

        Args:
          tables: group name -> this device's part of its buffer.
          routing: this device's lists.
          samples: b.
          mean: where replica groups are independent, take the mean of their rows instead of those of the own group.

        Returns:
          the vectors; and for each group what `send_gradients` needs.
        """
        with jax.named_scope(self.layout.name):
            with jax.named_scope(Phase.ID_EXCHANGE):
                lists_OxC, extents = routing.ids_NxOxC[0], None
                nothing = self.layout.no_id
                if self.layout.groups[0].ragged:
                    extents = extents_of(lists_OxC, nothing, least=self.layout.counted * samples)
                lists_NxC = all_to_all(lists_OxC, extents=extents, nothing=nothing)
                weights_NxC = None
                if routing.weights_NxOxC is not None:
                    weights_NxC = all_to_all(routing.weights_NxOxC[0], extents=extents)
            entries = self._entries(routing, lists_NxC, weights_NxC, samples)
            sums = [
                self._summed(g, tables[group.name], entries[g], len(lists_NxC) * self.layout.widths[g] * samples, mean)
                for g, group in enumerate(self.layout.groups)
            ]
            with jax.named_scope(Phase.POOLED_EXCHANGE):
                blocks = self._blocks(sums, samples)
                arrived, shared = None, None
                if self.layout.blocks:
                    arrived = exchange_rows(self._as_sent(blocks, False), self.layout.exchange.forward)
                if self.layout.shared_blocks:
                    shared = self._from_hosts(self._as_sent(blocks, True))
            return self._vectors((arrived, shared), routing, samples), entries

    def send_gradients(
        self,
        routing: PooledRouting,
        entries: tuple[Entries, ...],
        grads: Vectors,
    ) -> dict[str, SparseGradient]:
        """Brings the gradients of the vectors to the owners, which add them up by row.

        Returns:
          group name -> gradients of the distinct rows that the devices of this replica group asked for.
        """
        with jax.named_scope(self.layout.name):
            with jax.named_scope(Phase.POOLED_GRAD_EXCHANGE):
                scaled = self._scaled(grads, routing)
                arrived = []
                if self.layout.blocks:
                    arrived.append(exchange_rows(self._gradients(scaled), self.layout.exchange.backward))
                if self.layout.shared_blocks:
                    arrived.append(self._to_hosts(self._host_gradients(scaled)))
                of_bags = self._as_summed(arrived)
            found = {}
            for g, group in enumerate(self.layout.groups):
                with jax.named_scope(Phase.SPARSE_UPDATE):
                    found[group.name] = self._by_row(g, entries[g], of_bags[g], routing.sizes[g][1])
            return found

    def _entries(
        self,
        routing: PooledRouting,
        lists_NxC: jax.Array,
        weights_NxC: jax.Array | None,
        b: int,
    ) -> tuple[Entries, ...]:
        """Takes the lists apart, group by group."""
        N, J = len(lists_NxC), self.layout.counted
        this = jax.lax.axis_index(MODEL_AXES)
        counts_NxJxb = lists_NxC[:, : J * b].reshape(N, J, b)
        start_N: jax.Array | int = J * b
        found = []
        for g, (group, T) in enumerate(zip(self.layout.groups, self.layout.widths, strict=True)):
            size = routing.sizes[g][0]
            lengths_T = jnp.asarray(self.layout.fixed_lengths(g))[this]
            lengths_NxTxb = jnp.broadcast_to(lengths_T[:, None], (N, T, b))
            if J:
                row_T = jnp.asarray(self.layout.counted_rows(g))[this]
                counted_NxTxb = counts_NxJxb.at[:, row_T].get(mode="fill", fill_value=0)
                lengths_NxTxb = lengths_NxTxb + counted_NxTxb
            total_N = lengths_NxTxb.sum(axis=(1, 2), dtype=jnp.int32)
            place_1xC = jnp.arange(size, dtype=jnp.int32)[None]
            bag_NxC = jax.vmap(functools.partial(_repeated, total=size))(lengths_NxTxb.reshape(N, T * b))
            streams_M = (bag_NxC // b).reshape(-1)
            bag_NxC += (jnp.arange(N, dtype=jnp.int32) * T * b)[:, None]
            at_NxC = jnp.broadcast_to(jnp.reshape(start_N, (-1, 1)) + place_1xC, (N, size))
            slots_NxC = jnp.take_along_axis(lists_NxC, at_NxC, axis=1, mode="fill", fill_value=group.rows)
            used_NxC = place_1xC < total_N[:, None]
            slots_NxC = jnp.where(used_NxC, jnp.minimum(slots_NxC, group.rows), group.rows)
            weights_M = None
            if weights_NxC is not None:
                weights_M = jnp.take_along_axis(weights_NxC, at_NxC, axis=1, mode="fill", fill_value=0).reshape(-1)
            places_M = jnp.where(used_NxC, at_NxC, lists_NxC.shape[1]).reshape(-1)
            found.append(Entries(slots_NxC.reshape(-1), bag_NxC.reshape(-1), weights_M, places_M, streams_M))
            start_N = start_N + total_N
        return tuple(found)

    def _summed(self, g: int, table_RxW: jax.Array, entries: Entries, bags: int, mean: bool) -> jax.Array:
        """The sums of all bags of a group, [bags, D]; `mean` as for `look_up`."""
        group = self.layout.groups[g]
        slots_M, bags_M, weights_M = entries[:3]
        if mean and group.independent:
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                asked = jax.tree.map(lambda x: jax.lax.all_gather(x, ACROSS_GROUPS), entries)
            of_groups = [jax.tree.map(operator.itemgetter(r), asked) for r in range(group.replicas)]
            sums = jnp.stack([self._summed(g, table_RxW, of_group, bags, False) for of_group in of_groups])
            with jax.named_scope(Phase.REPLICA_EXCHANGE):
                mean_BxD: jax.Array = jax.lax.psum_scatter(sums, ACROSS_GROUPS) / group.replicas
            return mean_BxD

        def read(table_RxW: jax.Array, slots: jax.Array) -> jax.Array:
            rows = from_storage(group.get_rows(table_RxW, slots))
            return rows.astype(jnp.float32) if rows.dtype == jnp.bfloat16 else rows

        with jax.named_scope(Phase.GATHER):
            return segment_sums(table_RxW, slots_M, bags_M, weights_M, bags, read, group.rows, group.atomics)

    def _by_row(self, g: int, entries: Entries, grads_BxD: jax.Array, rows: int) -> SparseGradient:
        """The gradients of `rows` distinct rows of a group at most, from those of the bags."""
        group = self.layout.groups[g]
        slots_M, bags_M, weights_M = entries[:3]
        sorted_M, order_M = in_order(slots_M)
        starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
        row_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
        row_M = jnp.where(sorted_M < group.rows, row_M, rows)
        unused = group.rows + jnp.arange(rows, dtype=jnp.int32)
        touched = unused.at[row_M].set(sorted_M, mode="drop", indices_are_sorted=True)
        weights_M = None if weights_M is None else weights_M[order_M]
        sums = segment_sums(grads_BxD, bags_M[order_M], row_M, weights_M, rows, atomics=group.atomics)
        return SparseGradient(touched, sums)

    def _blocks(self, sums: list[jax.Array], b: int) -> jax.Array:
        """The sums of all groups, [N, blocks of all, b, q]."""
        blocks = [sums_BxD.reshape(self.layout.devices, -1, b, self.layout.block) for sums_BxD in sums]
        return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)

    def _as_sent(self, blocks: jax.Array, shared: bool) -> jax.Array:
        """Returns the blocks that travel in one buffer, [N, blocks * b, q]."""
        N, _, _, q = blocks.shape
        places = self.layout.sent_blocks(shared)
        if places is not None:
            place = jnp.asarray(places)[jax.lax.axis_index(MODEL_AXES)]
            blocks = blocks.at[:, place].get(mode="fill", fill_value=0)
        return blocks.reshape(N, -1, q)

    def _from_hosts(self, partial_NxRxq: jax.Array) -> jax.Array:
        """Adds partial sums up inside each host, and brings this device the sums of each host for it, [H, R, q]."""
        H, (N, R, q) = self.layout.hosts, partial_NxRxq.shape
        of_host = partial_NxRxq.reshape(H, N // H, R, q).swapaxes(0, 1)
        sums_HxRxq = jax.lax.psum_scatter(of_host, INSIDE_HOST, scatter_dimension=0, tiled=False)
        return exchange_rows(sums_HxRxq, self.layout.exchange.forward, ACROSS_HOSTS)

    def _to_hosts(self, grads_HxRxq: jax.Array) -> jax.Array:
        """The way back of `_from_hosts`: what all devices have for this one's host, [N, R, q]."""
        arrived_HxRxq = exchange_rows(grads_HxRxq, self.layout.exchange.backward, ACROSS_HOSTS)
        all_ExHxRxq = jax.lax.all_gather(arrived_HxRxq, INSIDE_HOST)
        return all_ExHxRxq.swapaxes(0, 1).reshape(self.layout.devices, *grads_HxRxq.shape[1:])

    def _as_summed(self, arrived: list[jax.Array]) -> list[jax.Array]:
        """The inverse of `_blocks` and `_as_sent`, for gradients in one buffer or both: for each group [bags, D]."""
        N, q = self.layout.devices, self.layout.block
        places = self.layout.arrived_blocks()
        if places is None:
            return [arrived[0].reshape(-1, self.layout.groups[0].dim)]
        together = arrived[0] if len(arrived) == 1 else jnp.concatenate(arrived, axis=1)
        b = together.shape[1] // (self.layout.blocks + self.layout.shared_blocks)
        place = jnp.asarray(places)[jax.lax.axis_index(MODEL_AXES)]
        blocks = together.reshape(N, -1, b, q).at[:, place].get(mode="fill", fill_value=0)
        sizes = [T * group.dim // q for group, T in zip(self.layout.groups, self.layout.widths, strict=True)]
        parts = jnp.split(blocks, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(-1, group.dim) for part, group in zip(parts, self.layout.groups, strict=True)]

    def _vectors(self, arrived: tuple[jax.Array | None, jax.Array | None], routing: PooledRouting, b: int) -> Vectors:
        """Each stream's vectors, [b, D]; partial sums of several owners are added up.

        Args:
          arrived: what each owner sent, [N, blocks * b, q], and of shared streams each host, [H, shared_blocks * b, q].
          routing: as `look_up` has it.
          b: samples.
        """
        q, per_host = self.layout.block, self.layout.devices // self.layout.hosts
        found: Vectors = {}
        for group, streams in zip(self.layout.groups, self.layout.streams, strict=True):
            rows = group.dim // q * b
            for stream in streams:
                total: jax.Array | None = None
                of_senders = arrived[stream.shared]
                assert of_senders is not None
                for owner in stream.owners[:1] if stream.shared else stream.owners:
                    start = self.layout.starts[owner, stream.name] * b
                    sender = owner // per_host if stream.shared else owner
                    part = of_senders[sender, start : start + rows].reshape(b, group.dim)
                    total = part if total is None else total + part
                assert total is not None
                factor_b = routing.factors.get(stream.feature.name)
                found[stream.name] = total if factor_b is None else total * factor_b[:, None]
        return found

    def _scaled(self, grads: Vectors, routing: PooledRouting) -> Vectors:
        """Gradients of each stream's sums, in blocks: [D / q * b, q]."""
        q = self.layout.block
        scaled = {}
        for streams in self.layout.streams:
            for stream in streams:
                factor_b = routing.factors.get(stream.feature.name)
                grad = grads[stream.name]
                scaled[stream.name] = (grad if factor_b is None else grad * factor_b[:, None]).reshape(-1, q)
        return scaled

    def _gradients(self, scaled: Vectors) -> jax.Array:
        """The inverse of `_vectors`: what goes to each owner, [N, blocks * b, q]."""
        return jnp.stack([self._one_after_the_other(scaled, owner, False) for owner in range(self.layout.devices)])

    def _host_gradients(self, scaled: Vectors) -> jax.Array:
        """The same of shared streams: what goes to each host, [H, shared_blocks * b, q]."""
        each = range(0, self.layout.devices, self.layout.devices // self.layout.hosts)  # the first device of each
        return jnp.stack([self._one_after_the_other(scaled, owner, True) for owner in each])

    def _one_after_the_other(self, scaled: Vectors, owner: int, shared: bool) -> jax.Array:
        streams = [stream for of_group in self.layout.of_owner[owner] for stream in of_group if stream.shared == shared]
        like, group, of_group = next(iter(scaled.values())), self.layout.groups[0], self.layout.streams[0]
        b = len(scaled[of_group[0].name]) // (group.dim // self.layout.block)
        parts = [scaled[stream.name] for stream in streams]
        size = (self.layout.shared_blocks if shared else self.layout.blocks) * b
        return jnp.concatenate([*parts, jnp.zeros((size - sum(map(len, parts)), self.layout.block), like.dtype)])

    def dims_of(self, g: int, entries: Entries, dtype: Any) -> jax.Array:
        """Columns of the whole table that each of an owner's ids looks up, [M]; 1 for what is none."""
        N, T = self.layout.devices, self.layout.widths[g]
        dims = np.ones((N, T))
        for owner, groups in enumerate(self.layout.of_owner):
            dims[owner, : len(groups[g])] = [stream.source.segments[0].spec.dim for stream in groups[g]]
        return jnp.asarray(dims, dtype)[jax.lax.axis_index(MODEL_AXES)][entries.streams_M]


def vector_events(
    meeting: Meeting,
    entries: float,
    samples: int,
    columns: tuple[float, float],
    block: float,
    weighted: bool,
    precision: Exchange,
    item_bytes: int,
    ragged: bool = False,
) -> list[Event]:
    """The collectives of an exchange of pooled vectors; none on one device.

    Args:
      meeting: of the devices.
      entries: of the list of ids from a device to an owner, at most.
      samples: b.
      columns: of the vectors that an owner sends for each sample, at most; and of those that a host does together.
      block: q, columns that are encoded together.
      weighted: whether ids carry weights.
      precision: of the vectors and their gradients.
      item_bytes: of an element, and of a weight.
      ragged: whether lists of ids travel without their padding.
    """
    H, N = meeting.hosts, meeting.hosts * meeting.per_host
    if N == 1:
        return []
    of_ids = ("ragged-" if ragged else "") + "all-to-all"

    def make(phase: Phase, kind: str, axes: tuple[str, ...], size: float, piece: int = 0) -> Event:
        return dataclasses.replace(meeting.event(phase, kind, axes, size), piece=piece)

    events = [make(Phase.ID_EXCHANGE, of_ids, MODEL_AXES, N * entries * 4)]
    if ragged:
        events.append(make(Phase.ID_EXCHANGE, "all-to-all", MODEL_AXES, N * 4))
    if weighted:
        events.append(make(Phase.ID_EXCHANGE, of_ids, MODEL_AXES, N * entries * item_bytes, piece=1))
    for phase, way in ((Phase.POOLED_EXCHANGE, precision.forward), (Phase.POOLED_GRAD_EXCHANGE, precision.backward)):
        each, of_host = (samples * c / block * encoded_bytes(block, way, item_bytes) for c in columns)
        if each:
            events.append(make(phase, "all-to-all", MODEL_AXES, N * each))
        if of_host:
            across = make(phase, "all-to-all", ACROSS_HOSTS, H * of_host)
            plain = H * samples * columns[1] * item_bytes
            if phase == Phase.POOLED_EXCHANGE:
                events += [make(phase, "reduce-scatter", INSIDE_HOST, plain), across]
            else:
                events += [across, make(phase, "all-gather", INSIDE_HOST, N // H * plain)]
    return events


def _repeated(lengths_B: jax.Array, total: int) -> jax.Array:
    """0 `lengths[0]` times, 1 `lengths[1]` times, and so on, int32 [total]; then the last number."""
    starts_B = jnp.cumsum(lengths_B, dtype=jnp.int32) - lengths_B
    begun = jnp.zeros(total, jnp.int32).at[starts_B[1:]].add(1, mode="drop", indices_are_sorted=True)
    return jnp.cumsum(begun, dtype=jnp.int32)


def tell_requesters(routing: PooledRouting, entries: Sequence[Entries], numbers: Sequence[jax.Array]) -> jax.Array:
    """Sends each device one number for every id that it asked this one for.

    Args:
      routing: as `look_up` got it.
      entries: of some groups.
      numbers: for each of them [M], beside its entries.

    Returns:
      [O, C], beside this device's own lists; 0 where other groups have the ids.
    """
    N, C = routing.ids_NxOxC.shape[1:]
    lists_NxC = jnp.zeros((N, C), numbers[0].dtype)
    for of_group, numbers_M in zip(entries, numbers, strict=True):
        places_NxM = of_group.places_M.reshape(N, -1)
        lists_NxC = lists_NxC.at[jnp.arange(N)[:, None], places_NxM].set(numbers_M.reshape(N, -1), mode="drop")
    return all_to_all(lists_NxC)


def tell_owners(entries: Sequence[Entries], numbers_OxC: jax.Array) -> list[jax.Array]:
    """Sends the owners of the ids one number for each: the inverse of `tell_requesters`; for each group [M]."""
    arrived_NxC = all_to_all(numbers_OxC)
    N = len(arrived_NxC)
    found = []
    for of_group in entries:
        places_NxM = of_group.places_M.reshape(N, -1)
        found.append(jnp.take_along_axis(arrived_NxC, places_NxM, axis=1, mode="fill", fill_value=0).reshape(-1))
    return found
