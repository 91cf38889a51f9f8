"""What is asked of a model's module, and what is said where one's own does not keep to it."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.dlrm import DLRMConfig
from recjax.train import module

HERE = re.escape(os.path.relpath(__file__))
X = jnp.linspace(-2.0, 2.0, 12).reshape(4, 3)


class Own(nnx.Module):
    """A module of somebody else, which gives what `give` makes of the product with its parameter [3, 2]."""

    def __init__(self, give: Any) -> None:
        self.w = nnx.Param(jnp.arange(6.0).reshape(3, 2))
        self.give = give

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, Any]) -> Any:
        return self.give(dense_BxK @ self.w[...])


CALLED = rf"the model Own \({HERE}:{Own.__call__.__code__.co_firstlineno}\)"


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    """Its config."""

    make: Any

    def build(self) -> Any:
        return self.make()


@pytest.fixture(autouse=True)
def never_looked_at(monkeypatch):
    monkeypatch.setattr(module, "_looked_at", set())


def traced(give: Any) -> Any:
    return jax.eval_shape(lambda x: module.outputs(Own(give), x, {}), X)


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda y: y[:, :1], r"an array of shape \[4, 1\], float32 .* return logits\[:, 0\]\."),
        (lambda y: y, r"an array of shape \[4, 2\], float32 .* return logits\[:, 1\] - logits\[:, 0\]\."),
        (lambda y: y.mean(), r"an array of shape \[\], float32 .* Keep the axis of the samples"),
        (lambda y: y[:3, 0], r"an array of shape \[3\], float32 .* Keep the axis of the samples"),
        (lambda y: y[:, 0] > 0, r"an array of shape \[4\], bool .* before it is rounded or compared"),
        (lambda y: y[:, 0].astype(int), r"an array of shape \[4\], int32 .* before it is rounded or compared"),
        (lambda y: (y[:, 0], y), r"a tuple of 2 .* Return the logits alone\."),
        (lambda y: {"logits": y[:, 0]}, r"a dict of 1 .* Return the logits alone\."),
        (lambda y: None, r"None .* Return the logits\."),
        (lambda y: 0.5, r"a float .* Return the logits\."),
    ],
)
def test_what_is_no_logit_a_sample_is_refused_while_tracing(give, words):
    with pytest.raises(ConfigError, match=rf"^{CALLED} gives .*{words}") as refused:
        traced(give)
    assert "of shape [4] of floats" in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_one_passes_in_any_precision(capsys):
    for dtype in (jnp.float32, jnp.bfloat16):
        assert traced(lambda y, dtype=dtype: y[:, 0].astype(dtype)).shape == (4,)
    assert capsys.readouterr().err == ""


def test_an_error_of_the_users_code_is_told_with_its_own_line():
    def give(y: jax.Array) -> jax.Array:
        return jnp.concatenate([y, y[:2]], axis=1)

    line = give.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"^{HERE}:{line}: the model Own fails with TypeError: .*shape") as refused:
        traced(give)
    assert "\n" not in str(refused.value) and "recjax.fit" in str(refused.value)
    assert isinstance(refused.value.__cause__, TypeError)
    with pytest.raises(ConfigError, match=rf"^{HERE}:\d+: the model Own fails with ZeroDivisionError: "):
        traced(lambda y: y[:, 0] / (1 // 0))
    with pytest.raises(ConfigError, match=rf"^{HERE}:\d+: the model OwnConfig fails with KeyError: 'gone'"):
        config = OwnConfig(lambda: {}["gone"])
        module.built(config, config.build)


def test_an_error_of_a_built_in_model_is_not_explained_away():
    model = DLRMConfig((4, 2), (1,)).build(3, {"a": 2}, dtype=jnp.float32, seed=0)
    with pytest.raises(KeyError):
        module.outputs(model, X, {})


@pytest.mark.parametrize(
    "give",
    [
        lambda y: jax.nn.sigmoid(y)[:, 0],
        lambda y: nnx.sigmoid(y[:, :1]).squeeze(1),
        lambda y: jax.nn.softmax(y)[:, 1],
        lambda y: (1 / (1 + jnp.exp(-y)))[:, 0],
        lambda y: jax.jit(jax.nn.sigmoid)(y[:, 0]),
        lambda y: jax.checkpoint(lambda z: jax.nn.softmax(z)[..., 1])(y),
    ],
)
def test_probabilities_are_noticed_once(give, capsys):
    traced(give)
    said = capsys.readouterr().err
    assert re.match(rf"{CALLED} ends in a sigmoid or softmax", said) and said.count("\n") == 1
    traced(give)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "give",
    [
        lambda y: y[:, 0] * jax.nn.sigmoid(y[:, 1]),  # a gate
        lambda y: jax.nn.softmax(y)[:, 1] @ jnp.eye(4),  # an attention
        lambda y: jnp.log(jax.nn.sigmoid(y[:, 0])),
        lambda y: y[:, 0] / (1 + jnp.abs(y[:, 1])),
        lambda y: jnp.exp(y[:, 0]) - 1,
        lambda y: jnp.zeros(4),  # as a last layer that starts at 0 gives
    ],
)
def test_logits_are_not_taken_for_probabilities(give, capsys):
    traced(give)
    assert capsys.readouterr().err == ""


class Stateful(nnx.Module):
    """A module of somebody else that holds these."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.w = nnx.Param(jnp.ones(3))
        for name, value in held.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"bn": nnx.BatchNorm(3, rngs=nnx.Rngs(0))}, r"model\.bn: flax's BatchNorm.*stateful\.BatchNorm"),
        (lambda: {"drop": nnx.Dropout(0.5, rngs=nnx.Rngs(0))}, r"model\.drop: flax's Dropout.*stateful\.Dropout"),
        (lambda: {"rngs": nnx.Rngs(0)}, r"model\.rngs: flax's Rngs.*use them in __init__ alone"),
    ],
)
def test_what_depends_on_the_number_of_devices_is_refused_by_name(make, words):
    config = OwnConfig(lambda: Stateful(make()))
    line = Stateful.__init__.__code__.co_firstlineno
    with pytest.raises(ConfigError, match=rf"^the model Stateful \({HERE}:{line}\) holds {words}"):
        module.built(config, config.build)
    with pytest.raises(ConfigError, match=words):  # also of shapes alone, as a plan has them
        module.built(config, lambda: nnx.eval_shape(config.build))


def test_other_state_is_kept_and_keeps_its_form():
    class Seen(nnx.Module):
        def __init__(self, give: Any) -> None:
            self.seen, self.scale, self.w, self.give = (
                nnx.Variable(jnp.zeros(3)),
                jnp.ones(3),
                nnx.Param(jnp.ones(3)),
                give,
            )

        def __call__(self, dense_BxK: jax.Array, pooled: dict[str, Any]) -> Any:
            self.seen.set_value(self.give(dense_BxK))
            return dense_BxK @ (self.w[...] * self.scale)

    kept = module.kept_state(module.built(OwnConfig(None), lambda: Seen(None)))
    assert kept.keys() == {"seen", "scale"}
    model = Seen(lambda x: x.sum(axis=0))
    assert module.outputs(model, X, {}).shape == (4,)
    np.testing.assert_allclose(model.seen[...], X.sum(axis=0))
    with pytest.raises(ConfigError, match=r"changes what model\.seen\S* is: shape \[3\], float32 before, shape \[4\]"):
        module.outputs(Seen(lambda x: x[:, 0]), X, {})


class Deep(nnx.Module):
    """Twelve layers, of which the last comes before the third by letters, and a name that flax uses too."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(k)) for k in range(12)])
        self.value, self.mean, self.plain = nnx.Param(jnp.ones(1)), nnx.BatchStat(jnp.zeros(2)), jnp.ones(2)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] += 1
        return self.layers[11](x)[0, 0] + self.value[0] + self.mean[0] + self.plain[0]


def test_parts_in_dicts_are_the_leaves_of_flax_by_its_names():
    model = Deep()
    found = module.parameters(model), module.kept_state(model)
    for ours, filter_of in zip(found, (nnx.Param, nnx.Not(nnx.Param)), strict=True):
        theirs = jax.tree.leaves_with_path(nnx.state(model, filter_of))
        named = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in theirs]
        pairs = zip(jax.tree.leaves_with_path(ours), theirs, strict=True)
        assert all(a is b for (_, a), (_, b) in pairs)
        paths = [path for path, _ in jax.tree.leaves_with_path(ours)]
        assert [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths] == named
        assert all(isinstance(key, jax.tree_util.DictKey) for path in paths for key in path), "flattened outside Python"
    moved = jax.tree.map(lambda x: x + 1, found)
    again = module.ModuleDef.of(model).merge(*moved)
    x = jnp.full((1, 1), 2.0)
    kernel, bias = (float(p[...].item()) + 1 for p in (model.layers[11].kernel, model.layers[11].bias))
    assert float(again(x)) == pytest.approx(2 * kernel + bias + 2 + 2 + 2)
    assert again.mean[...].tolist() == [2, 2] and model.mean[...].tolist() == [0, 0]


def test_parameters_alone_pass():
    class Plain(nnx.Module):
        def __init__(self) -> None:
            self.norm, self.size = nnx.LayerNorm(3, rngs=nnx.Rngs(0)), 3
            self.layers = nnx.List([nnx.Embed(2, 3, rngs=nnx.Rngs(0))])

    config = OwnConfig(Plain)
    assert isinstance(module.built(config, config.build), Plain)
    with pytest.raises(ConfigError, match=rf"OwnConfig \({HERE}:\d+\): build gives None, not a flax.nnx.Module"):
        module.built(OwnConfig(None), lambda: None)


def test_a_numpy_constant_is_an_array():
    assert module.outputs(Own(lambda y: np.zeros(4, np.float32)), X, {}).shape == (4,)
