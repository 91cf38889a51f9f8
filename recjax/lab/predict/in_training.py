"""Measures for `recjax calibrate` how much longer kernels and the host's stages take in a training than alone.

Calibration repeats a kernel or a stage alone. In a training the threads of the host and of the devices take turns on
the same cores, each finds the caches as the others left them, and XLA hands kernels to other threads, whose parts do
not end together. Lin et al. (arXiv:2201.07821) take overheads from traces of workloads and share them over all.
Likewise some models are trained here: their CPU time by thread, and their step by the clock, are compared with the
predicted ones, and the ratios go into the machine file.

So do the steps. Where a machine is not as fast all day, the same models, trained again beside another measurement, tell
how fast it is then.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Self

import numpy as np
import scipy.optimize

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import ConfigError, TrainingError
from recjax.lab.predict.prediction import predicted
from recjax.lab.predict.stepping import Stepping
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.malloc import passed_on
from recjax.parallel.mesh import MeshConfig
from recjax.planning.machine import Kernel, Machine, Point, Quantity
from recjax.planning.predict import predict

_WARM, _LEAST, _SECONDS = 5, 10, 0.25  # of a round: steps before, steps that are timed at least, and for how long
_ALIKE = 0.001  # weight of the difference of two ratios, squared, beside that of relative errors
_SOURCE = "measured in trainings"
_FEW = 2  # references of a quick calibration
TRAINING = "training"  # kernel class whose sizes are these models, by their place
POSSIBLE = hasattr(time, "pthread_getcpuclockid")  # CPU time by thread; macOS and Windows do not give it


@dataclasses.dataclass(frozen=True)
class Busy:
    """A step, us.

    Attributes:
      host: CPU time of the threads that run Python.
      kernels: of all others.
      step: by the clock, the median.
    """

    host: float
    kernels: float
    step: float

    @property
    def cpu(self) -> float:
        """CPU time of all threads."""
        return self.host + self.kernels


class ReferencesEnded(TrainingError):
    """The process that trains the references is gone: nothing can be compared with them any more."""


class References:
    """Models that a process of its own trains: in this one CPU devices run programs in the thread that calls them.

    Used as a context. `round` is for between the parts of a calibration's passes, so that a drift of the machine hits
    the trainings as it hits what is measured alone.
    """

    def __init__(self, quick: bool, calibrated_us: Sequence[float] = ()) -> None:
        """Compiles nothing yet. `quick` takes two references, else all; their steps took so long in a calibration."""
        self._configs = list(references(quick))
        self._calibrated_us = tuple(calibrated_us)
        self.found: list[list[Busy]] = []

    @classmethod
    def of(cls, machine: Machine) -> References | None:
        """The models that a machine was calibrated with; None if it was with none, or CPU times are not to be had.

        Raises:
          ConfigError: it was calibrated with other models, by another version.
        """
        known = machine.kernel(TRAINING)
        if not POSSIBLE or known is None:
            return None
        points = sorted(known.points, key=lambda point: point.sizes["reference"])
        quick = len(points) == _FEW
        if len(points) != len(list(references(quick))):
            raise ConfigError(
                f"the machine file of {machine.name} has steps of {len(points)} trainings, which are not those of this "
                "version of recjax. Measure the machine again: recjax calibrate --out FILE"
            )
        return cls(quick, [point.us for point in points])

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(1, context, _build, (self._configs,))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def round(self) -> None:
        """Trains each for a moment, and waits for that.

        Raises:
          ReferencesEnded: the process that trains has ended.
        """
        try:
            with passed_on():  # the first one starts the process, which is to train as a command does
                trained = self._pool.submit(_round)
            self.found.append(trained.result())
        except BrokenProcessPool as error:
            raise ReferencesEnded(
                "the process that trains the models of a calibration has ended, as one that the system stops for want "
                "of memory. Start the command again where a few GB more are free; `calibrate --quick` needs less."
            ) from error

    def applied(self, machine: Machine) -> Machine:
        """The machine with what a training takes over what is predicted from all that was measured alone.

        CPU time is compared first: kernels and host stages get the ratio with which the sum of both is nearest, in
        least squares of relative errors, for not all threads that work for the host run Python. By the clock a step
        takes longer than so much CPU time needs, and `step_in_training` is by how much, in the geometric mean, as
        `slower` compares these models.

        Args:
          machine: whose devices compute on the cores of the host, without such ratios.
        """
        alone, points = [], []
        predictions = [predicted(config, machine) for config in self._configs]
        rounds = [_middle(of) for of in zip(*self.found, strict=True)]
        for place, (prediction, one) in enumerate(zip(predictions, rounds, strict=True), 1):
            alone.append(
                (
                    math.fsum(prediction.stages.values()) / one.cpu,
                    prediction.host.devices * prediction.schedule.core_us / one.cpu,
                )
            )
            points.append(Point({"reference": float(place)}, one.step, max(1.0, one.cpu / one.step)))
        longer = 1 + _over_one(np.array(alone))
        busy = dict(zip(("host_in_training", "kernels_in_training"), longer, strict=True))
        trained = dataclasses.replace(
            machine,
            overheads=machine.overheads | {name: _times(ratio) for name, ratio in busy.items()},
            kernels=machine.kernels | {TRAINING: Kernel(1.0, _SOURCE, tuple(points))},
        )
        waits = []
        for prediction, one in zip(predictions, rounds, strict=True):
            again = predict(prediction.graph, trained, prediction.host)
            assert again.cpu_us is not None, "devices compute on the host's cores"
            waits.append(one.step / one.cpu * again.cpu_us / again.step_us)
        over = trained.overheads | {"step_in_training": _times(statistics.geometric_mean(waits))}
        return dataclasses.replace(trained, overheads=over)

    def slower(self, rounds: int) -> float:
        """Returns how many times as long as in the calibration of their machine (`of`) steps took in the last rounds.

        It is the geometric mean over references and rounds.
        """
        return statistics.geometric_mean(
            one.step / us for found in self.found[-rounds:] for one, us in zip(found, self._calibrated_us, strict=True)
        )


def _over_one(shares_Rx2: np.ndarray) -> np.ndarray:
    """Returns how much over one two ratios are that make a sum of shares one, as far as can be, and never below; [2].

    Where sums do not tell which of them it is, the two are alike.
    """
    alike = math.sqrt(_ALIKE)
    rows = np.concatenate([shares_Rx2, [[alike, -alike]]])
    found: np.ndarray = scipy.optimize.nnls(rows, np.append(1 - shares_Rx2.sum(axis=1), 0.0))[0]
    return found


def _middle(rounds: Sequence[Busy]) -> Busy:
    """The median over rounds, of each time by itself."""
    return Busy(*(statistics.median(of) for of in zip(*map(dataclasses.astuple, rounds), strict=True)))


def _times(ratio: float) -> Quantity:
    return Quantity(float(max(1.0, ratio)), "times", _SOURCE)


def references(quick: bool) -> Iterator[RunConfig]:
    """Yields the models that are trained: of both kinds and dtypes, with steps of some to some ten milliseconds.

    They were drawn at random: what kernels take in a training differs among models.
    """
    fifteen = (20, 500, 5000, 50_000, 400_000) * 3
    # Table rows, ids of a bag, D, B, widths of the MLPs, layers and rank of crosses (0: DLRM), whether in bfloat16.
    shapes = (
        ((72_000,), 5, 64, 2048, (512,), (64, 256), 0, 0, False),
        ((240, 15_000, 290_000, 1100, 220_000, 30, 880), 1, 8, 2048, (), (256, 256), 2, 64, True),
        ((1700, 31_000, 440, 14_000, 4800, 1400, 4100), 1, 16, 4096, (), (128, 128), 0, 0, True),
        ((1100, 14, 7100), 1, 4, 1024, (), (1024, 1024, 64), 3, 64, False),
        ((200_000, 1200, 1500), 5, 128, 512, (64,), (256, 32), 1, 64, False),
        (fifteen, 10, 32, 512, (), (32, 256, 32), 2, 16, True),
        (fifteen, 1, 8, 256, (64,), (512, 32), 3, 64, False),
        ((213_000,), 1, 8, 2048, (32,), (64,), 0, 0, True),
        ((280_000, 6000, 8300, 46_000, 1300, 100_000, 240, 30, 470_000), 1, 32, 8192, (), (256,), 0, 0, True),
    )
    for rows, bag, dim, batch, bottom, widths, crosses, rank, narrow in shapes[: _FEW if quick else None]:
        below, top = (*bottom, dim), (*widths, 1)
        yield RunConfig(
            data=ZipfStream(rows, ids_per_bag=(bag,), distinct_blocks=4),
            model=DCNv2Config(below, crosses, rank, top) if crosses else DLRMConfig(below, top),
            embedding=EmbeddingConfig(dim=dim, optimizer=RowWiseAdagrad(0.01)),
            train=TrainConfig(batch_size=batch, optimizer=DenseAdagrad(0.01)),
            mesh=MeshConfig(1, "cpu"),
            compute_dtype="bfloat16" if narrow else "float32",
        )


_trainings: list[Stepping] = []  # of the process that trains


def _build(configs: Sequence[RunConfig]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    _trainings.extend(Stepping(config) for config in configs)


def _round() -> list[Busy]:
    return [_busy_a_step(training) for training in _trainings]


def _busy_a_step(training: Stepping) -> Busy:
    """Trains for a moment after some steps that do not count."""
    with contextlib.closing(training.trainer.train_inputs(host=training.state.host)) as stream:
        training.warm(stream, _WARM)
        (host, kernels), times = _busy(), [time.perf_counter()]
        for _ in training.steps(stream):
            times.append(time.perf_counter())
            if len(times) > _LEAST and times[-1] - times[0] > _SECONDS:
                break
        training.wait()
        host_after, kernels_after = _busy()
    steps, step_s = len(times) - 1, statistics.median(np.diff(times[1:]))
    return Busy((host_after - host) / steps, (kernels_after - kernels) / steps, float(step_s) * 1e6)


def _busy() -> tuple[float, float]:
    """CPU time of this process until now, us: of the threads that run Python, and of all others."""
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident)
    host_s = math.fsum(time.clock_gettime(clock) for clock in clocks)
    return host_s * 1e6, (time.process_time() - host_s) * 1e6
