"""Initial weights of dense layers: normal numbers of a few compiled programs, whatever the shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_SIZES = (256, 4096, 65536)  # of a draw, at the least; a larger one is of the next power of two


def normal(key: jax.Array, shape: Sequence[int], scale: float) -> jax.Array:
    """Normal numbers with mean 0 and standard deviation `scale`, float32: the bits of `jax.nn.initializers.normal`.

    The nth number of a draw depends on the key and on n alone. So a longer draw, cut, gives the same, and layers of
    all shapes share its program; what is done with it is done by NumPy. Compiling one a shape is most of the time
    that a small model takes to build.

    Args:
      key: of the draw.
      shape: of the weights.
      scale: the standard deviation.
    """
    if isinstance(key, jax.core.Tracer) or not _partitionable():
        return jax.nn.initializers.normal(scale)(key, tuple(shape), jnp.float32)
    size = math.prod(shape)
    drawn = np.asarray(jax.random.normal(key, (_room(size),), jnp.float32))[:size]
    return jax.device_put((drawn * np.float32(scale)).reshape(shape))


def _partitionable() -> bool:
    """Returns whether the nth number of a draw depends on n and the key alone, here and now."""
    return bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009  # an attribute that JAX adds as it starts


def _room(size: int) -> int:
    """Numbers that are drawn where so many are needed."""
    return next((room for room in _SIZES if room >= size), 1 << (size - 1).bit_length())
