"""DLRM against a version of its own in NumPy, and its layers by hand."""

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
from recjax.models.dlrm import DLRM, DLRMConfig
from recjax.models.layers import Mlp, dot_interaction, linear


def test_the_order_of_the_pairs_by_hand():
    vectors = jnp.asarray([[[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 0], [0, 1], [1, 1], [2, 0]]], jnp.float32)
    #   (1,0)         (2,0)          (2,1)          (3,0)          (3,1)          (3,2)
    pairs = [[3 + 8, 5 + 12, 15 + 24, 7 + 16, 21 + 32, 35 + 48], [0, 1, 1, 2, 0, 2]]
    assert dot_interaction(vectors).tolist() == pairs
    #         (0,0) (1,0) (1,1)  (2,0) (2,1) (2,2)  (3,0) (3,1) (3,2) (3,3)
    itself = [[5, 11, 25, 17, 39, 61, 23, 53, 83, 113], [1, 0, 1, 1, 1, 2, 2, 0, 2, 4]]
    assert dot_interaction(vectors, True).tolist() == itself


def test_one_vector_has_no_pairs():
    assert dot_interaction(jnp.ones((3, 1, 2))).shape == (3, 0)
    assert dot_interaction(jnp.ones((3, 1, 2)), True).tolist() == [[2], [2], [2]]


@pytest.mark.parametrize("itself", [False, True])
def test_the_gradient_of_the_pairs_pair_by_pair(itself):
    """Of the plain formulation; test_kernels.py has the kernel's."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-5, 6, (3, 5, 4)).astype(np.float32)  # whole numbers: all sums are exact
    pairs = [(i, j) for i in range(5) for j in range(i + itself)]
    upstream = rng.integers(-5, 6, (3, len(pairs))).astype(np.float32)
    expected = np.zeros_like(vectors)
    for p, (i, j) in enumerate(pairs):  # d(v_i . v_j) = v_j dv_i + v_i dv_j
        expected[:, i] += upstream[:, p, None] * vectors[:, j]
        expected[:, j] += upstream[:, p, None] * vectors[:, i]
    with kernels.switched_off():
        _, backward = jax.vjp(lambda v: dot_interaction(v, itself), jnp.asarray(vectors))
    np.testing.assert_array_equal(backward(jnp.asarray(upstream))[0], expected)


def build(config: DLRMConfig, dense: int, features: int, dim: int, dtype: type = jnp.float32, seed: int = 0) -> DLRM:
    return config.build(dense, {f"f{i}": dim for i in range(features)}, dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    ("settings", "width"),
    [({}, 128 + 351), ({"interaction_itself": True}, 128 + 378), ({"interaction": "cat"}, 128 + 26 * 128)],
)
def test_the_width_of_the_published_models(settings, width):
    model = build(DLRMConfig(bottom=(8, 128), top=(4, 1), **settings), 13, 26, 128)
    assert model.top.layers[0].kernel[...].shape == (width, 4)


def numpy_dlrm(model: DLRM, dense: np.ndarray, pooled: list[np.ndarray], interaction: str, itself: bool) -> np.ndarray:
    """The published formula in float64, pair by pair."""

    def mlp(layers: Any, x: np.ndarray, last_relu: bool) -> np.ndarray:
        for i, layer in enumerate(layers):
            x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
            if last_relu or i < len(layers) - 1:
                x = x * (x > 0)
        return x

    logits = []
    for sample in range(len(dense)):
        vectors = [p[sample].astype(np.float64) for p in pooled]
        x = np.zeros(0)
        if dense.shape[1]:
            x = mlp(model.bottom.layers, dense[sample].astype(np.float64), last_relu=True)
            vectors.insert(0, x)
        if interaction == "dot":
            pairs = [(i, j) for i in range(len(vectors)) for j in range(i + 1 if itself else i)]
            joined = [*x, *(sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) for i, j in pairs)]
        else:
            joined = list(itertools.chain(*vectors))
        logits.append(mlp(model.top.layers, np.array(joined), last_relu=False)[0])
    return np.array(logits)


@pytest.mark.parametrize("K", [3, 0])
@pytest.mark.parametrize(("interaction", "itself"), [("dot", False), ("dot", True), ("cat", False)])
def test_the_forward_pass_equals_numpy(interaction, itself, K):
    config = DLRMConfig((7, 5), (6, 4, 1), interaction=interaction, interaction_itself=itself)
    model = build(config, K, 4, 5)
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(40, K)).astype(np.float32)
    pooled = [rng.normal(size=(40, 5)).astype(np.float32) for _ in range(4)]
    # the order is that of the features, not of the dict
    logits = model(jnp.asarray(dense), {f"f{i}": jnp.asarray(pooled[i]) for i in (2, 0, 3, 1)})
    expected = numpy_dlrm(model, dense, pooled, interaction, itself)
    assert logits.shape == (40,) and logits.dtype == jnp.float32
    assert expected.min() < 0 < expected.max()  # linear: a ReLU or sigmoid at the end would show
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_without_dense_features_the_embeddings_interact_alone_by_hand():
    model = build(DLRMConfig(top=(1,)), 0, 3, 2)
    model.top.layers[0].kernel[...] = jnp.asarray([[1.0], [10.0], [100.0]])
    model.top.layers[0].bias[...] = jnp.asarray([0.5])
    pooled = {"f0": jnp.asarray([[1.0, 2.0]]), "f1": jnp.asarray([[3.0, 4.0]]), "f2": jnp.asarray([[-5.0, 6.0]])}
    # <f1, f0> = 3 + 8, <f2, f0> = -5 + 12, <f2, f1> = -15 + 24
    assert model(jnp.zeros((1, 0)), pooled).tolist() == [1 * 11 + 10 * 7 + 100 * 9 + 0.5]
    assert not model.bottom.layers


def test_the_last_layer_has_a_relu_unless_it_is_to_be_linear():
    for linear_output, expected in ((True, -5.0), (False, 0.0)):
        mlp = Mlp(3, (2,), linear_output=linear_output, dtype=jnp.float32, rngs=nnx.Rngs(0))
        mlp.layers[0].kernel[...] = jnp.full((3, 2), 2.0)
        mlp.layers[0].bias[...] = jnp.ones(2)
        assert mlp(-jnp.ones((1, 3))).tolist() == [[expected] * 2]


def test_initial_weights_have_the_published_distribution():
    """Standard deviations within five standard errors; the bias counts outputs, which are not the inputs here."""
    n, m = 500, 800
    layer = linear(n, m, dtype=jnp.float32, rngs=nnx.Rngs(0))
    kernel, bias = np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...], np.float64)
    assert kernel.shape == (n, m) and bias.shape == (m,)
    for values, sigma in ((kernel.ravel(), math.sqrt(2 / (m + n))), (bias, math.sqrt(1 / m))):
        count = values.size
        assert abs(values.mean()) < 5 * sigma / math.sqrt(count)
        assert abs(values.std() / sigma - 1) < 5 / math.sqrt(2 * count)
        for width, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):  # normal, neither truncated nor uniform
            inside = (np.abs(values) < width * sigma).mean()
            assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_all_layers_of_a_model_start_that_way_from_the_seed():
    config = DLRMConfig((300, 200, 16), (400, 300, 1))
    model = build(config, 250, 3, 16)
    kernels = [np.asarray(layer.kernel[...]) for layer in (*model.bottom.layers, *model.top.layers)]
    for kernel in kernels:
        sigma = math.sqrt(2 / sum(kernel.shape))
        assert abs(kernel.std() / sigma - 1) < 5 / math.sqrt(2 * kernel.size)
    # layers do not repeat each other's numbers
    assert abs(np.corrcoef(kernels[0].ravel()[:3000], kernels[1].ravel()[:3000])[0, 1]) < 0.1
    same, other = build(config, 250, 3, 16), build(config, 250, 3, 16, seed=1)
    np.testing.assert_array_equal(same.top.layers[0].kernel[...], model.top.layers[0].kernel[...])
    assert (other.top.layers[0].kernel[...] != model.top.layers[0].kernel[...]).all()


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_bfloat16_computes_in_bfloat16_with_float32_parameters(interaction):
    model = build(DLRMConfig((7, 5), (6, 1), interaction=interaction), 3, 2, 5, jnp.bfloat16)
    graphdef, parameters = nnx.split(model)
    assert {x.dtype for x in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}

    def forward(dense, f0, f1):
        return nnx.merge(graphdef, parameters)(dense, {"f0": f0, "f1": f1})

    with kernels.switched_off():
        jaxpr = jax.make_jaxpr(forward)(jnp.ones((4, 3)), jnp.ones((4, 5)), jnp.ones((4, 5)))
    assert [v.dtype for v in jaxpr.out_avals] == [jnp.float32]  # the last layer: no coarse logits
    products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 4 + (interaction == "dot")
    dtypes = [{v.aval.dtype for v in e.invars} for e in products]
    assert dtypes == [{jnp.dtype("bfloat16")}] * (len(products) - 1) + [{jnp.dtype("float32")}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bottom": ()}, "at least one layer"),
        ({"top": ()}, "at least one layer"),
        ({"bottom": (8, 0)}, "width 1 or more"),
        ({"top": (-4, 1)}, "width 1 or more"),
        ({"top": (4, 2)}, "top ends in 2 outputs; it must end in 1"),
    ],
)
def test_shapes_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        DLRMConfig(**settings)


def test_sizes_that_do_not_fit_the_data():
    with pytest.raises(ConfigError, match=r"bottom ends in 16, but .* f0 \(8\), f1 \(8\)\. .*embedding.dim"):
        build(DLRMConfig(bottom=(64, 16)), 3, 2, 8)
    with pytest.raises(ConfigError, match=r"f0 has dimension 8, but .* f1 \(4\)\. .*embedding.dim"):
        DLRMConfig().build(0, {"f0": 8, "f1": 4}, dtype=jnp.float32, seed=0)
    with pytest.raises(ConfigError, match=r"have 1 categorical feature\(s\) and no dense ones\. .*interaction=cat"):
        build(DLRMConfig(), 0, 1, 16)
    assert build(DLRMConfig(interaction_itself=True), 0, 1, 16).top.layers[0].kernel[...].shape[0] == 1
    assert build(DLRMConfig(interaction="cat"), 0, 1, 16).top.layers[0].kernel[...].shape[0] == 16
    assert build(DLRMConfig(bottom=(64, 16), interaction="cat"), 3, 2, 8).top.layers[0].kernel[...].shape[0] == 32
