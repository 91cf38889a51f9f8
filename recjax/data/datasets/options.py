"""The options of a dataset's config beside those that its prepared data were made with."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from recjax import settings
from recjax.data.prepare.chunk import Reader
from recjax.data.prepare.dense_columns import Transform
from recjax.data.prepare.earlier import EarlierData
from recjax.data.prepare.ids import Frequency
from recjax.data.prepare.prepare import prepare_data
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import FORMAT
from recjax.errors import DataError
from recjax.settings.values import written

_PLACES = ("path", "from", "cache", "base")  # keys that say where data are, and nothing of how they are prepared


class PathConfig(Protocol):
    """The config of a dataset that is prepared from raw files."""

    kind: ClassVar[str]

    @property
    def path(self) -> str:
        """Folder of the prepared data."""
        ...

    @property
    def cache(self) -> str:
        """Folder for copies of what a path on object storage holds; empty: the usual one."""
        ...


def options_of(config: PathConfig) -> dict[str, Any]:
    """Returns the settings that shape the prepared data: JSON values by dotted key, all but where data are.

    Settings that came later, `later` of a config's class, are among them only where they are not the defaults.
    """
    options = {key: value for key, value in settings.flatten(config).items() if key not in ("kind", *_PLACES)}
    options = dict(json.loads(json.dumps(options)))  # tuples as lists, as they come back from a manifest
    return {key: value for key, value in options.items() if later_options(config).get(key, ()) != value}


def later_options(config: PathConfig) -> dict[str, Any]:
    """The settings that came later, by dotted key, with their defaults: JSON values."""
    defaults = settings.flatten(type(config)())
    return dict(json.loads(json.dumps({name: defaults[name] for name in getattr(type(config), "later", ())})))


def open_as(config: PathConfig) -> PreparedSource:
    """The data at `config.path`, which must be of this dataset and made with these options.

    Raises:
      DataError: there is no path, no intact data, or data of another dataset or other options, with both values.
    """
    command = prepare_command(config)
    if not config.path:
        raise DataError(
            f"{config.kind} needs prepared data, and data.path names none. Prepare the raw files once with: {command} "
            "and give that folder as data.path=DIR."
        )
    source = open_prepared(config.path, config.kind, config.cache)
    check_options(config, source)
    return source


def cache_key(config: PathConfig, version: int, contents: Iterable[bytes]) -> str:
    """Changes with the options, the files' contents, the preparation's version and the format of prepared data."""
    digest = hashlib.sha256(json.dumps([version, FORMAT, options_of(config)], sort_keys=True).encode())
    for content in contents:
        digest.update(content)
    return digest.hexdigest()[:16]


def cached(folder: Path, kind: str) -> PreparedSource | None:
    """The data in a folder of the cache; None if they are not there, or damaged: they can always be made again."""
    try:
        return open_prepared(folder, kind).verify()
    except DataError:
        return None


def prepare_as(
    config: PathConfig,
    reader: Reader,
    out: str | os.PathLike[str],
    *,
    dense: Transform | None = None,
    more: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    earlier: EarlierData | None = None,
) -> PreparedSource:
    """Prepares what a reader of this dataset reads, with these options; `open_as` then opens it.

    Args:
      config: the options, with `ids`, `dense` and `missing_indicators` if the dataset leaves these to the user: else
        every value has a row, dense columns are as the reader has it, and no column tells of missing values.
      reader: of the raw files.
      out: as for `prepare_data`, which also says what is raised.
      dense: the transform of dense columns; None: that of the config.
      more: likewise.
      overwrite: likewise.
      earlier: likewise; the config says which values are kept.
    """
    return prepare_data(
        reader,
        out,
        ids=getattr(config, "ids", Frequency()),
        dense=transform_of(config, reader) if dense is None else dense,
        missing_indicators=getattr(config, "missing_indicators", False),
        options=options_of(config),
        more=more,
        overwrite=overwrite,
        earlier=earlier,
        keep_values=getattr(config, "base_values", "drop") == "keep",
    )


def transform_of(config: PathConfig, reader: Reader) -> Transform:
    """The transform of dense columns: that of the config, else the reader's own; else they are as they are."""
    found: Transform = getattr(config, "dense", getattr(reader, "lines", "none"))
    return found


def check_options(config: PathConfig, source: PreparedSource) -> None:
    """Refuses prepared data that were made with other options: they would silently win over the config.

    Raises:
      DataError: naming the option and both values.
    """
    later = later_options(config)
    # Data that were prepared before an option came lack it: they are what its default makes.
    made_with = options_of(type(config)()) | later | source.about.get("options", {})
    for name, value in (later | options_of(config)).items():
        if made_with.get(name) != value:
            then = written(made_with.get(name))
            raise DataError(
                f"the data at {source.path} were prepared with {name}={then}, but the config says {written(value)}. "
                f"Set {shlex.quote(f'data.{name}={then}')}, or prepare the data with the options of the config: "
                f"{prepare_command(config)}"
            )


def prepare_command(config: PathConfig) -> str:
    """The command that prepares data for a config."""
    default = type(config)()
    differing = [(key, value) for key, _, value in settings.diff(default, config) if key not in _PLACES]
    changed = [f"{key}={written(value)}" for key, value in differing]
    return " ".join(["recjax data prepare", config.kind, "--from PATH --out DIR", *map(shlex.quote, changed)])
