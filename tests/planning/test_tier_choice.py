"""Plans whose rows are not all on the devices, since a budget has no room for them: they train, to the bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import assert_refused, inside

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.embedding.plan import make_plan
from recjax.errors import ConfigError
from recjax.planning import tier_run
from recjax.planning.machine import Quantity, open_machine, write
from recjax.planning.planner import exact_sizes
from recjax.planning.question import GIB, Answer
from recjax.tiers.disk import DiskRates
from recjax.train.build import build_trainer
from recjax.train.planned import plan_of, question
from recjax.train.state import HostState
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile

STEPS = 12
SETTINGS = (
    "data.rows=6000,300,4000",
    "data.ids_per_bag=1,0,3",
    "data.weighted=false",
    "data.train_rows=16384",
    "train.batch_size=64",
    "mesh.devices=2",
    f"train.steps={STEPS}",
)
ROW = 16 * 4 + 4  # bytes of a row and its one slot


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Returns an H200 whose link to the host has 1 MB/s: rows that move take longer than a step."""
    h200 = open_machine("h200")
    slow = {"host_link": Quantity(1e6, "B/s", "a test")}
    write(dataclasses.replace(h200, rates=h200.rates | slow), tmp_path / "machine.json")
    return tmp_path / "machine.json"


def config_of(machine: Path, *more: str) -> RunConfig:
    return presets.load("synthetic", [*SETTINGS, f"planner.machine={machine}", *more])


def chosen(config: RunConfig) -> Answer:
    source = config.data.open()
    tables, features = specs(config, source.schema)
    _, found, _ = plan_of(config, source, tables, features, config.mesh.shape)
    assert found is not None
    return found


def cut(machine: Path, share: float, *more: str) -> str:
    """The setting with which a device has room for a share of the rows that it has parts of, beside all else."""
    config = config_of(machine, "plan=row_wise", "planner.machine=", *more)
    source = config.data.open()
    tables, features = specs(config, source.schema)
    asked = question(config, source, open_machine(str(machine)))
    sizes = exact_sizes(asked.demand, make_plan("auto", tables, asked.demand.exchange))
    spread = sum(t.rows * ROW / 2 for t in tables if t.name != "sparse_1")
    return f"planner.memory_gib={(asked.memory(sizes)['total'] - (1 - share) * spread) / GIB}"


def trained(config: RunConfig) -> tuple[Trainer, list[bytes], Any, HostState]:
    """A training: its losses, its end, and what of it is on the host."""
    trainer = build_trainer(config)
    state, losses = trainer.init_state(), []
    stream = trainer.train_inputs(host=state.host)
    for _ in range(STEPS):
        inputs = next(stream)
        state, metrics = trainer.train_step(trainer.admit(state, stream.latest), inputs)
        losses.append(np.asarray(metrics["loss"]).tobytes())
    end = load(trainer.export(state))
    stream.close()
    return trainer, losses, end, state.host


def bits(arrays: Any) -> Any:
    return {name: bits(x) for name, x in arrays.items()} if isinstance(arrays, dict) else np.asarray(arrays).tobytes()


@pytest.mark.full
def test_half_and_a_tenth_of_the_memory_train_to_the_same_bits(machine: Path, tmp_path: Path) -> None:
    """Results equal those of a training with the same plan and all rows on the devices."""
    truths: dict[str, Any] = {}
    for share in (0.5, 0.1):
        config = config_of(machine, cut(machine, share))
        trainer, losses, end, host = trained(config)
        assert host.tier is not None and trainer.chosen is not None and trainer.chosen.tier is not None
        plan = trainer.plan.to_json()
        if plan not in truths:
            (tmp_path / "plan.json").write_text(plan)
            whole, *truths[plan] = trained(presets.load("synthetic", [*SETTINGS, f"plan={tmp_path / 'plan.json'}"]))
            assert not whole.bound.cached
        truth = truths[plan]
        assert (losses, bits(end["tables"])) == (truth[0], bits(truth[1]["tables"]))
        tier = trainer.chosen.tier
        held = sum(group.rows * ROW for group in trainer.bound.groups if group.spread)
        assert 0.8 * share * 10_000 * ROW / 2 < held <= tier.device_bytes < share * 10_000 * ROW / 2
        assert trainer.chosen.memory["total"] <= config.planner.memory_gib * GIB
        counts = host.tier.figures()  # of the batch that is prepared, too
        assert counts["misses"] / (STEPS + 1) == pytest.approx(tier.misses, rel=0.05)
        host.close()


def test_the_traffic_of_a_slow_link_is_the_predicted_step(machine: Path) -> None:
    """A record is 128 bytes; each of two devices has a link of 1 MB/s of its own."""
    long = "train.steps=200"
    found = chosen(config_of(machine, cut(machine, 0.1), long))
    assert found.tier is not None and found.prediction.bound_by == "rows of tables: link"
    assert found.prediction.step_us == pytest.approx(found.tier.misses * 128 / 2 / 1e6 * 1e6)
    assert found.tier.slowdown == pytest.approx(found.prediction.step_us / 1e3 / found.tier.whole_ms)
    assert found.tier.slowdown > 1 and found.routing == "host"
    larger = chosen(config_of(machine, cut(machine, 0.5), long)).tier
    assert larger is not None and larger.hit_rate > found.tier.hit_rate and larger.misses < found.tier.misses


def test_what_fits_has_no_caches_and_other_budgets_are_used(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_run, "disk_rates", lambda folder: DiskRates(1000.0, 4096e3, 1000.0))
    assert chosen(config_of(machine, cut(machine, 1.01))).tier is None
    tenth = cut(machine, 0.1)
    with pytest.raises(ConfigError, match=r"of which 4\.0 KiB can be used: set tier\.dram_bytes and tier\.disk"):
        chosen(config_of(machine, tenth, "tier.dram_bytes=4KiB", "train.steps=200"))
    disk = ("tier.dram_bytes=16KiB", f"tier.disk={tmp_path}", "train.steps=200")
    found = chosen(config_of(machine, tenth, *disk))
    assert found.tier is not None and 0 < found.tier.host_bytes <= 16 * 1024 and found.tier.disk_bytes > 0
    with pytest.raises(ConfigError, match=r"tier\.dram_bytes is set, but tier\.device_bytes is not"):
        presets.load("synthetic", ["tier.dram_bytes=4KiB"])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("embedding.hot.rows=8", r"rows on the host do not go with hot rows \(set embedding.hot.rows=0\)"),
        ("train.routing=device", r"do not go with routing on the devices \(set train.routing=auto\)"),
        ("train.batch_size=4096", r"two batches in a row name"),
    ],
)
def test_where_rows_on_the_host_do_not_help_the_refusal_says_why(machine: Path, setting: str, why: str) -> None:
    tight = cut(machine, 0.05, *(setting,) * ("batch" in setting))
    paragraph = assert_refused(
        inside("plan", "synthetic", *SETTINGS, f"planner.machine={machine}", setting, tight),
        2,
        "no plan fits a device",
        why,
        "The cheapest change with which it fits is",
        r"a device then needs [0-9.e-]+ GiB",
    )
    assert "changes no number" in paragraph


def test_a_cache_that_is_too_large_is_refused_with_the_largest_that_fits(machine: Path) -> None:
    rows = 10_000 * ROW / 2
    tight = cut(machine, 0.1)  # less than splitting the batch would need
    with pytest.raises(ConfigError, match=r"with which it fits is tier\.device_bytes=(\d+)") as refused:
        chosen(config_of(machine, tight, f"tier.device_bytes={int(0.4 * rows)}"))
    size = int(str(refused.value).partition("tier.device_bytes=")[2].partition(":")[0])
    assert 0.1 * rows - 4096 < size < 0.4 * rows
    found = chosen(config_of(machine, tight, f"tier.device_bytes={size}"))
    assert found.tier is None and found.memory["total"] <= (1 + 1e-9) * float(tight.partition("=")[2]) * GIB
    with pytest.raises(ConfigError, match="no plan fits"):
        chosen(config_of(machine, tight, f"tier.device_bytes={size + 2 * 4096}"))  # estimated, in blocks of 4 KiB


@pytest.mark.full
def test_a_run_keeps_its_caches_and_goes_on_with_them_on_any_machine(machine: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("synthetic", *SETTINGS, f"planner.machine={machine}", cut(machine, 0.25), "--out", run)
    assert inside("train", *settings, "train.checkpoint_every=6").status == 0
    assert "tier.device_bytes" in json.loads((run / "choice.json").read_text())["choices"][1]["chosen"]
    tier = json.loads((run / "choice.json").read_text())["tier"]
    shown = inside("plan", *settings[:-2], "--out", tmp_path / "shown")
    assert f"tiers: tier.device_bytes={tier['device_bytes']} (caches of sparse_0, sparse_2: " in shown.out
    assert (tmp_path / "shown/choice.png").read_bytes().startswith(b"\x89PNG")
    machine.unlink()
    more = (*settings, "train.checkpoint_every=6", f"train.steps={2 * STEPS}", "--json")
    again = inside("train", *more).result
    assert again["tier"]["misses"] > 0 and again["steps"] == 2 * STEPS
    assert json.loads((run / "choice.json").read_text())["tier"] == tier
