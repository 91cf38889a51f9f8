"""Invariant 6: a run that is killed anywhere, and resumed by the same command, ends as if nothing had happened.

The runs are real processes of the command line, killed by SIGKILL. Where one ends is compared with an undisturbed run.
"""

import json
import os
import random
import re
import shutil
import time

import numpy as np
import pytest
from support.commands import arrays, assert_refused, inside, lines_of, outside, steps_of
from support.resuming import (
    BATCH,
    DIES,
    EPOCH,
    LONG,
    MARKS,
    ROWS,
    STEPS,
    assert_ended_like,
    kill,
    last_step,
    steps_kept,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def undisturbed(preset, tmp_path_factory):
    """A run that was never killed: its folder."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert outside("train", preset, *LONG, "--out", out).status == 0
    return out


def test_the_undisturbed_run_visits_every_sample_once_an_epoch(undisturbed):
    """The truth that the other tests compare with: positions by arithmetic, and the short batch at an epoch's end."""
    positions = [line["samples"] for line in lines_of(undisturbed, "train")]
    assert (
        positions == [epoch * ROWS + min((step + 1) * BATCH, ROWS) for epoch in range(2) for step in range(EPOCH)]
        and positions[-1] == 2 * ROWS
    )
    assert steps_of(undisturbed, "validation") == [15, 30, 40]


@pytest.mark.wide  # the next two kill at all places that differ
def test_kill_9_at_random_moments(preset, undisturbed, tmp_path):
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    rng = random.Random(seed)
    run = tmp_path / "run"
    command = ("train", preset, *LONG, "--out", run)
    done = 0
    for _ in range(5):
        target = min(done + rng.randint(1, 10), STEPS - 5)
        delay_s = rng.random() * 0.03
        if rng.random() < 0.2:  # at any moment of the start
            target, delay_s = 0, rng.random() * 5
        print(f"killed {delay_s:.3f} s after step {target}")

        def due(target=target, delay_s=delay_s):
            if last_step(run) < target:
                return False
            time.sleep(delay_s)
            return True

        kill(command, due, may_end=target == 0)  # a fast machine may be done before the delay is over
        done = last_step(run)
    print(f"died at step {done} with checkpoints {steps_kept(run)}")
    assert outside(*command).status == 0
    assert_ended_like(run, undisturbed)


def test_kill_9_at_exact_places(preset, undisturbed, tmp_path):
    """Each process of the chain goes on where the one before died, and dies somewhere else."""
    run = tmp_path / "run"
    command = ("train", preset, *LONG, "--out", run)
    for place, resumes_at, dies_at, kept in (
        ("at_line(1)", 0, 0, []),  # before anything is learnt
        ("in_write(1)", 0, 5, []),  # in the middle of the first checkpoint
        ("at_rename(2, done=False)", 0, 10, [5]),  # the second is complete, but has no name yet
        ("at_rename(2, done=True)", 5, 15, [5, 10, 15]),  # the third has its name, and one too many is there
        ("at_line(18)", 15, 17, [10, 15]),  # in the middle of the epoch
        ("at_line(20, half=True)", 15, 19, [10, 15]),  # in the middle of a line, before the epoch's short last batch
        ("at_line(21)", 15, 20, [15, 20]),  # the epoch has ended
        ("at_rename(3, done=True)", 20, 30, [25, 30]),  # an old checkpoint has lost its name and is to be removed
    ):
        assert max(steps_kept(run), default=0) == resumes_at, place
        kill(command, lambda: False, f"{DIES}\n{place}")
        assert last_step(run) == dies_at, place
        assert set(kept) <= set(steps_kept(run)), place
    assert inside(*command).status == 0
    assert_ended_like(run, undisturbed)


# Python that a command runs first: in the given evaluation of a split, it is asked to stop, and hears it.
ASKED = """
import os, signal, threading
from recjax.parallel.stopping import Stop
from recjax.train.trainer import Trainer

splits, taken = [], threading.Event()

def heard(self, *arguments, plain=Stop.heard):
    why = plain(self, *arguments)
    taken.set()
    return why

def eval_inputs(self, split, *options, plain=Trainer.eval_inputs):
    splits.append(split)
    return plain(self, split, *options)

def predict(self, state, stream, plain=Trainer.predict):
    this = splits[-1] == {split!r} and splits.count({split!r}) == {which}
    for number, batch in enumerate(plain(self, state, stream)):
        if number == 0 and this:
            os.kill(os.getpid(), signal.SIGTERM)
            assert taken.wait(60)  # a thread hears it, which may get no core before the evaluation has ended
        yield batch

Stop.heard = heard
Trainer.eval_inputs, Trainer.predict = eval_inputs, predict
"""


def test_sigterm_does_not_wait_for_the_end_of_an_evaluation(preset, undisturbed, tmp_path):
    """It is broken off after a checkpoint, and made up for first when the run goes on."""
    run = tmp_path / "run"
    command = ("train", preset, *LONG, "--out", run)
    for split, which, step, evaluated in (
        ("validation", 1, 15, []),
        ("validation", 1, 15, []),  # again
        ("validation", 3, 40, [15, 30]),  # the last one
        ("test", 1, 40, [15, 30, 40]),
    ):
        done = outside(*command, before=ASKED.format(split=split, which=which))
        assert_refused(done, 143, f"stopped by SIGTERM (after step {step};|before a step .* from step {step},)")
        assert max(steps_kept(run)) == step
        assert steps_of(run, "validation") == evaluated
        if not evaluated:  # killed once it has been made up for, before a checkpoint says so
            outside(*command, before=f"{DIES}\ncheckpoints.Checkpoints.save = lambda *_, **__: die()")
            assert (max(steps_kept(run)), steps_of(run, "validation")) == (step, [15])
    assert inside(*command).status == 0
    assert_ended_like(run, undisturbed)


# Python that a command runs first: its save of a number goes no further than the middle of the arrays, and says so.
BLOCKS = """
import pathlib, threading
from recjax.train.checkpoint import checkpoints

def write(folder, arrays, count=[0], plain=checkpoints.array_store.write):
    count[0] += 1
    if count[0] == {number}:
        plain(folder, {{key: arrays[key] for key in list(arrays)[:1]}})
        pathlib.Path({marker!r}).touch()
        threading.Event().wait()
    return plain(folder, arrays)
checkpoints.array_store.write = write
"""


# Kills within a save are in test_checkpoint_processes.py; that both ways save the same bits, in test_loop.py.
@pytest.mark.parametrize("copy", ["always", pytest.param("never", marks=pytest.mark.wide)])
def test_kill_9_while_a_checkpoint_is_being_written(preset, undisturbed, tmp_path, copy):
    """From a copy, so that training goes on meanwhile, and straight from the devices."""
    run = tmp_path / "run"
    command = ("train", preset, *LONG, f"train.checkpoint_copy={copy}", "--out", run)
    for number, kept in ((1, []), (2, [5]), (3, [10, 15])):
        marker = tmp_path / str(number)
        kill(command, marker.exists, BLOCKS.format(number=number, marker=str(marker)))
        assert steps_kept(run) == kept
        assert any(name.startswith(".unfinished-") for name in os.listdir(run / "checkpoints"))
    assert inside(*command).status == 0
    assert_ended_like(run, undisturbed)


@pytest.fixture(scope="module")
def died(preset, undisturbed, tmp_path_factory):
    """A run that died at step 29, with checkpoints of the steps 20 and 25 and the best one; not to be changed."""
    run = tmp_path_factory.mktemp("died") / "run"
    kill(("train", preset, *LONG, "--out", run), lambda: False, f"{DIES}\nat_line(29)")
    assert last_step(run) == 28 and steps_kept(run)[-2:] == [20, 25]
    return run


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "is altered: its sha256 differs from the manifest's"),
        (lambda file: os.truncate(file, file.stat().st_size // 2), r"is truncated: it has [\d,]+ of [\d,]+ bytes"),
        (os.unlink, "is missing"),
    ],
    ids=["flipped bit", "truncated file", "missing file"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(preset, undisturbed, died, tmp_path, damage, words):
    run = shutil.copytree(died, tmp_path / "run")
    newest = run / "checkpoints" / "00000025"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damage(largest)
    done = inside("train", preset, *LONG, "--out", run)
    assert done.status == 0
    name = re.escape(str(largest.relative_to(newest)))
    told = rf"^checkpoint {newest} is damaged: {name} {words}\. The one before it, of step 20, is used instead"
    assert re.search(told, done.err, re.MULTILINE), done.err
    assert f"resuming {run} at step 20\n" in done.err
    assert_ended_like(run, undisturbed)


def test_no_intact_checkpoint_is_an_error_that_changes_nothing(preset, died, tmp_path):
    run = shutil.copytree(died, tmp_path / "run")
    for step in steps_kept(run):
        flip(run / "checkpoints" / f"{step:08}" / "manifest.json")
    before = (run / "metrics.jsonl").read_bytes()
    done = inside("train", preset, *LONG, "--out", run)
    damaged = [rf"in {step:08}, manifest\.json does not match the checksum" for step in (20, 25)]
    assert_refused(done, 3, "none of the [23] checkpoints in .* is intact", *damaged, "start again with another --out")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_whose_best_checkpoint_is_damaged_gives_the_last_one(preset, undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    best = summary["eval_step"]
    assert best != STEPS, "the last step is best: this test shows nothing"
    manifest = run / "checkpoints" / f"{best:08}" / "manifest.json"
    intact = manifest.read_bytes()
    flip(manifest)
    done = inside("train", preset, *LONG, "--out", run, "--json")
    told = rf"the best step by validation, {best}, cannot be used: checkpoint \S*{best:08} is damaged: manifest\.json"
    assert re.search(rf"{told} .*The results are those of the last step, {STEPS}; ", done.err), done.err
    assert (done.result["eval_step"], done.result["chosen_by"]) == (STEPS, "last step")
    last = inside("eval", run, "--step", STEPS, "--json").result
    assert done.result["eval"].items() <= last.items()
    # What the message promises.
    manifest.write_bytes(intact)
    again = inside("train", preset, *LONG, "--out", run, "--json").result
    assert [again[key] for key in ("eval", "eval_step", "chosen_by")] == [
        summary[key] for key in ("eval", "eval_step", "chosen_by")
    ]


def test_another_mesh_and_another_plan(preset, undisturbed, died, tmp_path):
    run = shutil.copytree(died, tmp_path / "run")
    done = outside("train", preset, *LONG, "--out", run, "mesh.devices=3", "plan=data_parallel")
    assert done.status == 0 and f"resuming {run} at step 25\n" in done.err
    assert steps_of(run, "train") == list(range(1, STEPS + 1))
    ours, theirs = lines_of(run, "train"), lines_of(undisturbed, "train")
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    assert [line["loss"] for line in ours[:25]] == [line["loss"] for line in theirs[:25]]
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-5, atol=0)
    left, right = arrays(run, STEPS), arrays(undisturbed, STEPS)
    assert left.keys() == right.keys()
    assert any((left[key] != right[key]).any() for key in left), "not one bit differs: this was the same mesh"
    for key in left:
        np.testing.assert_allclose(left[key], right[key], rtol=1e-4, atol=1e-5, err_msg=key)
