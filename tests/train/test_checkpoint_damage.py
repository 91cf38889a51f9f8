"""Checkpoints: every kind of damage to every file is noticed and named, and the one before is used."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
from support.checkpoints import assert_same, in_memory, names, no_report, save, state

from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.train.checkpoint import array_store, manifest, save_protocol
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import LazyArray, Spread


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


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
        restored = Checkpoints(directory, 2).newest(reports.append, in_memory)
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
            Checkpoints(directory, 2).restore(20, in_memory)
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
            Checkpoints(tmp_path, 2).restore(20, in_memory)


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    save(tmp_path, 10)
    for name in ("manifest.json", "manifest.sha256"):
        path = tmp_path / "00000010" / name
        data = path.read_bytes()
        for bit in random.Random(0).sample(range(len(data) * 8), 200):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            with pytest.raises(manifest.CorruptCheckpointError, match="manifest.json does not match"):
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
        assert checkpoints.newest(reports.append, in_memory).step == 10
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
        assert checkpoints.newest(lambda _: None, in_memory).step == 10
        checkpoints.save(20, *state(20))
        checkpoints.save(30, *state(30))
        checkpoints.wait()
        assert checkpoints.steps() == [20, 30]
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 30


def test_all_damaged_is_an_error_that_names_them(tmp_path):
    save(tmp_path, 10, 20)
    (tmp_path / "00000010" / "manifest.sha256").unlink()
    (tmp_path / "00000020" / "state" / "_METADATA").unlink()
    with pytest.raises(TrainingError) as error:
        Checkpoints(tmp_path, 2).newest(no_report, in_memory)
    text = str(error.value)
    assert "none of the 2 checkpoints" in text and str(tmp_path) in text and "\n" not in text
    assert "in 00000020, state/_METADATA is missing; in 00000010, manifest.sha256 is missing" in text
    assert "backup" in text and "--out" in text
    assert names(tmp_path) == ["00000010", "00000020"], "nothing is deleted"


def test_a_step_that_is_not_there_lists_those_that_are(tmp_path):
    save(tmp_path, 10, 20)
    with pytest.raises(TrainingError, match=r"no checkpoint of step 15; the steps that it has: 10, 20\."):
        Checkpoints(tmp_path, 2).restore(15, in_memory)
    with pytest.raises(TrainingError, match=r"has: none\."):
        Checkpoints(tmp_path / "no", 2).restore(15, in_memory)


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
        Checkpoints(tmp_path, 2).restore(10, in_memory)


def test_another_format_is_no_damage(tmp_path):
    save(tmp_path, 10, 20)
    rewrite_manifest(tmp_path / "00000020", lambda content: content.update(format=4))
    with pytest.raises(TrainingError, match=r"00000020 has format 4, but .* reads 1 to 3"):
        Checkpoints(tmp_path, 2).newest(no_report, in_memory)


def test_a_renamed_folder_and_arrays_of_another_shape_are_damage(tmp_path):
    save(tmp_path, 10, 20)
    os.rename(tmp_path / "00000020", tmp_path / "00000030")
    with pytest.raises(TrainingError, match="its manifest is of step 20"):
        Checkpoints(tmp_path, 2).restore(30, in_memory)
    rewrite_manifest(tmp_path / "00000010", lambda content: content["arrays"].update(step="int32[2]"))
    with pytest.raises(TrainingError, match=r"array 'step' should be int32\[2\]"):
        Checkpoints(tmp_path, 2).restore(10, in_memory)


def test_what_a_run_that_goes_on_removes_is_no_damage(tmp_path, monkeypatch):
    """While 20 is read, the run saves 30 and 40 and removes it."""
    save(tmp_path, 10, 20)
    verify = manifest.verify

    def slow(folder, share):
        if folder.name == "00000020":
            save(tmp_path, 30, 40, keep=2)
        return verify(folder, share)

    monkeypatch.setattr(manifest, "verify", slow)
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 40
    monkeypatch.undo()
    shutil.rmtree(tmp_path)
    save(tmp_path, 10, 20)

    def slowly(restored):  # it is gone after it was verified, and before its arrays are read
        if restored.step == 20:
            save(tmp_path, 30, 40, keep=2)
        return in_memory(restored)

    assert Checkpoints(tmp_path, 2).newest(no_report, slowly).step == 40
    shutil.rmtree(tmp_path)
    monkeypatch.setattr(manifest, "verify", slow)
    save(tmp_path, 10, 20)
    with pytest.raises(TrainingError, match="no checkpoint of step 20; the steps that it has: 30, 40"):
        Checkpoints(tmp_path, 2).restore(20, in_memory)


def refused_save(directory, step):
    with pytest.raises(TrainingError) as error, Checkpoints(directory, 2) as checkpoints:
        checkpoints.save(step, *state(step))
    text = str(error.value)
    assert f"checkpoint {directory}/{step:08} does not read back as it was written" in text and "\n" not in text
    assert "those before it are as they were" in text and len(text) < 800
    assert names(directory) == ["00000010"], "the older one stays, and nothing of the new one"
    assert Checkpoints(directory, 2).newest(no_report, in_memory).step == 10
    return text


def test_arrays_that_the_store_drops_without_a_word_are_no_checkpoint(tmp_path, monkeypatch):
    """As Orbax does where a name in the path has brackets, if it is given that path itself."""
    directory = tmp_path / "a[b]" / "checkpoints"
    save(directory, 10)
    monkeypatch.setattr(array_store.Plain, "__init__", lambda self, folder: setattr(self, "path", folder))
    monkeypatch.setattr(array_store.Plain, "__exit__", lambda *_: None)
    monkeypatch.setattr(manifest, "seal", lambda *_: pytest.fail("sealed"))
    assert "tables.user/.zarray" in refused_save(directory, 20)


@pytest.mark.parametrize("at", [0, -1])
def test_a_row_that_the_store_gives_back_otherwise_is_no_checkpoint(tmp_path, monkeypatch, at):
    save(tmp_path, 10)
    monkeypatch.setattr(lazy_arrays, "PART_BYTES", 400)  # several parts of each array
    opened = array_store._opened

    def altered(*arguments):
        found = opened(*arguments)
        if isinstance(user := found.get("user"), LazyArray) and user.shape == (50, 8):

            def read(index):
                rows = user.read(index).copy()
                if index[0].start <= (at % 50) < index[0].stop:
                    rows[at % 50 - index[0].start, 3] += 1
                return rows

            found["user"] = LazyArray(user.shape, user.dtype, read, user.block)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(array_store, "_opened", altered)
        assert f"row {at % 50} of array 'tables.user' reads back as something else" in refused_save(tmp_path, 20)
    save(tmp_path, 20)
    assert Checkpoints(tmp_path, 2).newest(no_report, in_memory).step == 20


def test_of_another_type_or_shape_it_is_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 10)
    read = array_store.read

    def other(folder, described, *parts):  # parts are given where a checkpoint is read to be used
        return read(folder, described if parts else {**described, "step": "int32[2]"}, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(array_store, "read", other)
        assert "array 'step' should be int32[2]" in refused_save(tmp_path, 20)


def spread(rows, process):
    """What one of two processes holds of an array [8, 2]: half of its rows."""
    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    piece = lazy_arrays.as_lazy(whole[process * 4 : process * 4 + rows])
    return {"tables": {"user": Spread((8, 2), whole.dtype, (((process * 4, 0), piece),))}, "step": np.array(20)}


@pytest.mark.parametrize("wrong", ["altered", "not there"])
def test_a_part_of_another_process_is_read_back_too(tmp_path, monkeypatch, wrong):
    save(tmp_path, 10)
    said, compare = {}, array_store.compare
    content = {"step": 20, "pinned": None, "arrays": array_store.describe(spread(4, 0)), "meta": {}}
    monkeypatch.setattr(save_protocol, "broadcast", lambda turn, topic, text: said.setdefault(topic, text))
    monkeypatch.setattr(save_protocol, "wait_for_main", lambda turn, topic: said[topic])
    monkeypatch.setattr(save_protocol, "report_to_main", lambda turn, what: said.update(part=what))
    monkeypatch.setattr(save_protocol, "forget", lambda turn: None)
    monkeypatch.setattr(distributed, "processes", lambda: 2)

    def other(folder, arrays, samples):
        if wrong == "altered":
            samples["tables.user.0"][0][1][:] += 1
        compare(folder, arrays, samples)

    def told(turn, process):
        said["done"] = "saved"
        with monkeypatch.context() as patch, contextlib.suppress(TrainingError), Checkpoints(tmp_path, 2) as there:
            patch.setattr(distributed, "process", lambda: 1)
            patch.setattr(array_store, "compare", other)
            there._save_part(turn, 20, spread(4, 1), content)
        if "error" in said["part"]:
            raise TrainingError(said["part"]["error"])
        if wrong == "not there":
            shutil.rmtree(tmp_path / said["folder"] / "part-00001")
        return said["part"]

    monkeypatch.setattr(save_protocol, "wait_for_worker", told)
    with pytest.raises(TrainingError) as error, Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints._save(1, 20, spread(4, 0), content)
    text = str(error.value)
    assert "does not read back as it was written" in text and "\n" not in text
    assert ("row 0 of array 'tables.user.0' reads back" if wrong == "altered" else "of part-00001: ") in text
    assert names(tmp_path) == ["00000010"]
