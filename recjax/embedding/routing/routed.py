"""A batch after routing: with exact sizes (`RoutedBatch`), and as arrays of static capacity for a step (`Routing`)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from recjax.data.batch import Batch
from recjax.embedding.group import Group
from recjax.embedding.routing.keys import Merged
from recjax.embedding.routing.pooled import Found, PooledRouting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupRouting:
    """Rows that each device asks of each owner. N devices, O owners (`Group.owners`), capacity C.

    Here and below, N are the devices of all replica groups, each of which asks the owners of its own group.

    In two steps a device asks as a relay (see `keys.py`): O is then `Group.num_peers`, C the capacity across
    hosts, and what a device fetches for itself are `Group.num_row_lists` lists of another capacity, which names below
    call C.

    Attributes:
      slots_NxOxC: int32, slot in the owner's buffer; R (out of range) where there is nothing.
      counts_NxO: int32, the true number of rows asked for: the useful part of C.
      inside_NxExC: None, or int32: for each device of its host the rows that the relay hands to it.
      handed_NxE: None, or int32: how many these are.
      summed: capacity for the rows of one owner that the devices of one replica group ask for, each once; 0 where
        gradients do not travel between such groups.
      order_M: None, or int32: the places of this device's ids, source after source, in the order of the rows that it
        fetches: where the devices sort ids themselves, gradients are added up in it.
      row_M: beside it, the row of each; beyond them all where there is no id.
      start_U: beside it, of each row that is fetched, the place in that order of its first id; M of one without ids.
      slot_M: None, or of each of the ids its slot in this device's own buffer, which holds all rows; R where there is
        none.
      touched_NxR: None, or bool: of rows that every device has at hand (`Group.listed`), which ones each device's
        samples have ids of. Then there is nothing else.
    """

    slots_NxOxC: Any
    counts_NxO: Any
    inside_NxExC: Any = None
    handed_NxE: Any = None
    summed: int = dataclasses.field(default=0, metadata={"static": True})
    touched_NxR: Any = None
    order_M: Any = None
    row_M: Any = None
    start_U: Any = None
    slot_M: Any = None

    def fetched_rows(self, group: Group) -> int:
        """Returns how many rows each device fetches for itself, with padding: the index that stands for nothing."""
        if not group.listed:
            return group.rows
        lists = self.slots_NxOxC if self.inside_NxExC is None else self.inside_NxExC
        return group.num_row_lists * int(lists.shape[2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureRouting:
    """Arrays by which a device pools one feature from the rows that came back. Leading axes are device-major.

    A step may work on its samples in several parts (see `route_on_host`); P is their number on all devices together,
    s the samples of one.

    Attributes:
      inverse: int32, index into the device's O*C rows (`Group.num_row_lists` lists of C), O*C (out of range, reads as
        zeros) where there is no id. [P*s, H] for fixed bags, [P*L] for jagged ones (L: capacity for the ids of a
        part).
      weights: None, or floats of the same shape: id weights, with 1/len folded in for mean pooling.
      segments: int32 [P*L], sample within the part, s where there is no id; None where inverse is [P*s, H].
      pairs: capacity of a part for the pairs of `FeatureSpec.beside`; 0 without.
    """

    inverse: Any
    weights: Any
    segments: Any
    pairs: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """A routed batch: everything the device needs to look up and update, by group and feature name."""

    groups: dict[str, GroupRouting]
    features: dict[str, FeatureRouting]
    pooled: dict[str, PooledRouting] = dataclasses.field(default_factory=dict)  # by the names of exchanges


@dataclasses.dataclass(frozen=True)
class RoutedBatch:
    """A batch after `route_on_host`, its sizes still exact."""

    batch: Batch  # the samples of these devices
    devices: int  # how many devices it is routed for, and laid out
    local: int  # b, samples per device with padding
    parts: int  # parts in which a device works on them, each of b / parts samples
    required_capacities: dict[str, int]  # the least: group name -> C; jagged feature -> L
    keys: dict[str, np.ndarray]  # group name -> sorted distinct keys (device, bucket, home); see `Group.destination`
    counts: dict[str, np.ndarray]  # group name -> how many keys each list of each device has, [N * lists]
    inverse: dict[str, np.ndarray]  # name of a source -> index of each id into its group's keys; or see `find_hot`
    merged: dict[str, Merged]  # name of a group that travels in two steps -> its keys by host
    # Name of a cache -> the slot that each key's home has in this step: see `sharding.py`.
    slots: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    pooled: dict[str, Found] = dataclasses.field(default_factory=dict)  # name of an exchange -> ids of its streams
    touched: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # see `GroupRouting.touched_NxR`
    at: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name of a source -> which ids, if not all
    # Name of a cache -> of each owner the distinct homes that the whole batch names; {}: these samples are all of it.
    named: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)
    admission: Any = None  # what caches need before its step: see `recjax.tiers.stage`

    def true_counts(self, group_name: str) -> GroupRouting:
        """Only the counts of a group's routing, which say what of its arrays is useful."""
        counts = self.counts[group_name]
        if (across := self.merged.get(group_name)) is not None:
            asked, handed = across.relay_counts(counts)
            return GroupRouting(None, asked, None, handed)
        return GroupRouting(None, counts.astype(np.int32).reshape(self.devices, -1))


class OrderedStage(abc.ABC):
    """A stage that routed batches pass in their order, one after the other, between routing and packing.

    Routing is a pure function of a batch, so that worker threads run ahead with it. Whatever has a state, as a cache
    has, is a stage of the input stream: one thread calls it for each batch in turn, and shows it the batches that
    follow. A run that goes on from a `state_dict` gives the same batches.

    Attributes:
      look_ahead: L, how many of the next batches `advance` gets to see; fewer at the end of the data.
      depth: batches that pass it before their step's turn, so that what it has begun for them is done by then.
    """

    look_ahead: int
    depth: int

    @abc.abstractmethod
    def advance(self, routed: RoutedBatch, upcoming: Sequence[RoutedBatch]) -> RoutedBatch:
        """Returns the batch as the step shall get it, and moves on.

        Args:
          routed: the next batch; a stage before this one may have changed it.
          upcoming: up to L batches that follow, as they were routed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last `advance`: JSON values that nobody changes; by default there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (by default there is nothing to do)
        """Goes on where the stage that gave this `state_dict` was."""
