"""A run as it stands on the disk, opened to be evaluated or to predict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from recjax import settings
from recjax.config.run import FREE_ON_RESUME
from recjax.data.source import BlockSource
from recjax.data.storage.run_snapshot import EarlierBlocks, open_snapshot, refuse_other_values, snapshot_of
from recjax.embedding.plan import is_file
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.train.build import build_trainer
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.progress import resume
from recjax.train.run import sources
from recjax.train.run.folder import changes, data_snapshot, read_config, resolve_recorded
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.train.two_sided import open_data
from recjax.utils.paths import located

T = TypeVar("T")


def open_run(
    run: Path,
    overrides: Sequence[str],
    splits: Sequence[str],
    step: int | Literal["newest"] | None,
    report: Callable[[str], None],
    *,
    source: BlockSource | None = None,
    trust_code: bool = False,
) -> tuple[Trainer, TrainState, int]:
    """The trainer of a run, and the state and step of a checkpoint.

    Args:
      run: the run folder.
      overrides: changes to its config that keep the model.
      splits: those that must have rows.
      step: a step that has a checkpoint, or "newest"; None takes the one that validation chose, if that is intact, and
        the newest where no validation has chosen.
      report: called with what the user should know.
      source: the data instead of those of the config.
      trust_code: run the copy of the model's code in the run folder if the original is gone, another, or not trusted.

    Raises:
      ConfigError: no run, no checkpoint, a change that makes another model, or its code is gone or another.
      DataError: the data are missing, damaged or others, or their ids stand for other values.
      TrainingError: no intact checkpoint.
    """
    run = located(run)
    trained = read_config(run, trust_code=trust_code, report=report)
    config = settings.override(trained, overrides)
    if changed := changes(trained, config):
        raise ConfigError(
            f"{run} was trained with other settings ({'; '.join(changed)}). Leave these out: an evaluation may only "
            f"change {', '.join(FREE_ON_RESUME)}."
        )
    if is_file(config.plan) and config.plan == trained.plan and (run / sources.PLAN).is_file():
        config = dataclasses.replace(config, plan=str(run / sources.PLAN))  # its path was another machine's, maybe
    used = resolve_recorded(config, run, report, needs_data=source is None)
    snapshot, rows = data_snapshot(run, step), None
    if snapshot != snapshot_of(run, 0):  # its settings are those for the data that it began with
        first, newest = (open_snapshot(folder) for folder in (snapshot_of(run, 0), snapshot))
        if first is None or newest is None:
            raise DataError(
                f"{snapshot} is gone, which says what the rows of the tables of {run} stand for. Restore it."
            )
        rows = int(first.row_counts("train").sum())
        if source is None:
            began = open_data(used)
            refuse_other_values(began, snapshot_of(run, 0))
            source = EarlierBlocks(newest, began)
    trainer = build_trainer(used, source, splits, rows=rows)
    with Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
        resumed = use_checkpoint(checkpoints, step, report, functools.partial(resume, trainer))
    if resumed is None:
        raise ConfigError(f"{run} has no checkpoint yet. Train it first: recjax train PRESET --out {run}")
    state, progress = resumed
    if source is None:
        refuse_other_values(trainer.source, snapshot)
    return trainer, state, progress.step


def use_checkpoint(
    checkpoints: Checkpoints,
    step: int | Literal["newest"] | None,
    report: Callable[[str], None],
    use: Callable[[Restored], T],
    option: str = "--step ",
) -> T | None:
    """Returns what `use` makes of the checkpoint that `open_run` would take; None if there is none at all.

    `option` is what chooses another step, in the words of a note.

    Raises:
      TrainingError: none is intact, or there is none of that step.
    """

    def chosen(restored: Restored) -> T:
        best = restored.meta["cursor"]["best_step"] if step is None else None
        if best in (None, restored.step):
            return use(restored)
        try:
            found = checkpoints.restore(best, use)
        except TrainingError as error:
            report(f"validation chose step {best}: {error} The newest, of step {restored.step}, is used.")
            return use(restored)
        report(f"this is step {best}, which validation chose; the newest is {option}{restored.step}")
        return found

    return checkpoints.restore(step, use) if isinstance(step, int) else checkpoints.newest(report, chosen)
