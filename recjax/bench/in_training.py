"""Measures for `recjax calibrate` how much longer kernels and the host's stages take in a training than alone.

Calibration repeats a kernel or a stage alone. In a training the threads of the host and of the devices take turns on
the same cores, each finds the caches as the others left them, and XLA hands kernels to other threads. Lin et al.
(arXiv:2201.07821) take overheads from traces of workloads and share them over all; likewise some models
are trained here whose CPU time by thread is compared with the predicted one, and the ratio goes into the machine file.
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

from recjax.bench.prediction import predicted
from recjax.bench.stepping import Stepping
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.synthetic.stream import ZipfStream
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import TrainingError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import MeshConfig
from recjax.planning.machine import Machine, Quantity

_WARM, _LEAST, _SECONDS = 8, 10, 0.5  # of a round: steps before, steps that are timed at least, and for how long
_SOURCE = "measured in trainings"
POSSIBLE = hasattr(time, "pthread_getcpuclockid")  # CPU time by thread; macOS and Windows do not give it


@dataclasses.dataclass(frozen=True)
class Busy:
    """CPU time of a step, us.

    Attributes:
      host: of the threads that run Python.
      kernels: of all others.
    """

    host: float
    kernels: float


class References:
    """Models that a process of its own trains: in this one CPU devices run programs in the thread that calls them.

    Used as a context. `round` is for between the passes of a calibration, so that a drift of the machine hits the
    trainings as it hits what is measured alone.
    """

    def __init__(self, quick: bool) -> None:
        """Compiles nothing yet. `quick` takes two references, else all."""
        self._configs = list(references(quick))
        self._found: list[list[Busy]] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(1, context, _build, (self._configs,))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def round(self) -> None:
        """Trains each for a moment, and waits for that.

        Raises:
          TrainingError: the process that trains has ended.
        """
        try:
            self._found.append(self._pool.submit(_round).result())
        except BrokenProcessPool as error:
            raise TrainingError(
                "the process that trains models between the passes has ended, as one that the system stops for want of "
                "memory. Calibrate where a few GB more are free, or with --quick."
            ) from error

    def applied(self, machine: Machine) -> Machine:
        """The machine with what kernels and host stages take in a training over what they take alone.

        Args:
          machine: whose devices compute on the cores of the host, without such ratios.
        """
        host, kernels = [], []
        for config, rounds in zip(self._configs, zip(*self._found, strict=True), strict=True):
            prediction = predicted(config, machine)
            alone_us = prediction.host.devices * prediction.schedule.core_us
            host.append(statistics.median(one.host for one in rounds) / math.fsum(prediction.stages.values()))
            kernels.append(statistics.median(one.kernels for one in rounds) / alone_us)
        ratios = {"host_in_training": statistics.median(host), "kernels_in_training": statistics.median(kernels)}
        found = {name: Quantity(float(max(1.0, ratio)), "times", _SOURCE) for name, ratio in ratios.items()}
        return dataclasses.replace(machine, overheads=machine.overheads | found)


def references(quick: bool) -> Iterator[RunConfig]:
    """Yields the models that are trained: of both kinds and dtypes, with steps of some to some ten milliseconds."""
    # Table rows, ids of a bag, D, B, widths of the top MLP, layers of crosses (0: DLRM), whether in bfloat16.
    shapes = (
        ((100, 1000, 10_000, 100_000) * 3, 1, 32, 2048, (128, 64), 0, False),
        ((1000, 50_000, 300_000) * 2, 1, 16, 4096, (256, 128), 2, True),
        ((500, 5000, 200_000) * 4, 5, 64, 1024, (64,), 0, True),
        ((200, 20_000) * 4, 1, 8, 512, (64, 32), 2, False),
        ((3000, 30_000, 100_000), 10, 32, 2048, (512, 256), 0, False),
    )
    for rows, bag, dim, batch, widths, crosses, narrow in shapes[: 2 if quick else None]:
        top = (*widths, 1)
        yield RunConfig(
            data=ZipfStream(rows, ids_per_bag=(bag,), distinct_blocks=4),
            model=DCNv2Config((64, dim), crosses, 32, top) if crosses else DLRMConfig((64, dim), top),
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
    with contextlib.closing(training.trainer.train_inputs()) as stream:
        training.warm(stream, _WARM)
        before, began, steps = _busy(), time.perf_counter(), 0
        for _ in training.steps(stream):
            steps += 1
            if steps >= _LEAST and time.perf_counter() - began > _SECONDS:
                break
        training.wait()
        after = _busy()
    return Busy((after.host - before.host) / steps, (after.kernels - before.kernels) / steps)


def _busy() -> Busy:
    """CPU time of this process until now."""
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident)
    host_s = math.fsum(time.clock_gettime(clock) for clock in clocks)
    return Busy(host_s * 1e6, (time.process_time() - host_s) * 1e6)
