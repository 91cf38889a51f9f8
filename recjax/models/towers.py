"""Parts that models of several tasks share: their input, their experts under a gate, and a tower for each task."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.data.batch import ONLY
from recjax.models.dense import full_precision
from recjax.models.layers import Linear, Mlp, input_names, linear


class TaskModelConfig(abc.ABC):
    """Config of a model of several tasks, with the settings `batch_norm` and `dropout`."""

    first_order: ClassVar[bool] = False
    multi_task: ClassVar[bool] = True

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        return input_names(dense, dims)

    def build(
        self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int, outputs: dict[str, int] | None = None
    ) -> nnx.Module:
        """Makes the module.

        Args:
          dense: K, dense features; may be 0.
          dims: feature name -> D of its pooled embedding, in the order of the input; they may differ.
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.
          outputs: task -> numbers that it needs, one for each class; None: one logit of the one binary label.
        """
        how = {name: vars(self)[name] for name in ("batch_norm", "dropout")}
        how |= {"dtype": dtype, "rngs": nnx.Rngs(seed)}
        return self.module(Joined(dense, dims, dtype), outputs or {ONLY: 1}, how)

    @abc.abstractmethod
    def module(self, inputs: Joined, outputs: dict[str, int], how: dict[str, Any]) -> nnx.Module:
        """Makes the module of its inputs, of task -> numbers that it needs, and of arguments of every `Mlp`."""


class Joined(nnx.Module):
    """[dense features, pooled embeddings] side by side, in the dtype of the computation."""

    def __init__(self, dense: int, dims: Mapping[str, int], dtype: Any) -> None:
        self.features, self.width, self.dtype = tuple(dims), dense + sum(dims.values()), dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """[b, width] from dense features [b, K] and pooled embeddings, feature name -> [b, D]."""
        return jnp.concatenate([x.astype(self.dtype) for x in (dense_BxK, *(pooled[n] for n in self.features))], axis=1)


class Towers(nnx.Module):
    """An MLP for each task, with one linear output, or as many as a class has."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: Mapping[str, int], *, dtype: Any, rngs: nnx.Rngs, **more: Any
    ) -> None:
        """For inputs [b, inputs]; `more` as for `Mlp`."""
        self.tasks = tuple(outputs.items())
        widths = [(*hidden, number) for number in outputs.values()]
        self.towers = nnx.List([Mlp(inputs, w, linear_output=True, dtype=dtype, rngs=rngs, **more) for w in widths])

    def __call__(self, inputs: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Task -> outputs, [b] or [b, C], from the input of each tower."""
        found = [tower(x_BxN) for tower, x_BxN in zip(self.towers, inputs, strict=True)]
        return {name: y if number > 1 else y[:, 0] for (name, number), y in zip(self.tasks, found, strict=True)}


class Gate(nnx.Module):
    """softmax(W x + b) as weights of experts, in full precision."""

    def __init__(self, inputs: int, experts: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.linear: Linear = linear(inputs, experts, dtype=full_precision(dtype), rngs=rngs)
        self.dtype = dtype

    def __call__(self, x_BxN: jax.Array, experts: Sequence[jax.Array]) -> jax.Array:
        """The weighted sum of the experts' outputs, [b, M] each: [b, M]."""
        shares_BxE = jax.nn.softmax(self.linear(x_BxN), axis=1)
        experts_BxExM = jnp.stack(experts, axis=1).astype(shares_BxE.dtype)
        return jnp.sum(shares_BxE[:, :, None] * experts_BxExM, axis=1).astype(self.dtype)
