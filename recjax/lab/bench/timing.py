"""Rounds of training steps on a clock: ours by the one train loop's own steps, and what to say of many rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from recjax.errors import TrainingError
from recjax.train.progress import TrainProgress
from recjax.train.state import TrainState
from recjax.train.step import Metrics
from recjax.train.step_log import TrainedOn, trained_on
from recjax.train.steps_under_way import StepsUnderWay, steps_per_call
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
      main_seconds: CPU time of the thread that trains.
    """

    seconds: float
    losses: list[float]
    cpu_seconds: float | None = None
    main_seconds: float = 0.0


class Ours:
    """Trains with recjax, round by round, from one state that may be handed on to another precision's `Ours`."""

    def __init__(self, trainer: Trainer) -> None:
        """Takes no step yet."""
        self.trainer, self.progress, self.steps = trainer, TrainProgress(), steps_per_call(trainer)
        self.compilations = 0
        self.capacities: dict[str, int] = {}
        self._losses: list[float] = []
        self._ends: list[tuple[float, float, float]] = []  # times of `Round` at which a call's results were there

    def round(self, state: TrainState, steps: int, untimed: int = UNTIMED) -> tuple[TrainState, Round]:
        """Trains untimed + steps steps, or more to whole calls of several, and one call more; leaves nothing running.

        A step's loss is read when the next one has been sent off, which is how training reads it.
        """
        stream, count = self.trainer.train_inputs(host=state.host), self.steps
        stream.load_state_dict(self.progress.inputs())
        first, timed = -(-untimed // count), -(-steps // count)  # calls
        calls = StepsUnderWay(self.trainer, stream, self)
        self._losses, self._ends = [], []
        while len(self._ends) < first + timed:
            inputs = stream.take(count)
            steps_of_call = trained_on(self.progress, stream)
            self.progress.advance(stream)
            state = calls.train(state, inputs, steps_of_call)
            if self.trainer.averages_after(self.progress.step):
                state = self.trainer.averaged(calls.read(state), self.progress.step)
        losses, ends = self._losses, self._ends
        state = calls.read(state)
        self.progress.refresh(stream)
        stream.close()
        share = steps / (timed * count)  # of the steps that were taken
        seconds, cpu_seconds, main_seconds = (share * np.subtract(ends[first + timed - 1], ends[first - 1])).tolist()
        return state, Round(seconds, losses[: count * (first + timed)], cpu_seconds, main_seconds)

    def dispatched(self, count: int, capacities: Mapping[str, int]) -> None:
        """See `Readings`."""
        if dict(capacities) != self.capacities:
            self.capacities, self.compilations = dict(capacities), self.compilations + 1

    def arrived(self) -> None:
        """See `Readings`."""

    def step(self, step: TrainedOn, loss: float, losses: Sequence[float], last: bool, alone: bool) -> None:
        """See `Readings`."""
        self._losses.append(loss)
        if last:
            self._ends.append((time.perf_counter(), time.process_time(), time.thread_time()))

    def fault(self, step: TrainedOn, metrics: Metrics) -> TrainingError:
        """See `Readings`."""
        return TrainingError(
            f"step {step.step} of the measurement is not finite. Train the preset, which says what it is."
        )


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
