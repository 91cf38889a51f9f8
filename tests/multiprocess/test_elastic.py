"""A run that loses processes ends in time, says why, and goes on with fewer: its end is that of a run left alone."""

import os
import signal
from pathlib import Path

import pytest
from support.commands import steps_of, write_preset
from support.processes import Job, assert_equal, train_together

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Needs of the batches vary less without `zipf`, and fewer programs are compiled.
SETTINGS = [
    "compute_dtype=float64",
    "data.zipf=0",
    "train.steps=50",
    "train.checkpoint_every=5",
    "train.eval_every=1000",
]


def test_four_processes_then_two_then_one(tmp_path: Path) -> None:
    """One of four is killed; one of two is asked to stop; one process finishes. No sample is lost or trained twice."""
    preset, out = write_preset(tmp_path), tmp_path / "run"
    four = Job(out, preset, [*SETTINGS, "mesh.devices=4", "plan=row_wise"], 4, limit_s=20)
    four.wait_for(lambda: four.step() > 5)
    os.kill(four.worker(2), signal.SIGKILL)
    assert four.wait(60) == [4] * 4, four.tail()
    said = " ".join(four.messages())
    assert "process 2 was ended by SIGKILL" in said and "goes on" in said
    assert "Traceback" not in four.tail()
    two = Job(out, preset, [*SETTINGS, "mesh.devices=2", "plan=table_wise"], 2, limit_s=30)
    two.wait_for(lambda: two.step() > 15)
    two.processes[1].send_signal(signal.SIGTERM)
    assert two.wait(60) == [143] * 2, two.tail()
    stopped_at = max(int(p.name) for p in (out / "checkpoints").glob("[0-9]*"))
    assert 15 < stopped_at < 50
    train_together(1, out, preset, [*SETTINGS, "mesh.devices=3", "plan=column_wise"])
    assert steps_of(out, "train") == list(range(1, 51))
    train_together(1, tmp_path / "alone", preset, [*SETTINGS, "mesh.devices=1"])
    assert_equal(tmp_path / "alone", out, 1e-9)


def test_unequal_data_and_a_stalled_process(tmp_path: Path) -> None:
    """Nobody waits for ever: not for a process whose data differ, and not for one that is stopped."""
    preset, out = write_preset(tmp_path), tmp_path / "run"
    settings = [*SETTINGS, "mesh.devices=2"]
    other = Job(out, preset, settings, 2, 30, lambda k, port: ([], [f"seed={k}", f"data.seed={k}"], {}))
    assert other.wait(60) == [2, 2], other.tail()
    assert any("the processes differ in their settings: config:" in m and "data:" in m for m in other.messages())
    # Here the processes are no forks but new interpreters, which supervisors start again, as outside of the tests.
    job = Job(out, preset, settings, 2, 10, lambda k, port: (["env"], [], {}))
    job.wait_for(lambda: job.step() > 5)
    os.kill(job.worker(1), signal.SIGSTOP)
    assert job.wait(30) == [4, 4], job.tail()
    assert any("process 1 (" in m and "was last heard of" in m for m in job.messages())
    assert any("process 1 gave no sign for 9 s" in m for m in job.messages())
