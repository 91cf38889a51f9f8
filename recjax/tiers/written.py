"""Tables of caches in checkpoints: the rows that were ever written, where they are, and what all others are.

    written/TABLE/positions   int64 [K], storage positions of these rows (`row_order.py`), in any order
    written/TABLE/ARRAY       [K, ...], their values: "rows" and each of the optimizer's slots
    written/TABLE/table       int64 [3], rows V of the table, the seed of the run, and the bits of the hash of the name
                              by which initial rows are drawn ([2] before recjax 0.1.0, where they were 32)
    written/TABLE/initial     float64 [1 + slots]: half the width of the uniform distribution of initial rows, and what
                              each slot is initially, in the order of their names

Rows are in the order of their first write, in which a disk gives them at full speed, or, of a table that is split by
columns, of their positions; hot rows, which are on the devices, come last. With these any other run goes on, whether it
has caches or not: `whole_tables` makes tables of them, for which it holds the written rows of one table. An increment
(`recjax/train/checkpoint/chain.py`) holds those of these rows that have changed since the checkpoint before it, and all
hot ones: `overlay.py` lays it over that.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.embedding.bands import BoundSegment, Piece
from recjax.embedding.buffers import NAME_BITS, initial_rows
from recjax.embedding.collection import outside
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.row_order import RowOrder
from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.tiers.host_rows import HostRows
from recjax.tiers.moves import ROWS
from recjax.tiers.tables import Hot, cached_tables
from recjax.utils.lazy_arrays import Index, LazyArray, Place, Spread, as_lazy, block_of

WRITTEN = "written"
POSITIONS, TABLE, INITIAL = "positions", "table", "initial"
_CHUNK = 1 << 16  # rows at a time

Written = dict[str, dict[str, Any]]  # table -> what the module says


def export_written(bound: BoundPlan, host: HostRows, seed: int, hot: Hot, changed: bool = False) -> Written:
    """The rows that were ever written, and hot ones, after `Tier.begin_checkpoint`: good until the next `Tier.admit`.

    With `changed` those alone that have changed since the checkpoint that was complete last, and hot ones. Of several
    processes each gives what its devices hold, and all call it.

    Raises:
      TrainingError: processes that hold columns of the same rows have written different ones.
    """
    homes = host.changed if changed else host.written
    blocks = {name: _blocks(held, host, homes) for name, held in cached_tables(bound).items()}
    counts = _counts_of_all(blocks)
    return {name: _written(blocks[name], counts[name], host, seed, hot[name]) for name in blocks}


_Homes = Callable[[str, int, int, int], np.ndarray]  # as `HostRows.written`


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows of a table from a storage position on, at which a piece of it begins or ends, up to the next one.

    Attributes:
      pieces: of the table in which these rows lie, each with other columns, with their groups and segments.
      positions_K: int32, of those of the rows that are written; None: no piece is here.
    """

    pieces: list[tuple[Group, BoundSegment, Piece]]
    positions_K: np.ndarray | None


def _blocks(held: Sequence[tuple[Group, BoundSegment]], host: HostRows, homes: _Homes) -> list[_Block]:
    """Cuts a table into blocks; of pieces beside each other with the rows of all, in ascending order."""
    pieces = [(group, segment, piece) for group, segment in held for piece in group.pieces(segment)]
    pieces = [(g, s, piece) for g, s, piece in pieces if piece.start < piece.stop and piece.first < piece.last]
    cuts = sorted({edge for _, _, piece in pieces for edge in (piece.start, piece.stop)})
    of_block: list[list[tuple[Group, BoundSegment, Piece]]] = [[] for _ in cuts[1:]]
    for group, segment, piece in pieces:
        for n in range(bisect.bisect(cuts, piece.start) - 1, bisect.bisect_left(cuts, piece.stop)):
            of_block[n].append((group, segment, piece))
    blocks = []
    for (first, last), inside in zip(itertools.pairwise(cuts), of_block, strict=True):
        positions = []
        for group, _, piece in inside:
            if piece.part in host.local_parts[group.name]:
                shift = piece.start - piece.offset
                positions.append(homes(group.name, piece.part, first - shift, last - shift) + np.int32(shift))
        positions_K = positions[0] if positions else None
        if len(inside) > 1 and positions:
            positions_K = np.unique(np.concatenate(positions))
        blocks.append(_Block(inside, positions_K))
    return blocks


def _counts_of_all(blocks: Mapping[str, Sequence[_Block]]) -> dict[str, list[int]]:
    """Written rows of each block of each table, of which some process knows."""
    local = {
        name: [-1 if block.positions_K is None else len(block.positions_K) for block in of_table]
        for name, of_table in blocks.items()
    }
    of_all = [json.loads(text) for text in distributed.gather("rows that were written", json.dumps(local))]
    agreed = {}
    for name, counts in local.items():
        told = [{of[name][n] for of in of_all} - {-1} for n in range(len(counts))]
        if any(len(of_block) != 1 for of_block in told):
            raise TrainingError(
                f"processes have written different rows of table {name!r}, of which each holds some columns. Check "
                "their memory, give all the same software, and start the same command again: the run goes on from its "
                "last checkpoint."
            ).in_all()
        agreed[name] = [next(iter(of_block)) for of_block in told]
    return agreed


_Placed = list[tuple[Place, LazyArray]]  # pieces of an array by the least index of each, in the order of their rows


def _written(
    blocks: Sequence[_Block], counts: Sequence[int], host: HostRows, seed: int, hot: Sequence[Any]
) -> dict[str, Any]:
    """The arrays of one table: whole ones, or of several processes what this one gives."""
    group, segment, _ = blocks[0].pieces[0]
    fields = host.records[group.name].fields
    placed: dict[str, _Placed] = {name: [] for name in (POSITIONS, *(name for name, *_ in fields))}
    start = 0
    for block, count in zip(blocks, counts, strict=True):
        for of_piece, _, piece in block.pieces:
            if piece.part in host.given[of_piece.name] and count:
                for name, array in _of_piece(of_piece, piece, block, host).items():
                    placed[name].append(((start, piece.first)[: len(array.shape)], array))
        start += count
    for of_table, arrays in hot:
        for name, array in _of_hot(of_table, arrays).items():
            if isinstance(array, Spread):
                # Rectangles: a segment of hot rows counts as a table of its own.
                placed[name] += [((start + at[0], *at[1:]), part) for at, part in array.pieces if isinstance(at, tuple)]
            else:
                placed[name].append(((start, *(0 for _ in array.shape[1:])), array))
        start += of_table.band.members
    whole = _stacked if distributed.processes() == 1 else _spread
    arrays = {POSITIONS: whole((start,), np.dtype(np.int64), placed[POSITIONS])}
    for name, _, dtype, tail in fields:
        arrays[name] = whole((start, segment.spec.dim)[: 1 + len(tail)], outside(dtype), placed[name])
    return {
        **arrays,
        TABLE: np.array([segment.spec.rows, seed, NAME_BITS], np.int64),
        INITIAL: np.array(_initial(group, segment), np.float64),
    }


def _of_piece(group: Group, piece: Piece, block: _Block, host: HostRows) -> dict[str, LazyArray]:
    """Gives what a piece has of a block's rows; that of the first columns alone has positions, and one value a row."""
    positions_K = block.positions_K
    assert positions_K is not None  # it is here
    homes_K = positions_K - np.int32(piece.start - piece.offset)

    def array(name: str, kind: np.dtype[Any], axes: int) -> LazyArray:
        shape, dtype = (len(homes_K), piece.last - piece.first)[: 1 + axes], outside(kind)

        def read(part: Index) -> np.ndarray:
            values = host.values(group.name, piece.part, homes_K[part[0]], name).view(dtype)
            return values[(slice(None), *part[1:])]

        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    fields = host.records[group.name].fields
    arrays = {name: array(name, dtype, len(tail)) for name, _, dtype, tail in fields if tail or piece.first == 0}
    if piece.first == 0:
        size, int64 = (len(positions_K),), np.dtype(np.int64)
        arrays[POSITIONS] = LazyArray(
            size, int64, lambda part: positions_K[part[0]].astype(int64), block_of(size, int64)
        )
    return arrays


def _of_hot(segment: BoundSegment, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of hot rows by the names of those of written rows: of what all processes have, process 0 gives all."""
    positions = np.array(segment.band.used(0, segment.band.size), np.int64)
    whole = {POSITIONS: as_lazy(positions), **arrays}
    return {name: x for name, x in whole.items() if isinstance(x, Spread) or distributed.is_main()}


def _spread(shape: tuple[int, ...], dtype: np.dtype[Any], placed: _Placed) -> Spread:
    return Spread(shape, dtype, tuple(placed))


def _stacked(shape: tuple[int, ...], dtype: np.dtype[Any], placed: _Placed) -> LazyArray:
    """One array of rectangles that lie below and beside one another, in the order of their rows."""
    starts = [at[0] for at, _ in placed if isinstance(at, tuple)]
    stops = [start + piece.shape[0] for start, (_, piece) in zip(starts, placed, strict=True)]

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for n in range(bisect.bisect(stops, part[0].start), bisect.bisect_left(starts, part[0].stop)):
            corner, piece = placed[n]
            assert isinstance(corner, tuple)
            spans = [
                (max(axis.start, a), min(axis.stop, a + size))
                for axis, a, size in zip(part, corner, piece.shape, strict=True)
            ]
            if all(a < z for a, z in spans):
                to = tuple(slice(a - axis.start, z - axis.start) for (a, z), axis in zip(spans, part, strict=True))
                out[to] = piece.read(tuple(slice(a - at, z - at) for (a, z), at in zip(spans, corner, strict=True)))
        return out

    return LazyArray(shape, dtype, read, block_of(shape, dtype))


def _initial(group: Group, segment: BoundSegment) -> list[float]:
    slots = group.slots()
    return [float(segment.spec.scale), *(float(slots[name].initial) for name in sorted(slots))]


def whole_tables(written: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, LazyArray]]:
    """Whole tables of written rows, to be read a part at a time: table -> ROWS and slots, in storage order."""
    loaded = _Loaded()
    return {name: _whole(name, of_table, loaded) for name, of_table in written.items()}


class _Loaded:
    """The arrays of the written rows of one table at a time, in memory, by position."""

    def __init__(self) -> None:
        """None."""
        self._table, self._arrays, self._lock = "", {}, threading.Lock()  # type: tuple[str, dict[str, Any], Any]

    def get(self, table: str, name: str, of: LazyArray, rank_K: np.ndarray) -> np.ndarray:
        """An array [K, ...] of rows of which each goes to its `rank_K`."""
        with self._lock:
            if self._table != table:
                self._table, self._arrays = table, {}
            if name not in self._arrays:
                ordered = np.empty(of.shape, of.dtype)
                for part in of.parts():
                    ordered[rank_K[part[0]]] = of.read(part)
                self._arrays[name] = ordered
            found: np.ndarray = self._arrays[name]
            return found


def _whole(table: str, written: Mapping[str, Any], loaded: _Loaded) -> dict[str, LazyArray]:
    held = {name: as_lazy(array) for name, array in written.items()}
    rows, seed, name_bits = [*held.pop(TABLE).load().tolist(), 32][:3]
    scale, *initial = held.pop(INITIAL).load().tolist()
    positions_K = held.pop(POSITIONS).load()
    order_K = np.argsort(positions_K)
    positions_K, rank_K = positions_K[order_K], np.empty(len(order_K), np.int32)
    rank_K[order_K] = np.arange(len(order_K), dtype=np.int32)
    values = dict(zip(sorted(held.keys() - {ROWS}), initial, strict=True))
    order = RowOrder(rows)

    def array(name: str, of: LazyArray) -> LazyArray:
        shape = (rows, *of.shape[1:])

        def read(part: Index) -> np.ndarray:
            start, stop = part[0].start, part[0].stop
            if name == ROWS:
                out = np.empty((stop - start, *of.shape[1:]), of.dtype)
                for first in range(start, stop, _CHUNK):
                    ids = order.row(np.arange(first, min(first + _CHUNK, stop), dtype=np.int32))
                    drawn = initial_rows(seed, table, jnp.asarray(ids), of.shape[1], scale, name_bits)
                    out[first - start : first - start + len(ids)] = np.asarray(drawn).astype(of.dtype)
            else:
                out = np.full((stop - start, *of.shape[1:]), values[name], of.dtype)
            low, high = np.searchsorted(positions_K, [start, stop]).tolist()
            if low < high:
                out[positions_K[low:high] - start] = loaded.get(table, name, of, rank_K)[low:high]
            return out[(slice(None), *part[1:])]

        return LazyArray(shape, of.dtype, read, block_of(shape, of.dtype))

    return {name: array(name, of) for name, of in held.items()}


def import_written(bound: BoundPlan, host: HostRows, seed: int, written: Mapping[str, Mapping[str, Any]]) -> bool:
    """Puts written rows into the stores of caches, whose tables are all at their initial values.

    Returns False, and does nothing, where tables are missing, or their initial values were others.

    Raises:
      TrainingError: positions beyond a table.
    """
    tables = cached_tables(bound)
    for name, segments in tables.items():
        if name not in written:
            return False
        group, segment = segments[0]
        alike = as_lazy(written[name][TABLE]).load().tolist() == [segment.spec.rows, seed, NAME_BITS]
        if not alike or as_lazy(written[name][INITIAL]).load().tolist() != _initial(group, segment):
            return False
    for name, segments in tables.items():
        saved = {key: as_lazy(array) for key, array in written[name].items()}
        positions_K = saved[POSITIONS].load()
        rows = segments[0][1].spec.rows
        if len(positions_K) and not 0 <= positions_K.min() <= positions_K.max() < rows:
            raise TrainingError(f"the checkpoint holds rows of table {name!r} beyond its {rows:,}.")
        for group, segment in segments:
            for part in saved[ROWS].parts():
                _put_written(group, segment, host, saved, positions_K, part[0])
    return True


def _put_written(
    group: Group,
    segment: BoundSegment,
    host: HostRows,
    saved: Mapping[str, LazyArray],
    positions_K: np.ndarray,
    some: slice,
) -> None:
    """Puts what a segment holds of some written rows into the stores of the parts that are here."""
    layout = host.records[group.name]
    number_K, here_K = segment.band.number(positions_K[some])
    owner_K, within_K = segment.split.owner_and_offset(number_K)
    if here_K is not None:  # others are hot
        owner_K = np.where(here_K, owner_K, -1)
    read: dict[int, dict[str, np.ndarray]] = {}  # by the first of their columns
    for part in host.local_parts[group.name]:
        owner = group.owner_of(part)
        rows_M = np.flatnonzero(owner_K == owner)
        (piece,) = group.pieces(segment, part)
        if not len(rows_M) or piece.first == piece.last:
            continue
        if piece.first not in read:
            index = some, slice(piece.first, piece.last)
            read[piece.first] = {
                key: saved[key].read(index[: 1 + len(tail)]).view(dtype) for key, _, dtype, tail in layout.fields
            }
        records = layout.join({key: values[rows_M] for key, values in read[piece.first].items()})
        host.put(group.name, part, (within_K[rows_M] + segment.offsets[owner]).astype(np.int32), records)
