"""The config of a run as a whole."""

import dataclasses
import typing

from recjax.config import assignments, from_json, override
from recjax.config_values import members
from recjax.presets import RunConfig, load


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
    config = override(
        RunConfig(), ["model=dcnv2", "model.top=8-1", "train.optimizer.learning_rate=0.5", "embedding.tables.a-b.dim=4"]
    )
    assert repr(config) == (
        "RunConfig(model=dcnv2, model.top=8,1, embedding.tables.a-b.dim=4, train.optimizer.learning_rate=0.5)"
    )
    assert max(map(len, repr(load("movietweetings")).splitlines())) <= 100
    assert "plan is 3; expected text" in repr(dataclasses.replace(RunConfig(), plan=3))  # type: ignore[arg-type]
    for preset in ("movietweetings", "dlrm_mlperf"):
        shown = load(preset)
        assert override(RunConfig(), assignments(shown)) == shown and len(repr(shown)) < 600
