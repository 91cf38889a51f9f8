"""The work of rows that come to a cache on the device and leave it, as `recjax calibrate` measures it.

Three classes. `host_lookup` finds the slots of the distinct rows that a batch names, all of them in the cache.
`host_swap` is all that rows do which come while as many leave: they are read from the host's memory, put into the
cache, taken out of it, and written. `device_swap` is the devices' part of that: the two programs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.data.batch import Bags, Batch
from recjax.embedding.bind import bind
from recjax.embedding.buffers import initialise, place_homes
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import host
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.lab.calibrate.cases import Case, Run
from recjax.tiers.caches import ROWS, cached_groups, with_caches
from recjax.tiers.host_rows import HostRows
from recjax.tiers.moves import Mover
from recjax.tiers.stage import CacheStage
from recjax.tiers.tier import Tier

_HOST_BYTES = 2**26  # of the rows on the host: more than most processors' caches


def tier_cases(mesh: Mesh, quick: bool) -> Iterator[Case]:
    """The cases of one device."""
    one = Mesh(mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
    named = (2**10, 2**15) if quick else (2**8, 2**10, 2**12, 2**14, 2**16, 2**18)
    for ids, held in itertools.chain(zip(named, itertools.repeat(False)), () if quick else [(50_000, True)]):
        yield Case("host_lookup", {"ids": float(ids)}, functools.partial(_lookup, one, ids), held, False)
    grid = [(2**9, 16), (2**13, 16)] if quick else list(itertools.product((2**8, 2**11, 2**14), (16, 128)))
    for rows, D in grid:
        yield from _of_swap(one, rows, D, False)
    if not quick:
        yield from _of_swap(one, 5000, 64, True)


def _of_swap(mesh: Mesh, rows: int, D: int, held_out: bool) -> Iterator[Case]:
    sizes = {"rows": float(rows), "row_bytes": float(_record_bytes(D))}
    yield Case("host_swap", sizes, functools.partial(_swap, mesh, rows, D), held_out, False)
    yield Case("device_swap", sizes, functools.partial(_programs, mesh, rows, D), held_out, False)


@dataclasses.dataclass(frozen=True)
class _State:
    """The part of a training's state that `Tier.admit` takes."""

    tables: Any
    slots: Any
    homes: Any


class _Cached:
    """A table of which a cache holds a part, and which is written everywhere."""

    def __init__(self, mesh: Mesh, D: int, rows: int, cached: int) -> None:
        self.bound = _bound(D, rows, cached)
        homes = place_homes(self.bound, mesh)
        tables, slots = initialise(self.bound, mesh, 0, np.float32)
        self.state = _State(tables, slots, homes)
        self.tier = Tier(HostRows(self.bound, mesh, 0, np.float32))
        self.stage = CacheStage(self.bound, self.tier, 1)
        ((self.name, group_rows),) = self.tier.rows.groups.items()
        group_rows.write_initial()

    def enter(self, homes_K: np.ndarray) -> None:
        """Has rows come, and waits until those that leave for them are written."""
        self.state = self.tier.admit(self.state, self.stage.enter({self.name: homes_K}))
        jax.block_until_ready((self.state.tables, self.state.slots))
        self.tier.wait_for_writes()


def _bound(D: int, rows: int, cached: int) -> BoundPlan:
    tables = (TableSpec("rows", rows, D, RowWiseAdagrad(0.01)),)
    bound = bind(make_plan("row_wise", tables), tables, (FeatureSpec("rows", "rows"),), 1)
    (group,) = bound.groups
    return with_caches(bound, cached * group.row_bytes(4), 4)


@functools.lru_cache(maxsize=16)
def _record_bytes(D: int) -> int:
    (cached,) = cached_groups(_bound(D, 2, 1), np.float32).values()
    return cached.record_bytes


def _swap(mesh: Mesh, rows: int, D: int) -> Run:
    """Rows come by turns; of those that come the last time was so long ago that they have left."""
    total = max(4 * rows, _HOST_BYTES // _record_bytes(D))
    made = _Cached(mesh, D, total, 2 * rows)
    order = np.random.default_rng(0).permutation(total // rows * rows).astype(np.int32).reshape(-1, rows)
    turns = itertools.cycle(np.sort(order, axis=1))
    for _ in range(3):  # the cache is full
        made.enter(next(turns))
    return lambda: made.enter(next(turns))


def _programs(mesh: Mesh, rows: int, D: int) -> Run:
    """The programs alone, on a cache four times as large as what comes."""
    bound = _bound(D, 8 * rows, 4 * rows)
    ((name, cached),) = cached_groups(bound, np.float32).items()
    homes = place_homes(bound, mesh)[name]
    tables, slots = initialise(bound, mesh, 0, np.float32)
    mover, buffers = Mover(cached, mesh), {ROWS: tables[name], **slots[name]}
    at_K = np.random.default_rng(0).permutation(cached.group.rows)[:rows].astype(np.int32)
    new = np.zeros((rows, cached.record_bytes), np.uint8)
    held: list[Any] = [buffers, homes]

    def run() -> None:
        taken = mover.take(held[0], [at_K], rows)
        held[:] = mover.put(held[0], held[1], [at_K], [at_K], [new], rows)
        jax.block_until_ready((held, taken))

    return run


def _lookup(mesh: Mesh, ids: int) -> Run:
    """A batch that names so many rows, as two that follow each other do: all are there."""
    made = _Cached(mesh, 4, 4 * ids, 2 * ids)
    ids_K = np.random.default_rng(0).permutation(4 * ids)[:ids].astype(np.int32)
    ones = np.ones(ids, np.float32)
    batch = Batch(np.zeros((ids, 0), np.float32), {"rows": Bags(ids_K[:, None])}, ones, ones)
    routed = host.route_on_host(batch, made.bound, ids)
    made.state = made.tier.admit(made.state, made.stage.advance(routed, []).admission)

    def run() -> None:
        made.stage.advance(routed, []).admission.records.result()

    return run
