"""`recjax export --format onnx`: onnxruntime gives what the dense oracle gives, for every model and encoding."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exports import ROWS, TASKS, exported, rows_of, truth_of, untrained

import recjax
from recjax.data.pipeline import batches
from recjax.errors import ConfigError
from recjax.serving import loader
from recjax.serving.export import write
from recjax.train.build import build_trainer

pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
# Full, as all that needs an extra.
pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

from recjax.serving.onnx_graph import OPSET, Graph, add_module  # noqa: E402  # needs onnx


def check(tmp_path, quantize, *overrides, user=()):
    trainer, state = untrained(*overrides)
    model = exported(trainer, state, tmp_path / "made", quantize, format="onnx", user=user)
    batch, given = rows_of(trainer)
    truth = truth_of(trainer, state, batch, tmp_path / "made")
    np.testing.assert_allclose(model(**given), truth, rtol=1e-5, atol=1e-5)
    return model, given


def test_equals_the_oracle(tmp_path):
    model, given = check(tmp_path, "int8", user=["sparse_0", "sparse_1"])
    assert {"program.onnx", "loader.py", "tables/0000.npy"} <= set(model.manifest["files"])
    with pytest.raises(loader.InputError, match="id 30 of 'sparse_0' in row 0 is out of range"):
        model(**given | {"ids": given["ids"] | {"sparse_0": given["ids"]["sparse_0"] * 0 + 30}})


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantize", "overrides"),
    [
        ("none", TASKS),
        pytest.param("none", ("model=ple", "data.labels=binary,number"), marks=pytest.mark.wide),
        pytest.param("none", ("model=shared_bottom", "data.labels=binary,number"), marks=pytest.mark.wide),
        ("bfloat16", ("model.interaction=cat", "model.batch_norm=true", "data.dense=0")),
        ("int4", ("embedding.dim=5", "model.interaction_itself=true")),
        ("none", ("model=deepfm",)),
        ("int4", ("model=dcnv2", "embedding.pooling=mean")),
        ("int8", ("embedding.dtype=bfloat16", "model=wide_deep")),
    ],
)
def test_models_and_encodings(tmp_path, quantize, overrides):
    check(tmp_path, quantize, *overrides)


def by_hand(folder, batch):
    """Logits of an exported DLRM in float64, from its files."""
    manifest, file = loader.read_manifest(folder), np.load(folder / "parameters.npz")
    leaves = {n: file[f"dense.{i:04}"].astype(np.float64) for i, n in enumerate(manifest["parameters"]["dense"])}

    def mlp(name, x, layers):
        for k in range(layers):
            x = x @ leaves[f"{name}.layers.{k}.kernel.value"] + leaves[f"{name}.layers.{k}.bias.value"]
            x = x if name == "top" and k == layers - 1 else np.maximum(x, 0)
        return x

    x = mlp("bottom", batch.dense.astype(np.float64), 2)
    rows = [
        np.load(folder / manifest["tables"][each["table"]]["file"])[batch.bags[each["feature"]].ids[:, 0]]
        for each in manifest["lookups"]
    ]
    vectors = np.stack([x, *rows], axis=1)
    i, j = np.tril_indices(vectors.shape[1], -1)
    return mlp("top", np.concatenate([x, (vectors @ vectors.transpose(0, 2, 1))[:, i, j]], axis=1), 3)[:, 0]


def test_logits_near_zero_are_as_exact_as_by_jax(tmp_path):
    """A logit is a sum that cancels: near 0 its rounding exceeds 1e-5 of it, by both."""
    config = recjax.load("synthetic", ["data.test_rows=4096", *ROWS[:2], "mesh.devices=1"])
    trainer = build_trainer(config)
    (batch,) = batches(trainer.source, "test", 4096, epochs=1)
    given = {"ids": {name: bags.ids for name, bags in batch.bags.items()}, "dense": batch.dense}
    found = {}
    for format in ("stablehlo", "onnx"):
        found[format] = exported(trainer, trainer.init_state(), tmp_path / format, format=format)(**given)
    truth = by_hand(tmp_path / "stablehlo", batch)
    assert np.abs(truth).min() < 1e-3 and np.abs(truth).max() > 0.5, "some cancel"
    errors = {format: np.abs(logits - truth).max() for format, logits in found.items()}
    assert errors["onnx"] <= 2 * errors["stablehlo"] < 1e-6
    score = {name: 1 / (1 + np.exp(-logits.astype(np.float64))) for name, logits in [*found.items(), ("", truth)]}
    for format in found:
        np.testing.assert_allclose(score[format], score[""], rtol=0, atol=1e-7)


def run(function, *arrays):
    """Returns what onnxruntime makes of a function of arrays whose first axis is that of samples."""
    from onnx import TensorProto, helper

    (b,) = jax.export.symbolic_shape("b")
    graph = Graph()
    names = [f"x{number}" for number in range(len(arrays))]
    samples = graph.node("Shape", names[0], start=0, end=1)
    like = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in arrays]
    shape = add_module(graph, function, like, names, samples, "out")
    info = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), ["b", *x.shape[1:]])
        for name, x in zip(names, arrays, strict=True)
    ]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, list(map(str, shape)))
    made = helper.make_graph(graph.nodes, "made", info, [out], graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


def rotated(x):
    return jnp.transpose(x, (0, 2, 1))[:, ::-1, 1:3]


ONES = np.ones((3, 4), np.float32)
FUNCTIONS = {
    "activations": lambda x: jax.nn.gelu(x) + jax.nn.softplus(x) + jax.nn.silu(x) + jax.nn.leaky_relu(x) + jnp.tanh(x),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1) + jax.nn.log_softmax(x, axis=1),
    "norm": lambda x: (x - x.mean(axis=2, keepdims=True)) * jax.lax.rsqrt(x.var(axis=2, keepdims=True) + 1e-5) ** 3,
    "choices": lambda x: jnp.where((x > 0.3) & (x != 1) | (x <= -1), jnp.clip(x, -0.5, 0.9), jnp.abs(x) ** 1.5),
    "indices": lambda x: x[:, np.array([[2, -1], [0, 1]])].sum(axis=3) + x[:, :1, :2],
    "columns": lambda x: rotated(x).reshape(x.shape[0], -1) @ np.arange(16, dtype=np.float32).reshape(8, 2),
    "products": lambda x: jnp.einsum("bik,bjk->bij", x, x)[:, 0] + jnp.einsum("bik,ik->bk", x, ONES)[:, :3],
    "made whole": lambda x: jnp.concatenate([jnp.broadcast_to(np.float32(2), (x.shape[0], 3)), x.max(axis=2)], axis=1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations(name):
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    function = FUNCTIONS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        truth = np.asarray(function(x))
        np.testing.assert_allclose(run(function, x), truth, rtol=1e-5, atol=1e-6)
    assert np.ptp(truth) > 0.1


def test_what_is_not_known_is_refused(tmp_path):
    x = np.ones((5, 4), np.float32)
    for function, words in (
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[:, 0] * 0, x.T)[0], "computes 'scan', which"),
        (lambda x: jnp.sort(x, axis=1), "computes 'sort', which"),
        (lambda x: jnp.broadcast_to(jnp.float32(1), (2 * x.shape[0],)), r"an axis of 2\*b"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            run(function, x)
        assert "stablehlo" in str(raised.value)
    trainer, state = untrained("compute_dtype=bfloat16")
    with pytest.raises(ConfigError, match="computes in bfloat16, which onnxruntime does not multiply"):
        write(trainer, state, 0, tmp_path / "made", format="onnx")
    assert not list(tmp_path.iterdir())


def test_bags_of_any_size_that_are_not_pooled_are_refused(tmp_path):
    history = Path(__file__).parents[1] / "models" / "history_preset.py"
    trainer = build_trainer(recjax.load(str(history), [*ROWS, "mesh.devices=1"]))
    with pytest.raises(ConfigError, match=r"feature 'sparse_1' is jagged and not pooled, .* written as ONNX"):
        write(trainer, trainer.init_state(), 0, tmp_path / "made", format="onnx")
