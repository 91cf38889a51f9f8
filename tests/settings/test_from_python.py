"""Overrides from Python: texts, dicts, lists and keywords mean what the command line's texts mean."""

# mypy: disable-error-code="arg-type,dict-item"

import dataclasses
import pickle
import re

import numpy as np
import pytest

import recjax
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.embedding.optim import Adam
from recjax.embedding.segment import Exchange
from recjax.errors import ConfigError
from recjax.settings.from_python import texts
from recjax.settings.overrides import assignments, override, to_json

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

WANTED = ["seed=7", "train.epochs=2", "train.shuffle=false", "model.top=32-1", "embedding.init_scale=none"]


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (WANTED, {}),
        ([WANTED], {}),
        ([tuple(WANTED[:2]), WANTED[2:]], {}),
        (
            [
                {
                    "seed": 7,
                    "train.epochs": 2,
                    "train.shuffle": False,
                    "model.top": [32, 1],
                    "embedding.init_scale": None,
                }
            ],
            {},
        ),
        (
            [
                {"seed": 7},
                {"train": {"epochs": 2, "shuffle": False}, "model": {"top": (32, 1)}},
                "embedding.init_scale=none",
            ],
            {},
        ),
        (
            [],
            {
                "seed": np.int64(7),
                "train": {"epochs": 2.0, "shuffle": np.bool_(False)},
                "model": {"top": np.array([32, 1])},
                "embedding": {"init_scale": None},
            },
        ),
        (
            [{"seed": 7}],
            {"train.epochs": 2, "train.shuffle": False, "model.top": [32, 1], "embedding": {"init_scale": None}},
        ),
    ],
)
def test_every_form_gives_the_same_config(overrides, settings):
    assert recjax.load("synthetic", *overrides, **settings) == recjax.load("synthetic", *WANTED)
    assert recjax.override(recjax.load("synthetic"), *overrides, **settings) == recjax.load("synthetic", *WANTED)


def test_values_read_back_to_themselves():
    for value in (0.1, 1 / 3, 1e-30, 5e300, np.float32(0.1), 2, np.int32(3)):
        config = recjax.load("synthetic", {"train.optimizer.learning_rate": value})
        assert config.train.optimizer.learning_rate == float(value)
    assert recjax.load("synthetic", {"model.top": (1,)}).model.top == (1,)
    assert recjax.load("synthetic", {"data.path": "a=b, c"}, data="prepared").data.path == "a=b, c"


def test_a_group_with_its_kind_and_as_a_dataclass():
    wanted = recjax.load("synthetic", "embedding.optimizer=adam", "embedding.optimizer.learning_rate=0.3")
    for value in ({"kind": "adam", "learning_rate": 0.3}, Adam(learning_rate=0.3)):
        assert recjax.load("synthetic", {"embedding.optimizer": value}) == wanted
    shown = dataclasses.replace(recjax.load("synthetic"), embedding=EmbeddingConfig(dim=8, optimizer=Adam()))
    assert texts(embedding=shown.embedding)
    assert override(recjax.load("synthetic"), texts(embedding=shown.embedding)).embedding == shown.embedding


def test_a_group_with_a_field_called_kind():
    """Which does not choose a class, as that of an optimizer does."""
    wanted = recjax.load("synthetic", "embedding.exchange.forward=int8", "embedding.exchange.kind=rows")
    for value in ({"kind": "rows", "forward": "int8"}, Exchange("int8")):
        assert recjax.load("synthetic", {"embedding.exchange": value}) == wanted
    pooled = recjax.load("synthetic", "embedding.exchange.kind=pooled")
    assert pooled.embedding.exchange == Exchange(kind="pooled")
    assert override(RunConfig(), assignments(pooled)) == pooled
    with pytest.raises(ConfigError, match="embedding.exchange=int8: embedding.exchange is a group of settings"):
        recjax.load("synthetic", "embedding.exchange=int8")


class DataFrame:
    shape, columns = (1000, 1), ["label"]

    def __iter__(self):
        return iter(self.columns)

    def __repr__(self):
        return "label\n" * 1000


@pytest.mark.parametrize(
    ("call", "patterns"),
    [
        (lambda: recjax.load("synthetic", 5), ["5 is no override. Give"]),
        (lambda: recjax.load("synthetic", DataFrame()), [r"a DataFrame of shape \(1000, 1\) is no override"]),
        (
            lambda: recjax.load("synthetic", data=DataFrame()),
            [
                r"data is a DataFrame of shape \(1000, 1\), which no setting can be",
                r"recjax\.prepare\(table, label",
                "data=table data.path=FOLDER",
            ],
        ),
        (lambda: recjax.load(DataFrame()), [r"needs the name of a preset, not a DataFrame .*docs/guides/own_data\.md"]),
        (lambda: recjax.load("synthetic", {5: 2}), ["5 is no key of a setting"]),
        (lambda: recjax.load("synthetic", {"train.epochs": object()}), ["train.epochs is a object, which no setting"]),
        (lambda: recjax.load("synthetic", epochs=2), ["unknown key 'epochs'. Did you mean .*train.epochs"]),
        (lambda: recjax.load("synthetic", {"train.epochs": 2.5}), [r"train\.epochs=2\.5: expected an integer"]),
        (lambda: recjax.fit(DataFrame()), ["fit needs a config, not a DataFrame", r"recjax\.prepare\(table"]),
        (lambda: recjax.fit("synthetic"), ["fit needs a config, not 'synthetic'"]),
        (lambda: recjax.fit(recjax.load("synthetic"), {"seed": 2}), ["needs the path .* Overrides stand after"]),
        (lambda: recjax.override("synthetic", "seed=1"), ["override needs a config, not 'synthetic'"]),
        (lambda: recjax.predict("run", DataFrame(), "scores.csv"), ["as input, not a DataFrame"]),
    ],
)
def test_mistakes_are_one_paragraph(call, patterns):
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert all(re.search(pattern, text) for pattern in patterns), text
    assert "\n" not in text and len(text) < 600


def test_an_assignment_says_how_configs_are_changed(preset):
    config = recjax.load(str(preset))
    for inner, name in ((config, "seed"), (config.train, "epochs"), (config.embedding.optimizer, "learning_rate")):
        before = getattr(inner, name)
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"cannot assign to .*recjax\.override\(config, {"):
            setattr(inner, name, 2)
        assert getattr(inner, name) == before
    assert pickle.loads(pickle.dumps(config.train)) == config.train
    assert to_json(dataclasses.replace(config, seed=4)) == to_json(recjax.override(config, seed=4))


@pytest.mark.full
def test_fit_evaluate_and_predict_take_them(preset, good, tmp_path):
    config = recjax.load(str(preset), data="prepared", **{"data.path": good}, train={"steps": 1, "batch_size": 64})
    summary = recjax.fit(config, tmp_path / "run", {"mesh.devices": 2}, train={"steps": 2})
    assert (summary["steps"], summary["devices"]) == (2, 2)
    result = recjax.evaluate(tmp_path / "run", {"mesh": {"devices": 1}}, by="x", train={"eval_batch_size": 100})
    assert set(result["by"]) == {"x"}
    done = recjax.predict(tmp_path / "run", good, tmp_path / "s.csv", mesh={"devices": 1})
    assert done["rows"] == 300
    with pytest.raises(ConfigError, match="unknown key 'byy'"):
        recjax.evaluate(tmp_path / "run", byy="x")
