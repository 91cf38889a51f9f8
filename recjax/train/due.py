"""Checkpoints between evaluations: they are due after a number of steps, or after a time of training."""

from __future__ import annotations

import math
from collections.abc import Callable

from recjax.config.train import TrainConfig
from recjax.parallel import distributed

_FIRST_S = 60.0  # of training by one process, after which there is a checkpoint whatever the config says


class Due:
    """Tells one process when a checkpoint is due. By time, process 0 decides for all: see `agreement.py`."""

    def __init__(self, train: TrainConfig, trained_s: Callable[[], float]) -> None:
        """Starts without a checkpoint.

        Args:
          train: the settings.
          trained_s: returns the seconds of training since its first step, without evaluations and saves.
        """
        self._train, self._trained_s = train, trained_s
        self._limit_s = min(_FIRST_S, train.checkpoint_s or math.inf)
        self._saved_at_s = 0.0
        self._asked = False

    def by_steps(self, step: int) -> bool:
        """Returns True if a checkpoint is due after this step, which every process knows by itself."""
        return self._train.checkpoint_steps > 0 and step % self._train.checkpoint_steps == 0

    def by_time(self) -> int:
        """Returns 1 once when a checkpoint is due by process 0's clock; else, and in other processes, 0."""
        if self._asked or not distributed.is_main() or self._trained_s() - self._saved_at_s < self._limit_s:
            return 0
        self._asked = True
        return 1

    def saved(self) -> None:
        """Takes in that a checkpoint has been saved: its time counts from here."""
        self._saved_at_s, self._asked = self._trained_s(), False
        self._limit_s = self._train.checkpoint_s or math.inf
