"""Jagged bags count with their mean in the data wherever something is chosen or printed by ids."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.commands import inside

from recjax.config import presets
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.source import mean_ids
from recjax.embedding.bind import bind, with_owners
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.plan_report import describe_plan, plan_table
from recjax.embedding.segment import Segment
from recjax.embedding.spec import FeatureSpec, TableSpec, ids_per_sample
from recjax.lab.bench import run
from recjax.parallel.mesh import AXES
from recjax.planning import hot
from recjax.planning.loads import MOST_IDS, profile_of
from recjax.tiers.caches import with_caches
from recjax.train import planned
from recjax.train.build import build_trainer

TABLES = tuple(TableSpec(name, 1000, 4, Sgd(0.1)) for name in "abc")
# One jagged bag of ten ids on average, and two of four.
FEATURES = (FeatureSpec("a", "a", None, mean_ids=10.0), FeatureSpec("b", "b", 4), FeatureSpec("c", "c", 4))
UNKNOWN = (dataclasses.replace(FEATURES[0], mean_ids=None), *FEATURES[1:])
OWNED = make_plan("table_wise", TABLES)
SMALL = tuple(
    """
    data.rows=400,300 data.ids_per_bag=0,2 data.weighted=false data.train_rows=9000 train.batch_size=40 mesh.devices=2
    plan=table_wise
    """.split()
)


def owners(bound: BoundPlan) -> dict[str, int]:
    return {s.spec.name: s.split.first // s.split.owners for group in bound.groups for s in group.segments}


def test_the_mean_is_that_of_the_first_block() -> None:
    def block(*lengths: int) -> Batch:
        ones = np.ones(len(lengths), np.float32)
        bags = {"a": Bags(np.zeros(sum(lengths), np.int32), np.array(lengths)), "b": Bags(np.zeros((len(lengths), 3)))}
        return Batch(np.zeros((len(lengths), 0), np.float32), bags, ones, ones)

    blocks = {"train": [block(3, 0, 4), block(90)], "test": [block(5, 6)], "validation": []}
    source: Any = SimpleNamespace(
        schema=Schema((), (Feature("a", 10, None), Feature("b", 10, 3))),
        row_counts=lambda split: np.array([each.size for each in blocks[split]], np.int64),
        read=lambda split, index: blocks[split][index],
    )
    assert mean_ids(source) == {"a": 7 / 3}
    blocks["train"] = []
    assert mean_ids(source) == {}
    source.schema = Schema((), (Feature("b", 10, 3),))
    source.read = None  # nothing is to be read
    assert mean_ids(source) == {}


def test_a_sample_has_each_data_feature_once() -> None:
    assert ids_per_sample([*FEATURES, FeatureSpec("a too", "b", None, source="a", mean_ids=10.0)]) == 18
    assert ids_per_sample(UNKNOWN) == 9


def test_owners_share_lookups_by_the_mean() -> None:
    """Ten of 18 lookups are of a, so that it is alone. Where its bag counts as one id, b and c are apart."""
    assert owners(bind(OWNED, TABLES, FEATURES, 2)) == {"a": 0, "b": 1, "c": 1}
    assert owners(bind(OWNED, TABLES, UNKNOWN, 2)) == {"a": 0, "b": 0, "c": 1}


def test_owners_that_a_run_has_stored_stay() -> None:
    """Whatever a later version or later data say of the bags; also of tables that are split and on hosts."""
    plan = Plan(
        {
            "a": (Segment("table_wise", columns=(0, 1)), Segment("table_wise", columns=(1, 4))),
            "b": (Segment("table_row_wise"),),
            "c": (Segment("row_wise"),),
        }
    )
    for before, after in ((UNKNOWN, FEATURES), (FEATURES, UNKNOWN)):
        bound = bind(plan, TABLES, before, 4, hosts=2)
        stored = Plan.from_json(with_owners(plan, bound).to_json(), "a run's")
        assert [s.owners for found in stored.tables.values() for s in found].count("all") == 1
        again = bind(stored, TABLES, after, 4, hosts=2)
        for old, new in zip(bound.groups, again.groups, strict=True):
            assert [(s.number, s.split) for s in old.segments] == [(s.number, s.split) for s in new.segments]
    assert owners(bind(with_owners(OWNED, bind(OWNED, TABLES, UNKNOWN, 2)), TABLES, FEATURES, 2))["b"] == 0


def test_a_run_stores_the_owners_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "figures", lambda chosen: {})
    config = presets.load("synthetic", ["planner.machine=h100"])
    chosen, mesh = cast(Any, SimpleNamespace(plan=OWNED)), cast(Any, SimpleNamespace(shape=dict.fromkeys(AXES, 1)))
    planned.record_plan(tmp_path, config, chosen, bind(OWNED, TABLES, FEATURES, 2), mesh)
    stored = Plan.from_json((tmp_path / "plan.json").read_text(), "a run's")
    assert {name: found[0].owners for name, found in stored.tables.items()} == {"a": 0, "b": 1, "c": 1}


def test_the_report_of_a_plan_has_the_mean() -> None:
    described = describe_plan(OWNED, TABLES, FEATURES, 2, 8)
    assert [described["tables"][name]["ids_per_step"] for name in "abc"] == [80, 32, 32]
    assert sum(described["lookups_per_device"]) == 144
    assert " 80+" in plan_table(described)


def test_a_profile_without_samples_has_the_mean() -> None:
    source: Any = SimpleNamespace(row_counts=lambda split: np.zeros(0, np.int64))
    found = profile_of(source, TABLES, FEATURES, 8, 2)
    assert found.tables["a"].ids == 10 and "one id" not in found.origin
    assert "a jagged bag as one id" in profile_of(source, TABLES, UNKNOWN, 8, 2).origin


def test_a_block_of_too_many_ids_is_not_read() -> None:
    """Though it has few enough if a jagged bag is one id."""
    rows = MOST_IDS // 12
    source: Any = SimpleNamespace(row_counts=lambda split: np.array([rows]), read=None)
    assert f"{18 * rows:,} ids" in profile_of(source, TABLES, FEATURES, 8, 2).origin


def test_caches_share_memory_by_the_mean() -> None:
    """Two buffers of unequal width: bytes of named rows are as 10 x 4 to 4 x 8."""
    tables = (TABLES[0], dataclasses.replace(TABLES[1], dim=8))
    bound = bind(make_plan("row_wise", tables), tables, FEATURES[:2], 2)
    sizes = {group.table_names[0]: group.rows for group in with_caches(bound, 7200, 4).cached}
    assert sizes == {"a": 7200 * 40 // 72 // 16, "b": 7200 * 32 // 72 // 32}


def test_hot_rows_are_counted_in_batches_of_so_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    config = presets.load("synthetic", [*SMALL, "embedding.hot.batches=100"])
    source = config.data.open()
    mean = mean_ids(source)["sparse_0"]
    features = (FeatureSpec("sparse_0", "a", None, mean_ids=mean), FeatureSpec("sparse_1", "b", 2))
    monkeypatch.setattr(hot, "MOST_IDS", int(5.5 * 40 * (mean + 2)))
    found = hot.first_batches(config, source, TABLES[:2], features, 2)
    assert found.batches == 5


@pytest.mark.light_compile
def test_a_run_and_its_commands_know_the_data() -> None:
    config = presets.load("synthetic", [*SMALL])
    mean = mean_ids(config.data.open())["sparse_0"]
    assert 3 < mean < 5
    trainer = build_trainer(config, splits=("train",), weights=False)
    assert [f.ids for f in trainer.bound.features] == [mean, 2]
    assert run._about(trainer, cast(Any, SimpleNamespace(steps=1)), None)["ids_per_sample"] == mean + 2
    alone = presets.load("synthetic", [*SMALL, "mesh.devices=1"])
    source: Any = alone.data.open()
    source.has_blocks, source.read = False, None  # as of a run's copy of its data
    assert [f.ids for f in build_trainer(alone, source, weights=False).bound.features] == [1, 2]
    tables = json.loads(inside("plan", "synthetic", *SMALL, "--json").out)["tables"]
    assert [table["ids_per_step"] for table in tables.values()] == [pytest.approx(40 * mean), 80]
