"""The groups' buffers: what they are, and their initial values.

A group's buffer is one array [parts * R, width], part by part (see `layout.Group`), and of independent replica groups
one of [versions * parts * R, width]. Optimizer slots lie beside it. On a TPU both may be in lines: see `lines.py`.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.address import Homes, Maps, locator, make_homes
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.lines import buffer_shape
from recjax.embedding.low_precision import nearest, storage_dtype
from recjax.embedding.row_order import row_at
from recjax.parallel.mesh import ACROSS_GROUPS, put, sharded

Tables = dict[str, jax.Array]  # group name -> [versions * parts * R, width]
GroupSlots = dict[str, dict[str, jax.Array]]  # group name -> slot name -> [versions * parts * R, ...]
_CALLS = (64, 512, 4096, 32768)  # rows of a part that one call makes or moves, at most: each is compiled
NAME_BITS = 64  # of the hash of a table's name, by which its initial values are drawn
CHUNK_FLOATS = 1 << 18  # values made at a time: bounds the temporary of initialisation to a few MiB


def initial_rows(
    seed: int, table: str, rows_U: jax.Array, dim: int, scale: float, name_bits: int = NAME_BITS
) -> jax.Array:
    """Initial values of some rows of a table, [U, D] float32, uniform in [-scale, scale).

    A function of (seed, table name, row, column) only: the counter-based generator is keyed by row.

    Args:
      seed: of the run.
      table: its name.
      rows_U: the rows, int32.
      dim: D.
      scale: half the width of the distribution.
      name_bits: of the hash of the name; 32 for what was drawn before recjax 0.1.0.
    """
    return jax.vmap(lambda row: _draw(_key(seed, table, name_bits), row, dim))(rows_U) * scale


def initial_rows_of_keys(
    seed: int, table: str, low_U: jax.Array, high_U: jax.Array, dim: int, scale: float
) -> jax.Array:
    """Initial values of the rows of some 64-bit keys, [U, D] float32; of keys below 2^32 as `initial_rows` has them.

    Args:
      seed: of the run.
      table: its name.
      low_U: the lower 32 bits of each key, uint32.
      high_U: the upper ones, uint32.
      dim: D.
      scale: as for `initial_rows`.
    """
    key = _key(seed, table)

    def draw(low: jax.Array, high: jax.Array) -> jax.Array:
        bits = jnp.where(high > 0, jax.random.key_data(jax.random.fold_in(key, high)), jax.random.key_data(key))
        return _draw(jax.random.wrap_key_data(bits, impl="threefry2x32"), low, dim)

    return jax.vmap(draw)(low_U, high_U) * jnp.float32(scale)


def _key(seed: int, table: str, name_bits: int = NAME_BITS) -> jax.Array:
    """Key of a table's values. Among thousands of tables, 32 bits of two names may well be the same."""
    key = jax.random.key(seed, impl="threefry2x32")
    if name_bits == 32:
        return jax.random.fold_in(key, zlib.crc32(table.encode()))
    for word in np.frombuffer(hashlib.blake2b(table.encode(), digest_size=NAME_BITS // 8).digest(), "<u4"):
        key = jax.random.fold_in(key, word)
    return key


def _draw(key: jax.Array, row: jax.Array, dim: int) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, row), (dim,), jnp.float32, minval=-1, maxval=1)


def initialise(
    bound: BoundPlan,
    mesh: Mesh,
    seed: int,
    dtype: Any = jnp.float32,
    homes: Homes | None = None,
    apart: bool = False,
) -> tuple[Tables, GroupSlots]:
    """Makes all tables and optimizer slots, in place on their devices and in chunks.

    Peak memory beside the result is a few MiB a device, whatever the tables' size.

    Args:
      bound: the bound plan.
      mesh: its devices.
      seed: of the values: see `initial_rows`.
      dtype: of tables that are not held in a reduced precision, and of slots.
      homes: of mapped groups.
      apart: whether independent replica group g starts with the tables of seed + g (modulo 2^32) instead of those of
        `seed`.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    seeds = [(seed + g) % 2**32 for g in range(bound.replicas)] if apart and bound.independent else [seed]
    for group in bound.groups:
        of_values = group.value_group
        spec = P(of_values.partition_axes)
        body = functools.partial(_initial_block, of_values, seeds, storage_dtype(group, dtype))
        given = [(homes or {})[group.name]] if group.mapped else []
        made = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(given), out_specs=spec, check_vma=False)
        if group.cached:
            shape = buffer_shape(group, (group.width,), group.versions * group.parts)
            tables[group.name] = filled(shape, 0, storage_dtype(group, dtype), sharded(mesh, group.partition_axes))
        else:
            tables[group.name] = jax.jit(made)(*given)
        own = group.slot_group
        sharding = sharded(mesh, own.partition_axes)
        slots[group.name] = {
            name: filled(buffer_shape(own, slot.shape, own.versions * own.parts), slot.initial, dtype, sharding)
            for name, slot in group.slots().items()
        }
    return tables, slots


def place_homes(bound: BoundPlan, mesh: Mesh, maps: Maps | None = None) -> Homes:
    """Returns the homes of the slots of all mapped groups on the mesh; without `maps`, every slot's own number."""
    by_name = {group.name: group for group in bound.groups}
    return {
        name: put(homes, sharded(mesh, by_name[name].partition_axes)) for name, homes in make_homes(bound, maps).items()
    }


def _initial_block(group: Group, seeds: list[int], dtype: Any, homes_R: jax.Array | None = None) -> jax.Array:
    """One device's part of a group's buffer, filled by one loop whatever the number of segments.

    `seeds` are those of the replica groups, or one for all.
    """
    R, k = group.rows, group.lines.rows if group.lines else 1
    chunk = min(R, max(1, CHUNK_FLOATS // max(s.spec.dim for s in group.segments) // k) * k)
    values_of = initial_values(group, seeds, dtype, group.sharding.this_part(), chunk)

    def fill(i: jax.Array, block_RxW: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, R - chunk)  # the last chunk overlaps, and repeats the same values
        slot_C = start + jnp.arange(chunk, dtype=jnp.int32)
        values = values_of(slot_C if homes_R is None else homes_R[slot_C])
        values = group.lines.packed(values) if group.lines else values
        return jax.lax.dynamic_update_slice(block_RxW, values, (start // k if k > 1 else start, jnp.int32(0)))

    chunks = jnp.int32(-(-R // chunk))  # int32 throughout, also where JAX is in 64-bit mode
    return jax.lax.fori_loop(jnp.int32(0), chunks, fill, jnp.zeros(buffer_shape(group, (group.width,)), dtype))


def initial_values(
    group: Group, seeds: list[int], dtype: Any, part: Any, chunk: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns the function from `chunk` homes in a part of a group's buffer to their initial values.

    Args:
      group: the table group.
      seeds: of the replica groups, or one for all; several only inside `jax.shard_map`.
      dtype: of the buffer.
      part: which one of it.
      chunk: C, homes at a time.

    Returns:
      homes int32 [C] -> [C, W]; zeros where there is no such row.
    """
    owner, column = group.place(part)
    segments, W = group.segments, group.width
    first = group.columns.start(column)
    used_W = jnp.arange(W, dtype=jnp.int32) < group.columns.start(column + 1) - first

    def constants(values: list[Any]) -> jax.Array:  # one for each segment
        return jnp.stack([jnp.asarray(v) for v in values])

    of_seeds = [constants([_key(seed, s.spec.name) for s in segments]) for seed in seeds]
    keys_T = of_seeds[0] if len(seeds) == 1 else jnp.stack(of_seeds)[jax.lax.axis_index(ACROSS_GROUPS)]
    scale_T = constants([jnp.float32(s.spec.scale) for s in segments])
    orders = [(s.order.quotient, s.order.classes, s.order.inverse) for s in segments]
    q_T, S_T, inverse_T = (constants([jnp.int32(v) for v in column]) for column in zip(*orders, strict=True))
    locate = locator(group, owner)

    def columns_of(drawn_CxD: jax.Array, start: Any) -> jax.Array:
        wide = jnp.pad(drawn_CxD, ((0, 0), (0, W)))  # the last devices' columns may end beyond D
        return jax.lax.dynamic_slice_in_dim(wide, start, W, axis=1)

    def drawn(t_C: jax.Array, row_C: jax.Array) -> jax.Array:
        if all(s.whole_rows for s in segments):
            values = jax.vmap(lambda key, row: _draw(key, row, group.dim))(keys_T[t_C], row_C) * scale_T[t_C][:, None]
            return columns_of(values, first) if W < group.dim else values
        values = jnp.zeros((chunk, W), jnp.float32)
        for dim, start in sorted({(s.spec.dim, s.first) for s in segments}):
            alike_T = jnp.asarray([(s.spec.dim, s.first) == (dim, start) for s in segments])
            whole = jax.vmap(lambda key, row, dim=dim: _draw(key, row, dim))(keys_T[t_C], row_C)
            values = jnp.where(alike_T[t_C][:, None], columns_of(whole, start + first), values)
        return values * scale_T[t_C][:, None]

    def values_of(homes_C: jax.Array) -> jax.Array:
        t_C, position_C, used_C = locate(homes_C)
        row_C = row_at(jnp.where(used_C, position_C, 0), q_T[t_C], S_T[t_C], inverse_T[t_C])
        values = drawn(t_C, row_C)
        return nearest(jnp.where(used_C[:, None] & used_W[None], values, 0), dtype)

    return values_of


def filled(shape: tuple[int, ...], value: Any, dtype: Any, sharding: Any) -> jax.Array:
    """`jnp.full` in place: that one would fill a shard on the first device, and copy it to where it belongs."""
    made: jax.Array = _filling(shape, float(value), jnp.dtype(dtype), sharding)()
    return made


@functools.lru_cache(maxsize=1024)
def _filling(shape: tuple[int, ...], value: float, dtype: Any, sharding: Any) -> Any:
    """A program each, kept for the next checkpoint."""
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)


def call_sizes(count: int) -> list[tuple[int, int]]:
    """Cuts so many rows into calls: (first row, rows of the call, of which the last ones may not be needed)."""
    found, start = [], 0
    while start < count:
        size = next((size for size in _CALLS if size >= count - start), _CALLS[-1])
        found.append((start, size))
        start += size
    return found
