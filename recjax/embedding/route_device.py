"""Routing on the devices, for batches of so many ids that the host would hold up the step.

The arrays are those that `route.py` makes on the host, element for element. The host lays the ids out (`lay_out`),
which is a copy; one program on the devices finds the distinct ones (`make_sort`) and tells how many there are at most,
which is what the capacities must hold; a second one, compiled for these capacities, writes the routing
(`make_layout`). The first runs a step ahead, so that nothing waits for the number that the host reads in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Batch
from recjax.embedding.bound import BoundPlan, Group
from recjax.embedding.route import (
    Counted,
    FeatureRouting,
    GroupRouting,
    Routing,
    lay_out_feature,
    local_samples,
    longest,
)
from recjax.mesh import BATCH_AXES

NOTHING = -1  # in place of an id

Features = dict[str, FeatureRouting]  # feature name -> with ids where the routing has indices of rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Located:
    """Where a group's ids lie, in the order of the features and of their arrays. M ids on all devices together.

    Attributes:
      owner_M: int32, 0 to O - 1; O where there is no id.
      slot_M: int32, in the owner's buffer.
      rank_M: int32, place among the slots that this device asks of the owner.
      counts_NxO: int32, how many it asks for.
    """

    owner_M: Any
    slot_M: Any
    rank_M: Any
    counts_NxO: Any


def measure(batch: Batch, bound: BoundPlan, batch_size: int, parts: int = 1) -> Counted:
    """What `route.count` finds, but for all that needs the distinct ids: the host's part, which is short."""
    b = local_samples(batch_size, bound.devices, parts)
    needs = {
        feature.name: longest(feature, batch.bags[feature.reads], b // parts)
        for feature in bound.features
        if batch.bags[feature.reads].lengths is not None
    }
    return Counted(batch, b, parts, needs, {}, {})


def lay_out(counted: Counted, bound: BoundPlan, capacities: dict[str, int], dtype: Any) -> Features:
    """The features' arrays as `route.pad` makes them, with ids (int32) in place of indices of rows."""
    return {
        feature.name: lay_out_feature(
            feature,
            counted,
            counted.batch.bags[feature.reads].ids.ravel().astype(np.int32, copy=False),
            NOTHING,
            bound.devices,
            capacities,
            dtype,
        )
        for feature in bound.features
    }


def make_sort(bound: BoundPlan, mesh: Mesh) -> Callable[[Features], tuple[dict[str, Located], dict[str, jax.Array]]]:
    """The jitted first program: features -> (group name -> Located; group name -> its least capacity, int32 [])."""

    def sort(features: Features) -> Any:
        located = {group.name: _locate(group, features) for group in bound.groups}
        largest = {name: jnp.max(found.counts_NxO, initial=0) for name, found in located.items()}
        return located, jax.lax.pmax(largest, BATCH_AXES)

    spec = P(BATCH_AXES)
    return jax.jit(jax.shard_map(sort, mesh=mesh, in_specs=spec, out_specs=(spec, P())))


def _locate(group: Group, features: Features) -> Located:
    owners, slots = [], []
    for feature in group.features:
        ids_L = features[feature.name].inverse.ravel()
        owner_L, slot_L = group.table(feature.table).locate(jnp.maximum(ids_L, 0))
        owners.append(jnp.where(ids_L == NOTHING, group.owners, owner_L if group.owners > 1 else 0))
        slots.append(slot_L)
    owner_M, slot_M = (jnp.concatenate(x).astype(jnp.int32) for x in (owners, slots))
    at_M = jnp.arange(len(owner_M), dtype=jnp.int32)
    owner, slot, at = jax.lax.sort((owner_M, slot_M, at_M), num_keys=2)
    first = jnp.concatenate([jnp.ones(1, bool), (owner[1:] != owner[:-1]) | (slot[1:] != slot[:-1])])
    first = first[: len(owner)] if group.dedup else jnp.ones_like(first[: len(owner)])
    count_O = jnp.zeros(group.owners, jnp.int32).at[owner].add(first.astype(jnp.int32), mode="drop")
    before_O = jnp.cumsum(count_O, dtype=jnp.int32) - count_O
    rank = jnp.cumsum(first, dtype=jnp.int32) - 1 - before_O.at[owner].get(mode="fill", fill_value=0)
    rank_M = jnp.zeros_like(rank).at[at].set(rank, unique_indices=True)
    return Located(owner_M, slot_M, rank_M, count_O[None])


def make_layout(bound: BoundPlan, mesh: Mesh) -> Callable[[Features, dict[str, Located], tuple[int, ...]], Routing]:
    """The jitted second program: (features, located, the capacity of each group, static) -> Routing."""

    def layout(features: Features, located: dict[str, Located], capacities: tuple[int, ...]) -> Routing:
        groups, found = {}, {}
        for group, C in zip(bound.groups, capacities, strict=True):
            of, owners = located[group.name], group.owners
            slots_OxC = jnp.full((owners, C), group.rows, jnp.int32)
            slots_OxC = slots_OxC.at[of.owner_M, of.rank_M].set(of.slot_M, mode="drop")  # equal ids write the same
            groups[group.name] = GroupRouting(slots_OxC[None], of.counts_NxO)
            place_M = jnp.where(of.owner_M < owners, of.owner_M * C + of.rank_M, owners * C)
            start = 0
            for feature in group.features:
                ids = features[feature.name]
                inverse = place_M[start : start + ids.inverse.size].reshape(ids.inverse.shape)
                start += ids.inverse.size
                found[feature.name] = FeatureRouting(inverse, ids.weights, ids.segments)
        return Routing(groups, found)

    spec = P(BATCH_AXES)

    def mapped(features: Features, located: dict[str, Located], capacities: tuple[int, ...]) -> Routing:
        def body(features: Features, located: dict[str, Located]) -> Routing:
            return layout(features, located, capacities)

        routing: Routing = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(features, located)
        return routing

    return jax.jit(mapped, static_argnums=2)
