"""Run folders and data under odd paths: they give the numbers of a plain one, or are refused before the first step."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support import paths as path_support
from support.commands import OWN, SCHEMA, assert_refused, inside, outside
from support.paths import measures, train

import recjax
from recjax import main
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.errors import ConfigError
from recjax.train.run.sources import resolve_data_sources
from recjax.utils.paths import Plain, expanded, located

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

ELSEWHERE = Path(recjax.__file__).parent  # a working folder whose folder `data` holds none

NAMES = {
    "dash": "-x",
    "one bracket": "a[b",
    "backslash": "back\\slash",
    "variable": "$HOME",
    "unicode": "Über",
    "formula": "$\\frac{$",  # to matplotlib
    "tilde": "~",
    "newline": "new\nline",
    "brackets": "a[b]c",
    "tilde of nobody": "~nobody-of-that-name",
    "spaces": " in and around ",
    "percent": "per%41cent",
    "colon": "s3:x",
    "combining": "U\u0308ber",
    "star": "st*r",
    "emoji": "\N{GRINNING FACE}",
    "tab": "tab\tulator",
    "question": "what?",
    "quotes": "'single' \"double\"",
    "semicolon": "a;b",
    "hash": "ha#sh",
    "braces": "{a,b}",
    "equals": "a=b",
    "pipe": "a|b",
    "three dots": "...",
    "longest": "n" * 255,
}


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    with path_support.traced_once():
        yield


@pytest.fixture(scope="module")
def plain(traced_once, preset, good, tmp_path_factory):
    """summary.eval, and `measures`, of an undisturbed run under a plain path."""
    out = tmp_path_factory.mktemp("plain") / "run"
    summary = train(preset, good, 2, "--out", out).result["eval"]
    return summary, measures(out, good, out / "scores.csv")


def tried(preset, good, plain, given, real, tmp_path, monkeypatch, data=None):
    """Trains a step, resumes for another, and from another folder evaluates and predicts."""
    data = data or good
    assert train(preset, data, 1, *given).result["steps"] == 1
    done = train(preset, data, 2, *given)
    assert f"resuming {real} at step 1" in done.err
    assert done.result["eval"] == plain[0]
    assert {"config.json", "checkpoints", "summary.json"} <= set(os.listdir(real))
    monkeypatch.chdir(ELSEWHERE)
    assert measures(real, good, tmp_path / "scores.csv") == plain[1]


# The names of folders in each other, of the run's folder in them, and of the data's folder beside that.
IN_NINES = [(*list(NAMES), "brackets")[n : n + 9] for n in range(0, len(NAMES), 9)]


@pytest.mark.parametrize("names", IN_NINES, ids=", ".join)
def test_names_of_parents_run_folder_and_data(preset, good, plain, tmp_path, monkeypatch, names):
    *parents, run, data = (NAMES[name] for name in names)
    parent = "/".join(parents)
    real = tmp_path / "in" / parent / run
    real.parent.mkdir(parents=True)
    shutil.copytree(good, real.parent / data)
    monkeypatch.chdir(tmp_path / "in")
    tried(preset, good, plain, [f"--out=./{parent}/{run}"], real, tmp_path, monkeypatch, data=f"./{parent}/{data}")
    assert os.listdir(tmp_path / "in") == parents[:1] and sorted(os.listdir(real.parent)) == sorted([run, data])


LINKS = {
    "two dots": ("up/../run", "in/run"),
    "two dots first": ("../run", "run"),
    "one dot": (".", "in"),
    "home": ("~/my run", "home/my run"),
    "slash at the end": ("run/", "in/run"),
    "two slashes": ("up//run", "in/up/run"),
    "missing parents": ("a/b/run", "in/a/b/run"),
    "missing parent left again": ("gone/../run", "in/run"),
    "link to a folder": ("link", "far/away"),
    "link to nothing yet": ("dangling", "far/new"),
    "link in a parent": ("link/run", "far/away/run"),
    "two dots after a link": ("link/../run", "far/run"),
}


@pytest.mark.parametrize(("given", "real"), LINKS.values(), ids=LINKS)
def test_a_way_to_the_run_folder(preset, good, plain, tmp_path, monkeypatch, given, real):
    for folder in ("in", "far/away", "home"):
        (tmp_path / folder).mkdir(parents=True)
    if real != "in":
        (tmp_path / "in/up").mkdir()
        (tmp_path / "in/link").symlink_to("../far/away")
        (tmp_path / "in/dangling").symlink_to(tmp_path / "far/new")
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tried(preset, good, plain, ["--out", given], tmp_path / real, tmp_path, monkeypatch)


REFUSED = {
    "read-only parent": ("/sys/recjax/run", 1, "/sys/recjax/run cannot be written: .*Choose an --out where you may"),
    "file as parent": ("{in}/file/run", 1, "file/run cannot be written: Not a directory"),
    "file": ("{in}/file", 2, "file is a file. Name a folder"),
    "too long": ("{in}" + 16 * ("/" + "n" * 240), 2, "is a path of [0-9,]+ bytes; a run folder's may have 3,840"),
    "name too long": ("{in}/" + "n" * 256, 1, "cannot be written: File name too long"),
    "bytes that are no text": ("{in}/" + os.fsdecode(b"a\xffb"), 2, r"a\\udcffb' is no UTF-8: .*Rename"),
    "nobody's home": ("~nobody-of-that-name/run", 2, r"no home folder of ~nobody-of-that-name\. Write \./~nobody-"),
    "links in a circle": ("{in}/circle/run", 1, "circle/run cannot be written: "),
}


@pytest.mark.parametrize(("given", "status", "words"), REFUSED.values(), ids=REFUSED)
def test_a_path_that_is_refused(preset, good, tmp_path, monkeypatch, given, status, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(main, "build_trainer", lambda *_, **__: pytest.fail("it began"))
    out = given.replace("{in}", str(tmp_path))
    assert_refused(train(preset, good, 1, "--out", out), status, words)
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_text() == "mine"
    for verb in (("eval", out), ("predict", out, "--input", good, "--out", tmp_path / "scores.csv")):
        assert_refused(inside(*verb), 2)


def test_a_path_as_long_as_can_be(preset, good, plain, tmp_path, monkeypatch):
    """Names of its files with their whole paths have hardly any room left."""
    room = 3840 - len(str(tmp_path)) - 1
    names = ["n" * 100] * (room // 101)
    names[-1] += "n" * (room - len("/".join(names)))
    real = tmp_path.joinpath(*names)
    assert len(str(real)) == 3840
    tried(preset, good, plain, ["--out", real], real, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="is a path of 3,841 bytes"):
        recjax.fit(recjax.load(str(preset)), f"{real}n")


def test_nul_and_a_working_folder_that_is_gone(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="holds a NUL"):
        recjax.fit(recjax.load("synthetic"), "a\0b")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for given in ("run", "./~run"):
        with pytest.raises(ConfigError, match="the working folder is gone"):
            located(given)


def test_a_path_is_expanded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert expanded("~/x") == located("~/x") == tmp_path / "home" / "x"
    assert expanded("~") == tmp_path / "home"
    assert expanded("a/~") == Path("a/~") and expanded("runs/x") == Path("runs/x")
    for literal in ("~x", "~", "-x"):  # which pathlib writes without the dot
        assert expanded(f"./{literal}") == expanded(expanded(f"./{literal}")) == tmp_path / literal


def test_a_plain_folder_stays_open_as_long_as_it_is_read(tmp_path):
    (tmp_path / "a[b]").mkdir()
    (tmp_path / "a[b]" / "file").write_text("mine")
    handles = len(os.listdir("/proc/self/fd"))
    plain = Plain(tmp_path / "a[b]")
    (tmp_path / "a[b]").rename(tmp_path / "other")
    assert (plain.path / "file").read_text() == "mine"
    del plain
    assert len(os.listdir("/proc/self/fd")) == handles


def test_home_from_python(preset, good, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(good, tmp_path / "data")
    config = recjax.load(str(preset), *OWN, "train.steps=2", "data.path=~/data")
    assert recjax.fit(config, "~/runs/x")["eval"] == plain[0]
    assert recjax.evaluate("~/runs/x")["auc"] == plain[0]["auc"]
    assert recjax.predict("~/runs/x", "~/data", "~/scores.csv")["rows"] == 300
    assert (tmp_path / "scores.csv").read_text() == plain[1][1]
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["data"]["path"] == "~/data"
    assert not (tmp_path / "runs/x/paths.json").exists(), "where a home is, is no secret of the run"


def test_home_of_plans_presets_and_sweeps(preset, good, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    shutil.copy(preset, home / "small.py")
    where = (*OWN, f"data.path={good}")
    made = inside("plan", "~/small.py", *where, "plan=table_wise", "--save=~/plan.json", "--json").result
    assert inside("plan", "~/small.py", *where, "plan=~/plan.json", "--json").result["tables"] == made["tables"]
    (home / "two.toml").write_text('preset = "~/small.py"\n[grid]\nseed = [0, 1]\n')
    sweep = inside("sweep", "~/two.toml", "--out=~/sweep", "--dry-run", "--json").result
    assert sweep["out"] == str(home / "sweep") and sweep["runs"][0]["out"].startswith(str(home / "sweep"))
    sweep = inside("sweep", "~/two.toml", "--out=-x", "--dry-run", "--json").result  # no option of `recjax train`
    assert sweep["runs"][0]["out"].startswith(f"{tmp_path}/-x/")
    assert os.listdir(tmp_path) == ["home"]


@pytest.fixture
def there(preset, good, tmp_path, monkeypatch):
    """The folder of a run trained with relative paths of data and plan, the present one: in/run, in/data, in/p.json."""
    shutil.copytree(good, tmp_path / "in" / "data")
    monkeypatch.chdir(tmp_path / "in")
    assert inside("plan", preset, *OWN, "data.path=data", "plan=table_wise", "--save", "p.json").status == 0
    assert train(preset, "data", 1, "plan=p.json", "--out", "run").result["steps"] == 1
    return tmp_path / "in"


def test_relative_data_and_plan_are_found_from_elsewhere(preset, good, plain, there, tmp_path, monkeypatch):
    config = (there / "run/config.json").read_bytes()
    assert json.loads(config)["data"]["path"] == "data" and json.loads(config)["plan"] == "p.json"
    remembered = {"data": str(there / "data"), "p.json": str(there / "p.json")}
    assert json.loads((there / "run/paths.json").read_text()) == remembered
    monkeypatch.chdir(ELSEWHERE)
    (there / "p.json").unlink()  # the run has a copy
    done = train(preset, "data", 2, "plan=p.json", "--out", there / "run")
    assert done.result["eval"] == plain[0]
    assert f"data.path=data: it is not at {ELSEWHERE}/data, so {there}/data is taken, as when the run was" in done.err
    assert measures(there / "run", good, tmp_path / "scores.csv") == plain[1]
    assert (there / "run/config.json").read_bytes() == config.replace(b'"steps": 1', b'"steps": 2')
    assert json.loads((there / "run/paths.json").read_text())["data"] == str(there / "data"), "not ELSEWHERE"

    shutil.copytree(good, tmp_path / "other" / "data")
    monkeypatch.chdir(tmp_path / "other")
    done = inside("eval", there / "run", "--json")
    assert done.result["auc"] == plain[0]["auc"] and "is taken" not in done.err, "what is here comes first"


@pytest.mark.parametrize("given", ["/**/none.csv", "../" * 40 + "*/**/none.csv", "*none.csv"])
def test_no_run_has_the_whole_machine_searched(tmp_path, given):
    """By its settings, or by what it says of the place where they led."""
    (tmp_path / "paths.json").write_text('{"*none.csv": "/*/*/*/none.csv"}')
    config = recjax.load("synthetic", ["data=table", f"data.from={given}", "data.label=clicked"])
    with pytest.raises(ConfigError, match=rf"^data.from={re.escape(given)} means all folders of this machine, which"):
        resolve_data_sources(config, tmp_path, print)


def test_data_that_are_not_there_any_more(preset, good, plain, there, tmp_path, monkeypatch):
    monkeypatch.chdir(ELSEWHERE)
    (there / "data").rename(there / "moved")
    words = rf"the data of {there}/run, data.path=data, are not at {ELSEWHERE}/data\. Give data\.path=DIR, the folder"
    for command in (
        ("eval", there / "run"),
        ("train", preset, *OWN, "train.steps=2", "data.path=data", "--out", there / "run"),
    ):
        assert_refused(inside(*command), 3, words)
    assert inside("eval", there / "run", f"data.path={there}/moved", "--json").result["step"] == 1
    assert inside("predict", there / "run", "--input", good, "--out", tmp_path / "s.csv").status == 0, "needs no data"
    (there / "run/paths.json").unlink()  # as runs of earlier versions are
    assert_refused(inside("eval", there / "run"), 3, words)
    monkeypatch.chdir(there)
    (there / "moved").rename(there / "data")
    assert inside("eval", "run", "--json").result["step"] == 1
    assert_refused(train(preset, "nothing", 1, "--out", "new"), 3, f"no prepared data at {there}/nothing")


@pytest.mark.parametrize("text", ["", "[]", '{"data": 1}', '{"data": "a", "data": "b"}', "\xff"])
def test_damaged_memory_of_paths(there, monkeypatch, text):
    (there / "run/paths.json").write_bytes(text.encode("latin-1"))
    monkeypatch.chdir(ELSEWHERE)
    assert_refused(inside("eval", there / "run"), 2, "run/paths.json .*give data.path=DIR")
    assert inside("eval", there / "run", f"data.path={there}/data", "--json").result["step"] == 1


def test_a_process_that_goes_elsewhere_meanwhile(preset, plain, there, tmp_path, monkeypatch):
    """The data are read, and all is written, after it has changed its folder."""
    (tmp_path / "gone to").mkdir()
    alike = main.preflight.require_alike

    def go(*arguments):
        os.chdir(tmp_path / "gone to")
        return alike(*arguments)

    monkeypatch.setattr(main.preflight, "require_alike", go)
    config = recjax.load(str(preset), *OWN, "train.steps=2", "data.path=data", "plan=p.json")
    assert recjax.fit(config, "new")["eval"] == plain[0]
    assert os.listdir(tmp_path / "gone to") == []
    assert (there / "new/plan.json").read_bytes() == (there / "p.json").read_bytes()
    assert {"config.json", "checkpoints", "summary.json", "metrics.jsonl"} <= set(os.listdir(there / "new"))


def test_prepared_data_under_every_name(good, tmp_path, monkeypatch):
    """Written, verified and read; an odd name of data on their own, without a run."""
    block = open_prepared(good).read("train", 0)
    monkeypatch.chdir(tmp_path)
    for name in NAMES.values():
        out = f"./{name}/{name if len(name) < 200 else 'data'}"
        source = write_prepared(out, "own", SCHEMA, {"train": [block]}, {})
        assert source.path == tmp_path.joinpath(*out.split("/")) and source.read("train", 0).size == 300
        source.verify()
    with pytest.raises(ConfigError, match="is no UTF-8"):
        write_prepared(os.fsdecode(b"\xff"), "own", SCHEMA, {"train": [block]}, {})


def test_what_the_terminal_cannot_show(preset, tmp_path):
    recjax.load(preset)
    (tmp_path / "two.toml").write_text(f'preset = "{preset}"\n[grid]\nseed = [0, 1]\n')
    done = outside(
        "sweep", tmp_path / "two.toml", "--out=\N{GRINNING FACE}", "--dry-run", env={"PYTHONIOENCODING": "ascii"}
    )
    assert (done.status, done.out.count("\\U0001f600/")) == (0, 2), done.err
