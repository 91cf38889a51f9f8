"""Targets of the relative paths in a run's config, so that the run is good from every working folder.

    RUN/paths.json    {"prepared": "/home/me/study/prepared"}: a path as config.json has it, and where that was

config.json itself stays as the user wrote it: where data lie makes no other run.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recjax.config.run import RunConfig
from recjax.data.arrow.scan import refuse_whole_disk
from recjax.data.datasets.own_table import ALONE, Table
from recjax.data.storage.manifest import MANIFEST, prepare_again
from recjax.data.storage.run_snapshot import newest_snapshot
from recjax.embedding.plan import is_file
from recjax.errors import ConfigError, DataError
from recjax.settings.tree import key_of
from recjax.utils import strict_json
from recjax.utils.files import write_json
from recjax.utils.paths import is_remote, located

FILE, PLAN, BASE = "paths.json", "plan.json", "base"  # in a run folder


def resolve_data_sources(
    config: RunConfig, run: Path, report: Callable[[str], None], needs_data: bool = True
) -> RunConfig:
    """A config with absolute paths of data and plan in place of relative ones.

    They are looked for from the working folder, and where they are not there, where they led when the run was trained.

    Args:
      config: of the run.
      run: its folder, which need not exist.
      report: called with what the user should know.
      needs_data: whether the data are.

    Raises:
      ConfigError: what the run folder says of it is damaged; or as for `refuse_whole_disk`.
      DataError: the data of a run that has trained are not there any more.
    """
    if needs_data and (given := _data_path(config)):
        there = _resolve_path("data.path", given, run, report, holds=MANIFEST)
        if not os.path.exists(there / MANIFEST) and (run / "config.json").exists():
            kind = None if config.data.kind == "prepared" else config.data.kind
            raise DataError(
                f"the data of {run}, data.path={given}, are not at {there}. Give data.path=DIR, the folder where they "
                f"are now, or prepare them again: {prepare_again(there, kind)}"
            )
        data: Any = config.data  # not every kind has a path
        config = dataclasses.replace(config, data=dataclasses.replace(data, path=str(there)))
    if needs_data and (files := _raw_files(config)):
        places = {
            field: str(_resolve_path(f"data.{key_of(field)}", given, run, report)) for field, given in files.items()
        }
        raw: Any = config.data
        config = dataclasses.replace(config, data=dataclasses.replace(raw, base=_base(config, run), **places))
    if is_file(config.plan):
        there = _resolve_path("plan", config.plan, run, report, copy=run / PLAN)
        if there.exists():  # else the message is of what was given
            config = dataclasses.replace(config, plan=str(there))
    return config


def _base(config: RunConfig, run: Path) -> str:
    """The data that those of a run go on from, `data.base`: the run's own copy, if it has one, or where they are.

    Where nothing is said of them, they are those of the run that it starts from, if that kept any.
    """
    data: Any = config.data
    if data.base == ALONE or not (data.base or config.train.init_from):
        return str(data.base)
    if (run / BASE / MANIFEST).is_file():
        return str(run / BASE)
    place = located(data.base or config.train.init_from)
    return str(place) if data.base or (newest_snapshot(place) / MANIFEST).is_file() else ""


def record_sources(config: RunConfig, used: RunConfig, run: Path) -> None:
    """Writes into a run folder where the relative paths of `config` led: to those of `used`.

    Raises:
      TrainingError: no permission, no space.
    """
    pairs = {_data_path(config): _data_path(used)} | ({config.plan: used.plan} if is_file(config.plan) else {})
    raw = _raw_files(used)
    pairs |= {given: raw[field] for field, given in _raw_files(config).items()}
    known = {given: there for given, there in pairs.items() if given != there and _relative(given)}
    if known or (run / FILE).exists():
        write_json(run / FILE, known)


def _data_path(config: RunConfig) -> str:
    """The path of the data on this machine, "" if there is none."""
    path = getattr(config.data, "path", "")
    return "" if is_remote(path) else path


def _raw_files(config: RunConfig) -> dict[str, str]:
    """The files on this machine that a table of one's own is prepared from by itself: field -> path or pattern."""
    data = config.data
    if not isinstance(data, Table) or data.path or not data.from_:
        return {}
    places = {field: getattr(data, field) for field in ("from_", "validation", "test")}
    return {field: given for field, given in places.items() if given and not is_remote(given)}


def _relative(given: str) -> bool:
    return not given.startswith(("/", "~"))


def _resolve_path(
    key: str, given: str, run: Path, report: Callable[[str], None], holds: str = "", copy: Path | None = None
) -> Path:
    """Resolves a path, or a pattern: to a folder that `holds` a file; `copy` is what the run folder has of it."""

    def is_there(path: Path) -> bool:
        if holds or os.path.exists(path):
            return os.path.exists(path / holds)
        refuse_whole_disk(path, f"{key}={given}")
        return bool(glob.glob(str(path), recursive=True))

    here = located(given)
    if is_there(here) or not _relative(given) or (then := recorded_sources(run).get(given)) is None:
        return here
    there = copy or Path(then)
    if not is_there(there):
        return here
    report(f"{key}={given}: it is not at {here}, so {there} is taken, as when the run was trained")
    return there


def recorded_sources(run: Path) -> dict[str, str]:
    """Returns what `record_sources` wrote down in a run folder; nothing if it did not.

    Raises:
      ConfigError: it is damaged.
    """
    file = run / FILE
    if not os.path.lexists(file):
        return {}
    try:
        if not file.is_file():  # a pipe, say, over which it would wait forever
            raise ValueError("it is no regular file")
        known = strict_json.parse(file.read_bytes())
        if not isinstance(known, dict) or not all(isinstance(there, str) for there in known.values()):
            raise ValueError("it does not hold paths")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Remove it, and give data.path=DIR (and plan=FILE)."
        ) from error
    return known
