"""From the rows that a device fetched to what each feature's bags pool to.

Bags of one size are summed together, over all features of a group, by an operation with a gradient of its own:
`sum_bags`, or a kernel. Neither holds a row for every id, [b, H, D], which costs several times the sum itself.
`sum_bags` adds the gradients of all sizes up in one buffer [U, D]; a kernel makes one for each size, where automatic
differentiation alone would make one for each feature. On a GPU the gradients are sorted by rows and added up segment by
segment, and so are jagged bags (`segment_sums.py`), unless atomic additions are allowed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recjax import kernels
from recjax.embedding.elements import Elements, sum_by_sample
from recjax.embedding.routing.routed import FeatureRouting
from recjax.embedding.segment_sums import by_segments, segment_sums
from recjax.embedding.spec import FeatureSpec
from recjax.gpu_kernels.bag_sums import sum_rows_of_bags

_TOGETHER = 16  # ids of a bag that are summed in one loop over the samples; more make the program long, not faster


class SortedIds(NamedTuple):
    """The order of all ids of some features by the rows that they name.

    Attributes:
      features: whose ids are numbered one after the other.
      order_M: int32, their numbers in that order.
      row_M: int32, ascending: the fetched row of each; beyond them where there is none.
      start_U: int32, of each fetched row the first place in that order; M of one that is not there.
      table_RxD: None, or the rows of a table on this device, from which bags may be summed instead of fetched
        rows.
      slot_M: beside it, the row of each id there, in the order of the numbers; R where there is none.
    """

    features: tuple[str, ...]
    order_M: jax.Array
    row_M: jax.Array
    start_U: jax.Array
    table_RxD: jax.Array | None = None
    slot_M: jax.Array | None = None


def pool(
    features: Several[FeatureSpec],
    rows_UxD: jax.Array,
    routing: Mapping[str, FeatureRouting],
    samples: int,
    at_home: tuple[jax.Array, jax.Array] | None = None,
    atomics: bool = False,
    order: SortedIds | None = None,
) -> dict[str, jax.Array | Elements]:
    """Pools the bags of all features of a group from its fetched rows. Differentiable in the rows.

    Args:
      features: those that look up the group's tables.
      rows_UxD: the fetched rows.
      routing: of each feature, by its name.
      samples: b.
      at_home: see `GroupExchange.fused_operands`: where the rows are on this device, sums are taken straight from its
        table.
      atomics: whether a GPU may add up by atomic operations, in any order.
      order: that of all ids of these features, if it is known; then no gradient is sorted.

    Returns:
      by feature name: [b, D], zeros for an empty bag; `Elements` for a feature that is not pooled.
    """
    # A feature with one bag a sample is summed sample by sample beside all others with bags of its size, as models
    # take them. Ids that are not summed here, in jagged bags and sequences, are bags of one, feature by feature.
    whole = {f.name for f in features if f.pooling != "none" and routing[f.name].segments is None}
    bags = {f.name: _bags(f, routing[f.name]) for f in features}
    alike: dict[tuple[int, bool], list[str]] = collections.defaultdict(list)
    for name, (inverse_NxH, _) in bags.items():
        alike[inverse_NxH.shape[1], name in whole].append(name)
    joined = tuple(_join([bags[name] for name in names], by_sample) for (_, by_sample), names in alike.items())
    if at_home is not None:
        table_RxD, slots_C = at_home
        found = tuple(kernels.table_bags(table_RxD, slots_C, rows_UxD, inverse, weights) for inverse, weights in joined)
    elif kernels.available(rows_UxD.dtype):
        found = tuple(kernels.bags(rows_UxD, inverse, weights) for inverse, weights in joined)
    else:
        found = sum_bags(rows_UxD, joined, atomics, _at_home(order, alike, bags), _entries(order, alike, bags))
    sums: dict[str, jax.Array] = {}
    # The gradient of a split is one concatenation; slices would each be padded to the whole and added up. Features lie
    # side by side, [b, F D]: a TPU would give parts of [b, F, D], [b, 1, D] each, 128 times their size.
    for ((_, by_sample), names), sums_NxD in zip(alike.items(), found, strict=True):
        if by_sample:
            D = sums_NxD.shape[1]
            parts = jax.lax.split(sums_NxD.reshape(-1, len(names) * D), [D] * len(names), axis=1)
            sums |= zip(names, parts, strict=True)
        else:
            sums |= zip(names, jax.lax.split(sums_NxD, [len(bags[name][0]) for name in names]), strict=True)
    pooled: dict[str, jax.Array | Elements] = {}
    for feature in features:
        of_bags, of = sums[feature.name], routing[feature.name]
        if feature.name in whole:
            pooled[feature.name] = of_bags
        elif feature.pooling == "none" and of.segments is None:
            there_BxH = of.inverse < rows_UxD.shape[0]
            segments_BxH = jnp.where(there_BxH, jnp.arange(samples, dtype=jnp.int32)[:, None], samples)
            pooled[feature.name] = Elements(of_bags, segments_BxH.ravel(), samples, of.inverse.shape[1])
        elif feature.pooling == "none":
            pooled[feature.name] = Elements(of_bags, of.segments, samples, pairs=of.pairs)
        elif by_segments(atomics):
            pooled[feature.name] = sum_by_sample(of_bags, of.segments, samples)
        else:
            pooled[feature.name] = jax.ops.segment_sum(of_bags, of.segments, samples, indices_are_sorted=False)
    return pooled


def _bags(feature: FeatureSpec, routing: FeatureRouting) -> tuple[Any, Any]:
    """Indices and weights, [N, H] each (weights may be None)."""
    if feature.pooling != "none" and routing.segments is None:
        return routing.inverse, routing.weights
    return routing.inverse.reshape(-1, 1), None if routing.weights is None else routing.weights.reshape(-1, 1)


def _join(bags: list[tuple[Any, Any]], by_sample: bool) -> tuple[Any, Any]:
    """The bags of several features, [N, H]: sample by sample, or one feature below the other."""

    def join(arrays: list[Any]) -> Any:
        return jnp.stack(arrays, axis=1).reshape(-1, arrays[0].shape[1]) if by_sample else jnp.concatenate(arrays)

    inverse_NxH = join([inverse for inverse, _ in bags])
    given = [weights for _, weights in bags if weights is not None]
    if not given:
        return inverse_NxH, None
    ones = [jnp.ones(inverse.shape, given[0].dtype) if weights is None else weights for inverse, weights in bags]
    return inverse_NxH, join(ones)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sum_bags(
    rows_UxD: jax.Array,
    bags: tuple[tuple[Any, Any], ...],
    atomics: bool = False,
    at_home: Any = None,
    entries: Any = None,
) -> tuple[jax.Array, ...]:
    """Weighted sums of rows. Differentiable in the rows alone.

    Args:
      rows_UxD: the rows.
      bags: for each size H of a bag: indices of rows, int32 [N, H], beyond U where there is nothing; and
        weights [N, H], or None where all are 1.
      atomics: whether a GPU may add gradients up by atomic operations, in any order.
      at_home: None, or a table that has all rows, and the bags with indices of its rows.
      entries: None, or the ids in the order of their rows, as `_entries` gives them.

    Returns:
      for each size of a bag the sums, [N, D].
    """
    rows_RxD, bags = at_home or (rows_UxD, bags)
    return tuple(_sum(rows_RxD, inverse_NxH, weights_NxH) for inverse_NxH, weights_NxH in bags)


def _forward(rows_UxD: jax.Array, bags: Any, atomics: bool, at_home: Any, entries: Any) -> Any:
    return sum_bags(rows_UxD, bags, atomics, at_home, entries), (jnp.zeros_like(rows_UxD), bags, entries)


def _backward(atomics: bool, saved: Any, sums_grads: Any) -> Any:
    total_UxD, bags, entries = saved
    if by_segments(atomics):
        row_L, bag_L, weights_L, start_U = entries or (*_sorted_entries(bags), None)
        grads_NxD = jnp.concatenate(sums_grads)
        sums_UxD = segment_sums(grads_NxD, bag_L, row_L, weights_L, len(total_UxD), start_T=start_U)
        return sums_UxD, None, None, None
    for (inverse_NxH, weights_NxH), grads_NxD in zip(bags, sums_grads, strict=True):
        total_UxD = _add(total_UxD, inverse_NxH, weights_NxH, grads_NxD)
    return total_UxD, None, None, None


sum_bags.defvjp(_forward, _backward)


def _at_home(
    order: SortedIds | None, alike: Mapping[tuple[int, bool], list[str]], bags: Mapping[str, tuple[Any, Any]]
) -> Any:
    """Returns the table that has all rows, and the joined bags with its rows, for `sum_bags`; None if there is none."""
    if order is None or order.table_RxD is None or order.slot_M is None:
        return None
    shapes = [bags[name][0].shape for name in order.features]
    parts = jax.lax.split(order.slot_M, [math.prod(shape) for shape in shapes])
    slots = {name: part.reshape(shape) for name, part, shape in zip(order.features, parts, shapes, strict=True)}
    of_table = [
        _join([(slots[name], bags[name][1]) for name in names], by_sample) for (_, by_sample), names in alike.items()
    ]
    return order.table_RxD, tuple(of_table)


def _entries(
    order: SortedIds | None, alike: Mapping[tuple[int, bool], list[str]], bags: Mapping[str, tuple[Any, Any]]
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array] | None:
    """Returns what `_sorted_entries` does of the joined bags, and where rows start, from an order that is known.

    Equal rows come in it.

    Args:
      order: the order; None: it is not known.
      alike: names of the features whose bags are joined, and whether sample by sample.
      bags: of each feature.
    """
    if order is None:
        return None
    bag_of: dict[str, jax.Array] = {}
    before = 0
    for (H, by_sample), names in alike.items():
        for place, name in enumerate(names):
            count = len(bags[name][0])
            first, step = (before + place, len(names)) if by_sample else (before, 1)
            of_bag_N = first + step * jnp.arange(count, dtype=jnp.int32)
            bag_of[name] = jnp.broadcast_to(of_bag_N[:, None], (count, H)).ravel()
            before += 0 if by_sample else count
        before += len(names) * len(bags[names[0]][0]) if by_sample else 0
    weights = None
    if given := [bags[name][1] for name in order.features if bags[name][1] is not None]:
        every = ((bags[name][0].shape, bags[name][1]) for name in order.features)
        weights = jnp.concatenate([jnp.ones(s, given[0].dtype).ravel() if w is None else w.ravel() for s, w in every])
    bag_M = jnp.concatenate([bag_of[name] for name in order.features])
    weights_M = None if weights is None else weights[order.order_M]
    return order.row_M, bag_M[order.order_M], weights_M, order.start_U


def _sorted_entries(bags: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The ids of all bags sorted by the row that each names: that row, the bag, and the weight (or None), [L] each."""
    ends = list(itertools.accumulate(len(inverse) for inverse, _ in bags))
    of_bag = [
        jnp.broadcast_to(jnp.arange(end - len(inverse), end, dtype=jnp.int32)[:, None], inverse.shape).ravel()
        for end, (inverse, _) in zip(ends, bags, strict=True)
    ]
    index_L = jnp.concatenate([inverse.ravel() for inverse, _ in bags])
    row_L, order_L = jax.lax.sort((index_L, jnp.arange(len(index_L), dtype=jnp.int32)), num_keys=1)
    bag_L = jnp.concatenate(of_bag)[order_L]
    given = [weights for _, weights in bags if weights is not None]
    if not given:
        return row_L, bag_L, None
    each = [jnp.ones(inverse.shape, given[0].dtype) if w is None else w for inverse, w in bags]
    return row_L, bag_L, jnp.concatenate([weights.ravel() for weights in each])[order_L]


def _sum(rows_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array | None) -> jax.Array:
    (N, H), D = inverse_NxH.shape, rows_UxD.shape[1]
    if H > 1 and kernels.available_on_gpu(rows_UxD.dtype, D, max(rows_UxD.size, N * max(D, H))):  # one: a plain gather
        return sum_rows_of_bags(rows_UxD, inverse_NxH, weights_NxH)

    def part(first: Any, count: int) -> Any:
        total: Any = 0
        for h in range(count):
            index_N = jax.lax.dynamic_index_in_dim(inverse_NxH, first + h, axis=1, keepdims=False)
            term_NxD = rows_UxD.at[index_N].get(mode="fill", fill_value=0)
            if weights_NxH is not None:
                term_NxD *= jax.lax.dynamic_index_in_dim(weights_NxH, first + h, axis=1)
            total += term_NxD
        return total

    whole, rest = divmod(inverse_NxH.shape[1], _TOGETHER)
    total_NxD = part(whole * _TOGETHER, rest) if rest else part(0, _TOGETHER)
    first = 0 if rest else 1
    if first == whole:  # JAX traces a loop that never runs, and XLA removes it
        return total_NxD
    return jax.lax.fori_loop(first, whole, lambda i, total: total + part(i * _TOGETHER, _TOGETHER), total_NxD)


def _add(
    total_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array | None, grads_NxD: jax.Array
) -> jax.Array:
    def one(h: Any, total_UxD: jax.Array) -> jax.Array:
        index_N = jax.lax.dynamic_index_in_dim(inverse_NxH, h, axis=1, keepdims=False)
        if weights_NxH is None:
            return total_UxD.at[index_N].add(grads_NxD, mode="drop")
        weights_Nx1 = jax.lax.dynamic_index_in_dim(weights_NxH, h, axis=1)
        return total_UxD.at[index_N].add(grads_NxD * weights_Nx1, mode="drop")

    H = inverse_NxH.shape[1]
    return one(0, total_UxD) if H == 1 else jax.lax.fori_loop(0, H, one, total_UxD)
