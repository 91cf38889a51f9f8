"""Rows that a batch names, told to all processes: each routes its own samples, and caches go by the whole batch.

A process decides which rows come to the caches of its own devices and which leave (`recjax.tiers.stage`). For that it
needs no samples of others, but the distinct rows that these name. The lists travel over the mesh in the order of the
batches, each while the batch before it is read: their size is agreed on with that of the other arrays (see
`agreement.py`), and nobody waits for a step. Where the rows lie then comes back: `recjax.tiers.stage`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.capacity import rung
from recjax.embedding.routing.keys import distinct
from recjax.embedding.routing.routed import RoutedBatch
from recjax.parallel.mesh import Share, everywhere, put_share
from recjax.tiers.stage import homes_by_owner
from recjax.train.routers import InFlight

_ENTRIES = "\0named"  # beside the names of capacities: those of a device in the list


def list_named(bound: BoundPlan, routed: RoutedBatch) -> RoutedBatch:
    """Lists the rows of caches that the samples of this process name, where there are others.

    Args:
      bound: a plan with caches.
      routed: the samples.
    """
    if jax.process_count() == 1:
        return routed
    named = homes_by_owner(bound, routed)
    entries = sum(1 + len(homes_U) for of_owners in named.values() for homes_U in of_owners)
    required = {**routed.required_capacities, _ENTRIES: -(-entries // routed.devices)}
    return dataclasses.replace(routed, named=named, required_capacities=required)


def gather_named(stream: Iterator[InFlight], bound: BoundPlan, mesh: Mesh) -> Iterator[InFlight]:
    """Gives each batch the rows that all processes have listed for it; every process must iterate alike.

    Args:
      stream: batches after `list_named` and `synchronize_batches`.
      bound: the plan.
      mesh: its devices.
    """
    if jax.process_count() == 1:
        yield from stream
        return
    shares, count, size = Share.of_all(mesh), Share.of(mesh).count, 0
    waiting: tuple[InFlight, jax.Array] | None = None
    for batch in stream:
        required = dict(batch.routed.required_capacities)
        if (entries := required.pop(_ENTRIES)) > size:
            size = rung(entries)  # each is a program
        lists = np.zeros(count * size, np.int32)
        own = _joined(bound, batch.routed)
        lists[: len(own)] = own
        routed = dataclasses.replace(batch.routed, required_capacities=required)
        before = waiting
        waiting = dataclasses.replace(batch, routed=routed), everywhere(put_share(lists.reshape(count, size), mesh))
        if before:
            yield _with_all(before[0], before[1], bound, shares)
    if waiting:
        yield _with_all(waiting[0], waiting[1], bound, shares)


def _joined(bound: BoundPlan, routed: RoutedBatch) -> np.ndarray:
    """Counts of the homes that are named, for each owner of each cache, and these: int32 [entries]."""
    homes = [homes_U for group in bound.cached for homes_U in routed.named[group.name]]
    return np.concatenate([np.array([len(homes_U) for homes_U in homes], np.int32), *homes])


def _with_all(batch: InFlight, lists: jax.Array, bound: BoundPlan, shares: list[Share]) -> InFlight:
    """The batch with the homes that all processes have listed."""
    lists_NxC = np.asarray(lists)
    owners = [(group, owner) for group in bound.cached for owner in range(group.owners)]
    pieces: list[list[np.ndarray]] = [[] for _ in owners]
    for share in shares:
        list_K = lists_NxC[share.first : share.first + share.count].ravel()
        ends = len(owners) + np.cumsum(list_K[: len(owners)])
        for of_owner, homes_U in zip(pieces, np.split(list_K[: ends[-1]], [len(owners), *ends[:-1]])[1:], strict=True):
            of_owner.append(homes_U)
    named: dict[str, list[np.ndarray]] = {group.name: [] for group in bound.cached}
    for (group, _), of_owner in zip(owners, pieces, strict=True):
        homes_U, _ = distinct(np.concatenate(of_owner), group.home_rows)
        named[group.name].append(homes_U.astype(np.int32, copy=False))
    return dataclasses.replace(batch, routed=dataclasses.replace(batch.routed, named=named))
