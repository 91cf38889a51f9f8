"""Dot products of all pairs of a sample's vectors on a GPU, without the square of them in memory.

The form of plain XLA, `recjax.models.layers.dot_interaction`, writes Z = T T^t, [B, F, F], and reads its triangle; and
back the same. Here a program holds one sample's vectors and its Z in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from recjax.gpu_kernels import run_kernel

MOST_VECTORS = 64  # of a sample


def multiply_pairs(vectors_BxFxD: jax.Array, itself: bool, precision: Any, interpret: bool = False) -> jax.Array:
    """The lower triangle of each sample's products, row by row: float32 [B, F(F-1)/2], or [B, F(F+1)/2].

    Args:
      vectors_BxFxD: float32.
      itself: also take the diagonal.
      precision: of the products, as `jnp.dot` takes it.
      interpret: as for `run_kernel`.
    """
    B, F, D = vectors_BxFxD.shape
    P = _pairs(F, itself)
    kernel = functools.partial(_forward, F=F, D=D, P=P, itself=itself, precision=precision)
    (z,) = run_kernel("interaction", kernel, B, [(B * P,)], [vectors_BxFxD], warps=_warps(F, D), interpret=interpret)
    return z.reshape(B, P)


def pull_back_pairs(
    vectors_BxFxD: jax.Array, grads_BxP: jax.Array, itself: bool, precision: Any, interpret: bool = False
) -> jax.Array:
    """The gradient of the vectors from that of `multiply_pairs`'s result; arguments as there."""
    B, F, D = vectors_BxFxD.shape
    kernel = functools.partial(_backward, F=F, D=D, P=_pairs(F, itself), itself=itself, precision=precision)
    operands = [vectors_BxFxD, grads_BxP]
    (grads,) = run_kernel(
        "interaction_backward", kernel, B, [(B * F * D,)], operands, warps=_warps(F, D), interpret=interpret
    )
    return grads.reshape(B, F, D)


def _pairs(F: int, itself: bool) -> int:
    return F * (F + 1) // 2 if itself else F * (F - 1) // 2


def _warps(F: int, D: int) -> int:
    return max(1, min(4, _padded(F) * D // 512))


def _padded(F: int) -> int:
    """The power of two, 16 at least, that holds F vectors: what products of tiles take."""
    return max(16, 1 << (F - 1).bit_length())


def _sample(vectors: Any, F: int, D: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A sample's vectors, [padded F, D], zeros beyond F; their places in the array; and which of these there are."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    i, d = jnp.arange(_padded(F)), jnp.arange(D)
    at = pl.program_id(0) * (F * D) + i[:, None] * D + d[None]
    there = jnp.broadcast_to((i < F)[:, None], at.shape)
    return triton.load(vectors.at[at], mask=there, other=0.0), at, there


def _places(F: int, P: int, itself: bool) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of Z of a sample -> place in the array of triangles; and whether there is one below or above."""
    from jax.experimental import pallas as pl

    i = jnp.arange(_padded(F))
    row, column = jnp.maximum(i[:, None], i[None]), jnp.minimum(i[:, None], i[None])
    before = row * (row + 1) // 2 if itself else row * (row - 1) // 2
    there = (row < F) & ((row >= column) if itself else (row > column))
    return pl.program_id(0) * P + before + column, there


def _forward(vectors: Any, z: Any, *, F: int, D: int, P: int, itself: bool, precision: Any) -> None:
    from jax.experimental.pallas import triton

    x, _, _ = _sample(vectors, F, D)
    products = jnp.dot(x, x.T, precision=precision)
    places, there = _places(F, P, itself)
    i = jnp.arange(_padded(F))
    triton.store(z.at[places], products, mask=there & (i[:, None] >= i[None]))


def _backward(vectors: Any, grads: Any, into: Any, *, F: int, D: int, P: int, itself: bool, precision: Any) -> None:
    from jax.experimental.pallas import triton

    x, at, there = _sample(vectors, F, D)
    places, is_pair = _places(F, P, itself)
    symmetric = triton.load(grads.at[places], mask=is_pair, other=0.0)
    if itself:
        i = jnp.arange(_padded(F))
        symmetric = jnp.where(i[:, None] == i[None], 2 * symmetric, symmetric)
    triton.store(into.at[at], jnp.dot(symmetric, x, precision=precision), mask=there)
