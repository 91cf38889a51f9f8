"""DIN (Zhou et al. 2018, arXiv:1706.06978): what a user did before is weighed by what is offered now."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.data.batch import ElementGroup
from recjax.embedding.elements import Elements
from recjax.models.layers import Mlp, check_logit, check_widths, input_names
from recjax.models.stateful import check_rate


@dataclasses.dataclass(frozen=True)
class DinConfig:
    """Shape of a DIN. The paper has PReLU and Dice in place of ReLU, and weights of any size (`softmax=false`)."""

    kind: ClassVar[str] = "din"
    first_order: ClassVar[bool] = False
    sequences: ClassVar[bool] = True
    grouped: ClassVar[bool] = True
    attention: tuple[int, ...] = (32,)  # widths of the hidden layers of the MLP that weighs an element
    softmax: bool = True  # weights of a row's elements are 1 together; false: any numbers, as in the paper
    top: tuple[int, ...] = (64, 32, 1)  # widths of the MLP on everything; the last is the logit, so 1
    batch_norm: bool = False  # normalise before each ReLU of `top`, over the whole batch
    dropout: float = 0.0  # share of hidden values of `top` that are dropped in training

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_widths("attention", self.attention)
        check_logit("top", self.top)

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        return input_names(dense, dims)

    def build(
        self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int, groups: tuple[ElementGroup, ...] = ()
    ) -> Din:
        """Makes the module.

        Args:
          dense: K, dense features; may be 0.
          dims: feature name -> D.
          dtype: of the computation; parameters start as float32.
          seed: of the initial parameters.
          groups: aligned features, which are attended to where they are not pooled.
        """
        return Din(self, dense, dims, groups, dtype=dtype, rngs=nnx.Rngs(seed))


class TargetAttention(nnx.Module):
    """The sum of a row's elements e, each times a = MLP([q, k, q - k, q * k, r]).

    k are the features of e that say of it what q say of the row itself, such as the item of an event and the item that
    is offered (`ElementGroup.like`), and r are the others. The paper's figure 2 has the outer product of q and k; its
    authors' code has what is here.
    """

    def __init__(
        self, aligned: ElementGroup, config: DinConfig, dims: dict[str, int], *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        named = list(zip(aligned.features, aligned.like, strict=True))
        self.pairs = tuple((name, like) for name, like in named if like)
        self.others = tuple(name for name, like in named if not like)
        width = 4 * sum(dims[name] for name, _ in self.pairs) + sum(dims[name] for name in self.others)
        self.weigh = Mlp(width, (*config.attention, 1), linear_output=True, dtype=dtype, rngs=rngs)
        self.softmax, self.dtype = config.softmax, dtype

    def __call__(self, pooled: Mapping[str, Any]) -> jax.Array:
        """The sums, [b, D of all features of the group]: of these `Elements`, of `like` vectors [b, D]."""
        elements: Elements = pooled[(self.pairs[0][0] if self.pairs else self.others[0])]
        keys = [pooled[name].rows_LxD for name, _ in self.pairs]
        others = [pooled[name].rows_LxD for name in self.others]
        inputs = [*keys, *others]
        if keys:
            query_LxK = elements.repeat(jnp.concatenate([pooled[like] for _, like in self.pairs], axis=1))
            key_LxK = jnp.concatenate(keys, axis=1)
            inputs = [query_LxK, key_LxK, query_LxK - key_LxK, query_LxK * key_LxK, *others]
        weights_L = self.weigh(jnp.concatenate(inputs, axis=1).astype(self.dtype))[:, 0]
        weights_L = elements.softmax(weights_L) if self.softmax else jnp.where(elements.mask_L, weights_L, 0)
        rows_LxD = jnp.concatenate([*keys, *others], axis=1)
        return elements.sum(weights_L[:, None].astype(rows_LxD.dtype) * rows_LxD)


class Din(nnx.Module):
    """logit = top([dense features, embeddings, attended groups])."""

    def __init__(
        self,
        config: DinConfig,
        dense: int,
        dims: dict[str, int],
        groups: tuple[ElementGroup, ...],
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.attended = nnx.List([TargetAttention(group, config, dims, dtype=dtype, rngs=rngs) for group in groups])
        aligned = {name for group in groups for name in group.features}
        self.names = tuple(name for name in dims if name not in aligned)
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout}
        width = dense + sum(dims.values())
        self.top = Mlp(width, config.top, linear_output=True, dtype=dtype, rngs=rngs, **how)
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: Mapping[str, Any]) -> jax.Array:
        """Logits [b] from dense features [b, K] and, by feature name, [b, D]; of groups `Elements`."""
        parts = [dense_BxK, *(pooled[name] for name in self.names), *(attend(pooled) for attend in self.attended)]
        return self.top(jnp.concatenate([part.astype(self.dtype) for part in parts], axis=1))[:, 0]
