"""DeepFM (Guo et al. 2017, arXiv:1703.04247): a factorization machine and a deep network on the same embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.dense import full_precision
from recjax.models.layers import FirstOrder, FirstOrderConfig, Mlp, embedded, input_names, normal, pair_sum, unequal

FACTOR_SCALE = 0.1  # standard deviation of the initial factors of dense features, libFM's default


@dataclasses.dataclass(frozen=True)
class DeepFMConfig(FirstOrderConfig):
    """Shape of a DeepFM. All embeddings must have one dimension."""

    kind: ClassVar[str] = "deepfm"

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        features = embedded(dict(dims))
        return input_names((), dict.fromkeys(dense, next(iter(features.values()), 1)) | features)

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> DeepFM:
        """Makes the module; the arguments are those of `WideDeepConfig.build`, with one D.

        Raises:
          ConfigError: the embeddings' dimensions differ, or one has no first-order weight beside it.
        """
        features = embedded(dims)
        dim = next(iter(features.values()), 1)
        if other := unequal(features, dim):
            raise ConfigError(
                f"DeepFM multiplies every embedding with every other, so that all need {dim} columns like that of "
                f"{next(iter(features))}, but these have another dimension: {other}. Give all one embedding.dim."
            )
        return DeepFM(self, dense, tuple(features), dim, dtype=dtype, rngs=nnx.Rngs(seed))


class DeepFM(nnx.Module):
    """logit = sum of first-order weights + sum_{i<j} <v_i, v_j> + deep network([v_1, ..]) (equations 1 to 4).

    A field's vector v_i is its pooled embedding. A dense feature x_k is a field too, represented by its value as in
    section 2.1: its vector is x_k times learned factors, and x_k w_k its first-order term. Ids of one bag are not
    crossed with each other, since they are one field. The deep network's last bias serves as the model's.
    """

    def __init__(
        self, config: DeepFMConfig, dense: int, features: tuple[str, ...], dim: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout, "dtype": dtype, "rngs": rngs}
        self.factors_KxD = nnx.Param(normal(rngs.params(), (dense, dim), FACTOR_SCALE))
        self.first = FirstOrder(dense, features, dtype=dtype)
        self.deep = Mlp((dense + len(features)) * dim, config.deep, linear_output=True, **how)
        self.features = features
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and what was looked up, f -> [b, D] and f.linear -> [b, 1]."""
        exact = full_precision(self.dtype)
        fields_BxKxD = dense_BxK.astype(exact)[:, :, None] * self.factors_KxD[...].astype(exact)[None]
        fields = [pooled[name].astype(exact)[:, None] for name in self.features]
        vectors_BxFxD = jnp.concatenate([fields_BxKxD, *fields], axis=1)
        deep_BxN = vectors_BxFxD.astype(self.dtype).reshape(dense_BxK.shape[0], -1)
        return self.first(dense_BxK, pooled) + pair_sum(vectors_BxFxD) + self.deep(deep_BxN)[:, 0]
