"""Losses of pairs of a user and an item that belong together, told apart from other items.

A batch has such pairs alone, its positives. Each is scored against candidates: the items of all other pairs of the
global batch; items that are drawn for it, a few with each pair and shared by all; or all items, each on a device that
holds it. Users travel to the candidates, which stay on their device; of what is computed there sums come back. So the
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
class Drawn:
    """Items that were drawn, m with each pair of one device.

    Attributes:
      item_bxMxE: their vectors.
      ids_bxM: int32, which they are.
      log_q_bxM: as `Pairs.log_q_b`.
    """

    item_bxMxE: jax.Array
    ids_bxM: jax.Array
    log_q_bxM: jax.Array


@dataclasses.dataclass(frozen=True)
class AllItems:
    """One device's share of all items that training knows.

    Attributes:
      rows_cxD: their rows.
      ids_c: int32, which they are; -1 where there is none.
      vectors: from rows [C, D] to vectors [C, E].
    """

    rows_cxD: jax.Array
    ids_c: jax.Array
    vectors: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of one device and what is known of the batch, inside `jax.shard_map` over BATCH_AXES.

    Attributes:
      user_bxE: vectors of the users.
      item_bxE: those of the items that belong to them.
      weights_b: weights of the pairs; one of weight 0 is no pair, and its item no candidate.
      ids_b: int32, which item each is: the row of its table.
      log_q_b: logarithm of how often the item is a candidate, up to a constant that all have in common.
      drawn: items that were drawn for the batch, this device's; None: none were.
      all_items: for a loss over all items, this device's; None: there is no such loss.
      precision: of float32 products.
      scores_at_once: scores that a device holds at a time, where there are so many users and candidates.
    """

    user_bxE: jax.Array
    item_bxE: jax.Array
    weights_b: jax.Array
    ids_b: jax.Array
    log_q_b: jax.Array
    drawn: Drawn | None = None
    all_items: AllItems | None = None
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

    def candidates(self, in_batch: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """This device's candidates: vectors [c, E], which they are, log q, and whether they count, [c] each.

        Args:
          in_batch: whether the items of the pairs are among them, or drawn ones alone. Items that were drawn with a
            pair of weight 0 do not count: such pairs fill up the batch on one mesh and not on another.
        """
        counts_b = self.weights_b > 0
        parts = [(self.item_bxE, self.ids_b, self.log_q_b, counts_b)] if in_batch else []
        if (drawn := self.drawn) is not None:
            counts_bxM = jnp.broadcast_to(counts_b[:, None], drawn.ids_bxM.shape)
            vectors_cxE = drawn.item_bxMxE.reshape(-1, drawn.item_bxMxE.shape[2])
            parts.append((vectors_cxE, drawn.ids_bxM.ravel(), drawn.log_q_bxM.ravel(), counts_bxM.ravel()))
        vectors_cxE, ids_c, log_q_c, counts_c = map(jnp.concatenate, zip(*parts, strict=True))
        return vectors_cxE, ids_c, log_q_c, counts_c

    def against_candidates(
        self, in_batch: bool, measure: Callable[[jax.Array, jax.Array, jax.Array, Any], Any], about_b: Any = ()
    ) -> Any:
        """Scores all users of the batch against this device's candidates, a block of users at a time.

        A candidate that is the user's own item does not count, whichever pair it comes from.

        Args:
          in_batch: as for `candidates`.
          measure: (scores [r, c], whether each counts [r, c], log q [c], of `about_b` what belongs to these users) ->
            arrays [r].
          about_b: what is known of this device's pairs: arrays [b].

        Returns:
          The arrays of `measure`, of all users: [B]. Each device's own differ.
        """
        vectors_cxE, ids_c, log_q_c, counts_c = self.candidates(in_batch)

        def block(part: tuple[jax.Array, jax.Array, Any]) -> Any:
            user_rxE, ids_r, about_r = part
            scores_rxc = jnp.matmul(user_rxE, vectors_cxE.T, precision=self.precision)
            counts_rxc = counts_c[None] & (ids_r[:, None] != ids_c[None])
            return measure(scores_rxc, counts_rxc, log_q_c, about_r)

        whole = jax.tree.map(self.gather, (self.user_bxE, self.ids_b, about_b))
        B, rows = len(whole[1]), max(1, self.scores_at_once // len(ids_c))
        if rows >= B:
            return block(whole)
        blocks = -(-B // rows)
        rows = -(-B // blocks)

        def cut(x_B: jax.Array) -> jax.Array:
            padded = jnp.pad(x_B, ((0, blocks * rows - B), *([(0, 0)] * (x_B.ndim - 1))))
            return padded.reshape(blocks, rows, *x_B.shape[1:])

        parts = jax.lax.map(jax.checkpoint(block), jax.tree.map(cut, whole))
        return jax.tree.map(lambda x: x.reshape(blocks * rows)[:B], parts)

    def against_all_items(
        self, measure: Callable[[jax.Array, jax.Array, jax.Array, Any], Any], about_b: Any = ()
    ) -> Any:
        """Scores all users of the batch against this device's share of all items, a block of items at a time.

        A user's own item does not count. A block is computed again for the gradients, its vectors too.

        Args:
          measure: as for `against_candidates`, of all users and a block of items: arrays [B]. All log q are 0.
          about_b: likewise.

        Returns:
          The arrays of `measure`, of each block of this device: [blocks, B].
        """
        assert self.all_items is not None
        rows_cxD, ids_c = self.all_items.rows_cxD, self.all_items.ids_c
        make_vectors = self.all_items.vectors
        user_BxE, ids_B, about_B = jax.tree.map(self.gather, (self.user_bxE, self.ids_b, about_b))

        def block(part: tuple[jax.Array, jax.Array]) -> Any:
            rows_CxD, ids_C = part
            vectors_CxE = make_vectors(rows_CxD).astype(user_BxE.dtype)
            scores_BxC = jnp.matmul(user_BxE, vectors_CxE.T, precision=self.precision)
            counts_BxC = (ids_C >= 0)[None] & (ids_B[:, None] != ids_C[None])
            return measure(scores_BxC, counts_BxC, jnp.zeros(ids_C.shape, scores_BxC.dtype), about_B)

        c = len(ids_c)
        blocks = -(-c // max(1, self.scores_at_once // len(ids_B)))
        if blocks == 1:
            return jax.tree.map(lambda x: x[None], block((rows_cxD, ids_c)))
        C = -(-c // blocks)
        rows_CxD = jnp.pad(rows_cxD, ((0, blocks * C - c), (0, 0))).reshape(blocks, C, -1)
        ids_C = jnp.pad(ids_c, (0, blocks * C - c), constant_values=-1).reshape(blocks, C)
        return jax.lax.map(jax.checkpoint(block), (rows_CxD, ids_C))


def make_pairs(
    vectors: tuple[jax.Array, jax.Array, jax.Array | None],
    weights_b: jax.Array,
    items: Any,
    all_items: AllItems | None = None,
) -> Pairs:
    """The pairs of one device.

    Args:
      vectors: of users and items, [b, E]; and of drawn items, [b, M, E], or None.
      weights_b: of the pairs.
      items: what is known of their items: "ids_B", "log_q_B", and of drawn ones "drawn_BxM" and "drawn_log_q_BxM".
      all_items: as `Pairs` has it.
    """
    user_bxE, item_bxE, drawn = (None if x is None else x.astype(weights_b.dtype) for x in vectors)
    of_drawn = None if drawn is None else Drawn(drawn, items["drawn_BxM"], items["drawn_log_q_BxM"])
    assert user_bxE is not None and item_bxE is not None
    return Pairs(user_bxE, item_bxE, weights_b, items["ids_B"], items["log_q_B"], of_drawn, all_items)


class BatchLoss(Protocol):
    """A loss over the batch: a frozen dataclass; one of your own is the type of the field `loss` of your model.

    If `in_batch` is false and `negatives` 0, the candidates are all items: `Pairs.against_all_items`.

    Attributes:
      kind: its name.
      in_batch: whether the items of the batch's other pairs are candidates.
      negatives: items that are drawn with each pair, uniformly from those that training knows, as candidates for all
        pairs of the batch.
    """

    kind: ClassVar[str]

    @property
    def in_batch(self) -> bool: ...  # noqa: D102 (described above)

    @property
    def negatives(self) -> int: ...  # noqa: D102 (described above)

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """The sum of weight * loss over this device's pairs: []."""


def takes_all_items(loss: BatchLoss) -> bool:
    """Returns True if the candidates of a loss are all items that training knows."""
    return not loss.in_batch and not loss.negatives


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """Base of the losses -s_ii + weight * ln sum_j exp(s_ij)."""

    temperature: float = 0.1  # divisor of the scores, above 0
    weight: float = 1.0  # of the candidates beside the pair itself; 1: cross-entropy
    decoupled: bool = False  # whether the pair itself is left out of its own sum

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be above 0 and finite: scores are divided by it."
            )
        _check_weight(self.weight)

    def logits(self, scores: jax.Array, log_q: jax.Array) -> jax.Array:
        """s_ij, from u_i . v_j and ln q_j."""
        return scores / self.temperature - log_q

    def measure(
        self, scores_rxc: jax.Array, counts_rxc: jax.Array, log_q_c: jax.Array, about: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The largest logit of some users with some candidates, and the sum of exp(logit - largest): [r] each."""
        del about
        logits_rxc = jnp.where(counts_rxc, self.logits(scores_rxc, log_q_c[None]), -jnp.inf)
        most_r = jax.lax.stop_gradient(jnp.max(logits_rxc, axis=1))
        most_r = jnp.where(jnp.isfinite(most_r), most_r, _least(logits_rxc.dtype))
        return most_r, jnp.sum(jnp.exp(logits_rxc - most_r[:, None]), axis=1)

    def sum_over_devices(self, pairs: Pairs, most_B: jax.Array, sums_B: jax.Array) -> jax.Array:
        """`BatchLoss.sum_losses`, of what `measure` gives for all users and all of this device's candidates."""
        own_b = self.logits(pairs.scores(), pairs.log_q_b)
        top_B = jax.lax.pmax(jax.lax.stop_gradient(most_B), BATCH_AXES)
        if not self.decoupled:
            top_B = jnp.maximum(top_B, jax.lax.stop_gradient(pairs.gather(own_b)))
        sums_b = pairs.scatter(sums_B * jnp.exp(most_B - top_B))
        top_b = _own_part(top_B, len(own_b))
        if not self.decoupled:
            sums_b = sums_b + jnp.exp(own_b - top_b)
        any_b = sums_b > 0  # false without candidates: the largest of them has a term of 1
        losses_b = self.weight * (jnp.log(jnp.where(any_b, sums_b, 1)) + top_b) - own_b
        losses_b = jnp.where(any_b, losses_b, 0)
        return jnp.sum(jnp.where(pairs.weights_b > 0, pairs.weights_b * losses_b, 0))


@dataclasses.dataclass(frozen=True)
class BatchSoftmax(_Softmax):
    """Cross-entropy of a user's item among the candidates, in nats.

    l_i = -s_ii + weight * ln sum_j exp(s_ij), s_ij = u_i . v_j / temperature - ln q_j, j over the pair and candidates;
    `decoupled`: over candidates alone, so that the pull on a pair does not fade as it is told apart (Yeh et al. 2022,
    arXiv:2110.06848, "Decoupled contrastive learning"). Then the loss of a pair without candidates is 0.
    q_j is how often the item is a candidate: a frequent item is one so much oftener than others, and would be pushed
    away as much more (Bengio and Senecal 2008; Yi et al. 2019, "Sampling-bias-corrected neural modeling"). Of the
    pairs' items it is their share of the training pairs, of drawn ones 1 / number of items, of both (Yang et al. 2020,
    "Mixed negative sampling") the sum of the one and `negatives` times the other. A `weight` above 1 gives the pair
    itself a higher temperature than the candidates: with `decoupled` this is the bilateral softmax loss of Wu et al.
    2024, arXiv:2312.12882, whose tau_1 / tau_2 it is.
    """

    kind: ClassVar[str] = "softmax"
    log_q: bool = True  # whether scores are corrected by ln q; false: frequent items are found less
    in_batch: bool = True  # whether the items of the batch's other pairs are candidates
    negatives: int = 0  # items drawn with each pair, as candidates for all pairs of the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, negatives=(0, 10_000))
        if takes_all_items(self):
            raise ConfigError(
                "in_batch is false and negatives 0, so there are no candidates. Draw some: negatives=1; or take all "
                "items: model.loss=full_softmax."
            )

    def logits(self, scores: jax.Array, log_q: jax.Array) -> jax.Array:
        """See `_Softmax`."""
        return super().logits(scores, log_q) if self.log_q else scores / self.temperature

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        most_B, sums_B = pairs.against_candidates(self.in_batch, self.measure)
        return self.sum_over_devices(pairs, most_B, sums_B)


@dataclasses.dataclass(frozen=True)
class FullSoftmax(_Softmax):
    """Cross-entropy of a user's item among all items that training knows, in nats.

    As `BatchSoftmax`, with j over the pair and all other items, s_ij = u_i . v_j / temperature. A step takes
    8 * B * V * E operations for B pairs, V items and vectors of length E, and changes the row of every item.
    """

    kind: ClassVar[str] = "full_softmax"
    in_batch: ClassVar[bool] = False
    negatives: ClassVar[int] = 0

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        most_KxB, sums_KxB = pairs.against_all_items(self.measure)
        most_B = jnp.max(most_KxB, axis=0)
        return self.sum_over_devices(pairs, most_B, jnp.sum(sums_KxB * jnp.exp(most_KxB - most_B[None]), axis=0))


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """Base of losses whose candidates are drawn, or those of the batch where none are."""

    negatives: int = 1  # items drawn with each pair, as candidates for all pairs of the batch; 0: those of the pairs

    def __post_init__(self) -> None:
        check_ranges(self, negatives=(0, 10_000))

    @property
    def in_batch(self) -> bool:
        """True if the items of the batch's other pairs are candidates."""
        return not self.negatives


@dataclasses.dataclass(frozen=True)
class Bpr(_Drawing):
    """Bayesian personalised ranking: -ln sigmoid(s_ii - s_ij), the mean over all candidates j.

    Source: Rendle et al. 2009, arXiv:1205.2618, which draws one j for each pair.
    """

    kind: ClassVar[str] = "bpr"

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        means_b, _ = _over_candidates(
            pairs, self.in_batch, lambda scores, own_r: jax.nn.softplus(scores - own_r[:, None])
        )
        return jnp.sum(pairs.weights_b * means_b)


@dataclasses.dataclass(frozen=True)
class CosineContrastive(_Drawing):
    """1 - s_ii + weight * the mean over all candidates j of max(0, s_ij - margin), for vectors of length 1.

    Source: Mao et al. 2021, "SimpleX", arXiv:2109.12613, equation 2.
    """

    kind: ClassVar[str] = "ccl"
    margin: float = 0.8  # score from which on a candidate is pushed away, -1 to 1
    weight: float = 100.0  # of the candidates' mean beside the pair itself

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, margin=(-1, 1))
        _check_weight(self.weight)

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        means_b, _ = _over_candidates(pairs, self.in_batch, lambda scores, own_r: jax.nn.relu(scores - self.margin))
        return jnp.sum(pairs.weights_b * (1 - pairs.scores() + self.weight * means_b))


@dataclasses.dataclass(frozen=True)
class CalibratedBce(_Drawing):
    """Binary cross-entropy of pair and candidates, of the pair in part: -b ln sigmoid(s_ii) - sum_j ln sigmoid(-s_ij).

    b = a (t (1 - 1 / a) + 1 / a), a the share of all other items that are candidates. Plain cross-entropy of so
    few negatives, t = 0, is overconfident; with t = 1 probabilities are those of all items (Petrov and Macdonald 2023,
    "gSASRec", arXiv:2308.07192, equations 11 and 12). The sum is divided by the number of candidates + 1.
    """

    kind: ClassVar[str] = "gbce"
    t: float = 0.75  # 0 to 1, see above

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, t=(0, 1))

    def sum_losses(self, pairs: Pairs) -> jax.Array:
        """See `BatchLoss`."""
        own_b = pairs.scores()
        means_b, numbers_b = _over_candidates(pairs, self.in_batch, lambda scores, own_r: jax.nn.softplus(scores))
        factor_b = jnp.ones_like(own_b)
        if pairs.drawn is not None:  # each item is drawn with log q = ln(negatives / items)
            others = self.negatives * jnp.exp(-pairs.drawn.log_q_bxM[0, 0]) - 1
            factor_b = self.t * (jnp.minimum(numbers_b / others, 1) - 1) + 1
        losses_b = (factor_b * jax.nn.softplus(-own_b) + numbers_b * means_b) / (numbers_b + 1)
        return jnp.sum(pairs.weights_b * losses_b)


AnyBatchLoss = BatchSoftmax | FullSoftmax | Bpr | CosineContrastive | CalibratedBce


def _over_candidates(
    pairs: Pairs, in_batch: bool, term: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """For each pair of this device the mean over candidates of term(scores [r, c], own scores [r]), and their number.

    [b] each; the mean over none is 0.
    """

    def measure(scores: jax.Array, counts: jax.Array, log_q_c: jax.Array, own_r: jax.Array) -> tuple[Any, Any]:
        del log_q_c
        terms_rxc = jnp.where(counts, term(scores, own_r), 0)
        return jnp.sum(terms_rxc, axis=1), jnp.sum(counts, axis=1, dtype=scores.dtype)

    sums_b, numbers_b = map(pairs.scatter, pairs.against_candidates(in_batch, measure, pairs.scores()))
    return sums_b / jnp.maximum(numbers_b, 1), numbers_b


def _own_part(x_B: jax.Array, b: int) -> jax.Array:
    """This device's part of an array that all have alike: [b]."""
    return jax.lax.dynamic_slice_in_dim(x_B, jax.lax.axis_index(BATCH_AXES) * b, b)


def _check_weight(weight: float) -> None:
    if not 0 < weight < math.inf:
        raise ConfigError(f"weight is {weight}; it must be above 0 and finite.")


def _least(dtype: Any) -> jax.Array:
    return jnp.asarray(jnp.finfo(dtype).min / 4, dtype)
