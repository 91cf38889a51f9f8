"""Whole files, and what is said when the disk refuses."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from recjax.errors import TrainingError
from recjax.utils import files
from recjax.utils.paths import located


def test_write_json_writes_numbers_that_any_reader_takes(tmp_path):
    path = tmp_path / "summary.json"
    files.write_json(
        path,
        {
            "auc": np.float64(0.75),
            "loss": np.float32("nan"),
            "steps": np.int32(7),
            "worst": float("inf"),
            "eval": [{"ok": np.bool_(True)}, (1, None, "ü")],
            "zero_d": np.array(3),
        },
    )

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "auc": 0.75,
        "loss": None,
        "steps": 7,
        "worst": None,
        "eval": [{"ok": True}, [1, None, "ü"]],
        "zero_d": 3,
    }


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    files.write_json(path, {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(TrainingError, match="No space left on device"):
                files.write_json(path, {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1}
        assert os.listdir(tmp_path) == ["config.json"]


def test_the_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", os.fstat(fd).st_ino)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("rename", str(b))), replace(a, b)))
    path = tmp_path / "x"
    files.write_whole(path, b"data")
    assert calls == [("fsync", path.stat().st_ino), ("rename", str(path)), ("fsync", tmp_path.stat().st_ino)]


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_full_disk_is_one_paragraph_with_place_sizes_and_remedy(tmp_path):
    """A real refusal by the kernel: RLIMIT_FSIZE stands in for a full disk, for it needs no mount and no root."""
    code = (
        "import pathlib, resource, sys\n"
        "from recjax.utils import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "files.write_whole(pathlib.Path(sys.argv[1]), bytes(5000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "TrainingError: cannot write " + str(tmp_path / "x") in last
    assert "File too large" in last and "5,000 bytes" in last and "free there" in last and "--out" not in last
    assert "Free some space" in last and "start the same command again" in last
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "Make the folder writable"),
        (errno.EROFS, "Make the folder writable"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_each_refusal_has_its_remedy(tmp_path, number, words):
    message = str(files.disk_error(tmp_path / "no" / "such" / "file", OSError(number, os.strerror(number)), 12))
    assert "checkpoint" not in message  # of which only a training has any
    assert words in message and os.strerror(number) in message and str(tmp_path / "no/such/file") in message
    assert "\n" not in message


def test_what_fails_while_it_is_written_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError), files.replacing(path) as unfinished:
        unfinished.write_text("ne")
        raise ValueError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_checksums_of_all_files_below_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"abc")
    (tmp_path / "a").touch()
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # FIPS 180-4's examples
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.checksums(tmp_path) == {"a": {"bytes": 0, "sha256": empty}, "b/c": {"bytes": 3, "sha256": abc}}


@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing yet"])
def test_a_link_is_replaced_itself_and_what_it_points_to_is_left_alone(tmp_path, there):
    """Whoever made the folder may have pointed it anywhere."""
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    if there:
        file.write_text("old")
    for write in (lambda link: files.write_whole(link, b"new"), lambda link: _replace(link, "new")):
        link = folder / "link"
        link.unlink(missing_ok=True)
        link.symlink_to("../file")
        write(link)
        assert not link.is_symlink() and link.read_text() == "new" and os.listdir(folder) == ["link"]
        assert file.read_text() == "old" if there else not file.exists()


@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing yet"])
def test_a_link_that_the_user_names_stays_and_what_it_points_to_is_replaced(tmp_path, there):
    """A relative link to a link in another folder, whose file is, or is not there; in the link's folder nothing is."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir(), far.mkdir()
    link, middle, file = near / "link", far / "middle", far / "file"
    link.symlink_to("../far/middle")
    middle.symlink_to(file)
    if there:
        file.write_text("old")
    named = located(link)
    for text, write in (("one", lambda: files.write_whole(named, b"one")), ("two", lambda: _replace(named, "two"))):
        kept = tmp_path / f"before {text}"  # another name of what is there now
        if file.exists():
            os.link(file, kept)
            old = file.read_text()
        write()
        assert os.readlink(link) == "../far/middle" and os.readlink(middle) == str(file)
        assert file.read_text() == link.read_text() == text
        assert not kept.exists() or kept.read_text() == old  # it was not written over
        assert os.listdir(near) == ["link"] and sorted(os.listdir(far)) == ["file", "middle"]


def test_what_fails_through_a_link_leaves_its_target_alone(tmp_path):
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("old")
    link.symlink_to(file)
    with pytest.raises(KeyError), files.replacing(located(link)) as unfinished:
        unfinished.write_text("half")
        raise KeyError
    assert file.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["file", "link"]
    link.unlink()
    link.symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(TrainingError, match="cannot write .*gone/file: No such file or directory"):
        files.write_whole(located(link), b"new")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def _replace(path, text):
    with files.replacing(path) as unfinished:
        unfinished.write_text(text)
