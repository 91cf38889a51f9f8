"""The one train loop: step, log, evaluate, checkpoint, stop. It starts where its progress says."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from recjax.train.agreement import never
from recjax.train.callbacks import Callback, Due, Event
from recjax.train.compile_ahead import compile_ahead
from recjax.train.hot_periods import HotPeriods
from recjax.train.inputs import InputStream
from recjax.train.progress import TrainProgress
from recjax.train.state import TrainState
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer


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
      DataError: all samples of a step have weight 0.
    """
    began, due, event = progress.step, Due(trainer.config.train, lambda: log.progress.trained_s), Event()
    hot = HotPeriods(trainer, stop, due.by_time)
    ahead = compile_ahead(trainer)
    with (
        log,
        contextlib.closing(trainer.train_inputs(stop, due.by_time, state.host)) as stream,
        contextlib.closing(ahead),
    ):
        if progress.unevaluated:  # an earlier call was asked to stop within the evaluation of this step
            event = _event(trainer, progress, due)
            _call(callbacks, event, state, progress, due)
        if not (event.stop or progress.stopped or progress.step >= trainer.total_steps):
            stream.load_state_dict(progress.inputs())
            log.start(progress, state.host)
            state = hot.enter(state, progress.step, stream)
            for inputs in stream:
                state = trainer.admit(state, stream.latest)
                log.compile_s += ahead.need(stream.capacities)  # that training waited for another thread
                state, metrics = trainer.train_step(state, inputs)
                progress.advance(stream)
                ahead.foresee(state, stream)
                state = trainer.averaged(state, progress.step)
                log.step(progress, metrics)  # reads the metrics of the step before: this one is already under way
                event = _event(trainer, progress, due, stream)
                if event:
                    log.flush()
                    state = hot.home(state)
                    _call(callbacks, event, state, progress, due)
                if event.last or event.stop or progress.stopped:
                    break
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
    return Event(last, evaluate, checkpoint or stream.latest.save, 0 if last else stream.latest.stop)


def _call(callbacks: Sequence[Callback], event: Event, state: TrainState, progress: TrainProgress, due: Due) -> None:
    for callback in callbacks:
        callback(event, state, progress)
    if event.saved:
        due.saved()
