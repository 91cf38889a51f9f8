"""Rounds of training steps on a clock: ours by the one train loop's own steps; what to say of many; the host alone.

`recjax bench PRESET --host` says what a training costs the host, with devices that have nothing to do: the stream is
the real one, read, checked and packed, and in place of the step stands a program of the same signature that gives its
state back. What is left is what keeps an accelerator waiting. It is counted in microseconds of CPU, which say more than
a clock where threads share cores with others.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from recjax.config.run import RunConfig
from recjax.data.batch import RowLayout
from recjax.data.source import rows_of
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError, TrainingError
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_batches
from recjax.train.first_batch import sample
from recjax.train.progress import TrainProgress
from recjax.train.state import TrainState
from recjax.train.step import Metrics
from recjax.train.step_log import StepsUnderWay, TrainedOn, steps_per_call, trained_on
from recjax.train.trainer import Trainer
from recjax.utils import log

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


_WINDOW_ROWS = 2**16  # of which the yardstick takes a batch
_TAKES = 20


@dataclasses.dataclass(frozen=True)
class IdleTrainer(Trainer):
    """A training whose steps change nothing: the state comes back, with metrics of the usual shapes.

    Attributes:
      dispatches: of that program, counted in the first of the list.
    """

    dispatches: list[int] = dataclasses.field(default_factory=lambda: [0])

    @functools.cached_property
    def step_program(self) -> Any:
        """The program in the step's place."""
        real = Trainer.step_program.func(self)  # type: ignore[attr-defined]  # a cached_property

        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def train_step(state: TrainState, inputs: Any) -> Any:
            _, metrics = jax.eval_shape(real, state, inputs)
            return state, jax.tree.map(lambda x: jnp.full(x.shape, x.dtype == np.bool_, x.dtype), metrics)

        def counted(state: TrainState, inputs: Any) -> Any:
            self.dispatches[0] += 1
            return train_step(state, inputs)

        return counted


def measure_host(config: RunConfig, rounds: int, steps: int) -> dict[str, Any]:
    """Measures the host's part of a training.

    Args:
      config: of the run. Where `train.routing` is auto the devices route, as accelerators do.
      rounds: of which the medians count.
      steps: of a round.

    Returns:
      JSON values: "host": "main_us" and "process_us", CPU microseconds of the thread that trains and of all threads for
      a batch; "puts" and "dispatches" of a call of the program; "take_us", CPU microseconds in which one `np.take`
      copies as many bytes as a batch has, a yardstick of the machine; and "setup".

    Raises:
      ConfigError: the host is needed between two steps, so that a program that does nothing would not be what it waits
        for; or what `build_trainer` refuses.
    """
    if config.tier.bytes_of("device_bytes") or config.embedding.hot.refresh:
        raise ConfigError(
            "--host measures a host that only feeds the devices, but with tier.device_bytes or embedding.hot.refresh "
            "it moves rows between steps. Leave them out."
        )
    if config.train.routing == "auto":
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, routing="device"))
    made = build_trainer(config, splits=("train",))
    trainer = IdleTrainer(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
    side, state = Ours(trainer), trainer.init_state()
    puts = [0]

    def put(*arguments: Any, original: Any = jax.device_put, **options: Any) -> Any:
        puts[0] += 1
        return original(*arguments, **options)

    main, process = [], []
    for number in range(rounds + 1):
        log.info(f"round {number} of {rounds}" if number else "a first round, which does not count")
        puts[0] = trainer.dispatches[0] = 0
        before = side.progress.step
        with mock.patch.object(jax, "device_put", put):
            state, one = side.round(state, steps)
        if number:
            main.append(1e6 * one.main_seconds / steps)
            process.append(1e6 * (one.cpu_seconds or 0.0) / steps)
    calls = (side.progress.step - before) / side.steps  # of the last round
    sent = sum(abstract_batches(trainer, sample(trainer).capacities).form.words) * trainer.bound.all_devices
    row_words = RowLayout(trainer.source.schema).words
    batch_words = row_words * config.train.batch_size if trainer.resident else sent
    return {
        "host": {
            "main_us": spread(main)["median"],
            "process_us": spread(process)["median"],
            "puts": puts[0] / calls,
            "dispatches": trainer.dispatches[0] / calls,
            "take_us": _take_us(config.train.batch_size, batch_words),
        },
        "main": spread(main),
        "process": spread(process),
        "setup": {
            "batch_size": config.train.batch_size,
            "steps_per_call": side.steps,
            "devices": trainer.mesh.devices.size,
            "routing": trainer.router.name,
            "bytes": 4 * batch_words,
            "workers": config.train.workers,
            "reading": reading_in_words(trainer),
        },
    }


def reading_in_words(trainer: Trainer) -> str:
    """Returns where the rows come from that are trained on, and in which order."""
    order = "shuffled" if trainer.config.train.shuffle else "in the order of the data"
    if trainer.resident:
        return f"{order}, on the device, read from disk before"
    if rows_of(trainer.source, "train"):
        return f"{order}, read from disk"
    return f"{order}, " + ("read from disk in blocks" if isinstance(trainer.source, PreparedSource) else "from memory")


def _take_us(rows: int, words: int) -> float:
    """Returns CPU microseconds of one `np.take` of sorted rows that hold so many words together."""
    width = max(1, words // rows)
    window = np.zeros((max(_WINDOW_ROWS, rows), width), np.int32)
    at = np.sort(np.random.default_rng(0).permutation(len(window))[:rows])
    out, taken = np.empty((rows, width), np.int32), []
    for _ in range(_TAKES):
        began = time.thread_time()
        np.take(window, at, axis=0, out=out, mode="clip")
        taken.append(1e6 * (time.thread_time() - began))
    return float(np.median(taken))


def host_in_words(result: dict[str, Any]) -> str:
    """Returns what `measure_host` gives, in lines."""
    setup, host, main, process = (result[name] for name in ("setup", "host", "main", "process"))
    return "\n".join(
        [
            f"batches of {setup['batch_size']:,} samples ({setup['bytes'] / 1e6:.2f} MB), {setup['reading']}, "
            f"{setup['steps_per_call']} a call, routed by the {setup['routing']}, {setup['devices']} device(s)",
            f"thread that trains  {host['main_us']:8,.0f} us of CPU a batch ({main['q1']:,.0f} - {main['q3']:,.0f})",
            f"all threads         {host['process_us']:8,.0f} us of CPU a batch "
            f"({process['q1']:,.0f} - {process['q3']:,.0f})",
            f"one np.take of it   {host['take_us']:8,.0f} us of CPU",
            f"a call: {host['puts']:.2f} transfers, {host['dispatches']:.2f} programs",
        ]
    )
