"""The tables of a model as arrays: initial values, and the way out to checkpoints and back.

A group's buffer is one array [parts * R, width], part by part (see `bound.Group`), and of independent replica groups
one of [versions * parts * R, width]. On disk and in tests a
table is one unpadded [V, D] array in storage order (see `row_order.py`), the same for every mesh and plan.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from recjax.embedding.layout import BoundPlan, BoundTable, Group, Piece
from recjax.embedding.low_precision import locator, nearest, storage_dtype
from recjax.embedding.row_order import row_at
from recjax.errors import TrainingError
from recjax.parallel.mesh import sharded
from recjax.utils.lazy_arrays import Index, LazyArray, Spread, as_lazy, block_of

Tables = dict[str, jax.Array]  # group name -> [versions * parts * R, width]
GroupSlots = dict[str, dict[str, jax.Array]]  # group name -> slot name -> [versions * parts * R, ...]
Saved = dict[str, dict[str, np.ndarray | LazyArray]]  # as `export_tables` gives it, or the same read from the disk
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
        spec = P(group.partition_axes)
        body = functools.partial(_initial_block, group, seed, storage_dtype(group, dtype))
        tables[group.name] = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
        sharding = sharded(mesh, group.partition_axes)
        slots[group.name] = {
            name: _filled((group.versions * group.parts * group.rows, *slot.shape), slot.initial, dtype, sharding)
            for name, slot in group.slots().items()
        }
    return tables, slots


def _initial_block(group: Group, seed: int, dtype: Any) -> jax.Array:
    """One device's part of a group's buffer, filled by one loop whatever the number of tables."""
    part = group.sharding.this_part()
    owner, column = group.place(part)
    tables, R, W = group.tables, group.rows, group.width
    first = group.columns.start(column)
    used_W = jnp.arange(W, dtype=jnp.int32) < group.columns.start(column + 1) - first

    def constants(values: list[Any]) -> jax.Array:  # one for each table
        return jnp.stack([jnp.asarray(v) for v in values])

    keys_T = constants([_key(seed, t.spec.name) for t in tables])
    scale_T = constants([jnp.float32(t.spec.scale) for t in tables])
    orders = [(t.order.quotient, t.order.classes, t.order.inverse) for t in tables]
    q_T, S_T, inverse_T = (constants([jnp.int32(v) for v in column]) for column in zip(*orders, strict=True))
    locate = locator(group, owner)
    chunk = min(R, max(1, CHUNK_FLOATS // group.dim))

    def fill(i: jax.Array, block_RxW: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, R - chunk)  # the last chunk overlaps, and repeats the same values
        slot_C = start + jnp.arange(chunk, dtype=jnp.int32)
        t_C, position_C, used_C = locate(slot_C)
        row_C = row_at(jnp.where(used_C, position_C, 0), q_T[t_C], S_T[t_C], inverse_T[t_C])
        values = jax.vmap(lambda key, row: _draw(key, row, group.dim))(keys_T[t_C], row_C) * scale_T[t_C][:, None]
        if W < group.dim:
            values = jnp.pad(values, ((0, 0), (0, W)))  # the last devices' columns may end beyond D
            values = jax.lax.dynamic_slice_in_dim(values, first, W, axis=1)
        values = nearest(jnp.where(used_C[:, None] & used_W[None], values, 0), dtype)
        return jax.lax.dynamic_update_slice(block_RxW, values, (start, jnp.int32(0)))

    chunks = jnp.int32(-(-R // chunk))  # int32 throughout, also where JAX is in 64-bit mode
    return jax.lax.fori_loop(jnp.int32(0), chunks, fill, jnp.zeros((R, W), dtype))


def _filled(shape: tuple[int, ...], value: Any, dtype: Any, sharding: Any) -> jax.Array:
    """`jnp.full` in place: that one would fill a shard on the first device, and copy it to where it belongs."""
    filled: jax.Array = jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)()
    return filled


def _overlaps(group: Group, table: BoundTable, part: Index) -> Iterator[tuple[int, Index, tuple[int, ...]]]:
    """(part of the buffer, index within `part`, start within the former) of all that a part of a table consists of.

    An array of one value a row has rows alone; beside columns, every part of the buffer with these rows holds it.
    """
    for piece in group.pieces(table):
        lies = ((piece.start, piece.stop, piece.offset), (piece.first, piece.last, 0))
        box = tuple(zip(part, lies, strict=False))
        spans = [(max(p.start, start), min(p.stop, stop)) for p, (start, stop, _) in box]
        if all(start < stop for start, stop in spans):
            inside = tuple(slice(a - p.start, z - p.start) for (a, z), (p, _) in zip(spans, box, strict=True))
            at = tuple(offset + a - start for (a, _), (_, (start, _, offset)) in zip(spans, box, strict=True))
            yield piece.part, inside, at


def export_tables(
    bound: BoundPlan, tables: Tables, slots: GroupSlots, version: int = 0
) -> dict[str, dict[str, LazyArray | Spread]]:
    """Tables and slots, unpadded, to be read from the devices a part at a time, before the next step changes them.

    Args:
      bound: the bound plan.
      tables: the groups' buffers.
      slots: beside them.
      version: which replica group's, where these are independent.

    Returns:
      table name -> {"rows": [V, D], slot name: [V] or [V, D]}, in storage order. What is read owns its memory:
      no view of a device buffer stays behind, which would make the next donated step copy the table.
      The devices need room for one part of a table beside it, not for a copy. Of several processes each gives the
      rectangles that its own devices hold, of what several hold only the first.
    """
    out: dict[str, dict[str, LazyArray | Spread]] = {}
    for group in bound.groups:
        arrays = {"rows": tables[group.name], **slots[group.name]}
        for table in group.tables:
            out[table.spec.name] = {name: _export(group, table, array, version) for name, array in arrays.items()}
    return out


def _export(group: Group, table: BoundTable, array: jax.Array, version: int) -> LazyArray | Spread:
    blocks = {_part(group, shard.index): shard.data for shard in reversed(array.addressable_shards)}

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for k, inside, start in _overlaps(group, table, part):
            if array.ndim == 1 and group.place(k)[1] > 0:
                continue  # the parts with the first columns hold all of it, and the others the same
            # The host's view is one of this copy, never of the buffer that the next step donates.
            size = [axis.stop - axis.start for axis in inside]
            block = blocks[version * group.parts + k]
            out[inside] = np.asarray(jax.lax.dynamic_slice(block, start, size)).view(dtype)
        return out

    shape = _shape(table, array.ndim - 1)
    dtype = _outside(array.dtype)
    if array.is_fully_addressable or not group.partition_axes:
        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    def rectangle(corner: tuple[int, ...], size: tuple[int, ...]) -> LazyArray:
        def moved(part: Index) -> np.ndarray:
            return read(tuple(slice(a.start + at, a.stop + at) for a, at in zip(part, corner, strict=True)))

        return LazyArray(size, dtype, moved, block_of(size, dtype))

    where: Any = array.sharding.devices_indices_map(array.shape)
    first = {_part(group, index): device for device, index in reversed(where.items())}
    of_version = [(k, first[version * group.parts + k]) for k in range(group.parts)]
    mine = [k for k, device in of_version if device.process_index == jax.process_index()]
    boxes = _boxes([piece for k in mine for piece in group.pieces(table, k)], array.ndim)
    return Spread(shape, dtype, tuple((at, rectangle(at, size)) for at, size in boxes))


def _boxes(pieces: Sequence[Piece], dimensions: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(least index, size) of rectangles of a table, neighbours joined. With 1 dimension columns are left out.

    Such an array is held beside each part of the columns; then the first one's counts.
    """
    found: list[list[int]] = []  # start, stop, first, last
    for piece in pieces:
        box = [piece.start, piece.stop, piece.first, piece.last]
        if piece.start >= piece.stop or piece.first >= piece.last or (dimensions == 1 and piece.first > 0):
            continue
        if found and found[-1][2:] == box[2:] and found[-1][1] == box[0]:
            found[-1][1] = box[1]
        elif found and found[-1][:2] == box[:2] and found[-1][3] == box[2]:
            found[-1][3] = box[3]
        else:
            found.append(box)
    return [((a, c)[:dimensions], (b - a, d - c)[:dimensions]) for a, b, c, d in found]


def _outside(dtype: Any) -> np.dtype[Any]:
    """The dtype in checkpoints of what a buffer of `dtype` holds."""
    return np.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)


def _shape(table: BoundTable, columns: int) -> tuple[int, ...]:
    """Of an array of a whole table with one value an element (`columns` 1) or a row (0)."""
    return (table.spec.rows, table.spec.dim)[: 1 + columns]


def _part(group: Group, index: Any) -> int:
    """The part of the buffers, version by version, that a shard with this index of the whole is."""
    return (index[0].start or 0) // group.rows


def mean_tables(versions: Sequence[Saved]) -> Saved:
    """The means of equal tables and slots of several replica groups, to be read a part at a time."""

    def mean(arrays: list[LazyArray]) -> LazyArray:
        wide = np.promote_types(arrays[0].dtype, np.float32)

        def read(part: Index) -> np.ndarray:
            total = arrays[0].read(part).astype(wide)
            for array in arrays[1:]:
                total += array.read(part)
            return (total / len(arrays)).astype(arrays[0].dtype)

        return LazyArray(arrays[0].shape, arrays[0].dtype, read, arrays[0].block)

    return {
        table: {name: mean([as_lazy(of[table][name]) for of in versions]) for name in arrays}
        for table, arrays in versions[0].items()
    }


def import_tables(
    bound: BoundPlan, mesh: Mesh, saved: Saved | Sequence[Saved], dtype: Any = jnp.float32
) -> tuple[Tables, GroupSlots]:
    """The inverse of `export_tables`, onto any mesh and plan. The host holds one part of a table at a time.

    Args:
      bound: the bound plan.
      mesh: its devices.
      saved: what all replica groups get; or, of independent groups, what each of them gets.
      dtype: of tables that do not say otherwise, and of slots.

    Raises:
      TrainingError: a table or slot is missing or has another shape; nothing is padded or cut.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    sources = [saved] if isinstance(saved, dict) else list(saved)
    for group in bound.groups:  # all are checked before the first is read
        for name, columns in (("rows", 1), *((n, len(s.shape)) for n, s in group.slots().items())):
            for source in sources:
                _check(group, source, name, columns, _outside(storage_dtype(group, dtype) if name == "rows" else dtype))
    for group in bound.groups:
        tables[group.name] = _import(group, mesh, sources, "rows", (group.width,), storage_dtype(group, dtype))
        slots[group.name] = {n: _import(group, mesh, sources, n, s.shape, dtype) for n, s in group.slots().items()}
    return tables, slots


def _check(group: Group, saved: Saved, name: str, columns: int, dtype: np.dtype[Any]) -> None:
    for table in group.tables:
        array, shape = saved.get(table.spec.name, {}).get(name), _shape(table, columns)
        found = "nothing" if array is None else f"shape {array.shape}, {array.dtype}"
        if array is None or array.shape != shape or array.dtype != dtype:
            raise TrainingError(
                f"the checkpoint holds {found} for {name!r} of table {table.spec.name!r}, but the model needs shape "
                f"{shape}, {dtype}. It belongs to another model or data: use the config in the run folder."
            )


def _import(
    group: Group,
    mesh: Mesh,
    sources: Sequence[Saved],
    name: str,
    tail: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    shape = (group.versions * group.parts * group.rows, *tail)
    sharding = sharded(mesh, group.partition_axes)
    indices = sharding.addressable_devices_indices_map(shape)
    block = sharding.shard_shape(shape)
    blocks = {device: _filled(block, 0, dtype, SingleDeviceSharding(device)) for device in indices}
    holders: dict[int, list[Any]] = {}  # part of a version -> the devices of this process that hold it
    for device, index in indices.items():
        holders.setdefault(_part(group, index), []).append(device)
    for (version, saved), table in itertools.product(enumerate(sources), group.tables):
        firsts = [v * group.parts for v in ([version] if len(sources) > 1 else range(group.versions))]
        array = as_lazy(saved[table.spec.name][name])
        for part in array.parts():
            here = [o for o in _overlaps(group, table, part) if any(first + o[0] in holders for first in firsts)]
            if not here:
                continue
            values = array.read(part)
            for k, inside, start in here:
                for device in [device for first in firsts for device in holders.get(first + k, ())]:
                    piece = jax.device_put(values[inside].view(dtype), device)
                    blocks[device] = _write(blocks[device], piece, start)
            jax.block_until_ready(list(blocks.values()))  # or parts would pile up
    return jax.make_array_from_single_device_arrays(shape, sharding, list(blocks.values()))


@functools.partial(jax.jit, donate_argnums=0)  # in place: no second copy of a table at any time
def _write(block: jax.Array, piece: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(block, piece, start)
