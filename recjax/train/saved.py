"""A run as it stands on the disk, opened to be evaluated or to predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from recjax import config as machinery
from recjax.errors import ConfigError
from recjax.presets import FREE_ON_RESUME
from recjax.train.checkpoint import Checkpoints
from recjax.train.folder import changes, read_config
from recjax.train.loop import resume
from recjax.train.setup import Setup, make_setup
from recjax.train.state import TrainState


def open_run(
    run: Path, overrides: Sequence[str], splits: Sequence[str], step: int | None, report: Callable[[str], None]
) -> tuple[Setup, TrainState, int]:
    """The setup of a run, and the state and step of a checkpoint: the newest, or that of `step`.

    Args:
      run: the run folder.
      overrides: changes to its config that keep the model.
      splits: those that must have rows.
      step: a step that has a checkpoint, or None.
      report: called with what the user should know.

    Raises:
      ConfigError: no run, no checkpoint, or a change that makes another model.
      DataError: the data are missing, damaged or others.
      TrainingError: no intact checkpoint.
    """
    trained = read_config(run)
    config = machinery.override(trained, overrides)
    if changed := changes(trained, config):
        raise ConfigError(
            f"{run} was trained with other settings ({'; '.join(changed)}). Leave these out: an evaluation may only "
            f"change {', '.join(FREE_ON_RESUME)}."
        )
    setup = make_setup(config, splits=splits)
    with Checkpoints(run / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
        use = functools.partial(resume, setup)
        resumed = checkpoints.newest(report=report, use=use) if step is None else checkpoints.restore(step, use)
    if resumed is None:
        raise ConfigError(f"{run} has no checkpoint yet. Train it first: recjax train PRESET --out {run}")
    state, cursor = resumed
    if step is None and cursor.best_step not in (None, cursor.step):
        report(f"this is the newest checkpoint, of step {cursor.step}; validation chose --step {cursor.best_step}")
    return setup, state, cursor.step
