"""The config of a whole run, and how presets become one."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from recjax import config as machinery
from recjax import own_code, preset_files
from recjax.config_values import check_ranges, written
from recjax.data.datasets import Dataset
from recjax.data.synthetic import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, SparseOptimizer
from recjax.embedding.plan import EXACT, Exchange, Placement
from recjax.embedding.spec import Held, Pooling, Rounding
from recjax.errors import ConfigError
from recjax.mesh import MeshConfig
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.deepfm import DeepFMConfig
from recjax.models.dlrm import DLRMConfig
from recjax.models.wide_deep import WideDeepConfig
from recjax.named import Named
from recjax.train.options import TrainConfig
from recjax.train.small import REPLACED, SmallData


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """What one table has for itself; None: as all have it."""

    dim: int | None = None  # D, its columns
    optimizer: SparseOptimizer | None = None  # what updates it
    init_scale: float | None = None  # half the width of the uniform distribution of its initial values
    dtype: Held | None = None  # of its values
    rounding: Rounding | None = None  # of updated bfloat16 values
    placement: Placement | None = None  # where it lives, instead of what `plan` chooses; changes no number

    def __post_init__(self) -> None:
        _check_table(self.dim, self.init_scale)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """What one categorical feature has for itself; None: as all have it."""

    pooling: Pooling | None = None  # how its bags' rows become one vector
    share: str | None = None  # another feature of as many rows: look up its table, and have none of one's own


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding tables: one for each categorical feature of the data, unless it shares another's."""

    dim: int = 16  # D, columns of every table
    pooling: Pooling = "sum"  # how a bag's rows become one vector
    optimizer: SparseOptimizer = RowWiseAdagrad()  # of the tables; exact and sparse
    init_scale: float | None = None  # initial values are uniform in (-init_scale, init_scale); none: sqrt(1 / V)
    dedup: bool = True  # a row travels once for all ids of a device that ask for it; false only to measure that
    dtype: Held = "float32"  # of the tables' values; their optimizers' slots stay float32
    rounding: Rounding = "stochastic"  # of updated bfloat16 values; nearest loses small updates
    exchange: Exchange = EXACT  # precision in which rows and gradients travel between devices; float32 is exact
    tables: Named[TableConfig] = Named()  # settings of single tables, by the name of their feature
    features: Named[FeatureConfig] = Named()  # settings of single features

    def __post_init__(self) -> None:
        _check_table(self.dim, self.init_scale)


def _check_table(dim: int | None, init_scale: float | None) -> None:
    if dim is not None and dim < 1:
        raise ConfigError(f"dim is {dim}; it must be at least 1.")
    if init_scale is not None and init_scale < 0:
        raise ConfigError(f"init_scale is {init_scale}; it must not be negative.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run. Presets in configs/ make one; `a.b=value` on the command line changes it."""

    seed: int = 0  # of initial weights and of the order of the samples
    data: Dataset = Synthetic()  # what to train on
    model: DLRMConfig | DCNv2Config | DeepFMConfig | WideDeepConfig = DLRMConfig()  # the dense part
    embedding: EmbeddingConfig = EmbeddingConfig()  # the tables
    train: TrainConfig = TrainConfig()  # how to train
    small: SmallData = SmallData()  # how to train instead on a small training split
    mesh: MeshConfig = MeshConfig()  # on which devices; changes no number (but replicas, if train.replica_sync says so)
    plan: str = (
        "auto"  # where tables live: auto, a placement for all, or a plan file; changes no number (exchange apart)
    )
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the dense part; float64: of all

    def __init_subclass__(cls) -> None:
        own_code.remember(cls)

    def __post_init__(self) -> None:
        check_ranges(self, seed=(0, 2**32 - 1))

    def __repr__(self) -> str:
        """The settings that are not the defaults, as overrides; `recjax show` prints all."""
        try:
            settings = ", ".join(machinery.assignments(self))
        except ConfigError as error:  # a value of the wrong type, which Python itself lets pass
            settings = str(error)
        return textwrap.fill(f"{type(self).__name__}({settings})", 100, subsequent_indent="    ",
                             break_long_words=False, break_on_hyphens=False)  # fmt: skip

    def for_rows(self, rows: int) -> Self:
        """The settings that a training split of `rows` samples is trained with.

        On few rows those of `SmallData`; and a batch holds all rows at most.
        """
        embedding, train = self.embedding, self.train
        if rows < self.small.below_rows:
            embedding = dataclasses.replace(embedding, optimizer=self.small.tables)
            train = self.small.train(train, rows)
        if 0 < rows < train.batch_size:
            train = dataclasses.replace(train, batch_size=rows, accumulate=min(train.accumulate, rows))
        if (embedding, train) == (self.embedding, self.train):
            return self
        return dataclasses.replace(self, embedding=embedding, train=train)


# Settings that may change when a run is resumed: where it runs, how long, and what it writes.
FREE_ON_RESUME = (
    "mesh",
    "plan",
    "data.path",
    "data.cache",
    "embedding.tables.*.placement",
    "embedding.dedup",
    "train.steps",
    "train.epochs",
    "small.epochs",
    "train.dense",
    "train.bucket_mib",
    "train.eval_batch_size",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.checkpoint_copy",
    "train.log_every",
    "train.tensorboard",
    "train.workers",
    "train.routing",
)


def default_out(config: RunConfig) -> Path:
    """The run folder of a config when none is named: equal configs share it, so a repeated command resumes.

    Where a config has classes of one's own, their code counts too (see `run_hash`).
    """
    apart = config.train.replica_sync != "exact" and config.mesh.replicas > 1  # the one part of a mesh that counts
    groups = f"-{config.mesh.replicas}-replicas" if apart else ""
    run = f"{config.data.kind}-{config.model.kind}-{run_hash(config, FREE_ON_RESUME)}"
    return Path("runs") / (run + groups)


def run_hash(config: RunConfig, ignore: Collection[str] = ()) -> str:
    """12 hexadecimal digits for a config and the code of its classes: `config_hash`, if all are of recjax."""
    digits, source = machinery.config_hash(config, ignore), own_code.source_of(type(config))
    return digits if source is None else hashlib.sha256(f"{digits} {source.hash}".encode()).hexdigest()[:12]


def load(preset: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a preset with overrides applied.

    Args:
      preset: a name in configs/, or the path of a Python file that defines `config = RunConfig(...)`.
      overrides: texts like "train.batch_size=512" or "embedding.optimizer=sgd".

    Raises:
      ConfigError: unknown preset or key (with the nearest valid names), or a value of the wrong type.
    """
    path = preset_files.find_preset(preset)
    config, _ = preset_files.load_preset_module(path)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{path}: `config` is a {type(config).__name__}, not a RunConfig. Start the file with "
            "`from recjax.presets import RunConfig` and end it with `config = RunConfig(...)`."
        )
    return override(config, overrides)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A copy of a preset's config with what the user sets, and what follows from it.

    Where embedding.dim is set, or a DLRM takes the place of another model, its bottom MLP ends in that dimension unless
    model.bottom is set too (`DLRMConfig.ending_in`).

    Where the preset trains otherwise on small data (`RunConfig.small`), what is set for training is set for small data
    too: a setting that somebody wrote never loses to one of the preset. A setting of `small` that stands beside it
    keeps its meaning. The config that results says all this itself, so that a run is resumed and hashed as it trains.

    Raises:
      ConfigError: as `recjax.config.override`.
    """
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
    """The settings that overrides have changed without naming them, each as "key=value (preset: value)".

    A choice of another kind does that, and so does embedding.dim. Settings that only one of two kinds has are left out,
    and so are those of `small`, which says itself what it replaces.
    """
    named = _keys(overrides)
    return [
        f"{key}={written(new)} (preset: {written(old)})"
        for key, old, new in machinery.diff(preset, config)
        if key not in named and None not in (old, new) and not machinery.matches(key, ["small"])
    ]


def _keys(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in overrides}
