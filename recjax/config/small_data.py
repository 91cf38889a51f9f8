"""Replaces a published recipe where there are few data."""

from __future__ import annotations

import dataclasses
import math

from recjax.config.train import Constant, DenseAdagrad, DenseOptimizer, Schedule, TrainConfig
from recjax.embedding.optim import Adagrad, SparseOptimizer
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

# Setting of the recipe -> the fields of SmallData that decide it on small data. The first one takes its values.
REPLACED = {
    "train.batch_size": ("batch_size", "steps"),
    "train.epochs": ("epochs",),
    "train.optimizer": ("optimizer",),
    "train.schedule": ("schedule",),
    "train.eval_every": ("eval_every", "evaluations"),
    "train.patience": ("patience",),
    "embedding.optimizer": ("tables",),
}


@dataclasses.dataclass(frozen=True)
class SmallData:
    """Settings of training on a small split, instead of by a recipe that is meant for a whole log.

    A recipe for billions of samples makes a handful of steps of 100,000, or takes too small ones. Below `below_rows`
    train.batch_size is lowered until an epoch has `steps` steps, and the other settings here take the place of
    train.epochs, .optimizer, .schedule, .eval_every, .patience and embedding.optimizer. What an override gives for one
    of these is given here too (`presets.override`), so that it holds whatever the data.
    """

    below_rows: int = 0  # number of training samples from which on the recipe holds; 0: always
    batch_size: int | None = None  # B; none: as `steps` gives it, at most train.batch_size
    steps: int = 400  # least number of steps of an epoch: the batch is the largest power of two that gives it
    epochs: int = 3  # largest number of epochs
    eval_every: int | None = None  # steps between evaluations, 0: once an epoch; none: as `evaluations` gives it
    evaluations: int = 4  # number of evaluations of the validation split in an epoch
    # Evaluations without improvement before an early stop, 0: never stops early; none: as `patience_epochs` gives it
    patience: int | None = 3
    patience_epochs: float = 2.0  # epochs without improvement before an early stop, where `patience` is none
    optimizer: DenseOptimizer = DenseAdagrad(0.02)  # optimizer of the dense parameters
    schedule: Schedule = Constant()  # factor of the learning rates
    tables: SparseOptimizer = Adagrad(0.02)  # optimizer of the tables

    def __post_init__(self) -> None:
        check_ranges(
            self,
            below_rows=(0, None),
            batch_size=(1, None),
            steps=(1, None),
            epochs=(0, None),
            eval_every=(0, None),
            evaluations=(1, None),
            patience=(0, None),
        )
        if not 0 < self.patience_epochs < math.inf:
            raise ConfigError(
                f"patience_epochs is {self.patience_epochs}; it must be above 0 and finite. patience=0 never "
                "stops early."
            )

    def train(self, train: TrainConfig, rows: int) -> TrainConfig:
        """The settings of training for a training split of `rows` samples, fewer than `below_rows`."""
        batch_size = self.batch_size or min(train.batch_size, 2 ** max(0, (rows // self.steps).bit_length() - 1))
        steps = -(-rows // batch_size)  # of an epoch
        eval_every = max(1, steps // self.evaluations) if self.eval_every is None else self.eval_every
        patience = math.ceil(self.patience_epochs * steps / (eval_every or steps))
        return dataclasses.replace(
            train,
            batch_size=batch_size,
            accumulate=min(train.accumulate, batch_size),
            epochs=self.epochs,
            optimizer=self.optimizer,
            schedule=self.schedule,
            eval_every=eval_every,
            patience=patience if self.patience is None else self.patience,
        )

    def reasons(self) -> dict[str, str]:
        """Returns the fields here that decide each setting of `REPLACED`, in words."""
        fields: dict[str, str] = dict.fromkeys(REPLACED, "")
        if self.batch_size is None:
            fields["train.batch_size"] = f"small.steps={self.steps}: an epoch has as many steps at least"
        if self.eval_every is None:
            fields["train.eval_every"] = f"small.evaluations={self.evaluations} an epoch"
        if self.patience is None:
            fields["train.patience"] = f"small.patience_epochs={self.patience_epochs:g} without a better evaluation"
        return {key: why or f"small.{REPLACED[key][0]}" for key, why in fields.items()}
