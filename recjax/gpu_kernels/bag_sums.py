"""Weighted sums of the rows that bags name on a GPU: gather and sum in one pass, several rows of a bag read at once.

The form of plain XLA, `recjax.embedding.pooling.sum_bags`, is one gather for each id of a bag, 16 of them in one
operation, a loop over more; XLA fuses it into whatever reads the sums.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recjax import gpu_kernels

_VALUES = 128  # of bags that one program sums side by side: two of 64 columns
_AT_ONCE = 8  # rows of a bag that it reads at once


def sum_rows_of_bags(
    rows_RxD: jax.Array, index_NxH: jax.Array, weights_NxH: jax.Array | None, interpret: bool = False
) -> jax.Array:
    """Sums rows: result[n] = sum over h of weights[n, h] * rows[index[n, h]], in the order of h: float32 [N, D].

    Args:
      rows_RxD: the rows, float32.
      index_NxH: int32, one outside 0 to R - 1 stands for nothing.
      weights_NxH: float32; all 1 if None.
      interpret: as for `gpu_kernels.run_kernel`.
    """
    (R, D), (N, H) = rows_RxD.shape, index_NxH.shape
    if not (N and H and R):
        return jnp.zeros((N, D), rows_RxD.dtype)
    bags = max(1, _VALUES // D)
    kernel = functools.partial(_sum, N=N, H=H, R=R, D=D, bags=bags, weighted=weights_NxH is not None)
    operands = [rows_RxD, index_NxH, *([] if weights_NxH is None else [weights_NxH])]
    programs, name = -(-N // bags), f"bag_sums_{D}"
    (sums,) = gpu_kernels.run_kernel(name, kernel, programs, [(N * D,)], operands, warps=1, interpret=interpret)
    return sums.reshape(N, D)


def _sum(*references: Any, N: int, H: int, R: int, D: int, bags: int, weighted: bool) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, index, *weights, out = references
    bag_B = pl.program_id(0) * bags + jnp.arange(bags, dtype=jnp.int32)
    d, lane_K = jnp.arange(D, dtype=jnp.int32), jnp.arange(_AT_ONCE, dtype=jnp.int32)

    def add(turn: Any, total_BxD: jax.Array) -> jax.Array:
        h_K = turn * _AT_ONCE + lane_K
        at_BxK = bag_B[:, None] * H + h_K[None]
        is_id_BxK = (bag_B < N)[:, None] & (h_K < H)[None]
        row_BxK = triton.load(index.at[at_BxK], mask=is_id_BxK, other=-1)
        there_BxK = (row_BxK >= 0) & (row_BxK < R)
        where = jnp.where(there_BxK, row_BxK, 0)[:, :, None] * D + d[None, None]
        there = jnp.broadcast_to(there_BxK[:, :, None], where.shape)
        terms_BxKxD = triton.load(rows.at[where], mask=there, other=0.0)
        if weighted:
            terms_BxKxD *= triton.load(weights[0].at[at_BxK], mask=is_id_BxK, other=0.0)[:, :, None]
        return total_BxD + jnp.sum(terms_BxKxD, axis=1)

    total_BxD = jax.lax.fori_loop(0, -(-H // _AT_ONCE), add, jnp.zeros((bags, D), jnp.float32))
    at = bag_B[:, None] * D + d[None]
    triton.store(out.at[at], total_BxD, mask=jnp.broadcast_to((bag_B < N)[:, None], at.shape))
