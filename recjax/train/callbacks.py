"""Callbacks between the steps of a training, evaluations that choose and checkpoints, and when the latter are due."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

from recjax.config.train import TrainConfig
from recjax.parallel import distributed, watchdog
from recjax.tiers.changes import Changes
from recjax.train import evaluation
from recjax.train.agreement import StopRequested
from recjax.train.checkpoint.array_store import size_bytes
from recjax.train.checkpoint.chain import Chain
from recjax.train.checkpoint.checkpoints import Checkpoints
from recjax.train.inputs import never
from recjax.train.progress import TrainProgress, describe
from recjax.train.state import TrainState
from recjax.train.step_log import StepLog
from recjax.train.tasks import choice_of
from recjax.train.trainer import Trainer
from recjax.utils.host_memory import available_bytes
from recjax.utils.lazy_arrays import load


class Increments:
    """Decides which a checkpoint is, and says from which one the marks of changed rows (`Changes`) count.

    A checkpoint is an increment after the one that was complete last, also if that was the one that the run goes on
    from, unless `train.checkpoint_increments` of them are in its chain already; or they and it would together hold more
    bytes than the whole one; or its chain is not there any more, or is of this step too; or the rows on the host are
    not from a checkpoint as they were, since the run began, or was resumed with another seed or from tables that were
    all on devices.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        """Takes the trainer of a run and its checkpoints."""
        self._trainer, self._checkpoints = trainer, checkpoints
        self._changes: Changes | None = None
        self._begun = 0  # of `Changes.begun`, the checkpoint that is being written

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, from which changes count then: see `Checkpoints.wait`."""
        chain = self._checkpoints.wait()
        if chain and self._changes is not None and self._changes.begun == self._begun:
            self._changes.complete(chain)

    def arrays(self, state: TrainState, step: int) -> tuple[dict[str, Any], Chain]:
        """Begins a checkpoint, after `wait`.

        Returns:
          Its arrays, and the chain of which it is an increment; () if it is whole.
        """
        tier = state.host.tier
        self._changes = None if tier is None else tier.rows.changes
        if self._changes is None:
            return self._trainer.checkpoint(state), ()
        found = self._increment(state, step, self._changes.since) or (self._trainer.checkpoint(state), ())
        self._begun = self._changes.begun
        return found

    def _increment(self, state: TrainState, step: int, chain: Chain) -> tuple[dict[str, Any], Chain] | None:
        most = self._trainer.config.train.checkpoint_increments
        if 0 < len(chain) <= most and chain[-1].step < step and self._checkpoints.holds(chain):
            whole, *before = (link.bytes for link in chain)
            arrays = self._trainer.checkpoint(state, increment=True)
            if sum(before) + size_bytes(arrays) <= whole:
                return arrays, chain
        return None


_FIRST_S = 60.0  # of training by one process, after which there is a checkpoint whatever the config says


@dataclasses.dataclass
class Event:
    """The things that are due after a step. Callbacks may add to it, for those after them and for the loop.

    Attributes:
      last: whether the step is the last of the run.
      evaluate: whether `train.eval_every` asks for an evaluation.
      checkpoint: whether `train.checkpoint_every` asks for a checkpoint, or the first minute of training is over.
      stop: the signal upon which the training ends here, or 0.
      saved: whether there is a checkpoint of this step now.
    """

    last: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    stop: int = 0
    saved: bool = False

    def __bool__(self) -> bool:
        """Returns whether anything is due."""
        return bool(self.last or self.evaluate or self.checkpoint or self.stop)


class Due:
    """Decides in one process when a checkpoint is due. By time, process 0 decides for all: see `agreement.py`."""

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


class Callback(Protocol):
    """Called after a step at which something is due; its metrics, and all before them, have been read by then."""

    def __call__(self, event: Event, state: TrainState, progress: TrainProgress) -> None:
        """Does its part. `state` is good until the next step, which takes its place."""


class Evaluate:
    """Measures the validation split where that is due and at the end, chooses the best step, and stops early."""

    def __init__(self, trainer: Trainer, log: StepLog, stop: Callable[[], int] = never) -> None:
        """Measures nothing yet.

        Args:
          trainer: of the run.
          log: takes the line of each evaluation.
          stop: the signal that has asked this process to stop, or 0: an evaluation ends at the next batch.
        """
        self._trainer, self._log, self._stop = trainer, log, stop
        self._has_validation = int(trainer.source.row_counts("validation").sum()) > 0

    def __call__(self, event: Event, state: TrainState, progress: TrainProgress) -> None:
        """Evaluates, or notes in `progress` that it was broken off, and in `event` by which signal."""
        progress.unevaluated = False  # also where it was due only to the end of a run that goes on now
        if not event.last and not event.evaluate:
            return
        before = progress.choice()
        try:
            if self._has_validation:
                self._evaluate(state, progress)
        except StopRequested as asked:
            progress.unevaluated, event.stop = True, asked.number
        if event.last:
            lines = [] if event.evaluate else ["validation"]
            if progress.step % self._trainer.config.train.log_every:
                lines.append("train")
            progress.end = {"lines": lines, **(progress.choice() if event.evaluate else before)}

    def _evaluate(self, state: TrainState, progress: TrainProgress) -> None:
        log, train = self._log, self._trainer.config.train
        with log.progress.paused():
            result = evaluation.measure(self._trainer, state, "validation", self._stop)
        log.file.write(evaluation.as_line(progress.step, "validation", result))
        choice, best = choice_of(train.choose_by, self._trainer.tasks, self._trainer.ranks), progress.best_value
        value = choice.value(result)
        value = float(distributed.from_main("the measure that chooses", repr(value)))  # to the last bit
        if math.isnan(value):
            why = "are all labels equal?"
            if self._trainer.ranks:
                why = "training has seen none of its users; data.split=random:0.8,0.1,0.1 deals out all rows"
            measure = " + ".join(choice.terms)
            log.progress.note(f"step {progress.step:,}: the validation {measure} has no value ({why}), none is chosen")
            return
        better = best is None or (value > best if choice.higher else value < best)
        progress.choose(value, better, train.patience)
        text = f"step {progress.step:,}: validation {evaluation.in_short(result, self._trainer.tasks)}"
        stopping = ", stopping early" if progress.stopped else ""
        log.progress.note(text + (", best so far" if better else "") + stopping)


class SaveCheckpoint:
    """Saves where a checkpoint is due, at the end, and where validation has just chosen.

    With `train.checkpoint_every` unset each evaluation brings one. Else one that is not the best so far brings none;
    the best one always does, so that no result depends on how often a run saves.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, log: StepLog) -> None:
        """Saves nothing yet.

        Args:
          trainer: of the run.
          checkpoints: where states go.
          log: is paused meanwhile.
        """
        self._trainer, self._checkpoints, self._log = trainer, checkpoints, log
        self._increments = Increments(trainer, checkpoints)
        self._copies: bool | None = None  # whether a save copies the tables; decided at the first one

    def __call__(self, event: Event, state: TrainState, progress: TrainProgress) -> None:
        """Saves, if this step is one for it; waits for the disk if the training ends here."""
        ends = event.last or bool(event.stop) or progress.stopped
        evaluated = event.evaluate and not (progress.unevaluated or self._trainer.config.train.checkpoint_every)
        if ends or event.checkpoint or evaluated or progress.best_step == progress.step:
            self._save(state, progress)
            event.saved = True
        if ends:
            with watchdog.during("checkpoint"):
                self._increments.wait()

    def _save(self, state: TrainState, progress: TrainProgress) -> None:
        # A run that is extended forgets an evaluation that was only due to its end, so the best before it stays too.
        best = progress.end["best_step"] if progress.end else progress.best_step
        with self._log.progress.paused(), watchdog.during("checkpoint"):
            self._increments.wait()  # its arrays go first: the host never holds two copies of the tables
            arrays, after = self._increments.arrays(state, progress.step)
            if self._copies is None:
                self._copies = self._decide(size_bytes(arrays))
            if self._copies:
                arrays = load(arrays)
            meta = describe(self._trainer, progress)
            self._checkpoints.save(progress.step, arrays, meta=meta, pinned=best, after=after)
            if not self._copies:
                self._checkpoints.wait_for_arrays()  # they are the devices' own, which the next step changes

    def _decide(self, needed_bytes: int) -> bool:
        """Returns whether checkpoints are written from a copy in host memory, while training goes on."""
        choice, left = self._trainer.config.train.checkpoint_copy, available_bytes()
        if choice != "auto":
            return choice == "always"
        if self._trainer.bound.cached:
            self._log.progress.note(
                f"checkpoints ({needed_bytes / 2**30:.1f} GiB) are written while training waits: a copy of the rows on "
                "the host would take memory beside tier.dram_bytes (train.checkpoint_copy)"
            )
            return False
        if left is not None and needed_bytes <= left / 2:
            return True
        why = "how much memory is left is not known"
        if left is not None:
            why = f"a copy would take more than half of the {left / 2**30:.1f} GiB of memory that are available"
        self._log.progress.note(
            f"checkpoints ({needed_bytes / 2**30:.1f} GiB) are written straight from the devices while training waits: "
            f"{why} (train.checkpoint_copy)"
        )
        return False
