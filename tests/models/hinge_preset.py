"""A loss of one's own for models of two sides, as a preset: the worst candidate has to stay a margin below the pair.

    recjax train tests/models/hinge_preset.py data.from=clicks.csv data.user=user data.item=item model.loss.margin=0.3

The loss of a pair is max(0, margin + s_ij - s_ii), of its candidate j with the highest score: hardest ones (Schroff
et al. 2015, arXiv:1503.03832, of a whole batch; Faghri et al. 2018, arXiv:1707.05612).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.own_table import Table
from recjax.embedding.optim import Adam
from recjax.models.batch_losses import Pairs
from recjax.models.two_tower import MFConfig
from recjax.parallel.mesh import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class HardestHinge:
    """Its settings: `model.loss.margin=0.3`."""

    kind: ClassVar[str] = "hardest_hinge"
    in_batch: ClassVar[bool] = True  # candidates are the items of the batch's other pairs
    negatives: ClassVar[int] = 0  # and none is drawn
    margin: float = 0.2  # by which a pair's score has to be above that of its worst candidate

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """The sum of weight * loss over this device's pairs: []."""

        def hardest(scores_rxc: jax.Array, counts_rxc: jax.Array, log_q_c: jax.Array, about: Any) -> jax.Array:
            return jnp.max(jnp.where(counts_rxc, scores_rxc, -jnp.inf), axis=1)

        # Each device knows the best of its own candidates for all users of the batch: together they know the best
        local_B = pairs.against_candidates(self.in_batch, hardest)
        best_B = jax.lax.pmax(jax.lax.stop_gradient(local_B), BATCH_AXES)
        # Gradients go to the device that has it; of several the one that comes first
        device = jax.lax.axis_index(BATCH_AXES)
        there_B = local_B == best_B
        first_B = jax.lax.pmin(jnp.where(there_B, device, jnp.iinfo(jnp.int32).max), BATCH_AXES)
        best_b = pairs.scatter(jnp.where(there_B & (device == first_B), local_B, 0))
        losses_b = jnp.maximum(0, self.margin + best_b - pairs.scores())
        return jnp.sum(jnp.where(pairs.weights_b > 0, pairs.weights_b * losses_b, 0))


@dataclasses.dataclass(frozen=True)
class HingeConfig(MFConfig):
    """`mf` with that loss."""

    kind: ClassVar[str] = "mf_hinge"
    loss: HardestHinge = HardestHinge()  # type: ignore[assignment]  # of a type of one's own


@dataclasses.dataclass(frozen=True)
class HingeRun(RunConfig):
    """A run of it."""

    model: HingeConfig = HingeConfig()


config = HingeRun(
    data=Table(),
    embedding=EmbeddingConfig(dim=16, optimizer=Adam(learning_rate=0.01)),
    train=TrainConfig(batch_size=128, epochs=4, optimizer=DenseAdagrad(0.01)),
)
