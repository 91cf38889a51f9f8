"""Runs that are killed and resumed: how they die, and what they have in common with one that was never disturbed."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from recjax.train.checkpoint.checkpoints import Checkpoints
from support.commands import arrays, assert_same_arrays, start, steps_of

MARKS = [
    getattr(pytest.mark, name) for name in ("full", "multiprocess", "light_compile", "few_programs", "shared_programs")
]
# Three blocks of rows in windows of two; 20 steps an epoch, the last of 16 samples; 40 steps on two devices.
# An evaluation has 5 batches; at this learning rate the best step is not the last.
# The preset keeps a checkpoint every 5 steps, evaluates every 15, and logs every one.
ROWS, BATCH, EPOCH, STEPS = 9_744, 512, 20, 40
LONG = (
    f"data.train_rows={ROWS}",
    f"train.batch_size={BATCH}",
    "train.shuffle_blocks=2",
    "train.epochs=2",
    "train.eval_batch_size=128",
    "train.optimizer.learning_rate=0.2",
    "mesh.devices=2",
)

# Python that a command runs first: it dies by its own hand at an exact place, counted from the start of its process.
# Here every checkpoint is complete before the next step; elsewhere training goes on while it is written.
DIES = """
import os, signal
from recjax.train.checkpoint import checkpoints
from recjax.train.run import writers

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def save(self, *arguments, start=checkpoints.Checkpoints.save, **options):
    start(self, *arguments, **options)
    self.wait()
checkpoints.Checkpoints.save = save

def at_rename(number, done, rename=os.rename):
    # of a checkpoint's folder: an unfinished one gets its name, or an old one loses it
    def counted(source, target):
        nonlocal number
        number -= os.path.basename(os.path.dirname(source)) == "checkpoints"
        if done:
            rename(source, target)
        if number == 0:
            die()
        if not done:
            rename(source, target)
    os.rename = counted

def in_write(number, write=checkpoints.array_store.write):
    def counted(folder, arrays):
        nonlocal number
        number -= 1
        if number == 0:
            write(folder, {key: arrays[key] for key in list(arrays)[:1]})
            die()
        return write(folder, arrays)
    checkpoints.array_store.write = counted

def at_line(step, half=False, write=writers.MetricsFile.write):
    def watched(self, line):
        if line["step"] == step:
            if half:
                self._file.write(b'{"step": %d, "split": "tr' % step)
            die()
        write(self, line)
    writers.MetricsFile.write = watched
"""


def kill(command: Sequence[object], when: Callable[[], bool], before: str = "", may_end: bool = False) -> None:
    """Starts a command and kills it as soon as `when()` is true (or it kills itself)."""
    with start(*command, before=before) as process:
        while process.poll() is None and not when():
            time.sleep(0.001)
        process.kill()
        _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL or may_end, f"it ended before it was killed:\n{err}"


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl; 0 before there is one."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    return max((int(step) for step in re.findall(r'"step": (\d+), "split": "train"', text)), default=0)


def steps_kept(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return Checkpoints(run / "checkpoints", 2).steps()


def _without_speed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "samples_per_s"} for line in lines]


def _all_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_ended_like(run: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """Bit for bit: weights, slots, optimizer, cursor, the record of every step, and the result."""
    assert steps_kept(run) == steps_kept(undisturbed)
    for step in steps_kept(run):
        assert_same_arrays(arrays(run, step), arrays(undisturbed, step))
        both = (Checkpoints(folder / "checkpoints", 2) for folder in (run, undisturbed))
        metas = (checkpoints.restore(step, lambda restored: restored.meta) for checkpoints in both)
        assert next(metas) == next(metas)
    assert steps_of(run, "train") == list(range(1, steps + 1))
    assert _without_speed(_all_lines(run)) == _without_speed(_all_lines(undisturbed))
    summary, expected = (json.loads((folder / "summary.json").read_text()) for folder in (run, undisturbed))
    for key in ("steps", "samples", "eval", "eval_split", "eval_step", "chosen_by", "stopped_early", "config_hash"):
        assert summary[key] == expected[key], key
    left = {path.name for path in run.rglob(".*")}
    assert left == {".lock"}, "nothing unfinished is left"
