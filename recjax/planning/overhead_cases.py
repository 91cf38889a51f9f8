"""Overheads that `recjax calibrate` measures: of starting a kernel, and of a turn of a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from recjax.planning.cases import Run, runner
from recjax.planning.machine import Quantity

_LENGTHS = (16, 144)  # of the chains that overheads are read from
LEAST_US = 0.05  # that anything takes: below, the clock says nothing


def chains() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Small products one after the other, and as many turns of a loop that does two of them."""
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


def overheads_of(times_s: Mapping[str, Sequence[float]]) -> dict[str, Quantity]:
    """Overheads: of a kernel the slope of a chain of small ones, of a loop a turn less its two kernels.

    Args:
      times_s: name of a chain -> its times in several passes, s.
    """
    slopes = {}
    for what in ("line", "loop"):
        short, long = (float(np.median(times_s[f"{what}.{length}"])) for length in _LENGTHS)
        slopes[what] = (long - short) / (_LENGTHS[1] - _LENGTHS[0]) * 1e6
    kernel = max(slopes["line"], LEAST_US)
    return {
        "kernel": Quantity(kernel, "us", "measured"),
        "loop": Quantity(max(slopes["loop"] - 2 * kernel, LEAST_US), "us", "measured"),
    }
