"""Batches of packed rows, read by the host or lying on the devices, train to the bits of batches of blocks."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from recjax.config.presets import load
from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.storage.blocks import PreparedSource, write_prepared
from recjax.embedding.plan import make_plan
from recjax.errors import ConfigError, DataError
from recjax.planning.machine import open_machine
from recjax.planning.planner import Planner, exact_sizes
from recjax.train.build import build_trainer
from recjax.train.compile_report import on_paper, to_text
from recjax.train.planned import question
from recjax.train.trainer import Trainer

pytestmark = [pytest.mark.light_compile(optimised=True), pytest.mark.few_programs]

DATA = ("data.rows=400,300,50", "data.ids_per_bag=1,3,1", "data.train_rows=500", "data.test_rows=0")
PARTS = ("tables", "slots", "dense", "dense_optimizer", "batch", "temporaries")
TRAIN = ("train.batch_size=40", "train.shuffle=true", "train.shuffle_blocks=3", "train.routing=device", "seed=7")


def config(*overrides: str) -> RunConfig:
    return load("synthetic", [*DATA, "data.validation_rows=0", *TRAIN, *overrides])


def write(folder: Path, *overrides: str, damage: tuple[int, str, int] | None = None) -> PreparedSource:
    """Synthetic rows on disk, in blocks of 64, of which one may get an id that its table has no row for."""
    source = config(*overrides).data.open()
    whole = source.read("train", 0)
    if damage:
        row, feature, value = damage
        whole.bags[feature].ids[row, 0] = value

    def cut(start: int) -> Batch:
        bags = {name: type(b)(b.ids[start : start + 64], None, b.weights) for name, b in whole.bags.items()}
        part = slice(start, start + 64)
        return Batch(whole.dense[part], bags, whole.labels[part], whole.weights[part])

    blocks = map(cut, range(0, whole.size, 64))
    return write_prepared(folder, source.name, source.schema, {"train": blocks}, {}, fitting=bool(damage))


class Blocks:
    """The blocks of prepared data as a source that has nothing else."""

    def __init__(self, source: PreparedSource) -> None:
        self.name, self.schema, self.fingerprint = source.name, source.schema, source.fingerprint
        self.row_counts, self.read = source.row_counts, source._read


def states_after(made: Trainer, calls: tuple[int, ...], position: int = 0) -> tuple[Any, list[float]]:
    """The state and losses after calls of so many steps each."""
    state, stream, losses = made.init_state(), made.train_inputs(), []
    stream.load_state_dict({"position": position, "capacities": {}, "peaks": {}})
    for count in calls:
        state, metrics = made.train_step(state, stream.take(count))
        losses += np.atleast_1d(np.asarray(metrics["loss"])).tolist()
    stream.close()
    return jax.tree.map(np.asarray, (state.tables, state.dense, state.slots)), losses


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("calls", [(1,) * 15, (1, 4, 4, 2, 4)])
def test_rows_train_to_the_bits_of_blocks(devices: int, calls: tuple[int, ...], tmp_path: Path) -> None:
    """An epoch is 13 batches, the last of 20 samples; calls cross its end."""
    source, mesh = write(tmp_path / "data"), f"mesh.devices={devices}"
    routing = "train.routing=host" if devices == 1 else "train.routing=device"
    plan = "plan=row_wise" if devices > 1 else "plan=auto"
    expected = states_after(build_trainer(config(mesh, plan, routing), Blocks(source), ["train"]), (1,) * 15, 80)
    for resident in ("never", "always"):
        made = build_trainer(config(mesh, plan, f"train.resident={resident}"), source, ["train"])
        state, losses = states_after(made, calls, 80)
        assert losses == expected[1]
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), state, expected[0])


def test_devices_hold_no_row_that_they_are_not_to(tmp_path: Path) -> None:
    source = write(tmp_path / "data")
    inputs = {}
    for resident in ("never", "auto", "always"):
        made = build_trainer(config("mesh.devices=1", f"train.resident={resident}"), source, ["train"])
        inputs[resident] = made.train_inputs().take(4)
    assert inputs["never"].rows_RxW is inputs["auto"].rows_RxW is None
    assert len(inputs["always"].rows_RxW) == 500 and inputs["always"].words_KxNxE.shape == (4, 1, 40)


@pytest.mark.parametrize("feature", ["sparse_0", "sparse_1", "sparse_2"])
@pytest.mark.parametrize("resident", ["never", "always"])
def test_an_id_that_no_row_is_for_is_named(feature: str, resident: str, tmp_path: Path) -> None:
    source = write(tmp_path / "data", damage=(77, feature, 400))
    made = build_trainer(config("mesh.devices=1", f"train.resident={resident}"), source, ["train"])
    with pytest.raises(DataError, match=f"id 400 of feature '{feature}' in sample .* is out of range"):
        list(itertools.islice(made.train_inputs(), 13))


def test_rows_that_cannot_lie_on_devices_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "data")
    for overrides, text in (
        (("train.routing=host",), "the host routes"),
        (("data.ids_per_bag=0,3,1",), "bags differ in size"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_trainer(
                config("train.resident=always", *overrides), None if "data" in overrides[0] else source, ["train"]
            )
    with pytest.raises(ConfigError, match="not prepared on disk"):
        build_trainer(config("train.resident=always"), None, ["train"])


def test_a_plan_counts_the_rows_that_every_device_holds(tmp_path: Path) -> None:
    """By hand: 500 rows of 5 ids, 4 dense features, a label and a weight; a CPU's devices have them if they must."""
    source = write(tmp_path / "data")
    needed = 4 * 500 * (5 + 4 + 1 + 1)
    on_disk = ["data=prepared", f"data.path={tmp_path / 'data'}", *TRAIN]
    for resident, machine, rows in (("auto", "h100", needed), ("never", "h100", 0), ("always", "h100", needed)):
        asked = question(load("synthetic", [*on_disk, f"train.resident={resident}"]), source, open_machine(machine))
        exact = exact_sizes(asked.demand, make_plan("auto", asked.demand.tables))
        memory = asked.memory(exact)
        assert memory.get("rows", 0) == rows and sum(memory.values()) == 2 * memory["total"]
        assert Planner(asked).predicted(exact).host.source == ("resident" if rows else "packed")
    for resident, rows in (("auto", 0), ("always", needed)):
        compiled = on_paper(load("synthetic", [*on_disk, f"train.resident={resident}"]))
        assert compiled["memory"]["rows"] == rows
        assert ("all training rows" in to_text(compiled)) == bool(rows)
        without = compiled["memory"]["total"] - rows
        assert without == pytest.approx(sum(compiled["memory"][name] for name in PARTS), abs=2000)
