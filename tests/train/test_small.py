"""What takes the place of a recipe on a small training split."""

import dataclasses

import pytest
from support.commands import inside

from recjax.config import presets
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import Constant, DenseAdagrad, DenseSgd, Polynomial, TrainConfig
from recjax.embedding.optim import Adagrad, Adam, Sgd
from recjax.errors import ConfigError
from recjax.settings.overrides import from_json, to_json
from recjax.sweep.file import read_sweep

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

RECIPE = RunConfig(
    embedding=EmbeddingConfig(optimizer=Sgd(18.0)),
    train=TrainConfig(
        batch_size=32_768,
        optimizer=DenseSgd(18.0),
        schedule=Polynomial(8000, 70_000, 30_000),
        eval_every=6400,
        accumulate=512,
        eval_batch_size=777,
    ),
    small=SmallData(
        50_000_000, steps=400, epochs=2, evaluations=4, patience=3, optimizer=DenseAdagrad(0.02), tables=Adagrad(0.03)
    ),
)


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
    plain = RunConfig()
    assert plain.for_rows(plain.train.batch_size) is plain  # 0: never
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
        ({"epochs": -1}, "epochs is -1"),
        ({"evaluations": 0}, "evaluations is 0"),
        ({"patience": -1}, "patience is -1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"eval_every": -1}, "eval_every is -1; it must be at least 0"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        SmallData(**settings)


# What somebody writes on the command line, and the setting that a small training split is then trained with.
WRITTEN = {
    "train.batch_size=512": ("train.batch_size", 512),
    "train.epochs=7": ("train.epochs", 7),
    "train.optimizer=sgd": ("train.optimizer", DenseSgd()),
    "train.optimizer.learning_rate=0.3": ("train.optimizer", DenseSgd(0.3)),
    "train.schedule.warmup_steps=5": ("train.schedule", Polynomial(5, 70_000, 30_000)),
    "train.eval_every=0": ("train.eval_every", 0),
    "train.patience=0": ("train.patience", 0),
    "embedding.optimizer=adam": ("embedding.optimizer", Adam()),
    "embedding.optimizer.learning_rate=2": ("embedding.optimizer", Sgd(2.0)),
}


def at(config, key):
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


@pytest.mark.parametrize("text", WRITTEN)
def test_what_somebody_writes_holds_on_small_data_too_and_nothing_else_changes(text):
    key, value = WRITTEN[text]
    config = presets.override(RECIPE, [text])
    small = config.for_rows(100_000)
    assert at(small, key) == value
    others = {key for key, _ in WRITTEN.values()} - {key, "train.eval_every"}  # which follows from the batch size
    plain = RECIPE.for_rows(100_000)
    assert all(at(small, other) == at(plain, other) for other in others)
    assert from_json(RunConfig, to_json(config)).for_rows(100_000) == small, "a resumed run decides the same"


def test_the_kind_that_the_recipe_has_is_chosen_for_small_data_with_values_of_its_own():
    """A learning rate for billions of samples is none for thousands."""
    config = presets.override(RECIPE, ["train.optimizer=sgd", "train.optimizer.l2=0.5", "embedding.optimizer=sgd"])
    assert config.train.optimizer == dataclasses.replace(RECIPE.train.optimizer, l2=0.5)
    assert config.embedding.optimizer == RECIPE.embedding.optimizer
    small = config.for_rows(100_000)
    assert (small.train.optimizer, small.embedding.optimizer) == (DenseSgd(l2=0.5), Sgd())
    assert presets.override(config, ["train.optimizer=sgd"]).small.optimizer == DenseSgd(l2=0.5)  # and keeps these


def test_a_setting_for_small_data_beside_it_keeps_its_meaning():
    texts = ["train.epochs=7", "small.epochs=4", "train.batch_size=4096", "small.steps=100"]
    for order in (texts, texts[::-1]):
        config = presets.override(RECIPE, order)
        assert (config.train.epochs, config.for_rows(100_000).train.epochs) == (7, 4)
        assert config.for_rows(100_000).train.batch_size == 512  # 1000 would give 100 steps


def test_epochs_are_free_on_resume_and_other_configs_stay_what_they_were():
    longer = presets.override(RECIPE, ["train.epochs=7"])
    assert presets.default_out(longer) == presets.default_out(RECIPE)
    plain = RunConfig()
    assert presets.override(plain, ["train.patience=1"]).small == plain.small  # it has no small data


def test_a_sweep_makes_the_configs_that_its_lines_train(tmp_path):
    file = tmp_path / "patience.toml"
    file.write_text('preset = "avazu"\n[grid]\ntrain.patience = [1, 2]\n')
    made = [(run.config, presets.load("avazu", run.overrides)) for run in read_sweep(file).runs]
    assert [one for one, _ in made] == [other for _, other in made]
    assert [one.for_rows(1000).train.patience for one, _ in made] == [1, 2]


@pytest.mark.full
def test_a_run_says_so_and_resumes(tmp_path):
    settings = """
        data.rows=50,20 model.bottom=16 model.top=1 data.train_rows=640 data.validation_rows=100 data.test_rows=100
        mesh.devices=1 train.batch_size=512 train.patience=9 small.below_rows=641 small.steps=10 small.epochs=2
        """.split()
    arguments = ["synthetic", *settings, "--out", tmp_path / "run", "--json"]
    done = inside("train", *arguments)
    assert done.result["steps"] == 20  # 640 / 64, twice
    assert "has 640 samples, fewer than small.below_rows=641, so small.* holds instead" in done.err
    for setting in ("train.batch_size=64", "train.optimizer.learning_rate=0.02", "embedding.optimizer=adagrad"):
        assert setting in done.err
    assert "resuming" not in done.err
    assert "patience=" not in done.err  # as it was asked for
    more = inside("train", *(str(a).replace("epochs=2", "epochs=3") for a in arguments))
    assert more.result["steps"] == 30 and "resuming" in more.err
    assert inside("eval", tmp_path / "run", "--json").result["step"] == more.result["eval_step"]
    plain = inside("train", *arguments[:-3], "small.below_rows=640", "--json", "--out", tmp_path / "other")
    assert plain.result["steps"] == 4 and "small" not in plain.err  # the preset's two epochs of 512


def test_the_plan_is_that_of_the_run():
    arguments = ["synthetic", "data.train_rows=640", "small.below_rows=641", "small.tables=sgd", "--json"]
    tables = inside("plan", *arguments).result["tables"]
    assert {table["optimizer"] for table in tables.values()} == {"sgd"}
    assert presets.load("synthetic").embedding.optimizer.kind == "rowwise_adagrad"


def test_a_batch_holds_all_rows_at_most():
    config = RunConfig(train=TrainConfig(batch_size=1000, accumulate=700))
    assert config.for_rows(1000) is config
    fewer = config.for_rows(600)
    assert (fewer.train.batch_size, fewer.train.accumulate) == (600, 600)
    assert dataclasses.replace(fewer, train=config.train) == config, "nothing else changes"
