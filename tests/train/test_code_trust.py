"""Code that a run folder brings is run only where `--trust-code` says so, and only undamaged."""

import json
import os
import shutil

import pytest
from support import own_model
from support.code_of_run import FACTOR, claimed, load, refused
from support.commands import assert_refused, inside

from recjax.errors import ConfigError
from recjax.train.run.folder import read_config


def spy(tmp_path, folder, name="spy.py"):
    """A preset in `folder` that leaves a mark if it is run."""
    file = own_model.write(folder, name)
    file.write_text(file.read_text() + f"\n__import__('pathlib').Path({str(tmp_path / 'was_here')!r}).touch()\n")
    return file


def foreign(tmp_path):
    """A run folder from somebody else whose code leaves a mark."""
    file = spy(tmp_path, tmp_path / "theirs")
    out = claimed(load(file), tmp_path / "run")
    shutil.rmtree(tmp_path / "theirs")
    (tmp_path / "was_here").unlink()
    return out


def test_nothing_of_a_foreign_folder_runs_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = foreign(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    (tmp_path / "outside").mkdir()
    shutil.copytree(out / "source", tmp_path / "brought")  # as an archive may, beside the run folder
    (tmp_path / "outside/link.py").symlink_to(out / "source/spy.py")
    (out / "source/to_outside.py").symlink_to(spy(tmp_path, tmp_path / "outside2"))
    (out / "__init__.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\n")
    shutil.copy(out / "source/head.py", tmp_path / "outside/head.py")
    plain = json.loads((out / "config.json").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(out / "source"))
    for place in (
        plain["class"].partition(":")[0],
        out / "source/spy.py",
        out / "source/../source/spy.py",
        "run/source/spy.py",
        "./run/source/spy.py",
        "brought/spy.py",
        "~/spy.py",
        tmp_path / "link/source/spy.py",
        tmp_path / "outside/link.py",
        out / "source/to_outside.py",
        "/proc/self/cwd/run/source/spy.py",
        "run.source.spy",
        "run",
        "spy",
        "source.spy",
        "link.source.spy",
        "__main__",
        "no\0file.py",
        "/no\0file.py",
    ):
        for content in (plain, {key: value for key, value in plain.items() if key != "source"}):  # as made long ago
            (out / "config.json").write_text(json.dumps(content | {"class": f"{place}:LinearRun"}))
            for command in (
                ("eval", out),
                ("eval", "link"),
                ("predict", out, "--input", "rows.jsonl", "--out", "x.csv"),
                ("weights", "export", out, "--format", "facebook", "--out", "x.npz"),
                ("train", "synthetic", "--out", out),
            ):
                done = inside(*command)
                assert done.status == 2 and "Traceback" not in done.err, (place, command, done.err)
                assert not (tmp_path / "was_here").exists(), (place, command)
    (out / "config.json").write_text(json.dumps(plain))
    read_config(out, trust_code=True)
    assert (tmp_path / "was_here").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "run"),
        ("predict", "run", "--input", "rows.jsonl", "--out", "x.csv"),
        ("weights", "export", "run", "--format", "facebook", "--out", "x.npz"),
        ("serve", "run", "--port", "0"),
        ("bench", "run", "--serve"),
    ],
    ids=lambda command: command[0],
)
def test_the_option_runs_the_copy(tmp_path, monkeypatch, command):
    if command[0] in ("serve", "bench"):
        for package in ("fastapi", "uvicorn", "prometheus_client", "flatbuffers"):
            pytest.importorskip(package, reason="the extra `serve` is not installed")
    monkeypatch.chdir(tmp_path)
    foreign(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    refused(inside(*command), r"spy\.py: there is no such file any more", "--trust-code")
    assert not (tmp_path / "was_here").exists()
    done = inside(*command, "--trust-code")
    assert (tmp_path / "was_here").exists()
    assert_refused(done, 3, "checkpoint")  # there is but a stand-in for one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: own_model.edit(out / "source/spy.py", *FACTOR), r"damaged or was edited: .*It is not run"),
        (lambda out: (out / "source/head.py").write_text("def logits(:"), r"damaged or was edited"),
        (lambda out: (out / "source/head.py").unlink(), r"is not whole: .*head\.py"),
        (lambda out: shutil.rmtree(out / "source"), r"is not whole: .*spy\.py"),
        (
            lambda out: os.mkfifo((out / "source/spy.py").replace(out / "source/x") and out / "source/spy.py"),
            "not whole",
        ),
    ],
)
def test_a_damaged_copy_is_not_run(tmp_path, change, message):
    out = foreign(tmp_path)
    change(out)
    with pytest.raises(ConfigError, match=message):
        read_config(out, trust_code=True)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize(
    "source",
    [
        5,
        "x",
        [],
        {},
        {"hash": "x"},
        {"hash": 1, "files": ["a.py"]},
        {"hash": "x", "files": []},
        {"hash": "x", "files": ["../a.py"]},
        {"hash": "x", "files": ["/a.py"]},
        {"hash": "x", "files": ["a.py", 5]},
        {"hash": "x", "files": ["a.txt"]},
        {"hash": "x", "files": ["a\0.py"]},
    ],
)
def test_what_a_config_says_of_its_source_is_checked(tmp_path, source):
    out = foreign(tmp_path)
    plain = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(plain | {"source": source}))
    with pytest.raises(ConfigError, match="what it says of `source` was edited or damaged"):
        read_config(out, trust_code=True)
    assert not (tmp_path / "was_here").exists()
