"""Values that the parts of a step hand on: looked-up rows, leftovers that send gradients back, updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from recjax.embedding.exchange.wire import Extents
from recjax.embedding.optim import Slots
from recjax.embedding.sharding import Homes

Rows = dict[str, jax.Array]  # group name -> fetched rows [U, D]
Vectors = dict[str, jax.Array]  # stream name -> [b, D], sums or means of this device's bags


class LookedUp(NamedTuple):
    """Everything that a device looked up for its samples: what the model's gradient is asked for.

    Attributes:
      rows: distinct rows, group name -> [U, D].
      vectors: what owners of rows have pooled, stream name -> [b, D].
    """

    rows: Rows
    vectors: Vectors


class SparseGradient(NamedTuple):
    """Gradients of the rows of one device's part of a buffer, summed over the global batch.

    Attributes:
      touched: unique slots [M], ascending, those at R or beyond not in use; or, of a replicated buffer, a mask [R].
      sums: [M, W] beside the slots; or [R, D].
    """

    touched: jax.Array
    sums: jax.Array


Gradients = dict[str, SparseGradient]  # group name -> gradients of this device's rows


class FetchResiduals(NamedTuple):
    """Leftovers of `fetch` for `send_gradients`: which way the gradients go.

    Attributes:
      slots_NxC: slots of this device's part of the buffer: [N, C] as all devices asked for them ([H, K] by a relay of
        each host in two steps), or its own [1, C] if the group is replicated.
      inside_ExC: None, or the rows that each device of its host asks of it as a relay.
      summed: as `GroupRouting` has it.
      further: None, or gradients that this device has summed already, of rows that it pooled or scored itself.
      touched_R: None, or of rows that are not listed which ones this device's samples have ids of; then nothing else is
        set.
      extents: None, or how many rows this device asks of each owner, and each device of it.
    """

    slots_NxC: Any
    inside_ExC: jax.Array | None
    summed: int = 0
    further: SparseGradient | None = None
    touched_R: jax.Array | None = None
    extents: Extents | None = None


class Entries(NamedTuple):
    """The ids that an owner was asked for in one of its groups, with what else it sums by.

    Attributes:
      slots_M: int32 [N * capacity], device after device; R where there is none.
      bags_M: int32, ascending: which of its N * T * b bags each belongs to.
      weights_M: None, or floats.
      places_M: int32, place of each in the list that it came in; beyond the list where there is none.
      streams_M: int32, which of the T streams.
    """

    slots_M: jax.Array
    bags_M: jax.Array
    weights_M: jax.Array | None
    places_M: jax.Array
    streams_M: jax.Array


class Residuals(NamedTuple):
    """Leftovers of a look-up for `send_gradients`.

    Attributes:
      groups: group name -> which way the gradients of its rows go.
      pooled: exchange name -> the ids that this device has pooled, for each of its groups.
    """

    groups: dict[str, FetchResiduals]
    pooled: dict[str, tuple[Entries, ...]]


class UpdateContext(NamedTuple):
    """Inputs of an update beside rows and gradients.

    Attributes:
      scale: [], what the sums are multiplied with, for the gradients of the mean loss.
      late_scale: [], the same made after the gradients of the dense part: for updates that send something themselves.
      step: int32 [], steps done before this one.
      rate: [], the schedule's factor of the learning rate.
      seed: of the run; for the rounding of bfloat16 tables.
      homes: of the slots of caches, this device's parts.
      learning_rates: [], of the groups that are updated by another than their optimizer's own, by name.
    """

    scale: jax.Array
    late_scale: jax.Array
    step: jax.Array
    rate: jax.Array
    seed: int = 0
    homes: Homes = {}  # nobody writes to it
    learning_rates: Mapping[str, jax.Array] = {}  # likewise


class Proposed(NamedTuple):
    """Values that an update would write, before it is known whether the step counts.

    Attributes:
      rows: new rows, float; U of them: [M, W] beside `SparseGradient.touched`, or [R, W] where all rows pass through
        the optimizer.
      slots: new slots, [U, ...] each.
      before: the slots that these take the place of.
      gradient: what it was made of.
      context: likewise.
    """

    rows: jax.Array
    slots: Slots
    before: Slots
    gradient: SparseGradient
    context: UpdateContext
