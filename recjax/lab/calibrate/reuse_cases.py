"""Passes over memory that was last touched some time ago, which `recjax calibrate` measures: see `planning.reuse`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from recjax.lab.calibrate.cases import Argument, Case, Program, Run

_BYTES, _DISTANCES = tuple(2**e for e in (15, 18, 21, 25)), tuple(2**e for e in (21, 24, 26, 28, 30))
_QUICK_BYTES, _QUICK_DISTANCES = (2**15, 2**22), (2**21, 2**26, 2**28)
_HELD_OUT = (5 * 2**20, 3 * 2**25)
_NEAR = _DISTANCES[0]  # stands for touched just before: the pass alone is repeated


def reuse_cases(quick: bool) -> Iterator[Case]:
    """The cases; each is a pass over values, half of its bytes read and half of them written."""
    sizes = itertools.product(_QUICK_BYTES if quick else _BYTES, _QUICK_DISTANCES if quick else _DISTANCES)
    for size, distance in sizes:
        yield _case(size, distance, False)
    if not quick:
        yield _case(*_HELD_OUT, True)


def _case(size: int, distance: int, held_out: bool) -> Case:
    sizes = {"bytes": float(size), "distance": float(distance)}
    return Case("reuse", sizes, functools.partial(_far_pass, size, distance), held_out, dispatched=False)


def _far_pass(size: int, distance: int) -> Run:
    far = Program(_passed, [Argument((size // 8,), jnp.float32, lambda: jnp.ones(size // 8))], in_place=False)
    small = Program(_passed, [Argument((2**13,), jnp.float32, lambda: jnp.ones(2**13))], in_place=False)

    def run() -> float:
        with far.ready(), small.ready():
            result = far()
            if distance > _NEAR:
                _touch(distance)
            small()  # wakes the threads that share a pass, as the kernel before does in a step
            del result  # whose memory is written again
            began = time.perf_counter()
            far()
            return time.perf_counter() - began

    return run


def _passed(x: jax.Array) -> jax.Array:
    return x * 1.5 + 1


def _touch(size: int) -> None:
    """Touches so many bytes of memory."""
    source, to = _memory()
    np.copyto(to[: size // 2], source[: size // 2])


@functools.lru_cache(maxsize=1)
def _memory() -> tuple[np.ndarray, np.ndarray]:
    most = max(_DISTANCES) // 2
    return np.ones(most, np.uint8), np.ones(most, np.uint8)
