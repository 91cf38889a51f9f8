"""Routing on the devices: within the program of a step, so that nothing waits for the host between batch and step.

The arrays are those that `host.py` makes on the host, element for element. The host lays the ids out (`pack_ids`),
which is a copy. On a device `find_rows` finds the distinct ones, and how many there are at most, which is what the
sizes of the routing must hold; `write_routing` writes the routing in arrays of given sizes. On one device nothing
travels, so that sizes are those of the worst case (`largest_sizes`); on several they are those of a `CapacityLadder`,
and whoever runs the program compares them with what the batch needed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.data.batch import Batch
from recjax.embedding.group import Group
from recjax.embedding.layout import ACROSS, SUMMED, BoundPlan
from recjax.embedding.routing.host import jagged_sizes, local_samples, locate_pooled, pack_feature
from recjax.embedding.routing.routed import FeatureRouting, GroupRouting, RoutedBatch, Routing
from recjax.embedding.segment_sums import by_segments, first_entries
from recjax.embedding.sharding import BoundSegment
from recjax.embedding.spec import MAX_ROWS
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, INSIDE_HOST, MODEL_AXES, Share

NOTHING = -1  # in place of an id
Sizes = tuple[tuple[int, int, int], ...]  # see `sizes`
Features = dict[str, FeatureRouting]  # feature name -> with ids where the routing has indices of rows


@dataclasses.dataclass(frozen=True)
class DeviceIds:
    """Places of a group's ids, in the order of the features and of their arrays. M ids on all devices together.

    Attributes:
      group: the table group.
      bucket_M: int32, that of the owner (`Group.destination`), 0 to O - 1; O where there is no id.
      slot_M: int32, in the owner's buffer, where all groups' slots are homes: the host alone has a way to others.
      rank_M: int32, place in the list of rows that this device fetches.
      counts_NxO: int32, how many each list has.
      order_M: int32, places of these ids in ascending order of bucket and slot.
      ranks_M: int32, `rank_M` in that order.
      relay: None, or what every device as a relay is asked for by those of its host.
    """

    group: Group
    bucket_M: Any
    slot_M: Any
    rank_M: Any
    counts_NxO: Any
    order_M: Any
    ranks_M: Any
    relay: Relay | None = None

    @classmethod
    def locate(cls, group: Group, ids: Mapping[str, jax.Array]) -> DeviceIds:
        """Finds the places of a group's ids, which are given by feature."""
        buckets, slots = [], []
        for source in group.sources:
            ids_L = ids[source.feature.name]
            owner_L, slot_L, here_L = source.locate(jnp.maximum(ids_L, 0))
            none_L = ids_L == NOTHING if here_L is None else (ids_L == NOTHING) | ~here_L
            buckets.append(jnp.where(none_L, group.owners, group.destination(owner_L) if group.owners > 1 else 0))
            slots.append(slot_L)
        bucket_M, slot_M = (jnp.concatenate(x).astype(jnp.int32) for x in (buckets, slots))
        rank_M, count_O, order_M, ranks_M = _rank(
            bucket_M, slot_M, group.num_peers, group.num_row_lists, group.rows, group.dedup
        )
        found = cls(group, bucket_M, slot_M, rank_M, count_O[None], order_M, ranks_M)
        return dataclasses.replace(found, relay=found._relayed()) if group.two_step else found

    def _relayed(self) -> Relay:
        """Rows that this device relays, from the ids of all devices of its host, which exchange what they want."""
        group, count_O = self.group, self.counts_NxO[0]
        bucket_K, slot_K, place_K = jax.lax.all_gather(
            (self.bucket_M, self.slot_M, self.rank_M), INSIDE_HOST, tiled=True
        )
        device_K = jnp.arange(len(bucket_K), dtype=jnp.int32) // len(self.bucket_M)
        number = 0 if group.num_row_lists == 1 else jax.lax.axis_index(INSIDE_HOST)
        owner_K = jnp.where(bucket_K // group.num_peers == number, bucket_K % group.num_peers, group.num_peers)
        rank_K, count_A, *_ = _rank(owner_K, slot_K, 1, group.num_peers, group.rows, group.dedup)
        handed_E = jax.lax.all_gather(count_O, INSIDE_HOST)[:, number]
        return Relay(owner_K, slot_K, rank_K, device_K, place_K, count_A[None], handed_E[None])

    @functools.cached_property
    def list_M(self) -> jax.Array:
        """int32, the list that each id's row is fetched in; beyond all of them where there is no id."""
        found: jax.Array = self.bucket_M // self.group.num_peers
        return found

    def lay_out(self, C: int, across: int, summed: int) -> GroupRouting:
        """Writes the group's routing in arrays of these sizes: see `sizes`."""
        group, lists = self.group, self.group.num_row_lists
        ordered = self._in_order(C) if by_segments(group.atomics) else {}
        if self.relay is not None:
            return dataclasses.replace(self._lay_out_relay(self.relay, C, across, summed), **ordered)
        if ordered:
            slots_M = self.slot_M[self.order_M]
            slots_OxC = slots_M.at[ordered["start_U"]].get(mode="fill", fill_value=group.rows).reshape(lists, C)
            return GroupRouting(slots_OxC[None], self.counts_NxO, summed=summed, **ordered)
        slots_OxC = jnp.full((lists, C), group.rows, jnp.int32)
        slots_OxC = slots_OxC.at[self.list_M, self.rank_M].set(self.slot_M, mode="drop")  # equal ids write the same
        return GroupRouting(slots_OxC[None], self.counts_NxO, summed=summed)

    def _in_order(self, C: int) -> dict[str, Any]:
        """Returns what `GroupRouting` has of ids in the order of their rows, of which C are fetched from each list.

        All that it takes is the one sort: where a step needs nothing else of the routing, the places of ids in their
        own order are never written.
        """
        group = self.group
        list_M, end = self.bucket_M[self.order_M] // group.num_peers, group.num_row_lists * C
        row_M = jnp.where((list_M < group.num_row_lists) & (self.ranks_M < C), list_M * C + self.ranks_M, end)
        whole = group.owners == 1 and group.width == group.dim
        slot_M = jnp.where(self.bucket_M == 0, self.slot_M, group.rows) if whole else None
        return {"order_M": self.order_M, "row_M": row_M, "start_U": first_entries(row_M, end), "slot_M": slot_M}

    def _lay_out_relay(self, relay: Relay, C: int, across: int, summed: int) -> GroupRouting:
        """Like `keys.Merged.lay_out` does it on the host."""
        group = self.group
        slots_AxK = jnp.full((group.num_peers, across), group.rows, jnp.int32)
        slots_AxK = slots_AxK.at[relay.owner_M, relay.rank_M].set(relay.slot_M, mode="drop")
        inside_ExC = jnp.tile(group.num_peers * across + jnp.arange(C, dtype=jnp.int32), (group.per_host, 1))
        device_M = jnp.where(relay.owner_M < group.num_peers, relay.device_M, group.per_host)
        index_M = relay.owner_M * across + relay.rank_M
        inside_ExC = inside_ExC.at[device_M, relay.place_M].set(index_M, mode="drop")
        return GroupRouting(slots_AxK[None], relay.counts_NxA, inside_ExC[None], relay.handed_NxE, summed)


@dataclasses.dataclass(frozen=True)
class Relay:
    """Rows that the devices of a host ask of a relay; M is as many as all of them have ids.

    Attributes:
      owner_M: int32, place of the owner among the A that the relay asks (`Group.num_peers`); A where there is nothing.
      slot_M: int32, in the owner's buffer.
      rank_M: int32, place among the slots that the relay asks of the owner.
      device_M: int32, the device of the host that asks.
      place_M: int32, place in its list.
      counts_NxA: int32, how many the relay asks for.
      handed_NxE: int32, how many it hands to each device of its host.
    """

    owner_M: Any
    slot_M: Any
    rank_M: Any
    device_M: Any
    place_M: Any
    counts_NxA: Any
    handed_NxE: Any


def count_ids(
    batch: Batch, bound: BoundPlan, batch_size: int, parts: int = 1, share: Share | None = None
) -> RoutedBatch:
    """Does the host's part of `route_on_host`, which is short: all that needs no distinct ids."""
    share = share or Share(bound.all_devices, 0, bound.all_devices)
    b = local_samples(batch_size, share.total, parts)
    required = jagged_sizes(batch, bound, b // parts)
    found = locate_pooled(batch, bound, b, share, required)
    return RoutedBatch(batch, share.count, b, parts, required, {}, {}, {}, {}, pooled=found)


def sizes(bound: BoundPlan, capacities: dict[str, int]) -> Sizes:
    """Sizes for `write_routing`: each group's capacity of its lists, across hosts and replicas (0 if it has none)."""
    further = capacities.get
    return tuple((capacities[g.name], further(g.name + ACROSS, 0), further(g.name + SUMMED, 0)) for g in bound.listing)


def named_sizes(bound: BoundPlan, sizes: Sizes) -> dict[str, int]:
    """The inverse of `sizes`: those of groups, by name."""
    names = [group.name + key for group in bound.listing for key in ("", ACROSS, SUMMED)]
    return dict(zip(names, itertools.chain.from_iterable(sizes), strict=True))


def largest_sizes(bound: BoundPlan, features: Features) -> Sizes:
    """Sizes that hold every batch of features of these shapes on one device, where nothing travels.

    Of a small table that is all of its rows.
    """
    ids = {lookup.feature: features[lookup.name].inverse.size for lookup in bound.lookups}
    found = []
    for group in bound.listing:
        ids_of: dict[tuple[BoundSegment, ...], int] = collections.Counter()
        for source in group.sources:
            ids_of[source.segments] += ids[source.feature.name]
        rows_of = {segments: sum(s.band.size for s in segments) for segments in ids_of}
        found.append(sum(min(n, rows_of[of]) if group.dedup else n for of, n in ids_of.items()))
    return tuple((rows, 0, 0) for rows in found)


def pack_ids(routed: RoutedBatch, bound: BoundPlan, capacities: dict[str, int], dtype: Any) -> Features:
    """The features' arrays as `pack` makes them, with ids (int32) in place of indices of rows."""
    return {
        lookup.name: pack_feature(
            lookup.spec,
            routed,
            routed.batch.bags[lookup.spec.reads].ids.ravel().astype(np.int32, copy=False),
            NOTHING,
            capacities,
            dtype,
        )
        for lookup in bound.lookups
    }


def find_rows(bound: BoundPlan, features: Features) -> tuple[dict[str, DeviceIds], dict[str, jax.Array]]:
    """Returns the place of each id among a device's distinct rows, by group, and the sizes that hold these.

    Inside `jax.shard_map`. The sizes are named as those of `RoutedBatch.required_capacities`, int32 [] each; the
    largest on any device is needed on all.

    Args:
      bound: the bound plan.
      features: of this device, as `pack_ids` makes them.
    """
    ids = {lookup.feature: features[lookup.name].inverse.ravel() for lookup in bound.lookups}
    located = {group.name: DeviceIds.locate(group, ids) for group in bound.listing}
    largest = {name: jnp.max(found.counts_NxO, initial=0) for name, found in located.items()}
    relays = {name + ACROSS: found.relay for name, found in located.items()}
    largest |= {name: jnp.max(relay.counts_NxA, initial=0) for name, relay in relays.items() if relay}
    between = [g for g in bound.listing if g.synchronous and g.spread]
    asked = {g.name + SUMMED: _asked_of_owner(located[g.name]) for g in between}
    return located, largest | asked


def _asked_of_owner(found: DeviceIds) -> jax.Array:
    """Rows that the devices of a replica group ask of one owner at most, or its hosts if these ask: int32 [].

    A row counts once for each that asks, so that this may be more than `route_on_host` finds; to know better they would
    have to compare. It is the size of a buffer alone.
    """
    if found.relay is not None:
        of_relays = jnp.max(jax.lax.psum(found.relay.counts_NxA, ACROSS_HOSTS), initial=0)
        return jax.lax.pmax(of_relays, (*ACROSS_GROUPS, *INSIDE_HOST))
    return jax.lax.pmax(jnp.max(jax.lax.psum(found.counts_NxO, MODEL_AXES), initial=0), ACROSS_GROUPS)


def _rank(bucket_M: Any, slot_M: Any, each: int, lists: int, rows: int, dedup: bool) -> tuple[Any, Any, Any, Any]:
    """The place of each (bucket, slot) among the distinct ones of its list.

    Args:
      bucket_M: int32, each * lists where there is nothing.
      slot_M: int32, below `rows`.
      each: buckets in a list.
      lists: how many there are.
      rows: of the buffer.
      dedup: unless true, equal ones are apart.

    Returns:
      the place, int32 [M]; how many each list has, int32 [lists]; the order of all, int32 [M]; and the places in it.
    """
    at = _order(bucket_M, slot_M, each * lists + 1, rows)
    bucket, slot = bucket_M[at], slot_M[at]
    first = jnp.concatenate([jnp.ones(1, bool), (bucket[1:] != bucket[:-1]) | (slot[1:] != slot[:-1])])
    first = first[: len(bucket)] if dedup else jnp.ones_like(first[: len(bucket)])
    of_list = bucket // each
    count = jnp.zeros(lists, jnp.int32).at[of_list].add(first.astype(jnp.int32), mode="drop")
    before = jnp.cumsum(count, dtype=jnp.int32) - count
    rank = jnp.cumsum(first, dtype=jnp.int32) - 1 - before.at[of_list].get(mode="fill", fill_value=0)
    return jnp.zeros_like(rank).at[at].set(rank, unique_indices=True), count, at, rank


def _order(bucket_M: Any, slot_M: Any, buckets: int, rows: int) -> Any:
    """The places of (bucket, slot) in ascending order, equal ones in theirs: int32 [M].

    By sorts of one key and one value, which GPUs have in a library; one of three arrays is several times slower.
    """
    at_M = jnp.arange(len(bucket_M), dtype=jnp.int32)
    if buckets * rows <= MAX_ROWS:
        return jax.lax.sort((bucket_M * rows + slot_M, at_M), num_keys=1)[1]
    at_M = jax.lax.sort((slot_M, at_M), num_keys=1)[1]
    return jax.lax.sort((bucket_M[at_M], at_M), num_keys=1)[1]


def write_routing(bound: BoundPlan, features: Features, located: dict[str, DeviceIds], sizes: Sizes) -> Routing:
    """Writes a device's routing in arrays of these sizes; inside `jax.shard_map`.

    Rows for which there is no room are left out: see `find_rows` for the sizes that hold all.
    """
    first = {lookup.feature: lookup.name for lookup in reversed(bound.lookups)}  # all of a feature have the same ids
    groups: dict[str, GroupRouting] = {}
    places: dict[str, tuple[jax.Array, int]] = {}
    for group in bound.hot:
        touched_R = jnp.zeros(group.rows, bool)
        for source in group.sources:
            ids_L = features[first[source.feature.name]].inverse.ravel()
            _, home_L, here_L = source.locate(jnp.maximum(ids_L, 0))
            here_L = ids_L != NOTHING if here_L is None else here_L & (ids_L != NOTHING)
            place_L = jnp.where(here_L, home_L, group.rows)
            touched_R = touched_R.at[place_L].set(True, mode="drop")
            places[source.name] = place_L, group.rows
        groups[group.name] = GroupRouting(None, None, touched_NxR=touched_R[None])
    for group, (C, across, summed) in zip(bound.listing, sizes, strict=True):
        ids_of, lists = located[group.name], group.num_row_lists
        place_M = jnp.where(ids_of.list_M < lists, ids_of.list_M * C + ids_of.rank_M, lists * C)
        groups[group.name] = ids_of.lay_out(C, across, summed)
        start = 0
        for source in group.sources:
            size = features[first[source.feature.name]].inverse.size
            places[source.name] = (place_M[start : start + size], lists * C)
            start += size
    found = {}
    for lookup in bound.lookups:
        ids = features[lookup.name]
        place_L, rows = places[lookup.sources[0]]
        for name in lookup.sources[1:]:  # rows of several groups lie one below the other
            other_L, more = places[name]
            place_L = jnp.where(place_L < rows, place_L, rows + other_L)
            rows += more
        found[lookup.name] = dataclasses.replace(ids, inverse=place_L.reshape(ids.inverse.shape))
    return Routing(groups, found)
