"""Sums of sorted segments on a GPU, each by one program that reads as many entries as its segment has.

The form of plain XLA, `recjax.embedding.segment_sums`, gives 16 lanes to each segment, of which three in four have one
entry. Here a program takes a segment's first PIECE entries itself. What goes on beyond them was summed before, PIECE by
PIECE, by programs of their own: so a segment with every entry takes no loop over all of them, and as the pieces of a
segment are counted from its start, every sum has the same order in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recjax import gpu_kernels

PIECE = 128  # entries that one program adds up at most; a segment of 65,536 has 512 such sums, which one adds up again
_AT_ONCE = 8  # entries that a program reads at once: most segments have one or two
_AT_ONCE_LONG = 32  # the same within long segments


def sum_rows(
    values_SxD: jax.Array,
    source_M: jax.Array,
    segment_M: jax.Array,
    start_T: jax.Array,
    weights_M: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Sums rows: result[t] = sum over m with segment[m] = t of weights[m] * values[source[m]]: float32 [T, D].

    Args:
      values_SxD: the rows, float32.
      source_M: int32, one outside 0 to S - 1 stands for nothing.
      segment_M: int32, ascending; one outside 0 to T - 1 stands for nothing.
      start_T: int32, the first entry of each segment; M of one that has none.
      weights_M: float32; all 1 if None.
      interpret: as for `gpu_kernels.run_kernel`.
    """
    (S, D), M, segments = values_SxD.shape, len(segment_M), len(start_T)
    if not (M and S and segments):
        return jnp.zeros((segments, D), values_SxD.dtype)
    entries = [values_SxD, source_M, segment_M, start_T, *([] if weights_M is None else [weights_M])]
    J = -(-M // PIECE)

    def run(name: str, kernel: Callable[..., None], rows: int, operands: list[jax.Array], warps: int) -> jax.Array:
        sizes = functools.partial(kernel, M=M, S=S, D=D, T=segments, weighted=weights_M is not None)
        return gpu_kernels.run_kernel(name, sizes, rows, [(rows * D,)], operands, warps=warps, interpret=interpret)[0]

    pieces = run("pieces_of_segments", _sum_further_piece, J, entries, warps=2)
    return run("segment_sums", _sum_segment, segments, [pieces, *entries], warps=1).reshape(segments, D)


def _sum_further_piece(*references: Any, M: int, S: int, D: int, T: int, weighted: bool) -> None:
    """Sums the entries from the one among PIECE in a row at which a segment has had a multiple of PIECE; 0 if none."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *entries, out = references
    segment, start = entries[2], entries[3]
    window = pl.program_id(0)
    at = window * PIECE + jnp.arange(PIECE, dtype=jnp.int32)
    whose_L = triton.load(segment.at[at], mask=at < M, other=T)
    there = (whose_L >= 0) & (whose_L < T)
    from_start = at - triton.load(start.at[jnp.where(there, whose_L, 0)], mask=there, other=0)
    begins = there & (from_start > 0) & (from_start % PIECE == 0)
    begin, whose = jnp.max(jnp.where(begins, at, -1)), jnp.max(jnp.where(begins, whose_L, -1))
    total = _sum_from(entries, whose, begin, begin >= 0, M, S, D, weighted, _AT_ONCE_LONG)
    d = jnp.arange(D, dtype=jnp.int32)
    triton.store(out.at[window * D + d], total)


def _sum_segment(*references: Any, M: int, S: int, D: int, T: int, weighted: bool) -> None:
    """Sums the first PIECE entries of a segment, and what `_sum_further_piece` made of the others."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    pieces, *entries, out = references
    segment, row = entries[2], pl.program_id(0)
    start = triton.load(entries[3].at[row])
    total = _sum_from(entries, row, start, start < M, M, S, D, weighted, _AT_ONCE)
    d, lane_K = jnp.arange(D, dtype=jnp.int32), jnp.arange(_AT_ONCE_LONG, dtype=jnp.int32)

    def more(number: Any) -> Any:
        begin = start + number * PIECE
        return (begin < M) & (triton.load(segment.at[jnp.minimum(begin, M - 1)]) == row)

    def add(carry: Any) -> Any:
        number, total, _ = carry
        begins = start + (number + lane_K) * PIECE
        belongs_K = triton.load(segment.at[begins], mask=begins < M, other=-1) == row
        at = (start // PIECE + number + lane_K)[:, None] * D + d[None]
        terms_KxD = triton.load(pieces.at[at], mask=jnp.broadcast_to(belongs_K[:, None], at.shape), other=0.0)
        number += _AT_ONCE_LONG
        return number, total + jnp.sum(terms_KxD, axis=0), more(number)

    first = jnp.int32(1)
    _, total, _ = jax.lax.while_loop(lambda carry: carry[2], add, (first, total, more(first)))
    triton.store(out.at[row * D + d], total)


def _sum_from(
    entries: list[Any], row: Any, start: Any, there: Any, M: int, S: int, D: int, weighted: bool, at_once: int
) -> jax.Array:
    """Sums the entries of a segment from `start` on, PIECE at most, [D]; zeros unless `there`."""
    from jax.experimental.pallas import triton

    values, source, segment = entries[:3]
    lane_K, d = jnp.arange(at_once, dtype=jnp.int32), jnp.arange(D, dtype=jnp.int32)

    def add(carry: Any) -> Any:
        done, total, _ = carry
        at = start + done + lane_K
        belongs_K = triton.load(segment.at[at], mask=at < M, other=-1) == row
        read = triton.load(source.at[at], mask=belongs_K, other=-1)
        live = belongs_K & (read >= 0) & (read < S)
        where = jnp.where(live, read, 0)[:, None] * D + d[None]
        terms_KxD = triton.load(values.at[where], mask=jnp.broadcast_to(live[:, None], where.shape), other=0.0)
        if weighted:
            terms_KxD *= triton.load(entries[4].at[at], mask=belongs_K, other=0.0)[:, None]
        done += at_once
        goes_on = jnp.max(jnp.where(belongs_K & (lane_K == at_once - 1), 1, 0)) > 0
        return done, total + jnp.sum(terms_KxD, axis=0), goes_on & (done < PIECE)

    start_values = (jnp.int32(0), jnp.zeros((D,), jnp.float32), there)
    return jax.lax.while_loop(lambda carry: carry[2], add, start_values)[1]
