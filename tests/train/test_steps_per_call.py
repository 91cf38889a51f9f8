"""Several steps in one program: bit for bit those of single steps, whatever ends a call, fails in it or does not fit."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import recjax
from recjax.config.presets import load
from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.synthetic.clicks import SyntheticSource
from recjax.embedding.routing import capacity
from recjax.errors import DataError, RecjaxError, TrainingError
from recjax.train import loop as loops
from recjax.train.build import build_trainer
from recjax.train.callbacks import SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.loop import Outcome
from recjax.train.progress import TrainProgress
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


OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam", "lazy_adam")
CASES = {
    "host": (),
    "device": ("train.routing=device",),
    "one device": ("train.routing=device", "mesh.devices=1"),
    "eight": ("train.routing=device", "mesh.devices=8", "mesh.hosts=2"),
    "jagged": ("train.routing=device", "data.ids_per_bag=0,3"),
    "jagged on the host": ("data.ids_per_bag=0,3",),
    "pooled": ("train.routing=device", "plan=table_wise", "embedding.exchange.kind=pooled", "data.ids_per_bag=0,1"),
    "accumulate, clip": ("train.routing=device", "train.accumulate=2", "train.clip_norm=0.01"),
    "bfloat16": ("train.routing=device", "embedding.dtype=bfloat16", "embedding.rounding=stochastic"),
    "replicas": ("mesh.devices=4", "mesh.replicas=2", "train.routing=device"),
    "averages": ("mesh.replicas=2", "train.replica_sync=average", "train.average_every=8", "train.routing=device"),
    "late": ("train.dense_delay=1",),
}


@pytest.mark.parametrize("case", CASES)
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
