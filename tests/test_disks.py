"""Full disks and missing permissions: one paragraph with place and remedy, and with space all goes on."""

import contextlib
import errno
import json
import os
import pwd
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import OWN, SMALL, Done, assert_refused, contents, inside, steps_of

from recjax.train.run import writers
from recjax.utils import files

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "curves.png"])
def test_a_disk_that_is_full_for_one_file(preset, clean, tmp_path, monkeypatch, name):
    def full(path, mode, **options):
        return open("/dev/full" if name in str(path) else path, mode, **options)

    command = ("train", preset, *SMALL, "--out", tmp_path, "--json")
    with monkeypatch.context() as patch:
        for module in (files, writers):
            patch.setattr(module, "open", full, raising=False)
        done = inside(*command)
    words = ["are free there", "Free some space", "start the same command again"]
    assert_refused(done, 1, f"cannot write {tmp_path}/{name}: No space left on device; it needs [1-9]", *words)
    assert not (tmp_path / name).exists() or (name, (tmp_path / name).read_bytes()) == ("metrics.jsonl", b"")
    assert inside(*command).result["eval"] == clean


@contextlib.contextmanager
def largest_file(size_bytes):
    """A limit by the kernel, which refuses a write in its middle as a full disk does, for this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_for_a_checkpoint(preset, clean, tmp_path):
    command = ("train", preset, *SMALL, "--out", tmp_path, "--json")
    with largest_file(4000):
        done = inside(*command)
    assert_refused(
        done,
        1,
        f"cannot write {tmp_path}/checkpoints/00000002: File too large; it needs [1-9]",
        "ulimit -f",
        "start the same command again: a run resumes from its newest complete checkpoint",
    )
    assert os.listdir(tmp_path / "checkpoints") == []
    assert inside(*command).result["eval"] == clean


def test_a_disk_that_is_full_for_prepared_data(tmp_path, monkeypatch):
    command = ("data", "prepare", "movietweetings", "--out", tmp_path / "made", "--json")
    with largest_file(100_000):
        done = inside(*command)
    assert_refused(done, 1, f"cannot prepare {tmp_path}/made: ", r"kept beside it, in \.made\.work", "make space")
    assert os.listdir(tmp_path) == [".made.work"]
    assert inside(*command).result["rows"]["test"] == 20_000
    assert os.listdir(tmp_path) == ["made"]
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    with largest_file(100_000):
        done = inside("train", "movietweetings", *SMALL, "--out", tmp_path / "run")
    assert_refused(done, 1, f"cannot prepare {tmp_path}/cache/movietweetings-", "RECJAX_CACHE")
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".work")] == []


@pytest.mark.full
def test_a_disk_that_is_full_at_every_stage(preset, clean, tmp_path):
    """A real small disk: each time that the command is refused, somewhat more of it is freed."""
    disk, seen = tmp_path / "disk", []
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        used = (disk / "filler").stat().st_size
        done = inside("train", preset, *SMALL, "--out", disk / "run", "--json")
        for pages in (1, 1, 1, 2, 2, 4, 4, 4, *[8] * 32):  # fewer at a time than any file has
            if done.status == 0:
                break
            last = assert_refused(done, 1, "No space left on device")
            seen.append(re.search(r"cannot write (\S+): ", last)[1].removeprefix(f"{disk}/run/"))
            used -= 4096 * pages
            os.truncate(disk / "filler", used)
            done = inside("train", preset, *SMALL, "--out", disk / "run", "--json")
        assert done.result["eval"] == clean
        assert steps_of(disk / "run", "train") == [1, 2] and steps_of(disk / "run", "test") == [2]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert {"config.json", "checkpoints/00000002", "curves.png"} <= set(seen), seen


POWERLESS = """
import ctypes, dataclasses, json, os, sys
if os.geteuid() == 0 and "POWERLESS" not in os.environ:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root may read and write anything
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, in force from the next exec on
    os.execve(sys.executable, sys.orig_argv, os.environ | {"POWERLESS": "1"})
from support import few_programs
from support.commands import inside
few_programs.stay_as()
commands = [] if os.access(sys.argv[1], os.W_OK) else json.loads(sys.argv[2])
print(json.dumps([dataclasses.asdict(inside(*command)) for command in commands]))
"""


@pytest.mark.full
def test_no_permission(preset, good, tmp_path):
    readonly, run, data, cache = (tmp_path / name for name in ("readonly", "run", "data", "cache"))
    readonly.mkdir()
    cache.mkdir()
    shutil.copytree(good, data)
    assert inside("train", preset, *SMALL, "--out", run).status == 0
    train = ["train", preset, *SMALL, "--out"]
    cases = [
        (
            [*train, readonly / "run"],
            1,
            [f"{readonly}/run cannot be written: Permission denied. Choose an --out where"],
        ),
        ([*train, readonly], 1, [f"{readonly} cannot be written: Permission denied"]),
        (
            [*train, run, "train.steps=3"],
            1,
            [f"cannot write {run}/checkpoints/00000003: Permission denied", "writable"],
        ),
        (["data", "prepare", "movietweetings", "--out", readonly / "x"], 1, ["Permission denied", "mend permissions"]),
        (["plan", preset, "--save", readonly / "plan.json"], 2, ["plan.json cannot be written: Permission denied"]),
        ([*train, tmp_path / "new", *OWN, f"data.path={data}"], 3, [r"no permission to read \S*test", "chmod a\\+rX"]),
        (["train", "movietweetings", "--out", tmp_path / "new"], 1, [f"{cache}/movietweetings-.*Permission denied"]),
        (["show", tmp_path / "secret.py"], 2, ["cannot read the preset .*secret.py: Permission denied"]),
        (
            ["eval", tmp_path / "secret"],
            1,
            ["config.json cannot be read: .*Permission denied", "Check its permissions"],
        ),
    ]
    (tmp_path / "secret.py").write_text("config = 1")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("{}")
    test_file = next(data.rglob("*-test*"))
    before = contents(tmp_path)
    modes = {readonly: 0o555, cache: 0o555, run / "checkpoints": 0o555, test_file: 0o200}
    modes |= {tmp_path / "secret.py": 0o200, tmp_path / "secret" / "config.json": 0o200}
    kept = {path: path.stat().st_mode for path in modes}
    for path, mode in modes.items():
        path.chmod(mode)
    commands = json.dumps([[str(word) for word in command] for command, _, _ in cases])
    code = [sys.executable, "-c", POWERLESS, str(readonly), commands]
    environment = os.environ | {"RECJAX_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(code, capture_output=True, text=True, env=environment)
    for path, mode in kept.items():
        path.chmod(mode)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    if not results:
        pytest.skip("this user cannot give up the power to write anywhere")
    for (_, status, patterns), result in zip(cases, results, strict=True):
        assert_refused(Done(**result), status, *patterns)
    assert os.listdir(readonly) == []
    before.pop("run/config.json")
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert inside(*train, run, "train.steps=3").status == 0
    assert inside(*train, tmp_path / "new", *OWN, f"data.path={data}").status == 0


def test_no_home_to_keep_prepared_data_in(tmp_path, monkeypatch):
    monkeypatch.delenv("RECJAX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    done = inside("train", "movietweetings", *SMALL, "--out", tmp_path)
    assert_refused(done, 1, "there is no home folder", "Set RECJAX_CACHE")


def test_a_plan_that_is_written_in_part_leaves_the_old_one(preset, tmp_path, monkeypatch):
    def half(path, text, **how):
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = tmp_path / "plan.json"
    plan.write_text("old")
    monkeypatch.setattr(Path, "write_text", half)
    assert_refused(inside("plan", preset, "--save", plan), 2, "plan.json cannot be written: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"] and plan.read_text() == "old"
