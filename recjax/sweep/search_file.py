"""A search file: what `recjax tune` may vary, and how it looks for the best.

A TOML file with these keys; `preset` and `overrides` as in a sweep file.

    preset = "movietweetings"
    overrides = ["train.epochs=3", "train.eval_every=100"]   # an evaluation is where a trial may be given up
    sort = "validation.auc"            # the measure to search by
    trials = 30                        # in all, those of other processes and earlier calls included
    sampler = "tpe"                    # or random
    pruner = "quartile"                # gives up what is worse than three quarters; or median, halving, none
    warmup = 100_000                   # samples before which no trial is given up
    seed = 0                           # of the sampler

    [search]
    embedding.dim = [8, 16, 32]        # one of these
    "train.optimizer.learning_rate" = {low = 0.01, high = 1, log = true}
    "train.batch_size" = {low = 256, high = 1024, step = 256}

Bounds are inclusive. Where both are integers, and the step too if there is one, so are the values: write 1.0 for a
setting that takes fractions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from recjax.config import preset_files, presets
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.settings.values import either, written
from recjax.sweep.file import RUNS, Axis, Run, check_keys, direction, read_toml
from recjax.utils.text import first_repeated

KEYS = ("preset", "overrides", "sort", "trials", "sampler", "pruner", "warmup", "seed", "search")
SAMPLERS = ("tpe", "random")
PRUNERS = ("quartile", "median", "halving", "none")
_RANGE = ("low", "high", "log", "step")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A setting that the search varies: one of `choices`, or a number from `low` to `high`.

    Attributes:
      key: dotted key.
      choices: texts; empty: a range.
      low: least value.
      high: greatest value.
      log: whether its logarithm is uniform.
      step: distance between values; None: any.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: int | float = 0
    high: int | float = 0
    log: bool = False
    step: int | float | None = None

    @property
    def whole(self) -> bool:
        """True if its values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float)

    def suggest(self, trial: Any) -> str:
        """A trial's value as a text; `trial` is an optuna.Trial."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.whole:
            return written(trial.suggest_int(self.key, self.low, self.high, step=self.step or 1, log=self.log))
        return written(trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log))

    @property
    def samples(self) -> tuple[str, ...]:
        """Values to try a config with: all choices, or both ends."""
        return self.choices or (written(self.low), written(self.high))


@dataclasses.dataclass(frozen=True)
class Search:
    """Content of a search file.

    Attributes:
      file: its path.
      out: the study's folder.
      preset: what trials train.
      overrides: of every trial.
      base: the config that these make.
      dimensions: what varies.
      sort: the measure.
      trials: how many.
      sampler: one of SAMPLERS.
      pruner: one of PRUNERS.
      warmup: samples before which it gives no trial up.
      seed: of the sampler.
    """

    file: Path
    out: Path
    preset: str
    overrides: tuple[str, ...]
    base: RunConfig
    dimensions: tuple[Dimension, ...]
    sort: str
    trials: int
    sampler: str
    pruner: str
    warmup: int
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        """All that must stay the same for one study, as JSON."""
        return {
            "preset and overrides": presets.run_hash(self.base),
            "search": [
                dataclasses.asdict(dimension) | {"choices": list(dimension.choices)} for dimension in self.dimensions
            ],
            "sort": self.sort,
        }

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The settings that vary, for tables of results."""
        return tuple(Axis((dimension.key,), ()) for dimension in self.dimensions)

    def run(self, number: int, swept: dict[str, str]) -> Run:
        """The run of a trial.

        Raises:
          ConfigError: the values do not go together.
        """
        overrides = (*self.overrides, *(f"{key}={text}" for key, text in swept.items()))
        config = presets.load(self.preset, overrides)
        return Run(number, self.preset, swept, overrides, config, self.out / f"trial-{number:04}")


def _check_number(name: str, given: Any, least: int) -> None:
    if type(given) is not int or not least <= given < 2**31:
        raise ConfigError(f"{name} is {json.dumps(given, default=str)}; expected an integer from {least} on.")


def read_search(file: Path, out: Path | None = None, trials: int | None = None, *, trust_code: bool = False) -> Search:
    """Reads a search file, and tries each value alone, or both ends of a range, in the config.

    Args:
      file: path of the TOML file.
      out: the study's folder; None takes runs/tune-NAME, after the file.
      trials: in place of the file's.
      trust_code: run the preset that it names wherever that lies.

    Raises:
      ConfigError: the file cannot be read, holds a key or value that is wrong, or names a preset that may be somebody
        else's program; the message names file and key.
    """
    if trials is not None:  # here, since the file is not to blame
        _check_number("--trials", trials, 1)
    plain = read_toml(file)
    try:
        if swept := [key for key in ("grid", "zip") if key in plain]:
            raise ConfigError(f"it has a [{swept[0]}]: that is for `recjax sweep`. Here values stand under [search].")
        preset, fixed = check_keys(plain, KEYS, "A search file", "overrides or [search]")
        sort = plain.get("sort", "validation.auc")
        if not isinstance(sort, str) or direction(sort) is None or not sort.startswith("validation."):
            raise ConfigError(
                f"sort is {json.dumps(sort, default=str)}; expected validation.MEASURE, such as validation.auc, or of "
                "several labels validation.LABEL.MEASURE: settings are chosen by validation, not by test."
            )
        numbers = {"trials": plain.get("trials", 30), "warmup": plain.get("warmup", 0), "seed": plain.get("seed", 0)}
        if trials is not None:
            numbers["trials"] = trials
        for name, least in (("trials", 1), ("warmup", 0), ("seed", 0)):
            _check_number(name, numbers[name], least)
        words = {}
        for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            words[name] = plain.get(name, known[0])
            if words[name] not in known:
                raise ConfigError(f"{name} is {json.dumps(words[name], default=str)}; expected {either(list(known))}.")
        preset_files.require_trusted(preset, file, trust_code)
        base = presets.load(preset, fixed)
        dimensions = tuple(_dimension(key, value) for key, value in _leaves(plain.get("search", {}), ""))
        if not dimensions:
            raise ConfigError('it varies nothing. Give values under [search], for example "embedding.dim" = [8, 16].')
        if (values := sum(len(dimension.samples) for dimension in dimensions)) > RUNS:
            raise ConfigError(
                f"its lists under search hold {values:,} values, and {RUNS:,} are the most: each is tried in the "
                'config first. Give ranges for numbers, such as "seed" = {low = 0, high = 100_000}.'
            )
        for dimension in dimensions:
            if text := next((text for text in fixed if text.partition("=")[0] == dimension.key), None):
                raise ConfigError(f"{dimension.key} stands under overrides ({text}) and under search. Leave one out.")
            for value in dimension.samples:
                presets.override(base, [f"{dimension.key}={value}"])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    folder = out or Path("runs") / f"tune-{file.stem}"
    return Search(file, folder, preset, tuple(fixed), base, dimensions, sort, **numbers, **words)


def _leaves(value: Any, key: str) -> list[tuple[str, Any]]:
    """(dotted key, list or range); TOML reads unquoted dotted keys as nested tables."""
    if isinstance(value, dict) and not (key and set(value) & set(_RANGE)):
        return [pair for name, below in value.items() for pair in _leaves(below, f"{key}.{name}" if key else name)]
    if not key:
        raise ConfigError(f"search is {json.dumps(value, default=str)}; expected a table of settings.")
    return [(key, value)]


def _dimension(key: str, value: Any) -> Dimension:
    place = f"search, {key}"
    example = f'"{key}" = [8, 16] or "{key}" = {{low = 0.01, high = 1, log = true}}'
    if isinstance(value, list) and value:
        texts = tuple(written(item) for item in value)
        if (twice := first_repeated(texts)) is not None:
            raise ConfigError(f"{place} holds {twice} twice. Leave one out.")
        return Dimension(key, texts)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{place} is {json.dumps(value, default=str)}; expected a list of values, or a range: {example}."
        )
    if strange := [name for name in value if name not in _RANGE]:
        raise ConfigError(f"{place}: unknown key {strange[0]!r}. A range has {', '.join(_RANGE)}.")
    low, high, log, step = (value.get(name) for name in _RANGE)  # None: not given
    for name, number in (("low", low), ("high", high), ("step", step)):
        if type(number) not in (int, float) and not (name == "step" and number is None):
            raise ConfigError(f"{place}: {name} is {json.dumps(number, default=str)}; expected a number: {example}.")
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"{place}: {name} is {number}; expected a finite number.")
    assert low is not None and high is not None
    if log not in (None, True, False):
        raise ConfigError(f"{place}: log is {json.dumps(log, default=str)}; expected true or false.")
    if low >= high:
        raise ConfigError(f"{place}: low is {low} and high is {high}; low must be less.")
    if log and low <= 0:
        raise ConfigError(f"{place}: low is {low}; with log = true it must be more than 0.")
    if step is not None and (step <= 0 or log):
        raise ConfigError(f"{place}: step is {step}; it must be more than 0, and goes without log = true.")
    return Dimension(key, (), low, high, bool(log), step)
