"""Runs whose checkpoints are increments: killed at random, read by all verbs, and resumed with other settings."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import assert_refused, inside, lines_of, start

from recjax import open_run
from recjax.config import presets
from recjax.data.storage import blocks
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.state import one_version
from recjax.utils.lazy_arrays import load

pytestmark = [
    pytest.mark.full,
    pytest.mark.shared_programs,
    pytest.mark.light_compile(optimised=True),
    pytest.mark.few_programs,
]

# Checkpoints each 5 steps and an evaluation each 15; the best step is not the last.
SETTINGS = (
    "data.rows=3000,300,2000",
    "mesh.devices=2",
    "train.steps=60",
    "train.eval_batch_size=128",
    "train.epochs=3",
    "train.optimizer.learning_rate=0.2",
)
TIER = ("tier.device_bytes=30kB", "tier.dram_bytes=20kB", "train.checkpoint_increments=3")


def tier(folder: Path) -> tuple[str, ...]:
    return (*TIER, f"tier.disk={folder}")


@pytest.fixture(scope="module")
def whole(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all rows on the devices, whose checkpoints are whole: its folder."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = inside("train", preset, *SETTINGS, "--out", out)
    assert done.status == 0, done.err
    return out


@pytest.fixture(scope="module")
def chained(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with increments: its folder."""
    out = tmp_path_factory.mktemp("chained") / "run"
    done = inside("train", preset, *SETTINGS, *tier(out.parent / "scratch"), "--out", out)
    assert done.status == 0, done.err
    return out


def manifests(run: Path) -> dict[int, dict[str, Any]]:
    folders = sorted(folder for folder in (run / "checkpoints").iterdir() if folder.name.isdigit())
    return {int(folder.name): json.loads((folder / "manifest.json").read_text()) for folder in folders}


def bits_of(run: Path, step: int) -> dict[str, bytes]:
    """All arrays of a checkpoint by their names, tables whole."""
    found: dict[str, bytes] = {}

    def walk(path: str, arrays: dict[str, Any]) -> None:
        for key, value in arrays.items():
            if isinstance(value, dict):
                walk(f"{path}/{key}", value)
            else:
                found[f"{path}/{key}"] = np.asarray(value).tobytes()

    with Checkpoints(run / "checkpoints", 2) as checkpoints:
        checkpoints.restore(step, lambda restored: walk("", load(one_version(restored.arrays))))
    return found


def numbers_of(run: Path) -> list[Any]:
    lines = [lines_of(run, split) for split in ("train", "validation", "test")]
    return [[{k: v for k, v in line.items() if k != "samples_per_s"} for line in of_split] for of_split in lines]


def assert_ended_like(run: Path, whole: Path) -> None:
    assert numbers_of(run) == numbers_of(whole)
    summary, expected = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole))
    assert (summary["eval"], summary["eval_step"]) == (expected["eval"], expected["eval_step"])
    for step in manifests(whole):  # the newest ones and the best one
        assert bits_of(run, step) == bits_of(whole, step)


def test_a_run_with_increments_ends_like_one_without(whole: Path, chained: Path) -> None:
    assert_ended_like(chained, whole)
    found = manifests(chained)
    links = {step: [link["step"] for link in of.get("chain", [])] for step, of in found.items()}
    assert [step for step, chain in links.items() if chain], "there are increments"
    assert all(link in links for chain in links.values() for link in chain), "what they need is there"
    best = json.loads((chained / "summary.json").read_text())["eval_step"]
    assert best in links and best not in list(links)[-2:], "the best step is kept, not being one of the newest"
    sizes = {step: sum(what["bytes"] for what in of["files"].values()) for step, of in found.items()}
    step, chain = next((step, chain) for step, chain in links.items() if chain)
    assert sizes[step] < sizes[chain[0]]


def test_all_verbs_read_chains(preset: Path, whole: Path, chained: Path, tmp_path: Path) -> None:
    increments = [step for step, of in manifests(chained).items() if "chain" in of]
    shared = [step for step in manifests(whole) if step in increments]
    assert shared
    prepared = tmp_path / "prepared"
    source = presets.load(str(preset), SETTINGS).data.open()
    splits = {split: [source.read(split, 0)] for split in ("train", "validation", "test")}
    blocks.write_prepared(prepared, "own", source.schema, splits, {})
    for step in shared:
        told = [inside("eval", run, "--step", step, "--json").result for run in (whole, chained)]
        assert told[0] == told[1]
        rows = [open_run(run, step=step).tables for run in (whole, chained)]
        for name in rows[0]:
            tables = [of[name]._array.load().tobytes() for of in rows]
            assert tables[0] == tables[1]
        files = []
        for run in (whole, chained):
            out = tmp_path / f"{run.parent.name} {step}"
            out.mkdir()
            for verb in (
                ("predict", run, "--input", prepared, "--out", out / "scores.csv"),
                ("export", run, "--out", out / "model"),
                ("weights", "export", run, "--format", "torchrec", "--out", out / "weights.npz"),
            ):
                done = inside(*verb, "--step", step)
                assert done.status == 0, done.err
            written = [*(out / "model").glob("tables/*"), out / "scores.csv", out / "weights.npz"]
            files.append({str(path.relative_to(out)): path.read_bytes() for path in written})
        assert files[0] == files[1]
        assert len(files[0]) >= 5


def steps_kept(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints", 2).steps()


@pytest.mark.wide  # `test_chain.py` kills at every place of a save
def test_kill_9_at_ten_random_moments(preset: Path, whole: Path, tmp_path: Path) -> None:
    """Half of them within some milliseconds of a checkpoint's appearing or going."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    rng, run = random.Random(seed), tmp_path / "run"
    command = ("train", preset, *SETTINGS, *tier(tmp_path / "scratch"), "--out", run)
    for kill in range(10):
        names = set(os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else set()
        with start(*command) as process:
            near, delay_s = rng.random() < 0.5, rng.random() * 0.05
            until = time.monotonic() + 4 + 2 * rng.random()
            while process.poll() is None and time.monotonic() < until:
                if (run / "checkpoints").exists():
                    new = set(os.listdir(run / "checkpoints")) - names
                    if near and new:  # also an unfinished one
                        break
                    if len([name for name in new if name.isdigit()]) > 1:
                        break
                time.sleep(0.0005)
            time.sleep(delay_s)
            process.kill()
            process.communicate()
        print(f"kill {kill + 1}: {process.returncode}, checkpoints {steps_kept(run)}")
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        if kill == 4:  # what is there reads well at any moment, from the first to the last
            for step in steps_kept(run):
                bits_of(run, step)
    done = inside(*command)
    assert done.status == 0, done.err
    assert "is damaged" not in done.err
    assert_ended_like(run, whole)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_run_goes_on_from_a_chain_without_tiers_and_without_increments(
    preset: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = ("train", preset, *SETTINGS, "--out", run)
    stop = ("train.steps=20",)
    assert inside(*command, *stop, *tier(tmp_path / "scratch")).status == 0
    assert "chain" in manifests(run)[max(steps_kept(run))]
    done = inside(*command, "train.steps=25", "train.checkpoint_increments=3")
    assert done.status == 0
    assert "train.checkpoint_increments=3 changes nothing, each checkpoint is whole: all rows are on" in done.err
    assert "chain" not in manifests(run)[25]
    assert inside(*command, "train.steps=30", *TIER[:2], f"tier.disk={tmp_path / 'scratch'}").status == 0
    assert "chain" not in manifests(run)[30]
    assert inside(*command, *tier(tmp_path / "scratch")).status == 0
    step = max(steps_kept(whole))
    assert bits_of(run, step) == bits_of(whole, step)


def test_a_negative_number_is_refused(preset: Path, tmp_path: Path) -> None:
    done = inside("train", preset, "train.checkpoint_increments=-1", "--out", tmp_path / "run")
    assert_refused(done, 2, "checkpoint_increments")
