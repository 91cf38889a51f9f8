"""Read this first: a whole run, from config to results, in the order in which it happens."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from recjax import config as machinery
from recjax import presets
from recjax.data.baselines import references
from recjax.errors import ConfigError
from recjax.train import metrics
from recjax.train.checkpoint import Checkpoints
from recjax.train.folder import RunFolder, read_config
from recjax.train.loop import Cursor, Loop, resume, total_steps
from recjax.train.setup import Setup, make_setup
from recjax.train.state import TrainState, from_host
from recjax.train.writers import MetricsFile, Progress, draw_curves, write_json

PACKAGES = ("recjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def train(config: presets.RunConfig, out: Path | str) -> dict[str, Any]:
    """Trains, or resumes what an earlier call with the same config left in `out`.

    Args:
      config: from `presets.load`, or built in Python.
      out: the run folder; see `RunFolder` for what it will hold.

    Returns:
      The content of summary.json.
    """
    began = time.monotonic()
    with RunFolder(Path(out), config) as folder:
        progress = Progress()
        progress.note("opening data")
        source = config.data.open()
        setup = make_setup(config, source)
        with Checkpoints(folder.path / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
            restored = checkpoints.newest(report=progress.note)
            if restored is None:
                state, cursor = setup.new_state(), Cursor()
            else:
                state, cursor = resume(setup, restored)
                progress.note(f"resuming at step {cursor.step} from {folder.path}")
            if cursor.step > total_steps(setup):
                raise ConfigError(
                    f"{folder.path} has already trained {cursor.step} steps, more than the {total_steps(setup)} asked "
                    "for. Raise train.steps (or train.epochs), or choose another --out."
                )
            log = MetricsFile(folder.path / "metrics.jsonl", resume_step=cursor.step)
            outcome = Loop(setup, checkpoints, log, progress).fit(state, cursor)
            chosen, chosen_step = _chosen(setup, checkpoints, outcome.state, outcome.cursor)
            progress.note(f"evaluating step {chosen_step} on test")
            result = metrics.evaluate(*setup.scores(chosen, "test"))
            log.write({"step": chosen_step, "split": "test", "loss": result["logloss"], **result})
            log.close()
        summary = {
            "steps": outcome.cursor.step,
            "samples": outcome.cursor.position,
            "samples_per_s": outcome.samples_per_s,
            "eval": result,
            "eval_split": "test",
            "eval_step": chosen_step,
            "chosen_by": f"validation {config.train.choose_by}" if outcome.cursor.best_step else "last step",
            "stopped_early": outcome.cursor.stopped,
            "references": references(source),
            "devices": setup.mesh.devices.size,
            "seconds": round(time.monotonic() - began, 1),
            "compilations": outcome.compilations,
            "config_hash": machinery.config_hash(config),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        }
        write_json(folder.path / "summary.json", summary)
        draw_curves(folder.path / "metrics.jsonl", folder.path / "curves.png", chosen_step, summary["references"])
    return summary


def _chosen(setup: Setup, checkpoints: Checkpoints, state: TrainState, cursor: Cursor) -> tuple[TrainState, int]:
    """The state that the validation split chose, which need not be the last one."""
    if cursor.best_step is None or cursor.best_step == cursor.step:
        return state, cursor.step
    arrays = checkpoints.restore(cursor.best_step).arrays
    return from_host(arrays, cursor.best_step, state, setup.bound, setup.mesh), cursor.best_step


def evaluate(run: Path | str, overrides: Sequence[str] = (), split: str = "test", step: int | None = None) -> dict:
    """Evaluates a checkpoint of a run: the newest one, or that of `step`.

    Args:
      run: a run folder.
      overrides: changes to its config that keep the model, for example "mesh.devices=1" or "data.path=...".
      split: "train", "validation" or "test".
      step: a step that has a checkpoint.

    Returns:
      {"step", "split", "auc", "logloss", "ne", "calibration", "samples"}.
    """
    config = machinery.override(read_config(Path(run)), overrides)
    setup = make_setup(config)
    checkpoints = Checkpoints(Path(run) / "checkpoints", keep=config.train.keep_checkpoints, read_only=True)
    restored = checkpoints.newest(lambda m: print(m, file=sys.stderr)) if step is None else checkpoints.restore(step)
    if restored is None:
        raise ConfigError(f"{run} has no checkpoint yet. Train it first: recjax train PRESET --out {run}")
    state, cursor = resume(setup, restored)
    return {"step": cursor.step, "split": split, **metrics.evaluate(*setup.scores(state, split))}
