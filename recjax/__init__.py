"""Trains deep learning recommendation models in JAX, with embedding tables spread over devices.

    config = recjax.load("movietweetings", "train.steps=1000", "mesh.devices=4")
    summary = recjax.fit(config, out="runs/first")
    print(recjax.evaluate("runs/first")["auc"])

Importing this module imports nothing else: not even JAX, until something is asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recjax.presets import RunConfig

__version__ = "0.1.0"


def load(preset: str, *overrides: str) -> RunConfig:
    """The config of a preset, with values replaced.

    Args:
      preset: a name in configs/, or the path of a Python file that defines `config`.
      *overrides: texts "dotted.key=value", as on the command line.

    Raises:
      ConfigError: an unknown preset or key, or a value that does not fit.
    """
    from recjax import presets

    return presets.load(preset, overrides)


def fit(config: RunConfig, out: Path | str | None = None) -> dict[str, Any]:
    """Trains, and returns what summary.json holds.

    Args:
      config: from `load`.
      out: the run folder; training resumes from what it holds. None takes the one in runs/ that the
        command line takes, named after the config.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax import main

    return main.train(config, out)


def evaluate(
    out: Path | str, *overrides: str, split: str | Sequence[str] = "test", step: int | None = None, **details: Any
) -> dict[str, Any]:
    """Evaluates the newest checkpoint of a run folder, and returns the metrics.

    Args:
      out: the run folder; calibration.png is drawn there.
      *overrides: texts "dotted.key=value", for example another "mesh.devices".
      split: "train", "validation" or "test", or several of them.
      step: a step that has a checkpoint; None takes the newest.
      **details: fields of `recjax.train.evaluation.Details`, for example by="genres" (or several), group="user".

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax import main
    from recjax.train.evaluation import Details

    if isinstance(details.get("by"), str):
        details["by"] = (details["by"],)
    return main.evaluate(out, overrides, (split,) if isinstance(split, str) else split, step, Details(**details))


def predict(
    out: Path | str,
    input: Path | str,
    scores: Path | str,
    *overrides: str,
    split: str = "test",
    step: int | None = None,
) -> dict[str, Any]:
    """Writes the scores of a file of rows, in its order, and returns how many and their mean.

    Args:
      out: the run folder, which is all that is needed.
      input: the rows: .jsonl, the text of Criteo or Avazu, or a folder of prepared data.
      scores: the file to write, .csv or .jsonl.
      *overrides: texts "dotted.key=value", for example another "mesh.devices".
      split: of a folder.
      step: a step that has a checkpoint; None takes the one that validation chose.

    Raises:
      RecjaxError: see recjax.errors for the kinds.
    """
    from recjax.serving import predict

    return predict.predict(out, input, scores, overrides, split, step)
