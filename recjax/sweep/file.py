"""A sweep file: which runs it stands for.

A TOML file with these keys; the values under `grid` and `zip` are lists.

    preset = "synthetic"               # a name in configs/, or the path of a preset
    overrides = ["train.epochs=1"]     # of every run, as on the command line
    sort = "validation.auc"            # the measure that orders the final table

    [grid]                             # every combination
    seed = [0, 1, 2]
    embedding.dim = [4, 16]

    [zip]                              # these lists go in parallel: first with first, second with second
    "train.batch_size" = [512, 1024]
    "train.optimizer.learning_rate" = [0.1, 0.2]

A key may be quoted or not. Values are those of the command line, as TOML values or as text; a list within a list is
a tuple: `model.top = [[64, 1], [32, 1]]`. The first key varies slowest.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recjax.config import preset_files, presets
from recjax.config.choice import HIGHER_IS_BETTER
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.settings.values import either, written
from recjax.utils import strict_json
from recjax.utils.text import did_you_mean

KEYS = ("preset", "overrides", "sort", "grid", "zip")
RUNS = 10_000  # of a file, unless more are asked for: what is beyond is mostly a list too many
_COUNTED = 10**18  # and no further: of thousands of lists the number of runs has more digits than Python writes
_KEY_PART = r"""(?:"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+'|[^\s=.,\[\]{}#"']++)"""
_DOT = r"[ \t]*+\.[ \t]*+"
# Texts of several lines and comments, which are passed over; a key of 65 parts, a.b.c...; shorter ones, and values.
_TOML_TOKEN = re.compile(  # no group that can fail half-way is possessive: wrong before Python 3.11.5 (gh-106052)
    rf"""
    "{{3}}(?:[^"\\]++|\\.|"{{1,2}}(?!"))*(?:"{{3,5}}+|\\?\Z)
    |'{{3}}(?:[^']++|'{{1,2}}(?!'))*(?:'{{3,5}}+|\Z)
    |[#][^\n]*+
    |(?P<long>(?:{_KEY_PART}{_DOT}){{64}})
    |{_KEY_PART}(?:{_DOT}{_KEY_PART})*
    """,
    re.VERBOSE | re.DOTALL,
)
# Measure of a run -> whether more of it is better.
SORTS = {
    **{
        f"{split}.{name}": name == "auc"
        for split in ("validation", "test")
        for name in ("auc", "logloss", "ne", "loss")
    },
    "samples_per_s": True,
    "seconds": False,
}


def direction(sort: str) -> bool | None:
    """Returns True if more of a measure is better; None if it is none. It may be validation.LABEL.MEASURE."""
    split, _, name = sort.partition(".")
    of_label = split in ("validation", "test") and "." in name
    return HIGHER_IS_BETTER.get(name.rpartition(".")[2]) if of_label else SORTS.get(sort)


@dataclasses.dataclass(frozen=True)
class Axis:
    """Settings that change together: one key of `grid`, or all keys of `zip`.

    Attributes:
      keys: dotted keys.
      points: for each position on the axis the values of all keys, as texts.
    """

    keys: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      index: its place in the sweep, from 0.
      preset: what it trains.
      swept: dotted key -> text, of the settings that the sweep varies.
      overrides: all assignments "a.b=value", the fixed ones first.
      config: what they make of the preset.
      out: its run folder, named after the hash of that config (and of the code of a model of one's own): it stays when
        runs are added to the file.
    """

    index: int
    preset: str
    swept: dict[str, str]
    overrides: tuple[str, ...]
    config: RunConfig
    out: Path

    @property
    def arguments(self) -> list[str]:
        """Words of the command after `recjax`."""
        return ["train", self.preset, *self.overrides, "--out", str(self.out)]

    @property
    def command(self) -> str:
        """The line that does this run when it is pasted into a shell."""
        return shlex.join(["recjax", *self.arguments])


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Contents of a sweep file.

    Attributes:
      file: its path.
      out: the sweep's folder.
      axes: what it varies, slowest first.
      sort: a key of SORTS, or None for the order of the file.
      runs: all of them.
    """

    file: Path
    out: Path
    axes: tuple[Axis, ...]
    sort: str | None
    runs: tuple[Run, ...]


def read_sweep(file: Path, out: Path | None = None, runs_at_most: int = RUNS, *, trust_code: bool = False) -> Sweep:
    """Reads a sweep file and checks the config of every run.

    Args:
      file: path of the TOML file.
      out: the sweep's folder; None takes runs/sweep-NAME, after the file.
      runs_at_most: how many runs it may stand for; they are counted before any config is made.
      trust_code: run the preset that it names wherever that lies.

    Raises:
      ConfigError: the file cannot be read, is no TOML, or holds a key or value that is wrong; two of its runs are the
        same, or there are too many; its preset may be somebody else's program. The message names the file and the key.
    """
    if runs_at_most < 1:
        raise ConfigError(f"--runs-at-most {runs_at_most}: give a number from 1 on, such as {RUNS}.")
    plain = read_toml(file)
    try:
        if "search" in plain:
            raise ConfigError("it has a [search]: that is for `recjax tune`, which chooses the values itself.")
        preset, fixed = check_keys(plain, KEYS, "A sweep file", "overrides, [grid] or [zip]")
        sort = plain.get("sort")
        if sort is not None and not (isinstance(sort, str) and direction(sort) is not None):
            known = either([*SORTS, "of several labels validation.LABEL.MEASURE"])
            raise ConfigError(f"sort is {json.dumps(sort, default=str)}; expected {known}.")
        axes = _axes(plain, fixed)
        _check_count(axes, runs_at_most)
        folder = out or Path("runs") / f"sweep-{file.stem}"
        preset_files.require_trusted(preset, file, trust_code)
        runs = _runs(preset, fixed, axes, folder)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return Sweep(file, folder, axes, sort, runs)


def check_keys(plain: dict[str, Any], keys: Sequence[str], name: str, settings: str) -> tuple[str, list[str]]:
    """Returns the preset and the overrides of all runs, from what a file says.

    Args:
      plain: the file.
      keys: that it may have.
      name: of such a file, for messages.
      settings: where settings stand in it, in words.

    Raises:
      ConfigError: an unknown key, no preset, or overrides that are none.
    """
    if unknown := [key for key in plain if key not in keys]:
        raise ConfigError(
            f"unknown key {unknown[0]!r}.{did_you_mean(unknown[0], keys)} {name} has the keys {', '.join(keys)}; "
            f"settings of the runs stand under {settings}."
        )
    preset, fixed = plain.get("preset"), plain.get("overrides", [])
    if not isinstance(preset, str):
        raise ConfigError('it names no preset. Write for example preset = "synthetic".')
    if not isinstance(fixed, list) or not all(isinstance(text, str) and "=" in text for text in fixed):
        raise ConfigError(
            f'overrides is {json.dumps(fixed, default=str)}; expected a list of texts like ["train.epochs=1"].'
        )
    return preset, fixed


def read_toml(file: Path) -> dict[str, Any]:
    """Reads a file of TOML; ConfigError where it cannot be read, or is none."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"cannot read the sweep file {file}: it is no regular file.")
    try:
        text = file.read_text(encoding="utf-8")
        # tomllib's time is the square of a key's length
        long_key = any(token["long"] for token in _TOML_TOKEN.finditer(text))
        plain = None if long_key else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the sweep file {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error.reason}). A sweep file is TOML.") from error
    except RecursionError:
        plain = None
    except ValueError as error:  # TOMLDecodeError, and what int() raises at thousands of digits
        raise ConfigError(
            f"{file}: not valid TOML: {error}. Texts stand in quotes; so must a key below another key of the same "
            'table, as in "embedding.optimizer" and "embedding.optimizer.learning_rate".'
        ) from error
    if plain is None or strict_json.nested_too_deep(plain):
        raise ConfigError(f"{file}: not valid TOML: nested too deeply.")
    return plain


def _axes(plain: dict[str, Any], fixed: Sequence[str]) -> tuple[Axis, ...]:
    """The axes in the order of the file."""
    axes: list[Axis] = []
    places = {text.partition("=")[0]: "overrides" for text in fixed}
    for section in (key for key in plain if key in ("grid", "zip")):
        lists = _lists(plain[section], section)
        for key, _ in lists:
            if key in places:
                raise ConfigError(f"{key} stands under {places[key]} and under {section}. Leave one of them out.")
            places[key] = section
        if section == "grid":
            axes += [Axis((key,), tuple((text,) for text in texts)) for key, texts in lists]
        elif lists:
            if len({len(texts) for _, texts in lists}) > 1:
                lengths = ", ".join(f"{key} has {len(texts)}" for key, texts in lists)
                raise ConfigError(f"the lists under zip go in parallel, but {lengths} values. Make them equally long.")
            axes.append(Axis(tuple(key for key, _ in lists), tuple(zip(*(texts for _, texts in lists), strict=True))))
    if not axes:
        raise ConfigError('it varies nothing. Give lists under [grid] or [zip], for example "seed" = [0, 1, 2].')
    return tuple(axes)


def _check_count(axes: Sequence[Axis], runs_at_most: int) -> None:
    """Refuses a file of more runs than `runs_at_most` (ConfigError)."""
    runs = 1
    for axis in axes:
        runs = min(runs * len(axis.points), _COUNTED)
    if runs > runs_at_most:
        lists = ", ".join(f"{', '.join(axis.keys)[:80]} has {len(axis.points):,}" for axis in axes[:20])
        raise ConfigError(
            f"it stands for {runs:,}{' or more' * (runs == _COUNTED)} runs, and {runs_at_most:,} are the most unless "
            "you say otherwise. Every list "
            f"under grid multiplies them: {lists}. Shorten them, draw settings at random with `recjax tune`, or give "
            f"--runs-at-most {runs}."
        )


def _lists(value: Any, section: str, key: str = "") -> list[tuple[str, list[str]]]:
    """(dotted key, values as texts) of a section, whose unquoted dotted keys TOML reads as nested tables."""
    place = f"{section}, {key}" if key else section
    if isinstance(value, dict):
        inner = ((f"{key}.{name}" if key else name, below) for name, below in value.items())
        return [pair for path, below in inner for pair in _lists(below, section, path)]
    if not key or not isinstance(value, list):
        wanted = "a list of values" if key else "a table of lists"
        raise ConfigError(f"{place} is {json.dumps(value, default=str)}; expected {wanted}.")
    if not value:
        raise ConfigError(f"{place} is an empty list. Give it a value, or leave the key out.")
    for item in value:
        for leaf in item if isinstance(item, list) else [item]:
            if not isinstance(leaf, (str, int, float)):
                raise ConfigError(
                    f"{place} holds {json.dumps(leaf, default=str)}; expected texts, numbers, true, false, or lists of "
                    "these."
                )
    return [(key, [written(item) for item in value])]


def _runs(preset: str, fixed: Sequence[str], axes: Sequence[Axis], folder: Path) -> tuple[Run, ...]:
    base = presets.load(preset)
    runs: dict[str, Run] = {}
    for index, points in enumerate(itertools.product(*(axis.points for axis in axes))):
        pairs = zip(axes, points, strict=True)
        swept = {key: text for axis, point in pairs for key, text in zip(axis.keys, point, strict=True)}
        varied = [f"{key}={text}" for key, text in swept.items()]
        try:
            config = presets.override(base, [*fixed, *varied])
        except ConfigError as error:
            raise ConfigError(f"run {index} ({', '.join(varied)}): {error}") from error
        name = presets.run_hash(config)
        if name in runs:
            raise ConfigError(
                f"run {index} ({', '.join(varied)}) has the same config as run {runs[name].index}. Remove the value "
                "that is repeated."
            )
        runs[name] = Run(index, preset, swept, (*fixed, *varied), config, folder / name)
    return tuple(runs.values())
