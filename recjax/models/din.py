"""DIN (Zhou et al. 2018, arXiv:1706.06978): what a user did before is weighed by what is offered now.

A row offers one item, or a group of items of which each has a label (`Schema.label_group`): then each of these is
scored, by itself, and the row's history is looked up once for all of them.
"""

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
        self,
        dense: int,
        dims: dict[str, int],
        *,
        dtype: Any,
        seed: int,
        groups: tuple[ElementGroup, ...] = (),
        label_group: str = "",
    ) -> Din:
        """Makes the module.

        Args:
          dense: K, dense features; may be 0.
          dims: feature name -> D.
          dtype: of the computation; parameters start as float32.
          seed: of the initial parameters.
          groups: aligned features, which are attended to where they are not pooled.
          label_group: name of the one whose elements are scored; "": rows are.
        """
        return Din(self, dense, dims, groups, label_group, dtype=dtype, rngs=nnx.Rngs(seed))


class TargetAttention(nnx.Module):
    """The sum of a row's elements e, each times a = MLP([q, k, q - k, q * k, r]).

    k are the features of e that say of it what q say of the row itself, such as the item of an event and the item that
    is offered (`ElementGroup.like`), and r are the others. The paper's figure 2 has the outer product of q and k; its
    authors' code has what is here.
    """

    def __init__(
        self,
        aligned: ElementGroup,
        config: DinConfig,
        dims: dict[str, int],
        scored: Sequence[str],
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        named = list(zip(aligned.features, aligned.like, strict=True))
        self.pairs = tuple((name, like) for name, like in named if like)
        self.others = tuple(name for name, like in named if not like)
        width = 4 * sum(dims[name] for name, _ in self.pairs) + sum(dims[name] for name in self.others)
        self.weigh = Mlp(width, (*config.attention, 1), linear_output=True, dtype=dtype, rngs=rngs)
        self.softmax, self.dtype = config.softmax, dtype
        self.meets = any(like in scored for _, like in self.pairs)

    def __call__(self, pooled: Mapping[str, Any], scored: Elements | None = None) -> jax.Array:
        """The sums, [b, D of all features of the group]: of these `Elements`, of `like` vectors [b, D].

        Where elements are scored that these meet, they are [L, D], for the places of `scored` in place of rows.
        """
        names = [*(name for name, _ in self.pairs), *self.others]
        elements: Elements = pooled[names[0]]
        joined_LxD = jnp.concatenate([pooled[name].rows_LxD for name in names], axis=1)
        elements = dataclasses.replace(elements, rows_LxD=joined_LxD)
        elements = elements if scored is None else elements.beside(scored)
        rows_LxD, inputs = elements.rows_LxD, [elements.rows_LxD]
        if self.pairs:
            offered = [_beside(pooled[like], scored) for _, like in self.pairs]
            query_LxK = elements.repeat(jnp.concatenate(offered, axis=1))
            key_LxK, others_LxD = jnp.split(rows_LxD, [query_LxK.shape[1]], axis=1)
            inputs = [query_LxK, key_LxK, query_LxK - key_LxK, query_LxK * key_LxK, others_LxD]
        weights_L = self.weigh(jnp.concatenate(inputs, axis=1).astype(self.dtype))[:, 0]
        weights_L = elements.softmax(weights_L) if self.softmax else jnp.where(elements.mask_L, weights_L, 0)
        return elements.sum(weights_L[:, None].astype(rows_LxD.dtype) * rows_LxD)


class Din(nnx.Module):
    """logit = top([dense features, embeddings, attended groups])."""

    def __init__(
        self,
        config: DinConfig,
        dense: int,
        dims: dict[str, int],
        groups: tuple[ElementGroup, ...],
        label_group: str,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        weighed = [group for group in groups if group.name != label_group]
        self.scored = next((group.features for group in groups if group.name == label_group), ())
        self.attended = nnx.List(
            [TargetAttention(group, config, dims, self.scored, dtype=dtype, rngs=rngs) for group in weighed]
        )
        aligned = {name for group in weighed for name in group.features}
        self.names = tuple(name for name in dims if name not in aligned)
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout}
        width = dense + sum(dims.values())
        self.top = Mlp(width, config.top, linear_output=True, dtype=dtype, rngs=rngs, **how)
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: Mapping[str, Any]) -> jax.Array:
        """Logits [b] from dense features [b, K] and, by feature name, [b, D]; of groups `Elements`.

        Where elements are scored, they are [L], for the places of these in place of rows.
        """
        scored = pooled[self.scored[0]] if self.scored else None
        attended = (a(pooled, scored) if a.meets else _beside(a(pooled), scored) for a in self.attended)
        parts = [_beside(dense_BxK, scored), *(_beside(pooled[name], scored) for name in self.names), *attended]
        return self.top(jnp.concatenate([part.astype(self.dtype) for part in parts], axis=1))[:, 0]


def _beside(values: jax.Array | Elements, scored: Elements | None) -> jax.Array:
    """Returns values of each scored element, or of its row, [L, D]; where rows are scored, as they are."""
    if scored is None:
        assert isinstance(values, jax.Array)
        return values
    return values.rows_LxD if isinstance(values, Elements) else scored.repeat(values)
