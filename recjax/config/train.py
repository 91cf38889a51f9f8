"""Settings of training, its learning-rate schedules, and the dense optimizers as optax transformations.

Where a dense optimizer has the name of a sparse one (`recjax/embedding/optim.py`), it is the same rule with the same
meaning of every setting: on a table of which every row is touched both give the same numbers. `l2` and `weight_decay`
act on all dense parameters, biases too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from recjax.config import choice
from recjax.config.optax_rules import DenseOptax, OptaxSchedule
from recjax.embedding.optim import AdamSettings, Rates, SgdSettings, check_adagrad, check_not_negative
from recjax.embedding.quantize import Precision
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

_MOST = 2**31 - 1  # steps, which are counted in int32
_AUTO_STEPS, _AUTO_SAMPLES = 16, 2**18  # most of a call of the program: steps, and samples of one accelerator


@dataclasses.dataclass(frozen=True)
class Constant:
    """Linear warm-up to 1, and 1 from then on."""

    kind: ClassVar[str] = "constant"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST))

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        return _warmup(step, self.warmup_steps)


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Linear warm-up, hold at 1, polynomial decay, hold at the end value.

    From step S = decay_start on, while step t < S + decay_steps:
    end + (1 - end) * (1 - (t - S) / decay_steps)^power. Then `end`.

    With power 2 it is the policy of facebookresearch/dlrm and of MLPerf's DLRM, with two differences: while that one
    holds, it stays at the last factor of the warm-up, (W - 1) / W, where here it is 1; and after the decay it stays at
    the last one of the decay, 1 / decay_steps^2, where here it is `end`.
    """

    kind: ClassVar[str] = "polynomial"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W
    decay_start: int = 1  # S, the first step of the decay; its factor is still 1
    decay_steps: int = 10_000  # number of steps that the decay takes
    power: float = 2.0  # exponent of the decay; 1: linear
    end: float = 0.0  # factor after the decay

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST), decay_start=(1, _MOST), decay_steps=(1, _MOST), end=(0, 1))
        if self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"decay_start is {self.decay_start} and warmup_steps {self.warmup_steps}: the decay cannot start "
                "before the warm-up ends. Raise decay_start."
            )
        if not 0 < self.power < math.inf:
            raise ConfigError(f"power is {self.power}; it must be positive and finite.")

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        # Counted in integers, so that no rounding moves an edge.
        left = self.decay_steps - jnp.clip(step + 1 - self.decay_start, 0, self.decay_steps)
        decay = self.end + (1 - self.end) * _ratio(left, self.decay_steps) ** self.power
        return _warmup(step, self.warmup_steps) * decay


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """Linear warm-up, then the factor is multiplied by `decay` after every `every` steps: decay^floor((t - 1) / every).

    Steps 1 to `every` have the factor 1 (warm-up apart), the next `every` steps have `decay`, and so on.
    """

    kind: ClassVar[str] = "step"
    warmup_steps: int = 0  # W; step t of the first W has the factor t / W, times the decay's
    every: int = 10_000  # steps between two decays
    decay: float = 0.1  # factor of each decay

    def __post_init__(self) -> None:
        check_ranges(self, warmup_steps=(0, _MOST), every=(1, _MOST))
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is {self.decay}; it must be above 0 and at most 1.")

    def factor(self, step: jax.Array) -> jax.Array:
        """Multiplier of the learning rates, float []; `step`: int32 [], steps done."""
        times = (step // self.every).astype(float)
        return _warmup(step, self.warmup_steps) * self.decay**times


Schedule = Constant | Polynomial | StepDecay | OptaxSchedule


def _warmup(step: jax.Array, warmup_steps: int) -> jax.Array:
    if not warmup_steps:
        return jnp.ones((), float)
    return _ratio(jnp.minimum(step, warmup_steps - 1) + 1, warmup_steps)


def _ratio(count: jax.Array, of: int) -> jax.Array:
    return count.astype(float) / of


DenseSharding = Literal["replicated", "sharded"]


@dataclasses.dataclass(frozen=True)
class DenseRule(Rates):
    """Base of the rules."""

    def direction(self) -> optax.GradientTransformation:
        """From gradients to what is stepped against."""
        raise NotImplementedError

    def build(self, learning_rate: Any = None) -> optax.GradientTransformation:
        """The optax transformation, for a schedule's factor of 1; of this rate, which may be an array, or its own.

        All its updates, decoupled decay included, are proportional to the learning rate: a factor multiplies them.
        """
        before = (optax.add_decayed_weights(self.l2),) if self.l2 else ()
        after = (optax.add_decayed_weights(self.weight_decay),) if self.weight_decay else ()
        lr = self.learning_rate if learning_rate is None else learning_rate
        return optax.chain(*before, self.direction(), *after, optax.scale_by_learning_rate(lr))


@dataclasses.dataclass(frozen=True)
class DenseSgd(SgdSettings, DenseRule):
    """SGD, with heavy-ball momentum if asked for (optax.sgd)."""

    def direction(self) -> optax.GradientTransformation:
        """From gradients to what is stepped against."""
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()


@dataclasses.dataclass(frozen=True)
class DenseAdagrad(DenseRule):
    """Element-wise Adagrad: s += g^2; w -= lr * g / (sqrt(s) + eps).

    Not optax.adagrad, which adds eps under the root: that differs from every sparse rule, and from torch.optim.Adagrad.
    """

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = 0.01  # lr, before the schedule's factor
    initial_accumulator: float = 0.1  # s before the first step
    eps: float = 1e-7  # term added to the root

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adagrad(self)

    def direction(self) -> optax.GradientTransformation:
        """From gradients to what is stepped against."""

        def init(params: Any) -> optax.ScaleByRssState:
            # By NumPy: JAX would compile a program for each shape.
            return optax.ScaleByRssState(
                jax.tree.map(lambda w: np.full(w.shape, self.initial_accumulator, w.dtype), params)
            )

        def update(grads: Any, state: optax.ScaleByRssState, params: Any = None) -> Any:
            del params
            sums = jax.tree.map(lambda s, g: s + jnp.square(g), state.sum_of_squares, grads)
            steps = jax.tree.map(lambda s, g: g / (jnp.sqrt(s) + self.eps), sums, grads)
            return steps, optax.ScaleByRssState(sums)

        return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class DenseAdam(AdamSettings, DenseRule):
    """Adam; with `weight_decay` AdamW (optax.adam, optax.adamw)."""

    def direction(self) -> optax.GradientTransformation:
        """From gradients to what is stepped against."""
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


DenseOptimizer = DenseSgd | DenseAdagrad | DenseAdam | DenseOptax

_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of training: how long, and on what."""

    batch_size: int = 1024  # B, samples per step over all devices
    epochs: int = 1  # passes over the training split; 0, with init_from: none, the run holds what it starts with
    steps: int = 0  # number of steps, in place of `epochs`; 0: as many as `epochs` gives
    # Run folder whose weights this run starts with, rows of tables by their original values; empty: new weights
    init_from: str = ""
    # Step of that run: chosen (by its validation, or else the newest), newest, or one that has a checkpoint
    init_step: Literal["chosen", "newest"] | int = "chosen"
    init_slots: bool = True  # also start with the state of that run's optimizers
    # Parts that stay as they are: dense, tables, or tables:NAME of one table. They keep no optimizer state
    freeze: tuple[str, ...] = ()
    optimizer: DenseOptimizer = DenseAdagrad()  # optimizer of the dense parameters
    schedule: Schedule = Constant()  # factor of the learning rates of the dense parameters and of the tables
    clip_norm: float = 0.0  # largest norm of all gradients together, dense and tables' summed rows; 0: no limit
    accumulate: int = 1  # parts in which a batch is processed, with one update: less memory, the same numbers
    # sharded: each device holds 1/N of dense parameters and optimizer state; changes no number
    dense: DenseSharding = "replicated"
    # MiB of dense gradients after which they are sent, while others are computed; 0: all at the end, or as a planner
    # chooses (see planner.buckets)
    bucket_mib: float = 0.0
    # Way in which mesh.replicas agree: exact sums row gradients over all; the others let tables drift apart
    replica_sync: Literal["exact", "average", "never"] = "exact"
    average_every: int = 100  # steps between averages of all groups' tables, if replica_sync=average
    # Precision in which each group sends its rows for these averages; slots travel as float32. The same numbers arrive
    # everywhere.
    average_precision: Precision = "float32"
    # Initial tables of groups that are not exact: the same, or group g's are those of a run with seed + g
    replica_init: Literal["same", "own"] = "same"
    # Steps by which the dense parameters take their gradients late, 0 or 1; with 1 the next step's forward and backward
    # pass can hide an all-reduce of gradients. Changes the numbers.
    dense_delay: int = 0
    shuffle: bool = True  # mix the training samples; false: the order of the prepared file
    shuffle_blocks: int = 16  # prepared blocks whose rows are mixed with each other
    eval_every: int = 0  # steps between evaluations of the validation split; 0: once an epoch
    eval_batch_size: int = 4096  # samples per evaluation step
    # Validation measure that chooses the checkpoint: auc, logloss; of several labels LABEL.MEASURE, or a sum such as
    # 0.7*click.auc+0.3*buy.auc. auc then is the mean over binary labels, or the loss where there are none.
    choose_by: str = "auc"
    patience: int = 0  # evaluations without improvement before an early stop; 0 never stops early
    # Steps between checkpoints, or the training time between them: 30s, 5min, 1h. 0: with each evaluation. Else an
    # evaluation brings one only if it is the best so far. So do the first minute of training and the end in any case.
    checkpoint_every: int | str = 0
    # Number of increments after each whole checkpoint. Of tables with rows on the host (tier.device_bytes), an
    # increment holds only the rows that have changed since the checkpoint before. 0: all are whole
    checkpoint_increments: int = 0
    keep_checkpoints: int = 2  # number of newest checkpoints that stay, beside the chosen one
    checkpoint_copy: Literal["auto", "always", "never"] = "auto"  # copy tables on the host, to train on during a save
    log_every: int = 10  # steps between lines of metrics.jsonl
    tensorboard: bool = False  # also write the lines of metrics.jsonl as an event file (extra "tensorboard")
    # Other programs that show the lines of metrics.jsonl, offline and in the run folder: wandb, mlflow (extras)
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    workers: int = 2  # threads that read and route ahead
    # Place where a batch's distinct ids are found; changes no number
    routing: Literal["auto", "host", "device"] = "auto"
    # Steps that one call of the program takes, before the host looks at their metrics; changes no number. auto: 1 on
    # CPUs, up to 16 on accelerators. It is 1 where the host is needed between two steps
    steps_per_call: int | Literal["auto"] = "auto"
    # Where training rows lie while it trains, if all bags are of one size and the data are prepared on disk; changes no
    # number. always: all on every device, and the host sends their numbers. never: the host reads them. auto: on
    # accelerators where they take at most half of the memory that the state leaves, not on CPUs
    resident: Literal["auto", "never", "always"] = "auto"
    # Compile the program for larger arrays during the training, before a batch needs it: changes no number. auto: on
    # TPUs
    compile_ahead: Literal["auto", "always", "never"] = "auto"
    # Library for the products of dense layers on CPUs: kernels, xla, onednn, or a table of `recjax bench PRESET
    # --products FILE`, which states the fastest of each. auto: the kernels where they are installed, else XLA. Changes
    # the last bits of numbers
    products: str = "auto"

    def __post_init__(self) -> None:
        sizes = ("batch_size", "eval_batch_size", "shuffle_blocks", "accumulate")
        positive = (*sizes, "log_every", "average_every")
        not_negative = ("epochs", "steps", "eval_every", "patience", "workers", "checkpoint_increments")
        check_ranges(self, **dict.fromkeys(positive, (1, None)), **dict.fromkeys(not_negative, (0, None)))
        check_ranges(self, dense_delay=(0, 1))
        if self.steps_per_call != "auto":
            check_ranges(self, steps_per_call=(1, 4096))
        check_not_negative(self, "clip_norm", "bucket_mib")
        self._check_groups()
        self._check_start()
        choice.parse(self.choose_by)
        if not self.checkpoint_steps and not self.checkpoint_s and self.checkpoint_every != 0:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}; it must be a number of steps, 0, or a time such as 30s, "
                "5min or 1h."
            )
        if self.accumulate > self.batch_size:
            raise ConfigError(f"accumulate is {self.accumulate}, but batch_size is {self.batch_size}: lower it.")
        if self.keep_checkpoints < 2:
            raise ConfigError("keep_checkpoints must be at least 2: the older one is used if the newest is damaged.")

    def wanted_steps(self, platform: str, devices: int) -> int:
        """Returns how many steps `steps_per_call` makes one program, where the host is not needed between them.

        "auto" is 1 on CPUs. An accelerator would wait for the host between steps of some milliseconds: there it is 16,
        and fewer where as many batches hold more than 262,144 samples a device.
        """
        if self.steps_per_call != "auto":
            return self.steps_per_call
        return 1 if platform == "cpu" else max(1, min(_AUTO_STEPS, _AUTO_SAMPLES // -(-self.batch_size // devices)))

    def _check_groups(self) -> None:
        if self.average_precision != "float32" and self.replica_sync != "average":
            raise ConfigError(
                f"average_precision is {self.average_precision}, but replica_sync is {self.replica_sync}, which takes "
                "no averages. Set train.replica_sync=average, or leave train.average_precision at float32."
            )
        if self.replica_init == "own" and self.replica_sync == "exact":
            raise ConfigError(
                "replica_init=own gives each replica group initial tables of its own, but replica_sync=exact keeps all "
                "tables equal. Set train.replica_sync to average or never, or leave train.replica_init at same."
            )
        if self.dense_delay and self.clip_norm:
            raise ConfigError(
                f"dense_delay is {self.dense_delay} and clip_norm {self.clip_norm:g}: the norm of all gradients of a "
                "step is not known while those of the dense part are late. Set one of them to 0."
            )

    def _check_start(self) -> None:
        """Refuses settings of what a run starts with that contradict each other (ConfigError)."""
        if self.init_step not in ("chosen", "newest"):
            check_ranges(self, init_step=(0, _MOST))
        if not self.init_from and (self.init_step != "chosen" or not self.init_slots):
            name = "init_slots" if self.init_step == "chosen" else "init_step"
            raise ConfigError(
                f"{name} is {str(getattr(self, name)).lower()}, but init_from names no run to start from. Give "
                f"train.init_from=RUN, or leave train.{name} out."
            )
        if not self.epochs and not self.steps and not self.init_from:
            raise ConfigError(
                "epochs is 0, so nothing would be trained, and the run would hold random weights. Give epochs of 1 or "
                "more; or train.init_from=RUN, for a run that holds that one's weights for other data."
            )
        for text in self.freeze:
            part, _, name = text.partition(":")
            if not (text == "dense" or (part == "tables" and bool(name) == (":" in text))):
                raise ConfigError(
                    f"freeze has {text!r}, which is no part of a model. Parts are dense, tables for all tables, and "
                    "tables:NAME for one: train.freeze=tables:item,dense."
                )
        if self.freezes_dense and self.dense_delay:
            raise ConfigError(
                f"freeze has dense, and dense_delay is {self.dense_delay}, which is about gradients of the dense part: "
                "there are none. Leave train.dense_delay out."
            )

    @property
    def freezes_dense(self) -> bool:
        """True if the dense part stays as it is."""
        return "dense" in self.freeze

    @property
    def frozen_tables(self) -> tuple[str, ...] | None:
        """Names of the tables that stay as they are; None: all."""
        if "tables" in self.freeze:
            return None
        return tuple(text.partition(":")[2] for text in self.freeze if text != "dense")

    @property
    def all_trackers(self) -> tuple[str, ...]:
        """Names of all that take the lines of metrics.jsonl, each once."""
        return (*(("tensorboard",) if self.tensorboard else ()), *dict.fromkeys(self.trackers))

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints that no evaluation asks for; 0: their number decides nothing."""
        return max(0, self.checkpoint_every) if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_s(self) -> float:
        """Seconds of training between checkpoints; 0: time decides nothing."""
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", str(self.checkpoint_every), re.ASCII)
        return float(parts[1]) * _SECONDS[parts[2]] if parts else 0.0
