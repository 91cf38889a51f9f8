"""`recjax plan --tiers` against what a training counts, and its words."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.commands import assert_refused, inside

from recjax.config import presets
from recjax.data.source import mean_ids
from recjax.errors import ConfigError
from recjax.lab.predict import tier_plan, tier_report
from recjax.planning import tier_run
from recjax.planning.graph import Graph
from recjax.planning.machine import Kernel, Machine, Point, open_machine
from recjax.planning.predict import CORES, DEVICES, INTERPRETER, HostWork, Prediction, predict
from recjax.tiers import disk
from recjax.tiers.disk import DiskRates, disk_rates
from recjax.train.build import build_trainer

pytestmark = pytest.mark.light_compile

SETTINGS = tuple(
    """
    data.rows=6000,300,4000 data.ids_per_bag=1,0,3 data.weighted=false train.batch_size=64 plan=row_wise mesh.devices=2
    data.train_rows=16384
    """.split()
)
STEPS = 60


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_run, "disk_rates", lambda folder: DiskRates(1000.0, 4096e3, 500.0))


def config_of(*more: str) -> Any:
    return presets.load("synthetic", [*SETTINGS, f"train.steps={STEPS}", *more])


def test_each_process_has_memory_of_its_own(tmp_path: Path) -> None:
    """Two with half of it each are as one with all; but each of two replica groups holds all rows."""
    small = ("tier.device_bytes=60KiB", f"tier.disk={tmp_path}")
    told = tier_plan.tier_plan(config_of(*small, "tier.dram_bytes=100KiB"))
    shared = tier_plan.tier_plan(config_of(*small, "tier.dram_bytes=50KiB"), processes=2)
    for name in ("tables", "step", "costs"):
        assert shared[name] == told[name]
    assert shared["nodes"]["node"]["dram_bytes"] == 100 * 1024
    groups = ("mesh.replicas=2", "mesh.devices=4", "train.replica_sync=exact", *small, "tier.dram_bytes=50KiB")
    for processes, kib in ((1, 50), (2, 50), (4, 100)):
        run = tier_plan.run_of(config_of(*groups), processes)
        assert list(run.memory_bytes.values()) == [kib * 1024] * len(run.bound.cached)
    with pytest.raises(ConfigError, match="--processes 3: 2 devices cannot be shared evenly"):
        tier_plan.run_of(config_of(*small, "tier.dram_bytes=50KiB"), 3)


@pytest.mark.full
def test_hits_are_those_of_a_training(tmp_path: Path) -> None:
    """The same at the devices' caches; within a point at the memory before the disk, where writers and readers race."""
    config = config_of("tier.device_bytes=60KiB", "tier.dram_bytes=100KiB", f"tier.disk={tmp_path}")
    told = tier_plan.tier_plan(config)
    assert told["replayed"] == told["steps"] == STEPS
    trainer = build_trainer(config)
    state = trainer.init_state()
    tier = state.host.tier
    assert tier is not None
    stream = trainer.train_inputs(host=state.host)
    for _ in range(STEPS - 1):
        inputs = next(stream)
        state, _ = trainer.train_step(trainer.admit(state, stream.latest), inputs)
        tier._settle(0)  # a row that waits to be written is not read from the disk
    stream._waiting[-1].routed.admission.records.result()  # the last batch, whose rows are read ahead
    counts = tier.figures()
    assert (counts["hits"], counts["misses"]) == (told["hits"], told["misses"])
    run = tier_plan.run_of(config)
    found = run.replayed()
    assert found is not None
    behind = found.total("misses") - found.total("first")  # rows that were on the host, in memory or not
    assert found.total("reads") > 0.05 * behind
    assert abs(counts["records_read"] - found.total("reads")) <= 0.01 * behind
    tier.close()
    stream.close()


def test_hot_rows_lie_on_all_devices_beside_caches() -> None:
    without, told = (
        tier_plan.tier_plan(config_of("tier.device_bytes=60KiB", f"embedding.hot.rows={hot}")) for hot in (0, 100)
    )
    rows: dict[str, int] = {}
    for of in told["tables"]:
        rows[of["table"]] = rows.get(of["table"], 0) + of["rows"]
        assert of["rows"] == sum(of[name] for name in ("device", "dram", "disk", "untouched"))
    assert rows == {of["table"]: of["rows"] for of in without["tables"]}
    assert sum(of["rows"] for of in told["tables"] if of["copies"] == 2) == 100
    named = [each["step"]["hits"] + each["step"]["misses"] for each in (without, told)]
    assert named[1] < named[0]  # those that name hot rows ask no cache
    assert abs(told["model_hit_rate"] - told["hit_rate"]) < 0.03


def test_places_traffic_and_nodes_add_up(tmp_path: Path) -> None:
    config = config_of("tier.device_bytes=60KiB", "tier.dram_bytes=100KiB", f"tier.disk={tmp_path}")
    told = tier_plan.tier_plan(config, step_ms=2.0)
    assert all(of["rows"] == sum(of[name] for name in ("device", "dram", "disk", "untouched")) for of in told["tables"])
    # 60 KiB of rows of 68 bytes on each of two devices; the memory holds records of 128 bytes, with 9 to find them.
    assert sum(of["device"] for of in told["tables"]) == 2 * (60 * 1024 // 68)
    assert 0.9 * 2 * (51_200 // 137) < sum(of["dram"] for of in told["tables"]) <= 2 * (51_200 // 137)
    step, costs = told["step"], told["costs"]
    assert costs["bytes"]["to_devices"] == step["misses"] * 128
    # A thousand are read in a second, and five hundred written, or 4096 bytes in a ms.
    assert step["bytes_read"] < 4096 * step["pieces_read"] and step["bytes_written"] < 8192 * step["pieces_written"]
    assert costs["ms"]["disk"] == pytest.approx(step["pieces_read"] + 2 * step["pieces_written"])
    assert costs["exposed_ms"] == pytest.approx(max(0.0, max(costs["ms"].values()) - 2.0))
    assert costs["slowdown"] == pytest.approx(max(1.0, max(costs["ms"].values()) / 2))
    assert abs(told["model_hit_rate"] - told["hit_rate"]) < 0.01
    whole = sum(of["rows"] * 128 for of in told["tables"])
    assert told["nodes"]["without"]["nodes"] == math.ceil(whole / (2 * 60 * 1024))
    assert told["nodes"]["samples_per_s"] == 32_000
    text = tier_report.to_text(told)
    for words in ("over its 60 steps, replayed", "A step of", "it waits", "hosts like this one", "measured in"):
        assert words in text


def test_the_work_of_moving_rows_makes_a_step_longer() -> None:
    """By a machine that finds and moves a row in as many us as the bounds below say, worked by hand from the counts."""
    laptop = dataclasses.replace(open_machine("h200"), platform="cpu", shared=True, cores=2)
    moving = {
        "host_lookup": Kernel(1.0, "a test", tuple(Point({"ids": n}, n) for n in (1.0, 1000.0))),
        "host_swap": Kernel(
            1.0, "a test", tuple(Point({"rows": n, "row_bytes": 128.0}, 2 * n, 2.0) for n in (1.0, 1e3))
        ),
        "device_swap": Kernel(1.0, "a test", tuple(Point({"rows": n, "row_bytes": 128.0}, n) for n in (1.0, 1000.0))),
    }
    config = config_of("tier.device_bytes=60KiB")
    without = tier_plan.tier_plan(config, laptop)["costs"]
    assert without["moving"] == without["slowdown"] == 1
    machine = dataclasses.replace(laptop, kernels=laptop.kernels | moving)
    told = tier_plan.tier_plan(config, machine)
    step, run = told["step"], tier_plan.run_of(config)
    bounds = {DEVICES: 10.0, INTERPRETER: 20.0, CORES: 30.0, "another": 1e6}
    found = tier_run.with_moves(_prediction(machine, bounds), run, step)
    named, misses = step["hits"] + step["misses"], step["misses"]
    assert found.bounds == {
        DEVICES: pytest.approx(10 + misses / 2),  # each of two devices moves its own
        INTERPRETER: pytest.approx(20 + named + 2 * misses - misses / 2),
        CORES: pytest.approx(30 + (named + 2 * 2 * misses) / 2),
        "another": 1e6,
    }
    assert told["costs"]["slowdown"] == told["costs"]["moving"] > 1
    assert f"makes it {told['costs']['moving']:.2f} times as long" in tier_report.to_text(told)


def _prediction(machine: Machine, bounds: dict[str, float]) -> Prediction:
    graph, host = Graph(()), HostWork(1, 1, 1, 1, 1, 1, 2, 1)
    return dataclasses.replace(predict(graph, machine, host), bounds=bounds)


def test_what_is_too_large_to_replay_is_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the steps, or none; the whole is as if all were replayed."""
    config = config_of("tier.device_bytes=60KiB")
    whole = tier_plan.tier_plan(config)
    ids = 64 * (1 + 3 + mean_ids(config.data.open())["sparse_1"])
    monkeypatch.setattr(tier_run, "MOST_IDS", math.ceil(ids * STEPS / 2))
    half = tier_plan.tier_plan(config)
    assert half["replayed"] == STEPS // 2
    monkeypatch.setattr(tier_run, "_HOME_BYTES", 1e18)
    none = tier_plan.tier_plan(config, machine=open_machine("h100"))
    assert none["replayed"] == 0 and none["costs"]["step_ms"] > 0
    assert abs(none["hit_rate"] - whole["hit_rate"]) < 0.01
    assert abs(half["hit_rate"] - whole["hit_rate"]) < 0.05  # the rest is told as if the caches were full
    for name in ("device", "dram", "untouched"):
        ours, truth = (sum(of[name] for of in one["tables"]) for one in (none, whole))
        assert ours == pytest.approx(truth, rel=0.05)
    assert "the first 30 were replayed" in tier_report.to_text(half)
    assert "all modelled" in tier_report.to_text(none)


def test_rows_of_data_without_a_law_are_counted() -> None:
    """MovieTweetings' rows are not there: a law is taken away from synthetic ones."""
    run = tier_plan.run_of(config_of("tier.device_bytes=60KiB"))
    (group,) = run.bound.cached
    by_law = run.classes[group.name]
    source = run_source = run.source

    class Plain:
        schema = source.schema

        def row_counts(self, split: str) -> np.ndarray:
            return run_source.row_counts(split)

        def read(self, split: str, index: int) -> Any:
            return run_source.read(split, index)

    counted = dataclasses.replace(run, source=cast(Any, Plain())).classes[group.name]
    for name, law in by_law.items():
        assert counted[name].rows == law.rows
        assert counted[name].named == pytest.approx(law.named, rel=0.05)


def test_the_command(tmp_path: Path) -> None:
    small = ["plan", "synthetic", *SETTINGS, "train.steps=20"]
    done = inside(*small, "tier.device_bytes=60KiB", "tier.dram_bytes=1KiB", "--tiers")
    assert "take more than tier.dram_bytes, where such a run stops" in done.out
    done = inside(*small, "tier.device_bytes=1GiB", "--tiers", "--json")
    assert json.loads(done.out)["tiers"]["cached"] is False
    assert_refused(inside(*small, "--tiers"), 2, "tier.device_bytes is 0")
    assert_refused(inside(*small, "--step-ms", "3"), 2, "--step-ms belongs to --tiers")
    assert_refused(inside(*small, "--processes", "2"), 2, "--processes belongs to --tiers")
    assert_refused(inside(*small, "--tiers", "tier.device_bytes=2KiB"), 1, "two batches in a row name")


def test_a_disk_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_TRIED_BLOCKS", 3 * 1024)
    found = disk_rates(tmp_path, 0.01)
    assert found.reads > 100 and found.written > 1e5 and found.writes > 100
    assert not list(tmp_path.iterdir())
