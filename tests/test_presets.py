"""The config of a run as a whole."""

import dataclasses
import typing
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import recjax
from recjax import settings
from recjax.config.presets import consequences, load, override
from recjax.config.run import RunConfig
from recjax.data.batch import Feature, Schema
from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.settings.overrides import config_hash, from_json
from recjax.settings.values import members
from recjax.train.table_specs import dims, specs

pytestmark = pytest.mark.light_compile

CONFIGS = Path(recjax.__file__).parent.parent / "configs"
PRESETS = sorted(file.stem for file in CONFIGS.glob("*.py"))
MODELS = ("dlrm", "dcnv2", "wide_deep", "deepfm", "shared_bottom", "mmoe", "ple")


def build(config: RunConfig, dense: int) -> None:
    """The shapes of a config's model on data of its tables' names, or of three."""
    names = [*config.embedding.tables] or ["a", "b", "c"]
    schema = Schema(tuple(f"dense_{k}" for k in range(dense)), tuple(Feature(name, 10) for name in names))
    sizes = dims(*specs(config, schema))
    nnx.eval_shape(lambda: config.model.build(dense, sizes, dtype=jnp.float32, seed=0))


def test_every_setting_has_a_default_so_that_files_of_older_versions_can_be_read() -> None:
    assert from_json(RunConfig, "{}") == RunConfig()
    classes: list[type] = [RunConfig]
    for cls in classes:
        hints: dict[str, typing.Any] = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            has = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            assert has, f"{cls.__name__}.{field.name} has no default"
            inner = [c for c in members(hints[field.name]) if isinstance(c, type) and dataclasses.is_dataclass(c)]
            classes += [c for c in inner if c not in classes]
    assert len(classes) > 8


def test_a_config_shows_what_is_not_the_default() -> None:
    assert repr(RunConfig()) == "RunConfig()"
    config = settings.override(
        RunConfig(), ["model=dcnv2", "model.top=8-1", "train.optimizer.learning_rate=0.5", "embedding.tables.a-b.dim=4"]
    )
    assert repr(config) == (
        "RunConfig(model=dcnv2, model.top=8,1, embedding.tables.a-b.dim=4, train.optimizer.learning_rate=0.5)"
    )
    assert max(map(len, repr(load("movietweetings")).splitlines())) <= 100
    assert "plan is 3; expected text" in repr(dataclasses.replace(RunConfig(), plan=3))  # type: ignore[arg-type]
    for preset in ("movietweetings", "dlrm_mlperf"):
        shown = load(preset)
        assert settings.override(RunConfig(), settings.assignments(shown)) == shown and len(repr(shown)) < 600


@pytest.mark.full
@pytest.mark.wide
@pytest.mark.parametrize("preset", PRESETS)
def test_every_model_and_dimension_can_be_chosen_in_every_preset(preset: str) -> None:
    """As a sweep over `model` and `embedding.dim` does."""
    base = load(preset)
    own = {table.dim for table in base.embedding.tables.values()} - {None}
    for model in MODELS:
        for dim in (None, 8, 32):
            config = override(base, [f"model={model}"] + ([] if dim is None else [f"embedding.dim={dim}"]))
            assert config.model.kind == model
            for dense in (4, 0):
                if model == "deepfm" and len(own) > 1:
                    with pytest.raises(ConfigError, match="DeepFM multiplies every embedding with every other"):
                        build(config, dense)
                else:
                    build(config, dense)
    assert override(base, [f"model={base.model.kind}"]) == base
    assert override(base, [f"embedding.dim={base.embedding.dim}"]) == base


def test_the_bottom_of_a_dlrm_ends_in_the_dimension_of_the_embeddings() -> None:
    assert load("synthetic", ["embedding.dim=32"]) == load("synthetic", ["embedding.dim=32", "model.bottom=32-32"])
    kaggle = load("dlrm_criteo_kaggle", ["embedding.dim=32"])
    assert kaggle.model == DLRMConfig(bottom=(512, 256, 64, 32), top=(512, 256, 1))
    assert load("dcnv2_mlperf", ["model=dlrm"]).model == DLRMConfig(bottom=(64, 128))
    # neither without need, nor where it is set, nor where the recipe is asked for
    assert load("movietweetings", ["embedding.dim=8"]).model == load("movietweetings").model
    assert load("synthetic", ["embedding.dim=32", "model.bottom=8-16"]).model.bottom == (8, 16)
    assert load("dlrm_criteo_kaggle", ["model=dlrm"]) == load("dlrm_criteo_kaggle")
    assert load("movietweetings", ["embedding.dim=8", "model=dcnv2"]).model.bottom == (64, 16)


def test_what_a_choice_replaces_is_known() -> None:
    def replaced(preset: str, *overrides: str) -> list[str]:
        base = load(preset)
        return consequences(base, override(base, overrides), overrides)

    assert replaced("synthetic", "model=dlrm", "seed=1") == []
    assert replaced("synthetic", "embedding.dim=32") == ["model.bottom=32,32 (preset: 32,16)"]
    chosen = replaced("synthetic", "model=dcnv2", "model.rank=4")
    assert chosen == ["model.bottom=64,16 (preset: 32,16)", "model.top=64,1 (preset: 64,32,1)"]
    assert replaced("synthetic", "model=dcnv2", "model.top=8-1") == ["model.bottom=64,16 (preset: 32,16)"]
    # settings of `small` are told by the run, if its data are small
    assert replaced("dlrm_criteo_kaggle", "train.epochs=5") == []


def test_hashes_of_runs_of_earlier_versions() -> None:
    """Which the default run folders are named after."""
    hashes = {
        ("synthetic",): "46a98436eb66",
        ("movietweetings", "model=dcnv2"): "a023de8c58ba",
        ("dlrm_criteo_kaggle", "model=dcnv2"): "b92000b6af0c",
        ("dcnv2_criteo_kaggle", "model=dlrm"): "b6ed1b819711",
        ("synthetic", "embedding.dim=32", "model.bottom=32-32"): "0e93c6ade3a8",
        ("movielens", "model=wide_deep", "embedding.optimizer=adagrad"): "41e118fcd896",
    }
    assert {key: config_hash(load(key[0], key[1:])) for key in hashes} == hashes
