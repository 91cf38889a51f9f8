"""The tables of a model as arrays: initial values, and the way out to checkpoints and back.

A group's buffer is one array [parts * R, width], part by part (see `bound.Group`). On disk and in tests a
table is one unpadded [V, D] array in storage order (see `rows.py`), the same for every mesh and plan.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.bound import BoundPlan, BoundTable, Group
from recjax.embedding.rows import row_at
from recjax.errors import TrainingError
from recjax.mesh import MODEL_AXES, replicated, sharded

Tables = dict[str, jax.Array]  # group name -> [parts * R, width]
GroupSlots = dict[str, dict[str, jax.Array]]  # group name -> slot name -> [parts * R, ...]
CHUNK_FLOATS = 1 << 18  # values made at a time: bounds the temporary of initialisation to a few MiB
EXPORT_BYTES = 1 << 26  # of a table copied at a time: bounds the device's temporary of an export


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
        spec = P() if group.sharding == "copies" else P(MODEL_AXES)
        body = functools.partial(_initial_block, group, seed, dtype)
        tables[group.name] = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
        sharding = _sharding(group, mesh)
        slots[group.name] = {
            name: jnp.full((group.parts * group.rows, *slot.shape), slot.initial, dtype, device=sharding)
            for name, slot in group.slots().items()
        }
    return tables, slots


def _initial_block(group: Group, seed: int, dtype: Any) -> jax.Array:
    """One device's part of a group's buffer, filled by one loop whatever the number of tables."""
    part = jnp.int32(0) if group.sharding == "copies" else jax.lax.axis_index(MODEL_AXES)
    owner = part if group.sharding == "rows" else jnp.int32(0)
    column = part if group.sharding == "columns" else jnp.int32(0)
    tables, R, W = group.tables, group.rows, group.width
    first = group.columns.start(column)
    used_W = jnp.arange(W, dtype=jnp.int32) < group.columns.start(column + 1) - first

    def constants(values: list[Any]) -> jax.Array:  # one for each table
        return jnp.stack([jnp.asarray(v) for v in values])

    keys_T = constants([_key(seed, t.spec.name) for t in tables])
    scale_T = constants([jnp.float32(t.spec.scale) for t in tables])
    offset_T = constants([jnp.asarray(t.offsets, jnp.int32)[owner] for t in tables])
    first_T = constants([t.split.start(owner) for t in tables])
    stop_T = constants([t.split.start(owner + 1) for t in tables])
    orders = [(t.order.quotient, t.order.classes, t.order.inverse) for t in tables]
    q_T, S_T, inverse_T = (constants([jnp.int32(v) for v in column]) for column in zip(*orders, strict=True))
    chunk = min(R, max(1, CHUNK_FLOATS // group.dim))

    def fill(i: jax.Array, block_RxW: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, R - chunk)  # the last chunk overlaps, and repeats the same values
        slot_C = start + jnp.arange(chunk, dtype=jnp.int32)
        t_C = jnp.searchsorted(offset_T, slot_C, side="right") - 1
        position_C = first_T[t_C] + slot_C - offset_T[t_C]
        used_C = position_C < stop_T[t_C]
        row_C = row_at(jnp.where(used_C, position_C, 0), q_T[t_C], S_T[t_C], inverse_T[t_C])
        values = jax.vmap(lambda key, row: _draw(key, row, group.dim))(keys_T[t_C], row_C) * scale_T[t_C][:, None]
        if W < group.dim:
            values = jnp.pad(values, ((0, 0), (0, W)))  # the last devices' columns may end beyond D
            values = jax.lax.dynamic_slice_in_dim(values, first, W, axis=1)
        values = jnp.where(used_C[:, None] & used_W[None], values, 0).astype(dtype)
        return jax.lax.dynamic_update_slice(block_RxW, values, (start, jnp.int32(0)))

    chunks = jnp.int32(-(-R // chunk))  # int32 throughout, also where JAX is in 64-bit mode
    return jax.lax.fori_loop(jnp.int32(0), chunks, fill, jnp.zeros((R, W), dtype))


def _sharding(group: Group, mesh: Mesh) -> Any:
    return replicated(mesh) if group.sharding == "copies" else sharded(mesh, MODEL_AXES)


def export_tables(bound: BoundPlan, tables: Tables, slots: GroupSlots) -> dict[str, dict[str, np.ndarray]]:
    """Copies tables and slots to the host, unpadded.

    Returns:
      table name -> {"rows": [V, D], slot name: [V] or [V, D]}, in storage order. The arrays own their memory:
      no view of a device buffer stays behind, which would make the next donated step copy the table.
      The devices need room for one chunk of a table beside it, not for a copy.
    """
    out: dict[str, dict[str, np.ndarray]] = {}
    for group in bound.groups:
        arrays = {"rows": tables[group.name], **slots[group.name]}
        for table in group.tables:
            out[table.spec.name] = {name: _export(group, table, array) for name, array in arrays.items()}
    return out


def _export(group: Group, table: BoundTable, array: jax.Array) -> np.ndarray:
    by_column = array.ndim == 2
    full = np.empty((table.spec.rows, *([table.spec.dim] if by_column else [])), array.dtype)
    seen: set[int] = set()
    for shard in array.addressable_shards:
        part = (shard.index[0].start or 0) // group.rows
        # One copy is enough of what several devices hold: a replicated table, or one float a row beside columns.
        if part in seen or (seen and group.sharding == "columns" and not by_column):
            continue
        seen.add(part)
        (piece,) = group.pieces(table, part)
        chunk = max(1, EXPORT_BYTES // (math.prod(array.shape[1:]) * array.dtype.itemsize))
        for start in range(piece.start, piece.stop, chunk):
            size = min(chunk, piece.stop - start)
            # The host's view is one of this copy, never of the buffer that the next step donates.
            copied = np.asarray(jax.lax.dynamic_slice_in_dim(shard.data, piece.offset + start - piece.start, size))
            if by_column:
                full[start : start + size, piece.first : piece.last] = copied[:, : piece.last - piece.first]
            else:
                full[start : start + size] = copied
    return full


def import_tables(
    bound: BoundPlan, mesh: Mesh, saved: dict[str, dict[str, np.ndarray]], dtype: Any = jnp.float32
) -> tuple[Tables, GroupSlots]:
    """The inverse of `export_tables`, onto any mesh and plan.

    Raises:
      TrainingError: a table or slot is missing or has another shape; nothing is padded or cut.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    for group in bound.groups:
        tables[group.name] = _import(group, mesh, saved, "rows", (group.width,), dtype)
        slots[group.name] = {n: _import(group, mesh, saved, n, s.shape, dtype) for n, s in group.slots().items()}
    return tables, slots


def _import(
    group: Group, mesh: Mesh, saved: dict[str, dict[str, np.ndarray]], name: str, tail: tuple[int, ...], dtype: Any
) -> jax.Array:
    by_column = len(tail) == 1
    for table in group.tables:
        array, shape = saved.get(table.spec.name, {}).get(name), (table.spec.rows, *([group.dim] if by_column else []))
        found = "nothing" if array is None else f"shape {array.shape}, {array.dtype}"
        if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
            raise TrainingError(
                f"the checkpoint holds {found} for {name!r} of table {table.spec.name!r}, but the model needs shape "
                f"{shape}, {np.dtype(dtype)}. It belongs to another model or data: use the config in the run folder."
            )

    def block(index: Any) -> np.ndarray:
        out = np.zeros((group.rows, *tail), dtype)
        for table in group.tables:
            for piece in group.pieces(table, (index[0].start or 0) // group.rows):
                held = saved[table.spec.name][name][piece.start : piece.stop]
                stop = piece.offset + len(held)
                if by_column:
                    out[piece.offset : stop, : piece.last - piece.first] = held[:, piece.first : piece.last]
                else:
                    out[piece.offset : stop] = held
        return out

    return jax.make_array_from_callback((group.parts * group.rows, *tail), _sharding(group, mesh), block)
