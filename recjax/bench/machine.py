"""What the machine can do at most, measured on the spot: the rates that a step is compared with."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

_COPY_FLOATS = 2**26  # 256 MiB, far more than a cache holds
_SIZE = 2048


def rates(dtypes: tuple[str, ...], device: jax.Device) -> dict[str, Any]:
    """Best of several tries on one device.

    Args:
      dtypes: "float32", "bfloat16": those whose products to time.
      device: where.

    Returns:
      "copy_bytes_per_s": read plus written by x + 1 on 256 MiB; "flops_per_s": dtype -> rate of a product of two
      matrices of 2048 x 2048, accumulated in float32.
    """
    x = jax.device_put(jnp.ones(_COPY_FLOATS, jnp.float32), device)
    copy_s = _best(jax.jit(lambda x: x + 1), x)
    found = {}
    for name in dtypes:
        a = jax.device_put(jnp.ones((_SIZE, _SIZE), name), device)

        def product(a: jax.Array) -> jax.Array:
            return jax.lax.dot(
                a, a, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.promote_types(a.dtype, "float32")
            )

        found[name] = 2 * _SIZE**3 / _best(jax.jit(product), a)
    return {"copy_bytes_per_s": 2 * x.nbytes / copy_s, "flops_per_s": found}


def _best(function: Any, x: jax.Array) -> float:
    function(x).block_until_ready()
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        function(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return best
