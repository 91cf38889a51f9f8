"""Layers that several models share, and their initial weights."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recjax import kernels
from recjax.embedding.optim import SparseOptimizer
from recjax.errors import ConfigError
from recjax.gpu_kernels import interaction
from recjax.models.dense import Precision, Products, Rounding, dense, full_precision, rounding
from recjax.models.stateful import BatchNorm, Dropout, check_rate

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


LINEAR = ".linear"  # ends the name of the first-order lookup of the feature that stands before it
_precision: contextvars.ContextVar[Rounding] = contextvars.ContextVar("precision", default=Precision.HIGHEST)


@contextlib.contextmanager
def products_in(precision: Rounding) -> Iterator[None]:
    """Makes the layers that are built meanwhile round the factors of float32 products as `precision` lets a device.

    HIGHEST does not round: numbers depend on no device. HIGH is TensorFloat32 on a GPU (10 bits of mantissa where
    float32 has 23; sums stay float32), and three bfloat16 passes instead of six on a TPU. `dense.THREE_PASSES` makes up
    on a GPU for what that rounds, and is HIGHEST elsewhere. CPUs never round.
    """
    token = _precision.set(precision)
    try:
        yield
    finally:
        _precision.reset(token)


def chosen_precision() -> Rounding:
    """Returns the precision of float32 products in layers that are built now: see `products_in`."""
    return _precision.get()


def check_widths(name: str, widths: Sequence[int], *, least: int = 0) -> None:
    """Refuses widths of the layers called `name` that are below 1, or fewer than `least` (ConfigError)."""
    if len(widths) < least or min(widths, default=1) < 1:
        needs = "needs at least one layer, of width 1 or more" if least else "has layers of width 1 or more"
        raise ConfigError(f"{name} is {'-'.join(map(str, widths)) or 'empty'}; it {needs}.")


def check_logit(name: str, widths: Sequence[int]) -> None:
    """The same for layers that give the logit: at least one, and the last of width 1."""
    check_widths(name, widths, least=1)
    if widths[-1] != 1:
        raise ConfigError(f"{name} ends in {widths[-1]} outputs; it must end in 1, the logit.")


def unequal(dims: dict[str, int], dim: int) -> str:
    """The features whose dimension is not `dim`, for a message: "item (8), tags (4) and 3 more"; "" if none."""
    other = [f"{name} ({d})" for name, d in dims.items() if d != dim]
    return ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")


def input_names(dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
    """Names of the inputs [dense features, embeddings] of a layer: each dense column, and each value of a vector."""
    return [*dense, *(f"{name} {d}" for name, width in dims.items() for d in range(width))]


def embedded(dims: dict[str, int]) -> dict[str, int]:
    """Lookups of a model with first-order weights that are not such weights themselves.

    Raises:
      ConfigError: a lookup has no first-order weights beside it.
    """
    plain = {name: dim for name, dim in dims.items() if name + LINEAR in dims}
    linear = {name + LINEAR for name in plain}
    if alone := [name for name in dims if name not in plain and name not in linear]:
        raise ConfigError(
            f"feature {alone[0]!r} has no first-order weights: this model needs {alone[0] + LINEAR!r} too."
        )
    return plain


class Linear(nnx.Module):
    """y = x W + b, with W [inputs, outputs] in `kernel` and b [outputs] in `bias` (None without); perhaps ReLU of it.

    Parameters are float32 whatever `dtype`, the dtype of the computation; sums are of `full_precision`. A float32
    product is one, unless `products_in` says otherwise: GPUs and TPUs would round its inputs, and the numbers would
    depend on the machine.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: float,
        bias: float | None,
        relu: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        """Normal initial values with the standard deviations `kernel` and `bias` (None: without a bias)."""
        self.kernel = nnx.Param(normal(rngs.params(), (inputs, outputs), kernel))
        self.bias = None if bias is None else nnx.Param(normal(rngs.params(), (outputs,), bias))
        self.relu = relu
        self.dtype = dtype
        self.precision = chosen_precision()
        self.products: Products | None = None  # who computes them; see `dense`

    def __call__(self, x_BxK: jax.Array) -> jax.Array:
        """[b, inputs] -> [b, outputs], in the dtype of the computation."""
        bias_N = None if self.bias is None else self.bias[...]
        return dense(x_BxK.astype(self.dtype), self.kernel[...], bias_N, self.relu, self.precision, self.products)


def linear(inputs: int, outputs: int, *, relu: bool = False, dtype: Any, rngs: nnx.Rngs) -> Linear:
    """A dense layer initialised as facebookresearch/dlrm does: W ~ N(0, sqrt(2 / (outputs + inputs))), and bias.

    The bias is ~ N(0, sqrt(1 / outputs)).
    """
    kernel, bias = (2.0 / (outputs + inputs)) ** 0.5, (1.0 / outputs) ** 0.5
    return Linear(inputs, outputs, kernel=kernel, bias=bias, relu=relu, dtype=dtype, rngs=rngs)


class Mlp(nnx.Module):
    """Dense layers with a ReLU after each one; if `linear_output`, the last one has none and gives logits.

    Logits are of `full_precision`. Without widths it gives its input. With `batch_norm` values are normalised before
    each ReLU, and with `dropout` a share of them is dropped after it.
    """

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        *,
        linear_output: bool = False,
        batch_norm: bool = False,
        dropout: float = 0.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = [inputs, *widths]
        dtypes, relus = [dtype] * len(widths), [not batch_norm] * len(widths)
        if linear_output:
            dtypes[-1], relus[-1] = full_precision(dtype), False
        layers = zip(itertools.pairwise(sizes), dtypes, relus, strict=True)
        self.layers = nnx.List([linear(m, n, relu=r, dtype=d, rngs=rngs) for (m, n), d, r in layers])
        hidden = widths[:-1] if linear_output else widths
        self.norms = nnx.List([BatchNorm(n) for n in hidden]) if batch_norm else None
        self.drops = nnx.List([Dropout(dropout) for _ in hidden]) if dropout else None

    def __call__(self, x_BxK: jax.Array) -> jax.Array:
        """[b, inputs] -> [b, widths[-1]]."""
        for number, layer in enumerate(self.layers):
            x_BxK = layer(x_BxK)
            if self.norms is not None and number < len(self.norms):
                x_BxK = jax.nn.relu(self.norms[number](x_BxK))
            if self.drops is not None and number < len(self.drops):
                x_BxK = self.drops[number](x_BxK)
        return x_BxK


def dot_interaction(
    vectors_BxFxD: jax.Array, itself: bool = False, precision: Rounding = Precision.HIGHEST
) -> jax.Array:
    """Pairwise dot products Z = T T^t: the strictly lower triangle (i > j), row by row.

    The order is that of facebookresearch/dlrm: (1,0), (2,0), (2,1), (3,0), ... TorchRec takes the
    upper triangle instead.

    Args:
      vectors_BxFxD: F vectors a sample.
      itself: also take the diagonal (j <= i).
      precision: of float32 products.

    Returns:
      [b, F(F-1)/2], or [b, F(F+1)/2] with the diagonal.
    """
    if kernels.available(vectors_BxFxD.dtype):
        return kernels.interaction(vectors_BxFxD, itself)
    return _dot_interaction(vectors_BxFxD, itself, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _dot_interaction(vectors_BxFxD: jax.Array, itself: bool, precision: Rounding) -> jax.Array:
    rounded = rounding(vectors_BxFxD, precision)
    if _fits_gpu_kernel(vectors_BxFxD):
        return interaction.multiply_pairs(vectors_BxFxD, itself, rounded)
    i, j = _triangle(vectors_BxFxD.shape[1], itself)
    products_BxFxF = jnp.einsum("bid,bjd->bij", vectors_BxFxD, vectors_BxFxD, precision=rounded)
    return products_BxFxF.reshape(products_BxFxF.shape[0], -1)[:, i * vectors_BxFxD.shape[1] + j]


def _dot_interaction_forward(
    vectors_BxFxD: jax.Array, itself: bool, precision: Rounding
) -> tuple[jax.Array, jax.Array]:
    return _dot_interaction(vectors_BxFxD, itself, precision), vectors_BxFxD


def _dot_interaction_backward(
    itself: bool, precision: Rounding, vectors_BxFxD: jax.Array, grads_BxP: jax.Array
) -> tuple[jax.Array]:
    """One product with the symmetric matrix of the gradients; to differentiate step by step takes two and a scatter."""
    rounded = rounding(vectors_BxFxD, precision)
    if _fits_gpu_kernel(vectors_BxFxD):
        return (interaction.pull_back_pairs(vectors_BxFxD, grads_BxP, itself, rounded),)
    F = vectors_BxFxD.shape[1]
    i, j = _triangle(F, itself)
    P = len(i)
    at_FxF = np.full((F, F), P)  # a zero: the diagonal, if it is not in the triangle
    at_FxF[i, j] = at_FxF[j, i] = np.arange(P)
    padded_BxQ = jnp.pad(grads_BxP, ((0, 0), (0, 1)))
    grads_BxFxF = padded_BxQ[:, at_FxF.ravel()].reshape(-1, F, F) * (1 + np.eye(F, dtype=grads_BxP.dtype))[None]
    return (jnp.einsum("bij,bjd->bid", grads_BxFxF, vectors_BxFxD, precision=rounded),)


_dot_interaction.defvjp(_dot_interaction_forward, _dot_interaction_backward)


def _fits_gpu_kernel(vectors_BxFxD: jax.Array) -> bool:
    F, D = vectors_BxFxD.shape[1:]
    few = 2 <= F <= interaction.MOST_VECTORS
    return few and kernels.available_on_gpu(vectors_BxFxD.dtype, D, vectors_BxFxD.size)


def _triangle(F: int, itself: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each element of the lower triangle, row by row: [P] each."""
    i, j = np.tril_indices(F, 0 if itself else -1)
    return i, j


class CrossNet(nnx.Module):
    """The cross layers of DCN-v2 (Wang et al. 2021, arXiv:2008.13535): polynomials of the input, one degree a layer.

      full rank (eq. 1):     x_{l+1} = x_0 * (W_l x_l + b_l) + x_l              W: [N, N]
      low rank  (section 4): x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l        V: [r, N], W: [N, r]

    With one expert and no activation between V and W, as MLPerf and TorchRec's CrossNet and LowRankCrossNet have it.
    Weights start Xavier-normal, N(0, sqrt(2 / (inputs + outputs))), biases at 0.
    """

    def __init__(self, width: int, layers: int, rank: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        """N = `width` inputs and outputs; rank 0 is full rank."""

        def layer(inputs: int, outputs: int, bias: float | None) -> Linear:
            kernel = (2.0 / (outputs + inputs)) ** 0.5
            return Linear(inputs, outputs, kernel=kernel, bias=bias, dtype=dtype, rngs=rngs)

        self.v = nnx.List([layer(width, rank, None) for _ in range(layers if rank else 0)])
        self.w = nnx.List([layer(rank or width, width, 0.0) for _ in range(layers)])

    def __call__(self, x_BxN: jax.Array) -> jax.Array:
        """[b, N] -> [b, N]."""
        x0_BxN = x_BxN
        for i, w in enumerate(self.w):
            inner = self.v[i](x_BxN) if len(self.v) else x_BxN
            x_BxN = x0_BxN * w(inner) + x_BxN
        return x_BxN


@dataclasses.dataclass(frozen=True)
class FirstOrderConfig:
    """Shape of a deep network beside first-order weights."""

    first_order: ClassVar[bool] = True
    deep: tuple[int, ...] = (64, 32, 1)  # widths of the deep network's layers; the last is its logit, so 1
    linear: SparseOptimizer | None = None  # optimizer of the ids' first-order weights; none: that of the embeddings
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_logit("deep", self.deep)


class FirstOrder(nnx.Module):
    """<w, x> over dense features and one-hot ids. The ids' weights are looked up, and no parameters here.

    In full precision, starting at 0.
    """

    def __init__(self, dense: int, features: Sequence[str], *, dtype: Any) -> None:
        """For `dense` dense features and the lookups `f.linear` of the `features`."""
        self.weights_K = nnx.Param(jnp.zeros(dense, jnp.float32))
        self.lookups = tuple(name + LINEAR for name in features)
        self.dtype = full_precision(dtype)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """[b] from dense features [b, K] and what was looked up, f.linear -> [b, 1]."""
        parts = [pooled[name].astype(self.dtype) for name in self.lookups]
        parts.append(dense_BxK.astype(self.dtype) * self.weights_K[...].astype(self.dtype)[None])
        return jnp.sum(jnp.concatenate(parts, axis=1), axis=1)


def pair_sum(vectors_BxFxD: jax.Array) -> jax.Array:
    """Sum of the dot products of all pairs of different vectors, [b]: the second order of a factorization machine.

    In linear time (Rendle 2010, lemma 3.1): sum_{i<j} <v_i, v_j> = 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2).
    """
    total_BxD = jnp.sum(vectors_BxFxD, axis=1)
    return 0.5 * jnp.sum(jnp.square(total_BxD) - jnp.sum(jnp.square(vectors_BxFxD), axis=1), axis=1)
