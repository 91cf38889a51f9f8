"""Several steps in one program: bit for bit those of single steps, whatever ends it, fails in it or does not fit."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import recjax
from recjax.config.presets import load
from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.errors import DataError, TrainingError
from recjax.train import loop as loops
from recjax.train.build import build_trainer
from recjax.train.callbacks import SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.loop import Outcome
from recjax.train.progress import TrainProgress, resume
from recjax.train.run.writers import MetricsFile
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load as load_arrays

pytestmark = [pytest.mark.full, pytest.mark.light_compile(optimised=True), pytest.mark.few_programs]

B, STEPS = 40, 23  # an epoch is 13 steps, the last of 20 samples
SMALL = ("data.rows=400,300", "data.train_rows=500", f"train.batch_size={B}", f"train.steps={STEPS}")


def config(*overrides: str) -> RunConfig:
    rest = ("train.log_every=1", "data.validation_rows=0", "data.test_rows=0", "plan=row_wise", "mesh.devices=2")
    return load("synthetic", (*SMALL, *rest, *overrides))


def lines(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, but for what a clock says."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "samples_per_s"} for line in read]


def fit(made: Trainer, folder: Path, start: Any = None) -> Outcome:
    folder.mkdir(exist_ok=True)
    state, progress = start or (made.init_state(), TrainProgress())
    with Checkpoints(folder / "checkpoints", 99) as checkpoints, MetricsFile(folder / "metrics.jsonl", None) as file:
        log = StepLog(made, file)
        return loops.fit(made, state, progress, log, (SaveCheckpoint(made, checkpoints, log),))


def saved(folder: Path) -> dict[int, Any]:
    """All checkpoints of a run: step -> arrays."""
    checkpoints = Checkpoints(folder / "checkpoints", 99)
    return {step: checkpoints.restore(step, lambda found: load_arrays(found.arrays)) for step in checkpoints.steps()}


def assert_equal(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), left, right)


OPTIMIZERS = ("sgd", "adam", "adagrad", "rowwise_adagrad", "partial_rowwise_adam", "ftrl")
CASES = {
    "host": (),
    "device": ("train.routing=device",),
    "one device": ("train.routing=device", "mesh.devices=1"),
    "eight": ("train.routing=device", "mesh.devices=8", "mesh.hosts=2"),
    "jagged": ("train.routing=device", "data.ids_per_bag=0,3"),
    "jagged on the host": ("data.ids_per_bag=0,3",),
    "pooled": ("train.routing=device", "plan=table_wise", "embedding.exchange.kind=pooled", "data.ids_per_bag=0,1"),
    "all optimizers, accumulate, clip": (
        "data.rows=400,300,40,30,20,50",
        *(f"embedding.tables.sparse_{n}.optimizer={kind}" for n, kind in enumerate(OPTIMIZERS)),
        "train.routing=device",
        "train.accumulate=2",
        "train.clip_norm=0.01",
    ),
    "bfloat16": ("train.routing=device", "embedding.dtype=bfloat16", "embedding.rounding=stochastic"),
    "replicas": ("mesh.devices=4", "mesh.replicas=2", "train.routing=device"),
    "averages": ("mesh.replicas=2", "train.replica_sync=average", "train.average_every=8", "train.routing=device"),
    "late": ("train.dense_delay=1",),
}


WIDE = (
    "device",
    "jagged on the host",
    "pooled",
    "bfloat16",
    "replicas",
    "late",
)  # the same loop and packing as in the others


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.wide) if c in WIDE else c for c in CASES])
def test_steps_of_one_call_are_single_steps(case: str, tmp_path: Path) -> None:
    """Every leaf of the state, every line, every checkpoint, over the end of an epoch and of the last call."""
    every = ("train.checkpoint_every=10",)
    for count in (1, 4):
        made = build_trainer(config(*CASES[case], *every, f"train.steps_per_call={count}"))
        done = fit(made, tmp_path / str(count))
        assert done.compilations == (1 if count == 1 else 2)
    assert len(lines(tmp_path / "4")) == STEPS
    assert lines(tmp_path / "1") == lines(tmp_path / "4")
    left, right = saved(tmp_path / "1"), saved(tmp_path / "4")
    assert list(left) == [10, 20, STEPS]
    assert_equal(left, right)


@dataclasses.dataclass(frozen=True)
class Changed:
    """Synthetic clicks of which one sample is changed; all else is theirs."""

    source: Any  # `SyntheticSource`
    sample: int
    how: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, split: str, index: int) -> Batch:
        block = self.source.read(split, index)
        at = self.sample - block.position
        if not 0 <= at < block.size:
            return block
        if self.how != "id":
            weights = block.weights.copy()
            weights[at : at + B] = 3e38 if self.how == "huge" else 0  # whose sum is infinite
            return dataclasses.replace(block, weights=weights)
        bags = dict(block.bags)
        ids = bags["sparse_1"].ids.copy()
        ids[at] = 300
        return dataclasses.replace(block, bags={**bags, "sparse_1": dataclasses.replace(bags["sparse_1"], ids=ids)})


FAULTS = {"huge": (TrainingError, "step 7 "), "id": (DataError, "id 300 of")}


@pytest.mark.parametrize(
    ("fault", "routing"),
    [
        ("huge", "device"),
        ("id", "host"),
        pytest.param("huge", "host", marks=pytest.mark.wide),
        pytest.param("id", "device", marks=pytest.mark.wide),
    ],
)
def test_a_fault_within_a_call_is_that_of_single_steps(fault: str, routing: str, tmp_path: Path) -> None:
    """In the seventh batch, the third of the second call: the same error, and the state before it."""
    kind, place = FAULTS[fault]
    told, states = [], []
    for count in (1, 4):
        made_config = config(
            f"train.routing={routing}",
            "train.shuffle=false",
            f"train.steps_per_call={count}",
            "train.checkpoint_every=4",
        )
        source = Changed(made_config.data.open(), 6 * B, fault)
        made, folder = build_trainer(made_config, source), tmp_path / str(count)
        with pytest.raises(kind, match=re.escape(place)) as raised:
            fit(made, folder)
        told.append(str(raised.value))
        states.append(saved(folder))
    assert told[0] == told[1]
    assert list(states[0]) == [4]
    assert_equal(*states)
    assert lines(tmp_path / "4")[:5] == lines(tmp_path / "1")[:5]
    steps = [len(lines(tmp_path / str(count))) for count in (1, 4)]
    assert steps == ([5, 5] if fault == "id" else [6, 6])  # a bad id is found before the step that was read last


def test_a_step_without_weight_within_a_call_changes_nothing(tmp_path: Path) -> None:
    for count in (1, 4):
        made_config = config("train.routing=device", "train.shuffle=false", f"train.steps_per_call={count}")
        made = build_trainer(made_config, Changed(made_config.data.open(), 6 * B, "weightless"))
        fit(made, tmp_path / str(count))
    assert lines(tmp_path / "1") == lines(tmp_path / "4")
    assert [line["step"] for line in lines(tmp_path / "4") if line["loss"] is None] == [7, 20]  # in both epochs
    assert_equal(saved(tmp_path / "1"), saved(tmp_path / "4"))


@dataclasses.dataclass(frozen=True)
class FewFirst:
    """Clicks whose first 80 samples name one row of each table, so that sizes that hold them are too small later."""

    source: Any  # `SyntheticSource`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, split: str, index: int) -> Batch:
        block = self.source.read(split, index)
        few = max(0, 2 * B - block.position)
        bags = {name: dataclasses.replace(of, ids=of.ids.copy()) for name, of in block.bags.items()}
        for of in bags.values():
            of.ids[:few] = 0
        return dataclasses.replace(block, bags=bags)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.wide), 4])
def test_steps_that_do_not_fit_are_taken_again(count: int, tmp_path: Path) -> None:
    """Losses, states and lines are those of a run with room from the beginning, but for sums of other lengths."""
    made_config = config(
        "train.routing=device",
        "train.shuffle=false",
        f"train.steps_per_call={count}",
        "train.checkpoint_every=8",
        "compute_dtype=float64",
    )
    made = build_trainer(made_config, FewFirst(made_config.data.open()))
    room = TrainProgress(capacities={group.name: 400 for group in made.bound.listing})
    with_room = fit(made, tmp_path / "room", (made.init_state(), room))
    assert with_room.compilations == (1 if count == 1 else 2)
    without = fit(made, tmp_path / "without")
    assert without.compilations > with_room.compilations
    both = lines(tmp_path / "room"), lines(tmp_path / "without")
    losses = [[line.pop("loss") for line in each] for each in both]
    assert both[0] == both[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)  # noqa: E731
    jax.tree.map(close, saved(tmp_path / "room"), saved(tmp_path / "without"))


def test_predictions_that_do_not_fit_are_made_again(tmp_path: Path) -> None:
    made_config = config("train.routing=device", "train.shuffle=false")
    source = FewFirst(made_config.data.open())
    made, on_host = build_trainer(made_config, source), build_trainer(config("train.routing=host"), source)
    state = made.init_state()
    batches = [dataclasses.replace(source.read("train", 0))]
    cut = [recjax.data.source.between(batches[0], start, start + B) for start in range(0, 200, B)]
    found, truth = (
        np.concatenate([logits for _, logits in t.predict(state, t.inputs_of(cut, B))]) for t in (made, on_host)
    )
    np.testing.assert_array_equal(found, truth)
    assert len(found) == 200


def test_a_run_stopped_within_a_call_goes_on_with_another_number_of_steps(tmp_path: Path) -> None:
    """Asked to stop at the sixth batch it ends with the call of that one; the rest is trained step by step."""
    whole = build_trainer(config("train.steps_per_call=1"))
    expected = fit(whole, tmp_path / "whole")
    made, asked = build_trainer(config("train.steps_per_call=4")), iter([0] * 5 + [15] * 100)
    folder = tmp_path / "stopped"
    folder.mkdir()
    with Checkpoints(folder / "checkpoints", 99) as checkpoints, MetricsFile(folder / "metrics.jsonl", None) as file:
        log = StepLog(made, file)
        callbacks = (SaveCheckpoint(made, checkpoints, log),)
        stopped = loops.fit(made, made.init_state(), TrainProgress(), log, callbacks, stop=lambda: next(asked))
    assert (stopped.stop, stopped.steps) == (15, 8)
    checkpoints = Checkpoints(folder / "checkpoints", 99)
    state, progress = checkpoints.restore(8, lambda restored: resume(whole, restored))
    done = fit(whole, tmp_path / "rest", (state, progress))
    assert done.steps == STEPS - 8
    assert lines(folder) + lines(tmp_path / "rest") == lines(tmp_path / "whole")
    assert_equal(load_arrays(whole.export(done.state)), load_arrays(whole.export(expected.state)))


def test_a_host_that_is_needed_between_steps_gets_its_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = build_trainer(config("embedding.hot.rows=8", "embedding.hot.refresh=5", "train.steps_per_call=4"))
    assert fit(made, tmp_path).compilations == 1
    assert (
        "train.steps_per_call=4 is taken as 1: with embedding.hot.refresh, hot rows change" in capsys.readouterr().err
    )
