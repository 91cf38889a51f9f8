"""`recjax calibrate`: measures kernel classes, collectives and host stages, and makes a machine of them.

All cases are measured in passes, one after the other, so that a drift of the machine hits all classes alike. A case's
time is the median over passes of the middle run in each, without what an empty program takes that is run by turns with
it: a step's kernels are run as the machine is, too, and not at its best. Points are these times, smoothed over the
sizes of a class (`smoothing`). CPU cores that a kernel keeps busy are the CPU time of the middle run over that. Kernels
of a GPU are timed by its own clock, see `device_times`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import platform
import random
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.lab.calibrate.cases import Case, Program, Run, runner
from recjax.lab.calibrate.compile_cases import compiled
from recjax.lab.calibrate.device_times import device_seconds
from recjax.lab.calibrate.host_cases import host_cases
from recjax.lab.calibrate.kernel_cases import kernel_cases
from recjax.lab.calibrate.measured_classes import Seen, with_classes
from recjax.lab.calibrate.overhead_cases import LEAST_US, chains, overheads_of
from recjax.lab.calibrate.rates import rates_of
from recjax.lab.calibrate.reuse_cases import reuse_cases
from recjax.lab.replay.microbenchmark import chain
from recjax.lab.replay.replay import Prepared, measure, ranks_mesh
from recjax.planning.machine import COLLECTIVES, Machine, Point
from recjax.utils import processor

Tell = Callable[[str], None]
_RUNS, _LEAST_RUNS = 20, 4  # of a case in a pass, of which the first does not count
_TURNS = 2  # of a pass, after each of which something else is measured: a machine's speed changes within seconds
_LEAST_S = 0.005  # of a case in a pass: short ones run more often
_JUDGING = 3  # times in a pass that a case is measured which is held out: nothing else is pooled with it
_COLLECTIVE_BYTES = tuple(2**e for e in range(10, 25, 2))
_QUICK_BYTES = (2**12, 2**20)
_HELD_OUT_BYTES = (30_000, 500_000)


@dataclasses.dataclass(frozen=True)
class Effort:
    """Amount of measuring.

    Attributes:
      quick: few and small cases, in under a minute; else at most ten minutes.
      passes: over all cases.
      case_s: of a case in a pass.
      limit_s: after which no further case is measured, if each was once.
      compile_s: of compiling kernels, after which classes that have a few sizes get no further ones.
    """

    quick: bool
    passes: int
    case_s: float
    limit_s: float
    compile_s: float


FULL = Effort(False, 8, 0.015, 420.0, 240.0)
QUICK = Effort(True, 3, 0.01, 20.0, 30.0)


@dataclasses.dataclass(eq=False)
class _Timed:
    """A compiled case and what was measured of it, s: the middle of a pass's runs.

    That is by the host's clock, by CPU time and, on a GPU, by the device's, which counts where it is there.
    """

    case: Case
    run: Run
    middle_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    device_s: list[float] = dataclasses.field(default_factory=list)
    threads: list[float] = dataclasses.field(default_factory=list)  # that made progress, in each pass

    def measure(self, budget_s: float, empty: _Timed) -> None:
        """A pass over this case, by turns with an empty program: what that takes is not of a dispatched case."""
        runs: list[tuple[float, float]] = []
        others: list[tuple[float, float]] = []
        with self.ready(), empty.ready():
            began = time.perf_counter()
            took_s = 0.0
            while len(runs) < _LEAST_RUNS or took_s < (_LEAST_S if len(runs) >= _RUNS else budget_s):
                runs.append(self._once())
                others.append(empty._once() if self.case.dispatched else (0.0, 0.0))
                took_s = time.perf_counter() - began
        middle_s, cpu_s = np.median(runs[1:], axis=0) - np.median(others[1:], axis=0)
        self.cpu_s.append(float(cpu_s))
        self.middle_s.append(float(middle_s))
        if self._beside:
            self.threads.append(_at_a_time(self._beside))

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """A time in which its arguments are there."""
        return self.run.ready() if isinstance(self.run, Program) else contextlib.nullcontext()

    def _once(self) -> tuple[float, float]:
        """Runs it: time of what counts and of the CPU, s.

        What it returns is gone afterwards, so that the next run writes to the same memory: memory that is touched for
        the first time takes longer than most cases.
        """
        cpu, start = time.process_time(), time.perf_counter()
        timed = self.run()
        end = time.perf_counter()
        if isinstance(timed, float):
            return timed, timed
        return end - start, time.process_time() - cpu

    def point(self, cores: int) -> Point:
        """Its median over the passes."""
        us = max(float(np.median(self.passes_s)) * 1e6, LEAST_US)
        busy = float(np.median(self.threads or self.cpu_s or [0.0])) / (1.0 if self.threads else us / 1e6)
        return Point(self.case.sizes, us, min(max(busy, 1.0), float(cores)))

    @property
    def passes_s(self) -> list[float]:
        """The times that count, one of each pass."""
        return self.device_s or self.middle_s

    @functools.cached_property
    def _beside(self) -> list[Run]:
        """For two threads, each run once; or nothing."""
        made = [self.case.beside() for _ in range(2)] if self.case.beside else []
        for run in made:
            run()
        return made


def calibrate(
    mesh: Mesh, effort: Effort, tell: Tell, name: str = "", between: Callable[[], None] = lambda: None
) -> Machine:
    """Measures the devices of a mesh, the first of them for what one device does, and their host.

    Args:
      mesh: as `make_mesh` gives it.
      effort: `FULL` or `QUICK`.
      tell: takes a line of progress.
      name: of the machine; "" names it after its processor.
      between: called some times in each pass, to measure something else by turns.
    """
    began = time.monotonic()
    cores, name_of_cpu = processor.cores(), processor.processor()
    device = mesh.devices.flat[0]
    shared = device.platform == "cpu"
    with jax.default_device(device):
        timed, collectives, overheads = _compiled(mesh, effort, tell)
        own_clock = device.platform == "gpu"
        # Overheads, which are between kernels, by both clocks.
        by_host = [*(c for c in timed if not (own_clock and isinstance(c.run, Program))), *overheads.values()]
        limit = began + effort.limit_s
        for number in range(effort.passes):
            if number and time.monotonic() > limit:
                break
            limit += _one_pass(by_host, collectives, effort, number, limit if number else math.inf, between)
            if own_clock:
                _by_device([*timed, *overheads.values()])
            tell(f"pass {number + 1} of {effort.passes} done after {time.monotonic() - began:.0f} s")
    told = [one for one in collectives if one.middle_s]
    if len(told) < len(collectives):
        tell(f"{len(collectives) - len(told)} collectives are not in the profiles: predicted by the rates of links")
    rates = rates_of([(one.case, one.point(cores).us) for one in timed], device)
    measured = Machine(
        name or name_of_cpu or device.device_kind,
        True,
        {
            "cpu": name_of_cpu or "unknown",
            "device": device.device_kind,
            "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "cpu" if shared else "tpu" if device.platform == "tpu" else "gpu",
        cores,
        shared,
        cores if shared else 1,
        rates,
        overheads_of(
            {chain: one.middle_s for chain, one in overheads.items()},
            {chain: one.device_s for chain, one in overheads.items()},
        ),
        {},
    )
    return with_classes(
        measured,
        [
            *(Seen(one.case.kernel, one.case.held_out, one.point(cores), one.passes_s) for one in timed),
            *(Seen(one.kind, one.held_out, one.point(cores if shared else None), one.middle_s) for one in told),
        ],
    )


def _by_device(timed: Sequence[_Timed]) -> None:
    """A pass over those that are programs, by a GPU's clock."""
    programs = [(one, one.run) for one in timed if isinstance(one.run, Program)]
    for (one, _), s in zip(programs, device_seconds([run for _, run in programs]), strict=True):
        one.device_s.append(s)


def _at_a_time(runs: Sequence[Run]) -> float:
    """Returns how many threads make progress together, each with one of `runs`, which take alike by themselves."""
    alone_s = _seconds(runs[:1], 3) / 3
    times = max(2, int(0.005 / max(alone_s, 1e-6)))
    return len(runs) * times * alone_s / _seconds(runs, times)


def _seconds(runs: Sequence[Run], times: int) -> float:
    """The time until as many threads have each done one of `runs` so often."""

    def repeat(run: Run) -> None:
        for _ in range(times):
            run()

    threads = [threading.Thread(target=repeat, args=(run,)) for run in runs]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _compiled(mesh: Mesh, effort: Effort, tell: Tell) -> tuple[list[_Timed], list[_Collective], dict[str, _Timed]]:
    """All cases, compiled and run once: kernels and host stages, collectives, overheads."""
    kernels, device = kernel_cases(effort.quick, ("f32", "bf16")), mesh.devices.flat[0]
    others = list(host_cases(mesh, effort.quick))  # some share what is made, or run programs to make it
    if device.platform == "cpu":  # a measure of its caches, of which an accelerator's kernels have little
        others += reuse_cases(effort.quick)
    said = time.monotonic()

    def done(number: int) -> None:
        nonlocal said
        if time.monotonic() - said > 5:
            tell(f"compiled {number} of {len(kernels) + len(others)} kernels")
            said = time.monotonic()

    runs = compiled(kernels, device, time.monotonic() + effort.compile_s, done)
    timed = [_Timed(case, run) for case, run in zip(kernels, runs, strict=True) if run is not None]
    if len(timed) < len(kernels):
        tell(f"left out {len(kernels) - len(timed)} of {len(kernels)} kernels: compiling took {effort.compile_s:.0f} s")
    for case in others:
        timed.append(_Timed(case, case.make()))
        timed[-1].run()
        done(len(timed))
    sizes = _QUICK_BYTES if effort.quick else _COLLECTIVE_BYTES
    collectives = [
        _Collective(kind, size, ranks_mesh(list(mesh.devices.flat[:count])), held_out)
        for count in sorted({2, mesh.devices.size} if mesh.devices.size > 1 else ())
        for kind in COLLECTIVES
        for held_out in (False, True)
        for size in (_HELD_OUT_BYTES if held_out else sizes)
    ]
    overheads = {}
    for chain_name, make in chains(device.platform == "cpu"):
        overheads[chain_name] = one = _Timed(Case("overhead", {}, make), make())
        one.run()
    tell(f"compiled {len(timed)} kernels and host stages, {len(collectives)} collectives")
    return timed, collectives, overheads


def _one_pass(
    timed: Sequence[_Timed],
    collectives: Sequence[_Collective],
    effort: Effort,
    number: int,
    until: float,
    between: Callable[[], None],
) -> float:
    """All cases once, in an order of the pass's own, or as many of them as the time allows.

    Returns:
      The time that was spent `between`, s.
    """
    run = runner(lambda x: x + 1, jnp.ones(8))
    empty = _Timed(Case("empty", {}, lambda: run), run)
    order = [one for one in timed for _ in range(_JUDGING if one.case.held_out else 1)]
    random.Random(number).shuffle(order)
    between_s = 0.0
    for place, one in enumerate(order, 1):
        if time.monotonic() > until + between_s:
            return between_s
        one.measure(effort.case_s, empty)
        if place * _TURNS // len(order) > (place - 1) * _TURNS // len(order):
            paused = time.monotonic()
            between()
            between_s += time.monotonic() - paused
    if collectives:
        repeats = 2 if effort.quick else 4
        for one_of, times in zip(
            collectives, measure([c.replay for c in collectives], [repeats] * len(collectives)), strict=True
        ):
            one_of.add([] if times.slots is None else times.slots[1:])
    return between_s


class _Collective:
    """A collective of one size."""

    def __init__(self, kind: str, size: int, mesh: Mesh, held_out: bool) -> None:
        self.held_out = held_out
        chained = chain(kind, size, mesh.devices.size)
        self.kind, self._ranks = kind, mesh.devices.size
        self.bytes = chained[0].padded_bytes
        self.replay = Prepared(chained, mesh, name=f"calibrate_{kind}_{self._ranks}_{size}_")
        self.middle_s: list[float] = []  # of a pass

    def add(self, ns: Sequence[np.ndarray]) -> None:
        if ns:
            self.middle_s.append(float(np.median(np.stack(ns))) / 1e9)

    def point(self, cores: int | None) -> Point:
        """Its median over the passes; where more devices than `cores` share these, as if each had one.

        So many devices take turns. A schedule has them do so, too, and then takes as long as was measured.
        """
        us = float(np.median(self.middle_s)) * 1e6
        us *= min(1.0, (cores or self._ranks) / self._ranks)
        return Point({"bytes": float(self.bytes), "devices": float(self._ranks)}, max(us, LEAST_US))
