"""Sorting of keys: on the host in linear time, and on the devices with the places that they came from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from recjax import kernels
from recjax.kernels import target_platform


def distinct(keys_L: np.ndarray, limit: int, once: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(keys_L, return_inverse=True)` for integers from 0 to `limit` - 1, in linear time.

    Unless `once` equal keys stay apart: all keys, sorted.

    A radix sort by digits of 16 bits, which is how NumPy's stable sort treats 16-bit integers: five to nine times as
    fast as sorting the keys whole, with which routing took as long as all else that a step needs.

    Returns:
      the distinct keys, ascending, [U]; and the index into them of every key: int32 [L].
    """
    if once and (found := kernels.distinct(keys_L, limit)):
        return found
    order_L = np.argsort(keys_L.astype(np.uint16), kind="stable")
    for shift in range(16, (limit - 1).bit_length(), 16):
        digit_L = (keys_L >> shift).astype(np.uint16)[order_L]
        order_L = order_L[np.argsort(digit_L, kind="stable")]
    sorted_L = keys_L[order_L]
    starts_L = np.ones(len(keys_L), bool)
    if once:
        np.not_equal(sorted_L[1:], sorted_L[:-1], out=starts_L[1:])
    inverse_L = np.empty(len(keys_L), np.int32)
    inverse_L[order_L] = np.cumsum(starts_L, dtype=np.int32) - 1
    return sorted_L[starts_L], inverse_L


def ranks(bucket_U: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The place of each element within its bucket, [U].

    Args:
      bucket_U: the bucket of each element, ascending.
      counts: how many elements each bucket has.
    """
    return np.arange(len(bucket_U)) - (np.cumsum(counts) - counts)[bucket_U]


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
