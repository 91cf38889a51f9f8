"""Hot rows that change in a training: against the same training without any, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from recjax.config.presets import load
from recjax.data.presence import Presence
from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.planning.hot import first_batches
from recjax.train import hot_periods
from recjax.train import loop as loops
from recjax.train.build import build_trainer
from recjax.train.callbacks import SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.hot_periods import HotPeriods
from recjax.train.progress import TrainProgress, resume
from recjax.train.run.writers import MetricsFile
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load as load_arrays

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs]

SMALL = (
    *("data.rows=400,300", "data.train_rows=2000", "data.validation_rows=0", "data.test_rows=300", "train.steps=7"),
    *("plan=row_wise", "train.batch_size=100", "train.checkpoint_every=3", "small.below_rows=0"),
)


def trainer(*overrides: str) -> Trainer:
    return build_trainer(load("synthetic", (*SMALL, "compute_dtype=float64", *overrides)))


def train(made: Trainer, folder: Path, from_step: int | None = None) -> dict[str, Any]:
    """The last state, from the first step or from a checkpoint."""
    folder.mkdir(exist_ok=True)
    with Checkpoints(folder / "checkpoints", 99) as checkpoints, MetricsFile(folder / "metrics.jsonl", None) as file:
        state, progress = made.init_state(), TrainProgress()
        if from_step is not None:
            state, progress = checkpoints.restore(from_step, use=lambda saved: resume(made, saved))
        log = StepLog(made, file)
        outcome = loops.fit(made, state, progress, log, [SaveCheckpoint(made, checkpoints, log)])
    return load_arrays(made.export(outcome.state))


@pytest.mark.full
def test_rows_change_places_with_their_slots_and_runs_resume(tmp_path: Path) -> None:
    """Every second step; a checkpoint lies within a period, and is resumed with another number, copied to hosts."""
    with jax.enable_x64(True):
        adam = ("embedding.optimizer=adam", "embedding.optimizer.learning_rate=0.05")
        hot = ("embedding.hot.rows=90", "embedding.hot.refresh=2", "embedding.hot.batches=2", *adam)
        changing = trainer("mesh.devices=2", *hot)
        periods = HotPeriods(changing)
        name, *_ = changing.plan.tables
        sets: list[Any] = [periods._trainer_of(n).plan.tables[name][0].rows for n in range(3)]
        assert len(set(sets)) == 3 and len({len(rows.ids) for rows in sets}) == 1
        two_hosts = ("mesh.devices=4", "mesh.hosts=2", "embedding.hot.copies=host")
        found = [train(changing, tmp_path / "a")]
        found.append(train(trainer(*two_hosts, *hot, "embedding.hot.rows=20"), tmp_path / "a", from_step=3))
        truth = train(trainer("mesh.devices=1", *adam), tmp_path / "b")
    for arrays in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), arrays, truth)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"embedding\.rounding=nearest"):
        HotPeriods(
            trainer(
                "mesh.devices=1",
                "compute_dtype=float32",
                "embedding.hot.rows=9",
                "embedding.hot.refresh=2",
                "embedding.dtype=bfloat16",
            )
        )
    with pytest.raises(ConfigError, match=r"embedding\.hot\.refresh=0"):
        trainer(
            "mesh.devices=1",
            "compute_dtype=float32",
            "embedding.hot.rows=9",
            "embedding.hot.refresh=2",
            "train.routing=device",
        ).train_inputs()


def test_counting_is_a_phase_in_which_peers_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as for a compilation: with the step's own phase they would take the process for stuck."""
    watch = watchdog.Watch.__new__(watchdog.Watch)
    watch._phase, watch._moves, found = "wait", 0, list[str]()
    monkeypatch.setattr(watchdog, "_watch", watch)

    def count(*of: Any) -> Presence:
        found.append(watch._phase)
        return first_batches(*of)

    monkeypatch.setattr(hot_periods, "first_batches", count)
    changing = ("embedding.hot.rows=9", "embedding.hot.refresh=2")
    HotPeriods(trainer("mesh.devices=1", "compute_dtype=float32", *changing))._trainer_of(1)
    assert [watchdog.ALONE[phase] for phase in found] == [watchdog.ALONE["dispatch"]] and watch._phase == "wait"
