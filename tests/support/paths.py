"""Commands on prepared data that share what JAX has traced, for tests that run many under different paths."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recjax import main, settings
from recjax.config.run import FREE_ON_RESUME
from recjax.train import build
from recjax.train.metrics import calibration
from recjax.train.run import open_run
from recjax.train.trainer import Trainer
from support.commands import OWN, Done, inside


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Commands on the same tables are traced once: paths do not enter it. No pictures are drawn, nothing is flushed."""
    made: dict[str, Trainer] = {}

    def share(config: Any, source: Any = None, splits: Any = (), **more: Any) -> Trainer:
        source = source or config.data.open()
        key = settings.config_hash(config, FREE_ON_RESUME)
        if key not in made:
            made[key] = build.build_trainer(config, source, splits, **more)
        alike = dataclasses.replace(made[key], config=config, source=source)
        vars(alike).update({name: getattr(made[key], name) for name in ("step_program", "predict_program", "router")})
        return alike

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "build_trainer", share)
        patch.setattr(open_run, "build_trainer", share)
        patch.setattr(main, "draw_curves", lambda metrics, picture, *_: picture.write_bytes(b""))
        patch.setattr(calibration, "draw", lambda curves, picture, title: picture.write_bytes(b""))
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def train(preset: Path, data: object, steps: int, *more: object) -> Done:
    """`recjax train` on prepared data."""
    return inside("train", preset, *OWN, f"train.steps={steps}", f"data.path={data}", *more, "--json")


def measures(run: object, rows: Path, scores: Path, *overrides: str) -> tuple[dict[str, float], str]:
    """What `recjax eval` and `recjax predict` give: all numbers, to the last bit."""
    result = inside("eval", run, *overrides, "--json").result
    done = inside("predict", run, *overrides, "--input", rows, f"--out={scores}", "--json")
    assert done.result["step"] == result["step"]
    return {name: result[name] for name in ("step", "auc", "logloss", "samples")}, scores.read_text()
