"""The stages of a host that `recjax calibrate` measures: from reading and routing to dispatching and moving rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.data.pipeline import batches
from recjax.data.synthetic.clicks import Synthetic
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import capacity, host
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import put_share
from recjax.planning.cases import Case, Run
from recjax.planning.tier_cases import tier_cases

_TABLES = 8  # of the routed batches, each of one id a sample
_SOURCES = {"": "host_read", "synthetic": "host_read.synthetic"}  # prepared data are read much as a stream is repeated


def host_cases(mesh: Mesh, quick: bool) -> Iterator[Case]:
    """The cases of all stages."""
    sizes = _sizes(quick, 2**10, 2**14, 2**18)
    held_out = () if quick else (60_000,)
    for ids, held in itertools.chain(zip(sizes, itertools.repeat(False)), zip(held_out, itertools.repeat(True))):
        made = functools.partial(_prepared, ids, mesh.devices.size)
        for kind, stage in _SOURCES.items():
            yield Case(stage, {"ids": float(ids)}, functools.partial(_read, kind, ids), held, False, True)
        for stage, make in (("host_route", _route), ("host_pack", _pack)):
            threads = stage != "host_pack"  # that the main thread does alone
            yield Case(stage, {"ids": float(ids)}, functools.partial(make, made), held, False, threads)
    of_place = [(moved, arrays, False) for moved in _sizes(quick, 2**12, 2**20, 2**24) for arrays in (1, 32)]
    for moved, arrays, held in [*of_place, (200_000, 12, True)]:
        make_place = functools.partial(_place, moved, arrays, mesh)
        yield Case("host_place", {"bytes": float(moved), "arrays": float(arrays)}, make_place, held, False)
    of_dispatch = [
        (arguments, devices, False)
        for arguments in _sizes(quick, 4, 64, 256)
        for devices in sorted({1, mesh.devices.size})
    ]
    for arguments, devices, held in [*of_dispatch, (30, 1, True)]:
        make_dispatch = functools.partial(_dispatch, arguments, devices, mesh)
        named = {"arguments": float(arguments), "devices": float(devices)}
        yield Case("host_dispatch", named, make_dispatch, held, False)
    yield from tier_cases(mesh, quick)


def _sizes(quick: bool, *sizes: int) -> tuple[int, ...]:
    """All of these sizes, or all but the largest."""
    return sizes[:-1] if quick else sizes


_ROWS = (10, 100, 1000, 10_000, 100_000, 100_000, 1_000_000, 1_000_000)


@functools.lru_cache(maxsize=2)
def _source(kind: str) -> Any:
    """Data whose blocks are kept, or drawn each time."""
    return Synthetic(rows=_ROWS).open() if kind == "synthetic" else ZipfStream(rows=_ROWS, distinct_blocks=8).open()


@functools.lru_cache(maxsize=8)
def _prepared(ids: int, devices: int) -> tuple[Any, Any]:
    """A batch of so many ids, and the tables that they are of."""
    source = _source("")
    names = [feature.name for feature in source.schema.features]
    tables = tuple(TableSpec(n, r, 16, Sgd(0.1)) for n, r in zip(names, _ROWS, strict=True))
    features = tuple(FeatureSpec(name, name) for name in names)
    bound = bind(make_plan("row_wise", tables), tables, features, devices)
    return next(_stream(source, ids)), bound


def _stream(source: Any, ids: int) -> Iterator[Any]:
    return batches(source, "train", max(1, ids // _TABLES), shuffle=True, workers=0)


def _read(kind: str, ids: int) -> Run:
    stream = _stream(_source(kind), ids)
    return lambda: next(stream)


def _route(prepared: Any) -> Run:
    batch, bound = prepared()
    return lambda: host.route_on_host(batch, bound, batch.size)


def _pack(prepared: Any) -> Run:
    batch, bound = prepared()
    counted = host.route_on_host(batch, bound, batch.size)
    sizes = capacity.grow({}, counted.required_capacities)
    return lambda: host.pack(counted, bound, sizes)


def _place(moved: int, arrays: int, mesh: Mesh) -> Run:
    rows = -(-moved // (4 * arrays * mesh.devices.size)) * mesh.devices.size
    given = [np.ones(max(rows, mesh.devices.size), np.float32) for _ in range(arrays)]
    return lambda: jax.block_until_ready(put_share(given, mesh))


def _dispatch(arguments: int, devices: int, mesh: Mesh) -> Run:
    over = list(mesh.devices.flat)[:devices]
    sharding = NamedSharding(Mesh(np.asarray(over), ("d",)), P()) if devices > 1 else None
    given = [jnp.full((4,), float(i)) for i in range(arguments)]
    held = [jax.device_put(given, sharding) if sharding else jax.device_put(given, over[0])]
    compiled = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)

    def run() -> None:
        jax.block_until_ready(held[0])
        held[0] = compiled(held[0])

    return run
