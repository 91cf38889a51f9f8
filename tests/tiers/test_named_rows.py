"""Rows that the samples of several processes name, put together: those of the whole batch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import write_preset
from support.problems import Problem, trainer_of

from recjax.config import presets
from recjax.config.train import DenseAdagrad
from recjax.data.batch import Bags, Batch
from recjax.data.source import between
from recjax.embedding.optim import Adam, RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.routing.host import route_on_host, samples_of
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import Share
from recjax.planning.tier_replay import homes_of
from recjax.tiers.stage import homes_by_owner
from recjax.train import named_rows, preflight
from recjax.train.build import build_trainer
from recjax.train.routers import InFlight

B, V = 22, 400
HOT = Segment("hot", RowIds((0, 1, 2, 30)))


def problem() -> Problem:
    """Two tables, of which one is looked up twice, by ids of fixed and of jagged bags."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 4, B).astype(np.int32)
    bags = {"x": Bags(rng.integers(0, V, (B, 2))), "y": Bags(rng.integers(0, V, int(lengths.sum())), lengths)}
    batch = Batch(np.zeros((B, 1), np.float32), bags, np.zeros(B, np.float32), np.ones(B, np.float32))
    tables = (TableSpec("one", V, 4, RowWiseAdagrad(0.1)), TableSpec("two", V + 5, 4, Adam(0.1)))
    features = (
        FeatureSpec("one x", "one", 2, "sum", False, "x"),
        FeatureSpec("one y", "one", None, "mean", False, "y"),
        FeatureSpec("two y", "two", None, "sum", False, "y"),
    )
    return Problem([batch], B, tables, features, DLRMConfig((4,), (1,)), 1, DenseAdagrad(0.1).build())


@pytest.mark.parametrize(
    ("devices", "per_process", "how", "segments"),
    [
        (2, 1, {}, (Segment("row_wise"),)),
        (6, 2, {"hosts": 3}, (HOT, Segment("table_row_wise", "rest"))),
        (8, 4, {"replicas": 4}, (Segment("row_wise", exchange=Exchange(kind="pooled")),)),
    ],
    ids=["rows", "hosts beside hot rows", "pooled vectors in replica groups"],
)
def test_lists_of_all_processes_are_the_rows_of_the_batch(
    devices: int, per_process: int, how: dict[str, int], segments: tuple[Segment, ...]
) -> None:
    made = problem()
    plan = Plan({table.name: segments for table in made.tables})
    trainer = trainer_of(made, devices, plan, cache_bytes=3_000, **how)
    bound, batch = trainer.bound, made.batches[0]
    assert len(bound.cached) == 2
    shares = [Share(devices, first, per_process) for first in range(0, devices, per_process)]
    rows, routed = [], []
    for share in shares:
        edges = (min(edge, B) for edge in samples_of(share, B))
        found = route_on_host(between(batch, *edges), bound, B, 1, share)
        routed.append(dataclasses.replace(found, named=homes_by_owner(bound, found)))
        rows.append(named_rows._joined(bound, routed[-1]))
    size = -(-max(map(len, rows)) // per_process) + 3
    lists = np.stack([np.pad(row, (0, per_process * size - len(row))) for row in rows]).reshape(devices, size)
    for of_process in routed:
        all_ = named_rows._with_all(InFlight(batch, of_process), jnp.asarray(lists), bound, shares).routed
        for group in bound.cached:
            of_owners = homes_by_owner(bound, all_)[group.name]
            wanted = homes_of(bound, batch)[group.name]
            assert [own.tolist() for own in of_owners] == [own.tolist() for own in wanted]
            assert all(own.dtype == np.int32 for own in of_owners) and sum(map(len, of_owners)) > B // 2


def test_processes_must_have_caches_of_one_size(tmp_path: Path) -> None:
    preset = str(write_preset(tmp_path))
    sizes = []
    for budget in (0, 5_000, 6_000):
        config = presets.load(preset, ["mesh.devices=2", f"tier.device_bytes={budget}"])
        sizes.append(preflight.facts(build_trainer(config)).get("rows of caches"))
    assert sizes[0] is None and sizes[1] != sizes[2]
    assert list(json.loads(sizes[1] or "").values()) == [5_000 // 36]
