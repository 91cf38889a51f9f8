"""The dense layers of recjax-kernels against float64, and against the plain layer."""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.kernels import BF16, F32, check_sums
from support.problems import mesh_of

from recjax import kernels
from recjax.models.dense import LayerShape, Products, Way, Ways, dense
from recjax.models.layers import Linear
from recjax.parallel.mesh import MODEL_AXES

needs_them = pytest.mark.skipif(not kernels.installed(), reason="not installed: pip install ./kernels")


def check_dense(
    B: int, K: int, N: int, dtype: Any, biased: bool, relu: bool, layer: Callable[..., Any] = kernels.dense
) -> None:
    """Forward and gradients of a random layer against float64."""
    rng = np.random.default_rng(B + 7 * K + 31 * N)
    x = rng.standard_normal((B, K)).astype(dtype)
    kernel, bias = (rng.standard_normal(s).astype(np.float32) for s in ((K, N), (N,)))
    cotangent = rng.standard_normal((B, N)).astype(dtype)
    given = (jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(bias) if biased else None)
    y, back = jax.vjp(functools.partial(layer, relu=relu), *given)
    into = back(jnp.asarray(cotangent))
    assert y.dtype == into[0].dtype == dtype and into[1].dtype == jnp.float32

    x64, w64 = x.astype(np.float64), kernel.astype(dtype).astype(np.float64)
    before = x64 @ w64 + (bias if biased else 0)
    y_magnitudes = np.abs(x64) @ np.abs(w64) + np.abs(bias)
    check_sums(np.asarray(y), np.maximum(before, 0) if relu else before, y_magnitudes, K + 1)
    dy = cotangent.astype(np.float64) * ((np.asarray(y) > 0) if relu else 1)  # its own signs: beside 0 sums may differ
    check_sums(np.asarray(into[0]), dy @ w64.T, np.abs(dy) @ np.abs(w64.T), N)
    check_sums(np.asarray(into[1]), x64.T @ dy, np.abs(x64.T) @ np.abs(dy), B)
    if biased:
        check_sums(np.asarray(into[2]), dy.sum(axis=0), np.abs(dy).sum(axis=0), B)
    else:
        assert into[2] is None


# B, K, N beside tiles of 6, 14, 16 and 32 and their parts; terms of one and of several blocks (of 512, or 256 or 512
# pairs), odd and even; one output; one sample; enough for several threads; and nothing at all.
LAYERS = [(1, 1, 1), (7, 13, 33), (15, 1027, 17), (30, 64, 16), (300, 41, 1), (1100, 29, 65), (3, 5, 1500)]
LAYERS += [(5, 2051, 3), (700, 130, 120), (130, 1100, 70), (1100, 65, 40), (0, 3, 4), (3, 0, 4), (2, 3, 0)]


@needs_them
@pytest.mark.parametrize("ways", list(itertools.product(("kernels", "xla"), repeat=3)), ids="-".join)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_by_kernels_and_by_xla_make_one_layer(dtype: Any, ways: tuple[Way, Way, Way]) -> None:
    layer = functools.partial(dense, products=Products(layers=((LayerShape(300, 41, 33, str(dtype)), Ways(*ways)),)))
    for biased, relu in ((True, True), (False, True), (True, False)):
        check_dense(300, 41, 33, dtype, biased, relu, layer)

    def both_ways(x: Any, w: Any, b: Any, grads: Any) -> Any:
        return jax.vjp(functools.partial(layer, relu=True), x, w, b)[1](grads)

    x, grads = jnp.ones((300, 41), dtype), jnp.ones((300, 33), dtype)
    text = str(jax.make_jaxpr(both_ways)(x, jnp.ones((41, 33)), jnp.ones(33), grads))
    names = ("recjax_dense_forward", "recjax_dense_into_input", "recjax_dense_into_kernel")
    assert [name in text for name in names] == [way == "kernels" for way in ways]


@needs_them
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_dense_is_a_layer_and_its_gradients(shape: Any, dtype: Any, variant: str) -> None:
    B, K, N = shape
    check_dense(B, K, N, dtype, biased=True, relu=True)


@needs_them
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 50), st.integers(1, 80), st.integers(1, 80), st.booleans(), st.booleans(), st.booleans())
def test_dense_of_any_shape(B: int, K: int, N: int, narrow: bool, biased: bool, relu: bool) -> None:
    check_dense(B, K, N, BF16 if narrow else F32, biased, relu)


@needs_them
def test_dense_by_hand(variant: str) -> None:
    x, kernel = jnp.array([[1.0, 2], [3, 4]]), jnp.array([[1.0, -1, 2], [10, 1, -1]])
    y, back = jax.vjp(lambda *layer: kernels.dense(*layer, relu=True), x, kernel, jnp.array([0.5, 0, -1]))
    assert y.tolist() == [[21.5, 1, 0], [43.5, 1, 1]]  # before ReLU: [21.5, 1, -1], [43.5, 1, 1]
    into_x, into_kernel, into_bias = back(jnp.array([[1.0, 10, 100], [2, 20, 200]]))
    assert into_x.tolist() == [[1 - 10, 10 + 10], [2 - 20 + 400, 20 + 20 - 200]]
    assert into_kernel.tolist() == [[7, 70, 600], [10, 100, 800]]
    assert into_bias.tolist() == [3, 30, 200]


@needs_them
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_dense_and_values_that_are_not_finite(dtype: Any, variant: str) -> None:
    x, kernel = np.ones((40, 36), dtype), np.full((36, 50), 2, np.float32)
    x[3, 5], x[8, 19] = np.nan, -np.inf
    kernel[:, 7] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # a NaN that rounding its bits would make -0
    kernel[2, 49] = np.inf
    y, back = jax.vjp(
        lambda *layer: kernels.dense(*layer, relu=True), jnp.asarray(x), jnp.asarray(kernel), jnp.zeros(50)
    )
    nan, result = np.zeros((40, 50), bool), np.asarray(y)
    nan[3], nan[:, 7], nan[8, 49] = True, True, True  # the last is inf - inf
    assert (np.isnan(result) == nan).all()
    assert (result[8][~nan[8]] == 0).all() and np.isposinf(result[0, 49])
    dx, dkernel, dbias = (np.asarray(g) for g in back(jnp.full((40, 50), np.nan, dtype).at[:, :49].set(1)))
    # No gradient where the result is NaN or 0; elsewhere the cotangent as it is.
    assert dbias[:49].tolist() == [0 if n == 7 else 38 for n in range(49)] and np.isnan(dbias[49])
    assert np.isnan(dkernel[5, 0])  # masked by 0, times a NaN of x
    assert np.isnan(dx[0]).all()


@needs_them
def test_dense_rounds_bfloat16_once_after_bias_and_relu(variant: str) -> None:
    x, kernel = jnp.ones((1, 1), jnp.bfloat16), jnp.full((1, 2), 1 + 2.0**-8)  # W rounds to 1: ties to even
    bias = jnp.array([2.0**-8, 3 * 2.0**-8])
    assert kernels.dense(x, kernel, bias, relu=True).tolist() == [[1, 1 + 2.0**-6]]


@needs_them
def test_dense_below_the_least_normal_number(variant: str) -> None:
    """Such factors count as 0 with AVX512_BF16 always, and in all arithmetic of the threads on which XLA runs."""
    tiny, large = 2.0**-130, 2.0**120
    for dtype in (F32, BF16):
        x, kernel = np.full((3, 4), tiny, dtype), np.full((4, 2), large, np.float32)
        y = np.asarray(kernels.dense(jnp.asarray(x), jnp.asarray(kernel), None, relu=False)).astype(np.float64)
        assert (y == 0).all()


@needs_them
@pytest.mark.parametrize("scale", [1.0, 2.0**-50, 2.0**60])
def test_dense_in_float32_errs_less_than_adding_up_in_float32(scale: float, variant: str) -> None:
    """Also where factors are taken apart for AMX: whoever adds up rounded products one by one errs more."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) * np.float32(scale) for s in ((64, 1500), (1500, 48)))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    one_by_one = np.zeros(exact.shape, np.float32)
    for k in range(1500):
        one_by_one += x[:, k, None] * w[k]
    errors = [np.sqrt(np.square(y - exact).mean()) for y in (product(x, w), one_by_one)]
    assert 0 < errors[0] < errors[1]


@needs_them
def test_dense_in_float32_of_one_term_errs_by_its_rounding(variant: str) -> None:
    rng = np.random.default_rng(0)
    x, w = np.zeros((500, 40), np.float32), rng.standard_normal((40, 500)).astype(np.float32)
    x[:, 7] = rng.standard_normal(500)  # all others are 0
    exact = x[:, 7:8].astype(np.float64) * w[7]
    assert (np.abs(product(x, w) - exact) <= 2 * 2.0**-24 * np.abs(exact)).all()


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The product, in float64."""
    return np.asarray(kernels.dense(jnp.asarray(x), jnp.asarray(w), None, relu=False)).astype(np.float64)


@needs_them
def test_dense_beside_products_of_xla(variant: str) -> None:
    """Both may use AMX, whose tiles a thread must set up anew for each."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((512, 256), (256, 256)))

    @jax.jit
    def layers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = kernels.dense(x, w.astype(jnp.float32), None, relu=True)
        z = jax.lax.dot(y, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        return y, kernels.dense(z, w.astype(jnp.float32), None, relu=True)

    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    for _ in range(3):
        y, again = (np.asarray(a).astype(np.float64) for a in layers(x))
        check_sums(y.astype(BF16), np.maximum(x64 @ w64, 0), np.abs(x64) @ np.abs(w64), 256)
        z = np.asarray(jnp.asarray(y @ w64, jnp.bfloat16)).astype(np.float64)
        np.testing.assert_allclose(again, np.maximum(z @ w64, 0), rtol=0.05, atol=0.02 * np.abs(z @ w64).max())


@needs_them
def test_dense_is_the_plain_layer_and_drops_the_gradient_that_nobody_wants() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((60, 40)), jnp.float32)
    layer = Linear(40, 30, kernel=0.2, bias=0.1, relu=True, dtype=jnp.float32, rngs=nnx.Rngs(0))

    def loss(layer: Linear, x: jax.Array) -> jax.Array:
        return jnp.sin(layer(x)).sum()

    ours = jax.grad(loss, argnums=(0, 1))(layer, x)
    with kernels.switched_off():
        plain = jax.grad(loss, argnums=(0, 1))(layer, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    compiled = jax.jit(jax.grad(loss)).lower(layer, x).compile().as_text() or ""
    assert "recjax_dense_into_kernel" in compiled and "recjax_dense_into_input" not in compiled


SUMS = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from recjax import kernels

rng = np.random.default_rng(0)
found = hashlib.sha256()
for dtype in (jnp.float32, jnp.bfloat16):
    x, w, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1500, 130), (130, 200), (200,)))
    both = jax.jit(lambda x, w, b: (y := jax.vjp(lambda *l: kernels.dense(*l, relu=True), x, w, b))[1](y[0]))
    for _ in range(3):
        once = b"".join(np.asarray(g).tobytes() for g in both(x.astype(dtype), w, b))
    found.update(once)
print(found.hexdigest())
"""


@needs_them
def test_dense_gives_the_same_bits_on_any_number_of_threads() -> None:
    digests = []
    for threads in ("1", "2", "5"):
        environment = os.environ | {"NPROC": threads, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True)
        digests.append(done.stdout)
    assert digests[0] and digests == digests[:1] * 3


@needs_them
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_dense_on_three_devices_sums_the_gradients_of_what_all_hold(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, kernel, bias = (rng.standard_normal(s).astype(np.float32) for s in ((60, 20), (20, 40), (40,)))
    x = x.astype(dtype)

    def grads(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> Any:
        def loss(*layer: jax.Array) -> jax.Array:
            return jnp.square(kernels.dense(*layer, relu=True).astype(jnp.float32)).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, bias)

    split = P(MODEL_AXES)
    mapped = jax.shard_map(
        grads, mesh=mesh_of(3), in_specs=(split, P(), P()), out_specs=(split, P(), P()), check_vma=True
    )
    for a, b in zip(jax.jit(mapped)(x, kernel, bias), jax.jit(grads)(x, kernel, bias), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-4, atol=1e-3)
