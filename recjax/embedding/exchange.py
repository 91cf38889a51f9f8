"""How values travel between the devices that hold tables: the one place that moves slots, rows and gradients."""

from __future__ import annotations

import jax

from recjax.embedding.quantize import Precision, decode, encode
from recjax.parallel.mesh import MODEL_AXES


def all_to_all(x_NxC: jax.Array, axes: tuple[str, ...] = MODEL_AXES) -> jax.Array:
    """Block n of this device's goes to device n, whose block for this device comes back in its place.

    Inside `jax.shard_map` over MODEL_AXES.

    Args:
      x_NxC: [N, C, ...], a block for each device along `axes`.
      axes: of the mesh; devices that differ in others exchange nothing.

    Returns:
      [N, C, ...], a block from each device.
    """
    return jax.lax.all_to_all(x_NxC, axes, split_axis=0, concat_axis=0, tiled=True)


def exchange_rows(x_NxCxD: jax.Array, precision: Precision, axes: tuple[str, ...] = MODEL_AXES) -> jax.Array:
    """`all_to_all` of rows or their gradients, encoded on the way.

    The block that a device keeps for itself is encoded too: a row then arrives with the same values on every device,
    however many there are. On one device nothing travels, and nothing is encoded.

    Args:
      x_NxCxD: float32, bfloat16 (of tables that hold it) or float64 [N, C, D].
      precision: of the way; with float32 all values arrive as they were.
      axes: of the mesh, as for `all_to_all`.

    Returns:
      [N, C, D], float32; float64 if it was.
    """
    if len(x_NxCxD) == 1:
        precision = "float32"
    return decode(all_to_all(encode(x_NxCxD, precision), axes), precision)


def gather_rows(x_KxD: jax.Array, precision: Precision, axes: tuple[str, ...]) -> jax.Array:
    """The rows of all devices along `axes`, [devices, K, D] on each, encoded on the way; those of its own, too.

    So the result is the same on all of them, also for `jax.shard_map`.
    """
    return decode(jax.lax.all_gather(encode(x_KxD, precision), axes, to="invarying"), precision)
