"""DLRM (Naumov et al. 2019, arXiv:1906.00091), as facebookresearch/dlrm defines it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.layers import Mlp, dot_interaction


@dataclasses.dataclass(frozen=True)
class DLRMConfig:
    """Shape of a DLRM. The last bottom width must equal the embedding dimension for the dot interaction."""

    kind: ClassVar[str] = "dlrm"
    bottom: tuple[int, ...] = (64, 16)  # widths of the bottom MLP's layers, which sees the dense features
    top: tuple[int, ...] = (64, 1)  # widths of the top MLP's layers; the last is the logit, so 1
    interaction: Literal["dot", "cat"] = "dot"  # dot: pairwise products; cat: plain concatenation
    interaction_itself: bool = False  # dot: also each vector with itself

    def __post_init__(self) -> None:
        if not self.bottom or not self.top or min(*self.bottom, *self.top) < 1:
            raise ConfigError("bottom and top need at least one layer each, of width 1 or more.")
        if self.top[-1] != 1:
            raise ConfigError(f"top ends in {self.top[-1]} outputs; it must end in 1, the logit.")

    def build(self, dense: int, features: tuple[str, ...], dim: int, *, dtype: Any, seed: int) -> DLRM:
        """Makes the module.

        Args:
          dense: K, dense features.
          features: names of the pooled features, in the order in which the interaction sees them.
          dim: D, embedding dimension of all of them.
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.

        Raises:
          ConfigError: the bottom MLP does not end in `dim` (dot), or there are no dense features.
        """
        if dense < 1:
            raise ConfigError("DLRM needs at least one dense feature for its bottom MLP; the data have none.")
        if self.interaction == "dot" and self.bottom[-1] != dim:
            raise ConfigError(
                f"model.bottom ends in {self.bottom[-1]} but embedding.dim is {dim}: the dot interaction needs both "
                f"equal. Set embedding.dim={self.bottom[-1]}, or end model.bottom in {dim}."
            )
        return DLRM(self, dense, features, dim, dtype=dtype, rngs=nnx.Rngs(seed))


class DLRM(nnx.Module):
    """Bottom MLP over dense features, interaction with the pooled embeddings, top MLP to one logit."""

    def __init__(
        self, config: DLRMConfig, dense: int, features: tuple[str, ...], dim: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        F = len(features)
        x = config.bottom[-1]
        if config.interaction == "dot":
            width = x + (F + 1) * (F + 2 * config.interaction_itself) // 2
        else:
            width = x + F * dim
        self.bottom = Mlp(dense, config.bottom, dtype=dtype, rngs=rngs)
        self.top = Mlp(width, config.top, linear_output=True, dtype=dtype, rngs=rngs)
        self.features = features
        self.interaction = config.interaction
        self.itself = config.interaction_itself
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and pooled embeddings, feature name -> [b, D]."""
        x_BxD = self.bottom(dense_BxK.astype(self.dtype))
        vectors = [x_BxD, *(pooled[name].astype(self.dtype) for name in self.features)]
        if self.interaction == "dot":
            z_BxP = dot_interaction(jnp.stack(vectors, axis=1), itself=self.itself)
            joined = jnp.concatenate([x_BxD, z_BxP], axis=1)
        else:
            joined = jnp.concatenate(vectors, axis=1)
        return self.top(joined)[:, 0]
