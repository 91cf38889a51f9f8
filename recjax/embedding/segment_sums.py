"""Weighted sums of rows by ascending segments, without an array of a row for every term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_AT_LEAST = 4096  # terms that are worth a turn of the loop


def segment_sums(
    values_SxD: jax.Array,
    source_M: jax.Array,
    segment_M: jax.Array,
    weights_M: jax.Array | None,
    segments: int,
    read: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Sums rows: result[t] = sum over m with segment[m] = t of weights[m] * values[source[m]].

    Terms are added in their order, so repeated runs agree to the bit. No array of [M, D] is made, but pieces of about
    as many terms as there are segments, one after the other.

    Args:
      values_SxD: the rows.
      source_M: int32, one outside 0 to S - 1 stands for nothing.
      segment_M: int32, ascending; one that is not below `segments` stands for nothing.
      weights_M: floats; all 1 if None.
      segments: T.
      read: turns rows as they are held into floats.

    Returns:
      [T, D], of the dtype that `read` gives.
    """
    M, D = len(source_M), values_SxD.shape[1]
    dtype = jax.eval_shape(read, jax.ShapeDtypeStruct((1, D), values_SxD.dtype)).dtype
    sums_TxD = jnp.zeros((segments, D), dtype)
    piece = min(M, max(segments, _AT_LEAST))
    if not piece:
        return sums_TxD

    def add(start: Any, sums_TxD: jax.Array) -> jax.Array:
        def part(x_M: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x_M, start, piece)

        terms = read(values_SxD.at[part(source_M)].get(mode="fill", fill_value=0))
        if weights_M is not None:
            terms = terms * part(weights_M)[:, None]
        return sums_TxD.at[part(segment_M)].add(terms, mode="drop", indices_are_sorted=True)

    turns = -(-M // piece)
    if turns == 1:
        return add(0, sums_TxD)
    short = turns * piece - M
    source_M = jnp.concatenate([source_M, jnp.full(short, values_SxD.shape[0], source_M.dtype)])
    segment_M = jnp.concatenate([segment_M, jnp.full(short, segments, segment_M.dtype)])
    if weights_M is not None:
        weights_M = jnp.concatenate([weights_M, jnp.zeros(short, weights_M.dtype)])
    varying = jax.typeof(source_M).manual_axis_type.varying | jax.typeof(values_SxD).manual_axis_type.varying
    if missing := tuple(varying - jax.typeof(sums_TxD).manual_axis_type.varying):
        sums_TxD = jax.lax.pcast(sums_TxD, missing, to="varying")
    return jax.lax.fori_loop(0, turns, lambda i, sums: add(i * piece, sums), sums_TxD)
