"""How values travel between the devices that hold tables: the one place that moves slots, rows and gradients."""

from __future__ import annotations

import jax

from recjax.mesh import MODEL_AXES


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
