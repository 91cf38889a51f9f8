"""The way of tables out of the groups' buffers, to checkpoints, and back.

On disk and in tests a table is one unpadded [V, D] array in storage order (see `row_order.py`), the same for every mesh
and plan. Cells that a part of it and a part of a buffer have in common (`Overlap`) are read and written by NumPy where
a device's memory is the host's. Else the device does it, in programs that are compiled for each shape and device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.buffers import GroupSlots, Tables, filled
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.lines import Lines
from recjax.embedding.row_order import Band
from recjax.embedding.sharding import BoundSegment, Piece
from recjax.embedding.spec import TableSpec
from recjax.errors import TrainingError
from recjax.parallel.mesh import sharded
from recjax.utils.lazy_arrays import Index, LazyArray, Place, Runs, Spread, as_lazy, block_of

Saved = dict[str, dict[str, np.ndarray | LazyArray]]  # as `export_tables` gives it, or the same read from the disk


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
        shares = [_shares(group, segment, tables, slots) for group, segment in segments]
        out[name] = {array: _export([of[array] for of in shares], version) for array in shares[0]}
    return out


def export_segment(
    group: Group, segment: BoundSegment, tables: Tables, slots: GroupSlots
) -> dict[str, LazyArray | Spread]:
    """The rows of one segment, and their slots, as if they were a table: by their numbers in its band."""
    size = segment.band.size
    spec = dataclasses.replace(segment.spec, rows=size)
    return {
        name: _export(
            [dataclasses.replace(share, segment=dataclasses.replace(share.segment, spec=spec, band=Band(size)))], 0
        )
        for name, share in _shares(group, segment, tables, slots).items()
    }


@dataclasses.dataclass(frozen=True)
class _Share:
    """A segment's share of a buffer of values, or of one of the slots beside it.

    Attributes:
      group: of the buffer, as this lies on the devices between steps.
      segment: of this group.
      buffer: the whole array.
    """

    group: Group
    segment: BoundSegment
    buffer: jax.Array

    @functools.cached_property
    def blocks(self) -> dict[int, jax.Array]:
        """The parts that this process has, version by version."""
        return {self.group.part_at(shard.index): shard.data for shard in reversed(self.buffer.addressable_shards)}

    @property
    def complete(self) -> bool:
        """True if this process has all of the buffer."""
        return self.buffer.is_fully_addressable or not self.group.partition_axes

    def read(self, part: Index, version: int, out: np.ndarray) -> None:
        """Reads what of a part of the table is here, as `out` holds it."""
        one_a_row = len(part) == 1
        if one_a_row and self.segment.first > 0:
            return  # the first columns have all of it, and the others the same
        for cells in overlaps(self.group.pieces(self.segment), self.segment.band, part):
            if one_a_row and self.group.place(cells.part)[1] > 0:
                continue
            out[(cells.rows, *cells.columns)] = self.copy(cells, version).view(out.dtype)

    def copy(self, cells: Overlap, version: int) -> np.ndarray:
        """Returns some cells as the buffer holds them: see `_copied`."""
        block = self.blocks[version * self.group.parts + cells.part]
        return _copied(block, cells, self.group.lines_of(block))

    def own_pieces(self, version: int) -> list[Piece]:
        """The pieces of the segment that this process is to give.

        An array of one value a row is held beside each part of the columns; then the first one's counts.
        """
        where: Any = self.buffer.sharding.devices_indices_map(self.buffer.shape)
        first = {self.group.part_at(index): device for device, index in reversed(where.items())}
        return [
            piece
            for piece in self.group.pieces(self.segment)
            if first[version * self.group.parts + piece.part].process_index == jax.process_index()
            and piece.start < piece.stop
            and piece.first < piece.last
            and (self.buffer.ndim > 1 or piece.first == 0)
        ]

    def scattered(self, piece: Piece, version: int) -> tuple[Place, LazyArray]:
        """The rows of a piece whose segment has only some of the table, and where these lie in the table."""
        band, axes, dtype = self.segment.band, self.buffer.ndim, outside(self.buffer.dtype)
        homes_M: range | np.ndarray = range(piece.offset, piece.offset + piece.stop - piece.start)
        if band.vacant:
            homes_M = band.used(piece.start, piece.stop) - piece.start + piece.offset

        def read(part: Index) -> np.ndarray:
            offset = tuple(axis.start for axis in part[1:])
            return self.copy(Overlap(piece.part, homes_M[part[0]], part[0], part[1:], offset), version).view(dtype)

        size = (len(homes_M), piece.last - piece.first)[:axes]
        at = Runs(band.runs(piece.start, piece.stop), (piece.first,)[: axes - 1])
        return at, LazyArray(size, dtype, read, block_of(size, dtype))


def _shares(group: Group, segment: BoundSegment, tables: Tables, slots: GroupSlots) -> dict[str, _Share]:
    """Shares of a segment, by the names of arrays."""
    nth = group.segments.index(segment)
    of_values, of_slots = group.value_group, group.slot_group
    rows = {"rows": _Share(of_values, of_values.segments[nth], tables[group.name])}
    return rows | {name: _Share(of_slots, of_slots.segments[nth], x) for name, x in slots[group.name].items()}


def _export(shares: Sequence[_Share], version: int) -> LazyArray | Spread:
    """One array of a table, from the shares of its segments."""
    spec, array = shares[0].segment.spec, shares[0].buffer
    dtype = outside(array.dtype)
    shape = (spec.rows, spec.dim)[: array.ndim]

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for share in shares:
            share.read(part, version, out)
        return out

    if all(share.complete for share in shares):
        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    def rectangle(corner: tuple[int, ...], size: tuple[int, ...]) -> LazyArray:
        def moved(part: Index) -> np.ndarray:
            return read(tuple(slice(a.start + at, a.stop + at) for a, at in zip(part, corner, strict=True)))

        return LazyArray(size, dtype, moved, block_of(size, dtype))

    pieces: list[tuple[Place, LazyArray]] = []
    for share in shares:
        if share.segment.band.chosen is None:
            boxes = _boxes(share.own_pieces(version), array.ndim)
            pieces += [(at, rectangle(at, size)) for at, size in boxes]
        else:
            pieces += [share.scattered(piece, version) for piece in share.own_pieces(version)]
    return Spread(shape, dtype, tuple(pieces))


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
        for spec, source in itertools.product(dict.fromkeys(s.spec for s in group.segments), sources):
            _check(spec, source, "rows", 1, outside(group.storage_dtype(dtype)))
            for name, slot in group.slots().items():
                _check(spec, source, name, len(slot.shape), outside(dtype))
    for group in bound.groups:
        arrays: dict[str, tuple[Group, tuple[int, ...], Any]]
        arrays = {"rows": (group.value_group, (group.width,), group.storage_dtype(dtype))}
        arrays |= {name: (group.slot_group, slot.shape, dtype) for name, slot in group.slots().items()}
        made = {}
        for name, (own, tail, kind) in arrays.items():
            made[name] = filled(own.shape(tail), 0, kind, sharded(mesh, own.partition_axes))
            if not group.cached:  # a cache holds no row yet
                made[name] = _Blocks(own, made[name]).fill(sources, name)
        tables[group.name] = made.pop("rows")
        slots[group.name] = made
    return tables, slots


def _check(spec: TableSpec, saved: Saved, name: str, columns: int, dtype: np.dtype[Any]) -> None:
    array, shape = saved.get(spec.name, {}).get(name), (spec.rows, spec.dim)[: 1 + columns]
    found = "nothing" if array is None else f"shape {array.shape}, {array.dtype}"
    if array is None or array.shape != shape or array.dtype != dtype:
        raise TrainingError(
            f"the checkpoint holds {found} for {name!r} of table {spec.name!r}, but the model needs shape "
            f"{shape}, {dtype}. It belongs to another model or data: use the config in the run folder."
        )


class _Blocks:
    """Parts of a buffer that are written where they are: there is never a second copy of one."""

    def __init__(self, layout: Group, buffer: jax.Array) -> None:
        """Takes the parts of a buffer, which nobody else may use; `layout` is that of its rows."""
        self._layout, self._shape, self._sharding = layout, buffer.shape, buffer.sharding
        self._lines = layout.lines_of(buffer)
        self._blocks = {shard.device: shard.data for shard in buffer.addressable_shards}
        self._holders: dict[int, list[Any]] = {}  # part, version by version -> the devices of this process that hold it
        for device, index in buffer.sharding.addressable_devices_indices_map(buffer.shape).items():
            self._holders.setdefault(layout.part_at(index), []).append(device)

    def fill(self, sources: Sequence[Saved], name: str) -> jax.Array:
        """Returns the buffer with the arrays of this name; `sources` are as `import_tables` has them."""
        group = self._layout
        for (version, saved), segment in itertools.product(enumerate(sources), group.segments):
            firsts = [v * group.parts for v in ([version] if len(sources) > 1 else range(group.versions))]
            array = as_lazy(saved[segment.spec.name][name])
            for part in array.parts():
                here = [
                    (cells, [first + cells.part for first in firsts if first + cells.part in self._holders])
                    for cells in overlaps(group.pieces(segment), segment.band, part, vacant=True)
                ]
                if not any(numbers for _, numbers in here):
                    continue
                values = array.read(part)
                for cells, numbers in here:
                    for k in numbers:
                        self._write(k, cells, values[(cells.rows, *cells.columns)])
                jax.block_until_ready(list(self._blocks.values()))  # or parts would pile up
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, list(self._blocks.values()))

    def _write(self, k: int, cells: Overlap, values: np.ndarray) -> None:
        """Writes cells into part k."""
        for device in self._holders[k]:
            block = self._blocks[device]
            values = values.view(block.dtype)
            if device.platform == "cpu":
                _rows(_memory(block), self._lines)[cells.index] = values
            else:
                piece, start = jax.device_put(values, device), (int(cells.homes[0]), *cells.offset)
                self._blocks[device] = _write(block, piece, start, self._lines)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)  # in place: no second copy of a table at any time
def _write(block: jax.Array, piece: jax.Array, start: tuple[int, ...], lines: Lines | None) -> jax.Array:
    return jax.lax.dynamic_update_slice(block, piece, start) if lines is None else lines.write(block, piece, start)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Common cells of a part of a table and one part of a group's buffer.

    Attributes:
      part: of the buffer.
      homes: of the rows, ascending; one after the other if it is a range.
      rows: where they lie within the part of the table: a slice, or their numbers.
      columns: of the part of the table; () of an array of one value a row.
      offset: of the first of these columns in the buffer; () likewise.
    """

    part: int
    homes: range | np.ndarray
    rows: slice | np.ndarray
    columns: tuple[slice, ...]
    offset: tuple[int, ...]

    @property
    def index(self) -> tuple[Any, ...]:
        """Index of the cells among the rows of the part of the buffer."""
        homes = slice(self.homes.start, self.homes.stop) if isinstance(self.homes, range) else self.homes
        return homes, *(slice(a, a + x.stop - x.start) for a, x in zip(self.offset, self.columns, strict=True))


def overlaps(pieces: Iterable[Piece], band: Band, part: Index, vacant: bool = False) -> Iterator[Overlap]:
    """All that a part of a table consists of, as far as a segment holds it; with `vacant` also what it could hold.

    An array of one value a row has rows alone; beside columns, every part of the buffer with these rows holds it.

    Args:
      pieces: of the segment.
      band: its rows.
      part: of the table.
      vacant: whether places that are left vacant count.
    """
    within = band.span(part[0].start, part[0].stop)
    for piece in pieces:
        start, stop = max(within[0], piece.start), min(within[1], piece.stop)
        spans = [(max(p.start, piece.first), min(p.stop, piece.last)) for p in part[1:]]
        if start < stop and all(a < z for a, z in spans):
            first = piece.offset + start - piece.start
            homes: range | np.ndarray = range(first, first + stop - start)
            if band.chosen is None or (band.vacant and vacant):
                rows: slice | np.ndarray = slice(start - part[0].start, stop - part[0].start)
            else:
                used_M = band.used(start, stop)
                rows = used_M - part[0].start
                homes = used_M - start + first if band.vacant else homes
            columns = tuple(slice(a - p.start, z - p.start) for (a, z), p in zip(spans, part[1:], strict=True))
            yield Overlap(piece.part, homes, rows, columns, tuple(a - piece.first for a, _ in spans))


def _copied(block: jax.Array, cells: Overlap, lines: Lines | None) -> np.ndarray:
    """The values of cells, in memory of their own: no view is left of the buffer that the next step donates.

    Args:
      block: a part of a buffer, on its device.
      cells: of it.
      lines: layout of the buffer, if rows lie side by side in it.
    """
    if next(iter(block.devices())).platform == "cpu":
        # A view that outlives this call would keep the next step from working in place.
        return np.array(_rows(np.asarray(block), lines)[cells.index], order="C")
    homes = cells.homes
    if not isinstance(homes, range):  # those between are few
        between = range(int(homes[0]), int(homes[-1]) + 1) if len(homes) else range(0)
        return _copied(block, dataclasses.replace(cells, homes=between), lines)[np.asarray(homes) - between.start]
    widths = [axis.stop - axis.start for axis in cells.columns]
    if lines is not None:
        return np.asarray(lines.read(block, homes)[:, cells.offset[0] : cells.offset[0] + widths[0]])
    return np.asarray(jax.lax.dynamic_slice(block, (homes.start, *cells.offset), (len(homes), *widths)))


def _rows(block: Any, lines: Lines | None) -> Any:
    """A view of a part of a buffer as rows."""
    return block if lines is None else lines.unpacked(block)


def _memory(block: jax.Array) -> np.ndarray:
    """The memory of a part on a CPU, to be written: of a part that nobody else uses, and only while that is so."""
    block.block_until_ready()
    if not block.nbytes:
        return np.empty(block.shape, block.dtype)
    memory: Any = (ctypes.c_char * block.nbytes).from_address(block.unsafe_buffer_pointer())
    return np.frombuffer(memory, block.dtype).reshape(block.shape)
