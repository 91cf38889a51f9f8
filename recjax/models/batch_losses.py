"""Losses of pairs of a user and an item that belong together, told apart from other items of the whole batch.

A batch has such pairs alone, its positives. Each is scored against candidates: the items of all other pairs of the
global batch. Users travel to the candidates, which stay on their device; of what is found there sums come back. So the
numbers depend on the batch and not on the devices that share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from recjax.errors import ConfigError
from recjax.models.dense import Precision
from recjax.parallel.mesh import BATCH_AXES
from recjax.settings.values import check_ranges


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of one device and what is known of the batch, inside `jax.shard_map` over BATCH_AXES.

    Attributes:
      user_bxE: vectors of the users.
      item_bxE: those of the items that belong to them.
      weights_b: weights of the pairs; one of weight 0 is no pair, and its item no candidate.
      ids_b: int32, which item each is: the row of its table.
      log_q_b: logarithm of the item's share of all training pairs.
      precision: of float32 products.
      scores_at_once: scores that a device holds at a time, where there are so many users and candidates.
    """

    user_bxE: jax.Array
    item_bxE: jax.Array
    weights_b: jax.Array
    ids_b: jax.Array
    log_q_b: jax.Array
    precision: Precision = Precision.HIGHEST
    scores_at_once: int = 2**22  # 16 MiB of float32

    def gather(self, x_b: jax.Array) -> jax.Array:
        """The same of all devices' pairs, in the order of the batch: [B, ...] from [b, ...].

        In the backward pass the gradients of all devices are summed, and each gets those of its pairs.
        """
        return jax.lax.all_gather(x_b, BATCH_AXES, axis=0, tiled=True)

    def scatter(self, x_B: jax.Array) -> jax.Array:
        """The sums over the devices, of which each keeps those of its pairs: [b, ...] from [B, ...]."""
        return jax.lax.psum_scatter(x_B, BATCH_AXES, scatter_dimension=0, tiled=True)

    def scores(self) -> jax.Array:
        """The score u . v of each pair: [b]."""
        return jnp.sum(self.user_bxE * self.item_bxE, axis=1)

    def against_candidates(self, measure: Callable[[jax.Array, jax.Array, Any], Any], about_b: Any = ()) -> Any:
        """Scores all users of the batch against this device's candidates, a block of users at a time.

        A candidate that is the user's own item does not count, whichever pair it comes from.

        Args:
          measure: (scores [r, b], whether each counts [r, b], of `about_b` what belongs to these users) -> arrays [r].
          about_b: what is known of this device's pairs: arrays [b].

        Returns:
          The arrays of `measure`, of all users: [B]. Each device's own differ.
        """
        counts_b = self.weights_b > 0

        def block(part: tuple[jax.Array, jax.Array, Any]) -> Any:
            user_rxE, ids_r, about_r = part
            scores_rxb = jnp.matmul(user_rxE, self.item_bxE.T, precision=self.precision)
            counts_rxb = counts_b[None] & (ids_r[:, None] != self.ids_b[None])
            return measure(scores_rxb, counts_rxb, about_r)

        whole = jax.tree.map(self.gather, (self.user_bxE, self.ids_b, about_b))
        B, rows = len(whole[1]), max(1, self.scores_at_once // len(self.ids_b))
        if rows >= B:
            return block(whole)
        blocks = -(-B // rows)
        rows = -(-B // blocks)

        def cut(x_B: jax.Array) -> jax.Array:
            padded = jnp.pad(x_B, ((0, blocks * rows - B), *([(0, 0)] * (x_B.ndim - 1))))
            return padded.reshape(blocks, rows, *x_B.shape[1:])

        parts = jax.lax.map(jax.checkpoint(block), jax.tree.map(cut, whole))
        return jax.tree.map(lambda x: x.reshape(blocks * rows)[:B], parts)


class BatchLoss(Protocol):
    """A loss over the batch: a frozen dataclass; one of your own is the type of the field `loss` of your model."""

    kind: ClassVar[str]

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """The sum of weight * loss over this device's pairs: []."""


@dataclasses.dataclass(frozen=True)
class InBatchSoftmax:
    """Cross-entropy of a user's item among all candidates of the batch, in nats.

    l_i = -s_ii + ln sum_j exp(s_ij), s_ij = u_i . v_j / temperature - ln q_j, j over the pair itself and candidates.
    q_j is the item's share of the training pairs: a frequent item is a candidate so much oftener than others, and would
    be pushed away as much more (Bengio and Senecal 2008; Yi et al. 2019, "Sampling-bias-corrected neural modeling").
    """

    kind: ClassVar[str] = "in_batch_softmax"
    temperature: float = 0.1  # divisor of the scores, above 0
    log_q: bool = True  # whether scores are corrected by ln q; false: frequent items are found less

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        log_q_b = pairs.log_q_b if self.log_q else jnp.zeros_like(pairs.log_q_b)

        def measure(scores_rxb: jax.Array, counts_rxb: jax.Array, about: Any) -> tuple[jax.Array, jax.Array]:
            del about
            logits_rxb = jnp.where(counts_rxb, scores_rxb / self.temperature - log_q_b[None], -jnp.inf)
            most_r = jax.lax.stop_gradient(jnp.max(logits_rxb, axis=1))
            most_r = jnp.where(jnp.isfinite(most_r), most_r, _least(logits_rxb.dtype))
            return most_r, jnp.sum(jnp.exp(logits_rxb - most_r[:, None]), axis=1)

        own_b = pairs.scores() / self.temperature - log_q_b
        most_B, sums_B = pairs.against_candidates(measure)
        top_B = jax.lax.pmax(jax.lax.stop_gradient(most_B), BATCH_AXES)
        top_B = jnp.maximum(top_B, jax.lax.stop_gradient(pairs.gather(own_b)))
        others_b = pairs.scatter(sums_B * jnp.exp(most_B - top_B))
        top_b = _own_part(top_B, len(own_b))
        losses_b = jnp.log(jnp.exp(own_b - top_b) + others_b) + top_b - own_b
        return jnp.sum(jnp.where(pairs.weights_b > 0, pairs.weights_b * losses_b, 0))


@dataclasses.dataclass(frozen=True)
class Bpr:
    """Bayesian personalised ranking: -ln sigmoid(s_ii - s_ij), the mean over all candidates j of the batch.

    Source: Rendle et al. 2009, arXiv:1205.2618, which draws one j for each pair from all items.
    """

    kind: ClassVar[str] = "bpr"

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        return _sum_of_means(pairs, lambda scores, own_r: jax.nn.softplus(scores - own_r[:, None]))


@dataclasses.dataclass(frozen=True)
class CosineContrastive:
    """1 - s_ii + weight * the mean over all candidates j of the batch of max(0, s_ij - margin); vectors normalised.

    Source: Mao et al. 2021, "SimpleX", arXiv:2109.12613, equation 2, which draws candidates from all items.
    """

    kind: ClassVar[str] = "ccl"
    margin: float = 0.8  # score from which on a candidate is pushed away, -1 to 1
    weight: float = 100.0  # of the candidates' mean beside the pair itself

    def __post_init__(self) -> None:
        check_ranges(self, margin=(-1, 1))
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight is {self.weight}; it must be above 0 and finite.")

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        pushed = _sum_of_means(pairs, lambda scores, own_r: jax.nn.relu(scores - self.margin))
        return jnp.sum(pairs.weights_b * (1 - pairs.scores())) + self.weight * pushed


AnyBatchLoss = InBatchSoftmax | Bpr | CosineContrastive


def _sum_of_means(pairs: Pairs, term: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """The sum over this device's pairs of weight * mean over candidates of term(scores [r, b], own scores [r]): []."""

    def measure(scores_rxb: jax.Array, counts_rxb: jax.Array, own_r: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms_rxb = jnp.where(counts_rxb, term(scores_rxb, own_r), 0)
        return jnp.sum(terms_rxb, axis=1), jnp.sum(counts_rxb, axis=1, dtype=scores_rxb.dtype)

    sums_b, numbers_b = map(pairs.scatter, pairs.against_candidates(measure, pairs.scores()))
    return jnp.sum(pairs.weights_b * sums_b / jnp.maximum(numbers_b, 1))


def _own_part(x_B: jax.Array, b: int) -> jax.Array:
    """This device's part of an array that all have alike: [b]."""
    return jax.lax.dynamic_slice_in_dim(x_B, jax.lax.axis_index(BATCH_AXES) * b, b)


def _least(dtype: Any) -> jax.Array:
    return jnp.asarray(jnp.finfo(dtype).min / 4, dtype)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; it must be above 0 and finite: scores are divided by it.")
