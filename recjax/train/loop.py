"""The one train loop: step, log, evaluate, checkpoint, stop. It starts where its progress says.

The program of the next sizes is compiled in a thread beside it, so that the training need not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.train.callbacks import Callback, Due, Event
from recjax.train.compile_only import abstract_batches
from recjax.train.hot_periods import HotPeriods
from recjax.train.inputs import InputStream, never
from recjax.train.progress import TrainProgress
from recjax.train.state import TrainState
from recjax.train.step_log import StepLog, StepsUnderWay, steps_of_next_call, steps_per_call, trained_on
from recjax.train.trainer import Trainer
from recjax.utils import log

_MOST = 2  # programs that are compiled ahead of one: of more than these guesses few are right

_Sizes = frozenset[tuple[str, int]]


class CompileAhead:
    """Compiles programs before they are needed, one at a time.

    Attributes:
      found: programs that were compiled ahead, in part at least, when they were needed.
    """

    def __init__(self, compile_for: Callable[[TrainState, dict[str, int]], object], most: int = _MOST) -> None:
        """Compiles nothing yet.

        Args:
          compile_for: has the program for a state and capacities compiled, from their shapes alone, so that the next
            call finds it.
          most: programs that are compiled while one runs; 0: it never compiles any.
        """
        self._compile_for, self._most = compile_for, most
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile-ahead")
        self._under_way: dict[_Sizes, Future[None]] = {}
        self._known: set[_Sizes] = set()  # run or compiled ahead
        self._now: _Sizes = frozenset()
        self._left = 0  # guesses for the sizes that come after these
        self.found = 0

    def need(self, capacities: Mapping[str, int]) -> float:
        """Waits for this program if it is being compiled; returns the seconds that this took."""
        if (sizes := frozenset(capacities.items())) == self._now:
            return 0.0
        self._now, self._left = sizes, self._most
        self._known.add(sizes)
        ahead = self._under_way.pop(sizes, None)
        if ahead is None or ahead.cancel():  # it has not begun: who needs it compiles it
            return 0.0
        began = time.monotonic()
        self.found += ahead.exception() is None
        return time.monotonic() - began

    def foresee(self, state: TrainState, stream: InputStream) -> None:
        """Begins with the program that the stream may need soon, if there is one and it is not known.

        Args:
          state: one of the training; only shapes and shardings are read, in this call.
          stream: which says the capacities.
        """
        capacities = stream.next_capacities if self._left else None
        if capacities is None or (sizes := frozenset(capacities.items())) in self._known:
            return
        self._left -= 1
        self._known.add(sizes)
        self._under_way[sizes] = self._pool.submit(self._compile, jax.tree.map(_shape, state), capacities)

    def _compile(self, state: TrainState, capacities: dict[str, int]) -> None:
        try:
            self._compile_for(state, capacities)
        except Exception as error:
            log.info(
                f"note: a program could not be compiled ahead ({type(error).__name__}: {error}). The training goes on, "
                "and compiles it if it is needed. train.compile_ahead=never leaves it out."
            )
            raise

    def close(self) -> None:
        """Begins no further program. One that is being compiled cannot be broken off: the process ends after it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if any(not ahead.done() for ahead in self._under_way.values()):
            log.info("note: a program is still being compiled ahead; this process ends after that")


def compile_ahead(trainer: Trainer) -> CompileAhead:
    """Returns what compiles a trainer's programs ahead, as `train.compile_ahead` asks for it.

    Raises:
      ConfigError: it does, but several processes compile for GPUs.
    """
    choice: str = trainer.config.train.compile_ahead
    platform = trainer.mesh.devices.flat[0].platform
    wanted = choice == "always" or (choice == "auto" and platform == "tpu")
    if wanted and platform not in ("cpu", "tpu") and jax.process_count() > 1:
        raise ConfigError(
            "train.compile_ahead=always, but several processes train on GPUs: they would wait for each other to "
            "measure kernels while the devices train. Set train.compile_ahead=never or auto."
        )

    def compile_for(state: TrainState, capacities: dict[str, int]) -> object:
        return trainer.step_program.lower(state, abstract_batches(trainer, capacities)).compile()

    return CompileAhead(compile_for, _MOST if wanted else 0)


def _shape(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)


@dataclasses.dataclass
class Outcome:
    """A finished training.

    Attributes:
      state: after the last step.
      progress: where it ended.
      steps: that this process trained.
      compilations: training programs that this process compiled.
      compile_s: seconds that its training waited for programs of all kinds to be compiled, or read if they were kept.
      compiled_ahead: training programs that were compiled beside the training when it came to need them.
      compile_ahead_s: seconds that compiling took beside the training, needed or not.
      samples_per_s: mean throughput of this process, without compilation, evaluation and checkpoints; None if it
        trained too few steps to know.
      stop: the signal that asked it to end early, or 0.
    """

    state: TrainState
    progress: TrainProgress
    steps: int
    compilations: int
    compile_s: float
    compiled_ahead: int
    compile_ahead_s: float
    samples_per_s: float | None
    stop: int = 0


def fit(
    trainer: Trainer,
    state: TrainState,
    progress: TrainProgress,
    log: StepLog,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], int] = never,
) -> Outcome:
    """Trains from `progress` to the last step, or to an early stop.

    Args:
      trainer: of the run.
      state: after `progress.step` steps; the first step takes its place.
      progress: moves along.
      log: reads the metrics of each step while the next one is under way.
      callbacks: called in their order after steps at which something is due.
      stop: the signal that has asked this process to stop, or 0; all processes then stop after the same step, at most
        three further on (with rows on the host as many more as inputs are looked at ahead), or before the same batch of
        an evaluation.

    Raises:
      TrainingError: a step's loss or gradient was not finite, or a checkpoint cannot be written.
    """
    began, due, event = progress.step, Due(trainer.config.train, lambda: log.progress.trained_s), Event()
    hot = HotPeriods(trainer, stop, due.by_time)
    ahead, most = compile_ahead(trainer), steps_per_call(trainer)
    with (
        log,
        watchdog.steps_at_once(most),
        contextlib.closing(trainer.train_inputs(stop, due.by_time, state.host)) as stream,
        contextlib.closing(ahead),
    ):
        if progress.unevaluated:  # an earlier call was asked to stop within the evaluation of this step
            event = _event(trainer, progress, due)
            _call(callbacks, event, state, progress, due)
        if not (event.stop or progress.stopped or progress.step >= trainer.total_steps):
            stream.load_state_dict(progress.inputs())
            log.start(state.host)
            state = hot.enter(state, progress.step, stream)
            calls = StepsUnderWay(trainer, stream, log)
            while not (event.last or event.stop or progress.stopped):
                inputs = stream.take(steps_of_next_call(trainer, most, progress.step))
                state = trainer.admit(state, stream.latest)
                log.compile_s += ahead.need(stream.capacities)  # that training waited for another thread
                steps = trained_on(progress, stream, log.figures())
                progress.advance(stream)
                state = calls.train(state, inputs, steps)  # reads the metrics of the call before
                ahead.foresee(state, stream)
                if trainer.averages_after(progress.step):
                    state = trainer.averaged(calls.read(state), progress.step)
                event = _event(trainer, progress, due, stream)
                if event:
                    state = hot.home(calls.read(state))
                    progress.refresh(stream)
                    _call(callbacks, event, state, progress, due)
                if not (event.last or event.stop or progress.stopped):
                    state = hot.after(state, progress.step, stream)
    rate = log.progress.mean_samples_per_s
    return Outcome(
        state,
        progress,
        steps=progress.step - began,
        compilations=log.compilations,
        compile_s=log.compile_s,
        compiled_ahead=ahead.found,
        compile_ahead_s=log.compile_ahead_s,
        samples_per_s=None if math.isnan(rate) else rate,
        stop=0 if progress.stopped else event.stop,
    )


def _event(trainer: Trainer, progress: TrainProgress, due: Due, stream: InputStream | None = None) -> Event:
    """Returns what is due after a step, alike in all processes; without a `stream` nobody has asked for anything."""
    train, last = trainer.config.train, progress.step == trainer.total_steps
    evaluate = progress.step % (train.eval_every or trainer.steps_per_epoch) == 0
    checkpoint = due.by_steps(progress.step)
    if stream is None:
        return Event(last, evaluate, checkpoint)
    save, stop = (max(int(getattr(batch, what)) for batch in stream.taken) for what in ("save", "stop"))
    return Event(last, evaluate, checkpoint or bool(save), 0 if last else stop)


def _call(callbacks: Sequence[Callback], event: Event, state: TrainState, progress: TrainProgress, due: Due) -> None:
    for callback in callbacks:
        callback(event, state, progress)
    if event.saved:
        due.saved()
