"""The pictures of a run and of an evaluation, drawn once in a process: to draw one is most of a short command.

The first is drawn, and is given again in the place of those that follow. What pictures show is claimed by tests that
draw themselves: `test_curves.py` and `test_calibration.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from recjax import main
from recjax.train.metrics import calibration
from recjax.train.run import curves


def _once(draw: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    """`draw`, a function of a module that writes a picture to its second argument."""
    kept: list[bytes] = []

    def given_again(of: Any, out_png: Path, *arguments: Any, **options: Any) -> None:
        if kept:
            module.write_whole(out_png, kept[0])
            return
        draw(of, out_png, *arguments, **options)
        kept.append(out_png.read_bytes())

    return given_again


def keep() -> None:
    """Does so from now on, in this process and in forks of it."""
    vars(main)["draw_curves"] = _once(curves.draw_curves, curves)
    vars(calibration)["draw"] = _once(calibration.draw, calibration)


def draw_first() -> None:
    """Does so, and draws one of each, for forks that follow."""
    keep()
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            {"step": step, "split": split, "loss": 0.5, "auc": 0.5}
            for step in (1, 2)
            for split in ("train", "validation")
        ]
        metrics = Path(folder) / "metrics.jsonl"
        metrics.write_text("\n".join(map(json.dumps, lines)))
        vars(main)["draw_curves"](metrics, Path(folder) / "curves.png", "a run")
        point = {"predicted": 0.5, "observed": 0.5, "samples": 9, "weight": 9.0}
        report = {"samples": 9, "calibration_curve": [point], "predictions": [0] * calibration.PREDICTION_BINS}
        calibration.draw({"test": report}, Path(folder) / "calibration.png", "a run")
