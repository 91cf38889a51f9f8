"""The config of a whole run."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from typing import Literal, Self

from recjax import settings as machinery
from recjax.config import own_code
from recjax.config.small_data import SmallData
from recjax.config.tasks import TaskConfig
from recjax.config.train import TrainConfig
from recjax.data.catalog import Dataset
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad, SparseOptimizer
from recjax.embedding.segment import Exchange, Placement
from recjax.embedding.spec import DynamicIds, Pooling, Rounding, TableDtype
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.deepfm import DeepFMConfig
from recjax.models.din import DinConfig
from recjax.models.dlrm import DLRMConfig
from recjax.models.mmoe import MMoEConfig
from recjax.models.ple import PLEConfig
from recjax.models.shared_bottom import SharedBottomConfig
from recjax.models.two_tower import MFConfig, TwoTowerConfig
from recjax.models.wide_deep import WideDeepConfig
from recjax.parallel.mesh import MeshConfig
from recjax.settings.values import Named, check_ranges
from recjax.utils import html
from recjax.utils.text import did_you_mean
from recjax.utils.units import read_whole_bytes


@dataclasses.dataclass(frozen=True)
class TierConfig:
    """Places for rows that the devices have no memory for. Sizes are bytes or texts such as 512MiB. Changes no number.

    A device holds the rows that batches name as a cache; all others are on the host.
    """

    # Bytes of a device for rows and their optimizer's state; 0: all rows are on the devices
    device_bytes: int | str = 0
    # Bytes of the host's memory, in each process, for rows that are not on the devices; 0: as many as they need
    dram_bytes: int | str = 0
    disk: str = ""  # folder on a disk for rows that dram_bytes has no room for; "": none
    look_ahead: int = 4  # later batches that decide which rows stay on the devices

    def __post_init__(self) -> None:
        check_ranges(self, look_ahead=(1, 64))
        for name in ("device_bytes", "dram_bytes"):
            self.bytes_of(name)
        if self.disk and not self.dram_bytes:
            raise ConfigError(
                "tier.disk is set, but tier.dram_bytes is not: it says how much of the host's memory rows take before "
                "they go to the disk. Set it, for example tier.dram_bytes=4GiB."
            )

    def require_used(self) -> None:
        """Refuses places for rows that the devices lack where these have all rows (ConfigError)."""
        set_ = next((name for name in ("dram_bytes", "disk") if getattr(self, name)), None)
        if set_ and not self.device_bytes:
            raise ConfigError(
                f"tier.{set_} is set, but tier.device_bytes is not: all rows are on the devices. Set it, too, for "
                "example tier.device_bytes=1GiB."
            )

    def bytes_of(self, name: str) -> int:
        """One of the sizes in bytes."""
        given = getattr(self, name)
        if isinstance(given, int):
            check_ranges(self, **{name: (0, None)})
            return given
        return 0 if not given or given == "0" else read_whole_bytes(given, f"tier.{name}")


@dataclasses.dataclass(frozen=True)
class PlannerConfig:
    """The machine that `plan=auto` chooses for, and what it may use of it."""

    machine: str = ""  # machine file of `recjax calibrate`, or a shipped one such as h200; empty: the plain rule
    memory_gib: float = 0.0  # GiB that a device may use; 0: the memory that the machine file states
    buckets: bool = True  # whether it chooses the buckets of dense gradients where train.bucket_mib is 0
    compile: int = 0  # number of best plans to compile and compare with the plain rule's; 0: none

    def __post_init__(self) -> None:
        if not 0 <= self.memory_gib < float("inf"):
            raise ConfigError(f"memory_gib is {self.memory_gib}; give what a device may use, for example 80, or 0.")
        if self.compile < 0:
            raise ConfigError(f"compile is {self.compile}; give how many plans to compile, for example 4, or 0.")


Model = (
    DLRMConfig
    | DCNv2Config
    | DeepFMConfig
    | WideDeepConfig
    | SharedBottomConfig
    | MMoEConfig
    | PLEConfig
    | DinConfig
    | MFConfig
    | TwoTowerConfig
)
ComputeDtype = Literal["float32", "tensorfloat32", "tensorfloat32x3", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Settings of one table; None: as all have it."""

    dim: int | None = None  # embedding dimension D
    optimizer: SparseOptimizer | None = None  # update rule
    init_scale: float | None = None  # half the width of the uniform distribution of its initial values
    dtype: TableDtype | None = None  # dtype of its values
    rounding: Rounding | None = None  # rounding of updated bfloat16 values
    placement: Placement | None = None  # placement, instead of the one that `plan` chooses; changes no number
    ids: DynamicIds | None = None  # dynamic: rows are given to any 64-bit ids in the course of the training

    def __post_init__(self) -> None:
        _check_table(self)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """Settings of one categorical feature; None: as all have it."""

    pooling: Pooling | None = None  # operation that makes one vector of a bag's rows
    share: str | None = None  # another feature of as many rows, whose table is looked up in place of one of its own


@dataclasses.dataclass(frozen=True)
class HotConfig:
    """Hot rows: those that every device has at hand, since most batches name them. They change no number."""

    rows: int | Literal["auto"] = 0  # number of hot rows over all tables; auto: the number that saves most time
    batches: int = 100  # number of the run's first batches, from which hot rows are chosen
    # device: a copy on every device; host: one copy on every host, split over its devices
    copies: Literal["device", "host"] = "device"
    memory_mib: float = 64.0  # MiB that they may take on a device between steps; bounds auto
    refresh: int = 0  # steps after which other rows may become hot; 0: never
    machine: str = ""  # machine file or name, for auto; "": planner.machine, or without that bytes sent are counted

    def __post_init__(self) -> None:
        check_ranges(self, batches=(1, None), memory_mib=(0, None), refresh=(0, None))
        if self.rows != "auto":
            check_ranges(self, rows=(0, None))


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding tables: one for each categorical feature of the data, unless it shares another's."""

    dim: int = 16  # embedding dimension D, the columns of every table
    pooling: Pooling = "sum"  # operation that makes one vector of a bag's rows
    optimizer: SparseOptimizer = RowWiseAdagrad()  # update rule of the tables; exact and sparse
    init_scale: float | None = None  # initial values are uniform in (-init_scale, init_scale); none: sqrt(1 / V)
    atomics: bool = False  # let a GPU add gradients up in any order: then no two runs are bit-identical there
    ragged: bool = False  # send ids and rows without padding: for accelerators, whose compiler has the collective
    dedup: bool = True  # send a row once for all ids of a device that ask for it; false only to measure that
    dtype: TableDtype = "float32"  # dtype of the tables' values; their optimizers' slots stay float32
    rounding: Rounding = "stochastic"  # rounding of updated bfloat16 values; nearest loses small updates
    exchange: Exchange = Exchange(kind="auto")  # kind and precision of the exchange between devices; float32 is exact
    hot: HotConfig = HotConfig()  # rows that every device has at hand
    tables: Named[TableConfig] = Named()  # settings of single tables, by the name of their feature
    features: Named[FeatureConfig] = Named()  # settings of single features

    def __post_init__(self) -> None:
        _check_table(self)


def _check_table(config: TableConfig | EmbeddingConfig) -> None:
    check_ranges(config, dim=(1, None))
    if config.init_scale is not None and config.init_scale < 0:
        raise ConfigError(f"init_scale is {config.init_scale}; it must not be negative.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run. Presets in configs/ make one; `a.b=value` on the command line changes it."""

    seed: int = 0  # seed of initial weights and of the order of the samples
    data: Dataset = Synthetic()  # data to train on
    model: Model = DLRMConfig()  # the dense part
    tasks: Named[TaskConfig] = Named()  # settings of single labels, by their names: loss and weight
    embedding: EmbeddingConfig = EmbeddingConfig()  # the tables
    train: TrainConfig = TrainConfig()  # settings of training
    small: SmallData = SmallData()  # settings that replace others on a small training split
    # Devices to run on; changes no number (but replicas, if train.replica_sync says so)
    mesh: MeshConfig = MeshConfig()
    plan: str = "auto"  # places of tables: auto, balanced, a placement or a file; changes no number (exchange apart)
    tier: TierConfig = TierConfig()  # places for rows that devices have no memory for; changes no number
    planner: PlannerConfig = PlannerConfig()  # machine by which plan=auto chooses; changes no number either
    # Dtype of the dense part; float64: of everything. tensorfloat32 is float32 whose products a GPU may round on the
    # way in; tensorfloat32x3 makes up for it by two products more, with the error of float32.
    compute_dtype: ComputeDtype = "float32"

    def __init_subclass__(cls) -> None:
        own_code.remember(cls)
        typed = vars(cls).get("__annotations__", {})
        for field in dataclasses.fields(RunConfig):
            if field.name in vars(cls) and field.name not in typed:  # which dataclasses pass over without a word
                value = type(vars(cls)[field.name]).__name__
                raise ConfigError(
                    f"{cls.__qualname__}.{field.name} has no type, so a run would keep the {field.name} of RunConfig. "
                    f"Write it with one: {field.name}: {value} = {value}(...)."
                )

    def __post_init__(self) -> None:
        check_ranges(self, seed=(0, 2**32 - 1))
        if type(self) is not RunConfig:
            _check_own_model(type(self.model))
        if not self.planner.machine:  # with one plan=auto may choose tier.device_bytes
            self.tier.require_used()

    def __repr__(self) -> str:
        """The settings that are not the defaults, as overrides; `recjax show` prints all."""
        try:
            settings = ", ".join(machinery.assignments(self))
        except ConfigError as error:  # a value of the wrong type, which Python itself lets pass
            settings = str(error)
        return textwrap.fill(
            f"{type(self).__name__}({settings})",
            100,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _repr_html_(self) -> str:
        """The same as a table, in a notebook."""
        try:
            settings = [text.partition("=")[::2] for text in machinery.assignments(self)]
        except ConfigError as error:
            settings = [("", str(error))]
        return html.table(f"{type(self).__name__}: settings that are not the defaults", ("setting", "value"), settings)

    @property
    def dense_dtype(self) -> str:
        """The dtype of the dense part's arrays: TensorFloat32 is no dtype, but a way to multiply float32."""
        return "float32" if self.compute_dtype.startswith("tensorfloat32") else self.compute_dtype

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of tables and of their optimizers' slots, if it is not bfloat16."""
        return 8 if self.compute_dtype == "float64" else 4

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


def _check_own_model(cls: type) -> None:
    """Refuses the config class of a model of one's own that no run could use, with what it lacks (ConfigError)."""
    if cls in typing.get_args(Model):
        return
    name, kinds = cls.__qualname__, {model.kind for model in typing.get_args(Model)}
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(
            f"{name}, the config of a model, is no dataclass. Put @dataclasses.dataclass(frozen=True) above it."
        )
    if not isinstance(getattr(cls, "kind", None), str):
        raise ConfigError(
            f"{name}, the config of a model, has no kind, by which a run is named. Write in it kind: ClassVar[str] = "
            '"mine".'
        )
    if getattr(cls, "kind", "") in kinds:
        raise ConfigError(
            f"{name}.kind is {getattr(cls, 'kind', '')!r}, which is a model of recjax's own. Choose another word."
        )
    if not callable(getattr(cls, "build", None)):
        hint = did_you_mean("build", [word for word in dir(cls) if not word.startswith("_")])
        raise ConfigError(
            f"{name}, the config of a model, has no method build(self, dense, dims, *, dtype, seed), which makes its "
            f"flax.nnx.Module.{hint}"
        )


# Settings that may change when a run is resumed: where it runs, how long, and what it writes.
FREE_ON_RESUME = (
    "mesh",
    "plan",
    "planner",
    "tier",
    "data.path",
    "data.from",
    "data.cache",
    "data.base",
    "embedding.tables.*.placement",
    "embedding.dedup",
    "embedding.exchange.kind",
    "embedding.exchange.pieces",
    "embedding.hot",
    "train.steps",
    "train.epochs",
    "small.epochs",
    "train.dense",
    "train.bucket_mib",
    "train.eval_batch_size",
    "train.checkpoint_every",
    "train.checkpoint_increments",
    "train.keep_checkpoints",
    "train.checkpoint_copy",
    "train.log_every",
    "train.tensorboard",
    "train.trackers",
    "train.workers",
    "train.routing",
    "train.steps_per_call",
    "train.resident",
    "train.compile_ahead",
    "train.products",
)
