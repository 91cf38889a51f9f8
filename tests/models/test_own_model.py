"""A model that a preset brings itself, which looks at a feature's rows one by one: `history_preset.py`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import assert_refused, inside, lines_of, outside
from support.pages import marked

import recjax
from recjax import settings as machinery
from recjax.config.preset_files import class_path, find_class
from recjax.config.presets import default_out
from recjax.config.run import RunConfig
from recjax.embedding.elements import Elements
from recjax.errors import ConfigError
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_inputs, abstract_state
from recjax.train.first_batch import sample
from recjax.train.run.folder import read_config

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

PRESET = Path(__file__).with_name("history_preset.py")
SHORT = ("train.steps=4", "train.log_every=1", "train.checkpoint_every=2")


@pytest.fixture(scope="module")
def history():
    """The preset's classes and functions, by name."""
    return vars(sys.modules[type(recjax.load(str(PRESET))).__module__])


@pytest.fixture
def preset(tmp_path):
    """A copy of the preset, elsewhere."""
    return shutil.copy(PRESET, tmp_path / "mine.py")


def test_attention_by_hand(history):
    rows = jnp.asarray([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
    sequence = Elements(rows, jnp.asarray([0, 0, 2], jnp.int32), 2)
    query = jnp.asarray([[np.sqrt(2) * np.log(3), 0.0], [1.0, 1.0]], jnp.float32)
    # scores ln 3 and 0: weights 3/4 and 1/4; of an empty history nothing, and no NaN
    np.testing.assert_allclose(history["attend"](query, sequence, 1.0), [[0.75, 0.5], [0.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(history["attend"](query, sequence, 0.0), [[0.5, 1.0], [0.0, 0.0]], atol=1e-6)


def losses(out, *settings):
    assert inside("train", PRESET, *SHORT, *settings, "--out", out).status == 0
    return [line["loss"] for line in lines_of(out, "train")]


@pytest.mark.full
def test_equal_weights_train_as_mean_pooling_does_and_on_any_mesh(tmp_path):
    mean = losses(tmp_path / "mean", "embedding.features.sparse_1.pooling=mean")
    even = losses(tmp_path / "even", "model.sharpness=0", "mesh.devices=3")
    np.testing.assert_allclose(even, mean, rtol=1e-5)
    assert len(mean) == 4


@pytest.mark.full
def test_its_run_is_a_run_like_any_other(preset, tmp_path):
    out = tmp_path / "run"
    assert inside("train", preset, *SHORT, "model.hidden=8", "--out", out, "--json").result["steps"] == 4
    assert json.loads((out / "config.json").read_text())["class"] == f"{preset}:HistoryRun"
    assert inside("train", preset, *SHORT, "model.hidden=8", "train.steps=5", "--out", out, "--json").status == 0
    done = outside("eval", out, "--json")  # in a process that never saw the preset
    assert done.result["step"] == 5
    wrong = inside("train", preset, *SHORT, "model.hidden=16", "--out", out)
    assert_refused(wrong, 2, "model.hidden: 8 there, 16 here")
    assert_refused(inside("train", "synthetic", "--out", out), 2, "model: history there, dlrm here")
    os.rename(preset, tmp_path / "other.py")
    assert_refused(
        inside("eval", out), 2, r"config\.json: the class of this config is .*mine\.py:HistoryRun: cannot read"
    )
    assert inside("train", tmp_path / "other.py", *SHORT, "model.hidden=8", "train.steps=6", "--out", out).status == 0
    assert inside("eval", out, "--json").result["step"] == 6


def test_its_config_is_a_config_like_any_other(tmp_path, history):
    config = recjax.load(str(PRESET), "model.hidden=64-32", "model.sharpness=2")
    assert machinery.flatten(config)["model.hidden"] == (64, 32)
    assert machinery.from_json(type(config), machinery.to_json(config)) == config
    assert default_out(config).name.startswith("synthetic-history-")
    assert default_out(config) != default_out(recjax.load(str(PRESET)))
    with pytest.raises(ConfigError, match=r"Did you mean model\.sharpness"):
        recjax.load(str(PRESET), "model.sharpnes=2")
    assert class_path(RunConfig) == "recjax.config.run:RunConfig"
    assert find_class("recjax.config.run:RunConfig") is RunConfig
    assert find_class(class_path(type(config))).__qualname__ == "HistoryRun"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/nowhere/gone.py:Run", "cannot read the preset /nowhere/gone.py"),
        ("gone.py:Run", "a run folder must not bring its own code"),
        ("recjax.no_such:Run", "module 'recjax.no_such' cannot be imported"),
        ("recjax.config.presets:Gone", "recjax.config.presets has no class 'Gone'"),
        ("recjax.config.presets:load", "recjax.config.presets has no class 'load'"),
        ("recjax.errors:ConfigError", "is no RunConfig"),
        ("", "module '' cannot be imported"),
        (5, "module '' cannot be imported"),
    ],
)
def test_a_class_that_cannot_be_found(tmp_path, where, message):
    plain = json.loads(machinery.to_json(recjax.load("synthetic")))
    (tmp_path / "config.json").write_text(json.dumps({"class": where, **plain}))
    with pytest.raises(ConfigError, match=rf"config\.json: the class of this config is {where}: .*{message}"):
        read_config(tmp_path)


@pytest.mark.full
def test_a_class_of_a_module_is_found_by_import(tmp_path):
    """As when a config is made in Python instead of in a preset."""
    (tmp_path / "mine.py").write_text(PRESET.read_text())
    program = (
        "import json, mine, pathlib\n"
        "from recjax.train.run.folder import RunFolder, read_config\n"
        "with RunFolder(pathlib.Path('run'), mine.config) as folder:\n"
        "    folder.claim()\n"
        "assert json.loads((folder.path / 'config.json').read_text())['class'] == 'mine:HistoryRun'\n"
        "assert read_config(folder.path) == mine.config\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_built_in_models_take_no_sequences(tmp_path):
    done = inside("train", "synthetic", "embedding.features.sparse_1.pooling=none", "--out", tmp_path / "run")
    assert_refused(done, 2, "pooling is none for sparse_1, but model=dlrm takes one vector", "sparse_1.pooling=mean")
    assert_refused(inside("plan", "synthetic", "embedding.pooling=none"), 2, "none for sparse_0, sparse_1, sparse_2")


@pytest.mark.full
def test_the_model_of_the_guide_trains(tmp_path):
    (tmp_path / "plain.py").write_text(marked("guides/own_model.md", "own-model"))
    done = inside(
        "train", tmp_path / "plain.py", "train.steps=2", "model.hidden=8", "--out", tmp_path / "run", "--json"
    )
    assert done.result["steps"] == 2
    assert inside("eval", tmp_path / "run", "--json").result["step"] == 2


# What somebody changes in the last line of the preset's model, and what is said of it.
MISTAKES = {
    "(joined.astype(self.dtype))[:, 0]": [
        ("(joined.astype(self.dtype))", r"an array of shape \[128, 1\], float32 .*return logits\[:, 0\]\.$"),
        ("(joined.astype(self.dtype))[:, 0], joined", r"gives a tuple of 2 .*Return the logits alone\.$"),
        ("(joined.astype(self.dtype))[:, 0] + missing", r"History fails with NameError: name 'missing' is not defined"),
    ],
    "self.names, self.sharpness, self.dtype = names, config.sharpness, dtype": [
        (
            "self.bn, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)",
            r"holds model\.bn: flax's BatchNorm.*recjax\.models\.stateful\.BatchNorm.*LayerNorm",
        ),
        ("self.names = names[99]", r"fails with IndexError: tuple index out of range\. Correct it\."),
    ],
}


@pytest.mark.parametrize(
    ("line", "wrong", "pattern"), [(line, *case) for line, cases in MISTAKES.items() for case in cases]
)
def test_a_mistake_in_the_model_is_one_paragraph_before_the_first_step(line, wrong, pattern, tmp_path):
    code = PRESET.read_text()
    assert code.count(line) == 1
    (tmp_path / "wrong.py").write_text(code.replace(line, wrong))
    done = inside("train", tmp_path / "wrong.py", *SHORT, "--out", tmp_path / "run")
    assert_refused(done, 2, pattern, r"wrong\.py:\d+")
    assert not list((tmp_path / "run").glob("checkpoints/[0-9]*"))  # so that the mended file trains in that folder


def test_probabilities_in_place_of_logits_are_noticed_when_a_step_is_traced(tmp_path, capsys):
    line = "(joined.astype(self.dtype))[:, 0]"
    (tmp_path / "sigmoid.py").write_text(PRESET.read_text().replace(f"self.mlp{line}", f"nnx.sigmoid(self.mlp{line})"))
    for preset, told in ((PRESET, []), (tmp_path / "sigmoid.py", ["the model History"])):
        trainer = build_trainer(recjax.load(str(preset)))
        shapes = abstract_state(trainer), abstract_inputs(trainer, sample(trainer).capacities)
        for step in (trainer.step_program, trainer.predict_program):  # once for both
            jax.eval_shape(step, *shapes)
        said = [line for line in capsys.readouterr().err.splitlines() if "probabilities" in line]
        assert [line.partition(" (")[0] for line in said] == told
    assert "sigmoid.py:" in said[0]
