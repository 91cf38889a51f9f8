"""Exchanges between the devices that hold tables: the one place that moves slots, rows and gradients."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from recjax.embedding.quantize import Precision, decode, encode
from recjax.parallel.mesh import MODEL_AXES


class Extents(NamedTuple):
    """Lengths of blocks: how many of the C entries of each travel, where blocks are not sent with their padding.

    Attributes:
      sent_N: int32 [N], of the block for each device.
      received_N: int32 [N], of that from each device.
    """

    sent_N: jax.Array
    received_N: jax.Array

    @property
    def back(self) -> Extents:
        """Extents of the way back."""
        return Extents(self.received_N, self.sent_N)


def extents_of(lists_NxC: jax.Array, nothing: int, axes: tuple[str, ...] = MODEL_AXES, least: int = 0) -> Extents:
    """Finds where each device's lists end, and sends the others their lengths.

    Args:
      lists_NxC: int32 [N, C]; what follows the last entry of a list is `nothing`.
      nothing: the value of padding.
      axes: of the mesh, as for `all_to_all`.
      least: entries that every list has in any case.
    """
    ends_C = 1 + jnp.arange(lists_NxC.shape[1], dtype=jnp.int32)
    sent_N = jnp.max(jnp.where(lists_NxC != nothing, ends_C, least), axis=1, initial=least)
    return Extents(sent_N, all_to_all(sent_N[:, None], axes)[:, 0])


def all_to_all(
    x_NxC: jax.Array, axes: tuple[str, ...] = MODEL_AXES, extents: Extents | None = None, nothing: int = 0
) -> jax.Array:
    """Block n of this device's goes to device n, whose block for this device comes back in its place.

    Inside `jax.shard_map` over MODEL_AXES.

    Args:
      x_NxC: [N, C, ...], a block for each device along `axes`.
      axes: of the mesh; devices that differ in others exchange nothing.
      extents: entries of the blocks that travel, by a ragged all-to-all, which CPUs do not have; None: all.
      nothing: the value of entries that do not travel, where they would arrive.

    Returns:
      [N, C, ...], a block from each device.
    """
    if extents is None:
        return jax.lax.all_to_all(x_NxC, axes, split_axis=0, concat_axis=0, tiled=True)
    N, C = x_NxC.shape[:2]
    x_M = x_NxC.reshape(N * C, *x_NxC.shape[2:])
    starts_N = jnp.arange(N, dtype=jnp.int32) * C
    own_N = jnp.full_like(starts_N, C) * jax.lax.axis_index(axes).astype(jnp.int32)  # where all others keep this block
    padding_M = jnp.where(jnp.zeros_like(x_M, bool), x_M, jnp.asarray(nothing, x_M.dtype))
    how = (starts_N, extents.sent_N, own_N, extents.received_N)
    return jax.lax.ragged_all_to_all(x_M, padding_M, *how, axis_name=axes).reshape(x_NxC.shape)


def exchange_rows(
    x_NxCxD: jax.Array, precision: Precision, axes: tuple[str, ...] = MODEL_AXES, extents: Extents | None = None
) -> jax.Array:
    """`all_to_all` of rows or their gradients, encoded on the way.

    The block that a device keeps for itself is encoded too: a row then arrives with the same values on every device,
    however many there are. On one device nothing travels, and nothing is encoded.

    Args:
      x_NxCxD: float32, bfloat16 (of tables that hold it) or float64 [N, C, D].
      precision: of the way; with float32 all values arrive as they were.
      axes: of the mesh, as for `all_to_all`.
      extents: rows of the blocks that travel; None: all.

    Returns:
      [N, C, D], float32; float64 if it was.
    """
    if len(x_NxCxD) == 1:
        precision = "float32"
    return decode(all_to_all(encode(x_NxCxD, precision), axes, extents), precision)


def gather_rows(x_KxD: jax.Array, precision: Precision, axes: tuple[str, ...]) -> jax.Array:
    """The rows of all devices along `axes`, [devices, K, D] on each, encoded on the way; those of its own, too.

    So the result is the same on all of them, also for `jax.shard_map`.
    """
    return decode(jax.lax.all_gather(encode(x_KxD, precision), axes, to="invarying"), precision)
