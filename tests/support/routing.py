"""Bound plans and batches for tests of routing."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Bags, Batch
from recjax.embedding.bind import bind
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Segment
from recjax.embedding.sharding import BoundSegment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import BATCH_AXES, largest_anywhere
from recjax.train.routers import PackedBatches, StepInputs

THIRD = 2**31 // 3  # three tables of so many rows are all that one device can count


def build(tables: list[Any], features: list[Any], devices: int, hosts: int = 1) -> BoundPlan:
    """Tables (rows, dim, placement or segments) and features (table, bag, pooling, weighted), bound."""
    used = sorted({f[0] for f in features})
    specs = tuple(TableSpec(f"t{i}", tables[i][0], tables[i][1], Sgd()) for i in used)
    placements: dict[str, tuple[Segment, ...]] = {
        f"t{i}": (Segment(tables[i][2]),) if isinstance(tables[i][2], str) else tables[i][2] for i in used
    }
    named = tuple(FeatureSpec(f"f{k}", f"t{t}", *rest) for k, (t, *rest) in enumerate(features))
    return bind(Plan(placements), specs, named, devices, hosts=hosts)


def make_batch(bound: BoundPlan, size: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    rows = {t.spec.name: t.spec.rows for g in bound.groups for t in g.segments}
    bags = {}
    for f in bound.features:
        lengths = rng.integers(0, 5, size).astype(np.int32) if f.bag is None else None
        shape = (int(lengths.sum()),) if f.bag is None else (size, f.bag)
        few = min(rows[f.table], 50)  # so that ids repeat, in a bag and between samples
        ids = rng.integers(0, few, shape) if seed % 2 else rows[f.table] - 1 - rng.integers(0, few, shape)
        ids = ids.astype((np.int32, np.int64, np.uint32)[seed % 3])
        weights = rng.normal(size=shape).astype(np.float32) if f.weighted else None
        bags[f.name] = Bags(ids, lengths, weights)
    return Batch(np.zeros((size, 1), np.float32), bags, np.zeros(size, np.float32), np.ones(size, np.float32))


def segment_of(group: Group, table: str) -> BoundSegment:
    """A table's first segment in a group."""
    return next(segment for segment in group.segments if segment.spec.name == table)


def locate(group: Group, table: str, ids: Any) -> tuple[Any, Any]:
    """(owner, slot) of rows of a table that a group holds whole."""
    owner, slot, here = segment_of(group, table).locate(ids)
    assert here is None
    return owner, slot


def apart(router: Any, batches: PackedBatches) -> tuple[StepInputs, dict[str, int], bool | None]:
    """What a program makes of one packed batch: its arrays, the sizes that it needs, and whether it fits."""
    of_devices = P(BATCH_AXES)

    def body(words_NxE: Any) -> Any:
        inputs, needs = batches.inputs(words_NxE[0], None, router.bound)
        needs = largest_anywhere(needs)
        return inputs, needs, batches.fit(needs, router.bound) if needs else None

    out = (of_devices, P(), P())
    mapped = jax.shard_map(body, mesh=router.mesh, in_specs=of_devices, out_specs=out)
    inputs, needs, fits = jax.jit(mapped)(batches.words_KxNxE[0])
    return inputs, {name: int(size) for name, size in needs.items()}, None if fits is None else bool(fits)
