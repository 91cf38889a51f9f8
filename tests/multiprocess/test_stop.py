"""Ctrl-C and SIGTERM for several processes: all stop after the same step, with a checkpoint and one exit status."""

import os
import signal
from pathlib import Path

import pytest
from support.commands import write_preset
from support.processes import Job

from recjax.train.checkpoint.checkpoints import Checkpoints

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# The clock of process 0 alone brings checkpoints before the end, in which both must take part.
SETTINGS = ["mesh.devices=2", "train.steps=20000", "train.checkpoint_every=1s", "train.eval_every=100000"]


def test_all_stop_by_the_signal_that_one_or_all_of_them_got(tmp_path: Path) -> None:
    preset, out = write_preset(tmp_path), tmp_path / "run"
    steps = Checkpoints(out / "checkpoints", 2).steps
    for wanted, status, name in (("all", 130, "Ctrl-C"), ("one", 130, "Ctrl-C"), ("start", 143, "SIGTERM")):
        job = Job(out, preset, SETTINGS, 2, 30)
        before = max(steps(), default=0)
        if wanted == "start":  # both have joined, none has trained a step
            job.wait_for(lambda job=job: "resuming" in job.logs[0].read_text())
            job.processes[1].send_signal(signal.SIGTERM)
        else:
            job.wait_for(lambda before=before: max(steps(), default=0) > before)
            for k in (0, 1) if wanted == "all" else (1,):
                if wanted == "all":  # a terminal tells all processes of the command
                    os.kill(job.worker(k), signal.SIGINT)
                job.processes[k].send_signal(signal.SIGINT)
        assert job.wait(60) == [status] * 2, job.tail()
        text = job.tail()
        assert "Traceback" not in text and "Exception ignored" not in text, text
        if max(steps()) > before:
            stopped = f"stopped by {name} after step {max(steps())}; its checkpoint is complete"
            assert sum(stopped in message for message in job.messages()) == 2, text
        else:  # its first step may have been done by then
            assert wanted == "start" and any("before a step was trained" in m for m in job.messages()), text
