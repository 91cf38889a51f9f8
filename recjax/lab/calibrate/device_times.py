"""Times of kernels on a GPU, by its own clock.

A host sees a kernel of microseconds only through dispatching it and waiting for it, which take longer. JAX's profiler
records when each kernel ran, and a program that runs between two cases marks whose kernels are whose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from recjax.errors import DeviceError
from recjax.lab.calibrate.cases import Argument, Program
from recjax.lab.replay import profile

_RUNS = 10  # of a case in a pass, after one that does not count


def device_seconds(programs: Sequence[Program]) -> list[float]:
    """Returns how long the kernels of one run of each program take on the device together, s.

    It is the middle of some runs where each run has as many kernels, and else the mean.

    Args:
      programs: compiled for the default device, a GPU, and run before.

    Raises:
      DeviceError: as `of_events`.
    """
    if not programs:
        return []
    mark = Program(recjax_between_cases, [Argument((8,), jnp.float32, lambda: jnp.zeros(8))], in_place=True)

    def run() -> None:
        with mark.ready():
            for program in programs:
                with program.ready():  # which may run programs of its own
                    mark()
                    program()
                    mark()
                    for _ in range(_RUNS):
                        program()
                    mark()

    mark()  # not for the first time
    trace = profile.profile(run, None)
    found = profile.events(trace)
    profile.discard(trace)
    return of_events(found, len(programs))


def recjax_between_cases(x: jax.Array) -> jax.Array:
    """Marks the place of its kernel among others: by its name a profile knows its program."""
    return x + 1


def of_events(found: Iterable[profile.Happened], programs: int) -> list[float]:
    """The times of so many programs from the events of a profile, s: see `device_seconds`.

    Raises:
      DeviceError: the profile does not have all of their runs.
    """
    kernels = sorted(
        (start, length, f"jit_{recjax_between_cases.__name__}" in str(stats["hlo_module"]))
        for _, start, length, stats in found
        if "device_ordinal" in stats and "hlo_op" in stats and "hlo_module" in stats
    )
    parts: list[list[float]] = []  # lengths of the kernels after each marker, ns
    for _, length, marks in kernels:
        if marks:
            parts.append([])
        elif parts:
            parts[-1].append(length)
    if len(parts) != 3 * programs or not all(parts[1::3]):
        raise DeviceError(
            f"JAX's profile has {len(parts)} marks of {3 * programs}, or no kernel after one of them, so the GPU's "
            "clock tells no times. If it has none, CUPTI may not be allowed to profile: start as root, or load the "
            "driver with NVreg_RestrictProfilingToAdminUsers=0. If it has some, measure with --quick, which has fewer "
            "kernels."
        )
    return [_middle_ns(lengths) / 1e9 for lengths in parts[1::3]]


def _middle_ns(lengths: Sequence[float]) -> float:
    if len(lengths) % _RUNS:
        return sum(lengths) / _RUNS
    return float(np.median(np.reshape(lengths, (_RUNS, -1)).sum(axis=1)))
