"""The optional CPU kernels: dense layers, dot interaction, sum pooling of bags, and the host's search for distinct ids.

They come with the distribution recjax-kernels (the folder kernels/), whose C++ code `jax.ffi` calls. Where it is not
installed `available` says so, and callers use their plain formulation, which the kernels are also tested against.
$RECJAX_KERNELS names the variant to take (avx512_amx, avx512_bf16, avx512, avx2, plain) in place of the best that the
processor has, or is "off": numbers differ in their last bits from one to the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from recjax.errors import ConfigError

CHOICE = "RECJAX_KERNELS"  # a variant, or "off"
_off = False
_INTERFACE = 5  # of recjax_kernels: both numbers rise together when what is called here changes


@functools.cache
def installed() -> bool:
    """Returns whether recjax-kernels is installed, and not off. Looked for once; then its handlers are known to JAX.

    Raises:
      ConfigError: it was built from another version of recjax; or $RECJAX_KERNELS asks for what there is not.
    """
    choice = os.environ.get(CHOICE, "")
    if choice == "off":
        return False
    try:
        import recjax_kernels  # importing it registers them
    except ModuleNotFoundError as error:
        if error.name != "recjax_kernels":
            raise
        if choice:
            raise ConfigError(
                f"{CHOICE}={choice}, but recjax-kernels is not installed. Install it (`pip install ./kernels` in "
                f"recjax's folder), or set {CHOICE}=off."
            ) from None
        return False
    if getattr(recjax_kernels, "INTERFACE", 1) != _INTERFACE:
        raise ConfigError(
            "the installed recjax-kernels was built from another version of recjax. Build it again (`pip install "
            "./kernels` in recjax's folder), or do without it (`pip uninstall recjax-kernels`)."
        )
    if choice and not recjax_kernels.use(choice):
        raise ConfigError(
            f"{CHOICE}={choice}, but the kernels have no such variant for this processor; its best is "
            f"{recjax_kernels.instruction_set()}. There are avx512_amx, avx512_bf16, avx512, avx2 and plain, each "
            "where the processor has it; off takes no kernels."
        )
    return True


def variant() -> str:
    """Returns which kernels the programs for CPUs of this process call: "avx2", ...; "none" if not installed or off."""
    if _off or not installed():
        return "none"
    import recjax_kernels

    return str(recjax_kernels.instruction_set())


def available(dtype: DTypeLike) -> bool:
    """Returns True if the functions below can be called: installed, for a mesh of CPUs, and float32 or bfloat16."""
    supported = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
    return supported and not _off and installed() and target_platform() == "cpu"


def available_on_gpu(dtype: DTypeLike, width: int, size: int) -> bool:
    """Returns whether the kernels of `recjax.gpu_kernels` are to compute: on a mesh of GPUs, unless kernels are off.

    Args:
      dtype: of the values; float32 alone.
      width: columns of a row: 16, 32, 64 or 128.
      size: values of the largest array, whose places are int32.
    """
    if _off or os.environ.get(CHOICE, "") == "off" or target_platform() != "gpu":  # where sizes may be symbols
        return False
    return jnp.dtype(dtype) == jnp.float32 and width in (16, 32, 64, 128) and size < 2**31


def distinct(keys_L: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Like `recjax.embedding.routing.keys.distinct`; None if the kernels are not to be had. Starts no back end."""
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
    rows, inverse, *weights = vary_alike(*arrays)
    wide = [x.astype(jnp.float32) for x in weights]
    pooled_NxD = _bags(rows.astype(jnp.float32), inverse, wide[0] if wide else None)
    return pooled_NxD.astype(rows_UxD.dtype)


def table_bags(
    table_RxD: jax.Array,
    slots_C: jax.Array,
    rows_CxD: jax.Array,
    inverse_NxH: jax.Array,
    weights_NxH: jax.Array | None = None,
) -> jax.Array:
    """`bags(table[slots], inverse, weights)` without the fetched rows in between; differentiable in these.

    Args:
      table_RxD: float32.
      slots_C: int32, the row of the table for each fetched row; beyond R where there is none.
      rows_CxD: the fetched rows. Their gradient is asked for, not their values, so that nothing has to make them.
      inverse_NxH: as for `bags`, indices of fetched rows.
      weights_NxH: as for `bags`, float32.
    """
    arrays = [table_RxD, slots_C, rows_CxD, inverse_NxH] + ([] if weights_NxH is None else [weights_NxH])
    table, slots, rows, inverse, *weights = vary_alike(*arrays)
    return _table_bags(table, slots, rows, inverse, weights[0] if weights else None)


def update_rowwise_adagrad(
    table_RxD: jax.Array,
    sums_R: jax.Array,
    touched_M: jax.Array,
    grads_MxD: jax.Array,
    scalars: tuple[jax.Array, jax.Array, jax.Array],
    *,
    eps: float,
    l2: float,
    weight_decay: float,
) -> tuple[jax.Array, jax.Array]:
    """`RowWiseAdagrad` on the touched rows of a table, in place: new table and sums of squares, both float32.

    Args:
      table_RxD: the table; donated.
      sums_R: its sums of squares; donated.
      touched_M: int32, slots of the rows, none twice; beyond R where there is none.
      grads_MxD: their gradients.
      scalars: what the gradients are multiplied with, the learning rate, and whether to change anything.
      eps: see `RowWiseAdagrad`, as the next two.
      l2: on the gradient.
      weight_decay: decoupled.
    """
    given = jnp.stack([x.astype(jnp.float32) for x in scalars])
    rule = {"eps": np.float32(eps), "l2": np.float32(l2), "weight_decay": np.float32(weight_decay)}
    results = [(x.shape, x.dtype) for x in (table_RxD, sums_R)]
    operands = (table_RxD, sums_R, touched_M, grads_MxD, given)
    table, sums = _call_for("update_rowwise_adagrad", results, *operands, aliases={0: 0, 1: 1}, **rule)
    return table, sums


def dense(x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, *, relu: bool) -> jax.Array:
    """A dense layer act(x W + b), differentiable; bias, ReLU and its mask cost no pass over memory.

    bfloat16 multiplies x with W rounded to bfloat16, adds up in float32, and rounds once, after the bias and ReLU.
    Magnitudes below 2^-126 count as 0, as in all that XLA computes on CPUs. No sum depends on the number of threads.
    Where the processor has AMX, float32 too is multiplied there, as sums of three bfloat16 (Henry et al., ARITH 2019):
    a product errs by at most two roundings, a sum of many by less than if it were added up one by one in float32. Of
    factors below 2^-102 the last bits may be lost.
    ReLU keeps a NaN, and no gradient goes through where its result is not above 0: as in `jax.nn.relu`.

    Args:
      x_BxK: float32 or bfloat16.
      kernel_KxN: float32.
      bias_N: float32, or None.
      relu: whether act is ReLU; else it is the identity.

    Returns:
      [B, N], in the dtype of x. The gradients of W and b are float32.
    """
    arrays = [x_BxK, kernel_KxN] + ([] if bias_N is None else [bias_N])
    # As in `bags`: what is replicated gets the sum of its gradients.
    x, kernel, *bias = vary_alike(*arrays)
    return _dense(x, kernel, bias[0] if bias else None, relu)


def dense_forward(x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, *, relu: bool) -> jax.Array:
    """The first of the three products of `dense`, not differentiable: act(x W + b)."""
    result = ((x_BxK.shape[0], kernel_KxN.shape[1]), x_BxK.dtype)
    bias = jnp.zeros(0, jnp.float32) if bias_N is None else bias_N  # [0]: none
    return _call_for("dense_forward", [result], x_BxK, kernel_KxN, bias, relu=relu)[0]


def dense_into_input(kernel_KxN: jax.Array, y_BxN: jax.Array | None, grads_BxN: jax.Array) -> jax.Array:
    """The second one: the gradient of x, [B, K], from that of y, which is None without ReLU."""
    shape = (grads_BxN.shape[0], kernel_KxN.shape[0])
    return _call("dense_into_input", shape, kernel_KxN, _mask(y_BxN, grads_BxN), grads_BxN)


def dense_into_kernel(
    x_BxK: jax.Array, y_BxN: jax.Array | None, grads_BxN: jax.Array, *, biased: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The third one: the float32 gradients of W and, if the layer is `biased`, of b; None else."""
    N = grads_BxN.shape[1]
    grads = [((x_BxK.shape[1], N), jnp.float32), ((N if biased else 0,), jnp.float32)]
    into_kernel, into_bias = _call_for("dense_into_kernel", grads, x_BxK, _mask(y_BxN, grads_BxN), grads_BxN)
    return into_kernel, into_bias if biased else None


def _mask(y_BxN: jax.Array | None, like: jax.Array) -> jax.Array:
    """The array that is above 0 where gradients go through a ReLU; [0, 0]: everywhere."""
    return jnp.zeros((0, 0), like.dtype) if y_BxN is None else y_BxN


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, varying over the same mesh axes; outside of shard_map they are as they were."""
    each = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*each)
    missing = [tuple(every - axes) for axes in each]
    return [jax.lax.pcast(x, new, to="varying") if new else x for x, new in zip(arrays, missing, strict=True)]


def _call(name: str, shape: tuple[int, ...], *operands: jax.Array, **attributes: Any) -> jax.Array:
    """Calls a handler whose only result has the dtype of the last operand."""
    return _call_for(name, [(shape, operands[-1].dtype)], *operands, **attributes)[0]


def _call_for(
    name: str,
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    *operands: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """Calls a handler for results of these shapes and dtypes, which vary as all operands do.

    `aliases` says which operand's memory a result takes: number of the operand -> number of the result.
    """
    assert installed(), "ask available() first"
    alike = vary_alike(*operands)
    like = jax.typeof(alike[-1])
    where = NamedSharding(like.sharding.mesh, PartitionSpec()) if like.manual_axis_type.varying else None
    wanted = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=where, manual_axis_type=like.manual_axis_type)
        for shape, dtype in results
    ]
    return list(jax.ffi.ffi_call(f"recjax_{name}", wanted, input_output_aliases=aliases)(*alike, **attributes))


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
    """Weights as handlers take them: [0, 0] means that all are 1."""
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


@jax.custom_vjp
def _table_bags(table_RxD: jax.Array, slots_C: jax.Array, rows_CxD: jax.Array, inverse_NxH: Any, weights: Any) -> Any:
    del rows_CxD
    shape = (inverse_NxH.shape[0], table_RxD.shape[1])
    return _call("table_bags", shape, table_RxD, slots_C, inverse_NxH, _weights(weights))


def _table_bags_forward(table: Any, slots: Any, rows_CxD: Any, inverse_NxH: Any, weights: Any) -> tuple[Any, Any]:
    return _table_bags(table, slots, rows_CxD, inverse_NxH, weights), (rows_CxD, inverse_NxH, weights)


def _table_bags_backward(kept: Any, cotangents_NxD: jax.Array) -> tuple[Any, ...]:
    return None, None, *_bags_backward(kept, cotangents_NxD)


_table_bags.defvjp(_table_bags_forward, _table_bags_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool) -> jax.Array:
    return dense_forward(x_BxK, kernel_KxN, bias_N, relu=relu)


def _dense_forward(
    x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool
) -> tuple[jax.Array, Any]:
    y_BxN = _dense(x_BxK, kernel_KxN, bias_N, relu)
    return y_BxN, (x_BxK, kernel_KxN, bias_N, _mask(y_BxN if relu else None, y_BxN))


def _dense_backward(relu: bool, kept: Any, cotangents_BxN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_BxK, kernel_KxN, bias_N, mask = kept
    # Two calls, so that the compiler drops the first where nobody wants it: below the first layer.
    into_x = dense_into_input(kernel_KxN, mask, cotangents_BxN)
    return into_x, *dense_into_kernel(x_BxK, mask, cotangents_BxN, biased=bias_N is not None)


_dense.defvjp(_dense_forward, _dense_backward)


def target_platform() -> str:
    """Returns "cpu", "gpu" or "tpu": inside `jax.shard_map` the mesh's, elsewhere the default back end's.

    A mesh of CPU devices may stand in a process that also has GPUs, and one of described devices, for which programs
    are compiled and not run, in a process that has none.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform
