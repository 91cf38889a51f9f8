"""A run goes on with the code that it was trained with, or not at all."""

import importlib
import json
import linecache
import os
import runpy
import shutil
import sys
import types

import pytest
from support import own_model
from support.code_of_run import BIAS, FACTOR, claimed, load, refused
from support.commands import contents, inside, lines_of

import recjax
from recjax import settings as machinery
from recjax.config import own_code
from recjax.config.presets import default_out
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.sweep import run as sweep_run
from recjax.sweep.file import read_sweep
from recjax.train import preflight
from recjax.train.run.folder import RunFolder, read_config

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]


@pytest.fixture
def file(tmp_path):
    return own_model.write(tmp_path / "code")


# Real runs.


@pytest.mark.full
def test_edited_code_under_a_run(tmp_path, file, monkeypatch):
    """By the same commands as a researcher gives them."""
    monkeypatch.chdir(tmp_path)
    train = ("train", file, "--out", "run", "--json")
    first = inside(*train).result["eval"]
    own_model.edit(file, *FACTOR)
    before = contents(tmp_path / "run") | {"summary": (tmp_path / "run/summary.json").read_bytes()}
    shown = refused(
        inside(*train), r"run holds a run of other code: mine\.py changed", "Put the code back", "another --out"
    )
    assert {"--- source/mine.py", "+++ now/mine.py", "-FACTOR = 1.0", "+FACTOR = 0.0"} <= {*shown}
    refused(inside(*train, "train.steps=3"), r"mine\.py changed")
    assert contents(tmp_path / "run") | {"summary": (tmp_path / "run/summary.json").read_bytes()} == before
    shown = refused(
        inside("eval", "run"), r"config\.json: the class of .*mine\.py:LinearRun: mine\.py changed", "--trust-code"
    )
    assert "-FACTOR = 1.0" in shown
    trusted = inside("eval", "run", "--trust-code", "--json")
    assert trusted.result["auc"] == first["auc"]
    assert "run/source is run, as --trust-code says" in trusted.err
    assert recjax.evaluate("run", trust_code=True)["auc"] == first["auc"]
    # The default folder is another one by itself; there, nothing was trained yet.
    edited = inside("train", file, "--json").result
    assert edited["eval"]["auc"] == 0.5 and "nothing is left" not in trusted.err
    # Undone, with a comment: the run goes on, as if nothing had been.
    own_model.edit(file, *FACTOR[::-1])
    own_model.edit(file, "FACTOR = 1.0", "# of the logits\n\nFACTOR = 1.0")
    own_model.edit(file, "steps=2", "steps=3")
    resumed = inside(*train)
    assert "run at step 2" in resumed.err and len(lines_of(tmp_path / "run", "train")) == 3
    undisturbed = inside("train", file, "--out", "other", "--json").result["eval"]
    assert resumed.result["eval"] == undisturbed
    assert "# of the logits" in (tmp_path / "run/source/mine.py").read_text()
    # Moved, then gone.
    moved = own_model.write(tmp_path / "moved", "ours.py")
    shutil.copy(file, moved)
    shutil.rmtree(tmp_path / "code")
    refused(inside("eval", "run"), r"mine\.py.*no such file", "--trust-code", "trust_code=True")
    refused(inside("weights", "export", "run", "--format", "facebook", "--out", "x.npz"), "--trust-code")
    assert inside("eval", "run", "--trust-code", "--json").result["auc"] == undisturbed["auc"]
    assert inside("train", moved, "--out", "run", "--json").result["eval"] == undisturbed
    assert inside("eval", "run", "--json").result["auc"] == undisturbed["auc"]  # from where it is now
    own_model.edit(tmp_path / "moved/head.py", *BIAS)
    refused(inside("eval", "run"), r"head\.py changed since")


@pytest.mark.full
def test_a_run_without_a_hash_of_its_code(tmp_path, file):
    """Its code may be any program: it runs only where one says so. Who names it himself goes on with the run."""
    out = tmp_path / "run"
    train = ("train", file, "--out", out, "--json")
    assert inside(*train).status == 0
    plain = json.loads((out / "config.json").read_text())
    source = plain.pop("source")
    (out / "config.json").write_text(json.dumps(plain))
    shutil.rmtree(out / "source")
    note = "changed since cannot be said"
    refused(
        inside("eval", out), r"gives no hash of .*mine\.py", "not run by itself", "add --trust-code .* to run it as"
    )
    assert inside("eval", out, "--trust-code").err.count(note) == 1
    done = inside(*train)  # nothing is left to train: nobody knows whether these weights are of this code
    assert done.status == 0 and done.err.count(note) == 1 and "from now on" not in done.err
    assert "source" not in json.loads((out / "config.json").read_text()) and not (out / "source").exists()
    done = inside(*train, "train.steps=3")
    assert done.status == 0 and done.err.count(note) == 1 and "from now on the folder holds it" in done.err
    assert json.loads((out / "config.json").read_text())["source"] == source
    assert note not in inside("eval", out).err
    own_model.edit(file, *FACTOR)
    refused(inside(*train, "train.steps=4"), r"mine\.py changed")


@pytest.mark.full
def test_fitting_in_a_notebook_after_an_edit(tmp_path, file, monkeypatch):
    """Each config trains the code that it was loaded with, whatever the file holds by now."""
    monkeypatch.chdir(tmp_path)
    old = load(file)
    own_model.edit(file, *FACTOR)
    new = load(file)
    assert recjax.fit(new)["eval"]["auc"] == 0.5 != recjax.fit(old)["eval"]["auc"]
    assert default_out(new) != default_out(old)
    assert "FACTOR = 1.0" in (default_out(old) / "source/mine.py").read_text()
    with pytest.raises(ConfigError, match=r"mine\.py changed"):
        recjax.fit(old, default_out(new))
    assert own_code.source_of(type(recjax.config.presets.override(old, ["seed=1"]))) == own_code.source_of(type(old))


# Which run goes on.


def test_a_folder_of_another_class(tmp_path, file):
    mine, out = load(file), tmp_path / "run"
    claimed(mine, out)
    own_model.edit(file, "config = LinearRun(", "class Other(LinearRun):\n    pass\n\n\nconfig = Other(")
    with pytest.raises(ConfigError, match=r"mine\.py changed since"):
        RunFolder(out, load(file))
    both = claimed(load(file), tmp_path / "both")
    own_model.edit(file, "config = Other(", "config = LinearRun(")
    with pytest.raises(
        ConfigError, match="holds a run of the class Other, not LinearRun"
    ):  # the same file, as it counts
        RunFolder(both, load(file))
    built_in = recjax.load("synthetic")
    shutil.rmtree(tmp_path / "code")
    with pytest.raises(ConfigError, match="holds a run of the class LinearRun, not RunConfig"):
        RunFolder(out, built_in)
    with pytest.raises(ConfigError, match="model: dlrm there, linear here"):
        RunFolder(claimed(built_in, tmp_path / "built-in"), mine)
    # The same settings, but by a class whose methods may be others.
    own_model.write(tmp_path / "code").write_text(
        "from recjax.config.run import RunConfig\nclass Mine(RunConfig):\n    pass\nconfig = Mine()\n"
    )
    with pytest.raises(ConfigError, match="holds a run of the class RunConfig, not Mine"):
        RunFolder(claimed(RunConfig(), tmp_path / "plain"), load(file))


def test_code_of_a_run_that_never_saved_may_change(tmp_path, file):
    out = claimed(load(file), tmp_path / "run", trained=False)
    own_model.edit(file, *FACTOR)
    own_model.edit(file, "bias: float = 0.0", "shift: float = 0.0")
    own_model.edit(file, "config.bias", "config.shift")
    claimed(load(file), out)
    assert "FACTOR = 0.0" in (out / "source/mine.py").read_text()
    RunFolder(out, load(file)).__exit__()


def test_a_copy_is_of_all_files_that_count(tmp_path):
    file = own_model.write(tmp_path / "code")
    own_model.edit(file, "from head import logits", "from parts.head import logits")
    (tmp_path / "code/parts").mkdir()
    os.rename(tmp_path / "code/head.py", tmp_path / "code/parts/head.py")
    (tmp_path / "code/parts/__init__.py").touch()
    (tmp_path / "code/notes.py").write_text("not imported")
    out = claimed(load(file), tmp_path / "run")
    found = sorted(str(path.relative_to(out / "source")) for path in (out / "source").rglob("*.py"))
    assert found == ["mine.py", "parts/__init__.py", "parts/head.py"]
    shutil.rmtree(tmp_path / "code")
    assert type(read_config(out, trust_code=True)).__name__ == "LinearRun"


def test_a_module_that_is_imported(tmp_path, monkeypatch):
    """`from my_models.linear import config`, as in Python instead of a preset."""
    file = own_model.write(tmp_path / "code/my_models", "linear.py")
    own_model.edit(file, "from head", "from .head")
    (file.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    module = importlib.import_module("my_models.linear")
    out = claimed(module.config, tmp_path / "run")
    kept = json.loads((out / "config.json").read_text())
    assert kept["class"] == "my_models.linear:LinearRun"
    assert kept["source"]["files"] == ["my_models/linear.py", "my_models/__init__.py", "my_models/head.py"]
    assert read_config(out) == module.config
    own_model.edit(file.parent / "head.py", *BIAS)
    RunFolder(out, module.config).__exit__()  # which this process still has as it was
    assert read_config(out) == module.config
    RunFolder(out, importlib.reload(module).config).__exit__()  # its helper is still the old one
    importlib.reload(sys.modules["my_models.head"])
    with pytest.raises(ConfigError, match=r"head\.py changed since"):
        RunFolder(out, importlib.reload(module).config)
    for name in ("my_models.linear", "my_models.head", "my_models"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"head\.py changed since"):
        read_config(out)
    assert not [name for name in sys.modules if name.startswith("my_models")]  # it was looked at, not imported
    assert type(read_config(out, trust_code=True)).__module__.endswith(".my_models.linear")
    with pytest.raises(ConfigError, match=r"head\.py changed since"):
        RunFolder(out, importlib.import_module("my_models.linear").config)
    for name in ("my_models.linear", "my_models.head", "my_models"):
        monkeypatch.delitem(sys.modules, name)


def run_cell(text, number):
    """What a notebook does with a cell."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(sys.modules["__main__"]))


def test_classes_of_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    cells = own_model.PRESET.replace("from head import logits", own_model.HELPER).split("@dataclasses", 2)
    out = tmp_path / "run"

    def run(*edit):
        for number, cell in enumerate((cells[0], "@dataclasses" + cells[1], "@dataclasses" + cells[2])):
            text = "from __future__ import annotations\n" * (number > 0) + cell
            run_cell(text.replace(*edit) if edit else text, f"{number} {edit}")
        return sys.modules["__main__"].config

    config = run()
    claimed(config, out)
    kept = (out / "source/notebook.py").read_text()
    assert "class Linear(nnx.Module)" in kept and "FACTOR = 1.0" in kept and "def logits" in kept
    assert read_config(out) == config
    RunFolder(out, run("# none", "")).__exit__()  # run again, unchanged
    for edit in (FACTOR, BIAS, ("import jax.numpy as jnp", "import numpy as jnp")):
        with pytest.raises(ConfigError, match=r"holds a run of other code: notebook\.py changed since"):
            RunFolder(out, run(*edit))
        with pytest.raises(ConfigError, match="Run the former definitions again"):
            read_config(out)
    assert default_out(run(*FACTOR)) != default_out(run())
    RunFolder(out, run("a linear model", "the linear model")).__exit__()
    sys.modules["__main__"] = types.ModuleType("__main__")
    with pytest.raises(ConfigError, match=r"a notebook or a script defined it, .* Put it into a file"):
        read_config(out)
    # Without the text of the cells nothing is known.
    monkeypatch.setattr(linecache, "getlines", lambda name: [])
    run()
    config = sys.modules["__main__"].config
    assert own_code.source_of(type(config)) is None
    RunFolder(out, config).__exit__()


def test_a_script(tmp_path, file, monkeypatch):
    """`python mine.py` has the code of `recjax train mine.py`, which may go on with its run."""
    monkeypatch.syspath_prepend(str(file.parent))
    own_model.edit(file, "config = ", "if __name__ == '__main__':\n    print('fitting')\n\nconfig = ")
    script = types.ModuleType("__main__")
    vars(script).update(runpy.run_path(str(file), run_name="__main__"))
    monkeypatch.setitem(sys.modules, "__main__", script)
    config = script.config
    monkeypatch.delitem(sys.modules, "head")
    out = claimed(config, tmp_path / "run")
    assert json.loads((out / "config.json").read_text())["class"] == "__main__:LinearRun"
    assert read_config(out) == config
    monkeypatch.delattr(script, "LinearRun")
    with pytest.raises(ConfigError, match=r"a notebook or a script defined it, .* Its code, .* is in .*source"):
        read_config(out)
    claimed(load(file), out)
    assert read_config(out).train == config.train


# What else looks at the code.


def test_all_processes_must_have_the_same_code():
    facts = [{"code of the model": text, "config": "x"} for text in ("abc", "def", "abc")]
    assert preflight.differences(dict(enumerate(facts))) == {"code of the model": {"abc": [0, 2], "def": [1]}}


@pytest.mark.full
def test_the_facts_of_a_process(file):
    from recjax.train.trainer import build_trainer

    first = preflight.facts(build_trainer(load(file)))
    own_model.edit(file.parent / "head.py", *BIAS)
    second = preflight.facts(build_trainer(load(file)))
    assert [key for key in first if first[key] != second[key]] == ["code of the model"]
    built_in = RunConfig(data=load(file).data, mesh=load(file).mesh)
    assert "code of the model" not in preflight.facts(build_trainer(built_in))


def test_a_sweep_skips_only_runs_of_the_same_code(tmp_path, file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toml = tmp_path / "mine.toml"
    toml.write_text(f'preset = "{file}"\n[grid]\nseed = [0, 1]\n')

    def runs():
        return read_sweep(toml, tmp_path / "sweep").runs

    def status():
        return [sweep_run.result(run)["status"] for run in runs()]

    assert status() == ["open", "open"]
    for run in (first := runs()):
        claimed(run.config, run.out)
        plain = {"steps": 5, "eval_step": 5, "samples_per_s": 1.0, "seconds": 1.0, "devices": 1, "versions": {}}
        (run.out / "summary.json").write_text(json.dumps(plain | {"eval": {"auc": 0.5}}))
        (run.out / "metrics.jsonl").touch()
    assert status() == ["done", "done"]
    own_model.edit(file, *FACTOR)
    assert status() == ["open", "open"] and not {run.out for run in runs()} & {run.out for run in first}
    for run, before in zip(runs(), first, strict=True):
        os.rename(before.out, run.out)  # and if it had that name all the same
    assert status() == ["open", "open"]


def test_settings_alone_name_the_folder_of_a_built_in_model(tmp_path):
    (tmp_path / "plain.py").write_text("from recjax.config.run import RunConfig\nX = 1\nconfig = RunConfig()\n")
    config = load(tmp_path / "plain.py")
    assert own_code.source_of(type(config)) is None
    assert default_out(config).name.endswith(machinery.config_hash(config, recjax.config.presets.FREE_ON_RESUME))
    kept = json.loads((claimed(config, tmp_path / "run") / "config.json").read_text())
    assert "source" not in kept and "class" not in kept and not (tmp_path / "run/source").exists()
