"""Read this first: a whole run, from config to results, in the order in which it happens."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from recjax import config as machinery
from recjax import presets
from recjax.data.baselines import references
from recjax.errors import ConfigError
from recjax.presets import FREE_ON_RESUME
from recjax.train import metrics
from recjax.train.checkpoint import Checkpoints
from recjax.train.curves import draw_curves
from recjax.train.files import write_json
from recjax.train.folder import RunFolder, changes, read_config
from recjax.train.loop import Cursor, Loop, Outcome, resume, total_steps
from recjax.train.setup import Setup, make_setup
from recjax.train.state import TrainState
from recjax.train.summary import figures, summarise
from recjax.train.writers import MetricsFile


def train(config: presets.RunConfig, out: Path | str | None = None) -> dict[str, Any]:
    """Trains, or resumes what an earlier call with the same config left in `out`.

    Args:
      config: from `presets.load`, or built in Python.
      out: the run folder; see `RunFolder` for what it will hold. None takes `presets.default_out`.

    Returns:
      The content of summary.json.
    """
    began = time.monotonic()
    if not isinstance(config, presets.RunConfig):
        raise ConfigError(f"fit needs a config, not {config!r}. Make one with recjax.load(PRESET, ...).")
    with RunFolder(Path(out or presets.default_out(config)), config) as folder:
        setup = make_setup(config, splits=("train", "test"))
        folder.claim()
        with Checkpoints(folder.path / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
            state, cursor = _start(setup, checkpoints, folder.path)
            if cursor.step > total_steps(setup):
                raise ConfigError(
                    f"{folder.path} has already trained {cursor.step} steps, more than the {total_steps(setup)} asked "
                    "for. Choose another --out to start anew, or ask for more steps (train.steps or train.epochs)."
                )
            with MetricsFile(folder.path / "metrics.jsonl", resume_step=cursor.step) as log:
                outcome = Loop(setup, checkpoints, log).fit(state, cursor)
                chosen, step = _chosen(setup, checkpoints, outcome)
                result = metrics.evaluate(*setup.scores(chosen, "test"))
                log.write({"step": step, "split": "test", "loss": result["logloss"], **result})
        summary = summarise(setup, outcome, step, result, references(setup.source), time.monotonic() - began)
        if outcome.samples_per_s is None:  # nothing was left to train: the figures of the training stay
            summary |= figures(folder.path / "summary.json")
        write_json(folder.path / "summary.json", summary)
        title = f"{config.model.kind} on {config.data.kind}"
        draw_curves(folder.path / "metrics.jsonl", folder.path / "curves.png", title, summary["references"], step)
    return summary


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _start(setup: Setup, checkpoints: Checkpoints, run: Path) -> tuple[TrainState, Cursor]:
    """The state of the newest intact checkpoint, or that before the first step."""
    resumed = checkpoints.newest(report=_note, use=functools.partial(resume, setup))
    if resumed is None:
        return setup.new_state(), Cursor()
    state, cursor = resumed
    if cursor.stopped:
        _note(f"{run} stopped early at step {cursor.step} (train.patience): nothing is left to train")
    elif cursor.step == total_steps(setup):
        _note(f"{run} has trained all its {cursor.step} steps: nothing is left to train")
    else:
        _note(f"resuming {run} at step {cursor.step}")
    return state, cursor


def _chosen(setup: Setup, checkpoints: Checkpoints, outcome: Outcome) -> tuple[TrainState, int]:
    """The state that the validation split chose, which need not be the last one."""
    state, cursor = outcome.state, outcome.cursor
    if cursor.best_step is None or cursor.best_step == cursor.step:
        return state, cursor.step
    jax.tree.map(lambda array: array.delete(), state)  # there may not be memory for two
    return checkpoints.restore(cursor.best_step, use=setup.saved_state), cursor.best_step


def evaluate(
    run: Path | str, overrides: Sequence[str] = (), split: str = "test", step: int | None = None
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run: the newest one, or that of `step`.

    Args:
      run: a run folder.
      overrides: changes to its config that keep the model, for example "mesh.devices=1" or "data.path=...".
      split: "train", "validation" or "test".
      step: a step that has a checkpoint.

    Returns:
      {"step", "split", "auc", "logloss", "ne", "calibration", "samples"}.
    """
    trained = read_config(Path(run))
    config = machinery.override(trained, overrides)
    if changed := changes(trained, config):
        raise ConfigError(
            f"{run} was trained with other settings ({'; '.join(changed)}). Leave these out: an evaluation may only "
            f"change {', '.join(FREE_ON_RESUME)}."
        )
    setup = make_setup(config, splits=(split,))
    with Checkpoints(Path(run) / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
        use = functools.partial(resume, setup)
        resumed = checkpoints.newest(report=_note, use=use) if step is None else checkpoints.restore(step, use)
    if resumed is None:
        raise ConfigError(f"{run} has no checkpoint yet. Train it first: recjax train PRESET --out {run}")
    state, cursor = resumed
    if step is None and cursor.best_step not in (None, cursor.step):
        _note(f"this is the newest checkpoint, of step {cursor.step}; validation chose --step {cursor.best_step}")
    return {"step": cursor.step, "split": split, **metrics.evaluate(*setup.scores(state, split))}
