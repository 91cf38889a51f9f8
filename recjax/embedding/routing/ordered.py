"""Stages that routed batches pass in their order, one after the other, between routing and packing.

Routing is a pure function of a batch, so that worker threads run ahead with it. Whatever has a state (where rows lie, a
cache, a set of hot rows) is an `OrderedStage` of the input stream: one thread calls it for each batch in turn, and
shows it the batches that follow.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.embedding.address import Maps, identity
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.routing.routed import RoutedBatch


class OrderedStage(abc.ABC):
    """A stage that may have a state. A run that goes on from a `state_dict` gives the same batches.

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


class SlotLookup(OrderedStage):
    """Gives the keys of mapped groups the slots that their homes have: see `address.py`.

    The map does not change, so there is nothing to keep in a checkpoint.
    """

    depth = 0

    def __init__(self, bound: BoundPlan, maps: Maps | None = None, look_ahead: int = 0) -> None:
        """Without `maps` every slot is its own home."""
        self.look_ahead = look_ahead
        self._groups = [group for group in bound.groups if group.mapped and not group.cached]
        self._maps = identity(bound) if maps is None else maps

    def advance(self, routed: RoutedBatch, upcoming: Sequence[RoutedBatch]) -> RoutedBatch:
        """Like `OrderedStage.advance`."""
        del upcoming
        slots, merged = dict(routed.slots), dict(routed.merged)
        for group in self._groups:
            slots[group.name] = self._slots(group, routed.keys[group.name])
            if group.name in merged:
                across = merged[group.name]
                merged[group.name] = dataclasses.replace(across, slots_M=self._slots(group, across.keys_M))
        return dataclasses.replace(routed, slots=slots, merged=merged)

    def _slots(self, group: Group, keys_U: np.ndarray) -> np.ndarray:
        """The slots of keys (device or host, bucket, home), int32 [U]."""
        owners = np.empty(group.owners, np.int32)
        owners[group.destination(np.arange(group.owners))] = np.arange(group.owners)
        bucket_U = keys_U // group.rows % group.owners
        return self._maps[group.name].slots_OxR[owners[bucket_U], keys_U % group.rows]
