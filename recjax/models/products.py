"""Choice of the one who computes the products of a dense layer on CPUs, by its sizes.

XLA's own products are those of YNNPACK or Eigen; a program may be compiled with oneDNN's in their place, where the JAX
at hand has them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

Way = Literal["kernels", "xla"]
# XLA:CPU's options (JAX 0.12; earlier ones take them and do nothing). With YNNPACK's fusions on, few products are left.
_ONEDNN: dict[str, Any] = {"xla_cpu_experimental_onednn_custom_call": True, "xla_cpu_experimental_ynn_fusion_type": ""}


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
