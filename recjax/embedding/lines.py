"""Rows of narrow tables side by side, in lines of 128 numbers, as a TPU holds them.

XLA for TPUs stores an array in tiles of 128 numbers of its last axis. One of [R, W], W no multiple of 128, it keeps
with the rows as that axis, and to scatter rows it lays the whole array out again, there and back, in every step. In
lines nothing is: a row is padded to P numbers, the next power of two (beyond 128 to a multiple of that), and
k = 128 / P rows make a line. Row r is in line r // k, from number r % k * P on. The padding is 0 and nobody reads it.

Reading and writing rows touches the same lines that rows of 128 numbers would be. To write some parts of lines, all
parts of a line are brought together first: each line is written once. No number is computed, so that all are those of a
buffer of rows, to the bit. Where tables leave the buffers (checkpoints, exports) they are rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128


@dataclasses.dataclass(frozen=True)
class Lines:
    """Layout of rows of some width in lines.

    Attributes:
      width: W, numbers of a row.
    """

    width: int

    @property
    def padded(self) -> int:
        """P, numbers that a row takes."""
        if self.width > LANES:
            return -(-self.width // LANES) * LANES
        return 1 << (self.width - 1).bit_length()

    @property
    def rows(self) -> int:
        """k, rows of a line."""
        return max(1, LANES // self.padded)

    def shape(self, rows: int) -> tuple[int, int]:
        """The shape of a buffer of so many rows, a multiple of k."""
        return rows // self.rows, self.rows * self.padded

    def packed(self, rows_CxW: jax.Array) -> jax.Array:
        """Lines of rows that follow one another, a multiple of k: [C / k, k * P]."""
        padded_CxP = jnp.pad(rows_CxW, ((0, 0), (0, self.padded - self.width)))
        return padded_CxP.reshape(self.shape(len(rows_CxW)))

    def unpacked(self, lines_LxK: jax.Array) -> jax.Array:
        """The rows of some lines, [L * k, W]."""
        return lines_LxK.reshape(-1, self.padded)[:, : self.width]

    def get(self, lines_LxK: jax.Array, slots: jax.Array) -> jax.Array:
        """The rows in some slots, [*slots.shape, W]; zeros of those beyond the buffer."""
        slots_M, parts = slots.reshape(-1), self.rows
        found = lines_LxK.at[slots_M // parts].get(mode="fill", fill_value=0)
        while parts > 1:  # the half of what is left that has the row
            parts //= 2
            upper_M, half = slots_M & parts != 0, found.shape[1] // 2
            found = jnp.where(upper_M[:, None], found[:, half:], found[:, :half])
        return found[:, : self.width].reshape(*slots.shape, self.width)

    def set(self, lines_LxK: jax.Array, slots_M: jax.Array, rows_MxW: jax.Array) -> jax.Array:
        """The buffer with other rows in some slots, ascending and each once; those beyond the buffer are dropped."""
        M, k = len(slots_M), self.rows
        line_M, part_M = slots_M // k, slots_M % k
        part_K = jnp.arange(k * self.padded, dtype=jnp.int32) // self.padded
        is_new_MxK = part_M[:, None] == part_K[None]
        new_MxK = jnp.tile(jnp.pad(rows_MxW, ((0, 0), (0, self.padded - self.width))), (1, k))
        back = 1
        while back < min(k, M):  # brings the parts of a line to its last row: those of the last 2, 4, ... k rows
            same_M = line_M[back:] == line_M[:-back]
            from_MxK = jnp.pad(is_new_MxK[:-back] & same_M[:, None], ((back, 0), (0, 0)))
            new_MxK = jnp.where(from_MxK, jnp.pad(new_MxK[:-back], ((back, 0), (0, 0))), new_MxK)
            is_new_MxK, back = is_new_MxK | from_MxK, 2 * back
        ends_M = jnp.concatenate([line_M[1:] != line_M[:-1], jnp.ones(1, bool)])
        nth_M = jnp.cumsum(ends_M, dtype=jnp.int32) - ends_M.astype(jnp.int32)  # of the lines that are written
        at_M = jnp.arange(M, dtype=jnp.int32)
        last_M = jnp.zeros(M, jnp.int32).at[nth_M].max(at_M, indices_are_sorted=True)
        beyond_M = lines_LxK.shape[0] + at_M  # further than the lines of all slots beyond
        target_M = beyond_M.at[nth_M].set(line_M, indices_are_sorted=True)
        how: Any = {"unique_indices": True, "indices_are_sorted": True}
        old_MxK = lines_LxK.at[target_M].get(mode="fill", fill_value=0, **how)
        after_MxK = jnp.where(is_new_MxK[last_M], new_MxK[last_M], old_MxK)
        return lines_LxK.at[target_M].set(after_MxK, mode="drop", **how)

    def read(self, lines_LxK: jax.Array, slots: range) -> jax.Array:
        """The rows in slots that follow one another, [C, W]."""
        first, last = slots.start // self.rows, -(-slots.stop // self.rows)
        found = self.unpacked(jax.lax.slice_in_dim(lines_LxK, first, last))
        return found[slots.start - first * self.rows :][: len(slots)]

    def write(self, lines_LxK: jax.Array, piece_CxV: jax.Array, start: tuple[Any, ...]) -> jax.Array:
        """The buffer with other values from a row and column on. It is copied if it is not donated."""
        L, k = min(len(piece_CxV) // self.rows + 2, len(lines_LxK)), self.rows
        first = jnp.minimum(start[0] // k, len(lines_LxK) - L)
        around_LxK = jax.lax.dynamic_slice_in_dim(lines_LxK, first, L)
        rows_QxP = jax.lax.dynamic_update_slice(
            around_LxK.reshape(-1, self.padded), piece_CxV, (start[0] - first * k, start[1])
        )
        return jax.lax.dynamic_update_slice_in_dim(lines_LxK, rows_QxP.reshape(around_LxK.shape), first, 0)
