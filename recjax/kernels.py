"""The optional CPU kernels: dot interaction and sum pooling of bags, and the host's search for distinct ids.

They come with the distribution recjax-kernels (the folder kernels/), whose C++ code `jax.ffi` calls. Where it is not
installed `available` says so, and callers use their plain formulation, which the kernels are also tested against.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from recjax.errors import ConfigError

_off = False
_INTERFACE = 2  # of recjax_kernels: both numbers rise together when what is called here changes


@functools.cache
def installed() -> bool:
    """Whether recjax-kernels is installed. Looked for once; then its handlers are known to JAX.

    Raises:
      ConfigError: it was built from another version of recjax.
    """
    try:
        import recjax_kernels  # importing it registers them
    except ModuleNotFoundError as error:
        if error.name != "recjax_kernels":
            raise
        return False
    if getattr(recjax_kernels, "INTERFACE", 1) != _INTERFACE:
        raise ConfigError(
            "the installed recjax-kernels was built from another version of recjax. Build it anew (`pip install "
            "./kernels` in recjax's folder), or do without it (`pip uninstall recjax-kernels`)."
        )
    return True


def available(dtype: DTypeLike) -> bool:
    """Whether `interaction` and `bags` can be called: installed, on CPU, and float32 or bfloat16."""
    supported = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
    return supported and not _off and installed() and jax.default_backend() == "cpu"


def distinct(keys_L: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """What `recjax.embedding.route.distinct` gives; None if the kernels are not to be had. Starts no back end."""
    if _off or not installed():
        return None
    import recjax_kernels

    found: tuple[np.ndarray, np.ndarray] = recjax_kernels.distinct(keys_L, limit)
    return found


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """While this lasts `available` is False: for comparisons. What was compiled before stays as it is."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def interaction(vectors_BxFxD: jax.Array, itself: bool = False) -> jax.Array:
    """Dot products of all pairs of a sample's vectors: `recjax.models.layers.dot_interaction`, differentiable.

    Args:
      vectors_BxFxD: float32 or bfloat16.
      itself: also take the diagonal.

    Returns:
      [B, F(F-1)/2], the strictly lower triangle row by row, or [B, F(F+1)/2] with the diagonal, in the dtype of the
      vectors. Sums are float32.
    """
    return _interaction(vectors_BxFxD, itself)


def bags(rows_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array | None = None) -> jax.Array:
    """Sums of rows: result[n] = sum over h of weights[n, h] * rows[inverse[n, h]]; differentiable in the rows alone.

    No array of [N, H, D] is made. The gradient of a row is the sum over its occurrences in the order of the ids, so
    repeated runs agree to the bit, whatever the number of threads.

    Args:
      rows_UxD: float32; bfloat16 is widened on the way in and narrowed on the way out.
      inverse_NxH: int32; an index outside 0..U-1 stands for nothing.
      weights_NxH: of the dtype of the rows; all 1 if None.

    Returns:
      [N, D], in the dtype of the rows. Sums are float32.
    """
    arrays = [rows_UxD, inverse_NxH] + ([] if weights_NxH is None else [weights_NxH])
    # Inside shard_map all are made to vary over the same axes, which also sums the gradient of what is replicated.
    rows, inverse, *weights = _vary_alike(*arrays)
    wide = [x.astype(jnp.float32) for x in weights]
    pooled_NxD = _bags(rows.astype(jnp.float32), inverse, wide[0] if wide else None)
    return pooled_NxD.astype(rows_UxD.dtype)


def _vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, varying over the same mesh axes; outside of shard_map they are as they were."""
    each = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*each)
    missing = [tuple(every - axes) for axes in each]
    return [jax.lax.pcast(x, new, to="varying") if new else x for x, new in zip(arrays, missing, strict=True)]


def _call(name: str, shape: tuple[int, ...], *operands: jax.Array, **attributes: Any) -> jax.Array:
    """Calls a handler whose result has the dtype of the last operand, and varies as all of them do."""
    assert installed(), "ask available() first"
    alike = _vary_alike(*operands)
    like = jax.typeof(alike[-1])
    where = NamedSharding(like.sharding.mesh, PartitionSpec()) if like.manual_axis_type.varying else None
    result = jax.ShapeDtypeStruct(shape, like.dtype, sharding=where, manual_axis_type=like.manual_axis_type)
    return jax.ffi.ffi_call(f"recjax_{name}", result)(*alike, **attributes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _interaction(vectors_BxFxD: jax.Array, itself: bool) -> jax.Array:
    b, F, _ = vectors_BxFxD.shape
    pairs = F * (F + 1) // 2 if itself else F * (F - 1) // 2
    return _call("interaction_forward", (b, pairs), vectors_BxFxD, itself=itself)


def _interaction_forward(vectors_BxFxD: jax.Array, itself: bool) -> tuple[jax.Array, jax.Array]:
    return _interaction(vectors_BxFxD, itself), vectors_BxFxD


def _interaction_backward(itself: bool, vectors_BxFxD: jax.Array, cotangents_BxP: jax.Array) -> tuple[jax.Array]:
    return (_call("interaction_backward", vectors_BxFxD.shape, vectors_BxFxD, cotangents_BxP, itself=itself),)


_interaction.defvjp(_interaction_forward, _interaction_backward)


def _weights(weights_NxH: jax.Array | None) -> jax.Array:
    """What handlers take for the weights: [0, 0] means that all are 1."""
    return jnp.zeros((0, 0), jnp.float32) if weights_NxH is None else weights_NxH


@jax.custom_vjp
def _bags(rows_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array | None) -> jax.Array:
    shape = (inverse_NxH.shape[0], rows_UxD.shape[1])
    return _call("bags_forward", shape, rows_UxD, inverse_NxH, _weights(weights_NxH))


def _bags_forward(rows_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array | None) -> tuple[jax.Array, Any]:
    # Of the rows the gradient needs the number alone; the compiler drops the rest.
    return _bags(rows_UxD, inverse_NxH, weights_NxH), (rows_UxD, inverse_NxH, weights_NxH)


def _bags_backward(kept: Any, cotangents_NxD: jax.Array) -> tuple[jax.Array, None, None]:
    rows_UxD, inverse_NxH, weights_NxH = kept
    grads = _call("bags_backward", rows_UxD.shape, inverse_NxH, _weights(weights_NxH), cotangents_NxD)
    return grads, None, None


_bags.defvjp(_bags_forward, _bags_backward)
