"""The config of a run as a whole."""

import dataclasses
import typing

from recjax.config import from_json
from recjax.config_values import members
from recjax.presets import RunConfig


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
