"""Models of several tasks: by the formulas of their papers, and by torch-rechub with its weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.models.mmoe import MMoEConfig
from recjax.models.ple import PLEConfig
from recjax.models.shared_bottom import SharedBottomConfig
from recjax.models.stateful import BatchNorm, Dropout

DIMS, OUTPUTS = {"a": 3, "b": 3}, {"click": 1, "stars": 4, "rating": 1}
CONFIGS: dict[str, Any] = {
    "shared_bottom": SharedBottomConfig((6, 5), (4,)),
    "mmoe": MMoEConfig(3, (6, 5), (4,)),
    "ple": PLEConfig(3, 2, 1, (6, 5), (4,)),
    "cgc": PLEConfig(1, 1, 2, (5,), ()),
}


def made(config: Any, outputs: dict[str, int] = OUTPUTS, dense: int = 2) -> Any:
    return config.build(dense, DIMS, dtype=jnp.dtype(jnp.float32), seed=3, outputs=outputs)


def inputs(samples: int = 7, dense: int = 2) -> tuple[jax.Array, dict[str, jax.Array], np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, dense)).astype(np.float32)
    pooled = {name: rng.normal(size=(samples, d)).astype(np.float32) for name, d in DIMS.items()}
    return jnp.asarray(x), jax.tree.map(jnp.asarray, pooled), np.concatenate([x, *pooled.values()], axis=1)


def mlp(layers: Any, x: np.ndarray, linear_output: bool = False) -> np.ndarray:
    for number, layer in enumerate(layers):
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        if not (linear_output and number == len(layers) - 1):
            x = np.maximum(x, 0)
    return x


def gated(gate: Any, x: np.ndarray, experts: list[np.ndarray]) -> np.ndarray:
    z = np.exp(mlp([gate.linear], x, linear_output=True))
    return sum((z[:, e] / z.sum(axis=1))[:, None] * expert for e, expert in enumerate(experts))


def by_formula(kind: str, model: Any, x: np.ndarray) -> list[np.ndarray]:
    """Inputs of each tower."""
    if kind == "shared_bottom":
        return [mlp(model.bottom.layers, x)] * len(OUTPUTS)
    if kind == "mmoe":
        experts = [mlp(expert.layers, x) for expert in model.experts]
        return [gated(gate, x, experts) for gate in model.gates]
    seen = [x] * (len(OUTPUTS) + 1)
    for number, level in enumerate(model.levels):
        own = [[mlp(e.layers, seen[t]) for e in experts] for t, experts in enumerate(level.specific)]
        shared = [mlp(e.layers, seen[-1]) for e in level.shared]
        following = [gated(gate, seen[t], own[t] + shared) for t, gate in enumerate(level.gates)]
        if number < len(model.levels) - 1:
            following.append(gated(level.shared_gate, seen[-1], [e for experts in own for e in experts] + shared))
        seen = following
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formulas(name: str) -> None:
    model = made(CONFIGS[name])
    dense, pooled, x = inputs()
    found = model(dense, pooled)
    assert {task: y.shape for task, y in found.items()} == {"click": (7,), "stars": (7, 4), "rating": (7,)}
    seen = by_formula(CONFIGS[name].kind, model, x.astype(np.float64))
    for t, task in enumerate(OUTPUTS):
        expected = mlp(model.towers.towers[t].layers, seen[t], linear_output=True)
        np.testing.assert_allclose(found[task], expected.reshape(found[task].shape), rtol=1e-4, atol=1e-5)


def _folded(mlp: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Kernels and biases of a torch-rechub MLP in evaluation, with what its BatchNorms do to each output."""
    layers: list[tuple[np.ndarray, np.ndarray]] = []
    for part in mlp.mlp:
        values = {name: value.detach().numpy().astype(np.float64) for name, value in part.state_dict().items()}
        if "running_var" in values:
            factor = values["weight"] / np.sqrt(values["running_var"] + part.eps)
            kernel, bias = layers[-1]
            layers[-1] = kernel * factor, (bias - values["running_mean"]) * factor + values["bias"]
        elif values:
            layers.append((values["weight"].T, values["bias"]))
    return layers


def _take(ours: Any, theirs: Any) -> None:
    """Gives the layers of an MLP, or a gate's, the weights of theirs."""
    layers = [ours.linear] if hasattr(ours, "linear") else ours.layers
    folded = _folded(theirs)
    assert len(layers) == len(folded)
    for layer, (kernel, bias) in zip(layers, folded, strict=True):
        assert layer.kernel.shape == kernel.shape and layer.bias.shape == bias.shape
        layer.kernel[...], layer.bias[...] = jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)


@pytest.mark.parametrize("name", ["shared_bottom", "mmoe", "ple", "cgc"])
def test_the_logits_of_torch_rechub_with_its_weights(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")  # which torch-rechub imports
    multi_task = pytest.importorskip("torch_rechub.models.multi_task", exc_type=ImportError)
    features_of = pytest.importorskip("torch_rechub.basic.features")

    torch.manual_seed(0)
    config, tasks = CONFIGS[name], ["a", "b"]
    features = [features_of.SparseFeature(feature, 10, dim) for feature, dim in DIMS.items()]
    towers = [{"dims": list(config.tower)} for _ in tasks]
    expert = {"dims": list(config.bottom if name == "shared_bottom" else config.expert)}
    types = ["regression"] * 2  # which gives the logits themselves
    theirs: Any = {
        "shared_bottom": lambda: multi_task.SharedBottom(features, types, expert, towers),
        "mmoe": lambda: multi_task.MMOE(features, types, config.experts, expert, towers),
        "ple": lambda: multi_task.PLE(features, types, config.levels, config.specific, config.shared, expert, towers),
        "cgc": lambda: multi_task.PLE(features, types, 1, config.specific, config.shared, expert, towers),
    }[name]()
    ids = {feature: torch.randint(0, 10, (64,)) for feature in DIMS}
    theirs.train()
    for _ in range(3):
        theirs(ids)  # its running statistics move
    theirs.eval()
    ours = made(config, dict.fromkeys(tasks, 1), dense=0)
    for mine, other in zip(ours.towers.towers, theirs.towers, strict=True):
        _take(mine, other)
    if name == "shared_bottom":
        _take(ours.bottom, theirs.bottom_mlp)
    elif name == "mmoe":
        for mine, other in (
            *zip(ours.experts, theirs.experts, strict=True),
            *zip(ours.gates, theirs.gates, strict=True),
        ):
            _take(mine, other)
    else:
        for level, other in zip(ours.levels, theirs.cgc_layers, strict=True):
            specific = [e for experts in level.specific for e in experts]
            pairs = [(specific, other.experts_specific), (level.shared, other.experts_shared)]
            for mine, of_theirs in (*pairs, (level.gates, other.gates_specific)):
                for one, another in zip(mine, of_theirs, strict=True):
                    _take(one, another)
            if level.shared_gate is not None:
                _take(level.shared_gate, other.gate_shared)
    tables = {f: theirs.embedding.embed_dict[f].weight.detach().numpy() for f in DIMS}
    pooled = {f: jnp.asarray(tables[f][ids[f].numpy()]) for f in DIMS}
    found = ours(jnp.zeros((64, 0)), pooled)
    expected = theirs(ids).detach().numpy()
    assert expected.std() > 0.01
    np.testing.assert_allclose(np.stack([found[t] for t in tasks], axis=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MMoEConfig(experts=0),
        lambda: PLEConfig(levels=0),
        lambda: PLEConfig(shared=0),
        lambda: MMoEConfig(4, ()),
        lambda: SharedBottomConfig(()),
        lambda: SharedBottomConfig(dropout=1.0),
    ],
)
def test_shapes_that_cannot_be(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_settings_put_batch_norm_and_dropout_after_every_hidden_layer() -> None:
    how: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32), "seed": 0}
    model = DLRMConfig((4, 3), (5, 4, 1), batch_norm=True, dropout=0.5).build(2, {"a": 3, "b": 3}, **how)
    found = [type(node) for _, node in nnx.iter_graph(model)]
    assert (found.count(BatchNorm), found.count(Dropout)) == (4, 4)
    plain = DLRMConfig((4, 3), (5, 4, 1)).build(2, {"a": 3, "b": 3}, **how)
    assert not [node for _, node in nnx.iter_graph(plain) if isinstance(node, BatchNorm | Dropout | nnx.BatchStat)]
