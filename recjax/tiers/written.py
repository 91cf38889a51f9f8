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
hot ones: `overlaid` lays it over that.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.embedding.buffers import NAME_BITS, initial_rows
from recjax.embedding.collection import outside
from recjax.embedding.row_order import RowOrder
from recjax.embedding.sharding import BoundSegment, Piece
from recjax.embedding.spec import TableSpec
from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.tiers.caches import ROWS
from recjax.tiers.host_rows import GroupRows, HostRows
from recjax.tiers.tables import CachedTable, Hot, cached_tables
from recjax.utils.lazy_arrays import Index, LazyArray, Place, Spread, as_lazy, block_of, chosen_rows, joined

WRITTEN = "written"
POSITIONS, TABLE, INITIAL = "positions", "table", "initial"
_CHUNK = 1 << 16  # rows at a time

Written = dict[str, dict[str, Any]]  # table -> what the module says


def export_written(host: HostRows, seed: int, hot: Hot, changed: bool = False) -> Written:
    """The rows that were ever written, and hot ones, after `Tier.begin_checkpoint`: good until the next `Tier.admit`.

    With `changed` those alone that have changed since the checkpoint that was complete last, and hot ones. Of several
    processes each gives what its devices hold, and all call it.

    Raises:
      TrainingError: processes that hold columns of the same rows have written different ones.
    """
    tables = cached_tables(host)
    blocks = {name: _blocks(segments, changed) for name, segments in tables.items()}
    counts = _counts_of_all(blocks)
    return {name: _written(tables[name], blocks[name], counts[name], seed, hot[name]) for name in blocks}


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows of a table from a storage position on, at which a piece of it begins or ends, up to the next one.

    Attributes:
      pieces: of the table in which these rows lie, each with other columns, with the rows of their groups.
      positions_K: int32, of those of the rows that are written; None: no piece is here.
    """

    pieces: list[tuple[GroupRows, Piece]]
    positions_K: np.ndarray | None


def _blocks(segments: CachedTable, changed: bool) -> list[_Block]:
    """Cuts a table into blocks; of pieces beside each other with the rows of all, in ascending order."""
    pieces = [(rows, piece) for rows, segment in segments for piece in rows.group.pieces(segment)]
    pieces = [(rows, piece) for rows, piece in pieces if piece.start < piece.stop and piece.first < piece.last]
    cuts = sorted({edge for _, piece in pieces for edge in (piece.start, piece.stop)})
    of_block: list[list[tuple[GroupRows, Piece]]] = [[] for _ in cuts[1:]]
    for rows, piece in pieces:
        for n in range(bisect.bisect(cuts, piece.start) - 1, bisect.bisect_left(cuts, piece.stop)):
            of_block[n].append((rows, piece))
    blocks = []
    for (first, last), inside in zip(itertools.pairwise(cuts), of_block, strict=True):
        positions = []
        for rows, piece in inside:
            if piece.part in rows.local_parts:
                shift, homes = piece.start - piece.offset, rows.changed if changed else rows.written
                positions.append(homes(piece.part, first - shift, last - shift) + np.int32(shift))
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
    segments: CachedTable, blocks: Sequence[_Block], counts: Sequence[int], seed: int, hot: Sequence[Any]
) -> dict[str, Any]:
    """The arrays of one table: whole ones, or of several processes what this one gives."""
    spec, fields = segments[0][1].spec, segments[0][0].cached.fields
    placed: dict[str, _Placed] = {name: [] for name in (POSITIONS, *(name for name, *_ in fields))}
    start = 0
    for block, count in zip(blocks, counts, strict=True):
        for rows, piece in block.pieces:
            if piece.part in rows.given and count:
                for name, array in _of_piece(rows, piece, block).items():
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
        arrays[name] = whole((start, spec.dim)[: 1 + len(tail)], outside(dtype), placed[name])
    return {
        **arrays,
        TABLE: np.array([spec.rows, seed, NAME_BITS], np.int64),
        INITIAL: np.array(_initial(spec), np.float64),
    }


def _of_piece(rows: GroupRows, piece: Piece, block: _Block) -> dict[str, LazyArray]:
    """Gives what a piece has of a block's rows; that of the first columns alone has positions, and one value a row."""
    positions_K = block.positions_K
    assert positions_K is not None  # it is here
    homes_K = positions_K - np.int32(piece.start - piece.offset)

    def array(name: str, kind: np.dtype[Any], axes: int) -> LazyArray:
        shape, dtype = (len(homes_K), piece.last - piece.first)[: 1 + axes], outside(kind)

        def read(part: Index) -> np.ndarray:
            values = rows.values(piece.part, homes_K[part[0]], name).view(dtype)
            return values[(slice(None), *part[1:])]

        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    fields = rows.cached.fields
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


def _initial(spec: TableSpec) -> list[float]:
    slots = spec.optimizer.slots(spec.dim)
    return [float(spec.scale), *(float(slots[name].initial) for name in sorted(slots))]


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


def import_written(host: HostRows, seed: int, written: Mapping[str, Mapping[str, Any]]) -> bool:
    """Puts written rows into the stores of caches, whose tables are all at their initial values.

    Returns False, and does nothing, where tables are missing, or their initial values were others.

    Raises:
      TrainingError: positions beyond a table.
    """
    tables = cached_tables(host)
    for name, segments in tables.items():
        if name not in written:
            return False
        spec = segments[0][1].spec
        alike = as_lazy(written[name][TABLE]).load().tolist() == [spec.rows, seed, NAME_BITS]
        if not alike or as_lazy(written[name][INITIAL]).load().tolist() != _initial(spec):
            return False
    for name, segments in tables.items():
        saved = {key: as_lazy(array) for key, array in written[name].items()}
        positions_K = saved[POSITIONS].load()
        most = segments[0][1].spec.rows
        if len(positions_K) and not 0 <= positions_K.min() <= positions_K.max() < most:
            raise TrainingError(f"the checkpoint holds rows of table {name!r} beyond its {most:,}.")
        for rows, segment in segments:
            for part in saved[ROWS].parts():
                _put_written(rows, segment, saved, positions_K, part[0])
    return True


def _put_written(
    rows: GroupRows, segment: BoundSegment, saved: Mapping[str, LazyArray], positions_K: np.ndarray, some: slice
) -> None:
    """Puts what a segment holds of some written rows into the stores of the parts that are here."""
    number_K, here_K = segment.band.number(positions_K[some])
    owner_K, within_K = segment.split.owner_and_offset(number_K)
    if here_K is not None:  # others are hot
        owner_K = np.where(here_K, owner_K, -1)
    read: dict[int, dict[str, np.ndarray]] = {}  # by the first of their columns
    for part in rows.local_parts:
        owner = rows.group.owner_of(part)
        rows_M = np.flatnonzero(owner_K == owner)
        (piece,) = rows.group.pieces(segment, part)
        if not len(rows_M) or piece.first == piece.last:
            continue
        if piece.first not in read:
            index = some, slice(piece.first, piece.last)
            read[piece.first] = {
                key: saved[key].read(index[: 1 + len(tail)]).view(dtype) for key, _, dtype, tail in rows.cached.fields
            }
        records = rows.cached.join({key: values[rows_M] for key, values in read[piece.first].items()})
        rows.put(part, (within_K[rows_M] + segment.offsets[owner]).astype(np.int32), records)


def overlaid(chain: Sequence[Written]) -> Written:
    """Lays written rows over those before them.

    Args:
      chain: of a checkpoint that holds all rows and of the increments after it, the oldest first.

    Returns:
      The tables of the last one, in the form of `export_written`; of each the rows that nobody has later come
      first. The memory that it takes is 12 bytes for each row, and while a table is looked at 1 for each of its rows.

    Raises:
      ValueError: they are not of the same tables.
    """
    return {table: _overlaid(table, [written.get(table, {}) for written in chain]) for table in chain[-1]}


def _overlaid(table: str, links: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    newest = {name: as_lazy(array) for name, array in links[-1].items()}
    for link in links:
        alike = link.keys() == newest.keys() and all(
            (link[name].dtype, link[name].shape[1:]) == (array.dtype, array.shape[1:]) for name, array in newest.items()
        )
        if not alike or any(_bits(link[name]) != _bits(newest[name]) for name in (TABLE, INITIAL)):
            raise ValueError(f"the rows of table {table!r} are not those of the same table everywhere in its chain")
    positions = [as_lazy(link[POSITIONS]).load() for link in links]
    rows = int(newest[TABLE].load()[0])
    if any(len(found) and not 0 <= found.min() <= found.max() < rows for found in positions):
        raise ValueError(f"there are rows of table {table!r} beyond its {rows:,}")
    later = np.zeros(rows, bool)
    kept: list[np.ndarray] = []
    for found in reversed(positions):
        kept.insert(0, np.flatnonzero(~later[found]).astype(np.int32))
        later[found] = True
    count = sum(map(len, kept))

    def array(name: str, like: LazyArray) -> LazyArray:
        pieces, start = [], 0
        for link, kept_K in zip(links, kept, strict=True):
            of = as_lazy(link[name])
            if len(kept_K):
                rows_of = of if len(kept_K) == of.shape[0] else chosen_rows(of, kept_K)
                pieces.append(((start, *(0 for _ in of.shape[1:])), rows_of))
            start += len(kept_K)
        return joined((count, *like.shape[1:]), like.dtype, pieces)

    return {
        POSITIONS: np.concatenate([found[kept_K] for found, kept_K in zip(positions, kept, strict=True)]),
        **{name: newest[name] for name in (TABLE, INITIAL)},
        **{name: array(name, of) for name, of in newest.items() if name not in (POSITIONS, TABLE, INITIAL)},
    }


def _bits(array: Any) -> bytes:
    return as_lazy(array).load().tobytes()
