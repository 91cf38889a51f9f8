"""The tables of a model as arrays: initial values, and the way out to checkpoints and back.

A group's buffer is one array [O * R, D], owner-major. On disk and in tests a table is one unpadded
[V, D] array in storage order (see `rows.py`), the same for every mesh and plan.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.plan import BoundPlan, BoundTable, Group
from recjax.embedding.rows import row_at
from recjax.errors import TrainingError
from recjax.lazy import Index, LazyArray, as_lazy, block_of
from recjax.mesh import MODEL_AXES, replicated, sharded

Tables = dict[str, jax.Array]  # group name -> [O * R, D]
GroupSlots = dict[str, dict[str, jax.Array]]  # group name -> slot name -> [O * R, ...]
CHUNK_FLOATS = 1 << 18  # values made at a time: bounds the temporary of initialisation to a few MiB


def initial_rows(seed: int, table: str, rows_U: jax.Array, dim: int, scale: float) -> jax.Array:
    """Initial values of some rows of a table, [U, D] float32, uniform in [-scale, scale).

    A function of (seed, table name, row, column) only: the counter-based generator is keyed by row.
    """
    return jax.vmap(lambda row: _draw(_key(seed, table), row, dim))(rows_U) * scale


def _key(seed: int, table: str) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(table.encode()))


def _draw(key: jax.Array, row: jax.Array, dim: int) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, row), (dim,), jnp.float32, minval=-1, maxval=1)


def initialise(bound: BoundPlan, mesh: Mesh, seed: int, dtype: Any = jnp.float32) -> tuple[Tables, GroupSlots]:
    """Makes all tables and optimizer slots, in place on their devices and in chunks.

    Peak memory beside the result is a few MiB a device, whatever the tables' size.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    for group in bound.groups:
        spec = P(MODEL_AXES) if group.placement == "row_wise" else P()
        body = functools.partial(_initial_block, group, seed, dtype)
        tables[group.name] = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
        sharding = _sharding(group, mesh)
        slots[group.name] = {
            name: jnp.full((group.owners * group.rows, *slot.shape), slot.initial, dtype, device=sharding)
            for name, slot in group.slots().items()
        }
    return tables, slots


def _initial_block(group: Group, seed: int, dtype: Any) -> jax.Array:
    """One owner's part of a group's buffer, filled by one loop whatever the number of tables."""
    owner = jax.lax.axis_index(MODEL_AXES) if group.placement == "row_wise" else jnp.int32(0)
    tables, R = group.tables, group.rows

    def constants(values: list[Any]) -> jax.Array:  # one for each table
        return jnp.stack([jnp.asarray(v) for v in values])

    keys_T = constants([_key(seed, t.spec.name) for t in tables])
    scale_T = constants([jnp.float32(t.spec.scale) for t in tables])
    offset_T = constants([jnp.int32(t.offset) for t in tables])
    first_T = constants([t.split.start(owner) for t in tables])
    stop_T = constants([t.split.start(owner + 1) for t in tables])
    orders = [(t.order.quotient, t.order.classes, t.order.inverse) for t in tables]
    q_T, S_T, inverse_T = (constants([jnp.int32(v) for v in column]) for column in zip(*orders, strict=True))
    chunk = min(R, max(1, CHUNK_FLOATS // group.dim))

    def fill(i: jax.Array, block_RxD: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, R - chunk)  # the last chunk overlaps, and repeats the same values
        slot_C = start + jnp.arange(chunk, dtype=jnp.int32)
        t_C = jnp.searchsorted(offset_T, slot_C, side="right") - 1
        position_C = first_T[t_C] + slot_C - offset_T[t_C]
        used_C = position_C < stop_T[t_C]
        row_C = row_at(jnp.where(used_C, position_C, 0), q_T[t_C], S_T[t_C], inverse_T[t_C])
        values = jax.vmap(lambda key, row: _draw(key, row, group.dim))(keys_T[t_C], row_C) * scale_T[t_C][:, None]
        values = jnp.where(used_C[:, None], values, 0).astype(dtype)
        return jax.lax.dynamic_update_slice(block_RxD, values, (start, jnp.int32(0)))

    chunks = jnp.int32(-(-R // chunk))  # int32 throughout, also where JAX is in 64-bit mode
    return jax.lax.fori_loop(jnp.int32(0), chunks, fill, jnp.zeros((R, group.dim), dtype))


def _sharding(group: Group, mesh: Mesh) -> Any:
    return sharded(mesh, MODEL_AXES) if group.placement == "row_wise" else replicated(mesh)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rectangle of a table that lies in one owner's part of the group's buffer.

    Attributes:
      owner: whose part.
      rows: its storage positions.
      columns: its columns.
      at: row and column of the part where it starts.
    """

    owner: int
    rows: slice
    columns: slice
    at: tuple[int, int]


def pieces(group: Group, table: BoundTable) -> Iterator[Piece]:
    """Where every row and column of a table lies. An array of one value a row has the rows alone."""
    for owner in range(group.owners):
        first, stop = table.split.start(owner), table.split.start(owner + 1)
        if first < stop:
            yield Piece(owner, slice(first, stop), slice(0, group.dim), (table.offset, 0))


def _overlaps(group: Group, table: BoundTable, part: Index) -> Iterator[tuple[int, Index, tuple[int, ...]]]:
    """(owner, index within `part`, start within the owner's buffer) of all that a part of a table consists of."""
    for piece in pieces(group, table):
        box = tuple(zip(part, (piece.rows, piece.columns), piece.at, strict=False))  # rows alone, if that is all
        spans = [(max(p.start, b.start), min(p.stop, b.stop)) for p, b, _ in box]
        if all(start < stop for start, stop in spans):
            inside = tuple(slice(a - p.start, z - p.start) for (a, z), (p, _, _) in zip(spans, box, strict=True))
            yield piece.owner, inside, tuple(at + a - b.start for (a, _), (_, b, at) in zip(spans, box, strict=True))


def export_tables(bound: BoundPlan, tables: Tables, slots: GroupSlots) -> dict[str, dict[str, LazyArray]]:
    """Tables and slots, unpadded, to be read from the devices a part at a time, before the next step changes them.

    Returns:
      table name -> {"rows": [V, D], slot name: [V] or [V, D]}, in storage order. What is read owns its memory:
      no view of a device buffer stays behind, which would make the next donated step copy the table.
      The devices need room for one part of a table beside it, not for a copy.
    """
    out: dict[str, dict[str, LazyArray]] = {}
    for group in bound.groups:
        arrays = {"rows": tables[group.name], **slots[group.name]}
        for table in group.tables:
            out[table.spec.name] = {name: _export(group, table, array) for name, array in arrays.items()}
    return out


def _export(group: Group, table: BoundTable, array: jax.Array) -> LazyArray:
    owned = {_owner(group, shard.index): shard.data for shard in reversed(array.addressable_shards)}

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], array.dtype)
        for owner, inside, start in _overlaps(group, table, part):
            # The host's view is one of this copy, never of the buffer that the next step donates.
            size = [axis.stop - axis.start for axis in inside]
            out[inside] = np.asarray(jax.lax.dynamic_slice(owned[owner], start, size))
        return out

    shape = (table.spec.rows, *array.shape[1:])
    return LazyArray(shape, array.dtype, read, block_of(shape, array.dtype))


def _owner(group: Group, index: Index) -> int:
    return (index[0].start or 0) // group.rows


def import_tables(
    bound: BoundPlan, mesh: Mesh, saved: dict[str, dict[str, np.ndarray | LazyArray]], dtype: Any = jnp.float32
) -> tuple[Tables, GroupSlots]:
    """The inverse of `export_tables`, onto any mesh and plan. The host holds one part of a table at a time.

    Raises:
      TrainingError: a table or slot is missing or has another shape; nothing is padded or cut.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    for group in bound.groups:  # all are checked before the first is read
        for name, tail in (("rows", (group.dim,)), *((n, s.shape) for n, s in group.slots().items())):
            _check(group, saved, name, tail, dtype)
    for group in bound.groups:
        tables[group.name] = _import(group, mesh, saved, "rows", (group.dim,), dtype)
        slots[group.name] = {n: _import(group, mesh, saved, n, s.shape, dtype) for n, s in group.slots().items()}
    return tables, slots


def _check(
    group: Group, saved: dict[str, dict[str, np.ndarray | LazyArray]], name: str, tail: tuple[int, ...], dtype: Any
) -> None:
    for table in group.tables:
        array, shape = saved.get(table.spec.name, {}).get(name), (table.spec.rows, *tail)
        found = "nothing" if array is None else f"shape {array.shape}, {array.dtype}"
        if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
            raise TrainingError(
                f"the checkpoint holds {found} for {name!r} of table {table.spec.name!r}, but the model needs shape "
                f"{shape}, {np.dtype(dtype)}. It belongs to another model or data: use the config in the run folder."
            )


def _import(
    group: Group,
    mesh: Mesh,
    saved: dict[str, dict[str, np.ndarray | LazyArray]],
    name: str,
    tail: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    shape, sharding = (group.owners * group.rows, *tail), _sharding(group, mesh)
    indices = sharding.addressable_devices_indices_map(shape)
    blocks = {device: jnp.zeros(sharding.shard_shape(shape), dtype, device=device) for device in indices}
    for table in group.tables:
        array = as_lazy(saved[table.spec.name][name])
        for part in array.parts():
            values = array.read(part)
            for owner, inside, start in _overlaps(group, table, part):
                for device, index in indices.items():
                    if _owner(group, index) == owner:
                        piece = jax.device_put(values[inside], device)
                        blocks[device] = _write(blocks[device], piece, start)
            jax.block_until_ready(list(blocks.values()))  # or parts would pile up
    return jax.make_array_from_single_device_arrays(shape, sharding, list(blocks.values()))


@functools.partial(jax.jit, donate_argnums=0)  # in place: no second copy of a table at any time
def _write(block: jax.Array, piece: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(block, piece, start)
