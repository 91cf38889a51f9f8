"""Overheads that `recjax calibrate` measures: of starting a kernel, of a turn of a loop, of the host's part in it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from recjax.lab.calibrate.cases import Run, runner
from recjax.planning.machine import Quantity

_LENGTHS = (16, 144)  # of the chains that overheads are read from
LEAST_US = 0.05  # that anything takes: below, the clock says nothing


def chains(shared: bool) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yields small products one after the other, and as many turns of a loop that does two of them.

    Unless the devices are `shared` cores of the host, whose thread runs kernels then, it also yields the products as
    the host alone sees them, which hands them to the device and goes on.
    """
    x = jnp.full((16, 16), 1 / 16)

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot(x, x, precision=jax.lax.Precision.HIGHEST)

    def line(length: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(length):
                x = product(x)
            return x

        return run

    def loop(length: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.fori_loop(0, length, lambda _, x: product(product(x)), x)

    for length in _LENGTHS:
        yield f"line.{length}", functools.partial(runner, line(length), x)
        yield f"loop.{length}", functools.partial(runner, loop(length), x)
        if not shared:
            yield f"launch.{length}", functools.partial(_handed_over, line(length), x)


def _handed_over(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Run:
    compiled = jax.jit(function).lower(x).compile()
    last = [x]

    def run() -> float:
        began = time.perf_counter()
        result = compiled(x)
        seconds = time.perf_counter() - began
        last[0] = jax.block_until_ready(result)  # so that the next one lies elsewhere, as in a training
        return seconds

    return run


def overheads_of(
    times_s: Mapping[str, Sequence[float]], device_s: Mapping[str, Sequence[float]]
) -> dict[str, Quantity]:
    """Overheads, from how much longer a long chain takes than a short one.

    A small kernel takes a kernel's overhead, or that and the time by the device's clock where there is one. A turn of a
    loop takes its overhead and two small kernels.

    Args:
      times_s: name of a chain -> its times in several passes, s.
      device_s: likewise by the device's clock; without times on a CPU.
    """

    def slope_us(what: str, of: Mapping[str, Sequence[float]]) -> float:
        short, long = (float(np.median(of[f"{what}.{length}"] or [0.0])) for length in _LENGTHS)
        return (long - short) / (_LENGTHS[1] - _LENGTHS[0]) * 1e6

    alone = slope_us("line", times_s)
    found = {
        "kernel": alone - slope_us("line", device_s),
        "loop": slope_us("loop", times_s) - 2 * max(alone, LEAST_US),
    }
    if f"launch.{_LENGTHS[0]}" in times_s:
        found["launch"] = slope_us("launch", times_s)
    return {name: Quantity(max(us, LEAST_US), "us", "measured") for name, us in found.items()}
