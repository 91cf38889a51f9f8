"""When a checkpoint is due that no evaluation brings: after so many steps, or after so much training."""

from __future__ import annotations

import math
from collections.abc import Callable

from recjax.config.train import TrainConfig
from recjax.parallel import distributed

_FIRST_S = 60.0  # of training by one process, after which there is a checkpoint whatever the config says


class Due:
    """Tells it of one process. The clock of process 0 counts, and what it says travels to all: see `agreement.py`."""

    def __init__(self, train: TrainConfig, trained_s: Callable[[], float]) -> None:
        """Nothing has been saved yet.

        Args:
          train: the settings.
          trained_s: gives the seconds of training so far, without compilation, evaluations and saves.
        """
        self._train, self._trained_s = train, trained_s
        self._limit_s = min(_FIRST_S, train.checkpoint_s or math.inf)
        self._saved_at_s = 0.0
        self._asked = False

    def by_steps(self, step: int) -> bool:
        """Whether one is due after this step, as every process knows by itself."""
        return self._train.checkpoint_steps > 0 and step % self._train.checkpoint_steps == 0

    def by_time(self) -> int:
        """Whether this process asks for one by the clock, for the next step that can still be told of it; asks once."""
        if self._asked or not distributed.is_main() or self._trained_s() - self._saved_at_s < self._limit_s:
            return 0
        self._asked = True
        return 1

    def saved(self) -> None:
        """Takes in that there is one now."""
        self._saved_at_s, self._asked = self._trained_s(), False
        self._limit_s = self._train.checkpoint_s or math.inf
