"""Makes the config of a run from a preset and overrides, and names its run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from recjax import settings as machinery
from recjax.config import optax_rules, own_code, preset_files
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.config.small_data import REPLACED
from recjax.config.train import DenseOptimizer, Schedule
from recjax.data.own import hint
from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.settings.values import written

_KINDS = {kind.kind for kind in (*typing.get_args(DenseOptimizer), *typing.get_args(Schedule))}


def default_out(config: RunConfig) -> Path:
    """The run folder of a config when none is named: equal configs share it, so a repeated command resumes.

    Where a config has classes of one's own, their code counts too (see `run_hash`).
    """
    apart = config.train.replica_sync != "exact" and config.mesh.replicas > 1  # the one part of a mesh that counts
    groups = f"-{config.mesh.replicas}-replicas" if apart else ""
    elsewhere = [key for key in FREE_ON_RESUME if key != "data.from"]  # other files are other data
    run = f"{config.data.kind}-{config.model.kind}-{run_hash(config, elsewhere)}"
    return Path("runs") / (run + groups)


def run_hash(config: RunConfig, ignore: Collection[str] = ()) -> str:
    """Hashes a config and the code of its class to 12 hexadecimal digits: `config_hash`, if the class is of recjax."""
    digits, source = machinery.config_hash(config, ignore), own_code.source_of(type(config))
    return digits if source is None else hashlib.sha256(f"{digits} {source.hash}".encode()).hexdigest()[:12]


def load(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a preset and applies overrides, texts like "train.batch_size=512": see `recjax.load`."""
    path = preset_files.find_preset(preset)
    config, _ = preset_files.load_preset_module(path)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{path}: `config` is a {type(config).__name__}, not a RunConfig. Start the file with "
            "`from recjax.config.run import RunConfig` and end it with `config = RunConfig(...)`."
        )
    return override(config, overrides)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Returns a copy of a preset's config with the user's settings, and with what follows from them.

    Where embedding.dim is set, or a DLRM takes the place of another model, its bottom MLP ends in that dimension unless
    model.bottom is set too (`DLRMConfig.ending_in`).

    Where the preset trains otherwise on small data (`RunConfig.small`), a setting of the training holds for small data
    too: a user's setting never loses to one of the preset. The user's own settings of `small` hold as they are. All
    this is written into the new config, so that a run is resumed and hashed as it trains.

    Raises:
      ConfigError: as `recjax.settings.overrides.override`, or a file stands where the kind of data should.
    """
    for text in overrides:
        if (key := text.partition("=")[0]).rpartition(".")[2] in ("pos_weight", "scale_pos_weight", "class_weight"):
            raise ConfigError(
                f"{key}: positive labels have no weight of their own here; each row may have one. Write it into a "
                "column of the table, say w, and give data.columns=auto,w:weight: the loss and all measures count it."
            )
        if (
            (kind := text.partition("=")[2].lower()) not in _KINDS
            and (advice := optax_rules.advise_on_kind(text))
            and kind
        ):
            raise ConfigError(advice)
        if text.startswith("data=") and (advice := hint(text)):
            raise ConfigError(f"{text}: `data` is the kind of data, not a file of them. {advice.rstrip()}")
    changed = machinery.override(config, overrides)
    keys = _keys(overrides)
    if isinstance(changed.model, DLRMConfig) and "model.bottom" not in keys:
        if "embedding.dim" in keys or not isinstance(config.model, DLRMConfig):
            changed = dataclasses.replace(changed, model=changed.model.ending_in(changed.embedding.dim))
    if not changed.small.below_rows:
        return changed
    small: dict[str, Any] = {}
    for name, fields in REPLACED.items():
        group, _, setting = name.partition(".")
        apart = [f"small.{field}" for field in fields]
        if any(machinery.matches(key, [name]) for key in keys) and not any(machinery.matches(k, apart) for k in keys):
            value = getattr(getattr(changed, group), setting)
            chosen = dataclasses.is_dataclass(value) and name in keys
            if chosen and type(value) is type(getattr(getattr(config, group), setting)):
                # The recipe has this kind already, with values for a whole log. So it is chosen for small data apart.
                given = [text for text in overrides if text.startswith((f"{name}=", f"{name}."))]
                texts = [apart[0] + text[len(name) :] for text in given]
                value = getattr(machinery.override(config, texts).small, fields[0])
            small[fields[0]] = value
    return dataclasses.replace(changed, small=dataclasses.replace(changed.small, **small))


def consequences(preset: RunConfig, config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Lists the settings that overrides have changed without naming them, each as "key=value (preset: value)".

    The choice of another kind changes such settings, and so does embedding.dim. Left out are settings that only one of
    two kinds has, and those of `small`: a training on small data reports what they replace.
    """
    named = _keys(overrides)
    return [
        f"{key}={written(new)} (preset: {written(old)})"
        for key, old, new in machinery.diff(preset, config)
        if key not in named and None not in (old, new) and not machinery.matches(key, ["small"])
    ]


def _keys(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in overrides}
