"""Checkpoints: bitwise round trips, which of them are kept, and what the background thread does."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.checkpoints import assert_same, in_memory, names, no_report, save, state

from recjax.errors import TrainingError
from recjax.train.checkpoint import array_store, manifest
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import LazyArray, block_of


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
    restored = Checkpoints(tmp_path, 2).newest(no_report, in_memory)
    assert restored.step == 123 and restored.meta == meta
    assert_same(restored.arrays, arrays)


def test_arrays_larger_than_a_chunk_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 1000)
    save(tmp_path, 1)
    assert_same(Checkpoints(tmp_path, 2).newest(no_report, in_memory).arrays, state(1)[0])


def test_lazy_arrays_are_written_and_read_by_parts(tmp_path, monkeypatch):
    """Two parts are under way at most, and they are read in order; the files are those of the same arrays in memory."""
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 1000)
    rows, read = np.random.default_rng(0).normal(size=(211, 16)).astype(np.float32), []

    def part(index):
        read.append(index[0].start)
        return rows[index].copy()

    block = block_of(rows.shape, rows.dtype)
    assert block == (16, 16)  # 14 blocks of 16 rows, although 211 is a prime
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, {"t": {"rows": LazyArray(rows.shape, rows.dtype, part, block)}}, {})
        checkpoints.wait()
        assert read == list(range(0, 211, 16))
        checkpoints.save(2, {"t": {"rows": rows}}, {})

    def kept(restored):
        array = restored.arrays["t"]["rows"]
        assert isinstance(array, LazyArray) and array.block == block
        assert array.read((slice(30, 40), slice(3, 5))).tobytes() == rows[30:40, 3:5].tobytes()
        return array.load()

    for step in (1, 2):
        assert Checkpoints(tmp_path, 2).restore(step, kept).tobytes() == rows.tobytes()


def test_orbax_reads_ours_and_we_read_orbax_s(tmp_path):
    """With its own defaults for zarr chunks, with compression and chunks of its choice."""
    arrays, meta = state(5, rows=1009)
    save(tmp_path, 5)
    theirs = ocp.PyTreeCheckpointer().restore(tmp_path / "00000005" / "state")
    jax.tree.map(np.testing.assert_array_equal, theirs, state(5)[0])
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2000), arrays)  # single rows, for 1009 is a prime
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", arrays, save_args=chunks)
    read = array_store.read(tmp_path / "theirs", array_store.describe(arrays))
    assert read["tables"]["user"].block == (1, 8)
    assert_same(lazy_arrays.load(read), arrays)


def test_restored_arrays_are_the_caller_s_own(tmp_path):
    save(tmp_path, 1)
    first = Checkpoints(tmp_path, 2).newest(no_report, in_memory)
    first.arrays["tables"]["user"][:] = 0
    assert_same(Checkpoints(tmp_path, 2).newest(no_report, in_memory).arrays, state(1)[0])


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "no", 2).newest(no_report, in_memory) is None
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory) is None
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


def test_the_newest_are_kept_and_the_pinned_one(tmp_path):
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step, pinned, expected in (
            (10, None, [10]),
            (20, 20, [10, 20]),
            (30, 20, [20, 30]),
            (40, 20, [20, 30, 40]),
            (50, 20, [20, 40, 50]),
            (60, 60, [20, 50, 60]),  # 50 still pins 20
            (70, 60, [60, 70]),
            (80, None, [60, 70, 80]),
            (90, None, [80, 90]),
        ):
            checkpoints.save(step, *state(step), pinned=pinned)
            checkpoints.wait()
            assert checkpoints.steps() == expected
            assert names(tmp_path) == [f"{s:08}" for s in expected]


def test_steps_sort_as_numbers(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000)
    assert Checkpoints(tmp_path, 2).steps() == [99_999_999, 100_000_000]
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 100_000_000


def test_the_old_one_goes_only_when_the_new_one_is_complete(tmp_path, monkeypatch):
    save(tmp_path, 10, 20, keep=2)
    renames, rename = [], os.rename

    def watch(source, target):
        if Path(target).name == "00000030":
            assert names(tmp_path)[-2:] == ["00000010", "00000020"]
        if Path(target).parent == tmp_path:
            renames.append(Path(target).name)
        rename(source, target)

    deleted, delete = [], shutil.rmtree
    monkeypatch.setattr(os, "rename", watch)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (deleted.append(path.name), delete(path)))
    save(tmp_path, 30, keep=2)
    assert names(tmp_path) == ["00000020", "00000030"] and renames[0] == "00000030"
    # Half deleted under its own name it would pass for a damaged checkpoint.
    assert len(deleted) == 1 and deleted[0].startswith(".unfinished-00000010-")


def test_a_step_saved_again_replaces_the_first(tmp_path):
    save(tmp_path, 10, 20)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(20, {"x": np.array(5)}, {"second": True})
    assert names(tmp_path) == ["00000010", "00000020"]
    restored = Checkpoints(tmp_path, 2).newest(no_report, in_memory)
    assert restored.meta == {"second": True} and restored.arrays == {"x": np.array(5)}


def test_a_replaced_one_serves_while_its_successor_has_no_name_yet(tmp_path):
    save(tmp_path, 10, 20)
    os.rename(tmp_path / "00000020", tmp_path / "00000020.replaced")  # killed between the two renames
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 20
    save(tmp_path, 20)
    assert names(tmp_path) == ["00000010", "00000020"]
    shutil.copytree(tmp_path / "00000010", tmp_path / "00000010.replaced")  # killed after the second
    (tmp_path / "00000010.replaced" / "manifest.json").unlink()
    assert Checkpoints(tmp_path, 2).restore(10, in_memory).step == 10
    save(tmp_path, 30)
    assert names(tmp_path) == ["00000010", "00000020", "00000030"]


def test_going_back_to_an_earlier_one_drops_the_later_course(tmp_path):
    save(tmp_path, 10, 20, 30, 40)
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert checkpoints.restore(20, in_memory).step == 20
        assert checkpoints.steps() == [10, 20, 30, 40], "reading changes nothing"
        checkpoints.save(25, *state(25))
    assert Checkpoints(tmp_path, 3).steps() == [10, 20, 25]


def test_leftovers_are_never_read_and_swept_by_the_next_save_only(tmp_path):
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "00000010", tmp_path / ".unfinished-00000099-abcd")
    (tmp_path / "notes.txt").write_text("the user's own")
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.newest(no_report, in_memory).step == 10 and checkpoints.steps() == [10]
    assert ".unfinished-00000099-abcd" in names(tmp_path)
    save(tmp_path, 20)
    assert names(tmp_path) == ["00000010", "00000020", "notes.txt"]


def test_a_save_returns_at_once_and_the_next_one_waits(tmp_path, monkeypatch):
    go, write, running = threading.Event(), array_store.write, []

    def slow(folder, arrays):
        running.append(threading.current_thread().name)
        assert go.wait(10)
        return write(folder, arrays)

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


def test_arrays_may_change_once_they_are_read(tmp_path, monkeypatch):
    """While files are flushed and their checksums taken; and a save that fails keeps nobody waiting."""
    go, seal = threading.Event(), manifest.seal
    monkeypatch.setattr(manifest, "seal", lambda *arguments: (go.wait(10), seal(*arguments)))
    arrays, meta = state(10)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.wait_for_arrays()  # of nothing
        checkpoints.save(10, arrays, meta)
        checkpoints.wait_for_arrays()
        arrays["tables"]["user"][:] = 0
        assert checkpoints.steps() == []
        go.set()
    assert_same(Checkpoints(tmp_path, 2).restore(10, in_memory).arrays, state(10)[0])
    monkeypatch.setattr(array_store, "write", lambda *_: os.mkdir("/dev/null/x"))
    checkpoints.close()
    with pytest.raises(TrainingError, match="Not a directory"), Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(20, *state(20))
        checkpoints.wait_for_arrays()


def test_meta_is_taken_over_before_save_returns(tmp_path):
    meta = {"position": [1]}
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(10, {"x": np.array(1)}, meta)
        meta["position"][0] = 2
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).meta == {"position": [1]}


def test_an_error_of_the_background_comes_once_and_the_next_save_works(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step, call in ((20, "save"), (30, "wait"), (40, "close"), (50, "newest"), (60, "restore")):
        checkpoints = Checkpoints(tmp_path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(array_store, "write", full)
            checkpoints.save(step, *state(step))
            arguments = {"save": (99, *state(99)), "newest": (no_report, in_memory), "restore": (10, in_memory)}
            with pytest.raises(TrainingError, match="No space left on device"):
                getattr(checkpoints, call)(*arguments.get(call, ()))
        assert names(tmp_path) == ["00000010"]
        checkpoints.close()
    save(tmp_path, 70)
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 70


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
