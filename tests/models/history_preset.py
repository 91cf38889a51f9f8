"""A model of one's own, as a preset: the items of a history are weighed by their likeness to the item in question.

    recjax train tests/models/history_preset.py model.sharpness=2

The history (a jagged feature) looks up the item's table and is not pooled, so the model gets its rows one by one. It
weighs them by softmax(sharpness * <item, row> / sqrt(D)), a plain form of the attention of DIN (Zhou et al. 2018,
arXiv:1706.06978); sharpness 0 is the mean.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.config.run import EmbeddingConfig, FeatureConfig, RunConfig
from recjax.config.train import TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.elements import Elements
from recjax.models.layers import Mlp
from recjax.parallel.mesh import MeshConfig
from recjax.settings.values import Named

ITEM, HISTORY = "sparse_0", "sparse_1"


@dataclasses.dataclass(frozen=True)
class HistoryConfig:
    """Shape of the model: settings like any other, `model.hidden=64-32`."""

    kind: ClassVar[str] = "history"
    sequences: ClassVar[bool] = True  # it takes features that are not pooled
    hidden: tuple[int, ...] = (16, 8)  # widths of the hidden layers
    sharpness: float = 1.0  # of the attention; 0: every row of the history weighs the same

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> History:
        """Makes the module for K = `dense` dense features and feature name -> D."""
        return History(self, dense + sum(dims.values()), tuple(dims), dtype, nnx.Rngs(seed))


class History(nnx.Module):
    """The history attends to the item; an MLP sees that, the other features and the dense ones."""

    def __init__(self, config: HistoryConfig, width: int, names: tuple[str, ...], dtype: Any, rngs: nnx.Rngs) -> None:
        self.mlp = Mlp(width, (*config.hidden, 1), linear_output=True, dtype=dtype, rngs=rngs)
        self.names, self.sharpness, self.dtype = names, config.sharpness, dtype

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, Any]) -> jax.Array:
        """Logits [b] from dense features [b, K] and, by feature name, [b, D] or Elements."""
        vectors = dict(pooled)
        history = vectors[HISTORY]
        if isinstance(history, Elements):  # with embedding.features.sparse_1.pooling=mean it is [b, D] already
            vectors[HISTORY] = attend(vectors[ITEM], history, self.sharpness)
        joined = jnp.concatenate([dense_BxK, *(vectors[name] for name in self.names)], axis=1)
        return self.mlp(joined.astype(self.dtype))[:, 0]


def attend(query_bxD: jax.Array, history: Elements, sharpness: float) -> jax.Array:
    """Weighted mean [b, D] of each sample's rows; zeros where there are none."""
    scores_L = jnp.sum(history.repeat(query_bxD) * history.rows_LxD, axis=1) * (
        sharpness / math.sqrt(query_bxD.shape[1])
    )
    return history.sum(history.softmax(scores_L)[:, None] * history.rows_LxD)


@dataclasses.dataclass(frozen=True)
class HistoryRun(RunConfig):
    """A run's config whose model is that one."""

    model: HistoryConfig = HistoryConfig()  # type: ignore[assignment] # wider than the built-in ones


config = HistoryRun(
    data=Synthetic(rows=(60, 60, 20), ids_per_bag=(1, 0, 1), train_rows=2048, validation_rows=256, test_rows=256),
    embedding=EmbeddingConfig(dim=4, features=Named({HISTORY: FeatureConfig(pooling="none", share=ITEM)})),
    train=TrainConfig(batch_size=256),
    mesh=MeshConfig(devices=2, platform="cpu"),
)
