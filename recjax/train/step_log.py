"""Metrics of the steps: written down, and refused if they are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from jax import monitoring

from recjax.embedding.dynamic.tables import DynamicTables
from recjax.errors import RecjaxError, TrainingError
from recjax.parallel import distributed, waiting
from recjax.parallel.stopping import Stop
from recjax.train.gradients import explain
from recjax.train.inputs import InputStream
from recjax.train.progress import TrainProgress
from recjax.train.run.writers import MetricsFile, NoMetrics, Progress
from recjax.train.state import EMPTY, HostState
from recjax.train.step import Metrics
from recjax.train.trainer import Trainer

_COMPILED = "/jax/core/compile/backend_compile_duration"  # as JAX calls it


@dataclasses.dataclass(frozen=True)
class TrainedOn:
    """What a step is on.

    Attributes:
      step: its number, from 1.
      first: global index of its first sample.
      samples: how many they are.
      ids: figures of tables that give rows to keys.
    """

    step: int
    first: int
    samples: int
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)


def trained_on(
    progress: TrainProgress, stream: InputStream, ids: Mapping[str, int] = MappingProxyType({})
) -> list[TrainedOn]:
    """Returns what the steps are on that come after `progress`, on the batches that the stream gave last."""
    steps, first = [], progress.position
    for number, samples in enumerate(stream.samples, progress.step + 1):
        steps.append(TrainedOn(number, first, samples, ids))
        first += samples
    return steps


class Readings(Protocol):
    """What takes in the results of steps, in their order."""

    def dispatched(self, count: int, capacities: Mapping[str, int]) -> None:
        """Takes in that so many steps were dispatched as one program, of these sizes."""

    def arrived(self) -> None:
        """Takes in that a result is there."""

    def step(self, step: TrainedOn, loss: float, losses: Sequence[float], last: bool, alone: bool) -> None:
        """Takes in the result of a step.

        Args:
          step: which is done.
          loss: of it.
          losses: of its tasks.
          last: whether it is the last of its call, whose results come together.
          alone: whether no later call was under way.
        """

    def fault(self, step: TrainedOn, metrics: Metrics) -> RecjaxError:
        """Returns the error for a step that changed nothing, from its metrics: see `make_train_step`."""


class StepLog(contextlib.AbstractContextManager["StepLog"]):
    """Writes a run's lines of the training split, and its progress line. Use it as a context manager."""

    def __init__(
        self,
        trainer: Trainer,
        file: MetricsFile | NoMetrics | None = None,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
          trainer: of the run.
          file: metrics.jsonl; None writes none.
          stop: takes in that training is under way.
          clock: seconds, monotonic; tests pass their own.
        """
        self.file = file or NoMetrics()
        self._trainer, self._stop = trainer, stop or Stop()
        self._silent = None if distributed.is_main() else open(os.devnull, "w")  # closed by __exit__
        self.progress = Progress(trainer.total_steps, self._silent, clock)
        self.without_weight = 0  # steps so far whose samples all have weight 0
        self._ids: DynamicTables | None = None
        self.first_at: float | None = None  # by `clock`: when the metrics of the first step were there
        self._clock = clock
        self.compile_s = 0.0  # that training waited for programs to be compiled, or read if kept, since `start`
        self.compile_ahead_s = 0.0  # spent in that by threads beside the training
        self._thread = threading.get_ident()  # that trains
        self._programs: set[tuple[int, tuple[tuple[str, int], ...]]] = set()  # steps of a call, and capacities
        self._listening = contextlib.ExitStack()  # open while compilations are counted
        self._starting = contextlib.ExitStack()  # open until the first metrics are there

    @property
    def compilations(self) -> int:
        """Training programs that this process compiled."""
        return len(self._programs)

    def start(self, host: HostState = EMPTY) -> None:
        """Takes in that the training begins, and says what it waits for until a step's metrics are there.

        Args:
          host: of its state, whose maps from keys to rows each line counts.
        """
        self._ids = host.ids
        self._thread = threading.get_ident()
        monitoring.register_event_duration_secs_listener(self._compiled)
        self._listening.callback(monitoring.unregister_event_duration_listener, self._compiled)
        devices = self._trainer.mesh.devices.size
        on = f" on {devices:,} devices" if devices > 1 else ""
        self._starting.enter_context(waiting.saying(f"compiling the step and running it once{on}"))

    def _compiled(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED and threading.get_ident() == self._thread:
            self.compile_s += duration_secs
        elif event == _COMPILED:
            self.compile_ahead_s += duration_secs

    def figures(self) -> dict[str, int]:
        """Returns figures of tables that give rows to keys, as of now."""
        tables = self._ids.figures() if self._ids else {}
        return {f"{table}.{name}": count for table, counts in tables.items() for name, count in counts.items()}

    def dispatched(self, count: int, capacities: Mapping[str, int]) -> None:
        """See `Readings`."""
        program = count, tuple(sorted(capacities.items()))
        if program not in self._programs:
            self._programs.add(program)
            self.progress.compiled()

    def arrived(self) -> None:
        """See `Readings`."""
        self.first_at = self._clock() if self.first_at is None else self.first_at
        self._stop.training = True
        self._starting.close()

    def step(self, step: TrainedOn, loss: float, losses: Sequence[float], last: bool, alone: bool) -> None:
        """See `Readings`."""
        end = step.first + step.samples
        if math.isnan(loss):  # of a step that is ok: see `make_train_step`
            self.without_weight += 1
            if self.without_weight == 1:
                self.progress.note(
                    f"step {step.step:,} has no loss: all its samples have weight 0, so it changed nothing. The end of "
                    "the run says how many such steps there were; a larger train.batch_size makes them fewer."
                )
        if last:
            self.progress.update(step.step, end, loss, alone)
        if step.step % self._trainer.config.train.log_every == 0 or step.step == self._trainer.total_steps:
            rate = self.progress.samples_per_s
            tasks = {f"{task.name}.loss": value for task, value in zip(self._trainer.tasks, losses, strict=True)}
            line = {"step": step.step, "split": "train", "loss": loss, **tasks, "samples": end, "samples_per_s": rate}
            self.file.write({**line, **step.ids})

    def fault(self, step: TrainedOn, metrics: Metrics) -> TrainingError:
        """See `Readings`."""
        trainer = self._trainer
        epoch, offset = divmod(step.first, trainer.samples_per_epoch)
        place = f"samples {offset} to {offset + step.samples - 1} in the order of epoch {epoch}"
        return TrainingError(explain(trainer.config.train, trainer.bound, step.step, place, metrics)).in_all()

    def __exit__(self, *_: object) -> None:
        """Ends the progress line."""
        self._starting.close()
        self._listening.close()
        if self.without_weight:
            self.progress.note(f"{self.without_weight:,} steps had samples of weight 0 alone, and changed nothing")
        self.progress.close()
        if self._silent is not None:
            self._silent.close()
