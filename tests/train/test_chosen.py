"""Which checkpoint a verb takes: the one that validation chose, another with --step, and it says which."""

import numpy as np
import pytest
from support.commands import OWN, arrays, assert_refused, inside

import recjax

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]

STEPS = 4


@pytest.fixture(scope="module")
def run(preset, good, tmp_path_factory):
    """A run whose best step is not its last; and summary.json."""
    out = tmp_path_factory.mktemp("chosen") / "run"
    more = (f"data.path={good}", f"train.steps={STEPS}", "train.eval_every=1", "model.interaction=dot")
    summary = inside("train", preset, *OWN, *more, "--out", out, "--json").result
    assert summary["eval_step"] < STEPS and summary["chosen_by"] == "validation auc"
    return out, summary


def taken(run, good, tmp_path, *step):
    """The results of each verb."""
    predict = ("predict", run, "--input", good, "--out", tmp_path / "scores.csv")
    export = ("weights", "export", run, "--format", "torchrec", "--out", tmp_path / "weights.npz")
    return [inside(*verb, *step, "--json") for verb in (("eval", run), predict, export)]


def test_all_verbs_take_the_one_that_validation_chose(run, good, tmp_path):
    out, summary = run
    best = summary["eval_step"]
    done = taken(out, good, tmp_path)
    assert [one.result["step"] for one in done] == [best] * 3
    for one in done:
        assert f"this is step {best}, which validation chose; the newest is --step {STEPS}" in one.err
    assert done[0].result.items() >= summary["eval"].items(), "that of summary.json"
    assert (tmp_path / "scores.csv").read_text().count("\n") == 301
    exported = np.load(tmp_path / "weights.npz")
    (bias,) = (exported[key] for key in exported if key == "dense_arch.model._mlp.0._linear.bias")
    held = [
        array for name, array in arrays(out, best).items() if name.startswith("/dense") and array.shape == bias.shape
    ]
    assert any((array == bias).all() for array in held)


def test_step_names_another(run, good, tmp_path):
    out, summary = run
    best = summary["eval_step"]
    for step, expected in ((STEPS, STEPS), ("newest", STEPS), (best, best)):
        done = taken(out, good, tmp_path, "--step", step)
        assert [one.result["step"] for one in done] == [expected] * 3
        assert not any("which validation chose" in one.err for one in done)
    assert_refused(inside("eval", out, "--step", 99), 1, rf"no checkpoint of step 99; .*{best}.*{STEPS}")
    bad = inside("eval", out, "--step", "latest")
    assert bad.status == 2 and "'latest' is neither a step nor `newest`" in bad.err
    assert inside("eval", out, "--step", "-1").status == 2


def test_from_python_too(run, good, tmp_path):
    out, summary = run
    chosen, newest = recjax.evaluate(out), recjax.evaluate(out, step="newest")
    assert (chosen["step"], newest["step"]) == (summary["eval_step"], STEPS)
    assert chosen["auc"] == summary["eval"]["auc"] != newest["auc"]
    steps = [recjax.predict(out, good, tmp_path / "s.csv", step=step)["step"] for step in (None, "newest", STEPS)]
    assert steps == [summary["eval_step"], STEPS, STEPS]


def test_weights_come_in_and_go_out_by_odd_paths(run, preset, good, tmp_path, monkeypatch):
    out, summary = run
    (tmp_path / "a[b]").mkdir()
    (tmp_path / "link").symlink_to("a[b]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "a[b]"))
    assert inside("weights", "export", out, "--format", "torchrec", "--out=~/w.npz").status == 0
    more = (f"data.path={good}", "model.interaction=dot", "--out=./link/../back\\slash")
    assert inside("weights", "import", "./link/w.npz", preset, *OWN, *more).status == 0
    monkeypatch.chdir("/")
    result = inside("eval", tmp_path / "back\\slash", "--json").result
    assert (result["step"], result["auc"]) == (0, summary["eval"]["auc"])
