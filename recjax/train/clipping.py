"""Clipping by the global norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clip_scale(sum_of_squares: jax.Array, clip_norm: float) -> jax.Array:
    """What to multiply every gradient with, so that their norm is at most `clip_norm` (Pascanu et al. 2013).

    Args:
      sum_of_squares: [], over all gradients of the mean loss: each dense parameter and each coalesced row once.
      clip_norm: the largest norm, positive.

    Returns:
      [], 1 where the norm is smaller, else clip_norm / norm.
    """
    return jnp.minimum(1, clip_norm / jnp.sqrt(sum_of_squares))
