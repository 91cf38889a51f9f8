"""Routing: the only code that sees ids.

`count` decides, for every device's share of a batch, which distinct rows it needs and who owns them;
`pad` lays that out in arrays of static capacity. `count` depends on its batch alone, so that worker
threads can run ahead with it; the capacities are then known before the step, and no id is ever lost.

Within a device, duplicates are removed over all features of a group, so each distinct row travels
once in each direction and its gradients are summed before they travel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from recjax.data.batch import Bags, Batch
from recjax.embedding.plan import BoundPlan
from recjax.embedding.spec import FeatureSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupRouting:
    """Which rows each device asks of each owner. N devices, O owners (N, or 1 if replicated), capacity C.

    Attributes:
      slots_NxOxC: int32, slot in the owner's buffer; R (out of range) where there is nothing.
      counts_NxO: int32, the true number of rows asked for: the useful part of C.
    """

    slots_NxOxC: Any
    counts_NxO: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureRouting:
    """How a device pools one feature from the rows that came back. Leading axes are device-major.

    Attributes:
      inverse: int32, index into the device's O*C rows, O*C (out of range, reads as zeros) where there
        is no id. [N*b, H] for fixed bags, [N*L] for jagged ones.
      weights: None, or floats of the same shape: id weights, with 1/len folded in for mean pooling.
      segments: None for fixed bags, else int32 [N*L]: sample within the device, b where there is no id.
    """

    inverse: Any
    weights: Any
    segments: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """A routed batch: everything the device needs to look up and update, by group and feature name."""

    groups: dict[str, GroupRouting]
    features: dict[str, FeatureRouting]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A batch after `count`, its sizes still exact. `needs` are the least capacities that hold it."""

    batch: Batch
    local: int  # b, samples per device with padding
    needs: dict[str, int]  # group name -> C; feature name -> L for jagged features
    keys: dict[str, np.ndarray]  # group name -> sorted distinct keys (device, owner, slot)
    inverse: dict[str, np.ndarray]  # feature name -> index of each id into its group's keys


def count(batch: Batch, bound: BoundPlan, batch_size: int) -> Counted:
    """Finds the distinct rows that each device needs. Ids must have been validated before.

    Args:
      batch: up to `batch_size` samples.
      bound: the bound plan.
      batch_size: B; device n takes samples n*b to (n+1)*b with b = ceil(B / N).
    """
    b = -(-batch_size // bound.devices)
    needs: dict[str, int] = {}
    keys: dict[str, np.ndarray] = {}
    inverse: dict[str, np.ndarray] = {}
    for group in bound.groups:
        parts = []
        for feature in group.features:
            bags = batch.bags[feature.reads]
            device_L = _samples(bags) // b
            if bags.lengths is not None:
                needs[feature.name] = _largest(np.bincount(device_L, minlength=bound.devices))
            owner_L, slot_L = group.table(feature.table).locate(bags.ids.ravel().astype(np.int64))
            parts.append((device_L * group.owners + owner_L) * group.rows + slot_L)
        keys[group.name], inverse_L = np.unique(np.concatenate(parts), return_inverse=True)
        cuts = np.cumsum([len(p) for p in parts])[:-1]
        inverse.update(zip((f.name for f in group.features), np.split(inverse_L, cuts), strict=True))
        needs[group.name] = _largest(np.bincount(keys[group.name] // group.rows))
    return Counted(batch, b, needs, keys, inverse)


def pad(counted: Counted, bound: BoundPlan, capacities: dict[str, int], dtype: Any = np.float32) -> Routing:
    """Lays a counted batch out in arrays of the given capacities.

    Args:
      counted: a batch after `count`.
      bound: the bound plan.
      capacities: group and feature names to sizes, at least `counted.needs` (ValueError if not).
      dtype: of the pooling weights: the dtype of the tables.
    """
    short = {k: (v, capacities.get(k)) for k, v in counted.needs.items() if capacities.get(k, 0) < v}
    if short:
        raise ValueError(f"capacities (needed, given) are short: {short}; grow them with `grow` first")
    groups: dict[str, GroupRouting] = {}
    features: dict[str, FeatureRouting] = {}
    for group in bound.groups:
        N, owners, C = bound.devices, group.owners, capacities[group.name]
        keys_U = counted.keys[group.name]
        bucket_U = keys_U // group.rows  # device * owners + owner, ascending
        counts = np.bincount(bucket_U, minlength=N * owners)
        rank_U = np.arange(len(keys_U)) - (np.cumsum(counts) - counts)[bucket_U]
        slots = np.full((N * owners, C), group.rows, np.int32)
        slots[bucket_U, rank_U] = keys_U % group.rows
        groups[group.name] = GroupRouting(slots.reshape(N, owners, C), counts.reshape(N, owners).astype(np.int32))
        place_U = (bucket_U % owners * C + rank_U).astype(np.int32)  # index into the device's owners * C rows
        for feature in group.features:
            index_L = place_U[counted.inverse[feature.name]]
            features[feature.name] = _lay_out(feature, counted, index_L, owners * C, N, capacities, dtype)
    return Routing(groups, features)


def _lay_out(
    feature: FeatureSpec,
    counted: Counted,
    index_L: np.ndarray,
    nothing: int,
    N: int,
    capacities: dict[str, int],
    dtype: Any,
) -> FeatureRouting:
    bags, b = counted.batch.bags[feature.reads], counted.local
    weights_L = _pooling_weights(feature, bags)
    if bags.lengths is None:
        shape = (N * b, bags.ids.shape[1])
        inverse: np.ndarray = np.full(shape, nothing, np.int32)
        inverse[: counted.batch.size] = index_L.reshape(bags.ids.shape)
        if weights_L is None:
            return FeatureRouting(inverse, None, None)
        weights = np.zeros(shape, dtype)
        weights[: counted.batch.size] = weights_L.reshape(bags.ids.shape)
        return FeatureRouting(inverse, weights, None)
    L = capacities[feature.name]
    sample_L = _samples(bags)
    device_L = sample_L // b
    counts_N = np.bincount(device_L, minlength=N)
    place_L = device_L * L + np.arange(len(sample_L)) - (np.cumsum(counts_N) - counts_N)[device_L]
    inverse, segments = np.full(N * L, nothing, np.int32), np.full(N * L, b, np.int32)
    inverse[place_L], segments[place_L] = index_L, sample_L % b
    if weights_L is None:
        return FeatureRouting(inverse, None, segments)
    weights = np.zeros(N * L, dtype)
    weights[place_L] = weights_L
    return FeatureRouting(inverse, weights, segments)


def _pooling_weights(feature: FeatureSpec, bags: Bags) -> np.ndarray | None:
    """The factor of every id in its bag's sum, [L]; None where all are 1."""
    if feature.pooling == "sum":
        return None if bags.weights is None else bags.weights.ravel()
    if bags.lengths is None:
        lengths_L: Any = bags.ids.shape[1]
    else:
        lengths_L = np.repeat(bags.lengths, bags.lengths)
    factors_L = np.ones(bags.ids.size) if bags.weights is None else bags.weights.ravel().astype(np.float64)
    return factors_L / lengths_L


def _samples(bags: Bags) -> np.ndarray:
    """Sample that each id belongs to, [L]."""
    if bags.lengths is None:
        return np.repeat(np.arange(bags.ids.shape[0]), bags.ids.shape[1])
    return np.repeat(np.arange(len(bags.lengths)), bags.lengths)


def _largest(counts: np.ndarray) -> int:
    return int(counts.max(initial=0))


def grow(capacities: dict[str, int], needs: dict[str, int]) -> dict[str, int]:
    """The capacities to use from now on: unchanged while they suffice, else one in eight above the need.

    Each change compiles the step anew, so a short capacity grows past what was asked; sizes are
    multiples of 8. They are a function of the batches seen so far, and a checkpoint carries them, so
    that a resumed run executes the very same programs.
    """
    grown = dict(capacities)
    for name, need in needs.items():
        if capacities.get(name, 0) < need or name not in capacities:
            grown[name] = 8 * math.ceil(max(1, need * 1.125) / 8)
    return grown
