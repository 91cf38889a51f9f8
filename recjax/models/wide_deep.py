"""Wide & Deep (Cheng et al. 2016, arXiv:1606.07792): a linear model that memorises and a deep one that generalises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.models.layers import FirstOrder, FirstOrderConfig, Mlp, embedded, input_names


@dataclasses.dataclass(frozen=True)
class WideDeepConfig(FirstOrderConfig):
    """Shape of a Wide & Deep model."""

    kind: ClassVar[str] = "wide_deep"

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        return input_names(dense, embedded(dict(dims)))

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> WideDeep:
        """Makes the module.

        Args:
          dense: K, dense features; may be 0.
          dims: lookup -> columns: for each feature f its embedding f (any D) and its first-order weight f.linear (1).
          dtype: of the computation; parameters start as float32.
          seed: of the initial weights.

        Raises:
          ConfigError: an embedding has no wide weight beside it.
        """
        return WideDeep(self, dense, embedded(dims), dtype=dtype, rngs=nnx.Rngs(seed))


class WideDeep(nnx.Module):
    """logit = sum of the wide weights of all ids + w . dense + deep network([dense, embeddings]) (equation 3).

    The wide part is linear over one-hot ids. The paper's cross-product columns must be features of the data. The
    weights of dense features and the deep network's last bias, which serves both parts, belong to the dense part.
    """

    def __init__(self, config: WideDeepConfig, dense: int, dims: dict[str, int], *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.wide = FirstOrder(dense, tuple(dims), dtype=dtype)
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout, "dtype": dtype, "rngs": rngs}
        self.deep = Mlp(dense + sum(dims.values()), config.deep, linear_output=True, **how)
        self.features = tuple(dims)
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and what was looked up, f -> [b, D] and f.linear -> [b, 1]."""
        parts = [dense_BxK.astype(self.dtype), *(pooled[name].astype(self.dtype) for name in self.features)]
        return self.wide(dense_BxK, pooled) + self.deep(jnp.concatenate(parts, axis=1))[:, 0]
