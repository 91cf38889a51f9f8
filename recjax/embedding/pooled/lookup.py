"""The exchange of pooled vectors in a step: bags are summed where their rows are.

All functions run inside `jax.shard_map` over BATCH_AXES. Collectives of an exchange and step, N devices of b samples, C
entries of a list, q * `blocks` columns (see `layout.py`):

  id_exchange           all-to-all of the lists          N * C * 4 bytes a device; weights beside them, if any
  pooled_exchange       all-to-all of the sums           N * b * q * blocks * itemsize
  pooled_grad_exchange  all-to-all of their gradients    as much, back

Partial sums of shared streams go by a reduce-scatter of N * b * q * `shared_blocks` values inside a host, and what that
leaves, 1/E of them, by an all-to-all across hosts; gradients by these in the other order, with an all-gather.

An owner sorts the ids that it got, to know its distinct rows, and adds up the gradient of each: no row, and no gradient
of one, travels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.exchange import all_to_all, exchange_rows, extents_of
from recjax.embedding.layout import Group
from recjax.embedding.lines import get_rows
from recjax.embedding.low_precision import from_storage
from recjax.embedding.pooled.layout import PooledExchange
from recjax.embedding.pooled.routing import PooledRouting
from recjax.embedding.residuals import Entries, SparseGradient, Vectors
from recjax.embedding.routing.sorting import in_order
from recjax.embedding.segment_sums import segment_sums
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, INSIDE_HOST, MODEL_AXES


def look_up(
    exchange: PooledExchange, tables: Mapping[str, jax.Array], routing: PooledRouting, samples: int, mean: bool = False
) -> tuple[Vectors, tuple[Entries, ...]]:
    """Brings the pooled vectors of this device's samples.

    Args:
      exchange: the exchange.
      tables: group name -> this device's part of its buffer.
      routing: this device's lists.
      samples: b.
      mean: where replica groups are independent, take the mean of their rows instead of those of the own group.

    Returns:
      the vectors; and for each group what `send_gradients` needs.
    """
    with jax.named_scope(exchange.name):
        with jax.named_scope("id_exchange"):
            lists_OxC, extents = routing.ids_NxOxC[0], None
            nothing = exchange.no_id
            if exchange.groups[0].ragged:
                extents = extents_of(lists_OxC, nothing, least=exchange.counted * samples)
            lists_NxC = all_to_all(lists_OxC, extents=extents, nothing=nothing)
            weights_NxC = None
            if routing.weights_NxOxC is not None:
                weights_NxC = all_to_all(routing.weights_NxOxC[0], extents=extents)
        entries = _entries(exchange, routing, lists_NxC, weights_NxC, samples)
        sums = [
            _summed(group, tables[group.name], of_group, len(lists_NxC) * T * samples, mean and group.independent)
            for group, T, of_group in zip(exchange.groups, exchange.widths, entries, strict=True)
        ]
        with jax.named_scope("pooled_exchange"):
            blocks = _blocks(exchange, sums, samples)
            arrived, shared = None, None
            if exchange.blocks:
                arrived = exchange_rows(_as_sent(exchange, blocks, False), exchange.exchange.forward)
            if exchange.shared_blocks:
                shared = _from_hosts(exchange, _as_sent(exchange, blocks, True))
        return _vectors(exchange, (arrived, shared), routing, samples), entries


def send_gradients(
    exchange: PooledExchange,
    routing: PooledRouting,
    entries: tuple[Entries, ...],
    grads: Vectors,
) -> dict[str, SparseGradient]:
    """Brings the gradients of the vectors to the owners, which add them up by row.

    Returns:
      group name -> gradients of the distinct rows that the devices of this replica group asked for.
    """
    with jax.named_scope(exchange.name):
        with jax.named_scope("pooled_grad_exchange"):
            scaled = _scaled(exchange, grads, routing)
            arrived = []
            if exchange.blocks:
                arrived.append(exchange_rows(_gradients(exchange, scaled), exchange.exchange.backward))
            if exchange.shared_blocks:
                arrived.append(_to_hosts(exchange, _host_gradients(exchange, scaled)))
            of_bags = _as_summed(exchange, arrived)
        found = {}
        for group, of_group, grads_GxD, (_, rows) in zip(exchange.groups, entries, of_bags, routing.sizes, strict=True):
            with jax.named_scope("sparse_update"):
                found[group.name] = _by_row(group, of_group, grads_GxD, rows)
        return found


def _entries(
    exchange: PooledExchange,
    routing: PooledRouting,
    lists_NxC: jax.Array,
    weights_NxC: jax.Array | None,
    b: int,
) -> tuple[Entries, ...]:
    """Takes the lists apart, group by group."""
    N, J = len(lists_NxC), exchange.counted
    this = jax.lax.axis_index(MODEL_AXES)
    counts_NxJxb = lists_NxC[:, : J * b].reshape(N, J, b)
    start_N: jax.Array | int = J * b
    found = []
    for g, (group, T) in enumerate(zip(exchange.groups, exchange.widths, strict=True)):
        size = routing.sizes[g][0]
        lengths_T = jnp.asarray(exchange.fixed_lengths(g))[this]
        lengths_NxTxb = jnp.broadcast_to(lengths_T[:, None], (N, T, b))
        if J:
            row_T = jnp.asarray(exchange.counted_rows(g))[this]
            counted_NxTxb = counts_NxJxb.at[:, row_T].get(mode="fill", fill_value=0)
            lengths_NxTxb = lengths_NxTxb + counted_NxTxb
        total_N = lengths_NxTxb.sum(axis=(1, 2), dtype=jnp.int32)
        place_1xC = jnp.arange(size, dtype=jnp.int32)[None]
        bag_NxC = jax.vmap(functools.partial(_repeated, total=size))(lengths_NxTxb.reshape(N, T * b))
        streams_M = (bag_NxC // b).reshape(-1)
        bag_NxC += (jnp.arange(N, dtype=jnp.int32) * T * b)[:, None]
        at_NxC = jnp.broadcast_to(jnp.reshape(start_N, (-1, 1)) + place_1xC, (N, size))
        slots_NxC = jnp.take_along_axis(lists_NxC, at_NxC, axis=1, mode="fill", fill_value=group.rows)
        used_NxC = place_1xC < total_N[:, None]
        slots_NxC = jnp.where(used_NxC, jnp.minimum(slots_NxC, group.rows), group.rows)
        weights_M = None
        if weights_NxC is not None:
            weights_M = jnp.take_along_axis(weights_NxC, at_NxC, axis=1, mode="fill", fill_value=0).reshape(-1)
        places_M = jnp.where(used_NxC, at_NxC, lists_NxC.shape[1]).reshape(-1)
        found.append(Entries(slots_NxC.reshape(-1), bag_NxC.reshape(-1), weights_M, places_M, streams_M))
        start_N = start_N + total_N
    return tuple(found)


def _repeated(lengths_B: jax.Array, total: int) -> jax.Array:
    """0 `lengths[0]` times, 1 `lengths[1]` times, and so on, int32 [total]; then the last number."""
    starts_B = jnp.cumsum(lengths_B, dtype=jnp.int32) - lengths_B
    begun = jnp.zeros(total, jnp.int32).at[starts_B[1:]].add(1, mode="drop", indices_are_sorted=True)
    return jnp.cumsum(begun, dtype=jnp.int32)


def _summed(group: Group, table_RxW: jax.Array, entries: Entries, bags: int, mean: bool) -> jax.Array:
    """The sums of all bags, [bags, D]."""
    slots_M, bags_M, weights_M = entries[:3]
    if mean:
        with jax.named_scope("replica_exchange"):
            asked = jax.tree.map(lambda x: jax.lax.all_gather(x, ACROSS_GROUPS), entries)
        of_groups = [jax.tree.map(operator.itemgetter(r), asked) for r in range(group.replicas)]
        sums = jnp.stack([_summed(group, table_RxW, of_group, bags, False) for of_group in of_groups])
        with jax.named_scope("replica_exchange"):
            mean_BxD: jax.Array = jax.lax.psum_scatter(sums, ACROSS_GROUPS) / group.replicas
        return mean_BxD
    with jax.named_scope("gather"):
        read = functools.partial(_wide, group)
        return segment_sums(table_RxW, slots_M, bags_M, weights_M, bags, read, group.rows, group.atomics)


def _wide(group: Group, table_RxW: jax.Array, slots: jax.Array) -> jax.Array:
    """The rows in some slots, as floats to calculate with."""
    found = from_storage(get_rows(group, table_RxW, slots))
    return found.astype(jnp.float32) if found.dtype == jnp.bfloat16 else found


def _blocks(exchange: PooledExchange, sums: list[jax.Array], b: int) -> jax.Array:
    """The sums of all groups, [N, blocks of all, b, q]."""
    blocks = [sums_BxD.reshape(exchange.devices, -1, b, exchange.block) for sums_BxD in sums]
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _as_sent(exchange: PooledExchange, blocks: jax.Array, shared: bool) -> jax.Array:
    """Returns the blocks that travel in one buffer, [N, blocks * b, q]."""
    N, _, _, q = blocks.shape
    places = exchange.sent_blocks(shared)
    if places is not None:
        place = jnp.asarray(places)[jax.lax.axis_index(MODEL_AXES)]
        blocks = blocks.at[:, place].get(mode="fill", fill_value=0)
    return blocks.reshape(N, -1, q)


def _from_hosts(exchange: PooledExchange, partial_NxRxq: jax.Array) -> jax.Array:
    """Adds partial sums up inside each host, and brings this device the sums of each host for it, [H, R, q]."""
    H, (N, R, q) = exchange.hosts, partial_NxRxq.shape
    of_host = partial_NxRxq.reshape(H, N // H, R, q).swapaxes(0, 1)
    sums_HxRxq = jax.lax.psum_scatter(of_host, INSIDE_HOST, scatter_dimension=0, tiled=False)
    return exchange_rows(sums_HxRxq, exchange.exchange.forward, ACROSS_HOSTS)


def _to_hosts(exchange: PooledExchange, grads_HxRxq: jax.Array) -> jax.Array:
    """The way back of `_from_hosts`: what all devices have for this one's host, [N, R, q]."""
    arrived_HxRxq = exchange_rows(grads_HxRxq, exchange.exchange.backward, ACROSS_HOSTS)
    all_ExHxRxq = jax.lax.all_gather(arrived_HxRxq, INSIDE_HOST)
    return all_ExHxRxq.swapaxes(0, 1).reshape(exchange.devices, *grads_HxRxq.shape[1:])


def _as_summed(exchange: PooledExchange, arrived: list[jax.Array]) -> list[jax.Array]:
    """The inverse of `_blocks` and `_as_sent`, for gradients in one buffer or both: for each group [bags, D]."""
    N, q = exchange.devices, exchange.block
    places = exchange.arrived_blocks()
    if places is None:
        return [arrived[0].reshape(-1, exchange.groups[0].dim)]
    together = arrived[0] if len(arrived) == 1 else jnp.concatenate(arrived, axis=1)
    b = together.shape[1] // (exchange.blocks + exchange.shared_blocks)
    place = jnp.asarray(places)[jax.lax.axis_index(MODEL_AXES)]
    blocks = together.reshape(N, -1, b, q).at[:, place].get(mode="fill", fill_value=0)
    sizes = [T * group.dim // q for group, T in zip(exchange.groups, exchange.widths, strict=True)]
    parts = jnp.split(blocks, np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, group.dim) for part, group in zip(parts, exchange.groups, strict=True)]


def _vectors(
    exchange: PooledExchange, arrived: tuple[jax.Array | None, jax.Array | None], routing: PooledRouting, b: int
) -> Vectors:
    """Each stream's vectors, [b, D]; partial sums of several owners are added up.

    Args:
      exchange: the exchange.
      arrived: what each owner sent, [N, blocks * b, q], and of shared streams each host, [H, shared_blocks * b, q].
      routing: as `look_up` has it.
      b: samples.
    """
    q, per_host = exchange.block, exchange.devices // exchange.hosts
    found: Vectors = {}
    for group, streams in zip(exchange.groups, exchange.streams, strict=True):
        rows = group.dim // q * b
        for stream in streams:
            total: jax.Array | None = None
            of_senders = arrived[stream.shared]
            assert of_senders is not None
            for owner in stream.owners[:1] if stream.shared else stream.owners:
                start = exchange.starts[owner, stream.name] * b
                sender = owner // per_host if stream.shared else owner
                part = of_senders[sender, start : start + rows].reshape(b, group.dim)
                total = part if total is None else total + part
            assert total is not None
            factor_b = routing.factors.get(stream.feature.name)
            found[stream.name] = total if factor_b is None else total * factor_b[:, None]
    return found


def _scaled(exchange: PooledExchange, grads: Vectors, routing: PooledRouting) -> Vectors:
    """Gradients of each stream's sums, in blocks: [D / q * b, q]."""
    q = exchange.block
    scaled = {}
    for streams in exchange.streams:
        for stream in streams:
            factor_b = routing.factors.get(stream.feature.name)
            grad = grads[stream.name]
            scaled[stream.name] = (grad if factor_b is None else grad * factor_b[:, None]).reshape(-1, q)
    return scaled


def _gradients(exchange: PooledExchange, scaled: Vectors) -> jax.Array:
    """The inverse of `_vectors`: what goes to each owner, [N, blocks * b, q]."""
    return jnp.stack([_one_after_the_other(exchange, scaled, owner, False) for owner in range(exchange.devices)])


def _host_gradients(exchange: PooledExchange, scaled: Vectors) -> jax.Array:
    """The same of shared streams: what goes to each host, [H, shared_blocks * b, q]."""
    each = range(0, exchange.devices, exchange.devices // exchange.hosts)  # the first device of each
    return jnp.stack([_one_after_the_other(exchange, scaled, owner, True) for owner in each])


def _one_after_the_other(exchange: PooledExchange, scaled: Vectors, owner: int, shared: bool) -> jax.Array:
    streams = [stream for of_group in exchange.of_owner[owner] for stream in of_group if stream.shared == shared]
    like, (group, of_group) = next(iter(scaled.values())), next(zip(exchange.groups, exchange.streams, strict=True))
    b = len(scaled[of_group[0].name]) // (group.dim // exchange.block)
    parts = [scaled[stream.name] for stream in streams]
    size = (exchange.shared_blocks if shared else exchange.blocks) * b
    return jnp.concatenate([*parts, jnp.zeros((size - sum(map(len, parts)), exchange.block), like.dtype)])


def _by_row(group: Group, entries: Entries, grads_BxD: jax.Array, rows: int) -> SparseGradient:
    """The gradients of `rows` distinct rows at most, from those of the bags."""
    slots_M, bags_M, weights_M = entries[:3]
    sorted_M, order_M = in_order(slots_M)
    starts_M = jnp.concatenate([jnp.ones(1, bool), sorted_M[1:] != sorted_M[:-1]])
    row_M = jnp.cumsum(starts_M, dtype=jnp.int32) - 1
    row_M = jnp.where(sorted_M < group.rows, row_M, rows)
    unused = group.rows + jnp.arange(rows, dtype=jnp.int32)
    touched = unused.at[row_M].set(sorted_M, mode="drop", indices_are_sorted=True)
    weights_M = None if weights_M is None else weights_M[order_M]
    return SparseGradient(
        touched, segment_sums(grads_BxD, bags_M[order_M], row_M, weights_M, rows, atomics=group.atomics)
    )


def tell_requesters(routing: PooledRouting, entries: Sequence[Entries], numbers: Sequence[jax.Array]) -> jax.Array:
    """Sends each device one number for every id that it asked this one for.

    Args:
      routing: as `look_up` got it.
      entries: of some groups.
      numbers: for each of them [M], beside its entries.

    Returns:
      [O, C], beside this device's own lists; 0 where other groups have the ids.
    """
    N, C = routing.ids_NxOxC.shape[1:]
    lists_NxC = jnp.zeros((N, C), numbers[0].dtype)
    for of_group, numbers_M in zip(entries, numbers, strict=True):
        places_NxM = of_group.places_M.reshape(N, -1)
        lists_NxC = lists_NxC.at[jnp.arange(N)[:, None], places_NxM].set(numbers_M.reshape(N, -1), mode="drop")
    return all_to_all(lists_NxC)


def tell_owners(entries: Sequence[Entries], numbers_OxC: jax.Array) -> list[jax.Array]:
    """Sends the owners of the ids one number for each: the inverse of `tell_requesters`; for each group [M]."""
    arrived_NxC = all_to_all(numbers_OxC)
    N = len(arrived_NxC)
    found = []
    for of_group in entries:
        places_NxM = of_group.places_M.reshape(N, -1)
        found.append(jnp.take_along_axis(arrived_NxC, places_NxM, axis=1, mode="fill", fill_value=0).reshape(-1))
    return found


def dims_of(exchange: PooledExchange, g: int, entries: Entries, dtype: Any) -> jax.Array:
    """Columns of the whole table that each of an owner's ids looks up, [M]; 1 for what is none."""
    N, T = exchange.devices, exchange.widths[g]
    dims = np.ones((N, T))
    for owner, groups in enumerate(exchange.of_owner):
        dims[owner, : len(groups[g])] = [stream.source.segments[0].spec.dim for stream in groups[g]]
    return jnp.asarray(dims, dtype)[jax.lax.axis_index(MODEL_AXES)][entries.streams_M]
