"""DLRM (Naumov et al. 2019, arXiv:1906.00091), as facebookresearch/dlrm defines it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.layers import Mlp, check_logit, check_widths, dot_interaction, unequal


@dataclasses.dataclass(frozen=True)
class DLRMConfig:
    """Shape of a DLRM. The last bottom width must equal every embedding dimension for the dot interaction."""

    kind: ClassVar[str] = "dlrm"
    first_order: ClassVar[bool] = False
    bottom: tuple[int, ...] = (64, 16)  # widths of the bottom MLP's layers, which sees the dense features
    top: tuple[int, ...] = (64, 1)  # widths of the top MLP's layers; the last is the logit, so 1
    interaction: Literal["dot", "cat"] = "dot"  # dot: pairwise products; cat: plain concatenation
    interaction_itself: bool = False  # dot: also each vector with itself

    def __post_init__(self) -> None:
        check_widths("bottom", self.bottom, least=1)
        check_logit("top", self.top)

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> DLRM:
        """Makes the module.

        Args:
          dense: K, dense features.
          dims: feature name -> D of its pooled embedding, in the order in which the interaction sees them.
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.

        Raises:
          ConfigError: a D differs from the last width of the bottom MLP (dot), or there are no dense features.
        """
        if dense < 1:
            raise ConfigError("DLRM needs at least one dense feature for its bottom MLP; the data have none.")
        x = self.bottom[-1]
        if self.interaction == "dot" and (other := unequal(dims, x)):
            raise ConfigError(
                f"model.bottom ends in {x}, but the embeddings of these features have another dimension: {other}. "
                "The dot interaction needs all equal: change embedding.dim (or that of those tables) or the "
                "end of model.bottom, or take model.interaction=cat."
            )
        return DLRM(self, dense, dims, dtype=dtype, rngs=nnx.Rngs(seed))


class DLRM(nnx.Module):
    """Bottom MLP over dense features, interaction with the pooled embeddings, top MLP to one logit."""

    def __init__(self, config: DLRMConfig, dense: int, dims: dict[str, int], *, dtype: Any, rngs: nnx.Rngs) -> None:
        F = len(dims)
        x = config.bottom[-1]
        if config.interaction == "dot":
            width = x + (F + 1) * (F + 2 * config.interaction_itself) // 2
        else:
            width = x + sum(dims.values())
        self.bottom = Mlp(dense, config.bottom, dtype=dtype, rngs=rngs)
        self.top = Mlp(width, config.top, linear_output=True, dtype=dtype, rngs=rngs)
        self.features = tuple(dims)
        self.interaction = config.interaction
        self.itself = config.interaction_itself
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and pooled embeddings, feature name -> [b, D]."""
        x_BxD = self.bottom(dense_BxK.astype(self.dtype))
        vectors = [x_BxD, *(pooled[name].astype(self.dtype) for name in self.features)]
        if self.interaction == "dot":
            z_BxP = dot_interaction(jnp.stack(vectors, axis=1), self.itself)
            joined = jnp.concatenate([x_BxD, z_BxP], axis=1)
        else:
            joined = jnp.concatenate(vectors, axis=1)
        return self.top(joined)[:, 0]
