"""The stages of a host that `recjax calibrate` measures: from reading and routing to dispatching and moving rows."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Batch, RowBatch, RowLayout
from recjax.data.batch_checks import validate
from recjax.data.pipeline import Order, batches
from recjax.data.source import BLOCK_ROWS
from recjax.data.synthetic.clicks import Synthetic
from recjax.data.synthetic.stream import ZipfStream, ZipfStreamSource
from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.routing import capacity, host
from recjax.embedding.segment import Exchange
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.lab.calibrate.cases import Case, Run
from recjax.lab.calibrate.tier_cases import tier_cases
from recjax.parallel.packed import PackedForm, aligned_words, pack_words
from recjax.train.routers import WORDS

_IDS, _FEW_IDS = tuple(2**e for e in (10, 12, 14, 16, 18)), (2**10, 2**14)
_FEATURES, _FEW_FEATURES = (1, 8, 40), (2, 26)  # of the batches, each of one id a sample and a table of its own
# Samples, features and ids of a bag of the batches that are read, and whether they are held out.
_READ = (
    *((samples, features, 1, False) for samples in (256, 2048, 16_384) for features in _FEATURES),
    (256, 8, 10, False),
    (2048, 8, 10, False),
    (2048, 1, 80, False),
    (16_384, 1, 10, False),
    (65_536, 1, 1, False),
    (65_536, 8, 1, False),
    (3000, 20, 1, True),
    (6000, 12, 5, True),
)
_FEW_READ = tuple(
    (samples, features, bag, False) for samples in (64, 4096) for features, bag in ((2, 1), (26, 1), (4, 8))
)
_MOST_SAMPLES = 2**16  # of a batch
_POOLED_FOR = (2, 8)  # devices whose owners pool; more that share a table take as many times as long
# Ids and features of batches whose ids go to owners that pool, and whether they are held out.
_POOLED = (
    *((ids, count, False) for ids in (2**10, 2**14, 2**18) for count in (1, 40) if ids // count <= _MOST_SAMPLES),
    (60_000, 20, True),
)
_FEW_POOLED = ((2**10, 2, False), (2**14, 26, False), (2**10, 26, False), (2**14, 2, False))
_WINDOW = Order.shuffle_blocks * BLOCK_ROWS  # samples that are shuffled with each other, or drawn together
_SWEPT_BYTES = 2**25
_ROUTED_FOR = (1, 2, 8, 64)  # devices, which need not be here
# Class of a stage's ids, see `recjax.planning.routed` -> the plan that they are routed by.
_PLANS = {"": "row_wise", ".pooled": "table_wise", ".split_pooled": "row_wise"}
# Blocks are read as a stream is repeated, shuffled or not, or are drawn. Of packed rows those of a batch are taken, and
# of rows on the devices their numbers.
_SOURCES = {
    "": "host_read",
    "in_order": "host_read.in_order",
    "synthetic": "host_read.synthetic",
    "packed": "host_read.packed",
    "resident": "host_read.resident",
}


def host_cases(mesh: Mesh, quick: bool) -> Iterator[Case]:
    """The cases of all stages."""
    swept = _shared(mesh)
    sizes, features = (_FEW_IDS, _FEW_FEATURES) if quick else (_IDS, _FEATURES)
    for samples, count, bag, held in _FEW_READ if quick else _READ:
        read = {"samples": float(samples), "features": float(count), "ids": float(samples * count * bag)}
        for kind, stage in _SOURCES.items():
            make, beside = (functools.partial(_reading, kind, samples, count, bag, s) for s in (swept, False))
            yield Case(stage, read, make, held, False, beside)
    of_routing = [
        (ids, count, False) for ids, count in itertools.product(sizes, features) if ids // count <= _MOST_SAMPLES
    ]
    for ids, count, held in of_routing if quick else [*of_routing, (60_000, 20, True)]:
        named = {"ids": float(ids), "features": float(count)}
        for devices, stage in itertools.product((4,) if held else _ROUTED_FOR, ("host_route", "host_pack")):
            yield _routing(stage, "", named | {"devices": float(devices)}, swept, held)
    for ids, count, held in _FEW_POOLED if quick else _POOLED:
        named = {"ids": float(ids), "features": float(count)}
        for devices in (4,) if held else _POOLED_FOR:
            for stage, way in itertools.product(("host_route", "host_pack"), (".pooled", ".split_pooled")):
                yield _routing(stage, way, named | {"devices": float(devices)}, swept, held)
    here = sorted({1, min(2, mesh.devices.size), mesh.devices.size})
    moves = itertools.product(
        (2**12, 2**20) if quick else tuple(2**e for e in (12, 16, 20, 24)), (1, 64) if quick else (1, 8, 64), here
    )
    for moved, arrays, devices, held in [*((*move, False) for move in moves), (200_000, 20, 1, True)]:
        placed = {"bytes": float(moved), "arrays": float(arrays), "devices": float(devices)}
        yield Case("host_place", placed, functools.partial(_place, moved, arrays, devices, mesh), held, False)
    of_dispatch = [
        (arguments, devices, False) for arguments in ((4, 16, 64) if quick else (4, 16, 64, 256)) for devices in here
    ]
    for arguments, devices, held in [*of_dispatch, (30, 1, True)]:
        called = {"arguments": float(arguments), "devices": float(devices)}
        yield Case("host_dispatch", called, functools.partial(_dispatch, arguments, devices, mesh), held, False)
    yield from tier_cases(mesh, quick)


def _routing(stage: str, way: str, named: dict[str, float], swept: bool, held: bool) -> Case:
    """A case of routing or packing, by a way of `_PLANS`."""
    sizes = int(named["ids"]), int(named["features"]), int(named["devices"])
    make, beside = (functools.partial(_stage, stage, way, *sizes, s) for s in (swept, False))
    alone = stage == "host_pack"  # which the main thread does
    return Case(stage + way, named, make, held, False, None if alone else beside)


def _shared(mesh: Mesh) -> bool:
    """Returns whether the devices compute on the host's cores, and so in its caches."""
    return bool(mesh.devices.flat[0].platform == "cpu")


_ROWS = (10, 100, 1000, 10_000, 100_000, 100_000, 1_000_000, 1_000_000)


def _rows(features: int) -> tuple[int, ...]:
    """Rows of the tables of so many features."""
    return tuple(itertools.islice(itertools.cycle(reversed(_ROWS)), features))


@functools.cache
def _source(kind: str, features: int, bag: int) -> Any:
    """Data whose blocks are there already, or are drawn each time."""
    rows = _rows(features)
    if kind == "synthetic":
        return Synthetic(rows=rows, ids_per_bag=(bag,)).open()
    source = ZipfStream(rows=rows, ids_per_bag=(bag,), distinct_blocks=8).open()
    if isinstance(source, ZipfStreamSource):  # as it is without a folder
        source.draw("train")
    return _InRows(source) if kind in ("packed", "resident") else source


class _InRows:
    """Data whose training rows lie in memory, packed, as those of prepared data do once they have been read."""

    def __init__(self, source: Any) -> None:
        self.schema, self.layout = source.schema, RowLayout(source.schema)
        self._counts = source.row_counts("train")[: Order.shuffle_blocks]  # a window
        self._rows_RxW = np.concatenate(
            [self.layout.pack(source.read("train", number))[0] for number in range(len(self._counts))]
        )
        self.bytes = self._rows_RxW.nbytes

    def row_counts(self, split: str) -> np.ndarray:
        return self._counts

    def rows(self, split: str, pack: bool = False) -> Any:
        return self

    def take(self, numbers_B: np.ndarray, out_BxW: np.ndarray) -> None:
        np.take(self._rows_RxW, numbers_B, axis=0, out=out_BxW, mode="clip")

    def columns(self, numbers_B: np.ndarray, rows_BxW: np.ndarray) -> Batch:
        return self.layout.columns(rows_BxW, np.zeros(0, np.int32))


class _Turn:
    """A host's work for batches of one size, stage after stage, as a training does it.

    A stage that alone is repeated takes less: here each finds the processor's caches as the others left them, and as
    devices do which share them and pass over all of their memory in a step.

    Attributes:
      seconds: that each stage of the last batch took, by its name in the machine file.
    """

    def __init__(
        self, kind: str, samples: int, features: int, bag: int, devices: int, swept: bool, way: str = ""
    ) -> None:
        """Opens the data of a kind of `_SOURCES`; each feature has `bag` ids a sample and a table of its own.

        `swept` says whether devices share the processor's caches, `way` by which of `_PLANS` ids are routed.
        """
        self._swept = swept
        source = _source(kind, features, bag)
        names = [feature.name for feature in source.schema.features]
        tables = tuple(TableSpec(n, r, 16, Sgd(0.1)) for n, r in zip(names, _rows(features), strict=True))
        looked_up = tuple(FeatureSpec(name, name) for name in names)
        plan = make_plan(_PLANS[way], tables, Exchange(kind="pooled" if way else "rows"))
        self._bound = bind(plan, tables, looked_up, devices)
        by_row, layout = kind in ("packed", "resident"), RowLayout(source.schema)
        words = np.zeros((samples, layout.words if kind == "packed" else 1), np.int32)  # of a call, here of one step

        def lay_out(batch: RowBatch) -> RowBatch:
            """Does what a training does with rows, see `RowForm.pack`."""
            if kind == "packed":
                batch.take(words[: batch.size])
                validate(batch, source.schema)
            else:
                words[: batch.size, 0] = batch.numbers_B
            return batch

        how: dict[str, Any] = {"transform": lay_out, "check": False} if by_row else {}
        self._batches = batches(source, "train", samples, shuffle=kind != "in_order", workers=0, **how)
        self._sizes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def run(self) -> Any:
        """Reads, routes and packs the next batch; returns its routing."""
        batch = self.read()
        counted = self._timed("host_route", lambda: host.route_on_host(batch, self._bound, batch.size))
        self._sizes = capacity.grow(self._sizes, counted.required_capacities)
        return self._timed("host_pack", lambda: host.pack(counted, self._bound, self._sizes))

    def read(self) -> Batch:
        """Reads the next batch alone."""
        return self._timed("host_read", lambda: next(self._batches))

    def _timed(self, stage: str, work: Run) -> Any:
        self.sweep()
        began = time.perf_counter()
        done = work()
        self.seconds[stage] = time.perf_counter() - began
        return done

    def sweep(self) -> None:
        """Passes over memory, if devices do."""
        if self._swept:
            source, to = _memory()
            np.copyto(to, source)


@functools.lru_cache(maxsize=1)
def _memory() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays that together fill most of a processor's caches."""
    return np.ones(_SWEPT_BYTES // 2, np.uint8), np.zeros(_SWEPT_BYTES // 2, np.uint8)


def _reading(kind: str, samples: int, features: int, bag: int, swept: bool) -> Run:
    return _Reading(_Turn(kind, samples, features, bag, 1, swept), samples).run


def _stage(stage: str, way: str, ids: int, features: int, devices: int, swept: bool) -> Run:
    turn = _Turn("", max(1, ids // features), features, 1, devices, swept, way)

    def run() -> float:
        turn.run()
        return turn.seconds[stage]

    return run


class _Reading:
    """Reading of batches. What reading a window takes longer, of which a few batches are, is shared by all of them."""

    def __init__(self, turn: _Turn, samples: int) -> None:
        """Makes it of batches of so many samples, and reads until a window has been opened after the first."""
        self._turn, self._samples, self._count = turn, samples, 0
        self._share = min(1.0, samples / _WINDOW)
        self._plain = self._window = 0.0  # seconds of the last batch that opened none, and of the last window besides
        for _ in range(math.ceil(1 / self._share) + 1):
            self._read(turn.read)

    def run(self) -> float:
        """Reads the next batch; returns the time that a batch takes on average, s."""
        self._read(self._turn.run)
        return self._turn.seconds["host_read"] if self._share == 1 else self._plain + self._share * self._window

    def _read(self, work: Run) -> None:
        work()
        before, last = ((count * self._samples - 1) // _WINDOW for count in (self._count, self._count + 1))
        self._count, took_s = self._count + 1, self._turn.seconds["host_read"]
        if before == last:
            self._plain = took_s
        else:
            self._window = max(0.0, took_s - self._plain)


def _after_a_turn(work: Run, swept: bool) -> Run:
    """Times some work after the other stages of a batch; what it leaves to other threads is awaited, and not timed."""
    turn = _Turn("", 2**10, 16, 1, 1, swept)

    def run() -> float:
        turn.run()
        turn.sweep()
        began = time.perf_counter()
        done = work()
        seconds = time.perf_counter() - began
        jax.block_until_ready(done)
        return seconds

    return run


def _place(moved: int, arrays: int, devices: int, mesh: Mesh) -> Run:
    rows = -(-moved // (4 * arrays * devices)) * devices
    arrays_of_batch = [np.ones(max(rows, devices), np.float32) for _ in range(arrays)]
    chosen = Mesh(mesh.devices.reshape(-1)[:devices].reshape(1, 1, devices), mesh.axis_names)
    form = PackedForm.of(arrays_of_batch, devices)

    def place() -> Any:
        words_KxNxE = aligned_words((1, devices, sum(form.words)))
        pack_words(arrays_of_batch, form, words_KxNxE[0])
        return jax.device_put(words_KxNxE, NamedSharding(chosen, WORDS))

    return _after_a_turn(place, _shared(mesh))


def _dispatch(arguments: int, devices: int, mesh: Mesh) -> Run:
    sharding = NamedSharding(Mesh(mesh.devices.reshape(-1)[:devices], ("d",)), P())
    held = [jax.device_put([jnp.full((4,), float(i)) for i in range(arguments)], sharding)]
    compiled = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)

    def dispatched() -> Any:
        held[0] = compiled(held[0])
        return held[0]

    return _after_a_turn(dispatched, _shared(mesh))
