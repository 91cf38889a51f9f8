"""Routing of features that exchange pooled vectors: the host sends their ids on, in the order of the bags.

No distinct ids are sought. The one thing that the step must know beforehand is how many distinct rows an owner is asked
for at most, since its update works on so many.

A device's list for an owner begins with J counts a sample, stream by stream, and goes on with the homes of the ids:
group by group, stream by stream, sample by sample. Beyond them stands R of any group.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from recjax.data.batch import Bags, Batch
from recjax.embedding.group import Group
from recjax.embedding.layout import IDS, ROWS, PooledExchange, Stream
from recjax.embedding.routing.keys import distinct
from recjax.parallel.mesh import Share

_MARKED = 2**25  # rows up to which distinct ones are counted by marks, in 4 bytes each for every thread
_thread = threading.local()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledRouting:
    """Ids on their way to the owners that sum the bags. N devices of all replica groups, O owners, capacity C.

    Attributes:
      ids_NxOxC: int32, each device's list for each owner: see the module.
      counts_NxO: int32, entries of each list that are no padding: see `true_counts`.
      weights_NxOxC: None, or floats beside the ids; 1 for those that carry none.
      factors: feature with mean pooling -> floats [N * b], 1 / ids of each bag (0 for an empty one).
      places_NxOxC: None, or int32: of each id of the lists its place among all of the device's ids, where several
        lists have the same one, for the columns of its row that their owners hold; O * C for none. Only where
        optimizers ask for means over whole rows: see `row_statistic.py`.
      sizes: for each group the capacities for ids and for distinct rows.
    """

    ids_NxOxC: Any
    counts_NxO: Any
    weights_NxOxC: Any
    factors: dict[str, Any]
    places_NxOxC: Any = None
    sizes: tuple[tuple[int, int], ...] = dataclasses.field(default=(), metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Located:
    """The ids of one stream.

    Attributes:
      homes_L: int32, rows of the owner's part of the buffer.
      owners_L: int, whose; None where there is one owner alone.
      here_L: bool, whether the stream has the row; None if it has all.
      samples_L: int, sample of the batch.
    """

    homes_L: np.ndarray
    owners_L: np.ndarray | None
    here_L: np.ndarray | None
    samples_L: np.ndarray

    def of(self, owner: int) -> Any:
        """Returns which of the ids are those of one of the stream's owners: a slice or a mask."""
        if self.owners_L is None and self.here_L is None:
            return slice(None)
        at = np.ones(len(self.homes_L), bool) if self.here_L is None else self.here_L
        return at if self.owners_L is None else at & (self.owners_L == owner)


Found = dict[str, Located]  # stream name -> its ids


def locate(batch: Batch, exchange: PooledExchange) -> Found:
    """Finds the owner and the home of every id of an exchange's streams. Ids must have been validated before."""
    found = {}
    for of_group in exchange.streams:
        for stream in of_group:
            bags = batch.bags[stream.feature.reads]
            owner_L, home_L, here_L = stream.source.locate(bags.ids.ravel().astype(np.int32, copy=False))
            found[stream.name] = Located(home_L, owner_L if len(stream.owners) > 1 else None, here_L, bags.samples())
    return found


def required(exchange: PooledExchange, found: Found, b: int, share: Share) -> dict[str, int]:
    """Returns the least capacities that hold a share's samples, b a device: by the name of the exchange and its groups.

    That for distinct rows is exact where the share has all devices of a replica group. Else it is what its devices find
    times the shares that may have devices of the group, as the largest that any share finds is for all.
    """
    sizes = {}
    total_NxO: Any = 0
    for group, streams in zip(exchange.groups, exchange.streams, strict=True):
        each = [_ids(exchange, stream, found[stream.name], b, share.count) for stream in streams]
        ids_NxO = sum(each, np.int64(0))
        sizes[group.name + IDS] = int(np.max(ids_NxO, initial=0))
        sizes[group.name + ROWS] = _rows(group, streams, found, b, share)
        total_NxO = total_NxO + ids_NxO
    sizes[exchange.name] = int(np.max(total_NxO, initial=0)) + exchange.counted * b
    return sizes


def true_counts(exchange: PooledExchange, found: Found, b: int, devices: int) -> np.ndarray:
    """Entries of each device's list for each owner that are no padding, int32 [N, O]: ids, and counts of bags."""
    streams = [stream for of_group in exchange.streams for stream in of_group]
    total = np.zeros((devices, exchange.devices), np.int64)
    for stream in streams:
        total += _ids(exchange, stream, found[stream.name], b, devices)
    for owner, groups in enumerate(exchange.of_owner):
        total[:, owner] += b * sum(stream.counted for of_group in groups for stream in of_group)
    return total.astype(np.int32)


def pack(
    exchange: PooledExchange,
    batch: Batch,
    found: Found,
    b: int,
    devices: int,
    capacities: Mapping[str, int],
    dtype: Any,
) -> PooledRouting:
    """Lays the ids of an exchange out in lists of the given capacities.

    Args:
      exchange: the exchange.
      batch: the samples of a share's devices.
      found: as `locate` gave it for them.
      b: samples of a device.
      devices: of the share.
      capacities: at least what `required` says.
      dtype: of weights and factors.
    """
    N, C, J = devices, capacities[exchange.name], exchange.counted
    ids = np.full((N, exchange.devices, C), exchange.no_id, np.int32)
    weights = np.zeros(ids.shape, dtype) if exchange.weighted else None
    places, first_of = _no_places(exchange, batch, ids, b)
    counts = np.zeros((N, exchange.devices, J, b), np.int32)
    ends_NxO = np.full(ids.shape[:2], J * b)
    counts_NxO = true_counts(exchange, found, b, devices)
    for owner, groups in enumerate(exchange.of_owner):
        row = 0
        for stream in (stream for of_group in groups for stream in of_group):
            own = _given_to(found[stream.name], owner)
            bags = batch.bags[stream.feature.reads]
            weights_L = None if bags.weights is None else bags.weights.ravel()[own.at]
            if stream.counted:
                counts[:, owner, row] = np.bincount(own.samples_L, minlength=N * b).reshape(N, b)
                lengths_N = counts[:, owner, row].sum(axis=1)
                row += 1
            else:
                lengths_N = np.full(N, b * (stream.feature.bag or 0))
            first = 0
            for n in range(N):
                last = int(np.searchsorted(own.samples_L, (n + 1) * b))
                at = slice(ends_NxO[n, owner], ends_NxO[n, owner] + last - first)
                ids[n, owner, at] = own.homes_L[first:last]
                if weights is not None:
                    weights[n, owner, at] = 1 if weights_L is None else weights_L[first:last]
                if places is not None and stream.name in first_of:
                    places[n, owner, at] = own.places_L[first:last] + first_of[stream.name][n]
                first = last
            ends_NxO[:, owner] += lengths_N
    ids[:, :, : J * b] = counts.reshape(*ids.shape[:2], J * b)
    factors = {
        feature.name: _factors(batch.bags[feature.reads], N * b, dtype)
        for feature in exchange.features
        if feature.pooling == "mean"
    }
    return PooledRouting(ids, counts_NxO, weights, factors, places, exchange.sizes(capacities))


def _no_places(
    exchange: PooledExchange, batch: Batch, ids: np.ndarray, b: int
) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
    """An empty `PooledRouting.places_NxOxC`, if it is needed; and what to add to the place of an id in its feature.

    That is by stream name, for each device: [N].
    """
    divided = [
        s for group, own in zip(exchange.groups, exchange.streams, strict=True) for s in own if group.divides_row_means
    ]
    if not divided:
        return None, {}
    N = len(ids)
    first_of: dict[str, np.ndarray] = {}
    ends_N = np.zeros(N, np.int64)  # ids of each device in the features so far
    for feature in dict.fromkeys(stream.feature for stream in divided):
        ends = np.searchsorted(batch.bags[feature.reads].samples(), np.arange(N + 1) * b)
        first_of |= {stream.name: ends_N - ends[:-1] for stream in divided if stream.feature == feature}
        ends_N = ends_N + np.diff(ends)
    return np.full(ids.shape, ids[0].size, np.int32), first_of


@dataclasses.dataclass(frozen=True)
class _Given:
    """A stream's ids for one owner; `at` says which of the stream's they are."""

    homes_L: np.ndarray
    samples_L: np.ndarray
    at: Any

    @property
    def places_L(self) -> np.ndarray:
        """Their places in the stream."""
        return np.arange(len(self.homes_L)) if isinstance(self.at, slice) else np.flatnonzero(self.at)


def _given_to(found: Located, owner: int) -> _Given:
    at = found.of(owner)
    return _Given(found.homes_L[at], found.samples_L[at], at)


def _ids(exchange: PooledExchange, stream: Stream, found: Located, b: int, devices: int) -> np.ndarray:
    """Ids of a stream that each device has for each owner, [N, O]."""
    counts = np.zeros((devices, exchange.devices), np.int64)
    for owner in stream.owners:
        if stream.counted:
            samples_L = _given_to(found, owner).samples_L
            counts[:, owner] = np.bincount(samples_L // b, minlength=devices)
        else:
            counts[:, owner] = b * (stream.feature.bag or 0)
    return counts


def _rows(group: Group, streams: tuple[Stream, ...], found: Found, b: int, share: Share) -> int:
    """Distinct rows that the devices of one replica group ask of one owner at most."""
    most = 0
    groups = range(share.first // group.devices, (share.first + share.count - 1) // group.devices + 1)
    for number in groups:
        first = max(number * group.devices - share.first, 0) * b
        last = ((number + 1) * group.devices - share.first) * b
        for owner in sorted({owner for stream in streams for owner in stream.owners}):
            homes = []
            for stream in streams:
                if owner in stream.owners:
                    own = _given_to(found[stream.name], owner)
                    start, stop = np.searchsorted(own.samples_L, (first, last)) if len(groups) > 1 else (0, None)
                    homes.append(own.homes_L[start:stop])
            most = max(most, count_distinct(homes, group.home_rows))
    if share.count % group.devices:
        most *= -(-group.devices // share.count) + bool(group.devices % share.count)
    return min(most, group.rows)


def count_distinct(pieces: list[np.ndarray], limit: int) -> int:
    """Returns how many different integers from 0 to `limit` - 1 some arrays hold together.

    Each number is marked with the place where it occurs; at the places whose marks stay, it occurs last. So nothing is
    sorted, and the marks of earlier calls need not be cleared.
    """
    keys_L = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if limit > _MARKED:
        return len(distinct(keys_L, limit)[0])
    marks = getattr(_thread, "marks", None)
    if marks is None or len(marks) < limit:
        marks = _thread.marks = np.empty(limit, np.int32)
    place_L = np.arange(len(keys_L), dtype=np.int32)
    marks[keys_L] = place_L
    return int(np.count_nonzero(marks[keys_L] == place_L))


def _factors(bags: Bags, samples: int, dtype: Any) -> np.ndarray:
    """1 / ids of each bag, [samples]; 0 for an empty one, and where there is no sample."""
    lengths = bags.lengths if bags.lengths is not None else np.full(len(bags.ids), bags.ids.shape[1])
    out = np.zeros(samples, dtype)
    out[: len(lengths)] = np.divide(1, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
    return out
