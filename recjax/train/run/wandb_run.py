"""Weights & Biases, offline: a run in the run folder's `wandb`, which `wandb sync` uploads when one wants to."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.train.run.trackers import failed, measures, require
from recjax.utils.files import disk_error


class WandbRun:
    """One offline run of W&B.

    A line of metrics.jsonl {"step": 7, "split": "train", "loss": 0.5} becomes a row {"step": 7, "train/loss": 0.5};
    `step` is the axis of all charts. W&B's own counter is not used, for it may not go back, as the line of the test
    split does. The id is that of the run folder's path, so a run that is synced once more replaces itself.
    """

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        """Replaces the W&B run in a run folder by an empty one.

        Args:
          run: the run folder.
          settings: shown as the run's config.

        Raises:
          ConfigError: the package is missing.
          TrainingError: no space, no permission.
        """
        wandb = require("wandb")
        self._folder = run / "wandb"
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir()  # else W&B takes a folder elsewhere where it may not write
        except OSError as error:
            raise disk_error(self._folder, error, 0, resumes=True) from error
        # Nothing of the machine, the code or the environment, and no signal handlers, belong to the metrics of a run.
        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        name = run.absolute()
        identity = hashlib.sha256(str(name).encode()).hexdigest()[:12]
        try:
            self._run = wandb.init(
                dir=str(run),
                mode="offline",
                project="recjax",
                name=name.name,
                id=identity,
                config=dict(settings),
                settings=quiet,
                reinit="create_new",
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # of many classes, none of them documented
            raise failed("W&B", self._folder, error) from error

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """See `Tracker.write`."""
        try:
            for line in lines:
                self._run.log({"step": line["step"], **dict(measures(line))})
        except Exception as error:
            raise failed("W&B", self._folder, error) from error

    def close(self) -> None:
        """Ends the run; W&B's own process writes what it still holds a moment later."""
        self._run.finish()
