"""Means over rows whose columns lie in several segments: what row-wise optimizers ask for where a table is split.

Row-wise Adagrad keeps one accumulator a row, of the mean square of the whole row's gradient. Each device that holds
some columns of a row knows the sum over these alone. Whoever looked the row up asked for all its columns, and so knows
who holds them: each holder sends its sums to all that asked, these add them up, always in the same order, and send the
mean back. No id travels, and no list is longer than in the exchange of rows. In the scope row_statistic, for each
group that holds columns of such rows, with C rows of each of O owners as in its row_exchange:

  all-to-all   of the sums      O * C * itemsize bytes a device (of column-wise segments N * C)
  all-to-all   of the means     the same, back

and inside hosts as often again where rows travel in two steps; an all-reduce of [M] over replica groups that hold the
same; of replicated segments one of [R] in place of both. That is two floats a row that is asked for, where W columns of
it travelled in either direction. To send each sum straight to the other holders would take one float for each of them
and touched row; but who holds a row together differs from row to row, the blocks of that all-to-all would all be as
large as the largest, and a holder of a popular table would send them all.

Where owners pool vectors (`pooled/`) the same goes with one number for each id, in lists as long as those of the ids.

Tables whose optimizer updates every row, asked for or not, are small: one all-reduce of [rows of all of them].
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from recjax.embedding.buffers import Tables
from recjax.embedding.exchange import pooled
from recjax.embedding.exchange.base import GroupExchange
from recjax.embedding.exchange.pooled import PoolingExchange
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.residuals import Residuals, SparseGradient, UpdateContext
from recjax.embedding.routing.routed import Routing
from recjax.embedding.segment_sums import by_segments, in_order, segment_sums
from recjax.embedding.sharding import homes_of
from recjax.parallel.mesh import ACROSS_GROUPS, BATCH_AXES, MODEL_AXES
from recjax.utils.phases import Phase


def row_means(
    bound: BoundPlan,
    exchanges: Mapping[str, GroupExchange],
    tables: Tables,
    routing: Routing,
    residuals: Residuals,
    gradients: Mapping[str, SparseGradient],
    context: UpdateContext,
) -> dict[str, jax.Array]:
    """Means over whole rows of the squares of their regularised gradients.

    Inside `jax.shard_map`.

    Args:
      bound: the bound plan.
      exchanges: of the groups that divide the rows of their tables (`Group.divides_row_means`), by name.
      tables: this device's parts of the buffers.
      routing: of the batch.
      residuals: of the fetch of its rows.
      gradients: of these rows, summed over the batch.
      context: of the update.

    Returns:
      name of a group that `divides_row_means` -> [U], for the rows that `GroupExchange.updated` gives. Every device
      that holds columns of a row gets the same number for it, to the bit.
    """
    groups = [exchange.group for exchange in exchanges.values()]
    with jax.named_scope(Phase.ROW_STATISTIC):
        sums = {}
        for group in groups:
            rows, grads = exchanges[group.name].updated(tables[group.name], gradients[group.name], context)
            squares = jnp.square(group.optimizer.regularised(rows.astype(grads.dtype), grads))
            sums[group.name] = exchanges[group.name].row_sum(squares)
        every_row = [group for group in groups if group.optimizer.every_row]
        asked = [group for group in groups if not group.optimizer.every_row]
        means = _of_every_row(bound, every_row, sums, context)
        fetching = [exchanges[group.name] for group in asked if group.sources]
        of_rows = _of_asked_rows(bound, fetching, sums, routing, residuals, gradients)
        of_vectors = _of_pooled_rows(bound, asked, sums, routing, residuals, gradients)
        for group in asked:  # equal rows have equal means, which are not negative; 0 where nobody here has asked
            found = [of[group.name] for of in (of_rows, of_vectors) if group.name in of]
            mean_U = functools.reduce(jnp.maximum, found)
            # Rows that another group of the same values alone has asked for.
            means[group.name] = jax.lax.pmax(mean_U, ACROSS_GROUPS) if group.synchronous else mean_U
        return means


def _of_every_row(
    bound: BoundPlan, groups: list[Group], sums: Mapping[str, jax.Array], context: UpdateContext
) -> dict[str, jax.Array]:
    """Means over all columns of all rows, group name -> [R], from the sums over each device's columns."""
    if not groups:
        return {}
    base: dict[str, int] = {}  # of each table in a vector of all their rows
    size = 0
    for group in groups:
        for segment in group.segments:
            if segment.spec.name not in base:
                base[segment.spec.name] = size
                size += segment.spec.rows
    vector: Any = 0
    places, dims = {}, {}
    for group in groups:
        homes_R = homes_of(jnp.arange(group.rows, dtype=jnp.int32), context.homes.get(group.name))
        t_R, position_R, used_R = group.locator(group.sharding.this_part())(homes_R)
        base_T = jnp.asarray([base[segment.spec.name] for segment in group.segments], jnp.int32)
        places[group.name] = jnp.where(used_R, base_T[t_R] + position_R, size)
        dims[group.name] = jnp.asarray([segment.spec.dim for segment in group.segments], sums[group.name].dtype)[t_R]
        sums_R = sums[group.name]
        if not group.spread:  # all devices have them
            sums_R = jnp.where(jax.lax.axis_index(MODEL_AXES) == 0, sums_R, 0)
        for t in range(len(group.segments)):  # apart, as several of them may hold columns of the same rows
            at_R = jnp.where((t_R == t) & used_R, places[group.name], size + jnp.arange(group.rows, dtype=jnp.int32))
            vector += jnp.zeros(size, sums_R.dtype).at[at_R].add(sums_R, mode="drop", unique_indices=True)
    # Within a replica group. If there is one alone, its number along the axis of the groups is no difference either.
    vector = jax.lax.psum(vector, MODEL_AXES if bound.replicas > 1 else BATCH_AXES)
    return {name: vector.at[at_R].get(mode="fill", fill_value=0) / dims[name] for name, at_R in places.items()}


def _of_asked_rows(
    bound: BoundPlan,
    exchanges: list[GroupExchange],
    sums: Mapping[str, jax.Array],
    routing: Routing,
    residuals: Residuals,
    gradients: Mapping[str, SparseGradient],
) -> dict[str, jax.Array]:
    """Means over all columns of touched rows, group name -> [U], from the sums over each device's columns."""
    told = {}  # group name -> the sum of its columns for each row that this device fetched, [F]
    for exchange in exchanges:
        with jax.named_scope(exchange.name):
            own = residuals.groups[exchange.name]
            given = exchange.numbers_of_asked(gradients[exchange.name], own, sums[exchange.name])
            told[exchange.name] = exchange.tell_requesters(own, given)
    places = _places(bound, told, routing)
    of_feature: dict[str, Any] = {}
    for exchange in exchanges:
        for source in exchange.group.sources:
            found_L = told[exchange.name].at[places[source.name]].get(mode="fill", fill_value=0)
            of_feature[source.feature.name] = of_feature.get(source.feature.name, 0) + found_L
    means = {}
    for exchange in exchanges:
        mean_F = jnp.zeros_like(told[exchange.name])
        for source in exchange.group.sources:  # equal rows have equal means, which are not negative
            mean_L = of_feature[source.feature.name] / source.segments[0].spec.dim
            mean_F = mean_F.at[places[source.name]].max(mean_L, mode="drop")
        with jax.named_scope(exchange.name):
            own = residuals.groups[exchange.name]
            arrived = exchange.tell_owners(own, mean_F)
            means[exchange.name] = exchange.largest_of_asked(gradients[exchange.name], own, arrived)
    return means


def _of_pooled_rows(
    bound: BoundPlan,
    groups: list[Group],
    sums: Mapping[str, jax.Array],
    routing: Routing,
    residuals: Residuals,
    gradients: Mapping[str, SparseGradient],
) -> dict[str, jax.Array]:
    """Like `_of_asked_rows`, for rows whose vectors were pooled by those that hold them: a number for each id."""
    means = {}
    for exchange in bound.pooled:
        own = [(g, of) for g, of in enumerate(residuals.pooled[exchange.name]) if exchange.groups[g] in groups]
        if not own:
            continue
        with jax.named_scope(exchange.name):
            at, given = [], []
            for g, of in own:
                group = exchange.groups[g]
                found_M = jnp.searchsorted(gradients[group.name].touched, of.slots_M)
                sums_M = sums[group.name].at[found_M].get(mode="fill", fill_value=0)
                at.append(jnp.where(of.slots_M < group.rows, found_M, len(gradients[group.name].touched)))
                given.append(jnp.where(of.slots_M < group.rows, sums_M, 0))
            entries, of_exchange = [of for _, of in own], routing.pooled[exchange.name]
            told_OxC = pooled.tell_requesters(of_exchange, entries, given)
            places_OxC = of_exchange.places_NxOxC[0]
            total_P = _added(told_OxC.reshape(-1), places_OxC.reshape(-1), exchange.groups[own[0][0]].atomics)
            totals_OxC = total_P.at[places_OxC].get(mode="fill", fill_value=0)
            arrived = pooled.tell_owners(entries, totals_OxC)
            for (g, of), at_M, total_M in zip(own, at, arrived, strict=True):
                group = exchange.groups[g]
                mean_M = total_M / PoolingExchange(exchange).dims_of(g, of, total_M.dtype)
                size = len(gradients[group.name].touched)
                means[group.name] = jnp.zeros(size, mean_M.dtype).at[at_M].max(mean_M, mode="drop")
    return means


def _added(numbers_P: jax.Array, places_P: jax.Array, atomics: bool) -> jax.Array:
    """The sums of numbers with equal places, [P]; a place beyond all of them stands for none."""
    size = len(numbers_P)
    if not by_segments(atomics):
        return jnp.zeros(size, numbers_P.dtype).at[places_P].add(numbers_P, mode="drop")
    sorted_P, order_P = in_order(places_P)
    return segment_sums(numbers_P[:, None], order_P, sorted_P, None, size, atomics=atomics)[:, 0]


def _places(bound: BoundPlan, told: Mapping[str, jax.Array], routing: Routing) -> dict[str, jax.Array]:
    """Name of a source -> the place of each id of its feature among the rows fetched from its group, int32 [L].

    Where another source has the row, or there is no id, the place lies beyond these rows.
    """
    places: dict[str, jax.Array] = {}
    for pool in bound.pools:
        for lookup in pool.lookups:
            index_L = routing.features[lookup.name].inverse.reshape(-1)
            start = 0
            for fetched, source in zip(pool.rows, lookup.sources, strict=True):
                size = routing.groups[fetched.group].fetched_rows(bound.group(fetched.group))
                if fetched.group in told and source not in places:
                    here_L = (index_L >= start) & (index_L < start + size)
                    places[source] = jnp.where(here_L, index_L - start, size)
                start += size
    return places
