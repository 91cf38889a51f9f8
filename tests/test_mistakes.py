"""A user's mistake is one paragraph with place and remedy and the promised exit status, and leaves nothing that hurts.

Nothing half-written is trusted by a later run: the corrected command works in the same folder.
"""

import os
import re

import pytest
from commands import assert_refused, inside, write_preset

pytestmark = pytest.mark.usefixtures("compiled_once")

SMALL = ("train.steps=2", "mesh.devices=2")


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="module")
def clean(preset, tmp_path_factory):
    """summary.eval of the small run in a folder where nothing ever went wrong."""
    return inside("train", preset, *SMALL, "--out", tmp_path_factory.mktemp("clean") / "run", "--json").result["eval"]


# --- usage and config ---


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
        ("train.shuffle=yes", ["train.shuffle=yes: expected true or false"]),
        ("train.optimizer.learning_rate=nan", ["expected a finite number"]),
        ("train.optimizer=sdg", ["expected sgd, adagrad or adam, not 'sdg'"]),
        ("train=3", ["train is a group of settings", "train.batch_size"]),
        ("model.top=16-x-1", ["expected a list, each item an integer"]),
        ("compute_dtype=float16", ["expected float32, bfloat16 or float64"]),
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
        ("movietweeting", ["no preset 'movietweeting'", "Did you mean movietweetings?", "Presets: movietweetings"]),
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
        ("from recjax.train.options import TrainConfig\nconfig = TrainConfig()", ["is a TrainConfig, not a RunConfig"]),
        ("from recjax.presets import RunConfig\nconfig = RunConfig(sed=1)", ["small.py:2: .*keyword.*'sed'"]),
        ("from recjax.presets import RunConfig\nconfig = RunConfig(seed=-1)", ["small.py:2: seed is -1"]),
    ],
)
def test_a_broken_preset(tmp_path, text, patterns):
    (tmp_path / "small.py").write_text(text)
    assert_refused(inside("show", tmp_path / "small.py"), 2, *patterns)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["trian"], "invalid choice: 'trian' .*train"),
        ([], "required: VERB"),
        (["train"], "required: preset"),
        (["train", "movietweetings", "--outt=x"], "unrecognized argument: --outt=x .*--help"),
        (["train", "movietweetings", "--out"], "--out: expected one argument"),
        (["train", "movietweetings", "--out", "x", "seed"], "unrecognized argument: seed"),
        (["eval", "runs/x", "--step", "ten"], "--step: invalid int value: 'ten'"),
        (["eval", "runs/x", "--split", "tset"], "--split: invalid choice: 'tset' .*validation"),
        (["data"], "required: ACTION"),
        (["data", "prepare", "movietweetings"], "required: .*--out"),
    ],
)
def test_wrong_usage(arguments, pattern):
    done = inside(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("usage: recjax") and re.search(r"\nrecjax.*: error: .*" + pattern, done.err)


# --- what is found only when the run is set up: the folder stays free for the corrected command ---


@pytest.mark.parametrize(
    ("mistake", "status", "patterns", "mended"),
    [
        (["embedding.dim=16"], 2, ["model.bottom ends in 8 but embedding.dim is 16", "end model.bottom in 16"],
         ["embedding.dim=16", "model.bottom=16"]),
        (["data.test_rows=0"], 3, ["split 'test' of synthetic has no rows"], []),
        (["data.train_rows=0"], 3, ["split 'train' of synthetic has no rows"], []),
        (["mesh.devices=9"], 4, ["mesh.devices=9, but JAX sees 8 cpu", "restart the process"], []),
        (["mesh.platform=gpu"], 4, ["mesh.platform=gpu: JAX finds no such device", "cuda12"], []),
        (["plan=nowhere.json"], 2, ["plan=nowhere.json: not one of auto, row_wise, data_parallel"], []),
        (["data=prepared"], 3, ["Give it as data.path=DIR"], []),
        (["data=prepared", "data.path=nowhere"], 3, ["no prepared data at nowhere: there is no such folder",
                                                      "recjax data prepare"], []),
    ],
)  # fmt: skip
def test_the_corrected_command_works_in_the_same_folder(preset, clean, tmp_path, mistake, status, patterns, mended):
    out = tmp_path / "run"
    assert_refused(inside("train", preset, *SMALL, *mistake, "--out", out), status, *patterns)
    assert sorted(os.listdir(out)) == [".lock"]
    result = inside("train", preset, *SMALL, *mended, "--out", out, "--json").result
    assert mended or result["eval"] == clean


def test_a_config_that_a_kill_left_half_written_does_not_block_the_folder(preset, clean, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.unfinished-1234").write_text('{"seed": ')
    assert inside("train", preset, *SMALL, "--out", tmp_path, "--json").result["eval"] == clean
    assert not list(tmp_path.glob("*unfinished*"))
