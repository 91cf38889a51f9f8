"""Sums of equal keys, such as gradients of one row, in an order that is the same in every run: sorted, then added up.

XLA adds up a scatter on a GPU by atomic operations, in whatever order they come: sums of three and more terms differ in
their last bits from run to run. Here no two threads ever write to one place. A segment is cut into pieces of PIECE
entries, each of which one thread adds up for each column; the sums of all pieces but the first are the entries of the
next level, where there are 1/PIECE as many. A row that every sample looks up so takes a handful of levels, not a loop
of as many steps as it has entries, and a row that is looked up once takes one read.

Rows of 16 to 128 float32 numbers are summed by a kernel instead: `recjax/gpu_kernels/row_sums.py`.

On CPUs and TPUs XLA adds scatters up in a fixed order itself; there `segment_sums` is one, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recjax import kernels
from recjax.embedding.residuals import SparseGradient
from recjax.embedding.spec import MAX_ROWS
from recjax.errors import ConfigError
from recjax.gpu_kernels.row_sums import sum_rows
from recjax.kernels import target_platform

LEAST_TERMS = 4096  # terms that are worth a turn of the loop
PIECE = 16  # entries that one thread adds up; twice as many halve the levels, and make sums of short segments longer


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


def by_segments(atomics: bool) -> bool:
    """Returns whether gradients are to be added up by the functions here: on a GPU, unless `atomics` are allowed."""
    return target_platform() == "gpu" and not atomics


def first_entries(segment_L: jax.Array, segments: int) -> jax.Array:
    """Returns the first entry of each segment, int32 [S]; L of one that has none. Arguments as for `sum_sorted`."""
    L = segment_L.shape[0]
    at_L = jnp.arange(L, dtype=jnp.int32)
    first_L = jnp.concatenate([jnp.ones(1, bool), segment_L[1:] != segment_L[:-1]])[:L]
    target_L = jnp.where(first_L & (segment_L < segments), segment_L, segments + at_L)
    return jnp.full(segments, L, jnp.int32).at[target_L].set(at_L, mode="drop", unique_indices=True)


def sum_sorted(
    segment_L: jax.Array,
    segments: int,
    take: Callable[[jax.Array], jax.Array],
    most: int | None = None,
    start_S: jax.Array | None = None,
) -> jax.Array:
    """Sums the entries of each segment, in their order within pieces and piece by piece.

    Args:
      segment_L: int32, L above 0, ascending: the segment of each entry; `segments` or more if it belongs to none.
      segments: S.
      take: entries int32 [P, K] -> their values [P, K, D]; zeros for an entry L, which does not exist.
      most: entries that a segment has at most; None: L.
      start_S: as `first_entries` gives it, if it is known.

    Returns:
      [S, D], zeros where a segment has no entries.
    """
    L = segment_L.shape[0]
    start_S = first_entries(segment_L, segments) if start_S is None else start_S
    start_L = start_S.at[segment_L].get(mode="fill", fill_value=L)
    return _sums(start_S, start_L, take, L if most is None else min(most, L))


def _sums(start_S: jax.Array, start_L: jax.Array, take: Callable[[jax.Array], jax.Array], most: int) -> jax.Array:
    """The sums of the segments that start at some entries.

    Args:
      start_S: the first entry of each segment; L of one that has none.
      start_L: for each entry the first one of its segment, beside which all others stand; L if it belongs to none.
      take: as for `sum_sorted`.
      most: likewise.
    """
    L = start_L.shape[0]
    sums_SxD = _piece(start_S, start_S, start_L, take, max(1, min(PIECE, most)))
    if most <= PIECE:
        return sums_SxD
    # Of PIECE entries in a row at most one begins a further piece: the next of its segment is PIECE entries away, and a
    # segment that starts in between has its first further piece PIECE entries later.
    J = -(-L // PIECE)
    at_L = jnp.arange(L, dtype=jnp.int32)
    begins_L = (at_L > start_L) & ((at_L - start_L) % PIECE == 0)
    begin_J = jnp.pad(jnp.where(begins_L, at_L, -1), (0, J * PIECE - L), constant_values=-1).reshape(J, PIECE).max(1)
    begin_J = jnp.where(begin_J < 0, L, begin_J)
    of_J = start_L.at[begin_J].get(mode="fill", fill_value=L)
    pieces_JxD = _piece(begin_J, of_J, start_L, take, PIECE)
    # The further pieces of a segment stand side by side again, from the place of the first one on.
    places_J = jnp.arange(J, dtype=jnp.int32)
    start_J = jnp.where(of_J < L, of_J // PIECE + 1, J)

    def take_piece(at_PxK: jax.Array) -> jax.Array:
        return pieces_JxD.at[at_PxK].get(mode="fill", fill_value=0)

    first_J = jnp.where(start_J == places_J, places_J, J)
    further_JxD = _sums(first_J, start_J, take_piece, (most - 1) // PIECE)
    goes_on_S = start_L.at[start_S + PIECE].get(mode="fill", fill_value=L) == start_S
    at_S = jnp.where(goes_on_S & (start_S < L), start_S // PIECE + 1, J)
    return sums_SxD + further_JxD.at[at_S].get(mode="fill", fill_value=0)


def _piece(
    begin_P: jax.Array, of_P: jax.Array, start_L: jax.Array, take: Callable[[jax.Array], jax.Array], length: int
) -> jax.Array:
    """Sums of up to `length` entries from `begin_P` on, [P, D], as far as they belong to the segments of `of_P`."""
    L = start_L.shape[0]
    at_PxK = begin_P[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    mine_PxK = start_L.at[at_PxK].get(mode="fill", fill_value=L) == of_P[:, None]
    return jnp.sum(take(jnp.where(mine_PxK & (of_P[:, None] < L), at_PxK, L)), axis=1)


def segment_sums(
    values_SxD: jax.Array,
    source_M: jax.Array,
    segment_M: jax.Array,
    weights_M: jax.Array | None,
    segments: int,
    read: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    size: int | None = None,
    atomics: bool = False,
    most: int | None = None,
    start_T: jax.Array | None = None,
) -> jax.Array:
    """Sums rows: result[t] = sum over m with segment[m] = t of weights[m] * values[source[m]].

    Terms are added in an order that is the same in every run. No array of [M, D] is made, but pieces of about as many
    terms as there are segments, one after the other; on a GPU see `sum_sorted`.

    Args:
      values_SxD: the rows.
      source_M: int32, one outside 0 to S - 1 stands for nothing.
      segment_M: int32, ascending; one that is not below `segments` stands for nothing.
      weights_M: floats; all 1 if None.
      segments: T.
      read: (values, their numbers, of any shape) -> rows as floats, zeros of those from S on; None: as they are.
      size: S, if the rows are not those of an array [S, D].
      atomics: as for `by_segments`.
      most: as for `sum_sorted`.
      start_T: likewise.

    Returns:
      [T, D], of the dtype that `read` gives.
    """
    M, S, plain = len(source_M), size or values_SxD.shape[0], read is None
    read = read or _rows
    one = jax.eval_shape(read, values_SxD, jax.ShapeDtypeStruct((1,), jnp.int32))
    sums_TxD = jnp.zeros((segments, one.shape[1]), one.dtype)
    piece = min(M, max(segments, LEAST_TERMS))
    if not piece:
        return sums_TxD
    if by_segments(atomics):
        if plain and kernels.available_on_gpu(values_SxD.dtype, values_SxD.shape[1], values_SxD.size):
            start_T = first_entries(segment_M, segments) if start_T is None else start_T
            return sum_rows(values_SxD, source_M, segment_M, start_T, weights_M)

        def take(at: jax.Array) -> jax.Array:
            found = source_M.at[at].get(mode="fill", fill_value=S)
            terms = read(values_SxD, found)
            if weights_M is None:
                return terms
            return terms * weights_M.at[at].get(mode="fill", fill_value=0)[..., None]

        return sum_sorted(segment_M, segments, take, most, start_T)

    def add(start: Any, sums_TxD: jax.Array) -> jax.Array:
        def part(x_M: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x_M, start, piece)

        terms = read(values_SxD, part(source_M))
        if weights_M is not None:
            terms = terms * part(weights_M)[:, None]
        return sums_TxD.at[part(segment_M)].add(terms, mode="drop", indices_are_sorted=True)

    turns = -(-M // piece)
    if turns == 1:
        return add(0, sums_TxD)
    short = turns * piece - M
    source_M = jnp.concatenate([source_M, jnp.full(short, S, source_M.dtype)])
    segment_M = jnp.concatenate([segment_M, jnp.full(short, segments, segment_M.dtype)])
    if weights_M is not None:
        weights_M = jnp.concatenate([weights_M, jnp.zeros(short, weights_M.dtype)])
    varying = jax.typeof(source_M).manual_axis_type.varying | jax.typeof(values_SxD).manual_axis_type.varying
    if missing := tuple(varying - jax.typeof(sums_TxD).manual_axis_type.varying):
        sums_TxD = jax.lax.pcast(sums_TxD, missing, to="varying")
    return jax.lax.fori_loop(0, turns, lambda i, sums: add(i * piece, sums), sums_TxD)


def _rows(values_SxD: jax.Array, at: jax.Array) -> jax.Array:
    return values_SxD.at[at].get(mode="fill", fill_value=0)


def coalesce(slots_M: jax.Array, grads_MxD: jax.Array, rows: int, lists: int, atomics: bool = False) -> SparseGradient:
    """Sums the gradients of equal slots.

    Sorting first keeps the order of the additions fixed, so that repeated runs agree to the bit, and
    lets the update scatter to unique, sorted slots. On a GPU that takes more: see the module.

    Args:
      slots_M: int32; `rows` (out of range) marks an entry that holds nothing.
      grads_MxD: the entries' gradients.
      rows: R of the buffer.
      lists: of how many lists `slots_M` consists, each of which holds a slot once, ascending, unused entries last.
      atomics: whether a GPU may add up by atomic operations, in any order.

    Returns:
      unique slots [M], strictly ascending, those not in use at R or beyond; sums [M, D] beside them.

    Raises:
      ConfigError: R + M exceeds int32, so that marks beyond R would wrap around to real rows.
    """
    M = slots_M.shape[0]
    if rows + M > MAX_ROWS:
        raise ConfigError(
            f"a device holds {rows:,} rows of one group and receives up to {M:,} row gradients a step; together they "
            f"may be at most {MAX_ROWS:,} (int32). Use more devices or a smaller batch."
        )
    unused_M = rows + jnp.arange(M, dtype=jnp.int32)
    if lists == 1:
        return SparseGradient(jnp.where(slots_M < rows, slots_M, unused_M), grads_MxD)
    sorted_M, order_M = in_order(slots_M)
    starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
    segment_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
    unique_M = unused_M.at[segment_M].set(sorted_M, indices_are_sorted=True)
    if not by_segments(atomics):
        sums_MxD = jax.ops.segment_sum(grads_MxD[order_M], segment_M, M, indices_are_sorted=True)
        return SparseGradient(unique_M, sums_MxD)
    # A slot is in each list once; of the entries that hold nothing there may be more, whose sum nobody reads.
    return SparseGradient(unique_M, segment_sums(grads_MxD, order_M, segment_M, None, M, most=lists))
