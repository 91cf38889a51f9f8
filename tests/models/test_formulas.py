"""DCN-v2, DeepFM and Wide & Deep against their papers' formulas in plain NumPy, float64, sample by sample."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.problems import equations

from recjax import kernels
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.deepfm import DeepFMConfig
from recjax.models.dlrm import DLRMConfig
from recjax.models.layers import CrossNet, embedded, pair_sum
from recjax.models.wide_deep import WideDeepConfig

pytestmark = pytest.mark.light_compile

B = 40


def build(config: Any, dense: int, dims: dict[str, int], dtype: Any = jnp.float32, seed: int = 0) -> Any:
    """The model with its zeros (biases, first-order weights) replaced, so that forgetting one would show."""
    if config.first_order:
        dims = dims | {f"{name}.linear": 1 for name in dims}
    model = config.build(dense, dims, dtype=dtype, seed=seed)
    rng = np.random.default_rng(1)
    graphdef, parameters = nnx.split(model)

    def fill(x: jax.Array) -> jax.Array:
        return x if x.size and np.any(x) else jnp.asarray(rng.normal(size=x.shape), x.dtype)

    return nnx.merge(graphdef, jax.tree.map(fill, parameters))


def inputs(dense: int, dims: dict[str, int], first_order: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    dims = dims | ({f"{name}.linear": 1 for name in dims} if first_order else {})
    pooled = {name: rng.normal(size=(B, dim)).astype(np.float32) for name, dim in dims.items()}
    return rng.normal(size=(B, dense)).astype(np.float32), dict(reversed(pooled.items()))  # the order is the model's


def array(x: Any) -> np.ndarray:
    return np.asarray(x[...], np.float64)


def mlp(layers: Any, x: np.ndarray, last_relu: bool = False) -> np.ndarray:
    for i, layer in enumerate(layers):
        x = x @ array(layer.kernel) + array(layer.bias)
        if last_relu or i < len(layers) - 1:
            x = np.where(x > 0, x, 0)
    return x


def cross(net: CrossNet, x0: np.ndarray) -> np.ndarray:
    """Output by output and term by term."""
    x = x0
    for layer, w in enumerate(net.w):
        kernel, bias = array(w.kernel), array(w.bias)
        inner = x
        if len(net.v):
            v = array(net.v[layer].kernel)
            inner = np.array([sum(v[n, r] * x[n] for n in range(len(x))) for r in range(v.shape[1])])
        step = [sum(kernel[r, n] * inner[r] for r in range(len(inner))) + bias[n] for n in range(len(x))]
        x = np.array([x0[n] * step[n] + x[n] for n in range(len(x))])
    return x


def dcnv2(model: Any, x: np.ndarray, pooled: dict[str, np.ndarray], features: list[str]) -> float:
    x0 = np.concatenate([mlp(model.bottom.layers, x, last_relu=True), *(pooled[f] for f in features)])
    top = cross(model.cross, x0)
    if model.parallel:
        top = np.concatenate([top, mlp(model.deep.layers, x0, last_relu=True)])
    return float(mlp(model.top.layers, top)[0])


def first_order(part: Any, x: np.ndarray, pooled: dict[str, np.ndarray], features: list[str]) -> float:
    weights = array(part.weights_K)
    return sum(weights[k] * x[k] for k in range(len(x))) + sum(pooled[f + ".linear"][0] for f in features)


def deepfm(model: Any, x: np.ndarray, pooled: dict[str, np.ndarray], features: list[str]) -> float:
    factors = array(model.factors_KxD)
    fields = [x[k] * factors[k] for k in range(len(x))] + [pooled[f] for f in features]
    second = sum(sum(a * b for a, b in zip(u, v, strict=True)) for u, v in itertools.combinations(fields, 2))
    deep = mlp(model.deep.layers, np.concatenate(fields))[0]
    return float(first_order(model.first, x, pooled, features) + second + deep)


def wide_deep(model: Any, x: np.ndarray, pooled: dict[str, np.ndarray], features: list[str]) -> float:
    deep = mlp(model.deep.layers, np.concatenate([x, *(pooled[f] for f in features)]))[0]
    return float(first_order(model.wide, x, pooled, features) + deep)


Shape = tuple[str, tuple[int, ...], int, tuple[int, ...], Any, int]
SHAPES: list[Shape] = [
    ("low_rank", (5, 3), 2, (16, 8, 1), "stacked", 3),
    ("full_rank", (5, 3), 0, (16, 1), "stacked", 3),
    ("parallel", (5, 3), 2, (16, 8, 1), "parallel", 3),
    ("parallel_without_deep_layers", (5, 3), 0, (1,), "parallel", 3),
    ("without_bottom", (), 2, (16, 1), "stacked", 3),
    ("without_dense", (5, 3), 2, (16, 1), "stacked", 0),
]
EQUAL, MIXED = {"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 1, "c": 7}
CASES = [
    pytest.param(dcnv2, DCNv2Config(bottom, 3, rank, top, structure), dense, MIXED, id=f"dcnv2-{name}")
    for name, bottom, rank, top, structure, dense in SHAPES
]
CASES += [pytest.param(deepfm, DeepFMConfig((6, 5, 1)), dense, EQUAL, id=f"deepfm-{dense}") for dense in (3, 0)]
CASES += [pytest.param(wide_deep, WideDeepConfig((6, 1)), dense, MIXED, id=f"wide_deep-{dense}") for dense in (3, 0)]


@pytest.mark.parametrize(("formula", "config", "dense", "dims"), CASES)
def test_the_forward_pass_equals_numpy(formula, config, dense, dims):
    model = build(config, dense, dims, seed=3)
    x, pooled = inputs(dense, dims, config.first_order)
    logits = jax.jit(lambda x, p: model(x, p))(jnp.asarray(x), {k: jnp.asarray(v) for k, v in pooled.items()})
    expected = np.array([formula(model, x[i], {k: v[i] for k, v in pooled.items()}, list(dims)) for i in range(B)])
    assert logits.shape == (B,) and logits.dtype == jnp.float32
    assert expected.std() > 0.1 and expected.min() < 0 < expected.max()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [DCNv2Config((5, 4), 2, 3), DCNv2Config((5, 4), 2, 0, structure="parallel"), DeepFMConfig(), WideDeepConfig()],
    ids=lambda config: config.kind,
)
def test_bfloat16_computes_in_bfloat16_with_float32_parameters_and_logits(config):
    model = build(config, 3, EQUAL, jnp.bfloat16)
    graphdef, parameters = nnx.split(model)
    assert {x.dtype for x in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}
    x, pooled = inputs(3, EQUAL, config.first_order)
    with kernels.switched_off():
        jaxpr = jax.make_jaxpr(lambda x, p: nnx.merge(graphdef, parameters)(x, p))(x, pooled)
    assert [v.dtype for v in jaxpr.out_avals] == [jnp.float32]
    products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    dtypes = [{v.aval.dtype for v in e.invars} for e in products]
    assert dtypes == [{jnp.dtype("bfloat16")}] * (len(products) - 1) + [{jnp.dtype("float32")}]
    assert len(products) > 2
    # bfloat16 has 8 bits: near what float32 gives, but not that
    exact, coarse = build(config, 3, EQUAL)(x, pooled), model(x, pooled)
    np.testing.assert_allclose(coarse, exact, rtol=0.1, atol=0.3)
    assert not np.allclose(coarse, exact, rtol=1e-5, atol=1e-5)


def test_pairs_by_hand():
    vectors = jnp.asarray([[[1, 2], [3, 4], [5, 6]], [[1, 0], [0, 1], [2, 0]]], jnp.float32)
    assert pair_sum(vectors).tolist() == [11 + 17 + 39, 2]


def test_a_cross_by_hand():
    """x_1 = x_0 * (W x_0 + b) + x_0 with W = [[1, 2], [0, 3]], b = (1, -1), x_0 = (2, 5)."""
    net = CrossNet(2, 1, 0, dtype=jnp.float32, rngs=nnx.Rngs(0))
    net.w[0].kernel[...] = jnp.asarray([[1.0, 0], [2, 3]])  # inputs are rows
    net.w[0].bias[...] = jnp.asarray([1.0, -1])
    assert net(jnp.asarray([[2.0, 5]])).tolist() == [[2 * (12 + 1) + 2, 5 * (15 - 1) + 5]]


@functools.cache
def parameters(config: Any, dense: int, features: int, dim: int) -> int:
    dims = {f"f{i}": dim for i in range(features)}
    if config.first_order:
        dims |= {f"{name}.linear": 1 for name in dims}
    model = nnx.eval_shape(lambda: config.build(dense, dims, dtype=jnp.float32, seed=0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def layers(*widths: int) -> int:
    return sum(m * n + n for m, n in itertools.pairwise(widths))


@pytest.mark.full
def test_the_number_of_parameters_of_the_published_shapes():
    bottom, top = (512, 256, 128), (1024, 1024, 512, 256, 1)
    bottom_count = layers(13, *bottom)
    assert 27 * 128 == 3456 and 128 + 27 * 26 // 2 == 479
    assert parameters(DLRMConfig(bottom, top), 13, 26, 128) == bottom_count + layers(479, *top) == 2_368_897
    crosses = 3 * (2 * 3456 * 512 + 3456)
    dcn = parameters(DCNv2Config(bottom, 3, 512, top), 13, 26, 128)
    assert dcn == bottom_count + crosses + layers(3456, *top) == 16_044_545
    full = parameters(DCNv2Config(bottom, 3, 0, top), 13, 26, 128)
    assert full == bottom_count + 3 * (3456 * 3456 + 3456) + layers(3456, *top)
    parallel = parameters(DCNv2Config(bottom, 3, 512, top, "parallel"), 13, 26, 128)
    assert parallel == bottom_count + crosses + layers(3456, *top[:-1]) + (3456 + 256 + 1)
    assert parameters(DeepFMConfig((400, 400, 1)), 13, 26, 10) == layers(390, 400, 400, 1) + 13 * 10 + 13
    assert parameters(WideDeepConfig((400, 400, 1)), 13, 26, 10) == layers(273, 400, 400, 1) + 13


def test_crosses_start_xavier_normal_with_zero_bias():
    net = CrossNet(600, 2, 150, dtype=jnp.float32, rngs=nnx.Rngs(0))
    sigma = math.sqrt(2 / 750)
    kernels = [array(layer.kernel) for layer in (*net.v, *net.w)]
    for kernel in kernels:
        assert abs(kernel.std() / sigma - 1) < 5 / math.sqrt(2 * kernel.size)
        for width, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
            inside = (np.abs(kernel) < width * sigma).mean()
            assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / kernel.size)
    assert [k.shape for k in kernels] == [(600, 150)] * 2 + [(150, 600)] * 2
    assert abs(np.corrcoef(kernels[0].ravel(), kernels[1].ravel())[0, 1]) < 0.02
    assert all(not array(layer.bias).any() for layer in net.w)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (DCNv2Config, {"bottom": (8, 0)}, "bottom is 8-0; it has layers of width 1 or more"),
        (DCNv2Config, {"top": ()}, "top is empty; it needs at least one layer"),
        (DCNv2Config, {"top": (8, 3)}, "top ends in 3 outputs; it must end in 1"),
        (DCNv2Config, {"cross_layers": 0}, "cross_layers is 0"),
        (DCNv2Config, {"rank": -1}, "rank is -1; give 1 or more, or 0"),
        (DeepFMConfig, {"deep": ()}, "deep is empty"),
        (WideDeepConfig, {"deep": (8, 2)}, "deep ends in 2 outputs"),
    ],
)
def test_shapes_that_cannot_be(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_a_factorization_machine_needs_equal_dimensions():
    with pytest.raises(ConfigError, match=r"all need 4 columns like that of a, .* b \(1\), c \(7\)\. Give all one"):
        build(DeepFMConfig(), 3, MIXED)
    many = {"a": 4} | {f"f{i}": 5 for i in range(7)}
    with pytest.raises(ConfigError, match=r"f4 \(5\) and 2 more"):
        build(DeepFMConfig(), 3, many)


def test_first_order_models_need_first_order_lookups():
    assert embedded({"a": 3, "b": 2, "b.linear": 1, "a.linear": 1}) == {"a": 3, "b": 2}
    with pytest.raises(ConfigError, match="'b' has no first-order weights: this model needs 'b.linear' too"):
        embedded({"a": 3, "b": 2, "a.linear": 1})
