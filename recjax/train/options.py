"""Settings of training, and the dense optimizers as optax transformations."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import optax

from recjax.embedding.optim import check_rate
from recjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DenseSgd:
    """Plain SGD on the dense parameters (optax.sgd)."""

    kind: ClassVar[str] = "sgd"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)

    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.sgd(self.learning_rate)


@dataclasses.dataclass(frozen=True)
class DenseAdagrad:
    """Element-wise Adagrad on the dense parameters (optax.adagrad)."""

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = 0.01
    initial_accumulator: float = 0.1  # sum of squares before the first step
    eps: float = 1e-7  # added under the root

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        if self.initial_accumulator < 0 or self.eps < 0:
            raise ConfigError("initial_accumulator and eps must not be negative.")

    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.adagrad(self.learning_rate, self.initial_accumulator, self.eps)


@dataclasses.dataclass(frozen=True)
class DenseAdam:
    """Adam on the dense parameters (optax.adam)."""

    kind: ClassVar[str] = "adam"
    learning_rate: float = 1e-3
    b1: float = 0.9  # decay of the mean of the gradients
    b2: float = 0.999  # decay of the mean of their squares
    eps: float = 1e-8  # added to the root

    def __post_init__(self) -> None:
        check_rate(self.learning_rate)
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1 and self.eps >= 0):
            raise ConfigError("b1 and b2 must be at least 0 and below 1, and eps not negative.")

    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.adam(self.learning_rate, self.b1, self.b2, self.eps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long and on what a model trains."""

    batch_size: int = 1024  # B, samples per step over all devices
    epochs: int = 1  # passes over the training split
    steps: int = 0  # stop after this many steps; 0 means after `epochs`
    optimizer: DenseSgd | DenseAdagrad | DenseAdam = DenseAdagrad()  # of the dense parameters
    shuffle: bool = True  # false: the order of the prepared file
    shuffle_blocks: int = 16  # prepared blocks whose rows are mixed with each other
    eval_every: int = 0  # steps between evaluations of the validation split, each with a checkpoint; 0: once an epoch
    eval_batch_size: int = 4096  # samples per evaluation step
    choose_by: Literal["auc", "logloss"] = "auc"  # validation metric that chooses the checkpoint
    patience: int = 0  # evaluations without improvement before an early stop; 0 never stops early
    checkpoint_every: int = 0  # steps between further checkpoints; 0: only where there is an evaluation
    keep_checkpoints: int = 2  # newest checkpoints that stay, beside the chosen one
    checkpoint_copy: Literal["auto", "always", "never"] = "auto"  # copy tables on the host, to train on during a save
    log_every: int = 10  # steps between lines of metrics.jsonl
    workers: int = 2  # threads that read and route ahead

    def __post_init__(self) -> None:
        positive = ("batch_size", "eval_batch_size", "shuffle_blocks", "log_every", "epochs")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("steps", "eval_every", "patience", "checkpoint_every", "workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.keep_checkpoints < 2:
            raise ConfigError("keep_checkpoints must be at least 2: the older one is used if the newest is damaged.")
