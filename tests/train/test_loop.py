"""The loop's own promises, with small parts around it: states, copies, capacities, what a step without a loss says."""

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.problems import to_host

import recjax
from recjax.config.presets import load
from recjax.data.batch import Batch
from recjax.data.synthetic.clicks import SyntheticSource
from recjax.errors import ConfigError, DataError
from recjax.train import callbacks
from recjax.train import loop as loops
from recjax.train.agreement import StopRequested
from recjax.train.build import build_trainer
from recjax.train.callbacks import Evaluate, Event, SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.loop import Outcome
from recjax.train.progress import TrainProgress, describe, resume
from recjax.train.run.writers import MetricsFile
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load as load_arrays

pytestmark = [pytest.mark.full, pytest.mark.light_compile(optimised=True), pytest.mark.few_programs]

SMALL = ("data.rows=400,300", "data.train_rows=2000", "data.validation_rows=300", "data.test_rows=300", "train.steps=2")


def trainer(*overrides: str, source: Any = None) -> Trainer:
    config = load("synthetic", (*SMALL, "train.batch_size=200", "mesh.devices=2", "plan=row_wise", *overrides))
    return build_trainer(config, source)


def fit(made: Trainer, folder: Path, start: Any = None, clock: Any = time.monotonic) -> Outcome:
    state, progress = start or (made.init_state(), TrainProgress())
    with Checkpoints(folder / "checkpoints", 99) as checkpoints, MetricsFile(folder / "metrics.jsonl", None) as file:
        log = StepLog(made, file, clock=clock)
        return loops.fit(made, state, progress, log, (Evaluate(made, log), SaveCheckpoint(made, checkpoints, log)))


def test_training_takes_nothing_away_from_the_next_state():
    made = trainer()
    state = made.init_state()
    before = to_host(state, made.bound)
    made.train_step(state, next(made.train_inputs()))  # donates the state
    after = to_host(made.init_state(), made.bound)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_the_host_never_holds_two_copies_of_the_state(tmp_path, monkeypatch):
    writing = []

    def watched(self: Checkpoints, *arguments: Any, original: Any = Checkpoints.save, **options: Any) -> None:
        original(self, *arguments, **options)
        writing.append(self)

    def copy(*arguments: Any, original: Any = Trainer.export) -> Any:
        assert all(checkpoints._saving is None for checkpoints in writing), "the one before is still being written"
        return original(*arguments)

    monkeypatch.setattr(Checkpoints, "save", watched)
    monkeypatch.setattr(Trainer, "export", copy)
    fit(trainer("train.checkpoint_every=1"), tmp_path)
    assert len(writing) == 2


@pytest.mark.parametrize(
    ("choice", "left", "copied"),
    [
        ("always", 0, True),
        ("never", 2**50, False),
        ("auto", 2**50, True),
        ("auto", 100_000, False),
        ("auto", None, False),
    ],
)
def test_tables_are_copied_for_a_checkpoint_or_training_waits(tmp_path, monkeypatch, capsys, choice, left, copied):
    """Two tables of 700 rows, 68 bytes each: their checkpoint takes 48 KB beside the dense part."""
    events: list[str] = []

    def watched(self: Checkpoints, step: int, arrays: Any, *, original: Any = Checkpoints.save, **options: Any) -> None:
        kinds = {type(x).__name__ for table in arrays["tables"].values() for x in table.values()}
        events.extend(kinds)
        original(self, step, arrays, **options)

    def waited(self: Checkpoints, original: Any = Checkpoints.wait_for_arrays) -> None:
        original(self)
        assert self._arrays_read.is_set()
        events.append("waited")

    monkeypatch.setattr(Checkpoints, "save", watched)
    monkeypatch.setattr(Checkpoints, "wait_for_arrays", waited)
    monkeypatch.setattr(callbacks, "available_bytes", lambda: left)
    fit(trainer("train.checkpoint_every=1", f"train.checkpoint_copy={choice}"), tmp_path)
    assert events == (["ndarray"] * 2 if copied else ["LazyArray", "waited"] * 2)
    told = "straight from the devices while training waits" in capsys.readouterr().err
    assert told == (choice == "auto" and not copied)


def test_both_ways_to_save_give_the_same_bits(tmp_path):
    def saved(choice: str, step: int) -> Any:
        checkpoints = Checkpoints(tmp_path / choice / "checkpoints", 2)
        return checkpoints.restore(step, lambda restored: load_arrays(restored.arrays))

    for choice in ("always", "never"):
        (tmp_path / choice).mkdir()
        fit(trainer("train.checkpoint_every=1", f"train.checkpoint_copy={choice}"), tmp_path / choice)
    for step in (1, 2):
        left, right = saved("always", step), saved("never", step)
        assert left["tables"].keys() == {"sparse_0", "sparse_1"}
        assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), left, right))


class Clock:
    """Each training step takes 25 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0

        def train_step(*arguments: Any, original: Any = Trainer.train_step) -> Any:
            self.now += 25
            return original(*arguments)

        monkeypatch.setattr(Trainer, "train_step", train_step)

    def __call__(self) -> float:
        return self.now


def kept(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints", 99).steps()


@pytest.mark.parametrize(("every", "steps_between"), [("0", None), ("100s", 4)])
def test_time_brings_checkpoints_and_changes_no_number(tmp_path, monkeypatch, every, steps_between):
    """The first after a minute of training, with which compilation does not count."""

    def trained(name: str, clock: Any) -> Any:
        made = trainer("train.steps=20", "train.epochs=2", f"train.checkpoint_every={every}")
        (tmp_path / name).mkdir()
        return to_host(fit(made, tmp_path / name, clock=clock).state, made.bound)

    plain = trained("plain", lambda: 0.0)
    assert kept(tmp_path / "plain") == [10, 20], "at the ends of the epochs"
    monkeypatch.setattr(Evaluate, "_evaluate", lambda *_: None)
    timed = trained("timed", Clock(monkeypatch))
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, timed))
    more = [step for step in kept(tmp_path / "timed") if step not in (10, 20)]
    # The clock starts with the first result; two or three steps later there are 60 s; the next step can be told.
    assert more[0] in (5, 6, 7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(more)]
    assert gaps == [] if steps_between is None else set(gaps) <= {steps_between, steps_between + 1} and len(gaps) > 1
    again = trainer("train.steps=20", "train.epochs=2")
    checkpoints = Checkpoints(tmp_path / "timed" / "checkpoints", 9)
    state, progress = checkpoints.restore(more[0], use=lambda restored: resume(again, restored))
    assert progress.step == more[0] and progress.position == 200 * more[0]
    (tmp_path / "again").mkdir()
    outcome = fit(again, tmp_path / "again", (state, progress))
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, to_host(outcome.state, again.bound)))


@pytest.mark.parametrize(
    ("every", "saved"), [("0", [*range(2, 21, 2)]), ("8", [2, 4, 8, 16, 20]), ("1h", [2, 4, 8, 20])]
)
def test_evaluations_bring_checkpoints_unless_these_come_by_themselves(tmp_path, monkeypatch, every, saved):
    """Then only the best so far does, here those of steps 2, 4 and 8; the choice is the same."""
    aucs = iter([0.5, 0.6, 0.55, 0.7, 0.65, 0.7, 0.6, 0.6, 0.6, 0.6])
    monkeypatch.setattr(callbacks.evaluation, "measure", lambda *_: {"auc": next(aucs), "logloss": 0.5})
    made = trainer("train.steps=20", "train.epochs=2", "train.eval_every=2", f"train.checkpoint_every={every}")
    outcome = fit(made, tmp_path, clock=lambda: 0.0)
    assert kept(tmp_path) == saved
    assert outcome.progress.best_step == 8 and outcome.progress.misses == 6


def test_time_brings_checkpoints_where_every_step_is_evaluated(tmp_path, monkeypatch):
    """Steps of 25 s, no evaluation better than the first. Asked before a step, the clock stands at 0 after step 1."""
    monkeypatch.setattr(callbacks.evaluation, "measure", lambda *_: {"auc": 0.5, "logloss": 0.5})
    made = trainer("train.steps=20", "train.epochs=2", "train.eval_every=1", "train.checkpoint_every=100s")
    fit(made, tmp_path, clock=Clock(monkeypatch))
    assert kept(tmp_path) == [1, 6, 11, 16, 20]


def test_a_run_whose_last_evaluation_was_broken_off_can_be_extended(tmp_path, monkeypatch):
    """Step 7 is evaluated and has a line for being the last; with more steps to train it is not, and has none."""

    def broken_off(*_: Any) -> Any:
        raise StopRequested(15)

    monkeypatch.setattr(callbacks.evaluation, "measure", broken_off)
    made = trainer("train.steps=7", "train.eval_every=5", "train.log_every=3")
    progress = TrainProgress(step=7, best_step=5, best_value=0.6)
    log, event = StepLog(made, None), Event(last=True)
    Evaluate(made, log)(event, made.init_state(), progress)
    assert event.stop == 15 and progress.unevaluated
    again = TrainProgress(**json.loads(json.dumps(describe(made, progress)["cursor"])))
    assert again.extend() == ["validation", "train"]
    Evaluate(made, log)(Event(), made.init_state(), again)  # as the run that goes on does first
    assert again == TrainProgress(step=7, best_step=5, best_value=0.6)


def test_a_split_without_rows_is_named():
    made = trainer("data.validation_rows=0")
    with pytest.raises(DataError, match="validation"):
        callbacks.evaluation.measure(made, made.init_state(), "validation")


def test_a_step_is_dispatched_once_in_a_profile_also_where_groups_average(monkeypatch):
    """What divides a profile's times by steps counts these."""
    names: list[str] = []
    plain = jax.profiler.TraceAnnotation
    monkeypatch.setattr(jax.profiler, "TraceAnnotation", lambda name: names.append(name) or plain(name))
    made = trainer("mesh.replicas=2", "train.replica_sync=average", "train.average_every=1")
    state, _ = made.train_step(made.init_state(), next(made.train_inputs()))
    assert made.averaged(state, 1) is not state
    assert names.count("dispatch") == 1


def test_capacities_are_kept_on_the_same_layout_only():
    one, many = trainer("mesh.devices=1"), trainer("mesh.devices=8")
    progress = TrainProgress(step=1, position=200, capacities={"row_wise_D16_rowwise_adagrad": 640}, peaks={"a": 5})
    saved = Restored(1, to_host(one.init_state(), one.bound), describe(one, progress))
    assert resume(one, saved)[1] == progress
    assert resume(many, saved)[1] == dataclasses.replace(progress, capacities={}, peaks={})


class Unweighted(SyntheticSource):
    """Its first 200 training rows have weight 0."""

    def read(self, split: str, index: int) -> Batch:
        block = super().read(split, index)
        weights = block.weights.copy()
        weights[:200] = 0
        return dataclasses.replace(block, weights=weights)


@pytest.mark.parametrize("setting", ["embedding.optimizer=adam", "train.clip_norm=1", "train.dense_delay=1"])
def test_a_step_whose_weights_are_all_zero_changes_nothing_and_is_told(tmp_path, capsys, setting):
    config = load("synthetic", (*SMALL, "train.batch_size=200")).data
    one = trainer("train.shuffle=false", "train.steps=1", setting, source=Unweighted(config))
    outcome = fit(one, tmp_path)
    before, after = (to_host(state, one.bound) for state in (one.init_state(), outcome.state))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    said = capsys.readouterr().err
    assert "step 1 has no loss: all its samples have weight 0, so it changed nothing" in said
    (tmp_path / "metrics.jsonl").unlink()
    more = fit(trainer("train.shuffle=false", "train.steps=3", setting, source=Unweighted(config)), tmp_path)
    assert more.progress.step == 3, "and training goes on"
    assert "1 steps had samples of weight 0 alone" in capsys.readouterr().err


def test_fit_takes_a_config_not_a_name(tmp_path):
    with pytest.raises(ConfigError, match="recjax.load"):
        recjax.fit("synthetic", tmp_path / "run")


def test_a_run_that_goes_on_forgets_what_its_end_chose():
    before = {"best_step": 5, "best_value": 0.6, "misses": 0, "stopped": False}
    progress = TrainProgress(step=7, best_step=7, best_value=0.7, end={"lines": ["validation"], **before})
    assert progress.extend() == ["validation"]
    assert progress == TrainProgress(step=7, best_step=5, best_value=0.6)
    assert progress.extend() == []
    stopped = TrainProgress(step=7, best_step=5, best_value=0.6, misses=1, stopped=True, end={"lines": [], **before})
    assert stopped.extend() == [] and not stopped.stopped and stopped.misses == 0


def test_routing_on_the_devices_trains_and_predicts_the_same_bits():
    outcomes = []
    for routing in ("host", "device"):
        made = trainer("train.steps=4", f"train.routing={routing}")
        state, stream, losses = made.init_state(), made.train_inputs(), []
        for done, inputs in enumerate(itertools.islice(stream, 4), 1):
            state, metrics = made.train_step(state, inputs)
            losses.append(float(metrics["loss"]))
            assert stream.position == stream.latest.batch.position + stream.latest.batch.size == 200 * done
        logits = [x for _, x in made.predict(state, made.eval_inputs("test"))]
        outcomes.append((losses, to_host(state, made.bound), logits, stream.state_dict()))
    assert jax.tree.all(jax.tree.map(np.array_equal, outcomes[0][:3], outcomes[1][:3]))
    assert outcomes[0][3] == outcomes[1][3]
