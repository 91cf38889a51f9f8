"""Steps from their dispatch to their line: several a call, read one call late, repeated where one did not fit.

A call of K steps is one program. The host reads a call's metrics when the next one is under way, so that the devices
never wait for it. Where the devices route, in arrays whose sizes do not hold a batch, that batch and all after it
change nothing (see `make_train_step`); they are then trained in arrays that hold them, in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from jax import monitoring

from recjax.embedding.dynamic.tables import DynamicTables
from recjax.errors import RecjaxError, TrainingError
from recjax.parallel import distributed, waiting, watchdog
from recjax.parallel.mesh import put, replicated
from recjax.parallel.stopping import Stop
from recjax.train.gradients import explain
from recjax.train.inputs import InputStream
from recjax.train.progress import TrainProgress
from recjax.train.routers import PackedBatches
from recjax.train.run.writers import MetricsFile, NoMetrics, Progress
from recjax.train.state import EMPTY, HostState, TrainState
from recjax.train.step import Metrics
from recjax.train.trainer import Trainer
from recjax.utils import log as messages

_COMPILED = "/jax/core/compile/backend_compile_duration"  # as JAX calls it


@dataclasses.dataclass(frozen=True)
class TrainedOn:
    """A step: its number and its samples.

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
    """Takes in the results of steps, in their order."""

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
        """Returns the error for a step that changed nothing, from its metrics with counts: see `make_train_step`."""


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


def steps_per_call(trainer: Trainer) -> int:
    """Returns `TrainConfig.wanted_steps`, or the steps to an event; 1 where the host is needed between two steps."""
    train = trainer.config.train
    wanted = train.wanted_steps(trainer.mesh.devices.flat[0].platform, trainer.bound.all_devices)
    if why := _host_between(trainer):
        if train.steps_per_call not in ("auto", 1):
            messages.info(f"note: train.steps_per_call={wanted} is taken as 1: {why} between two steps.")
        return 1
    return min([wanted, *_periods(trainer)])


def _host_between(trainer: Trainer) -> str:
    """Returns, in words, the work that the host has to do between two steps; "" if there is none."""
    if trainer.bound.cached:
        return "with tier.device_bytes, rows come from the host and go there"
    if trainer.gives_rows:
        return "with ids=dynamic, rows are given to keys"
    if trainer.config.embedding.hot.refresh:
        return "with embedding.hot.refresh, hot rows change"
    return ""


def _periods(trainer: Trainer) -> list[int]:
    """Numbers of steps after each of which the host looks at the state."""
    train = trainer.config.train
    periods = [train.eval_every or trainer.steps_per_epoch, train.checkpoint_steps]
    if trainer.averages:
        periods.append(train.average_every)
    return [period for period in periods if period]


def steps_of_next_call(trainer: Trainer, most: int, step: int) -> int:
    """Returns `most`, if nothing is due after fewer steps than that from `step` on; else 1."""
    left = [period - step % period for period in _periods(trainer)]
    return most if min([trainer.total_steps - step, *left]) >= most else 1


@dataclasses.dataclass
class _Call:
    """A call of the program.

    Attributes:
      inputs: its batches.
      steps: what each step is on.
      metrics: of the steps; of one alone without a leading axis.
    """

    inputs: PackedBatches
    steps: Sequence[TrainedOn]
    metrics: Metrics

    def host(self, name: str) -> np.ndarray:
        """Returns a metric of each step; waits for it."""
        value = np.asarray(self.metrics[name])
        return value[None] if len(self.steps) == 1 else value


class StepsUnderWay:
    """The calls whose metrics have not been read, in their order."""

    def __init__(self, trainer: Trainer, stream: InputStream, log: Readings) -> None:
        """Nothing is under way.

        Args:
          trainer: of the run.
          stream: gives the batches, and takes in what they needed.
          log: takes in the metrics, step by step.
        """
        self._trainer, self._stream, self._log = trainer, stream, log
        self._calls: collections.deque[_Call] = collections.deque()

    def train(self, state: TrainState, inputs: PackedBatches, steps: Sequence[TrainedOn]) -> TrainState:
        """Dispatches steps, which take the place of `state`, and reads the metrics of the call before."""
        self._log.dispatched(len(steps), self._stream.capacities)
        state, metrics = self._trainer.train_step(state, inputs)
        self._calls.append(_Call(inputs, steps, metrics))
        return self.read(state, under_way=1)

    def read(self, state: TrainState, under_way: int = 0) -> TrainState:
        """Reads metrics until only the newest `under_way` calls are left; returns the state after all calls.

        Raises:
          TrainingError: a step's loss or gradient was not finite.
        """
        while len(self._calls) > under_way:
            state = self._read(state, self._calls.popleft())
        return state

    def _read(self, state: TrainState, call: _Call) -> TrainState:
        watchdog.phase("wait")
        ok_K = call.host("ok")
        self._log.arrived()
        end = len(ok_K) if ok_K.all() else int(np.argmin(ok_K))
        losses_K, each_KxT = call.host("loss").tolist(), call.host("losses") if "losses" in call.metrics else None
        for k in range(end):
            each = [] if each_KxT is None else each_KxT[k].tolist()
            self._log.step(call.steps[k], losses_K[k], each, last=k == len(ok_K) - 1, alone=not self._calls)
        needs = _largest(call) if "needs" in call.metrics else {}
        sizes = self._stream.take_in(needs) if needs else None
        if end == len(ok_K):
            return state
        if sizes is None or call.host("fits")[end]:
            raise self._log.fault(call.steps[end], self._counted(state, call, end))
        again = [_Call(call.inputs.batch(k), [call.steps[k]], {}) for k in range(end, len(ok_K))] + list(self._calls)
        self._calls.clear()
        state = dataclasses.replace(state, ok=put(np.bool_(True), replicated(self._trainer.mesh)))
        for repeated in again:
            self._log.dispatched(len(repeated.steps), self._stream.capacities)
            inputs = dataclasses.replace(repeated.inputs, sizes=sizes)
            state, metrics = self._trainer.train_step(state, inputs)
            self._calls.append(_Call(inputs, repeated.steps, metrics))
        return state

    def _counted(self, state: TrainState, call: _Call, k: int) -> Metrics:
        """Returns the metrics of a call's k-th step, which was not finite, with counts of what was not.

        It changed nothing, and no step after it did: so it is taken again from this state, by a program that counts.
        """
        if "bad_loss" in call.metrics:
            return {name: call.host(name)[k] for name in call.metrics if name != "needs"}
        again = dataclasses.replace(state, ok=put(np.bool_(True), replicated(self._trainer.mesh)))
        return self._trainer.counting.train_step(again, call.inputs.batch(k))[1]


def _largest(call: _Call) -> dict[str, int]:
    """Returns the largest size that any batch of a call needs, by name."""
    needs: Mapping[str, Any] = call.metrics["needs"]
    return {name: int(np.max(np.asarray(size))) for name, size in needs.items()}
