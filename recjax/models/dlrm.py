"""DLRM (Naumov et al. 2019, arXiv:1906.00091), as facebookresearch/dlrm defines it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.layers import (
    Mlp,
    check_logit,
    check_widths,
    chosen_precision,
    dot_interaction,
    input_names,
    unequal,
)
from recjax.models.stateful import check_rate


@dataclasses.dataclass(frozen=True)
class DLRMConfig:
    """Shape of a DLRM. The last bottom width must equal every embedding dimension for the dot interaction.

    On data without dense features there is no bottom MLP: the embeddings interact alone.
    """

    kind: ClassVar[str] = "dlrm"
    first_order: ClassVar[bool] = False
    bottom: tuple[int, ...] = (64, 16)  # widths of the MLP over the dense features; unused without any
    top: tuple[int, ...] = (64, 1)  # widths of the top MLP's layers; the last is the logit, so 1
    interaction: Literal["dot", "cat"] = "dot"  # dot: pairwise products; cat: plain concatenation
    interaction_itself: bool = False  # with dot: also the product of each vector with itself
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_widths("bottom", self.bottom, least=1)
        check_logit("top", self.top)

    def ending_in(self, dim: int) -> DLRMConfig:
        """Itself, with a last bottom width of `dim` if the interaction needs that."""
        return self if self.interaction == "cat" else dataclasses.replace(self, bottom=(*self.bottom[:-1], dim))

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> DLRM:
        """Makes the module.

        Args:
          dense: K, dense features; without any there is no bottom MLP.
          dims: feature name -> D of its pooled embedding, in the order in which the interaction sees them.
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.

        Raises:
          ConfigError: for the dot interaction, a D differs from the last width of the bottom MLP, or from the other D
            if there is none; or there are no two vectors to multiply.
        """
        if self.interaction == "dot":
            self._check_dot(dense, dims)
        return DLRM(self, dense, dims, dtype=dtype, rngs=nnx.Rngs(seed))

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        bottom = [f"bottom {i}" for i in range(self.bottom[-1] if dense else 0)]
        if self.interaction == "cat":
            return input_names(bottom, dims)
        names = [*(["bottom"] if dense else []), *dims]
        last = 1 if self.interaction_itself else 0
        pairs = ((names[i], names[j]) for i in range(len(names)) for j in range(i + last))
        return [*bottom, *(" * ".join(sorted(pair)) for pair in pairs)]

    def _check_dot(self, dense: int, dims: dict[str, int]) -> None:
        x = self.bottom[-1] if dense else next(iter(dims.values()), 0)
        if dense == 0 and len(dims) + self.interaction_itself < 2:
            raise ConfigError(
                f"the dot interaction of DLRM multiplies vectors with each other, but the data have {len(dims)} "
                "categorical feature(s) and no dense ones. Take model.interaction=cat."
            )
        if other := unequal(dims, x):
            first = f"model.bottom ends in {x}" if dense else f"{next(iter(dims))} has dimension {x}"
            end = " or the end of model.bottom" if dense else ""
            raise ConfigError(
                f"{first}, but the embeddings of these features have another dimension: {other}. The dot interaction "
                f"needs all equal: change embedding.dim (or that of those tables){end}, or take model.interaction=cat."
            )


class DLRM(nnx.Module):
    """Bottom MLP over dense features, interaction with the pooled embeddings, top MLP to one logit.

    Without dense features (K = 0) the top MLP sees the pairs of the embeddings alone, or with `cat` the embeddings.
    """

    def __init__(self, config: DLRMConfig, dense: int, dims: dict[str, int], *, dtype: Any, rngs: nnx.Rngs) -> None:
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout, "dtype": dtype, "rngs": rngs}
        F = len(dims) + (dense > 0)  # vectors that interact
        x = config.bottom[-1] if dense else 0
        if config.interaction == "dot":
            width = x + F * (F - 1 + 2 * config.interaction_itself) // 2
        else:
            width = x + sum(dims.values())
        self.bottom = Mlp(dense, config.bottom if dense else (), **how)
        self.top = Mlp(width, config.top, linear_output=True, **how)
        self.features = tuple(dims)
        self.interaction = config.interaction
        self.itself = config.interaction_itself
        self.precision = chosen_precision()
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and pooled embeddings, feature name -> [b, D]."""
        x_BxD = self.bottom(dense_BxK.astype(self.dtype))  # [b, 0] without dense features
        vectors = [pooled[name].astype(self.dtype) for name in self.features]
        if dense_BxK.shape[1]:
            vectors.insert(0, x_BxD)
        if self.interaction == "dot":
            # Side by side, not stacked: gradients of [b, 1, D] each would take 128 times their size on a TPU.
            shape = (dense_BxK.shape[0], len(vectors), vectors[-1].shape[1])
            vectors_BxFxD = jnp.concatenate(vectors, axis=1).reshape(shape)
            z_BxP = dot_interaction(vectors_BxFxD, self.itself, self.precision)
            vectors = [x_BxD, z_BxP]
        return self.top(jnp.concatenate(vectors, axis=1))[:, 0]
