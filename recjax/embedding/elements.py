"""Features that are not pooled, as a module sees them: the rows of all bags end to end, and sums sample by sample.

Bags of any size lie packed, so that nothing is computed for padding but what rounds their number up. All that is
added up has an order of its own, also on a GPU (see `segment_sums.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from recjax.embedding.segment_sums import by_segments, segment_sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Elements:
    """The rows of a feature with pooling="none", in the order of the samples and within each in that of its bag.

    Features of one group (`recjax.data.batch.ElementGroup`) have equal `segments_L`: rows at one place are of one
    element.

    Attributes:
      rows_LxD: [L, D], zeros where there is nothing.
      segments_L: int32, ascending: the sample of each row; `samples` where there is nothing.
      samples: b.
      bag: H, if all bags hold as many; else None.
      pairs: P, room for the pairs of `beside`, also as a symbol; 0 where the data do not say that these elements meet
        others.
    """

    rows_LxD: jax.Array
    segments_L: jax.Array
    samples: int = dataclasses.field(metadata={"static": True})
    bag: int | None = dataclasses.field(default=None, metadata={"static": True})
    pairs: Any = dataclasses.field(default=0, metadata={"static": True})

    @property
    def mask_L(self) -> jax.Array:
        """True where there is a row: bool [L]."""
        return self.segments_L < self.samples

    @property
    def positions_L(self) -> jax.Array:
        """The place of each row within its bag, from 0: int32 [L]."""
        start_b, _ = self._edges()
        first_L = start_b.at[self.segments_L].get(mode="fill", fill_value=0)
        return jnp.arange(self.segments_L.shape[0], dtype=jnp.int32) - first_L

    @property
    def lengths_b(self) -> jax.Array:
        """The number of rows of each sample: int32 [b]."""
        return jnp.zeros(self.samples, jnp.int32).at[self.segments_L].add(1, mode="drop")

    def sum(self, values_LxK: jax.Array) -> jax.Array:
        """The sums of each sample's values, [b, K]; zeros where it has none."""
        return sum_by_sample(values_LxK, self.segments_L, self.samples)

    def repeat(self, values_bxK: jax.Array) -> jax.Array:
        """For each row the values of its sample, [L, K]; zeros where there is no row."""
        return repeat_by_sample(values_bxK, self.segments_L, self.samples)

    def softmax(self, scores_L: jax.Array) -> jax.Array:
        """The softmax of scores over the rows of each sample, [L]; 0 where there is no row."""
        most_b = jax.ops.segment_max(jax.lax.stop_gradient(scores_L), self.segments_L, self.samples, True)
        most_L = most_b.at[self.segments_L].get(mode="fill", fill_value=0)
        # Where there is no row a score may be anything: its exponential must not be infinite, for 0 times that is NaN.
        terms_L = jnp.where(self.mask_L, jnp.exp(jnp.where(self.mask_L, scores_L - most_L, 0)), 0)
        total_L = self.repeat(self.sum(terms_L[:, None]))[:, 0]
        return terms_L / jnp.where(self.mask_L, total_L, 1)

    def padded(self, longest: int | None = None) -> tuple[jax.Array, jax.Array]:
        """The rows in a rectangle, for modules that need one.

        Args:
          longest: H, the largest number of rows that is shown of a sample: those from place H on are left out. It may
            be left out itself where all bags hold as many.

        Returns:
          rows [b, H, D], zeros where there are none, and where there are some: bool [b, H].
        """
        if longest is None and self.bag is None:
            raise ValueError("the bags differ in size, so a rectangle needs `longest`, the rows of the longest one.")
        if self.bag is not None and longest in (None, self.bag):
            shape = (self.samples, self.bag)
            return self.rows_LxD.reshape(*shape, -1), self.mask_L.reshape(shape)
        start_b, end_b = self._edges()
        at_bxH = start_b[:, None] + jnp.arange(longest, dtype=jnp.int32)[None]
        mask_bxH = at_bxH < end_b[:, None]
        nothing = self.rows_LxD.shape[0]
        return self.rows_LxD.at[jnp.where(mask_bxH, at_bxH, nothing)].get(mode="fill", fill_value=0), mask_bxH

    def beside(self, others: Elements) -> Elements:
        """These elements once more for each of `others` of the same sample, the places of which stand for samples.

        So a history meets all items that are offered in its row, and its own ids are looked up once.

        Raises:
          ValueError: the data do not say that these elements meet others (`ElementGroup.like`).
        """
        if isinstance(self.pairs, int) and not self.pairs:
            raise ValueError("these elements meet no others: the group of the data names none of them in `like`.")
        start_b, _ = self._edges()
        theirs_L, ours_b = others.segments_L, self.lengths_b
        end_L = jnp.cumsum(ours_b.at[theirs_L].get(mode="fill", fill_value=0), dtype=jnp.int32)
        number_P = jnp.arange(self.pairs, dtype=jnp.int32)
        other_P = jnp.cumsum(jnp.zeros(self.pairs, jnp.int32).at[end_L].add(1, mode="drop"), dtype=jnp.int32)
        sample_P = theirs_L.at[other_P].get(mode="fill", fill_value=self.samples)
        before_P = end_L.at[other_P].get(mode="fill", fill_value=0) - ours_b.at[sample_P].get(mode="fill", fill_value=0)
        place_P = number_P - before_P
        ours_P = start_b.at[sample_P].get(mode="fill", fill_value=0) + place_P
        ours_P = jnp.where(sample_P < self.samples, ours_P, self.rows_LxD.shape[0])
        rows_PxD = _take_rows(self.rows_LxD, ours_P)
        return Elements(rows_PxD, other_P, theirs_L.shape[0])

    def _edges(self) -> tuple[jax.Array, jax.Array]:
        """Returns where the rows of each sample begin, and where they end: int32 [b] each."""
        end_b = jnp.cumsum(self.lengths_b, dtype=jnp.int32)
        return end_b - self.lengths_b, end_b


def sum_by_sample(values_LxK: jax.Array, segments_L: jax.Array, samples: int) -> jax.Array:
    """Sums of each sample's values, [samples, K]; `segments_L` ascends, and is `samples` where there is nothing."""
    if by_segments(atomics=False):
        return _sums(values_LxK, segments_L, samples)
    return jax.ops.segment_sum(values_LxK, segments_L, samples, indices_are_sorted=True)


def repeat_by_sample(values_bxK: jax.Array, segments_L: jax.Array, samples: int) -> jax.Array:
    """The values of each entry's sample, [L, K], zeros where there is nothing; segments as for `sum_by_sample`."""
    if by_segments(atomics=False):
        return _repeated(values_bxK, segments_L, samples)
    return values_bxK.at[segments_L].get(mode="fill", fill_value=0, indices_are_sorted=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sums(values_LxK: jax.Array, segments_L: jax.Array, samples: int) -> jax.Array:
    return segment_sums(values_LxK, jnp.arange(len(values_LxK), dtype=jnp.int32), segments_L, None, samples)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _repeated(values_bxK: jax.Array, segments_L: jax.Array, samples: int) -> jax.Array:
    del samples
    return values_bxK.at[segments_L].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _take_rows(rows_LxD: jax.Array, index_P: jax.Array) -> jax.Array:
    """Rows at these places, zeros beyond the last; gradients are added up in an order of their own, also on a GPU."""
    return rows_LxD.at[index_P].get(mode="fill", fill_value=0)


def _add_rows(saved: tuple[jax.Array, jax.Array], grads_PxD: jax.Array) -> tuple[jax.Array, None]:
    zeros_LxD, index_P = saved
    if not by_segments(atomics=False):
        return zeros_LxD.at[index_P].add(grads_PxD, mode="drop"), None
    index_P, order_P = jax.lax.sort((index_P, jnp.arange(len(index_P), dtype=jnp.int32)), num_keys=1)
    return segment_sums(grads_PxD, order_P, index_P, None, len(zeros_LxD)), None


_take_rows.defvjp(lambda rows, index: (_take_rows(rows, index), (jnp.zeros_like(rows), index)), _add_rows)

# The gradient of each is the other.
_sums.defvjp(
    lambda values, segments, samples: (_sums(values, segments, samples), segments),
    lambda samples, segments, grads: (_repeated(grads, segments, samples), None),
)
_repeated.defvjp(
    lambda values, segments, samples: (_repeated(values, segments, samples), segments),
    lambda samples, segments, grads: (_sums(grads, segments, samples), None),
)
