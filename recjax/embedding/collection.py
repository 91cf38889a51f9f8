"""The way of tables out of the groups' buffers, to checkpoints, and back.

On disk and in tests a table is one unpadded [V, D] array in storage order (see `row_order.py`), the same for every mesh
and plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.address import Homes, inverse
from recjax.embedding.bands import Band, BoundSegment, Piece
from recjax.embedding.buffers import GroupSlots, Tables, filled
from recjax.embedding.cells import Blocks, Overlap, copied, overlaps
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.lines import Lines, buffer_shape, lines_of
from recjax.embedding.low_precision import storage_dtype
from recjax.errors import TrainingError
from recjax.parallel.mesh import sharded
from recjax.utils.lazy_arrays import Index, LazyArray, Place, Runs, Spread, as_lazy, block_of

Saved = dict[str, dict[str, np.ndarray | LazyArray]]  # as `export_tables` gives it, or the same read from the disk


def export_tables(
    bound: BoundPlan, tables: Tables, slots: GroupSlots, version: int = 0, homes: Homes | None = None
) -> dict[str, dict[str, LazyArray | Spread]]:
    """Tables and slots, unpadded, to be read from the devices a part at a time, before the next step changes them.

    Args:
      bound: the bound plan.
      tables: the groups' buffers.
      slots: beside them.
      version: which replica group's, where these are independent.
      homes: of the slots of mapped groups.

    Returns:
      table name -> {"rows": [V, D], slot name: [V] or [V, D]}, in storage order. What is read owns its memory:
      no view of a device buffer is left, which would make the next donated step copy the table.
      The devices need room for one part of a table beside it, not for a copy. Of several processes each gives the
      rectangles that its own devices hold, of what several hold only the first.
    """
    out: dict[str, dict[str, LazyArray | Spread]] = {}
    names = dict.fromkeys(segment.spec.name for group in bound.groups for segment in group.segments)
    for name in names:
        segments = bound.segments(name)
        if any(group.cached for group, _ in segments):
            continue  # `recjax.tiers.tables` gives them
        held = [_arrays(group, segment, tables, slots, homes) for group, segment in segments]
        out[name] = {array: _export([arrays[array] for arrays in held], version) for array in held[0]}
    return out


def export_segment(
    group: Group, segment: BoundSegment, tables: Tables, slots: GroupSlots
) -> dict[str, LazyArray | Spread]:
    """The rows of one segment, and their slots, as if they were a table: by their numbers in its band."""
    size = segment.band.size
    spec = dataclasses.replace(segment.spec, rows=size)
    return {
        name: _export([(own, dataclasses.replace(of, spec=spec, band=Band(size)), buffer, places)], 0)
        for name, (own, of, buffer, places) in _arrays(group, segment, tables, slots, None).items()
    }


def _arrays(
    group: Group, segment: BoundSegment, tables: Tables, slots: GroupSlots, homes: Homes | None
) -> dict[str, tuple[Group, BoundSegment, jax.Array, Places]]:
    """The buffers that a segment lies in, by name."""
    places = _places(group, (homes or {}).get(group.name))
    nth = group.segments.index(segment)
    of_values, of_slots = ((own, own.segments[nth]) for own in (group.value_group, group.slot_group))
    rows = {"rows": (*of_values, tables[group.name], places)}
    return rows | {slot: (*of_slots, x, places) for slot, x in slots[group.name].items()}


Places = dict[int, np.ndarray]  # part of the buffer, version by version -> the slot of each home, int32 [R]


def _places(group: Group, homes: jax.Array | None) -> Places:
    """Returns the slots of the rows of a mapped group, as far as this process has them; nothing of any other group."""
    if homes is None:
        return {}
    shards = homes.addressable_shards
    return {_part(group, shard.index): inverse(np.asarray(shard.data)[None])[0] for shard in shards}


def _export(parts: list[tuple[Group, BoundSegment, jax.Array, Places]], version: int) -> LazyArray | Spread:
    """One array of a table, from its segments."""
    spec = parts[0][1].spec
    array = parts[0][2]
    dtype = outside(array.dtype)
    shape = (spec.rows, spec.dim)[: array.ndim]
    blocks = [
        {_part(group, shard.index): shard.data for shard in reversed(buffer.addressable_shards)}
        for group, _, buffer, _ in parts
    ]

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for (group, segment, _, places), of_part in zip(parts, blocks, strict=True):
            if len(part) == 1 and segment.first > 0:
                continue  # the first columns have all of it, and the others the same
            for found in overlaps(group, segment, part):
                if len(part) == 1 and group.place(found.part)[1] > 0:
                    continue
                k = version * group.parts + found.part
                block = of_part[k]
                values = copied(block, found, places.get(k), lines_of(group.lines, block))
                out[(found.rows, *found.columns)] = values.view(dtype)
        return out

    if all(buffer.is_fully_addressable or not group.partition_axes for group, _, buffer, _ in parts):
        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    def rectangle(corner: tuple[int, ...], size: tuple[int, ...]) -> LazyArray:
        def moved(part: Index) -> np.ndarray:
            return read(tuple(slice(a.start + at, a.stop + at) for a, at in zip(part, corner, strict=True)))

        return LazyArray(size, dtype, moved, block_of(size, dtype))

    def scattered(
        band: Band, piece: Piece, block: jax.Array, slots_R: np.ndarray | None, lines: Lines | None
    ) -> LazyArray:
        homes_M: range | np.ndarray = range(piece.offset, piece.offset + piece.stop - piece.start)
        if band.vacant:
            homes_M = band.used(piece.start, piece.stop) - piece.start + piece.offset

        def of_piece(part: Index) -> np.ndarray:
            homes = homes_M[part[0]]
            offset = tuple(axis.start for axis in part[1:])
            found = Overlap(piece.part, homes, part[0], part[1:], offset)
            return copied(block, found, slots_R, lines).view(dtype)

        size = (len(homes_M), piece.last - piece.first)[: array.ndim]
        return LazyArray(size, dtype, of_piece, block_of(size, dtype))

    pieces: list[tuple[Place, LazyArray]] = []
    for (group, segment, buffer, places), of_part in zip(parts, blocks, strict=True):
        mine = _mine(group, segment, buffer, version)
        if segment.band.chosen is None:
            pieces += [(at, rectangle(at, size)) for at, size in _boxes(mine, array.ndim)]
            continue
        for piece in mine:
            k = version * group.parts + piece.part
            at = Runs(segment.band.runs(piece.start, piece.stop), (piece.first,)[: array.ndim - 1])
            block = of_part[k]
            pieces.append((at, scattered(segment.band, piece, block, places.get(k), lines_of(group.lines, block))))
    return Spread(shape, dtype, tuple(pieces))


def _mine(group: Group, segment: BoundSegment, buffer: jax.Array, version: int) -> list[Piece]:
    """The pieces of a segment that this process is to give.

    An array of one value a row is held beside each part of the columns; then the first one's counts.
    """
    where: Any = buffer.sharding.devices_indices_map(buffer.shape)
    first = {_part(group, index): device for device, index in reversed(where.items())}
    return [
        piece
        for piece in group.pieces(segment)
        if first[version * group.parts + piece.part].process_index == jax.process_index()
        and piece.start < piece.stop
        and piece.first < piece.last
        and (buffer.ndim > 1 or piece.first == 0)
    ]


def _boxes(pieces: Sequence[Piece], axes: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(least index, size) of the rectangles of a table that some pieces of all its rows are, neighbours joined."""
    found: list[list[int]] = []  # start, stop, first, last
    for piece in pieces:
        box = [piece.start, piece.stop, piece.first, piece.last]
        if found and found[-1][2:] == box[2:] and found[-1][1] == box[0]:
            found[-1][1] = box[1]
        elif found and found[-1][:2] == box[:2] and found[-1][3] == box[2]:
            found[-1][3] = box[3]
        else:
            found.append(box)
    return [((a, c)[:axes], (b - a, d - c)[:axes]) for a, b, c, d in found]


def outside(dtype: Any) -> np.dtype[Any]:
    """The dtype in checkpoints of what a buffer, or a record of a tier, holds as `dtype`."""
    return np.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)


def _part(group: Group, index: Any) -> int:
    """The part of the buffers, version by version, that a shard with this index of the whole is."""
    return (index[0].start or 0) // buffer_shape(group.lines, group.rows, (group.width,) * (len(index) - 1))[0]


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
    bound: BoundPlan,
    mesh: Mesh,
    saved: Saved | Sequence[Saved],
    dtype: Any = jnp.float32,
    homes: Homes | None = None,
) -> tuple[Tables, GroupSlots]:
    """The inverse of `export_tables`, onto any mesh and plan. The host holds one part of a table at a time.

    Args:
      bound: the bound plan.
      mesh: its devices.
      saved: what all replica groups get; or, of independent groups, what each of them gets.
      dtype: of tables that do not say otherwise, and of slots.
      homes: of the slots of mapped groups.

    Raises:
      TrainingError: a table or slot is missing or has another shape; nothing is padded or cut.
    """
    tables: Tables = {}
    slots: GroupSlots = {}
    sources = [saved] if isinstance(saved, dict) else list(saved)
    for group in bound.groups:  # all are checked before the first is read
        for name, columns in (("rows", 1), *((n, len(s.shape)) for n, s in group.slots().items())):
            for source in sources:
                _check(group, source, name, columns, outside(storage_dtype(group, dtype) if name == "rows" else dtype))
    for group in bound.groups:
        places = _places(group, (homes or {}).get(group.name))
        arrays: dict[str, tuple[tuple[int, ...], Any]] = {"rows": ((group.width,), storage_dtype(group, dtype))}
        arrays |= {name: (slot.shape, dtype) for name, slot in group.slots().items()}
        made = {}
        for name, (tail, held) in arrays.items():
            if group.cached:
                made[name] = _empty(group, mesh, tail, held)
            else:
                own = group.value_group if name == "rows" else group.slot_group
                made[name] = _import(own, mesh, sources, name, tail, held, places)
        tables[group.name] = made.pop("rows")
        slots[group.name] = made
    return tables, slots


def _empty(group: Group, mesh: Mesh, tail: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of a cache that holds no row."""
    shape = group.shape(tail)
    return filled(shape, 0, dtype, sharded(mesh, group.partition_axes))


def _check(group: Group, saved: Saved, name: str, columns: int, dtype: np.dtype[Any]) -> None:
    for spec in {segment.spec.name: segment.spec for segment in group.segments}.values():
        array, shape = saved.get(spec.name, {}).get(name), (spec.rows, spec.dim)[: 1 + columns]
        found = "nothing" if array is None else f"shape {array.shape}, {array.dtype}"
        if array is None or array.shape != shape or array.dtype != dtype:
            raise TrainingError(
                f"the checkpoint holds {found} for {name!r} of table {spec.name!r}, but the model needs shape "
                f"{shape}, {dtype}. It belongs to another model or data: use the config in the run folder."
            )


def _import(
    group: Group,
    mesh: Mesh,
    sources: Sequence[Saved],
    name: str,
    tail: tuple[int, ...],
    dtype: Any,
    places: Places,
) -> jax.Array:
    shape = group.shape(tail)
    sharding = sharded(mesh, group.partition_axes)
    holders: dict[int, list[Any]] = {}  # part of a version -> the devices of this process that hold it
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_part(group, index), []).append(device)
    blocks = Blocks(holders, filled(shape, 0, dtype, sharding))
    lines = group.lines if tail else None
    for (version, saved), segment in itertools.product(enumerate(sources), group.segments):
        firsts = [v * group.parts for v in ([version] if len(sources) > 1 else range(group.versions))]
        array = as_lazy(saved[segment.spec.name][name])
        for part in array.parts():
            here = [
                o for o in overlaps(group, segment, part, True) if any(first + o.part in holders for first in firsts)
            ]
            if not here:
                continue
            values = array.read(part)
            for found in here:
                cells = values[(found.rows, *found.columns)].view(dtype)
                for k in (first + found.part for first in firsts if first + found.part in holders):
                    blocks.write(k, found, cells, places.get(k), lines)
            blocks.wait()  # or parts would pile up
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks.arrays())
