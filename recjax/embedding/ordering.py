"""Sorting of integers on the devices, with the places that they came from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recjax.kernels import target_platform


def in_order(keys_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts integers, equal ones in the order in which they stand.

    GPUs sort pairs in a library. On CPUs XLA sorts a single array with a comparison of its own, and four to five times
    as fast as pairs, for which it calls one: so there key and place are one 64-bit integer.

    Args:
      keys_M: int32, 0 or more.

    Returns:
      the sorted keys, and the place of each among `keys_M`: int32 [M] both.
    """
    places_M = jnp.arange(keys_M.shape[0], dtype=jnp.int32)
    if target_platform() != "cpu":
        sorted_M, order_M = jax.lax.sort((keys_M, places_M), num_keys=1)
        return sorted_M, order_M
    with jax.enable_x64(True):
        both_M = (keys_M.astype(jnp.int64) << 32) | places_M.astype(jnp.int64)
        both_M = jax.lax.sort(both_M, is_stable=False)  # no two are equal
        return (both_M >> 32).astype(jnp.int32), (both_M & 0xFFFFFFFF).astype(jnp.int32)
