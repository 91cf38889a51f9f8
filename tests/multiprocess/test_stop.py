"""Ctrl-C and SIGTERM for several processes: all stop after the same step, with a checkpoint and one exit status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.commands import write_preset
from support.processes import Job, environment, free_port

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


# Process 1 ends, for a reason of its own, and lingers: before it parts, until process 0 is ready to leave, or after it.
LINGERS = """
import os, signal, sys, time
from recjax.errors import ConfigError
from recjax.parallel import distributed, job, stopping, supervisor, watchdog

if supervisor.PIPE not in os.environ:
    sys.exit(supervisor.supervise(distributed.place()))

def part_late(self, *arguments):
    while '"parts": true' not in distributed.posted("watch").get("0", ""):
        time.sleep(0.01)
    time.sleep(0.5)
    part(self, *arguments)

def outlive(status):
    time.sleep(20)
    os.write(1, b"nobody aborted it")
    leave(status)

def work(watching):
    if distributed.process() == 0:
        time.sleep(60)
    if sys.argv[1] == "before":
        watchdog.Watch.part = part_late
        try:
            with watching.reporting():
                raise ConfigError("a mistake")
        except ConfigError as error:
            return error.exit_status
    os._exit = outlive
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

part, leave = watchdog.Watch.part, os._exit
with stopping.command_line(True, ""):
    job.run(distributed.place(), work)
"""


@pytest.mark.parametrize(("lingers", "statuses"), [("before", [4, 2]), ("after", [143, 143])])
def test_one_that_lingers_has_its_own_status(lingers: str, statuses: list[int]) -> None:
    port = free_port()
    command = [sys.executable, "-c", LINGERS, lingers]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [forked.Popen(command, env=environment(2, k, port, 20), **outputs) for k in range(2)]
    texts = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == statuses, texts
    assert "lost its peers" not in texts[1] and "nobody aborted it" not in texts[1], texts
