"""Processes of one's own that call `recjax.fit` together: they are watched over as those of the command line are."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.commands import SMALL, write_preset
from support.processes import environment, free_port

pytestmark = [pytest.mark.full, pytest.mark.multiprocess, pytest.mark.light_compile, pytest.mark.few_programs]

# Two runs of one traced step; in the second, process 1 meets its fate in the callback of a step.
PROGRAM = """
import contextlib, os, signal, sys
import jax
import recjax
from recjax.parallel import distributed
from recjax.train import callbacks
from support import shared_programs

together = contextlib.ExitStack()
together.enter_context(shared_programs.shared())
preset, out, fate, how = sys.argv[1:5]
if how == "join":
    distributed.join(distributed.place())
else:
    address, count, me = (os.environ.pop(f"RECJAX_{name}") for name in ("COORDINATOR", "PROCESSES", "PROCESS"))
    jax.distributed.initialize(address, int(count), int(me))
config = recjax.load(preset, *sys.argv[5:])
recjax.fit(config, out=f"{out}/first")

def describe(trainer, progress, plain=callbacks.describe):
    if distributed.process() == 1:
        exec(fate)
    return plain(trainer, progress)

callbacks.describe = describe
recjax.fit(config, out=f"{out}/second")
if distributed.is_main():  # what was said of the first run's save is forgotten
    assert {key.split("/")[0] for key in distributed.posted("save")} == {"1"}
print("all is done")
"""


@pytest.mark.parametrize(
    ("how", "fate", "status", "said"),
    [
        ("join", "", 0, "all is done"),
        ("initialize", "os.kill(os.getpid(), signal.SIGKILL)", 4, "process 1 .*was last heard of"),
        pytest.param(
            "initialize",
            "raise ValueError('the dog ate it')",
            4,
            "process 1 .*failed in .*: ValueError: the dog",
            marks=pytest.mark.wide,  # test_tiers.py has one that fails
        ),
    ],
)
def test_fit_in_two_processes(how, fate, status, said, tmp_path: Path) -> None:
    port, preset, programs = free_port(), write_preset(tmp_path), []
    for k in range(2):
        programs.append(
            forked.Popen(
                [sys.executable, "-c", PROGRAM, preset, tmp_path, fate, how, *SMALL],
                env=environment(2, k, port, limit_s=10),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outs = [program.communicate(timeout=120)[0] for program in programs]
    assert programs[0].returncode == status, outs[0]
    assert (programs[1].returncode == 0) == (not fate), outs[1]
    assert re.search(said, outs[0]), outs[0]
    assert json.loads((tmp_path / "first/summary.json").read_text())["steps"] == 2
    assert (tmp_path / "second/summary.json").exists() == (not fate)
