"""Other rows become hot: those that were go home, and those that are to be come from there, with their slots.

The rest of a table leaves the places of hot rows vacant (`Band.vacant`), so that nothing else moves. One program does
it for any two sets of equal sizes: K rows are written where their owners are, and K rows are read there and summed over
the devices, of which one alone has something else than zeros. Bits travel, not numbers: nothing is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.buffers import GroupSlots, Tables
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.sharding import BoundSegment
from recjax.parallel.mesh import MODEL_AXES

Moves = dict[str, np.ndarray]  # name of a table and number of a segment of the rest -> (owner, home) of rows [2, K]
Swap = Callable[[Tables, GroupSlots, Moves, Moves], tuple[Tables, GroupSlots]]


def homes_of_hot_rows(bound: BoundPlan) -> Moves:
    """Returns where the hot rows of each table live when they are not hot: int32 [2, K]."""
    found = {}
    for _, hot, rest in _tables(bound):
        ids = hot.order.row(hot.band.used(0, hot.band.size)).astype(np.int32)
        for _, segment in rest:
            owner_K, home_K, _ = segment.locate(ids)
            found[_key(segment)] = np.stack([owner_K, home_K]).astype(np.int32)
    return found


def make_swap(bound: BoundPlan, mesh: Mesh) -> Swap:
    """The jitted program that makes other rows hot. It donates tables and slots.

    Args:
      bound: a plan; that of the other rows differs in them alone, and has as many of each table.
      mesh: its devices.

    Returns:
      swap(tables, slots, homes, new homes) -> (tables, slots), of homes as `homes_of_hot_rows` gives them. Collectives:
      an all-gather of each slot of hot rows (with a copy on each host also of the rows), and an all-reduce of [K, D]
      for each array of each table.
    """

    def body(tables: Tables, slots: GroupSlots, old: Moves, new: Moves) -> tuple[Tables, GroupSlots]:
        tables, slots = dict(tables), {name: dict(of) for name, of in slots.items()}
        of_hot = {group.name: group for group, _, _ in _tables(bound)}
        for name, group in of_hot.items():
            tables[name] = group.value_group.sharding.gather(tables[name])
            slots[name] = {k: group.slot_group.sharding.gather(x) for k, x in slots[name].items()}
        for group, hot, rest in _tables(bound):
            for array in ("rows", *slots[group.name]):
                held = tables if array == "rows" else {n: of[array] for n, of in slots.items() if array in of}
                values = jax.lax.dynamic_slice_in_dim(held[group.name], hot.offsets[0], hot.band.size)
                for cold, segment in rest:
                    rows = SegmentRows(cold, segment)
                    held[cold.name] = rows.put(held[cold.name], values, old[_key(segment)])
                found: Any = sum(
                    SegmentRows(cold, segment).bits(held[cold.name], new[_key(segment)]) for cold, segment in rest
                )
                bits = jax.lax.psum(found, MODEL_AXES).astype(_bits_of(values.dtype))
                values = jax.lax.bitcast_convert_type(bits, values.dtype)
                held[group.name] = jax.lax.dynamic_update_slice_in_dim(held[group.name], values, hot.offsets[0], 0)
                if array != "rows":
                    for n, x in held.items():
                        slots[n][array] = x
        for name, group in of_hot.items():
            tables[name] = group.value_group.sharding.take_range(tables[name])
            slots[name] = {k: group.slot_group.sharding.take_range(x) for k, x in slots[name].items()}
        return tables, slots

    embeddings: Any = ShardedEmbeddings(bound)
    specs = embeddings.partition_specs(), embeddings.slot_specs()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


def _tables(bound: BoundPlan) -> list[tuple[Group, BoundSegment, list[tuple[Group, BoundSegment]]]]:
    """Tables of which some rows are hot: the group of these, their segment, and those of the rest."""
    found = []
    for group in bound.groups:
        for hot in group.segments if not group.listed else ():
            rest = [(g, s) for g, s in bound.segments(hot.spec.name) if s.band.vacant]
            if rest:
                found.append((group, hot, rest))
    return found


def _key(segment: BoundSegment) -> str:
    return f"{segment.spec.name} {segment.number} {segment.first}"


@dataclasses.dataclass(frozen=True)
class SegmentRows:
    """Whole rows of a table, as far as this device's part of a group's buffer has them. Inside `jax.shard_map`.

    Attributes:
      group: of the buffer.
      segment: of the table in it.
    """

    group: Group
    segment: BoundSegment

    @property
    def of_slots(self) -> SegmentRows:
        """The same in the arrays of the optimizer's slots."""
        own = self.group.slot_group
        return SegmentRows(own, own.segments[self.group.segments.index(self.segment)])

    def _columns(self, part: Any) -> tuple[Any, Any]:
        """(first column in the table, number of columns) of a part."""
        _, column = self.group.place(part)
        first = self.group.columns.start(column)
        return self.segment.first + first, self.group.columns.start(column + 1) - first

    def put(self, block: jax.Array, values: jax.Array, homes_2xK: Any) -> jax.Array:
        """This device's part of the buffer with some rows, [K, D] or [K].

        Args:
          block: the part.
          values: of the rows.
          homes_2xK: owner and home of each, as `BoundSegment.locate` gives them; an owner of -1 leaves a row out.
        """
        group, part = self.group, self.group.sharding.this_part()
        owner_K, home_K = homes_2xK
        is_here_K = owner_K == group.place(part)[0]
        target_K = jnp.where(is_here_K, home_K, group.rows + jnp.arange(len(home_K), dtype=jnp.int32))
        if values.ndim > 1:
            first, columns = self._columns(part)
            wide = jnp.pad(values, ((0, 0), (0, group.width)))
            values = jax.lax.dynamic_slice_in_dim(wide, first, group.width, axis=1)
            values = jnp.where(jnp.arange(group.width, dtype=jnp.int32) < columns, values, 0)
            if group.lines is not None:
                order_K = jnp.argsort(target_K)
                return group.set_rows(block, target_K[order_K], values[order_K])
        return block.at[target_K].set(values, mode="drop", unique_indices=True)

    def bits(self, block: jax.Array, homes_2xK: Any) -> jax.Array:
        """The bits of some rows as unsigned integers, [K, D] or [K]; 0 of what this device has not."""
        group, part = self.group, self.group.sharding.this_part()
        owner_K, home_K = homes_2xK
        is_here_K = owner_K == group.place(part)[0]
        if not group.spread:
            is_here_K = is_here_K & (jax.lax.axis_index(MODEL_AXES) == 0)
        rows = group.get_rows(block, jnp.where(is_here_K, home_K, group.rows))
        bits = jax.lax.bitcast_convert_type(rows, _bits_of(block.dtype))
        bits = bits.astype(jnp.uint32) if bits.dtype.itemsize < 4 else bits
        first, columns = self._columns(part)
        if block.ndim == 1:  # held beside each range of columns
            return jnp.where(first == 0, bits, 0)
        bits = jnp.where(jnp.arange(group.width, dtype=jnp.int32) < columns, bits, 0)
        dim = self.segment.spec.dim
        wide = jnp.zeros((len(home_K), dim + group.width), bits.dtype)
        return jax.lax.dynamic_update_slice_in_dim(wide, bits, first, axis=1)[:, :dim]


def _bits_of(dtype: Any) -> Any:
    return {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[np.dtype(dtype).itemsize]
