"""Steps between their dispatch and their metrics: several a call, read one call late, repeated where one did not fit.

A call of K steps is one program. The host reads a call's metrics when the next one is under way, so that the devices
never wait for it. Where the devices route, in arrays whose sizes do not hold a batch, that batch and all after it
change nothing (see `make_train_step`); they are then trained in arrays that hold them, in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.parallel import watchdog
from recjax.parallel.mesh import put, replicated
from recjax.train.inputs import InputStream
from recjax.train.routers import PackedBatches
from recjax.train.state import TrainState
from recjax.train.step import Metrics
from recjax.train.step_log import Readings, TrainedOn
from recjax.train.trainer import Trainer
from recjax.utils import log as messages

_AUTO_SAMPLES = 2**18  # of all steps of a call together, on one accelerator
_AUTO_STEPS = 16


def steps_per_call(trainer: Trainer) -> int:
    """Returns how many steps `train.steps_per_call` makes one program: 1 where the host is needed between two steps.

    "auto" is 1 on CPUs. An accelerator would wait for the host between steps of some milliseconds: there it is 16, and
    fewer where as many batches hold more than 262,144 samples a device.
    """
    train, platform = trainer.config.train, trainer.mesh.devices.flat[0].platform
    if train.steps_per_call == "auto":
        local = -(-train.batch_size // trainer.bound.all_devices)
        wanted = 1 if platform == "cpu" else max(1, min(_AUTO_STEPS, _AUTO_SAMPLES // local))
    else:
        wanted = train.steps_per_call
    if why := _host_between(trainer):
        if train.steps_per_call not in ("auto", 1):
            messages.info(f"note: train.steps_per_call={wanted} is taken as 1: {why} between two steps.")
        return 1
    return min([wanted, *_periods(trainer)])


def _host_between(trainer: Trainer) -> str:
    """Says what the host does between two steps; "" if nothing."""
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
        """Dispatches steps, which take the place of `state`, and reads the call before the one before."""
        self._log.dispatched(len(steps), self._stream.capacities)
        state, metrics = self._trainer.train_step(state, inputs)
        self._calls.append(_Call(inputs, steps, metrics))
        return self.read(state, under_way=1)

    def read(self, state: TrainState, under_way: int = 0) -> TrainState:
        """Reads metrics until only the newest `under_way` calls are left; returns the state after all calls.

        Raises:
          TrainingError: a step's loss or gradient was not finite.
          DataError: all samples of a step have weight 0.
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
            of_step = {name: call.host(name)[end] for name in call.metrics if name != "needs"}
            raise self._log.fault(call.steps[end], of_step)
        again = [_Call(call.inputs.batch(k), [call.steps[k]], {}) for k in range(end, len(ok_K))] + list(self._calls)
        self._calls.clear()
        state = dataclasses.replace(state, ok=put(np.bool_(True), replicated(self._trainer.mesh)))
        for one in again:
            self._log.dispatched(len(one.steps), self._stream.capacities)
            inputs = dataclasses.replace(one.inputs, sizes=sizes)
            state, metrics = self._trainer.train_step(state, inputs)
            self._calls.append(_Call(inputs, one.steps, metrics))
        return state


def _largest(call: _Call) -> dict[str, int]:
    """Returns the largest size that any batch of a call needs, by name."""
    needs: Mapping[str, Any] = call.metrics["needs"]
    return {name: int(np.max(np.asarray(size))) for name, size in needs.items()}
