"""Invariant 6: a run that is killed anywhere ends with the numbers of one that was never killed.

Real processes, real SIGKILL. The undisturbed run has 80 steps in two epochs, each ending in a batch of 4 samples, a
checkpoint every 5 steps and an evaluation every 15.
"""

import functools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import outside, start, write_preset

from recjax.train.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]
LAST = 80


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="module")
def undisturbed(preset: Path, compiled_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = outside("train", preset, "--out", run)
    assert done.status == 0, done.err
    return run


def arrays(run: Path, step: int = LAST) -> Any:
    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        return checkpoints.restore(step).arrays


def lines(run: Path, split: str, *keys: str) -> list[tuple[Any, ...]]:
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in keys) for line in parsed if line["split"] == split]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def assert_same_run(run: Path, truth: Path) -> None:
    """Weights, slots, optimizer state, every logged loss, every evaluation, and the choice: bit for bit."""
    assert bits(arrays(run)) == bits(arrays(truth))
    assert lines(run, "train", "step", "samples", "loss") == lines(truth, "train", "step", "samples", "loss")
    assert [s for (s,) in lines(run, "train", "step")] == list(range(1, LAST + 1))
    assert lines(run, "validation", "step", "auc", "loss") == lines(truth, "validation", "step", "auc", "loss")
    ours, theirs = (json.loads((r / "summary.json").read_text()) for r in (run, truth))
    assert (ours["eval"], ours["eval_step"]) == (theirs["eval"], theirs["eval_step"])


def kill_when(condition: Any, *arguments: object) -> bool:
    """Runs `recjax train`, sends SIGKILL once the condition holds; False if the run ended before."""
    with start("train", *arguments) as process:
        until = time.monotonic() + 120
        while not condition():
            if process.poll() is not None:
                return False
            assert time.monotonic() < until, "the condition never held"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode == -signal.SIGKILL


def logged(run: Path) -> int:
    """The newest step in metrics.jsonl."""
    try:
        return (run / "metrics.jsonl").read_text().count('"train"')
    except FileNotFoundError:
        return 0


def test_killed_at_random_steps(preset: Path, undisturbed: Path, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"random seed {seed}")  # pytest shows it if the test fails
    random_ = random.Random(seed)
    run = tmp_path / "run"
    for target in sorted(random_.sample(range(2, LAST - 8), 3)):
        kill_when(lambda target=target: logged(run) >= target, preset, "--out", run)
    done = outside("train", preset, "--out", run)
    assert done.status == 0 and f"resuming {run} at step" in done.err, done.err
    assert_same_run(run, undisturbed)


def test_killed_in_the_middle_of_a_checkpoint(preset: Path, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    inside = 0

    def writing(after: int) -> bool:
        return logged(run) > after and any((run / "checkpoints").glob(".unfinished-*/state/*"))

    for after in (1, 18, 44):
        if kill_when(functools.partial(writing, after), preset, "--out", run):
            inside += any((run / "checkpoints").glob(".unfinished-*"))
    assert inside > 0, "no kill fell into a checkpoint"
    assert outside("train", preset, "--out", run).status == 0
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("change", [("mesh.devices=3",), ("mesh.devices=1", "plan=data_parallel")])
def test_killed_and_continued_elsewhere(
    change: tuple[str, ...], preset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert kill_when(lambda: logged(run) >= 33, preset, "--out", run)
    done = outside("train", preset, *change, "--out", run)
    assert done.status == 0 and f"resuming {run} at step" in done.err, done.err
    ours, truth = arrays(run), arrays(undisturbed)
    assert str(jax.tree.structure(ours)) == str(jax.tree.structure(truth))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    found, expected = (np.array(lines(r, "train", "step", "samples", "loss")) for r in (run, undisturbed))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "said"), [(flip, "is altered: its sha256 differs"), (truncate, "bytes"), (Path.unlink, "missing")]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    damage: Any, said: str, preset: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    folders = sorted((run / "checkpoints").glob("[0-9]*"))
    newest, before = folders[-1], folders[-2]
    largest = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    damage(largest)
    done = outside("train", preset, "--out", run)
    assert done.status == 0, done.err
    assert newest.name in done.err and largest.name in done.err and said in done.err, done.err
    assert f"resuming {run} at step {int(before.name)}" in done.err
    assert_same_run(run, undisturbed)
