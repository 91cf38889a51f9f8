"""A mistake in a command line or a config is one paragraph with place and remedy, status 2, and leaves no folder."""

import pytest
from support.commands import assert_refused, inside

pytestmark = [pytest.mark.full, pytest.mark.shared_programs, pytest.mark.light_compile, pytest.mark.few_programs]


@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        ("train.step=3", ["unknown key 'train.step'", "Did you mean train.steps"]),
        ("trane.steps=3", ["unknown key 'trane.steps'", "Did you mean train.steps"]),
        ("xyz=3", ["unknown key 'xyz'", "At the top stand seed, data,"]),
        ("data.path=x", ["it exists only with data=(movietweetings|prepared)"]),
        ("train.steps", ["'train.steps' is not an override: it has no '='", "Write KEY=VALUE"]),
        ("train.steps=many", ["train.steps=many: expected an integer", "train.steps=1000"]),
        ("train.steps=1.5", ["train.steps=1.5: expected an integer"]),
        ("mesh.devices=0.5", ["mesh.devices=0.5: expected an integer", r"Write for example mesh.devices=8\."]),
        ("train.shuffle=yes", ["train.shuffle=yes: expected true or false"]),
        ("train.optimizer.learning_rate=nan", ["expected a finite number"]),
        ("train.optimizer=sdg", ["expected sgd, adagrad, adam or optax, not 'sdg'"]),
        ("train=3", ["train is a group of settings", "train.batch_size"]),
        ("model.top=16-x-1", ["expected a list, each item an integer"]),
        ("compute_dtype=float16", ["expected float32, tensorfloat32, bfloat16 or float64"]),
        ("train.batch_size=0", ["train: batch_size is 0; it must be at least 1"]),
        ("embedding.optimizer.learning_rate=-1", ["embedding.optimizer: learning_rate is -1.0; it must be positive"]),
        ("seed=-1", ["seed is -1; it must be 0 to 4294967295"]),
        ("model.top=16-4", ["model: top ends in 4 outputs; it must end in 1"]),
        ("data.rows=", ["data: rows is empty"]),
        ("data.ids_per_bag=1,2", ["data: ids_per_bag has 2 values, but rows has 3"]),
    ],
)
def test_a_setting_that_cannot_be(preset, tmp_path, change, patterns):
    done = inside("train", preset, change, "--out", tmp_path / "run")
    assert_refused(done, 2, *patterns)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("movietweeting", ["no preset 'movietweeting'", "Did you mean movietweetings?", "Presets: .*movietweetings"]),
        ("seed=1", ["no preset 'seed=1'"]),
        ("nowhere/small.py", ["no file 'nowhere/small.py'", "path of a .py file"]),
    ],
)
def test_an_unknown_preset(tmp_path, name, patterns):
    assert_refused(inside("train", name, "--out", tmp_path / "run"), 2, *patterns)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("import nope", ["small.py:1: the preset fails with ModuleNotFoundError"]),
        ("\nx = (", ["small.py:2: the preset fails with SyntaxError"]),
        ("", ["the preset must assign a config to the name `config`"]),
        ("from recjax.config.train import TrainConfig\nconfig = TrainConfig()", ["is a TrainConfig, not a RunConfig"]),
        ("from recjax.config.run import RunConfig\nconfig = RunConfig(sed=1)", ["small.py:2: .*keyword.*'sed'"]),
        ("from recjax.config.run import RunConfig\nconfig = RunConfig(seed=-1)", ["small.py:2: seed is -1"]),
    ],
)
def test_a_broken_preset(tmp_path, text, patterns):
    (tmp_path / "small.py").write_text(text)
    assert_refused(inside("show", tmp_path / "small.py"), 2, *patterns)


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
        (["predict"], r"required: DIR, --input, --out\."),
        (["predict", "runs/x"], r"required: --input, --out\."),
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
    ],
)
def test_wrong_usage(arguments, pattern):
    last = assert_refused(inside(*arguments), 2, pattern)
    assert inside(*arguments).err == f"\n{last}\n"


@pytest.mark.parametrize("spaced", [("train.steps", "=", "3"), ("train.steps=", "3"), ("train.steps", "=3")])
def test_a_setting_with_spaces(preset, spaced):
    done = inside("show", preset, *spaced)
    assert_refused(done, 2, r"is not an override: it has (no|nothing before its) '='\. Write KEY=VALUE, without spaces")
