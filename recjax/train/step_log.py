"""Metrics of the steps: read one step late, written down, and refused if they are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable

import numpy as np
from jax import monitoring

from recjax.embedding.dynamic.tables import DynamicTables
from recjax.errors import TrainingError
from recjax.parallel import distributed, waiting, watchdog
from recjax.parallel.stopping import Stop
from recjax.train.gradients import explain
from recjax.train.progress import TrainProgress
from recjax.train.run.writers import MetricsFile, NoMetrics, Progress
from recjax.train.state import EMPTY, HostState
from recjax.train.step import Metrics
from recjax.train.trainer import Trainer

_COMPILED = "/jax/core/compile/backend_compile_duration"  # as JAX calls it


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step that was dispatched: its number, where its samples begin and how many they are, and its metrics.

    `ids` is what is known of tables that give rows to keys.
    """

    step: int
    first: int
    samples: int
    metrics: Metrics
    ids: dict[str, int]


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
        self._pending: _Pending | None = None
        self._ids: DynamicTables | None = None
        self._position = 0
        self.first_at: float | None = None  # by `clock`: when the metrics of the first step were there
        self._clock = clock
        self.compile_s = 0.0  # that training waited for programs to be compiled, or read if kept, since `start`
        self.compile_ahead_s = 0.0  # spent in that by threads beside the training
        self._thread = threading.get_ident()  # that trains
        self._programs: set[tuple[tuple[str, int], ...]] = set()  # one compilation for each set of capacities
        self._listening = contextlib.ExitStack()  # open while compilations are counted
        self._starting = contextlib.ExitStack()  # open until the first metrics are there

    @property
    def compilations(self) -> int:
        """Training programs that this process compiled."""
        return len(self._programs)

    def start(self, progress: TrainProgress, host: HostState = EMPTY) -> None:
        """Takes in where the training begins, and says what it waits for until a step's metrics are there.

        Args:
          progress: of the training.
          host: of its state, whose maps from keys to rows each line counts.
        """
        self._ids = host.ids
        self._position, self._thread = progress.position, threading.get_ident()
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

    def step(self, progress: TrainProgress, metrics: Metrics) -> None:
        """Takes in a step that was dispatched, and reads the metrics of the one before."""
        program = tuple(sorted(progress.capacities.items()))
        if program not in self._programs:
            self._programs.add(program)
            self.progress.compiled()
        self._read(alone=False)
        tables = self._ids.figures() if self._ids else {}
        ids = {f"{table}.{name}": count for table, of in tables.items() for name, count in of.items()}
        self._pending = _Pending(progress.step, self._position, progress.position - self._position, metrics, ids)
        self._position = progress.position

    def flush(self) -> None:
        """Reads the metrics of the last step, with no other under way."""
        self._read(alone=True)

    def _read(self, alone: bool) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        step, metrics, end = pending.step, pending.metrics, pending.first + pending.samples
        watchdog.phase("wait")
        ok = bool(metrics["ok"])
        self.first_at = self._clock() if self.first_at is None else self.first_at
        self._stop.training = True
        self._starting.close()
        if not ok:
            raise self._fault(pending)
        loss = float(metrics["loss"])
        if math.isnan(loss):  # and ok: see `make_train_step`
            self.without_weight += 1
            if self.without_weight == 1:
                self.progress.note(
                    f"step {step:,} has no loss: all its samples have weight 0, so it changed nothing. The end of the "
                    "run says how many such steps there were; a larger train.batch_size makes them fewer."
                )
        self.progress.update(step, end, loss, alone)
        if step % self._trainer.config.train.log_every == 0 or step == self._trainer.total_steps:
            rate = self.progress.samples_per_s
            each = zip(self._trainer.tasks, np.asarray(metrics.get("losses", ())).tolist(), strict=True)
            of_tasks = {f"{task.name}.loss": value for task, value in each}
            line = {"step": step, "split": "train", "loss": loss, **of_tasks, "samples": end, "samples_per_s": rate}
            self.file.write({**line, **pending.ids})

    def _fault(self, pending: _Pending) -> TrainingError:
        trainer = self._trainer
        epoch, offset = divmod(pending.first, trainer.samples_per_epoch)
        place = f"samples {offset} to {offset + pending.samples - 1} in the order of epoch {epoch}"
        return TrainingError(
            explain(trainer.config.train, trainer.bound, pending.step, place, pending.metrics)
        ).in_all()

    def __exit__(self, *_: object) -> None:
        """Ends the progress line."""
        self._starting.close()
        self._listening.close()
        if self.without_weight:
            self.progress.note(f"{self.without_weight:,} steps had samples of weight 0 alone, and changed nothing")
        self.progress.close()
        if self._silent is not None:
            self._silent.close()
