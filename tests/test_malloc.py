"""A command starts itself anew, once, with an allocator that keeps memory, and huge pages for those who must ask."""

import os
import subprocess
import sys

import pytest

from recjax.parallel import malloc

SCRIPT = """
import os, sys
from pathlib import Path
from recjax.parallel import malloc
malloc._SYSTEM = Path(sys.argv[1])
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), flush=True)
malloc.restart_with_tunables()
print("runs")
"""


BLOCKS = """
import ctypes, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def steps(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        block = libc.malloc(2**25)
        ctypes.memset(block, 1, 2**25)
        libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=lambda: (steps(1), steps(5)))
thread.start()
thread.join()
"""
TUNABLES = "GLIBC_TUNABLES"
KEEP = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824"


@pytest.mark.parametrize(
    ("system", "given", "starts"),
    [
        ("always [madvise] never", None, ["None", f"{KEEP}:glibc.malloc.hugetlb=1"]),
        ("always [madvise] never", "glibc.malloc.check=1", ["glibc.malloc.check=1"]),  # the user's own choice
        ("[always] madvise never", None, ["None", KEEP]),
        (None, None, ["None", KEEP]),
    ],
)
def test_it_restarts_at_most_once(tmp_path, system, given, starts):
    if system is not None:
        (tmp_path / "enabled").write_text(system)
    environment = {key: value for key, value in os.environ.items() if key != TUNABLES} | {"JAX_PLATFORMS": "cpu"}
    if given is not None:
        environment[TUNABLES] = given
    command = [sys.executable, "-c", SCRIPT, tmp_path / "enabled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == "runs"
    assert [line.split()[1] for line in lines] == starts
    assert len({line.split()[0] for line in lines}) == 1  # the same process


def test_a_debugger_keeps_the_process_that_it_started(monkeypatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started again"))
    monkeypatch.setenv("RECJAX_NO_REEXEC", "1")
    malloc.restart_with_tunables()
    assert TUNABLES not in os.environ  # nor for the processes that it starts


PARENT = """
import os, subprocess, sys
from recjax.parallel import malloc
malloc.restart_with_tunables()
malloc.restart_with_tunables()
tell = [sys.executable, "-c", "import os; print(os.environ.get('GLIBC_TUNABLES'), 'RECJAX_RESTARTED' in os.environ)"]
subprocess.run(tell, check=True)
with malloc.passed_on():
    subprocess.run(tell, check=True)
subprocess.run(tell, check=True)
subprocess.run([sys.executable, "-c", sys.argv[1], "/dev/null"], check=True)
"""


@pytest.mark.parametrize("given", [None, "glibc.malloc.tcache_count=7", ""])
def test_children_get_what_the_person_has_set(given):
    """But those that are started for a comparison; and a command sets its own again, once."""
    environment = {key: value for key, value in os.environ.items() if key != TUNABLES}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if given is None else {TUNABLES: given})
    command = [sys.executable, "-c", PARENT, SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    *told, last = done.stdout.splitlines()
    plain, passed, after = told[:3]
    assert plain == after == f"{given} False"
    assert passed == (f"{KEEP} False" if given is None else plain) or passed == f"{KEEP}:glibc.malloc.hugetlb=1 False"
    starts = [line.partition(" ")[2] for line in told[3:]]
    assert starts == (["None", KEEP] if given is None else [given]) and last == "runs"


def test_a_restart_that_another_process_had_is_nobody_elses(monkeypatch) -> None:
    monkeypatch.setenv("RECJAX_RESTARTED", str(os.getppid()))
    monkeypatch.setenv(TUNABLES, "the person's")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started again"))
    malloc.restart_with_tunables()
    assert os.environ[TUNABLES] == "the person's"


def test_a_block_that_was_given_back_costs_no_new_pages() -> None:
    """Also in another thread than the first: a step's 32 MiB are handed to the next one without a page fault."""
    environment = os.environ | {TUNABLES: KEEP}
    done = subprocess.run([sys.executable, "-c", BLOCKS], env=environment, capture_output=True, text=True, check=True)
    first, later = (int(line) for line in done.stdout.split())
    assert later < first / 10  # by default each of the five would need as many as the first
