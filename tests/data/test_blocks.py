"""Prepared data on disk: what is written is read back, and nothing damaged or half-written is ever trusted."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support import forked

from recjax.data import statistics
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.pipeline import batches
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.errors import DataError, TrainingError

SCHEMA = Schema(("a", "b"), (Feature("one", 50), Feature("three", 3, 3, True), Feature("bag", 2**40, None, True)))


def block(rows: int, seed: int, position: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, rows)
    total = int(lengths.sum())
    return Batch(
        dense=rng.normal(size=(rows, 2)).astype(np.float32),
        bags={
            "one": Bags(rng.integers(0, 50, (rows, 1))),
            "three": Bags(rng.integers(0, 3, (rows, 3)), None, rng.random((rows, 3))),
            "bag": Bags(rng.integers(0, 2**40, total), lengths, rng.random(total)),
        },
        labels=rng.integers(0, 2, rows).astype(np.float32),
        weights=rng.random(rows, np.float32),
        position=position,
    )


SPLITS = {
    "train": [*(block(10, seed, 10 * seed) for seed in range(8)), block(7, 8, 80)],
    "validation": [],
    "test": [block(5, 3)],
}


def write(out, splits=SPLITS, **more):
    return write_prepared(out, "toy", SCHEMA, splits, {"note": "kept"}, **more)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return write(tmp_path / "toy").path


def data_file(folder: Path, split: str = "train") -> Path:
    return next(folder.glob(f"blocks/*/*-{split}.array_record*"))


def assert_equal(a: Batch, b: Batch) -> None:
    assert a.position == b.position
    for name in ("dense", "labels", "weights"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert list(a.bags) == list(b.bags)
    for name in a.bags:
        for part in ("ids", "lengths", "weights"):
            x, y = getattr(a.bags[name], part), getattr(b.bags[name], part)
            if x is None or y is None:
                assert x is y
            else:
                np.testing.assert_array_equal(x, y.astype(x.dtype))


def test_what_is_written_is_read_back(prepared):
    source = open_prepared(prepared, "toy")
    assert (source.name, source.schema, source.about) == ("toy", SCHEMA, {"note": "kept"})
    for split, blocks in SPLITS.items():
        assert source.row_counts(split).tolist() == [b.size for b in blocks]
        for index, expected in enumerate(blocks):
            assert_equal(source.read(split, index), expected)
    first = source.read("train", 0)
    assert first.bags["one"].ids.dtype == np.int32 and first.bags["bag"].ids.dtype == np.int64
    assert sum(batch.size for batch in batches(source, "train", 8, shuffle=True, epochs=2)) == 2 * 87
    open_prepared(prepared).verify()


def test_nothing_but_the_folder_is_left(prepared):
    assert os.listdir(prepared.parent) == ["toy"]


@pytest.mark.full
def test_preparing_prints_nothing_and_needs_no_tensorflow(tmp_path):
    program = f"""
        import contextlib, io, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_blocks import *
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            write(Path({str(tmp_path)!r}) / "out").read("train", 0)
        assert printed.getvalue() == "", printed.getvalue()
        assert not {{"tensorflow", "torch", "matplotlib"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_tfds_is_there_before_threads_read(prepared):
    """Its import replaces `import` itself: of two threads that import then, each may wait for the other for ever."""
    program = f"""
        import sys
        from recjax.data.storage.blocks import open_prepared
        assert "tensorflow_datasets" not in sys.modules
        open_prepared({str(prepared)!r})
        assert "tensorflow_datasets" in sys.modules
    """
    with forked.Popen([sys.executable, "-c", textwrap.dedent(program)]) as process:
        assert process.wait() == 0


def test_fingerprint_is_of_the_content(tmp_path):
    same, other = write(tmp_path / "a"), write(tmp_path / "b")
    assert same.fingerprint == other.fingerprint
    changed = dict(SPLITS, test=[dataclasses.replace(SPLITS["test"][0], labels=np.ones(5, np.float32))])
    assert write(tmp_path / "c", changed).fingerprint != same.fingerprint
    moved = dict(SPLITS, train=SPLITS["train"][::-1])
    assert write(tmp_path / "d", moved).fingerprint != same.fingerprint
    renamed = Schema(("a", "B"), SCHEMA.features)
    assert write_prepared(tmp_path / "e", "toy", renamed, SPLITS, {}).fingerprint != same.fingerprint


def test_a_split_that_was_not_written_has_no_rows(tmp_path):
    source = write_prepared(tmp_path / "a", "toy", SCHEMA, {"train": SPLITS["train"]}, {})
    assert source.row_counts("train").sum() > 0 and source.row_counts("validation").tolist() == []
    assert {name: split["rows"] for name, split in statistics.describe(source)["splits"].items()}["test"] == 0
    with pytest.raises(DataError, match="no split 'tset'"):
        source.row_counts("tset")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_missing_data_name_the_command_that_prepares_them(tmp_path, make):
    make(tmp_path / "none")
    out = "FOLDER" if (tmp_path / "none").is_file() else f"{tmp_path}/none"  # a file would only be in the way
    with pytest.raises(DataError, match=f"recjax data prepare toy --from PATH --out {out}"):
        open_prepared(tmp_path / "none", "toy")


def test_another_dataset_or_format_is_refused(prepared):
    with pytest.raises(DataError, match="holds the dataset 'toy', but the config asks for 'movies'"):
        open_prepared(prepared, "movies")
    manifest = json.loads((prepared / MANIFEST).read_text())
    (prepared / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match="format 99"):
        open_prepared(prepared)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "splits": 3}', "\udcff"])
def test_a_damaged_manifest_is_refused(prepared, text):
    (prepared / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=MANIFEST):
        open_prepared(prepared)


def test_an_edited_manifest_is_refused(prepared):
    text = (prepared / MANIFEST).read_text()
    (prepared / MANIFEST).write_text(text.replace('"rows": 50', '"rows": 51'))
    with pytest.raises(DataError, match="damaged"):
        open_prepared(prepared)


def test_a_missing_or_truncated_file_is_named_on_opening(prepared):
    file = data_file(prepared)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{file} is {len(content) - 1} bytes long instead of {len(content)}"):
        open_prepared(prepared)
    file.unlink()
    with pytest.raises(DataError, match=f"{file} is missing"):
        open_prepared(prepared)


def test_every_flipped_bit_is_found_by_verify_and_none_is_read(prepared):
    source, file = open_prepared(prepared), data_file(prepared)
    good = file.read_bytes()
    used = len(good.rstrip(b"\0"))
    noticed = 0
    for at in np.random.default_rng(0).integers(0, used, 25):
        damaged = bytearray(good)
        damaged[at] ^= 1 << int(at % 8)
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=f"Damaged: {file}"):
            open_prepared(prepared).verify()
        source = open_prepared(prepared)
        for index, expected in enumerate(SPLITS["train"]):
            try:
                found = source.read("train", index)
            except DataError as error:
                assert f"Damaged: {file}" in str(error) and "recjax data prepare toy" in str(error)
                noticed += 1
            else:
                assert_equal(found, expected)
    assert noticed > 0


def test_a_damaged_block_reaches_the_caller_of_the_pipeline(prepared):
    file = data_file(prepared)
    content = bytearray(file.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"Damaged: {file}"):
        list(batches(open_prepared(prepared), "train", 8, epochs=1))


def test_the_same_content_is_kept_and_other_content_refused_unless_asked(prepared):
    before = (prepared / MANIFEST).stat().st_ino
    write(prepared)
    assert (prepared / MANIFEST).stat().st_ino == before
    other = dict(SPLITS, test=[block(6, 9)])
    with pytest.raises(DataError, match="other content.*--overwrite"):
        write(prepared, other)
    assert open_prepared(prepared).row_counts("test").tolist() == [5]
    write(prepared, other, overwrite=True)
    assert open_prepared(prepared).row_counts("test").tolist() == [6]
    assert os.listdir(prepared.parent) == ["toy"]


def test_preparing_again_mends_damaged_data(prepared):
    data_file(prepared).write_bytes(b"")
    write(prepared)
    open_prepared(prepared).verify()


def test_a_folder_of_something_else_is_never_touched(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="is not prepared data"):
            write(tmp_path / "thesis", overwrite=overwrite)
    assert (tmp_path / "thesis" / "chapter").read_text() == "1"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")


def test_a_block_that_does_not_fit_is_refused_and_nothing_kept(tmp_path):
    bad = block(4, 0, position=40)
    bad.bags["one"].ids[2] = 50
    with pytest.raises(DataError, match="id 50 of feature 'one' in sample 42"):
        write(tmp_path / "out", {"train": [block(40, 0), bad]})
    assert os.listdir(tmp_path) == []


@pytest.mark.full
def test_a_killed_preparation_leaves_nothing_that_is_trusted(tmp_path):
    program = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_blocks import *
        def slow():
            yield block(40, 0)
            print("writing", file=sys.__stdout__, flush=True)  # TFDS's own output is silenced
            time.sleep(60)
        write(Path({str(tmp_path)!r}) / "out", {{"train": slow()}})
    """
    child = forked.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.read(1)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with pytest.raises(DataError, match="no prepared data"):
        open_prepared(tmp_path / "out")
    write(tmp_path / "out")
    open_prepared(tmp_path / "out").verify()
    assert os.listdir(tmp_path) == ["out"]
    assert [folder.name for folder in (tmp_path / "out" / "blocks").iterdir()] == ["1.0.0"]


@pytest.mark.full
def test_processes_that_prepare_at_once_do_not_disturb_each_other(tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_blocks import *
        for _ in range(5):
            write(Path({str(tmp_path)!r}) / "out").read("train", 2)
    """
    children = [forked.Popen([sys.executable, "-c", textwrap.dedent(program)]) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    open_prepared(tmp_path / "out").verify()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.full
def test_a_full_disk_is_one_clear_error_and_nothing_is_kept(tmp_path):
    """A limit on the size of files makes write() fail as a full disk does, through the same code."""
    program = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_blocks import *
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(TrainingError, match="cannot write prepared data to {tmp_path}/out.*free space"):
            write(Path({str(tmp_path)!r}) / "out")
    """
    with forked.Popen([sys.executable, "-c", textwrap.dedent(program)]) as process:
        assert process.wait() == 0
    assert os.listdir(tmp_path) == []


@contextlib.contextmanager
def without_privileges():
    """Permissions do not bind root: take another user's for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_to_write(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with without_privileges(), pytest.raises(TrainingError, match="cannot write prepared data to .*PermissionError"):
        write(tmp_path / "locked" / "out")


@pytest.mark.parametrize("which", ["manifest", "data"])
def test_no_permission_to_read(prepared, monkeypatch, which):
    """Simulated, since root may read everything: the system's answer is replaced, not recjax's check of it."""
    if which == "manifest":

        def refuse(self, *arguments, **more):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        file = prepared / MANIFEST
    else:
        file = data_file(prepared)
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)
    with pytest.raises(DataError, match=f"no permission to read {file}"):
        open_prepared(prepared)


def test_records_are_those_of_tfds():
    """Byte for byte, so that files have the checksums that they would have had."""
    from recjax.data.storage import builder  # imports TFDS

    schema = Schema(("d",), (Feature("x", 9), Feature("y", 9, None), Feature("z", 9, None, weighted=True)))
    lengths = np.array([2, 0, 3], np.int32)
    floats = np.linspace(0, 1, 3, dtype=np.float32)
    for dense, names, step in (
        (floats[:, None], ("d",), 1),
        (floats[:, None] + 2, ("d",), 2),  # the same sizes with other values, not contiguous
        (np.zeros((3, 0), np.float32), (), 1),
    ):
        ids = np.arange(0, 5 * step, dtype=np.int32)[::step]
        bags = {"x": Bags(ids[:3, None]), "y": Bags(ids, lengths), "z": Bags(ids, lengths, ids.astype(np.float32))}
        layout = dataclasses.replace(schema, dense=names)
        record: dict = {"labels": floats, "weights": floats + 1}
        record["bags"] = {
            name: {key: array for key, array in vars(of).items() if array is not None} for name, of in bags.items()
        }
        record |= {"dense": dense} if names else {}
        truth = builder._record_layout(layout).serialize_example(record)
        assert builder._serialized(Batch(dense, bags, floats, floats + 1)) == truth
