"""Rounds of training steps on a clock: ours by the one train loop's own steps, and what to say of many rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recjax.train.progress import TrainProgress
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer

UNTIMED = 5  # steps at the start of a round until its pipeline runs as it does in the middle of a training


@dataclasses.dataclass(frozen=True)
class Round:
    """Some steps that were timed together.

    Attributes:
      seconds: from the end of the last untimed step to the end of the last timed one, with another step after it
        under way, as in the middle of a training.
      losses: of all steps, the untimed ones too.
      cpu_seconds: CPU time of this process meanwhile, all its threads together; None if that is not known.
    """

    seconds: float
    losses: list[float]
    cpu_seconds: float | None = None


class Ours:
    """Trains with recjax, round by round, from one state that may be handed on to another precision's `Ours`."""

    def __init__(self, trainer: Trainer) -> None:
        """Takes no step yet."""
        self.trainer, self.progress = trainer, TrainProgress()
        self.compilations = 0
        self.capacities: dict[str, int] = {}

    def round(self, state: TrainState, steps: int, untimed: int = UNTIMED) -> tuple[TrainState, Round]:
        """Trains untimed + steps steps and one more, and leaves nothing running.

        A step's loss is read when the next one has been sent off, which is how training reads it.
        """
        losses: list[float] = []
        ends: list[float] = []
        cpu_ends: list[float] = []
        pending: jax.Array | None = None
        stream = self.trainer.train_inputs(host=state.host)
        stream.load_state_dict(self.progress.inputs())
        for inputs in stream:
            state, metrics = self.trainer.train_step(state, inputs)
            self.progress.advance(stream)
            state = self.trainer.averaged(state, self.progress.step)
            if stream.capacities != self.capacities:
                self.capacities, self.compilations = stream.capacities, self.compilations + 1
            if pending is not None:
                losses.append(float(pending))
                ends.append(time.perf_counter())
                cpu_ends.append(time.process_time())
            pending = metrics["loss"]
            if len(ends) == untimed + steps:
                break
        stream.close()
        jax.block_until_ready(state)
        return state, Round(ends[-1] - ends[untimed - 1], losses, cpu_ends[-1] - cpu_ends[untimed - 1])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, and the values themselves."""
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q1": float(q1), "q3": float(q3), "rounds": [float(v) for v in values]}


def wait_for_each() -> None:
    """Has CPU devices run every program in the thread that calls it, for programs started from now on.

    Otherwise a program is handed to another thread, and the time until that wakes is longer than most kernels take. It
    does nothing once JAX's back end has started.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
