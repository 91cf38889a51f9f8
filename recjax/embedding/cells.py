"""Cells that a part of a table and a part of a group's buffer have in common, and their ways from one to the other.

Where a device's memory is the host's, NumPy reads and writes them. Else the device does, in programs that are compiled
for each shape and device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.bands import BoundSegment
from recjax.embedding.layout import Group
from recjax.embedding.lines import Lines
from recjax.utils.lazy_arrays import Index


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


def overlaps(group: Group, segment: BoundSegment, part: Index, vacant: bool = False) -> Iterator[Overlap]:
    """All that a part of a table consists of, as far as this segment holds it; with `vacant` also what it could hold.

    An array of one value a row has rows alone; beside columns, every part of the buffer with these rows holds it.
    """
    within = segment.band.span(part[0].start, part[0].stop)
    for piece in group.pieces(segment):
        start, stop = max(within[0], piece.start), min(within[1], piece.stop)
        spans = [(max(p.start, piece.first), min(p.stop, piece.last)) for p in part[1:]]
        if start < stop and all(a < z for a, z in spans):
            first = piece.offset + start - piece.start
            homes: range | np.ndarray = range(first, first + stop - start)
            band = segment.band
            if band.chosen is None or (band.vacant and vacant):
                rows: slice | np.ndarray = slice(start - part[0].start, stop - part[0].start)
            else:
                used_M = band.used(start, stop)
                rows = used_M - part[0].start
                homes = used_M - start + first if band.vacant else homes
            columns = tuple(slice(a - p.start, z - p.start) for (a, z), p in zip(spans, part[1:], strict=True))
            yield Overlap(piece.part, homes, rows, columns, tuple(a - piece.first for a, _ in spans))


def copied(block: jax.Array, found: Overlap, slots_R: np.ndarray | None, lines: Lines | None) -> np.ndarray:
    """The values of an overlap, in memory of their own: no view is left of the buffer that the next step donates.

    Args:
      block: a part of a buffer, on its device.
      found: what of it.
      slots_R: the slot of each home of a mapped group; None of any other.
      lines: layout of the buffer, if rows lie side by side in it.
    """
    if next(iter(block.devices())).platform == "cpu":
        return _copied_here(block, found, slots_R, lines)
    widths = [axis.stop - axis.start for axis in found.columns]
    homes = found.homes
    if slots_R is None and isinstance(homes, range):
        if lines is not None:
            return np.asarray(lines.read(block, homes)[:, found.offset[0] : found.offset[0] + widths[0]])
        return np.asarray(jax.lax.dynamic_slice(block, (homes.start, *found.offset), (len(homes), *widths)))
    if slots_R is None:  # those between are few
        between = range(int(homes[0]), int(homes[-1]) + 1) if len(homes) else range(0)
        return copied(block, dataclasses.replace(found, homes=between), None, lines)[np.asarray(homes) - between.start]
    rows = block[jnp.asarray(slots_R[np.asarray(homes)])]
    return np.asarray(jax.lax.dynamic_slice(rows, (0, *found.offset), (len(rows), *widths)))


def _copied_here(block: jax.Array, found: Overlap, slots_R: np.ndarray | None, lines: Lines | None) -> np.ndarray:
    # A view that outlives this call would keep the next step from working in place.
    return np.array(_rows(np.asarray(block), lines)[_where(found, slots_R)], order="C")


def _rows(block: Any, lines: Lines | None) -> Any:
    """A view of a part of a buffer as rows."""
    return block if lines is None else lines.unpacked(block)


def _where(found: Overlap, slots_R: np.ndarray | None) -> tuple[Any, ...]:
    """Index of the cells of an overlap among the rows of a part of a buffer."""
    at: Any = found.homes
    if slots_R is not None:
        at = slots_R[np.asarray(at)]
    elif isinstance(at, range):
        at = slice(at.start, at.stop)
    columns = (slice(a, a + axis.stop - axis.start) for a, axis in zip(found.offset, found.columns, strict=True))
    return (at, *columns)


def _memory(block: jax.Array) -> np.ndarray:
    """The memory of a part on a CPU, to be written: of a part that nobody else uses, and only while that is so."""
    block.block_until_ready()
    if not block.nbytes:
        return np.empty(block.shape, block.dtype)
    memory: Any = (ctypes.c_char * block.nbytes).from_address(block.unsafe_buffer_pointer())
    return np.frombuffer(memory, block.dtype).reshape(block.shape)


class Blocks:
    """Parts of a buffer that are written where they are: there is never a second copy of one."""

    def __init__(self, holders: Mapping[int, Sequence[Any]], buffer: jax.Array) -> None:
        """Takes the parts of a buffer.

        Args:
          holders: number of a part -> the devices that hold it.
          buffer: which nobody else may use.
        """
        self._holders = holders
        self._blocks = {shard.device: shard.data for shard in buffer.addressable_shards}

    def write(self, k: int, found: Overlap, cells: np.ndarray, slots_R: np.ndarray | None, lines: Lines | None) -> None:
        """Writes cells into part k; slots and lines are as for `copied`."""
        for device in self._holders[k]:
            block = self._blocks[device]
            if device.platform == "cpu":
                _rows(_memory(block), lines)[_where(found, slots_R)] = cells
                continue
            piece = jax.device_put(cells, device)
            if slots_R is not None:
                slots = jax.device_put(slots_R[np.asarray(found.homes)], device)
                self._blocks[device] = _scatter(block, piece, slots, found.offset)
            else:
                self._blocks[device] = _write(block, piece, (int(found.homes[0]), *found.offset), lines)

    def wait(self) -> None:
        """Waits until what was written is there."""
        jax.block_until_ready(list(self._blocks.values()))

    def arrays(self) -> list[jax.Array]:
        """The parts."""
        return list(self._blocks.values())


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)  # in place: no second copy of a table at any time
def _write(block: jax.Array, piece: jax.Array, start: tuple[int, ...], lines: Lines | None) -> jax.Array:
    return jax.lax.dynamic_update_slice(block, piece, start) if lines is None else lines.write(block, piece, start)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _scatter(block: jax.Array, piece: jax.Array, slots: jax.Array, offset: tuple[int, ...]) -> jax.Array:
    """Writes rows to slots, beginning with the columns `offset`."""
    columns = tuple(slice(at, at + n) for at, n in zip(offset, piece.shape[1:], strict=True))
    return block.at[(slots, *columns)].set(piece, unique_indices=True)
