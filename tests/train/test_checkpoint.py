"""Checkpoints: bitwise round trips, every kind of damage, kills at any moment, disks that refuse."""

import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from recjax.errors import TrainingError
from recjax.train import array_store, manifest
from recjax.train.checkpoint import Checkpoints


def no_report(text):
    raise AssertionError(text)


def state(step, rows=50):
    """Arrays and meta that follow from the step alone, so that a mixture of two steps shows."""
    rng = np.random.default_rng(step)
    return {
        "tables": {"user": rng.normal(size=(rows, 8)).astype(np.float32), "movie": np.full((7, 8), step, np.float32)},
        "slots": {"user": rng.random(rows)},
        "step": np.array(step, np.int32),
    }, {"position": step * 256}


def save(directory, *steps, keep=9, **options):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, *state(step), **options)


def assert_same(got, expected):
    assert list(got) == list(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(got[key], value)
        else:
            assert type(got[key]) is np.ndarray
            assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
            assert got[key].tobytes() == value.tobytes(), key


def names(directory):
    return sorted(os.listdir(directory))


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# --- round trip ---


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    types = ["bool", "float16", ml_dtypes.bfloat16, "float32", "float64"]
    types += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    arrays = {"by type": {}}
    for dtype in map(np.dtype, types):
        bits = rng.integers(0, 256, size=(5, 3, dtype.itemsize), dtype=np.uint8)  # NaN payloads and all
        array = bits.view(dtype)[..., 0] if dtype.kind != "b" else bits[..., 0] > 127
        arrays["by type"][dtype.name] = {"matrix": array, "scalar": array[2:3, 1].reshape(())}
    arrays |= {
        "special": np.array([np.nan, -0.0, np.inf, 5e-324]),
        "zeros": np.zeros((4, 4), np.float32),
        "negative zeros": np.full((4, 4), -0.0, np.float32),
        "empty": np.zeros((0, 16), np.float32),
        "nothing": {},
        "only empty": {"a": np.zeros((3, 0), np.int32)},
        "strided": np.arange(24.0).reshape(4, 6)[::2, ::-1],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        # Orbax joins keys with dots: these four would overwrite each other.
        "a.b": np.array(1),
        "a": {"b": np.array(2), "b.c": np.array(3), "b/c": np.array(4), "b%2Fc": np.array(5)},
        "a%2Eb": np.array(6),
        "Ünï/../code": np.array(7),
    }
    meta = {"rows": {"user": 50}, "best": {"auc": 0.1 + 0.2, "at": None}, "seed": 2**63, "name": "Ü", "on": [True]}
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(123, arrays, meta)
    restored = Checkpoints(tmp_path, 2).newest(no_report)
    assert restored.step == 123 and restored.meta == meta
    assert_same(restored.arrays, arrays)


def test_arrays_larger_than_a_chunk_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(array_store, "_CHUNK_BYTES", 1000)
    save(tmp_path, 1)
    assert_same(Checkpoints(tmp_path, 2).newest(no_report).arrays, state(1)[0])


def test_restored_arrays_are_the_caller_s_own(tmp_path):
    save(tmp_path, 1)
    first = Checkpoints(tmp_path, 2).newest(no_report)
    first.arrays["tables"]["user"][:] = 0
    assert_same(Checkpoints(tmp_path, 2).newest(no_report).arrays, state(1)[0])


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "no", 2).newest(no_report) is None
    assert Checkpoints(tmp_path, 2).newest(no_report) is None
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": [1, 2]}, "'a' is a list"),
        ({"a": {"b": np.float32(1)}}, "'b' is a float32"),
        ({1: np.zeros(2)}, "not 1"),
        ({"": np.zeros(2)}, "non-empty"),
        ({"a": np.array(["x"])}, "dtype <U1"),
        ({"a": np.array([object()])}, r"dtype \|O"),
        ({"a": np.zeros(2, ">f4")}, "dtype >f4"),
        ({"a": np.zeros(2, np.complex64)}, "dtype <c8"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_once(tmp_path, arrays, words):
    with Checkpoints(tmp_path, 2) as checkpoints:
        with pytest.raises(TypeError, match=words):
            checkpoints.save(1, arrays, {})
        with pytest.raises(TypeError):
            checkpoints.save(1, *state(1)[:1], {"x": object()})
    assert names(tmp_path) == []


def test_keep_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        Checkpoints(tmp_path, 1)


# --- which are kept ---


def test_the_newest_are_kept_and_the_pinned_one(tmp_path):
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step, pinned, expected in (
            (10, None, [10]),
            (20, 20, [10, 20]),
            (30, 20, [20, 30]),
            (40, 20, [20, 30, 40]),
            (50, 20, [20, 40, 50]),
            (60, 60, [50, 60]),
            (70, 60, [60, 70]),
            (80, None, [70, 80]),
        ):
            checkpoints.save(step, *state(step), pinned=pinned)
            checkpoints.wait()
            assert checkpoints.steps() == expected
            assert names(tmp_path) == [f"{s:08}" for s in expected]


def test_steps_sort_as_numbers(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000)
    assert Checkpoints(tmp_path, 2).steps() == [99_999_999, 100_000_000]
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 100_000_000


def test_the_old_one_goes_only_when_the_new_one_is_complete(tmp_path, monkeypatch):
    save(tmp_path, 10, 20, keep=2)
    renames, rename = [], os.rename

    def watch(source, target):
        if Path(target).name == "00000030":
            assert names(tmp_path)[-2:] == ["00000010", "00000020"]
        if Path(target).parent == tmp_path:
            renames.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watch)
    save(tmp_path, 30, keep=2)
    assert names(tmp_path) == ["00000020", "00000030"] and renames[0] == "00000030"


def test_a_step_saved_again_replaces_the_first(tmp_path):
    save(tmp_path, 10, 20)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(20, {"x": np.array(5)}, {"second": True})
    assert names(tmp_path) == ["00000010", "00000020"]
    restored = Checkpoints(tmp_path, 2).newest(no_report)
    assert restored.meta == {"second": True} and restored.arrays == {"x": np.array(5)}


def test_a_replaced_one_serves_while_its_successor_has_no_name_yet(tmp_path):
    save(tmp_path, 10, 20)
    os.rename(tmp_path / "00000020", tmp_path / "00000020.replaced")  # killed between the two renames
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 20
    save(tmp_path, 20)
    assert names(tmp_path) == ["00000010", "00000020"]
    shutil.copytree(tmp_path / "00000010", tmp_path / "00000010.replaced")  # killed after the second
    (tmp_path / "00000010.replaced" / "manifest.json").unlink()
    assert Checkpoints(tmp_path, 2).restore(10).step == 10
    save(tmp_path, 30)
    assert names(tmp_path) == ["00000010", "00000020", "00000030"]


def test_going_back_to_an_earlier_one_drops_the_later_course(tmp_path):
    save(tmp_path, 10, 20, 30, 40)
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert checkpoints.restore(20).step == 20
        assert checkpoints.steps() == [10, 20, 30, 40], "reading changes nothing"
        checkpoints.save(25, *state(25))
    assert Checkpoints(tmp_path, 3).steps() == [10, 20, 25]


def test_leftovers_are_never_read_and_swept_by_the_next_save_only(tmp_path):
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "00000010", tmp_path / ".unfinished-00000099-abcd")
    (tmp_path / "notes.txt").write_text("the user's own")
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.newest(no_report).step == 10 and checkpoints.steps() == [10]
    assert ".unfinished-00000099-abcd" in names(tmp_path)
    save(tmp_path, 20)
    assert names(tmp_path) == ["00000010", "00000020", "notes.txt"]


# --- damage ---


def damage(kind, path):
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "emptied":
        os.truncate(path, 0)
    elif kind == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind == "extra":
        path.with_name(path.name + "-extra").write_bytes(b"")
    else:
        data = bytearray(path.read_bytes())
        at = {"first bit": 0, "middle bit": len(data) * 4, "last bit": len(data) * 8 - 1}[kind]
        data[at // 8] ^= 1 << (at % 8)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "kind", ["missing", "truncated", "emptied", "longer", "extra", "first bit", "middle bit", "last bit"]
)
def test_any_damage_to_any_file_is_named_and_the_one_before_is_used(tmp_path, kind):
    save(tmp_path / "good", 10, 20)
    tried = 0
    for name in files_of(tmp_path / "good" / "00000020"):
        directory = tmp_path / "damaged"
        shutil.copytree(tmp_path / "good", directory)
        before = (directory / "00000020" / name).stat().st_size
        damage(kind, directory / "00000020" / name)
        reports = []
        restored = Checkpoints(directory, 2).newest(reports.append)
        assert restored.step == 10, (name, kind)
        assert_same(restored.arrays, state(10)[0])
        (text,) = reports
        assert str(directory / "00000020") in text and "step 10, is used instead" in text and "\n" not in text
        if name.startswith("state/"):
            size = f"{before:,}"
            words = {
                "missing": f"{name} is missing",
                "truncated": f"{name} is truncated: it has {before // 2:,} of {size} bytes",
                "emptied": f"{name} is truncated: it has 0 of {size} bytes",
                "longer": f"{name} has {before + 1:,} bytes instead of {size}",
                "extra": f"{name}-extra is not in the manifest",
            }
            assert words.get(kind, f"{name} is altered: its sha256 differs") in text
        else:
            assert name in text
        with pytest.raises(TrainingError, match=r"00000020 is damaged: .*; the others there: 10\."):
            Checkpoints(directory, 2).restore(20)
        shutil.rmtree(directory)
        tried += 1
    assert tried >= 6, "manifest, its checksum, and Orbax's own files"


def test_a_file_that_the_disk_cannot_read_is_damage(tmp_path, monkeypatch):
    save(tmp_path, 10, 20)

    def bad_sector(file, algorithm):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(manifest.hashlib, "file_digest", bad_sector)
        with pytest.raises(TrainingError, match="cannot be read: Input/output error"):
            Checkpoints(tmp_path, 2).restore(20)


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    save(tmp_path, 10)
    for name in ("manifest.json", "manifest.sha256"):
        path = tmp_path / "00000010" / name
        data = path.read_bytes()
        for bit in random.Random(0).sample(range(len(data) * 8), 200):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            with pytest.raises(manifest.Damage, match="manifest.json does not match"):
                manifest.verify(tmp_path / "00000010")
        path.write_bytes(data)
    manifest.verify(tmp_path / "00000010")


def test_the_checksum_file_is_what_sha256sum_checks(tmp_path):
    save(tmp_path, 10)
    subprocess.run(["sha256sum", "-c", "--quiet", "manifest.sha256"], cwd=tmp_path / "00000010", check=True)
    content = json.loads((tmp_path / "00000010" / "manifest.json").read_text())
    for name, facts in content["files"].items():
        line = f"{facts['sha256']}  {name}\n"
        subprocess.run(["sha256sum", "-c", "--quiet"], input=line, cwd=tmp_path / "00000010", check=True, text=True)


def test_several_damaged_ones_are_each_reported_and_then_dropped(tmp_path):
    save(tmp_path, 10, 20, 30)
    (tmp_path / "00000030" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "00000020" / "state")
    reports = []
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.newest(reports.append).step == 10
        assert ["00000030 is damaged: manifest.json is missing" in reports[0], "00000020" in reports[1]] == [True] * 2
        assert "state/_CHECKPOINT_METADATA is missing; state/_METADATA is missing; " in reports[1]
        assert re.search(r"; and \d+ more\. The one before", reports[1])
        assert checkpoints.steps() == [10, 20, 30]
        # Neither may count as one of the two newest, or only one good checkpoint would be left.
        checkpoints.save(40, *state(40))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 40]
        checkpoints.save(50, *state(50))
    assert Checkpoints(tmp_path, 2).steps() == [40, 50]


def test_a_damaged_one_that_is_saved_again_counts_again(tmp_path):
    save(tmp_path, 10, 20)
    (tmp_path / "00000020" / "manifest.json").unlink()
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.newest(lambda _: None).step == 10
        checkpoints.save(20, *state(20))
        checkpoints.save(30, *state(30))
        checkpoints.wait()
        assert checkpoints.steps() == [20, 30]
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 30


def test_all_damaged_is_an_error_that_names_them(tmp_path):
    save(tmp_path, 10, 20)
    (tmp_path / "00000010" / "manifest.sha256").unlink()
    (tmp_path / "00000020" / "state" / "_METADATA").unlink()
    with pytest.raises(TrainingError) as error:
        Checkpoints(tmp_path, 2).newest(no_report)
    text = str(error.value)
    assert "none of the 2 checkpoints" in text and str(tmp_path) in text and "\n" not in text
    assert "in 00000020, state/_METADATA is missing; in 00000010, manifest.sha256 is missing" in text
    assert "backup" in text and "--out" in text
    assert names(tmp_path) == ["00000010", "00000020"], "nothing is deleted"


def test_a_step_that_is_not_there_lists_those_that_are(tmp_path):
    save(tmp_path, 10, 20)
    with pytest.raises(TrainingError, match=r"no checkpoint of step 15; the steps that it has: 10, 20\."):
        Checkpoints(tmp_path, 2).restore(15)
    with pytest.raises(TrainingError, match=r"has: none\."):
        Checkpoints(tmp_path / "no", 2).restore(15)


def rewrite_manifest(folder, change):
    """A manifest with a right checksum and wrong content: an attacker's or another version's."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    text = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_bytes(manifest._checksum_line(text))


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "state/../../secret"])
def test_a_manifest_must_not_reach_outside(tmp_path, name):
    save(tmp_path, 10)
    rewrite_manifest(tmp_path / "00000010", lambda content: content["files"].update({name: {"bytes": 1}}))
    with pytest.raises(TrainingError, match="lists '.*', which lies outside the checkpoint"):
        Checkpoints(tmp_path, 2).restore(10)


def test_another_format_is_no_damage(tmp_path):
    save(tmp_path, 10, 20)
    rewrite_manifest(tmp_path / "00000020", lambda content: content.update(format=2))
    with pytest.raises(TrainingError, match=r"00000020 has format 2, but .* reads format 1"):
        Checkpoints(tmp_path, 2).newest(no_report)


def test_a_renamed_folder_and_arrays_of_another_shape_are_damage(tmp_path):
    save(tmp_path, 10, 20)
    os.rename(tmp_path / "00000020", tmp_path / "00000030")
    with pytest.raises(TrainingError, match="its manifest is of step 20"):
        Checkpoints(tmp_path, 2).restore(30)
    rewrite_manifest(tmp_path / "00000010", lambda content: content["arrays"].update(step="int32[2]"))
    with pytest.raises(TrainingError, match=r"array 'step' should be int32\[2\]"):
        Checkpoints(tmp_path, 2).restore(10)


def test_what_a_run_that_goes_on_removes_is_no_damage(tmp_path, monkeypatch):
    """While 20 is read, the run saves 30 and 40 and removes it."""
    save(tmp_path, 10, 20)
    verify = manifest.verify

    def slow(folder):
        if folder.name == "00000020":
            save(tmp_path, 30, 40, keep=2)
        return verify(folder)

    monkeypatch.setattr(manifest, "verify", slow)
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 40
    shutil.rmtree(tmp_path)
    save(tmp_path, 10, 20)
    with pytest.raises(TrainingError, match="no checkpoint of step 20; the steps that it has: 30, 40"):
        Checkpoints(tmp_path, 2).restore(20)


# --- in the background ---


def test_a_save_returns_at_once_and_the_next_one_waits(tmp_path, monkeypatch):
    go, write, running = threading.Event(), array_store.write, []

    def slow(folder, arrays):
        running.append(threading.current_thread().name)
        assert go.wait(10)
        write(folder, arrays)

    monkeypatch.setattr(array_store, "write", slow)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(10, *state(10))
        assert checkpoints.steps() == []
        second = threading.Thread(target=checkpoints.save, args=(20, *state(20)))
        second.start()
        time.sleep(0.1)
        assert second.is_alive() and len(running) == 1
        go.set()
        second.join()
        assert checkpoints.steps()[0] == 10
    assert checkpoints.steps() == [10, 20]
    assert all(name.startswith("checkpoint") for name in running)
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())


def test_meta_is_taken_over_before_save_returns(tmp_path):
    meta = {"position": [1]}
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(10, {"x": np.array(1)}, meta)
        meta["position"][0] = 2
    assert Checkpoints(tmp_path, 2).newest(no_report).meta == {"position": [1]}


def test_an_error_of_the_background_comes_once_and_the_next_save_works(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step, call in ((20, "save"), (30, "wait"), (40, "close"), (50, "newest"), (60, "restore")):
        checkpoints = Checkpoints(tmp_path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(array_store, "write", full)
            checkpoints.save(step, *state(step))
            arguments = {"save": (99, *state(99)), "newest": (no_report,), "restore": (10,)}.get(call, ())
            with pytest.raises(TrainingError, match="No space left on device"):
                getattr(checkpoints, call)(*arguments)
        assert names(tmp_path) == ["00000010"]
        checkpoints.close()
    save(tmp_path, 70)
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 70


def test_an_error_in_the_body_is_not_hidden_by_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "seal", lambda *_: os.mkdir("/dev/null/x"))
    with pytest.raises(ZeroDivisionError) as error, Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(10, *state(10))
        raise ZeroDivisionError
    assert "Not a directory" in error.value.__notes__[0]


def test_all_is_flushed_before_the_name_is_given(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(Path(b).name), rename(a, b)))
    save(tmp_path / "run" / "checkpoints", 10)
    directory = tmp_path / "run" / "checkpoints"
    named = events.index("00000010")
    inside = [directory / "00000010", *(directory / "00000010").rglob("*")]
    assert len(inside) > 8
    for path in inside:
        assert path.stat().st_ino in events[:named], path
    assert directory.stat().st_ino in events[named:] and (tmp_path / "run").stat().st_ino in events


# --- kills and refusals, in real processes ---

WRITER = """
import itertools, pathlib, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Checkpoints, state
with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    checkpoints.save(1, *state(1, 20_000))
    checkpoints.wait()
    print("ready", flush=True)
    input()
    for step in itertools.count(2):
        checkpoints.save(step, *state(step, 20_000), pinned=step // 5 * 5)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_complete_newest_checkpoint(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / str(i)), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    unfinished = 0
    for i, writer in enumerate(writers):
        with writer:
            assert writer.stdout.readline() == "ready\n"
            writer.stdin.write("go\n")
            writer.stdin.flush()
            time.sleep(random.uniform(0.02, 0.3))
            os.kill(writer.pid, signal.SIGKILL)
        left = names(tmp_path / str(i))
        unfinished += any(name.startswith(".unfinished-") for name in left)
        with Checkpoints(tmp_path / str(i), 2) as checkpoints:
            restored = checkpoints.newest(no_report)
            assert restored.step == max(int(name[:8]) for name in left if name[0] != ".")
            expected, meta = state(restored.step, 20_000)
            assert_same(restored.arrays, expected)
            assert restored.meta == meta
            checkpoints.save(restored.step + 1, *state(restored.step + 1))
        assert not any(name.startswith(".") for name in names(tmp_path / str(i)))
    assert unfinished, "not one kill fell into a save: this test shows nothing"


FULL = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Checkpoints, state
with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
    checkpoints.save(10, *state(10))
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoints.save(20, *state(20, 20_000))
"""


def test_a_full_disk_is_one_paragraph_and_leaves_the_checkpoint_before(tmp_path):
    """A real refusal by the kernel in the middle of a write: a limit on file size needs no mount and no root."""
    code = [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"recjax.errors.TrainingError: cannot write {tmp_path}/00000020: File too large; it needs")
    needed = array_store.size_bytes(state(20, 20_000)[0])
    assert f"it needs {needed:,} bytes" in last and "are free there" in last and "Free some space" in last
    assert "absl" not in done.stderr and "_SignalingThread" not in done.stderr, "Orbax logs no tracebacks of its own"
    assert names(tmp_path) == ["00000010"]
    assert Checkpoints(tmp_path, 2).newest(no_report).step == 10


FORBIDDEN = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Checkpoints, state
import orbax.checkpoint
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    if sys.argv[3] == "write":
        with Checkpoints(pathlib.Path(sys.argv[1]), 2) as checkpoints:
            checkpoints.save(20, *state(20))
    else:
        Checkpoints(pathlib.Path(sys.argv[1]), 2).newest(print)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("what", ["write", "read folder", "read file"])
def test_no_permission_is_one_paragraph(what):
    with tempfile.TemporaryDirectory() as top:  # not tmp_path, whose parents another user may not enter
        os.chmod(top, 0o755)
        directory = Path(top) / "checkpoints"
        save(directory, 10)
        target = {"read file": directory / "00000010" / "state" / "_METADATA"}.get(what, directory)
        mode = stat.S_IMODE(target.stat().st_mode)
        os.chmod(target, {"write": 0o555, "read folder": 0o311, "read file": 0o200}[what])
        code = [sys.executable, "-c", FORBIDDEN, str(directory), str(Path(__file__).parent), what[:5].strip()]
        done = subprocess.run(code, capture_output=True, text=True, check=True)
        os.chmod(target, mode)
        if what == "write":
            expected = f"TrainingError cannot write {directory}/00000020: Permission denied. Make the folder writable"
        else:
            expected = f"TrainingError cannot read {target}: Permission denied. Make the run folder readable"
        assert done.stdout.startswith(expected) and done.stdout.count("\n") == 1, done.stdout + done.stderr
        assert names(directory) == ["00000010"]
