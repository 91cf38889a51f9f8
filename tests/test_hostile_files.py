"""Run folders, sweeps, searches and exports that a stranger made: none of their code runs, none is imported.

Each case writes what he may have sent, and what may lie elsewhere on the machine; the programs among it leave a mark.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from support.code_of_run import load
from support.commands import assert_refused, inside

import recjax
from recjax.config.code_identity import gather
from recjax.errors import RecjaxError
from recjax.train.run.folder import read_config

EVIL = """
import pathlib
pathlib.Path({mark!r}).touch()
from recjax.config.run import RunConfig
class Config(RunConfig):
    pass
config = Config()
"""
CONFIGURED = """
import pathlib
from recjax.config.run import RunConfig
class Config(RunConfig):
    pass
config = (CALL, Config())[1]
"""


class Stranger:
    """Writes files in a folder, which is the working one."""

    def __init__(self, here):
        self.here, self.mark = here / "here", here / "was_here"
        self.here.mkdir()
        self.run = self.here / "run"

    def program(self, file, text=EVIL):
        """A program that leaves the mark."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(mark=str(self.mark)))
        return file

    def names(self, where, *, of=None, run=None, name="Config", on=None):
        """A run folder whose config.json names code, with the hash of the file `of` if there is one."""
        sys.path[:0] = [] if on is None else [str(on)]
        run = run or self.run
        (run / "checkpoints/00000001").mkdir(parents=True, exist_ok=True)
        said = {"class": f"{where}:{name}"}
        if of is not None:
            folder, root = of if isinstance(of, tuple) else (of.parent, of.name)
            said["source"] = {"hash": gather(folder, root).hash, "files": [root]}
        (run / "config.json").write_text(json.dumps(said | {"data": {}, "model": {}, "embedding": {}, "train": {}}))
        return "eval", run

    def sweep(self, file, preset):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'preset = "{preset}"\n[grid]\nseed = [0, 1]\n')
        return "sweep", file


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    made = Stranger(tmp_path)
    monkeypatch.chdir(made.here)
    monkeypatch.syspath_prepend(str(made.here))  # as `python -m recjax` has it
    return made


def elsewhere(s):
    return s.program(s.here.parent / "elsewhere/p.py")


def editable(s, name="evil"):
    """A module in the working folder, beside what an editable install of it would have left where packages lie."""
    file = s.program(s.here / f"{name}.py")
    about = s.here / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (about / "top_level.txt").write_text(f"{name}\n")
    (about / "direct_url.json").write_text(json.dumps({"url": f"file://{s.here}", "dir_info": {"editable": True}}))
    return file


def link(s, to):
    path = s.here.parent / "link.py"
    path.symlink_to(to)
    return path


def replaced(s):
    """A file that the user has run at a time when it was another."""
    file = s.here.parent / "mine/p.py"
    file.parent.mkdir()
    file.write_text("from recjax.config.run import RunConfig\nclass Config(RunConfig):\n    X = 1\nconfig = Config()\n")
    load(file)
    return s.program(file)


def configured(s):
    """A file that the user has run when its `config` was another."""
    file = s.program(s.here.parent / "mine/p.py", CONFIGURED.replace("CALL", "print()"))
    load(file)
    return s.program(file, CONFIGURED.replace("CALL", "pathlib.Path({mark!r}).touch()"))


def of_python(name):
    return Path(sysconfig.get_path("stdlib")) / f"{name}.py"


CASES = {
    "a file elsewhere, without a hash": lambda s: s.names(elsewhere(s)),
    "a file elsewhere, with its hash": lambda s: s.names(f := elsewhere(s), of=f),
    "a file beside the run folder": lambda s: s.names(f := s.program(s.here / "x/p.py"), of=f, run=s.here / "x/run"),
    "the same by a relative path": lambda s: s.names("x/p.py", of=s.program(s.here / "x/p.py"), run=s.here / "x/run"),
    "a file in the working folder": lambda s: s.names(f := s.program(s.here / "p.py"), of=f),
    "the same by a name that fits everywhere": lambda s: s.names(
        "/proc/self/cwd/p.py", of=s.program(s.here / "p.py")
    ),
    "a file in the copy of another run": lambda s: s.names(f := s.program(s.here / "other/source/p.py"), of=f),
    "a file in the run folder": lambda s: s.names(f := s.program(s.run / "source/p.py"), of=f),
    "a link to a file in the run folder": lambda s: s.names(
        link(s, f := s.program(s.run / "source/p.py")), of=f
    ),
    "a file that was another when its user ran it": lambda s: s.names(f := replaced(s), of=f),
    "a file whose config was another when its user ran it": lambda s: s.names(f := configured(s), of=f),
    "a module of Python that opens a browser": lambda s: s.names("antigravity"),
    "the same with its hash": lambda s: s.names("antigravity", of=of_python("antigravity")),
    "another module of Python, with a class": lambda s: s.names(
        "xmlrpc.client", of=(of_python("os").parent, "xmlrpc/client.py"), name="Transport"
    ),
    "a module in the working folder": lambda s: s.names("evil", of=s.program(s.here / "evil.py")),
    "a module in a folder of the working one": lambda s: s.names(
        "x.evil", of=(s.here, s.program(s.here / "x/evil.py").relative_to(s.here).as_posix())
    ),
    "a package around a module": lambda s: (
        s.program(s.here / "x/__init__.py"), s.names("x.none", of=(s.here, "x/__init__.py"))
    )[1],
    "a module with a forged editable install": lambda s: s.names("evil", of=editable(s)),
    "a module of what is no Python's packages": lambda s: s.names(
        "evil", of=(f := s.program(s.here / "x/site-packages/evil.py")), on=f.parent
    ),
    "a class of the notebook that is none": lambda s: s.names("__main__"),
    "training into such a folder": lambda s: (s.names(elsewhere(s)), ("train", "synthetic", "--out", s.run))[1],
    "a sweep of a preset elsewhere": lambda s: s.sweep(s.here / "s.toml", elsewhere(s)),
    "a sweep of a preset whose config was another": lambda s: s.sweep(s.here / "s.toml", configured(s)),
    "a sweep of a preset that came with it": lambda s: (
        s.program(s.here / "x/p.py"), s.sweep(s.here / "x/sweeps/s.toml", "x/p.py")
    )[1],
    "a sweep of a link in the working folder": lambda s: (
        (s.here / "p.py").symlink_to(elsewhere(s)), s.sweep(s.here / "s.toml", "p.py")
    )[1],
    "a sweep of a program of the user's that is no preset": lambda s: (
        s.program(s.here / "tidy.py", "open({mark!r}, 'w')\n"), s.sweep(s.here / "x/s.toml", "tidy.py")
    )[1],
    "an export with modules": lambda s: (
        [s.program(s.here / f"export/{name}.py") for name in ("loader", "records", "on_disk", "numpy", "jax")],
        (s.here / "export/manifest.json").write_text("{}"),
        ("serve", s.here / "export"),
    )[2],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_code_of_a_stranger_runs(stranger, case, monkeypatch):
    monkeypatch.setenv("BROWSER", f"touch {stranger.mark}")
    command = CASES[case](stranger)
    imported = {*sys.modules}
    done = inside(*command)
    assert not stranger.mark.exists()
    new = {name.partition(".")[0] for name in {*sys.modules} - imported}
    assert not new & {"evil", "x", "antigravity", "xmlrpc"}
    assert done.status in (1, 2, 3)
    last = done.err.splitlines()[-1]
    assert last.startswith("recjax: error: ") and "Traceback" not in done.err and len(last) < 1500, done.err


@pytest.mark.parametrize(("home", "runs"), [(".", False), ("below/home", False), ("..", True), ("../somebody", True)])
def test_the_home_folder_and_what_it_lies_in_are_no_working_folder(stranger, monkeypatch, home, runs):
    """There an archive that was unpacked looks as the user's own folders do."""
    monkeypatch.setenv("HOME", str(stranger.here / home))
    stranger.program(stranger.here / "x/p.py")
    done = inside(*stranger.sweep(stranger.here / "y/s.toml", "x/p.py"), "--dry-run")
    assert (done.status, stranger.mark.exists()) == ((0, True) if runs else (2, False)), done.err


@pytest.mark.parametrize("hashed", [False, True])
def test_no_other_way_to_read_a_run_runs_its_code(stranger, hashed):
    file = elsewhere(stranger)
    _, run = stranger.names(file, of=file if hashed else None)
    (stranger.here / "rows.jsonl").write_text("{}\n")
    for command in (
        ("predict", run, "--input", "rows.jsonl", "--out", "x.csv"),
        ("export", run, "--out", "exported"),
        ("weights", "export", run, "--format", "facebook", "--out", "x.npz"),
    ):
        assert_refused(inside(*command), 2, "is not run by itself", "--trust-code")
    for read in (
        recjax.evaluate,
        lambda run: recjax.predict(run, "rows.jsonl", "x.csv"),
        lambda run: recjax.export(run, "exported"),
        lambda run: recjax.open_run(run).config,
    ):
        with pytest.raises(RecjaxError, match=r"is not run by itself.*trust_code=True"):
            read(run)
    assert not stranger.mark.exists()


def test_the_option_runs_what_has_no_hash_as_it_is(stranger):
    """And of what has one the copy, of which alone the maker of the folder can speak."""
    file = elsewhere(stranger)
    _, run = stranger.names(file, of=file)
    with pytest.raises(RecjaxError, match=r"the copy in .* is not whole"):
        read_config(run, trust_code=True)
    assert not stranger.mark.exists()
    stranger.names(file)
    said = []
    with pytest.raises(RecjaxError):  # its settings are none
        read_config(run, trust_code=True, report=said.append)
    assert stranger.mark.exists() and "no hash of it" in said[0]
    file.unlink()
    with pytest.raises(RecjaxError, match="no such file any more"):
        read_config(run, trust_code=True)


def test_a_search_is_a_sweep(stranger):
    pytest.importorskip("optuna")
    file = stranger.here / "s.toml"
    file.write_text(f'preset = "{elsewhere(stranger)}"\n[search]\nseed = [0, 1]\n')
    assert_refused(inside("tune", file), 2, r"s\.toml: the preset .* is not run", "recjax show .*p.py", "--trust-code")
    assert not stranger.mark.exists()


def test_a_named_folder_is_trusted_with_all_that_is_in_it_but_the_run(stranger, monkeypatch):
    file = elsewhere(stranger)
    _, run = stranger.names(file, of=file)
    monkeypatch.setenv("RECJAX_TRUSTED_CODE", f"/nowhere{os.pathsep}{file.parent}x{os.pathsep}{stranger.here}")
    with pytest.raises(RecjaxError, match=f"set RECJAX_TRUSTED_CODE={file.parent}"):
        read_config(run)
    inner = stranger.program(run / "source/p.py")
    stranger.names(inner, of=inner)
    with pytest.raises(RecjaxError, match="must not bring its own code"):
        read_config(run)
    file.write_text("import helper\n" + file.read_text())
    (file.parent / "helper.py").symlink_to(stranger.program(run / "helper.py"))
    stranger.names(file, of=file)
    monkeypatch.setenv("RECJAX_TRUSTED_CODE", str(file.parent.parent))
    with pytest.raises(RecjaxError, match="must not bring its own code"):
        read_config(run)
    assert not stranger.mark.exists()
    (file.parent / "helper.py").unlink()
    (file.parent / "helper.py").write_text("")
    stranger.names(file, of=file)
    with pytest.raises(RecjaxError):  # its settings are none
        read_config(run)
    assert stranger.mark.exists()
