"""Hot rows that change in the course of a training (`embedding.hot.refresh`).

Every R steps the rows that the next batches name most take the places of others: a function of the data, the seed and
the step alone, so that nothing of it need be kept in a checkpoint. What is exported or evaluated is always the state
with the rows that the run's plan names: before an event they come back, and go again after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from recjax.embedding.hot_rows import Moves, homes_of_hot_rows, make_swap
from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.planning.hot import first_batches, of_equal_sizes
from recjax.train import preflight
from recjax.train.inputs import InputStream, never
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer


class HotPeriods:
    """The hot rows of a training, period by period.

    Attributes:
      trainer: of the period.
    """

    def __init__(self, trainer: Trainer, stop: Callable[[], int] = never, save: Callable[[], int] = never) -> None:
        """Begins with the rows of the trainer's plan.

        Args:
          trainer: of the run.
          stop: as for `Trainer.train_inputs`.
          save: likewise.

        Raises:
          ConfigError: hot rows are to change that a compiled program knows.
        """
        hot = trainer.config.embedding.hot
        self._every = hot.refresh if trainer.bound.hot else 0
        self._first = self.trainer = self._held = trainer  # of whose rows are hot in the state
        self._stop, self._save = stop, save
        if self._every and trainer.bound.cached:
            raise ConfigError(
                "embedding.hot.refresh is set, and tier.device_bytes, which does not hold all rows; but rows on the "
                "host cannot become hot later yet. Set embedding.hot.refresh=0; or tier.device_bytes=0, which holds "
                "all rows on the devices."
            )
        stochastic = [group for group in trainer.bound.hot if group.dtype == "bfloat16" and group.rounding != "nearest"]
        if self._every and stochastic:
            raise ConfigError(
                "embedding.hot.refresh is set, but stochastic rounding of hot rows goes by which rows they are, in the "
                "compiled step. Set embedding.rounding=nearest or embedding.dtype=float32, or refresh to 0."
            )

    def enter(self, state: TrainState, step: int, stream: InputStream) -> TrainState:
        """Makes the rows hot that the period after `step` steps has, and has the stream route by them.

        Args:
          state: with the rows of the trainer's plan, or those of the period that it was in; it is used up.
          step: steps done.
          stream: of the training.
        """
        if not self._every:
            return state
        then = self._trainer_of(step // self._every)
        state = self._move(state, self._held, then)
        if then is not self.trainer:
            stream.reroute(then.router, then.train_reader(self._stop, self._save))
        self.trainer = self._held = then
        return state

    def home(self, state: TrainState) -> TrainState:
        """Makes the rows hot that the trainer's plan names; `state` is used up."""
        state = self._move(state, self._held, self._first)
        self._held = self._first
        return state

    def after(self, state: TrainState, step: int, stream: InputStream) -> TrainState:
        """Like `enter`, if a period ends here or the state is at home; else `state`."""
        if self._every and (step % self._every == 0 or self._held is not self.trainer):
            return self.enter(state, step, stream)
        return state

    def _move(self, state: TrainState, before: Trainer, after: Trainer) -> TrainState:
        if before is after:
            return state
        with watchdog.during("dispatch"):
            tables, slots = self._swap(state.tables, state.slots, _homes(before), _homes(after))
        return dataclasses.replace(state, tables=tables, slots=slots)

    @functools.cached_property
    def _swap(self) -> Any:
        return make_swap(self._first.bound, self._first.mesh)

    @functools.lru_cache(maxsize=1)  # noqa: B019  # lives as long as a training
    def _trainer_of(self, period: int) -> Trainer:
        """The trainer of a period, to route by; the first one takes its steps, as programs know no row that is hot."""
        if period == 0:
            return self._first
        first = self._first
        config, bound = first.config, first.bound
        epoch, nth = divmod(period * self._every, first.steps_per_epoch)
        position = epoch * first.samples_per_epoch + nth * config.train.batch_size
        tables = tuple({s.spec.name: s.spec for group in bound.groups for s in group.segments}.values())
        with watchdog.during("count"):
            presence = first_batches(config, first.source, tables, bound.features, bound.all_devices, position)
        plan = of_equal_sizes(first.plan, presence, config.embedding.dedup)
        preflight.compare({f"hot rows from step {period * self._every} on": preflight.digest(plan)})
        return dataclasses.replace(first, plan=plan, bound=first.bind(plan, first.mesh))


def _homes(trainer: Trainer) -> Moves:
    return homes_of_hot_rows(trainer.bound)
