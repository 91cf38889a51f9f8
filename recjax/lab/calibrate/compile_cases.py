"""Compiles the kernels that `recjax calibrate` measures: as many at a time as the processor has cores.

XLA lets go of the interpreter's lock, and a program for GPUs takes it seconds: kernels are tried on the device, one
program at a time, while the assembler works on the others. Only compiling is done in threads. The first run of each
case stays in the thread that calls, so that no more arrays are there at a time.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from recjax.lab.calibrate.cases import Case, Run
from recjax.utils import processor

LEAST = 3  # sizes of a class that are compiled however long it takes: the first, the middle one and the last


def compiled(cases: Sequence[Case], device: jax.Device, until: float, done: Callable[[int], None]) -> list[Run | None]:
    """Compiles cases, and runs each once.

    Args:
      cases: whose `make` only compiles, and so may be called in any thread.
      device: to compile for.
      until: by the monotonic clock, after which no case is begun but the first `LEAST` of each class.
      done: takes how many there are so far, after each.

    Returns:
      What to run, for each case in its order; None for those that were left out.

    Raises:
      Exception: whatever a case raises.
    """

    def make(case: Case, rank: int) -> Run | None:
        if rank >= LEAST and time.monotonic() > until:
            return None
        with jax.default_device(device):  # which holds in one thread alone
            return case.make()

    ranks = _ranks(cases)
    order = sorted(range(len(cases)), key=ranks.__getitem__)
    runs: list[Run | None] = [None] * len(cases)
    number, pool = 0, ThreadPoolExecutor(processor.cores(), thread_name_prefix="compile-case")
    try:
        under_way = [pool.submit(make, cases[place], ranks[place]) for place in order]
        for place, found in zip(order, under_way, strict=True):
            if (run := found.result()) is not None:
                run()
                runs[place] = run
                number += 1
                done(number)
    finally:  # upon an error or Ctrl-C no further one is begun
        pool.shutdown(cancel_futures=True)
    return runs


def _ranks(cases: Sequence[Case]) -> list[int]:
    """The place in the order of its class that each case has, where points and held-out sizes count by themselves.

    So the first few ranks thin all classes alike.
    """
    places = collections.defaultdict(list)
    for place, case in enumerate(cases):
        places[case.kernel, case.held_out].append(place)
    ranks = [0] * len(cases)
    for of_class in places.values():
        for rank, place in enumerate(_spread(len(of_class))):
            ranks[of_class[place]] = rank
    return ranks


def _spread(count: int) -> list[int]:
    """The places 0 to `count` - 1, of which any first few lie far apart: the ends, the middle, then halves of gaps.

    They follow van der Corput's sequence: 1/2, 1/4, 3/4, 1/8, 5/8, 3/8, 7/8 and so on of the way.
    """
    found, number = dict.fromkeys(range(count)[:: max(1, count - 1)]), 1
    while len(found) < count:
        bits = f"{number:b}"[::-1]
        found[int(bits, 2) * (count - 1) >> len(bits)] = None
        number += 1
    return list(found)
