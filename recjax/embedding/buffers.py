"""The groups' buffers: what they are, and their initial values.

A group's buffer is one array [parts * R, width], part by part (see `group.Group`), and of independent replica groups
one of [versions * parts * R, width]. Optimizer slots lie beside it. On a TPU both may be in lines: see `lines.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.lines import Lines
from recjax.embedding.quantize import nearest
from recjax.embedding.row_order import Split, row_at
from recjax.embedding.sharding import NO_HOME, Homes, Places
from recjax.parallel.mesh import ACROSS_GROUPS, put, replicated, sharded

if TYPE_CHECKING:
    from recjax.embedding.row_order import Band
    from recjax.embedding.sharding import Sharding

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
    apart: bool = False,
) -> tuple[Tables, GroupSlots]:
    """Makes all tables and optimizer slots, in place on their devices and in chunks.

    Peak memory beside the result is a few MiB a device, whatever the tables' size.

    Args:
      bound: the bound plan.
      mesh: its devices.
      seed: of the values: see `initial_rows`.
      dtype: of tables that are not held in a reduced precision, and of slots.
      apart: whether independent replica group g starts with the tables of seed + g (modulo 2^32) instead of those of
        `seed`.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    seeds = [(seed + g) % 2**32 for g in range(bound.replicas)] if apart and bound.independent else [seed]
    for group in bound.groups:
        held = group.storage_dtype(dtype)
        if group.cached:
            shape = group.shape((group.width,))
            tables[group.name] = filled(shape, 0, held, sharded(mesh, group.partition_axes))
        else:
            of_values = group.value_group
            draws, form = put(Draws.of(of_values, seeds), replicated(mesh)), Form.of(of_values, held)
            tables[group.name] = _initial_program(form, mesh, of_values.partition_axes, CHUNK_FLOATS)(draws)
        own = group.slot_group
        sharding = sharded(mesh, own.partition_axes)
        slots[group.name] = {
            name: filled(own.shape(slot.shape), slot.initial, dtype, sharding) for name, slot in group.slots().items()
        }
    return tables, slots


def place_homes(bound: BoundPlan, mesh: Mesh) -> Homes:
    """Returns the homes of the slots of all caches on the mesh: none, as these hold no row yet."""
    return {
        group.name: put(
            np.full(group.versions * group.parts * group.rows, NO_HOME, np.int32), sharded(mesh, group.partition_axes)
        )
        for group in bound.cached
    }


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of a group's buffer: all that a program of initial values is made for, and not given in `Draws`.

    Attributes:
      sharding: of the group.
      rows: R, rows of a part of the buffer.
      dim: D, columns of the group's segments.
      width: W, columns of the buffer.
      shape: of a part of it.
      lines: its layout, if rows lie side by side.
      dtype: of the values.
      tables: of each segment the columns of its table, and which of them is its first.
      bands: of each segment the rows that it holds; None stands for all.
    """

    sharding: Sharding
    rows: int
    dim: int
    width: int
    shape: tuple[int, ...]
    lines: Lines | None
    dtype: Any
    tables: tuple[tuple[int, int], ...]
    bands: tuple[Band | None, ...]

    @classmethod
    def of(cls, group: Group, dtype: Any) -> Form:
        """Returns the form of a group whose values are held in a dtype."""
        return cls(
            group.sharding,
            group.rows,
            group.dim,
            group.width,
            group.part_shape((group.width,)),
            group.lines,
            jnp.dtype(dtype),
            tuple((s.spec.dim, s.first) for s in group.segments),
            tuple(None if s.band.chosen is None else s.band for s in group.segments),
        )


class Draws(NamedTuple):
    """Arguments of a program of initial values, in which groups of one form may differ; of T segments.

    Attributes:
      keys_GxTx2: the key of each table's values, uint32: of each replica group, or one for all.
      scale_T: half the width of each distribution, float32.
      orders_3xT: quotient, classes and inverse of each `RowOrder`, int32.
      places: where the segments lie in the parts of the buffer.
    """

    keys_GxTx2: Any
    scale_T: Any
    orders_3xT: Any
    places: Places

    @classmethod
    def of(cls, group: Group, seeds: list[int]) -> Draws:
        """Returns the arguments for a group; `seeds` are those of the replica groups, or one for all."""
        specs, orders = [s.spec for s in group.segments], [s.order for s in group.segments]
        with jax.ensure_compile_time_eval():  # here, where one small program serves all; to compile a draw takes long
            keys = [[np.asarray(jax.random.key_data(_key(seed, spec.name))) for spec in specs] for seed in seeds]
        return cls(
            np.array(keys),
            np.array([spec.scale for spec in specs], np.float32),
            np.array(
                [[o.quotient for o in orders], [o.classes for o in orders], [o.inverse for o in orders]], np.int32
            ),
            group.places,
        )


@functools.lru_cache(maxsize=256)
def _initial_program(form: Form, mesh: Mesh, partition_axes: tuple[str, ...], floats: int) -> Any:
    """The program that makes a group's buffer of its `Draws`, about so many `floats` at a time; one for each form."""
    block = functools.partial(_initial_block, form, floats)
    return jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P(), out_specs=P(partition_axes), check_vma=False))


def _initial_block(form: Form, floats: int, draws: Draws) -> jax.Array:
    """One device's part of a group's buffer, filled by one loop whatever the number of segments."""
    R, k = form.rows, form.lines.rows if form.lines else 1
    chunk = min(R, max(1, floats // max(dim for dim, _ in form.tables) // k) * k)
    values_of = initial_values(form, draws, form.sharding.this_part(), chunk)

    def fill(i: jax.Array, block_RxW: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, R - chunk)  # the last chunk overlaps, and repeats the same values
        values = values_of(start + jnp.arange(chunk, dtype=jnp.int32))
        values = form.lines.packed(values) if form.lines else values
        return jax.lax.dynamic_update_slice(block_RxW, values, (start // k if k > 1 else start, jnp.int32(0)))

    chunks = jnp.int32(-(-R // chunk))  # int32 throughout, also where JAX is in 64-bit mode
    return jax.lax.fori_loop(jnp.int32(0), chunks, fill, jnp.zeros(form.shape, form.dtype))


def initial_values(form: Form, draws: Draws, part: Any, chunk: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the function from `chunk` homes in a part of a group's buffer to their initial values.

    Args:
      form: of the table group.
      draws: its own; with several seeds only inside `jax.shard_map`.
      part: which one of its buffer.
      chunk: C, homes at a time.

    Returns:
      homes int32 [C] -> [C, W]; zeros where there is no such row.
    """
    columns, W = Split(form.dim, form.sharding.column_parts), form.width
    column = form.sharding.place(part)[1]
    first = columns.start(column)
    used_W = jnp.arange(W, dtype=jnp.int32) < columns.start(column + 1) - first
    group_number = 0 if len(draws.keys_GxTx2) == 1 else jax.lax.axis_index(ACROSS_GROUPS)
    keys_T = jax.random.wrap_key_data(draws.keys_GxTx2[group_number], impl="threefry2x32")
    q_T, S_T, inverse_T = draws.orders_3xT
    locate = draws.places.locator(form.bands, part)

    def columns_of(drawn_CxD: jax.Array, start: Any) -> jax.Array:
        wide = jnp.pad(drawn_CxD, ((0, 0), (0, W)))  # the last devices' columns may end beyond D
        return jax.lax.dynamic_slice_in_dim(wide, start, W, axis=1)

    def drawn(t_C: jax.Array, row_C: jax.Array) -> jax.Array:
        scale_C = draws.scale_T[t_C]
        if all(dim == form.dim for dim, _ in form.tables):
            values = jax.vmap(lambda key, row: _draw(key, row, form.dim))(keys_T[t_C], row_C) * scale_C[:, None]
            return columns_of(values, first) if W < form.dim else values
        values = jnp.zeros((chunk, W), jnp.float32)
        for dim, start in sorted(set(form.tables)):
            alike_T = jnp.asarray([table == (dim, start) for table in form.tables])
            whole = jax.vmap(lambda key, row, dim=dim: _draw(key, row, dim))(keys_T[t_C], row_C)
            values = jnp.where(alike_T[t_C][:, None], columns_of(whole, start + first), values)
        return values * scale_C[:, None]

    def values_of(homes_C: jax.Array) -> jax.Array:
        t_C, position_C, used_C = locate(homes_C)
        row_C = row_at(jnp.where(used_C, position_C, 0), q_T[t_C], S_T[t_C], inverse_T[t_C])
        values = drawn(t_C, row_C)
        return nearest(jnp.where(used_C[:, None] & used_W[None], values, 0), form.dtype)

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
