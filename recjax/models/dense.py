"""A dense layer's three products, y = act(x W + b) and the gradients of x and W, by XLA or by the optional kernels.

Who computes them on CPUs is chosen by the layer's sizes (`Products`). XLA's own products are those of YNNPACK or Eigen;
a program may be compiled with oneDNN's in their place, where the JAX at hand has them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from recjax import kernels
from recjax.kernels import target_platform

Precision = jax.lax.Precision
Rounding: TypeAlias = Precision | jax.lax.DotAlgorithmPreset  # how a product may round its factors: see `rounding`
THREE_PASSES = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
# Of values of `compute_dtype` that name a way to multiply float32, where all others are dtypes.
PRECISIONS: dict[str, Rounding] = {"tensorfloat32": Precision.HIGH, "tensorfloat32x3": THREE_PASSES}
Way = Literal["kernels", "xla"]
# XLA:CPU's options (JAX 0.12; earlier ones take them and do nothing). With YNNPACK's fusions on, few products are left.
_ONEDNN: dict[str, Any] = {"xla_cpu_experimental_onednn_custom_call": True, "xla_cpu_experimental_ynn_fusion_type": ""}


def full_precision(dtype: Any) -> Any:
    """The dtype of logits: float32 at least. bfloat16 has 8 bits: scores would tie, and sums lose their terms."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def rounding(factor: jax.Array, precision: Rounding) -> Rounding:
    """Returns the precision of a product as this platform is to be told it.

    To XLA for GPUs HIGH means one thing in a library, another in Triton. `THREE_PASSES` is HIGHEST elsewhere: a GPU
    cuts each float32 factor in two of TensorFloat32, and adds up three of their four products, whose error is that of
    float32 sums.
    """
    if precision == THREE_PASSES:
        exact = factor.dtype != jnp.float32 or target_platform() != "gpu"
        return Precision.HIGHEST if exact else THREE_PASSES
    if precision == Precision.HIGH and factor.dtype == jnp.float32 and target_platform() == "gpu":
        return jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    return precision


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of a dense layer on one device.

    Attributes:
      rows: b, of x.
      terms: K, of a sum: the layer's inputs.
      columns: N, its outputs.
      dtype: of x, as "float32".
    """

    rows: int
    terms: int
    columns: int
    dtype: str

    def distance(self, other: LayerShape) -> float:
        """Sum of the logarithms of the ratios of sizes: 0 for the same ones, whatever the dtypes."""
        return sum(map(math.log, self._ratios(other)))

    def furthest(self, other: LayerShape) -> float:
        """The largest ratio of a size to the other one's, or of that to it: 1 at least."""
        return max(self._ratios(other))

    def _ratios(self, other: LayerShape) -> list[float]:
        pairs = ((self.rows, other.rows), (self.terms, other.terms), (self.columns, other.columns))
        return [max(a, b, 1) / max(min(a, b), 1) for a, b in pairs]


@dataclasses.dataclass(frozen=True)
class Ways:
    """The ones who compute the products of a layer: y = act(x W + b), the gradient of x, and those of W and b."""

    forward: Way
    into_input: Way
    into_kernel: Way

    def by_kernels(self) -> int:
        """Number of products that the kernels compute."""
        return (self.forward, self.into_input, self.into_kernel).count("kernels")


BY_KERNELS = Ways("kernels", "kernels", "kernels")
BY_XLA = Ways("xla", "xla", "xla")
PRODUCTS = tuple(field.name for field in dataclasses.fields(Ways))


@dataclasses.dataclass(frozen=True)
class Products:
    """The ones who compute the products of a program.

    Attributes:
      onednn: whether XLA's are oneDNN's.
      layers: sizes and who computes their products; other layers go by the nearest of their dtype, and by XLA where
        there is none.
    """

    onednn: bool = False
    layers: tuple[tuple[LayerShape, Ways], ...] = ()

    def of(self, shape: LayerShape) -> Ways:
        """Returns who computes the products of a layer."""
        alike = [(known, ways) for known, ways in self.layers if known.dtype == shape.dtype]
        return min(alike, key=lambda one: one[0].distance(shape))[1] if alike else BY_XLA

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """Options that programs are compiled with; None: the usual ones."""
        return dict(_ONEDNN) if self.onednn else None

    def in_words(self) -> str:
        """A phrase for people: "by table: 12 of 21 by kernels, the others by XLA"."""
        library = "oneDNN" if self.onednn else "XLA"
        if not self.layers:
            return library
        ours = sum(ways.by_kernels() for _, ways in self.layers)
        return f"by table: {ours} of {len(PRODUCTS) * len(self.layers)} by kernels, the others by {library}"


def compiler_options(products: Products | None) -> dict[str, Any] | None:
    """Returns what a program is compiled with, see `Products.compiler_options`; None stands for the usual products."""
    return None if products is None else products.compiler_options


@functools.cache
def onednn_there() -> bool:
    """Returns whether the JAX at hand compiles products into calls of oneDNN when asked. Tries it once, on a CPU."""

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot(x, x, precision=jax.lax.Precision.HIGHEST)

    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((256, 256))  # small ones are not oneDNN's
        try:
            text = jax.jit(product, compiler_options=dict(_ONEDNN)).lower(x).compile().as_text()
        except Exception:  # options that it does not know
            return False
    return "__onednn$matmul" in (text or "")


def dense(
    x_BxK: jax.Array,
    kernel_KxN: jax.Array,
    bias_N: jax.Array | None,
    relu: bool,
    precision: Rounding = Precision.HIGHEST,
    products: Products | None = None,
) -> jax.Array:
    """A dense layer, x W + b or ReLU of it: [b, N] in the dtype of x. W and b are float32.

    On CPUs `products` says which of its three products the optional kernels compute; None: all, if they are there.
    """
    if not kernels.available(x_BxK.dtype):
        return _dense(x_BxK, kernel_KxN, bias_N, relu, precision)
    (rows, terms), columns = x_BxK.shape, kernel_KxN.shape[1]
    shape = LayerShape(rows, terms, columns, str(x_BxK.dtype))
    ways = BY_KERNELS if products is None else products.of(shape)
    if ways == BY_KERNELS:
        return kernels.dense(x_BxK, kernel_KxN, bias_N, relu=relu)
    if ways == BY_XLA:
        return _dense(x_BxK, kernel_KxN, bias_N, relu, precision)
    arrays = [x_BxK, kernel_KxN] + ([] if bias_N is None else [bias_N])
    x, kernel, *bias = kernels.vary_alike(*arrays)
    return _mixed(x, kernel, bias[0] if bias else None, relu, precision, ways)


def _dense(
    x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool, precision: Rounding
) -> jax.Array:
    y_BxN = _product(x_BxK, kernel_KxN, precision)
    if bias_N is not None:
        y_BxN += bias_N.astype(y_BxN.dtype)[None]
    y_BxN = y_BxN.astype(x_BxK.dtype)
    return jax.nn.relu(y_BxN) if relu else y_BxN


def forward_by(
    way: Way, x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool, precision: Rounding
) -> jax.Array:
    """Returns what `dense` does, by the kernels or by XLA, not differentiable."""
    if way == "kernels":
        return kernels.dense_forward(x_BxK, kernel_KxN, bias_N, relu=relu)
    return _dense(x_BxK, kernel_KxN, bias_N, relu, precision)


def into_input_by(
    way: Way, kernel_KxN: jax.Array, y_BxN: jax.Array | None, grads_BxN: jax.Array, precision: Rounding
) -> jax.Array:
    """Returns the gradient of a layer's x from that of its result y, which is None without ReLU: [b, K]."""
    if way == "kernels":
        return kernels.dense_into_input(kernel_KxN, y_BxN, grads_BxN)
    return _product_into_input(kernel_KxN, _through_relu(y_BxN, grads_BxN), precision)


def into_kernel_by(
    way: Way,
    x_BxK: jax.Array,
    y_BxN: jax.Array | None,
    grads_BxN: jax.Array,
    biased: bool,
    precision: Rounding,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of W and b, likewise; the latter is None where the layer is not `biased`."""
    if way == "kernels":
        return kernels.dense_into_kernel(x_BxK, y_BxN, grads_BxN, biased=biased)
    passed_BxN = _through_relu(y_BxN, grads_BxN)
    into_bias = jnp.sum(passed_BxN.astype(jnp.float32), axis=0) if biased else None
    return _product_into_kernel(x_BxK, passed_BxN, precision).astype(jnp.float32), into_bias


def _through_relu(y_BxN: jax.Array | None, grads_BxN: jax.Array) -> jax.Array:
    return grads_BxN if y_BxN is None else jnp.where(y_BxN > 0, grads_BxN, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _mixed(
    x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool, precision: Rounding, ways: Ways
) -> jax.Array:
    """A layer of which the kernels compute some products and XLA the others."""
    return forward_by(ways.forward, x_BxK, kernel_KxN, bias_N, relu, precision)


def _mixed_forward(
    x_BxK: jax.Array, kernel_KxN: jax.Array, bias_N: jax.Array | None, relu: bool, precision: Rounding, ways: Ways
) -> tuple[jax.Array, Any]:
    y_BxN = _mixed(x_BxK, kernel_KxN, bias_N, relu, precision, ways)
    return y_BxN, (x_BxK, kernel_KxN, bias_N, y_BxN if relu else None)


def _mixed_backward(relu: bool, precision: Rounding, ways: Ways, saved: Any, grads_BxN: jax.Array) -> Any:
    x_BxK, kernel_KxN, bias_N, y_BxN = saved
    into_x = into_input_by(ways.into_input, kernel_KxN, y_BxN, grads_BxN, precision)
    return into_x, *into_kernel_by(ways.into_kernel, x_BxK, y_BxN, grads_BxN, bias_N is not None, precision)


_mixed.defvjp(_mixed_forward, _mixed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_BxK: jax.Array, kernel_KxN: jax.Array, precision: Rounding) -> jax.Array:
    """The product x W in the dtype of x, added up and given in `full_precision`; so are the gradients of W."""
    return _dot(x_BxK, kernel_KxN.astype(x_BxK.dtype), 1, 0, precision)


def _product_forward(x_BxK: jax.Array, kernel_KxN: jax.Array, precision: Rounding) -> tuple[jax.Array, Any]:
    return _product(x_BxK, kernel_KxN, precision), (x_BxK, kernel_KxN)


def _product_backward(precision: Rounding, saved: Any, grads_BxN: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BxK, kernel_KxN = saved
    grads_BxN = grads_BxN.astype(x_BxK.dtype)
    into_x_BxK = _product_into_input(kernel_KxN, grads_BxN, precision)
    return into_x_BxK, _product_into_kernel(x_BxK, grads_BxN, precision).astype(kernel_KxN.dtype)


def _product_into_input(kernel_KxN: jax.Array, grads_BxN: jax.Array, precision: Rounding) -> jax.Array:
    dtype = grads_BxN.dtype
    return _dot(grads_BxN, kernel_KxN.astype(dtype), 1, 1, precision).astype(dtype)


def _product_into_kernel(x_BxK: jax.Array, grads_BxN: jax.Array, precision: Rounding) -> jax.Array:
    """The gradient of W, of `full_precision`."""
    if x_BxK.dtype == jnp.bfloat16 and target_platform() == "cpu":
        # XLA's fast bfloat16 product wants the summed dimension last in memory; else it takes twice as long.
        x_KxB = with_layout_constraint(x_BxK.T, Layout((0, 1)))
        return _dot(x_KxB, grads_BxN, 1, 0, precision)
    return _dot(x_BxK, grads_BxN, 0, 0, precision)


_product.defvjp(_product_forward, _product_backward)


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int, precision: Rounding) -> jax.Array:
    axes = (((left_axis,), (right_axis,)), ((), ()))
    wide = full_precision(left.dtype)
    return jax.lax.dot_general(left, right, axes, precision=rounding(left, precision), preferred_element_type=wide)
