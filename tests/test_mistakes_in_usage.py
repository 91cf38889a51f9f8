"""A mistake in a command line or a config is one paragraph with place and remedy, status 2, and leaves no folder."""

from pathlib import Path

import pytest
from support.commands import assert_refused, inside

import recjax
from recjax.errors import ConfigError

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


def test_a_setting_that_cannot_be(preset, tmp_path):
    """Of the command one; what the trainer's own settings refuse, before anything is compiled."""
    done = inside("train", preset, "train.steps=1.5", "--out", tmp_path / "run")
    assert_refused(done, 2, r"train.steps=1.5: expected an integer.* Write for example train.steps=1000\.")
    assert not (tmp_path / "run").exists()
    for change, pattern in (
        ("trane.steps=3", "unknown key 'trane.steps'.* Did you mean train.steps"),
        ("data.path=x", "it exists only with data=(movietweetings|prepared)"),
        ("mesh.devices=0.5", r"mesh.devices=0.5: expected an integer.* Write for example mesh.devices=8\."),
        ("train.optimizer=sdg", "expected sgd, adagrad, adam or optax, not 'sdg'"),
        ("compute_dtype=float16", "expected float32, tensorfloat32, tensorfloat32x3, bfloat16 or float64"),
        ("train.batch_size=0", "train: batch_size is 0; it must be at least 1"),
        ("embedding.optimizer.learning_rate=-1", "embedding.optimizer: learning_rate is -1.0; it must be positive"),
        ("seed=-1", "seed is -1; it must be 0 to 4294967295"),
        ("data.rows=", "data: rows is empty"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            recjax.load(preset, change)


def test_a_preset_that_is_none(tmp_path, monkeypatch):
    """More of it: tests/test_preset_files.py."""
    monkeypatch.chdir(tmp_path)
    run = "from recjax.config.run import RunConfig\n"
    for text, pattern in (
        ("from recjax.config.train import TrainConfig\nconfig = TrainConfig()", "is a TrainConfig, not a RunConfig"),
        (f"{run}config = RunConfig(sed=1)", "small.py:2: .*keyword.*'sed'"),
        (f"{run}config = RunConfig(seed=-1)", "small.py:2: seed is -1"),
    ):
        Path("small.py").write_text(text)
        with pytest.raises(ConfigError, match=pattern):
            recjax.load("small.py")
    for name, pattern in (
        ("seed=1", "no preset 'seed=1'"),
        ("nowhere/small.py", "no file 'nowhere/small.py'.* path of a .py file"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            recjax.load(name)
    done = inside("train", "movietweeting", "--out", "run")
    assert_refused(done, 2, "no preset 'movietweeting'.* Did you mean movietweetings.* Presets: .*movietweetings")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["trian"], r"invalid choice: 'trian' .*train.*\. Did you mean train\?"),
        (["data", "prepair"], r"Did you mean prepare\? See `recjax data --help`"),
        (["weights", "exprot"], r"Did you mean export\?"),
        (["simulate", "workloda"], r"Did you mean workload\?"),
        (["trace", "reprot", "traces/first"], r"Did you mean trace report\?"),
        ([], "required: VERB"),
        (["train"], r"required: preset\. For example: recjax train movietweetings .* See `recjax train --help`"),
        (["eval"], r"required: DIR\."),
        (["predict"], r"required: DIR, --out\."),
        (["predict", "runs/x"], r"required: --out\."),
        (["train", "movietweetings", "--outt=x"], r"unrecognized argument: --outt=x\. Did you mean --out\? .*--help"),
        (["train", "movietweetings", "--out"], "--out: expected one argument"),
        (["train", "movietweetings", "--out", "x", "seed"], r"argument: seed\. Settings are written KEY=VALUE"),
        (["train", "movietweetings", "--seed", "3"], r"argument: --seed\. .*without dashes: seed=3\."),
        (["train", "--seed", "3", "movietweetings"], r"without dashes: seed=3\."),
        (["train", "movietweetings", "--train.epochs=3"], r"without dashes: train\.epochs=3\."),
        (["eval", "runs/x", "--data.path", "there"], r"without dashes: data\.path=there\."),
        (["train", "movietweetings", "--epochs", "3"], r"without dashes: train\.epochs=3\."),
        (["train", "table", "--label=y", "data.from=x.csv"], r"--label=y\. .*without dashes: data\.label=y\."),
        (["train", "table", "--from", "x.csv"], r"without dashes: data\.from=x\.csv\."),
        (["train", "movietweetings", "--batch-size"], r"without dashes: train\.batch_size=VALUE\."),
        (
            ["show", "movietweetings", "--learning-rate=1"],
            r"embedding\.optimizer\.learning_rate=1 or train\.optimizer\.learning_rate=1\.",
        ),
        (["data", "prepare", "movietweetings", "--out", "x", "--min-user-count", "5"], r"dashes: min_user_count=5\."),
        (["sweep", "x", "--epochs", "3"], r"argument: --epochs\. See `recjax sweep --help`"),
        (["eval", "runs/x", "--step", "ten"], "--step: 'ten' is neither a step nor `newest`"),
        (["eval", "runs/x", "--split", "tset"], r"--split: invalid choice: 'tset' .*validation.*Did you mean test\?"),
        (["data"], r"required: ACTION\. For example: recjax data info movietweetings\."),
        (["study"], r"required: NAME\. For example: recjax study tiers --out studies/tiers\."),
        (["serve", "runs/x", "--port", "http"], r"argument --port: 'http' is no whole number\."),
        (["plan", "movietweetings", "--memory-gib", "lots"], r"argument --memory-gib: 'lots' is no number\."),
        (["tune", "search", "--trials", "-3"], r"error: --trials is -3; expected an integer from 1 on\."),
        (["train", "data=clicks.csv"], r"no preset.* To train on this .* data\.from=clicks\.csv data\.label"),
        (["train", "table", "data=clicks.csv"], r"not a file of them\. To train on this .*data\.from=clicks\.csv"),
        (["data", "prepare", "movietweetings"], "required: .*--out"),
        (["show", "synthetic", "train.steps=", "3"], r"has no '='\. Write KEY=VALUE, without spaces"),
    ],
)
def test_wrong_usage(arguments, pattern):
    done = inside(*arguments)
    assert done.err == f"\n{assert_refused(done, 2, pattern)}\n"
