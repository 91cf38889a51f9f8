"""Routing: the only code that sees ids.

`route_on_host` decides, for every device's share of a batch, which distinct rows it needs and who owns them; `pack`
lays that out in arrays of static capacity. The first depends on its batch alone, so that worker threads can run ahead
with it; the required capacities are then known before the step, and no id is ever lost.

Within a device, duplicates are removed over all features of a group, so each distinct row travels
once in each direction and its gradients are summed before they travel. (A plan may be bound without that, to
measure what it saves: then every id has a row of its own on the way.) Where rows travel in two steps,
the same is done for all devices of a host together: see `keys.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.batch import Bags, Batch
from recjax.data.source import take
from recjax.embedding.group import Group
from recjax.embedding.layout import ACROSS, PAIRS, SUMMED, BoundPlan, Lookup
from recjax.embedding.routing import capacity
from recjax.embedding.routing import pooled as pooled_ids
from recjax.embedding.routing.keys import Merged, distinct, ranks
from recjax.embedding.routing.pooled import Found, PooledRouting
from recjax.embedding.routing.routed import FeatureRouting, GroupRouting, RoutedBatch, Routing
from recjax.embedding.spec import FeatureSpec
from recjax.parallel.mesh import Share


def devices_route(choice: str, platform: str, static: bool = True) -> bool:
    """Returns whether devices are to route, and not the host: see `device.py`.

    On a CPU they do not by themselves: there XLA sorts 106,496 ids of one batch in 22 ms, where the host takes 3.

    Args:
      choice: `train.routing`: "device", "host" or "auto".
      platform: of the devices.
      static: whether rows stay where the compiled program has them; devices route nothing else by themselves.
    """
    return choice == "device" or (choice == "auto" and static and platform != "cpu")


def route_on_host(
    batch: Batch, bound: BoundPlan, batch_size: int, parts: int = 1, share: Share | None = None
) -> RoutedBatch:
    """Finds the distinct rows that each device needs. Ids must have been validated before.

    Args:
      batch: up to `batch_size` samples; of a share those of its devices, see `samples_of`.
      bound: the bound plan.
      batch_size: B; device n takes samples n*b to (n+1)*b, b being ceil(B / N) rounded up to a multiple of `parts`.
      parts: in how many parts each device works on its samples, one after the other.
      share: the devices to route for; None: all.
    """
    share = share or Share(bound.all_devices, 0, bound.all_devices)
    b = local_samples(batch_size, share.total, parts)
    required = jagged_sizes(batch, bound, b // parts)
    keys: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    inverse: dict[str, np.ndarray] = {}
    merged: dict[str, Merged] = {}
    touched: dict[str, np.ndarray] = {}
    devices = Devices(batch, b, share.count)
    elsewhere: dict[tuple[str, str], np.ndarray] = {}
    for group in bound.hot:
        touched[group.name], found_hot = find_hot(group, batch, devices, elsewhere)
        inverse |= found_hot
    at: dict[str, np.ndarray] = {}
    for group in bound.listing:
        pieces = []
        buckets = share.count * group.owners
        for source in group.sources:
            feature, spec = source.feature.reads, source.segments[0].spec
            ids_L = batch.bags[feature].ids.ravel().astype(np.int32, copy=False)
            at_M = elsewhere.get((feature, spec.name)) if source.segments[0].band.vacant else None
            code_M = group.codes(source, _only(ids_L, at_M))
            if at_M is None and not source.whole:
                at_M = np.flatnonzero(code_M >= 0)
                code_M = code_M.take(at_M)
            if share.count > 1:
                code_M = _only(devices.times(feature, group.owners * group.home_rows), at_M) + code_M
            if at_M is not None:
                at[source.name] = at_M
            pieces.append(code_M)
        keys[group.name], inverse_L = distinct(np.concatenate(pieces), buckets * group.home_rows, group.dedup)
        cuts = np.cumsum([len(p) for p in pieces])[:-1]
        inverse |= {s.name: index_M for s, index_M in zip(group.sources, np.split(inverse_L, cuts), strict=True)}
        if share.count * group.num_row_lists == 1:
            counts[group.name] = np.array([len(keys[group.name])])
        else:
            list_U = keys[group.name] // (group.num_peers * group.home_rows)
            counts[group.name] = np.bincount(list_U, minlength=share.count * group.num_row_lists)
        required[group.name] = _largest(counts[group.name])
        if group.two_step:
            merged[group.name] = Merged.of(group, keys[group.name], share.count, group.home_rows)
            required[group.name + ACROSS] = _largest(merged[group.name].counts)
        if group.synchronous and group.spread:
            required[group.name + SUMMED] = _asked_of_owner(group, keys[group.name], share)
    located = locate_pooled(batch, bound, b, share, required)
    found = RoutedBatch(batch, share.count, b, parts, required, keys, counts, inverse, merged)
    return dataclasses.replace(found, pooled=located, touched=touched, at=at)


def locate_pooled(batch: Batch, bound: BoundPlan, b: int, share: Share, required: dict[str, int]) -> dict[str, Found]:
    """Finds the rows of features that exchange pooled vectors; adds the capacities for them to those required."""
    located = {}
    for exchange in bound.pooled:
        located[exchange.name] = found = pooled_ids.locate(batch, exchange)
        required |= pooled_ids.required(exchange, found, b, share)
    return located


def pack_pooled(
    routed: RoutedBatch, bound: BoundPlan, capacities: dict[str, int], dtype: Any
) -> dict[str, PooledRouting]:
    """Lays out the lists of ids of features that exchange pooled vectors: exchange name -> routing."""
    return {
        exchange.name: pooled_ids.pack(
            exchange, routed.batch, routed.pooled[exchange.name], routed.local, routed.devices, capacities, dtype
        )
        for exchange in bound.pooled
    }


def _only(values_L: np.ndarray, at_M: np.ndarray | None) -> np.ndarray:
    return values_L if at_M is None else values_L.take(at_M)


def samples_of(share: Share, batch_size: int, parts: int = 1) -> tuple[int, int]:
    """The samples of each batch that are for the devices of a share: from the first number to below the second."""
    b = local_samples(batch_size, share.total, parts)
    return share.first * b, (share.first + share.count) * b


def _asked_of_owner(group: Group, keys_U: np.ndarray, share: Share) -> int:
    """Rows that the devices of one replica group ask of one owner at most.

    Distinct ones, where the share has all devices of a group. Else the distinct ones of its devices, times the shares
    that may have devices of the group: the largest that any share finds is then enough for all together.
    """
    of_device = group.owners * group.home_rows
    group_U = (share.first + keys_U // of_device) // group.devices - share.first // group.devices
    groups = (share.first + share.count - 1) // group.devices - share.first // group.devices + 1
    keys_M, _ = distinct(group_U * of_device + keys_U % of_device, groups * of_device)
    found = _largest(np.bincount(keys_M // group.home_rows))
    if share.count % group.devices == 0:
        return found
    return found * (-(-group.devices // share.count) + bool(group.devices % share.count))


def local_samples(batch_size: int, devices: int, parts: int) -> int:
    """b, samples per device with padding, for the arguments of `route_on_host`."""
    return parts * -(-batch_size // (devices * parts))


def deal_rows(batch: Batch, bound: BoundPlan, batch_size: int, parts: int, share: Share) -> Batch:
    """The samples of a batch in an order in which all parts of the devices have about as many ids of jagged features.

    A batch is one sum, so that its order is free; arrays are as long as the fullest part needs. Samples are dealt from
    the longest to the shortest, to each part one, forwards and backwards in turn.

    Args:
      batch: as for `route_on_host`, as are the others.
      bound: whose lookups count; of elements that meet others so do the pairs.
      batch_size: B.
      parts: of a device.
      share: the devices.
    """
    s, P = local_samples(batch_size, share.total, parts) // parts, share.count * parts
    counts = [np.asarray(n, np.float64) for n in _jagged_counts(batch, bound).values()]
    if P == 1 or not batch.size or not counts:
        return batch
    long_B = sum(n / max(1.0, float(n.sum())) for n in counts)
    there_sxP = np.arange(P)[None] * s + np.arange(s)[:, None] < batch.size
    dealt_sxP = np.tile(np.arange(P), (s, 1))
    dealt_sxP[1::2] = dealt_sxP[1::2, ::-1]
    there_sxP[1::2] = there_sxP[1::2, ::-1]
    part_B = np.empty(batch.size, np.int64)
    part_B[np.argsort(-long_B, kind="stable")] = dealt_sxP[there_sxP]
    return take(batch, np.argsort(part_B, kind="stable"))


def _jagged_counts(batch: Batch, bound: BoundPlan) -> dict[str, np.ndarray]:
    """The ids of each sample by jagged lookup, and the pairs of its elements: int64 [B] by the name of a capacity."""
    counts = {}
    for lookup in bound.lookups:
        lengths_B = batch.bags[lookup.spec.reads].lengths
        if lengths_B is not None:
            counts[lookup.name] = lengths_B.astype(np.int64)
            if lookup.spec.beside:
                others_B = batch.bags[lookup.spec.beside].lengths
                assert others_B is not None  # both are jagged: see `FeatureSpec.beside`
                counts[lookup.name + PAIRS] = counts[lookup.name] * others_B
    return counts


def jagged_sizes(batch: Batch, bound: BoundPlan, samples: int) -> dict[str, int]:
    """The least capacities for jagged features: the most ids, and pairs of elements, of `samples` samples of a part."""
    starts = np.arange(0, batch.size, samples)
    counts = _jagged_counts(batch, bound)
    return {name: _largest(np.add.reduceat(n, starts)) if len(n) else 0 for name, n in counts.items()}


def pack(routed: RoutedBatch, bound: BoundPlan, capacities: dict[str, int], dtype: Any = np.float32) -> Routing:
    """Lays a routed batch out in arrays of the given capacities.

    Args:
      routed: a batch after `route_on_host`.
      bound: the bound plan.
      capacities: group and feature names to sizes, at least `routed.required_capacities` (ValueError if not).
      dtype: of the pooling weights: the dtype of the tables.
    """
    capacity.require(capacities, routed.required_capacities)
    groups: dict[str, GroupRouting] = {}
    features: dict[str, FeatureRouting] = {}
    places: dict[str, np.ndarray | None] = {}  # of each key among the device's lists * C rows; None: in its order
    sizes: dict[str, int] = {}  # how many rows a device fetches
    for group in bound.hot:
        groups[group.name] = GroupRouting(None, None, touched_NxR=routed.touched[group.name])
        places[group.name], sizes[group.name] = None, group.rows
    for group in bound.listing:
        N, lists, C = routed.devices, group.num_row_lists, capacities[group.name]
        keys_U = routed.keys[group.name]
        list_U: Any = 0
        rank_U: Any = slice(len(keys_U))
        inside = place_U = None  # on one device, rows lie in the order of their keys
        if N * lists > 1:
            list_U = keys_U // (group.num_peers * group.home_rows)  # device * lists + list, ascending
            rank_U = ranks(list_U, routed.counts[group.name])
            place_U = (list_U % lists * C + rank_U).astype(np.int32)  # index into the device's lists * C rows
        places[group.name], sizes[group.name] = place_U, lists * C
        if group.two_step:
            across = capacities[group.name + ACROSS]
            slots, inside = routed.merged[group.name].lay_out(list_U, rank_U, C, across)
        else:
            slots = np.full((N * lists, C), group.rows, np.int32)
            slots[list_U, rank_U] = routed.slots[group.name] if group.cached else keys_U % group.rows
            slots = slots.reshape(N, lists, C)
        groups[group.name] = dataclasses.replace(
            routed.true_counts(group.name),
            slots_NxOxC=slots,
            inside_NxExC=inside,
            summed=capacities.get(group.name + SUMMED, 0),
        )
    for pool in bound.pools:
        from_groups = [fetched.group for fetched in pool.rows]
        total = sum(sizes[name] for name in from_groups)
        for lookup in pool.lookups:
            index_L = _among(routed, lookup, from_groups, places, sizes)
            features[lookup.name] = pack_feature(lookup.spec, routed, index_L, total, capacities, dtype)
    return Routing(groups, features, pack_pooled(routed, bound, capacities, dtype))


def _among(
    routed: RoutedBatch,
    lookup: Lookup,
    groups: Sequence[str],
    places: Mapping[str, np.ndarray | None],
    sizes: Mapping[str, int],
) -> np.ndarray:
    """Index of each id's row among those fetched from several groups, one below the other, int32 [L].

    That of a row that none of them has, since its owner pools it, is the number of them all.

    Args:
      routed: the batch.
      lookup: whose ids.
      groups: names of its sources' groups.
      places: of each group, the place of each key among its fetched rows; None: in its order.
      sizes: how many rows are fetched from each.
    """
    index_L: np.ndarray | None = None
    start = 0
    for source, group in zip(lookup.sources, groups, strict=True):
        found, place_U, at_M = routed.inverse[source], places[group], routed.at.get(source)
        found = found if place_U is None else place_U.take(found)
        if lookup.everywhere:
            return found
        if group in routed.touched:  # hot rows, which are before all others
            index_L = found.copy()
        else:
            if index_L is None:
                index_L = np.full(routed.batch.bags[lookup.spec.reads].ids.size, -1, np.int32)
            index_L[slice(None) if at_M is None else at_M] = found + np.int32(start)
        start += sizes[group]
    assert index_L is not None
    if not lookup.complete:
        index_L[index_L < 0] = start
    return index_L


def all_true_counts(bound: BoundPlan, routed: RoutedBatch) -> dict[str, GroupRouting]:
    """Only the counts of a batch's routing, by the names of groups whose rows are listed and of pooled exchanges."""
    found = {group.name: routed.true_counts(group.name) for group in bound.listing}
    for exchange in bound.pooled:
        ids = pooled_ids.true_counts(exchange, routed.pooled[exchange.name], routed.local, routed.devices)
        found[exchange.name] = GroupRouting(None, ids)
    return found


def pack_feature(
    feature: FeatureSpec,
    routed: RoutedBatch,
    index_L: np.ndarray,
    nothing: int,
    capacities: dict[str, int],
    dtype: Any,
) -> FeatureRouting:
    """A feature's arrays, with `index_L` where its ids are and `nothing` where there is none."""
    bags, P, s = routed.batch.bags[feature.reads], routed.devices * routed.parts, routed.local // routed.parts
    weights_L = _pooling_weights(feature, bags)
    shape: tuple[int, ...]
    at: Any  # where each id goes
    segments = None
    if bags.lengths is None:
        shape = (P * s, bags.ids.shape[1])
        at = (slice(routed.batch.size),)
        index_L = index_L.reshape(bags.ids.shape)
        weights_L = None if weights_L is None else weights_L.reshape(bags.ids.shape)
    else:
        shape, sample_L = (P * capacities[feature.name],), bags.samples()
        at = (entry_places(sample_L, routed, capacities[feature.name]),)
        segments = np.full(shape, s, np.int32)
        segments[at] = sample_L % s
    if bags.lengths is None and index_L.shape == shape and index_L.dtype == np.int32:
        inverse = index_L
    else:
        inverse = np.full(shape, nothing, np.int32)
        inverse[at] = index_L
    pairs = capacities[feature.name + PAIRS] if feature.beside else 0
    if weights_L is None:
        return FeatureRouting(inverse, None, segments, pairs)
    weights = np.zeros(shape, dtype)
    weights[at] = weights_L
    return FeatureRouting(inverse, weights, segments, pairs)


def entry_places(sample_L: np.ndarray, routed: RoutedBatch, size: int) -> np.ndarray:
    """The place of entries of samples, such as ids of jagged bags, where each part has room for `size`: int64 [L].

    Args:
      sample_L: the sample of each, ascending.
      routed: the batch.
      size: at least as `jagged_sizes` has it.
    """
    part_L = sample_L // (routed.local // routed.parts)
    counts_P = np.bincount(part_L, minlength=routed.devices * routed.parts)
    return np.arange(len(sample_L)) + (np.arange(len(counts_P)) * size - np.cumsum(counts_P) + counts_P)[part_L]


def _pooling_weights(feature: FeatureSpec, bags: Bags) -> np.ndarray | None:
    """The factor of every id in its bag's sum, [L]; None where all are 1."""
    if feature.pooling != "mean":
        return None if bags.weights is None else bags.weights.ravel()
    if bags.lengths is None:
        lengths_L: Any = bags.ids.shape[1]
    else:
        lengths_L = np.repeat(bags.lengths, bags.lengths)
    factors_L = np.ones(bags.ids.size) if bags.weights is None else bags.weights.ravel().astype(np.float64)
    return factors_L / lengths_L


def _largest(counts: np.ndarray) -> int:
    return int(counts.max(initial=0))


class Devices:
    """The devices that the ids of a batch are of."""

    def __init__(self, batch: Batch, b: int, devices: int) -> None:
        """Begins with b samples for each device; nothing is found yet."""
        self.number, self._batch, self._b = devices, batch, b
        self._found: dict[tuple[int | str, int], np.ndarray] = {}

    def times(self, feature: str, stride: int) -> np.ndarray:
        """The device of each id of a feature, times `stride`: int64 [L], alike for all bags of one fixed size."""
        bags = self._batch.bags[feature]
        key = (feature if bags.lengths is not None else bags.ids.shape[1], stride)
        if key not in self._found:
            if bags.lengths is None:
                number_B = np.arange(len(bags.ids)) // self._b
                self._found[key] = np.repeat(number_B * stride, bags.ids.shape[1])
            else:
                self._found[key] = bags.samples() // self._b * stride
        return self._found[key]


def find_hot(
    group: Group, batch: Batch, devices: Devices, elsewhere: dict[tuple[str, str], np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Finds the ids of rows that every device has at hand, by one look-up for each id.

    Args:
      group: the group of these rows.
      batch: the samples.
      devices: of its ids.
      elsewhere: gets (feature of the data, table) -> which of its ids name other rows, ascending.

    Returns:
      which rows each device's samples have ids of, bool [N, R]; and for each source the row of every id, -1 where it is
      not hot, int32 [L].
    """
    stride = group.rows + 1  # the last column takes those that are not hot
    marks_M = np.zeros(devices.number * stride + 1, bool)
    found = {}
    for source in group.sources:
        feature = source.feature.reads
        row_L = group.codes(source, batch.bags[feature].ids.ravel().astype(np.int32, copy=False))
        if not source.whole:
            elsewhere[feature, source.segments[0].spec.name] = np.flatnonzero(row_L < 0)
        found[source.name] = row_L
        marks_M[devices.times(feature, stride) + row_L] = True  # -1 is the last column of the device before
    return marks_M[:-1].reshape(devices.number, stride)[:, :-1], found
