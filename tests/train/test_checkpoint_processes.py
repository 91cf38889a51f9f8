"""Checkpoints in real processes: kills within a save, and disks that refuse."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import checkpoints as checkpoint_support
from support import forked
from support.checkpoints import assert_same, in_memory, names, no_report, save, state

from recjax.train.checkpoint import array_store
from recjax.train.checkpoint.checkpoints import Checkpoints

pytestmark = pytest.mark.full

TESTS = str(Path(checkpoint_support.__file__).parents[1])


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in a fork, to its end."""
    command = [sys.executable, "-c", program, *arguments]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# Saves three steps and goes no further than a place in the third save.
WRITER = """
import os, pathlib, shutil, sys, threading
sys.path.insert(0, sys.argv[2])
from support.checkpoints import Checkpoints, state
from recjax.train.checkpoint import array_store, manifest

def here(*_):
    print("there", flush=True)
    threading.Event().wait()

def half(folder, arrays, write=array_store.write):
    write(folder, {"tables": arrays["tables"]})
    here()

def rename(source, target, plain=os.rename):
    named = pathlib.Path(target) == pathlib.Path(sys.argv[1]) / "00000003"  # Orbax renames too
    if named and place == "before its name":
        here()
    plain(source, target)
    if named:
        here()

with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, *state(step, 20_000))
    checkpoints.wait()
    place = sys.argv[3]
    if place == "before its arrays":
        array_store.write = here
    elif place == "among its arrays":
        array_store.write = half
    elif place == "before its manifest":
        manifest.seal = here
    elif place in ("before its name", "after its name"):
        os.rename = rename
    elif place == "before an old one goes":
        shutil.rmtree = here
    checkpoints.save(3, *state(3, 20_000))
"""


def test_kill_9_within_a_save_leaves_a_complete_newest_checkpoint(tmp_path):
    places = {
        "before its arrays": 2,
        "among its arrays": 2,
        "before its manifest": 2,
        "before its name": 2,
        "after its name": 3,
        "before an old one goes": 3,
    }
    writers = {}
    for place in places:
        command = [sys.executable, "-c", WRITER, str(tmp_path / place), TESTS, place]
        writers[place] = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    for place, newest in places.items():
        with writers[place] as writer:
            assert writer.stdout.readline() == "there\n"
            os.kill(writer.pid, signal.SIGKILL)
        left = names(tmp_path / place)
        assert any(name.startswith(".unfinished-") for name in left) == (place != "after its name"), place
        with Checkpoints(tmp_path / place, 2) as checkpoints:
            restored = checkpoints.newest(no_report, in_memory)
            assert restored.step == newest == max(int(name[:8]) for name in left if name[0] != "."), place
            expected, meta = state(newest, 20_000)
            assert_same(restored.arrays, expected)
            assert restored.meta == meta
            checkpoints.save(newest + 1, *state(newest + 1))
        assert names(tmp_path / place) == [f"{newest:08}", f"{newest + 1:08}"], place


FULL = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[2])
from support.checkpoints import Checkpoints, in_memory, state
with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    checkpoints.save(10, *state(10))
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoints.save(20, *state(20, 20_000))
"""


def test_a_full_disk_is_one_paragraph_and_leaves_the_checkpoint_before(tmp_path):
    """A real refusal by the kernel in the middle of a write: a limit on file size needs no mount and no root."""
    done = run(FULL, str(tmp_path), TESTS)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"recjax.errors.TrainingError: cannot write {tmp_path}/00000020: File too large; it needs")
    needed = array_store.size_bytes(state(20, 20_000)[0])
    assert f"it needs {needed:,} bytes" in last and "are free there" in last and "Free some space" in last
    assert "absl" not in done.stderr and "_SignalingThread" not in done.stderr, "Orbax logs no tracebacks of its own"
    assert names(tmp_path) == ["00000010"]
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 10


FORBIDDEN = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[2])
from support.checkpoints import Checkpoints, in_memory, state
import orbax.checkpoint
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    if sys.argv[3] == "write":
        with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
            checkpoints.save(20, *state(20))
    else:
        Checkpoints(pathlib.Path(sys.argv[1]), 2).newest(print, in_memory)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("what", ["write", "read folder", "read state", "read file"])
def test_no_permission_is_one_paragraph(what):
    with tempfile.TemporaryDirectory() as top:  # not tmp_path, whose parents another user may not enter
        os.chmod(top, 0o755)
        directory = Path(top) / "checkpoints"
        save(directory, 10)
        inside = directory / "00000010" / "state"
        target = {"read state": inside, "read file": inside / "_METADATA"}.get(what, directory)
        mode = stat.S_IMODE(target.stat().st_mode)
        os.chmod(target, {"write": 0o555, "read file": 0o200}.get(what, 0o311))
        done = run(FORBIDDEN, str(directory), TESTS, what[:5].strip())
        assert done.returncode == 0, done.stderr
        os.chmod(target, mode)
        if what == "write":
            expected = f"TrainingError cannot write {directory}/00000020: Permission denied. Make the folder writable"
        else:
            expected = f"TrainingError cannot read {target}: Permission denied. Make the run folder readable"
        assert done.stdout.startswith(expected) and done.stdout.count("\n") == 1, done.stdout + done.stderr
        assert names(directory) == ["00000010"]


MANY = """
import os, pathlib, resource, sys
sys.path.insert(0, sys.argv[2])
from support.checkpoints import Checkpoints, state
large, small = state(20, 20_000)[0], state(10)[0]
arrays = {f"t{i}": large if i % 5 == 0 else small for i in range(20)}
with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (300, 1500, 4000, 100_000, 1_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
        try:
            checkpoints.save(20, arrays, {})
            checkpoints.wait()
        except Exception as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, whole)
            print(type(error).__name__, "File too large" in str(error), os.listdir(sys.argv[1]))
"""


def test_nothing_writes_on_or_complains_after_a_save_that_failed(tmp_path):
    """Many arrays are under way when the first fails; what Orbax or TensorStore do later would show on stderr."""
    done = run(MANY, str(tmp_path), TESTS)
    assert done.stdout == "TrainingError True []\n" * 5
    assert done.stderr == ""
    assert done.returncode == 0


LARGE = """
import pathlib, sys
import jax
from recjax.utils import lazy_arrays
from recjax.embedding.buffers import initialise
from recjax.embedding.collection import export_tables, import_tables
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.bind import bind
from recjax.embedding.plan import make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import MeshConfig, make_mesh
from recjax.train.checkpoint.checkpoints import Checkpoints

lazy_arrays.PART_BYTES = 2**23
MIB = 2**20
rows = int(sys.argv[2]) * MIB // (17 * 4)
tables = tuple(TableSpec(f"t{i}", rows * share // 16, 16, RowWiseAdagrad()) for i, share in enumerate((11, 5)))
features = tuple(FeatureSpec(t.name, t.name) for t in tables)
devices = int(sys.argv[3])
mesh = make_mesh(MeshConfig(devices, "cpu"))
bound = bind(make_plan("row_wise", tables), tables, features, devices)

def memory(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))

def measured(action):
    before = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    result = jax.block_until_ready(action())
    print(memory("VmHWM") - before, memory("VmRSS") - before)
    return result

with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    one = measured(lambda: initialise(bound, mesh, 0))
    def save():
        checkpoints.save(1, export_tables(bound, *one), {})
        checkpoints.wait()
    measured(save)
    del one
    for _ in range(2):
        one = measured(lambda: checkpoints.restore(1, lambda restored: import_tables(bound, mesh, restored.arrays)))
        del one
"""


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_large_tables_need_memory_for_themselves_and_a_few_parts(tmp_path, devices):
    """Initialisation, a save and restores of 384 MiB in parts of 8 MiB: a copy of the larger table is 264 MiB.

    By the second restore all programs are compiled. Then it may take no copy of one device's rows either: 120 MiB.
    """
    size, few = 384, 200  # the compiled programs take some 100 MiB, too
    code = [sys.executable, "-c", LARGE, str(tmp_path), str(size), str(devices)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    initialised, saved, restored, again = ([int(x) for x in line.split()] for line in done.stdout.splitlines())
    assert size <= initialised[0] < size + few and size <= initialised[1]
    assert saved[0] < few
    assert size <= restored[0] < size + few
    assert again[0] < size + 100
