"""Layers that several models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

LINEAR = ".linear"  # ends the name of the first-order lookup of the feature that stands before it
PRECISION = jax.lax.Precision.HIGHEST


def linear(inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer initialised as facebookresearch/dlrm does.

    W ~ N(0, sqrt(2 / (outputs + inputs))) and bias ~ N(0, sqrt(1 / outputs)). Parameters are made in
    float32 whatever `dtype`, the dtype of the computation. A float32 product is one: GPUs and TPUs
    would otherwise round its inputs, and the numbers would depend on the machine.
    """
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=jax.nn.initializers.normal((2.0 / (outputs + inputs)) ** 0.5),
        bias_init=jax.nn.initializers.normal((1.0 / outputs) ** 0.5),
        dtype=dtype,
        param_dtype=jnp.float32,
        precision=PRECISION,
        rngs=rngs,
    )


class Mlp(nnx.Module):
    """Dense layers with a ReLU after each one; if `linear_output`, the last one has none and gives logits.

    Logits are float32 at least: bfloat16 has 8 bits, so that scores would tie and the loss be coarse.
    """

    def __init__(
        self, inputs: int, widths: Sequence[int], *, linear_output: bool = False, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        sizes = [inputs, *widths]
        dtypes = [dtype] * len(widths)
        if linear_output:
            dtypes[-1] = jnp.float64 if dtype == jnp.float64 else jnp.float32
        layers = zip(itertools.pairwise(sizes), dtypes, strict=True)
        self.layers = nnx.List([linear(m, n, dtype=d, rngs=rngs) for (m, n), d in layers])
        self.linear_output = linear_output

    def __call__(self, x_BxK: jax.Array) -> jax.Array:
        """[b, inputs] -> [b, widths[-1]]."""
        for i, layer in enumerate(self.layers):
            x_BxK = layer(x_BxK)
            if not (self.linear_output and i == len(self.layers) - 1):
                x_BxK = jax.nn.relu(x_BxK)
        return x_BxK


def dot_interaction(vectors_BxFxD: jax.Array, *, itself: bool = False) -> jax.Array:
    """Pairwise dot products Z = T T^t: the strictly lower triangle (i > j), row by row.

    The order is that of facebookresearch/dlrm: (1,0), (2,0), (2,1), (3,0), ... TorchRec takes the
    upper triangle instead.

    Args:
      vectors_BxFxD: F vectors a sample.
      itself: also take the diagonal (j <= i).

    Returns:
      [b, F(F-1)/2], or [b, F(F+1)/2] with the diagonal.
    """
    b, F, _ = vectors_BxFxD.shape
    products_BxFxF = jnp.einsum("bid,bjd->bij", vectors_BxFxD, vectors_BxFxD, precision=PRECISION)
    i, j = np.tril_indices(F, 0 if itself else -1)
    return products_BxFxF.reshape(b, F * F)[:, i * F + j]
