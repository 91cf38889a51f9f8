"""DCN-v2 (Wang et al. 2021, arXiv:2008.13535): explicit feature crosses beside or below a deep network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.errors import ConfigError
from recjax.models.layers import CrossNet, Mlp, check_logit, check_widths, input_names
from recjax.models.stateful import check_rate
from recjax.settings.values import check_ranges


@dataclasses.dataclass(frozen=True)
class DCNv2Config:
    """Shape of a DCN-v2. The defaults' form is MLPerf's: bottom MLP, low-rank crosses, top MLP on these."""

    kind: ClassVar[str] = "dcnv2"
    first_order: ClassVar[bool] = False
    bottom: tuple[int, ...] = (64, 16)  # widths of the MLP over the dense features; empty: they are crossed as they are
    cross_layers: int = 3  # number of cross layers, each of which raises the degree of the crosses by one
    rank: int = 32  # rank of the crosses' matrices; 0: full rank
    top: tuple[int, ...] = (64, 1)  # widths of the deep network's layers; the last is the logit, so 1
    # stacked: the deep network sees the crosses; parallel: it sees the input, beside them
    structure: Literal["stacked", "parallel"] = "stacked"
    batch_norm: bool = False  # normalise before each ReLU, over the whole batch
    dropout: float = 0.0  # share of hidden values that are dropped in training

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_widths("bottom", self.bottom)
        check_logit("top", self.top)
        check_ranges(self, cross_layers=(1, None))
        if self.rank < 0:
            raise ConfigError(f"rank is {self.rank}; give 1 or more, or 0 for full rank.")

    def input_names(self, dense: Sequence[str], dims: Mapping[str, int]) -> list[str]:
        """Names of the inputs of the layers that see all features: see `recjax.train.start_dense`."""
        return input_names([f"bottom {i}" for i in range(self.bottom[-1])] if dense and self.bottom else dense, dims)

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> DCNv2:
        """Makes the module; the arguments are those of `DLRMConfig.build`, and dimensions may differ."""
        return DCNv2(self, dense, dims, dtype=dtype, rngs=nnx.Rngs(seed))


class DCNv2(nnx.Module):
    """x_0 = [bottom MLP of the dense features, pooled embeddings], cross layers, deep network, one logit.

    Stacked (the paper's figure 1a, MLPerf, TorchRec's DLRM_DCN): logit = top(cross(x_0)).
    Parallel (figure 1b): logit = w . [cross(x_0), deep(x_0)] + b, deep being all layers of top but the last.
    """

    def __init__(self, config: DCNv2Config, dense: int, dims: dict[str, int], *, dtype: Any, rngs: nnx.Rngs) -> None:
        how: dict[str, Any] = {"batch_norm": config.batch_norm, "dropout": config.dropout, "dtype": dtype, "rngs": rngs}
        self.bottom = Mlp(dense, config.bottom if dense else (), **how)
        width = (config.bottom[-1] if dense and config.bottom else dense) + sum(dims.values())
        self.cross = CrossNet(width, config.cross_layers, config.rank, dtype=dtype, rngs=rngs)
        self.parallel = config.structure == "parallel"
        if self.parallel:
            deep = config.top[:-1]
            self.deep = Mlp(width, deep, **how)
            width, top = width + (deep[-1] if deep else width), config.top[-1:]
        else:
            top = config.top
        self.top = Mlp(width, top, linear_output=True, **how)
        self.features = tuple(dims)
        self.dtype = dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, jax.Array]) -> jax.Array:
        """Logits [b] from dense features [b, K] and pooled embeddings, feature name -> [b, D]."""
        parts = [self.bottom(dense_BxK.astype(self.dtype)), *(pooled[n].astype(self.dtype) for n in self.features)]
        x_BxN = jnp.concatenate(parts, axis=1)
        crossed_BxN = self.cross(x_BxN)
        if self.parallel:
            crossed_BxN = jnp.concatenate([crossed_BxN, self.deep(x_BxN)], axis=1)
        return self.top(crossed_BxN)[:, 0]
