"""Peak rates of the machine, measured on the spot: those that a step is compared with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recjax.models.dense import PRECISIONS, Precision, rounding

_COPY_FLOATS = 2**26  # 256 MiB, far more than a cache holds
_SIZE = 2048


def rates(dtypes: tuple[str, ...], device: jax.Device) -> dict[str, Any]:
    """Best of several tries on one device.

    Args:
      dtypes: "float32", "tensorfloat32", "tensorfloat32x3", "bfloat16": those whose products to time.
      device: where.

    Returns:
      "copy_bytes_per_s": read plus written by x + 1 in place on 256 MiB; "flops_per_s": dtype -> rate of a product of
      two matrices of 2048 x 2048, accumulated in float32.
    """
    x = jax.device_put(jnp.ones(_COPY_FLOATS, jnp.float32), device)
    size = x.nbytes
    in_place = jax.jit(lambda x: x + 1, donate_argnums=0)  # fresh memory would cost more to get than to write

    def copy() -> None:
        nonlocal x
        x = in_place(x).block_until_ready()

    copy_s = _best(copy)
    found = {}
    for name in dtypes:
        a = jax.device_put(jnp.ones((_SIZE, _SIZE), "float32" if name in PRECISIONS else name), device)

        def product(a: jax.Array, name: str = name) -> jax.Array:
            wide = jnp.promote_types(a.dtype, "float32")
            precision = rounding(a, PRECISIONS.get(name, Precision.HIGHEST))
            return jax.lax.dot(a, a, precision=precision, preferred_element_type=wide)

        compiled = jax.jit(product)
        found[name] = 2 * _SIZE**3 / _best(functools.partial(_run, compiled, a))
    return {"copy_bytes_per_s": 2 * size / copy_s, "flops_per_s": found}


def _run(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> None:
    function(x).block_until_ready()


def _best(run: Callable[[], Any]) -> float:
    run()
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
