"""Forked processes behave as new interpreters do."""

import os
import signal
import subprocess
import sys

import pytest
from support import forked

pytestmark = pytest.mark.full

ENDS = {
    "print('said'); print('told', file=sys.stderr)": (0, "said\n", "told\n"),
    "print('said', end=''); sys.exit(3)": (3, "said", ""),
    "sys.exit('told')": (1, "", "told\n"),
    "import atexit; atexit.register(print, 'last')": (0, "last\n", ""),
    "import os; os.kill(os.getpid(), 9)": (-9, "", ""),
    "import os; print(os.getppid(), *sys.argv[1:], os.getcwd(), os.environ['OURS'])": (0, "{} a b / é\n", ""),
    "import jax; print(*sys.argv, jax.config.jax_platforms)": (0, "-c a b cpu\n", ""),
    "print(sys.stdin.read())": (0, "\n", ""),
}


@pytest.mark.parametrize("how", [forked.Popen, subprocess.Popen])
@pytest.mark.parametrize("program", ENDS)
def test_a_process_ends_as_it_should(program, how):
    status, out, err = ENDS[program]
    command = [sys.executable, "-c", f"import sys\n{program}", "a", "b"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with how(command, cwd="/", env=os.environ | {"OURS": "é"}, **pipes) as process:
        assert process.communicate() == (out.format(os.getpid()), err)
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_dies_of_signals(number):
    program = "import time; print('here', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        process.send_signal(number)
    assert process.returncode == -number


# As a supervisor does: the same command once more, heard through a pipe.
AGAIN = """
import os, subprocess, sys
if "TO" in os.environ:
    os.write(int(os.environ["TO"]), b"heard")
    print(os.getppid(), "flax" in sys.modules, flush=True)
    sys.exit(5)
read, write = os.pipe()
command = [sys.executable, *sys.orig_argv[1:]]
child = subprocess.Popen(command, env=os.environ | {"TO": str(write)}, pass_fds=[write])
os.close(write)
print(os.read(read, 5).decode(), os.read(read, 1), child.wait(), os.getpid())
"""


def test_one_that_starts_itself_again_is_forked_too():
    with forked.Popen([sys.executable, "-c", AGAIN], stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate()
    assert out == f"{process.pid} True\nheard b'' 5 {process.pid}\n"


def test_what_imports_read_makes_a_new_interpreter():
    program = "import jax; print(jax.config.jax_enable_x64, 'flax' in sys.modules)"
    for variables, said in (({}, "False True\n"), ({"JAX_ENABLE_X64": "1"}, "True False\n")):
        command = [sys.executable, "-c", f"import sys\n{program}"]
        with forked.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0] == said
