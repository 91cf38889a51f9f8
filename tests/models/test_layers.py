"""Rounding of products, as the equations of forward and backward pass say it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.problems import equations

import recjax
from recjax import kernels
from recjax.models import dense
from recjax.models.dense import THREE_PASSES, Precision
from recjax.models.dlrm import DLRMConfig
from recjax.models.layers import products_in
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_inputs, abstract_state

pytestmark = pytest.mark.light_compile


@pytest.fixture(autouse=True)
def plain():
    with kernels.switched_off():
        yield


def built(precision):
    with products_in(precision):
        model = DLRMConfig(bottom=(8, 4), top=(8, 1)).build(3, {"a": 4, "b": 4}, dtype=jnp.float32, seed=0)
    return model


def precisions(jaxpr):
    found = [e.params["precision"] for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    return collections.Counter(p[0] if isinstance(p, tuple) else p for p in found)


TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32


@pytest.mark.parametrize(
    ("precision", "platform", "expected"),
    [
        (Precision.HIGHEST, "gpu", Precision.HIGHEST),
        (Precision.HIGH, "gpu", TF32),
        (Precision.HIGH, "tpu", Precision.HIGH),
        (Precision.HIGH, "cpu", Precision.HIGH),
        (THREE_PASSES, "gpu", THREE_PASSES),
        (THREE_PASSES, "tpu", Precision.HIGHEST),
        (THREE_PASSES, "cpu", Precision.HIGHEST),
    ],
)
def test_every_product_has_the_precision_that_its_model_was_built_with(precision, platform, expected, monkeypatch):
    monkeypatch.setattr(dense, "target_platform", lambda: platform)
    graphdef, params = nnx.split(built(precision))
    pooled = {"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))}
    loss = jax.grad(lambda params, x, pooled: nnx.merge(graphdef, params)(x, pooled).sum(), argnums=(0, 2))
    jaxpr = jax.make_jaxpr(loss)(params, jnp.ones((2, 3)), pooled)
    found = precisions(jaxpr.jaxpr)
    assert found.keys() == {expected}
    assert found[expected] >= 3 * 5 - 1  # four layers and the interaction; nobody asks for the gradient of the input


def test_a_cpu_rounds_nothing_on_the_way():
    pooled = {"a": jnp.full((2, 4), 1 / 3), "b": jnp.full((2, 4), 0.7)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)
    exact, *logits = (built(precision)(x, pooled) for precision in (Precision.HIGHEST, Precision.HIGH, THREE_PASSES))
    for others in logits:
        np.testing.assert_array_equal(others, exact)


def test_three_products_of_two_halves_have_the_error_of_float32():
    """What a GPU does for `THREE_PASSES`, with factors rounded by hand, against float64."""

    def halves(x):
        def cut(x):  # to the 10 bits of mantissa of TensorFloat32, to nearest
            bits = x.view(np.uint32)
            return ((bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)

        return cut(x), cut(x - cut(x))

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((64, 367), (367, 64)))
    (x1, x2), (w1, w2) = halves(x), halves(w)
    exact, scale = x.astype(np.float64) @ w, np.abs(x.astype(np.float64)) @ np.abs(w)

    def error(found):
        return np.max(np.abs(found - exact) / scale)

    assert error(x1 @ w2 + x2 @ w1 + x1 @ w1) < 5e-7 < 2e-5 < error(x1 @ w1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("float32", Precision.HIGHEST),
        ("tensorfloat32", Precision.HIGH),
        ("tensorfloat32x3", Precision.HIGHEST),
        ("bfloat16", Precision.HIGHEST),
    ],
)
def test_compute_dtype_chooses(asked, expected):
    config = recjax.load("synthetic", f"compute_dtype={asked}", "mesh.devices=1", "data.train_rows=4096")
    trainer = build_trainer(config, weights=False)
    capacities = dict.fromkeys([g.name for g in trainer.bound.groups], 8)
    jaxpr = jax.make_jaxpr(trainer.step_program)(abstract_state(trainer), abstract_inputs(trainer, capacities))
    assert precisions(jaxpr.jaxpr).keys() == {expected}
