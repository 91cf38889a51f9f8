"""What takes the place of a recipe on a small training split."""

import pytest
from commands import inside

from recjax import presets
from recjax.embedding.optim import Adagrad, Sgd
from recjax.errors import ConfigError
from recjax.presets import EmbeddingConfig, RunConfig
from recjax.train.options import DenseAdagrad, DenseSgd, TrainConfig
from recjax.train.schedule import Constant, Polynomial
from recjax.train.small import SmallData

RECIPE = RunConfig(
    embedding=EmbeddingConfig(optimizer=Sgd(18.0)),
    train=TrainConfig(
        batch_size=32_768, optimizer=DenseSgd(18.0), schedule=Polynomial(8000, 70_000, 30_000), eval_every=6400,
        accumulate=512, eval_batch_size=777,
    ),
    small=SmallData(50_000_000, steps=400, epochs=2, evaluations=4, patience=3,
                    optimizer=DenseAdagrad(0.02), tables=Adagrad(0.03)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "batch_size", "eval_every"),
    [
        (100_000, 128, 195),  # 250 would give 400 steps; 128 gives 782, a quarter of which is 195
        (102_400, 256, 100),  # exactly 400 steps of 256
        (102_399, 128, 200),
        (1_000_000, 2048, 122),  # 489 steps
        (49_999_999, 32_768, 381),  # never more than the recipe's
        (399, 1, 99),
        (3, 1, 1),
    ],
)
def test_the_batch_gives_an_epoch_its_steps(rows, batch_size, eval_every):
    train = RECIPE.for_rows(rows).train
    assert (train.batch_size, train.eval_every) == (batch_size, eval_every)
    assert train.accumulate == min(512, batch_size)


def test_the_rest_takes_the_place_of_the_recipe_below_the_limit_only():
    assert RECIPE.for_rows(50_000_000) is RECIPE
    assert RunConfig().for_rows(1) == RunConfig()  # 0: never
    small = RECIPE.for_rows(49_999_999)
    assert small.embedding == EmbeddingConfig(optimizer=Adagrad(0.03))
    train = small.train
    assert (train.epochs, train.patience, train.schedule) == (2, 3, Constant())
    assert train.optimizer == DenseAdagrad(0.02) and train.eval_batch_size == 777
    assert (small.model, small.data, small.small) == (RECIPE.model, RECIPE.data, RECIPE.small)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"below_rows": -1}, "below_rows is -1; it must be at least 0"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"evaluations": 0}, "evaluations is 0"),
        ({"patience": -1}, "patience is -1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        SmallData(**settings)


def test_a_run_says_so_and_resumes(tmp_path, compiled_once):
    arguments = [
        "synthetic", "data.rows=50,20", "model.bottom=16", "model.top=1",
        "data.train_rows=640", "data.validation_rows=100", "data.test_rows=100",
        "mesh.devices=1", "train.batch_size=512", "small.below_rows=641", "small.steps=10", "small.epochs=2",
        "--out", tmp_path / "run", "--json",
    ]  # fmt: skip
    done = inside("train", *arguments)
    assert done.result["steps"] == 20  # 640 / 64, twice
    assert "fewer samples than small.below_rows=641: batch size 64, and otherwise as small.* says" in done.err
    assert "resuming" not in done.err
    more = inside("train", *(str(a).replace("epochs=2", "epochs=3") for a in arguments))
    assert more.result["steps"] == 30 and "resuming" in more.err
    assert inside("eval", tmp_path / "run", "--json").result["step"] == 30
    plain = inside("train", *arguments[:-3], "small.below_rows=640", "--json", "--out", tmp_path / "other")
    assert plain.result["steps"] == 4 and "small" not in plain.err  # the preset's two epochs of 512


def test_the_plan_is_that_of_the_run():
    arguments = ["synthetic", "data.train_rows=640", "small.below_rows=641", "small.tables=sgd", "--json"]
    tables = inside("plan", *arguments).result["tables"]
    assert {table["optimizer"] for table in tables.values()} == {"sgd"}
    assert presets.load("synthetic").embedding.optimizer.kind == "rowwise_adagrad"
