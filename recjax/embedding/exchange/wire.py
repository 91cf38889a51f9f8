"""Exchanges between the devices that hold tables: the one place that moves slots, rows and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recjax.embedding.quantize import Precision, decode, encode
from recjax.parallel.mesh import INSIDE_HOST, MODEL_AXES
from recjax.utils.phases import Phase


class Extents(NamedTuple):
    """Lengths of blocks: how many of the C entries of each travel, where blocks are not sent with their padding.

    Attributes:
      sent_N: int32 [N], of the block for each device.
      received_N: int32 [N], of that from each device.
    """

    sent_N: jax.Array
    received_N: jax.Array

    @property
    def back(self) -> Extents:
        """Extents of the way back."""
        return Extents(self.received_N, self.sent_N)

    def of_piece(self, first: int, last: int) -> Extents:
        """Extents of the blocks' entries from `first` to below `last` alone."""
        return Extents(*(jnp.clip(extent_N - first, 0, last - first) for extent_N in self))


def extents_of(lists_NxC: jax.Array, nothing: int, axes: tuple[str, ...] = MODEL_AXES, least: int = 0) -> Extents:
    """Finds where each device's lists end, and sends the others their lengths.

    Args:
      lists_NxC: int32 [N, C]; what follows the last entry of a list is `nothing`.
      nothing: the value of padding.
      axes: of the mesh, as for `all_to_all`.
      least: entries that every list has in any case.
    """
    ends_C = 1 + jnp.arange(lists_NxC.shape[1], dtype=jnp.int32)
    sent_N = jnp.max(jnp.where(lists_NxC != nothing, ends_C, least), axis=1, initial=least)
    return Extents(sent_N, all_to_all(sent_N[:, None], axes)[:, 0])


def all_to_all(
    x_NxC: jax.Array, axes: tuple[str, ...] = MODEL_AXES, extents: Extents | None = None, nothing: int = 0
) -> jax.Array:
    """Block n of this device's goes to device n, whose block for this device comes back in its place.

    Inside `jax.shard_map` over MODEL_AXES.

    Args:
      x_NxC: [N, C, ...], a block for each device along `axes`.
      axes: of the mesh; devices that differ in others exchange nothing.
      extents: entries of the blocks that travel, by a ragged all-to-all, which CPUs do not have; None: all.
      nothing: the value of entries that do not travel, where they would arrive.

    Returns:
      [N, C, ...], a block from each device.
    """
    if extents is None:
        return jax.lax.all_to_all(x_NxC, axes, split_axis=0, concat_axis=0, tiled=True)
    N, C = x_NxC.shape[:2]
    x_M = x_NxC.reshape(N * C, *x_NxC.shape[2:])
    starts_N = jnp.arange(N, dtype=jnp.int32) * C
    own_N = jnp.full_like(starts_N, C) * jax.lax.axis_index(axes).astype(jnp.int32)  # where all others keep this block
    padding_M = jnp.where(jnp.zeros_like(x_M, bool), x_M, jnp.asarray(nothing, x_M.dtype))
    arrived_M = jax.lax.ragged_all_to_all(
        x_M, padding_M, starts_N, extents.sent_N, own_N, extents.received_N, axis_name=axes
    )
    return arrived_M.reshape(x_NxC.shape)


def exchange_rows(
    x_NxCxD: jax.Array, precision: Precision, axes: tuple[str, ...] = MODEL_AXES, extents: Extents | None = None
) -> jax.Array:
    """`all_to_all` of rows or their gradients, encoded on the way.

    The block that a device keeps for itself is encoded too: a row then arrives with the same values on every device,
    however many there are. On one device nothing travels, and nothing is encoded.

    Args:
      x_NxCxD: float32, bfloat16 (of tables that hold it) or float64 [N, C, D].
      precision: of the way; with float32 all values arrive as they were.
      axes: of the mesh, as for `all_to_all`.
      extents: rows of the blocks that travel; None: all.

    Returns:
      [N, C, D], float32; float64 if it was.
    """
    precision = precision_of_way(precision, len(x_NxCxD))
    return decode(all_to_all(encode(x_NxCxD, precision), axes, extents), precision)


def fetch_rows(
    asked_NxC: jax.Array,
    gather: Callable[[jax.Array], jax.Array],
    precision: Precision,
    axes: tuple[str, ...] = MODEL_AXES,
    extents: Extents | None = None,
    pieces: int = 1,
) -> jax.Array:
    """Gathers the rows that each device asks for and sends them: `exchange_rows`, piece by piece.

    The pieces are put together before they are decoded, so that rows have the same bits in any number of pieces.

    Args:
      asked_NxC: int32, which rows each device asks for.
      gather: gives the rows [N, c, D] of some of these, [N, c].
      precision: as for `exchange_rows`.
      axes: likewise.
      extents: likewise.
      pieces: as for `in_pieces`.

    Returns:
      [N, C, D], as `exchange_rows`.
    """
    precision = precision_of_way(precision, len(asked_NxC))

    def fetch(asked_Nxc: jax.Array, extents: Extents | None) -> jax.Array:
        rows_NxcxD = gather(asked_Nxc)
        with jax.named_scope(Phase.ROW_EXCHANGE):
            return all_to_all(encode(rows_NxcxD, precision), axes, extents)

    encoded_NxCxE = in_pieces(asked_NxC, pieces, fetch, extents)
    with jax.named_scope(Phase.ROW_EXCHANGE):
        return decode(encoded_NxCxE, precision)


def precision_of_way(precision: Precision, devices: int) -> Precision:
    """The precision of a way between so many devices: of one, whose rows stay where they are, float32."""
    return "float32" if devices == 1 else precision


def cuts(entries: int, pieces: int) -> list[tuple[int, int]]:
    """The first entry of each piece of a list, and the one after its last; no entry is added.

    Each piece is an entry or two longer than the one before, unless the list is very short. XLA for GPUs makes one
    kernel of equally long gathers from one table, which all pieces would then wait for.
    """
    longer = int(entries >= pieces * (pieces + 1) // 2)
    each, more = divmod(entries - longer * pieces * (pieces - 1) // 2, pieces)
    lengths = (each + longer * number + (number >= pieces - more) for number in range(pieces))
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def in_pieces(
    lists_NxC: jax.Array,
    pieces: int,
    bring: Callable[[jax.Array, Extents | None], jax.Array],
    extents: Extents | None = None,
) -> jax.Array:
    """Gathers and sends the rows of some lists piece by piece, so that one can be sent while the next is gathered.

    Each piece has a scope of its own, `piece_scope`. A row comes to the place that it has without pieces.

    Args:
      lists_NxC: int32, which rows; those of a piece are a range of places in all lists.
      pieces: how many, at most C.
      bring: gives the rows [N, c, D] of lists [N, c], whose extents it is told, too.
      extents: of the blocks of rows, as for `all_to_all`.
    """
    if pieces == 1:
        return bring(lists_NxC, extents)
    brought = []
    for number, (first, last) in enumerate(cuts(lists_NxC.shape[1], pieces)):
        with jax.named_scope(piece_scope(number)):
            brought.append(bring(lists_NxC[:, first:last], extents and extents.of_piece(first, last)))
    with jax.named_scope(Phase.ROW_EXCHANGE):
        return jnp.concatenate(brought, axis=1)


def piece_scope(number: int) -> str:
    """Name of the scope of a piece of an exchange, numbered from 0: by it the collectives of a group are told apart."""
    return f"piece_{number}"


def gather_rows(x_KxD: jax.Array, precision: Precision, axes: tuple[str, ...]) -> jax.Array:
    """The rows of all devices along `axes`, [devices, K, D] on each, encoded on the way; those of its own, too.

    So the result is the same on all of them, also for `jax.shard_map`.
    """
    return decode(jax.lax.all_gather(encode(x_KxD, precision), axes, to="invarying"), precision)


def scatter_within_host(rows_MxV: jax.Array, inside_ExC: jax.Array, pieces: int = 1) -> jax.Array:
    """Inside a host, brings rows from the relays that fetched them to the devices that asked.

    Args:
      rows_MxV: rows that this device fetched as a relay.
      inside_ExC: indices of those that each device of its host gets; what is out of range means nothing.
      pieces: in which they are sent.

    Returns:
      [E, C, V]: the rows that this device gets from each relay.
    """

    def send(inside_Exc: jax.Array, _: Any) -> jax.Array:
        return all_to_all(rows_MxV.at[inside_Exc].get(mode="fill", fill_value=0), INSIDE_HOST)

    return in_pieces(inside_ExC, pieces, send)


def reduce_within_host(grads_ExCxV: jax.Array, inside_ExC: jax.Array, rows: int, largest: bool = False) -> jax.Array:
    """Inside a host, brings row gradients to the relays and sums there those of equal rows.

    Args:
      grads_ExCxV: gradients of the rows that `scatter_within_host` brought, for each relay.
      inside_ExC: as it had it.
      rows: M, of the relay.
      largest: take the largest of numbers that are not negative, instead of sums.

    Returns:
      [M, V]. The devices' gradients are added in the order of their numbers, so that repeated runs agree to the bit.
    """
    arrived_ExCxV = all_to_all(grads_ExCxV, INSIDE_HOST)
    sums_MxV = jnp.zeros((rows, arrived_ExCxV.shape[2]), arrived_ExCxV.dtype)
    for index_C, grads_CxV in zip(inside_ExC, arrived_ExCxV, strict=True):
        place = sums_MxV.at[index_C]
        put = place.max if largest else place.add
        sums_MxV = put(grads_CxV, mode="drop", indices_are_sorted=True, unique_indices=True)
    return sums_MxV
