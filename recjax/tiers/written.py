"""Tables of caches in checkpoints: the rows that were ever written, where they are, and what all others are.

    written/TABLE/positions   int64 [K], storage positions of these rows (`row_order.py`), in any order
    written/TABLE/ARRAY       [K, ...], their values: "rows" and each of the optimizer's slots
    written/TABLE/table       int64 [3], rows V of the table, the seed of the run, and the bits of the hash of the name
                              by which initial rows are drawn ([2] before recjax 0.1.0, where they were 32)
    written/TABLE/initial     float64 [1 + slots]: half the width of the uniform distribution of initial rows, and what
                              each slot is initially, in the order of their names

Rows are in the order of their first write, in which a disk gives them at full speed; hot rows, which are on the
devices, come last. With these any other run goes on, whether it has caches or not: `whole_tables` makes tables of them,
for which it holds the written rows of one table. An increment (`recjax/train/checkpoint/chain.py`) holds those of these
rows that have changed since the checkpoint before it, and all hot ones: `overlay.py` lays it over that.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.embedding.bands import BoundSegment
from recjax.embedding.buffers import NAME_BITS, initial_rows
from recjax.embedding.collection import outside
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.row_order import RowOrder
from recjax.errors import TrainingError
from recjax.parallel import distributed
from recjax.tiers.host_rows import HostRows
from recjax.tiers.moves import ROWS
from recjax.tiers.shares import POSITIONS, of_processes
from recjax.tiers.tables import Hot
from recjax.utils.lazy_arrays import Index, LazyArray, as_lazy, block_of

WRITTEN = "written"
TABLE, INITIAL = "table", "initial"
_CHUNK = 1 << 16  # rows at a time

Written = dict[str, dict[str, Any]]  # table -> what the module says


def export_written(bound: BoundPlan, host: HostRows, seed: int, hot: Hot, changed: bool = False) -> Written:
    """The rows that were ever written, and hot ones, after `Tier.begin_checkpoint`: good until the next `Tier.admit`.

    With `changed` those alone that have changed since the checkpoint that was complete last, and hot ones. Of several
    processes each gives those of its owners; all call it.
    """
    several = distributed.processes() > 1
    homes = host.changed if changed else host.written
    found = {
        segment.spec.name: _written(group, segment, host, homes, seed, [] if several else hot[segment.spec.name])
        for group in bound.cached
        for segment in group.segments
    }
    return of_processes(found, hot) if several else found


_Homes = Callable[[str, int, int, int], np.ndarray]  # as `HostRows.written`


def _written(
    group: Group, segment: BoundSegment, host: HostRows, homes: _Homes, seed: int, hot: Sequence[Any]
) -> dict[str, Any]:
    pieces = [_of_owner(group, segment, host, homes, owner) for owner in host.given[group.name]]
    pieces += [_of_hot(of_table, arrays) for of_table, arrays in hot]
    sizes = [len(piece.keys_K) for piece in pieces]
    ends, K = np.cumsum(sizes).tolist(), sum(sizes)

    def gathered(part: Index, dtype: Any, read: Callable[[_Piece, slice], np.ndarray]) -> np.ndarray:
        """Some of the rows of all pieces, one piece after the other."""
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for piece, end in zip(pieces, ends, strict=True):
            begin = end - len(piece.keys_K)
            a, z = max(part[0].start, begin), min(part[0].stop, end)
            if a < z:
                found = read(piece, slice(a - begin, z - begin))
                out[a - part[0].start : z - part[0].start] = found[(slice(None), *part[1:])]
        return out

    def positions(part: Index) -> np.ndarray:
        return gathered(part, np.int64, lambda piece, some: piece.keys_K[some].astype(np.int64) + piece.shift)

    def array(name: str, kind: np.dtype[Any], tail: tuple[int, ...]) -> LazyArray:
        shape, dtype = (K, *tail), outside(kind)

        def read(part: Index) -> np.ndarray:
            return gathered(part, dtype, lambda piece, some: piece.values(name, some).view(dtype))

        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    int64 = np.dtype(np.int64)
    return {
        POSITIONS: LazyArray((K,), int64, positions, block_of((K,), int64)),
        TABLE: np.array([segment.spec.rows, seed, NAME_BITS], np.int64),
        INITIAL: np.array(_initial(group, segment), np.float64),
        **{name: array(name, dtype, tail) for name, _, dtype, tail in host.records[group.name].fields},
    }


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows of a table that lie in one place.

    Attributes:
      keys_K: int32, homes or positions.
      shift: from these to storage positions.
      values: one of their arrays, of some of them.
    """

    keys_K: np.ndarray
    shift: int
    values: Callable[[str, slice], np.ndarray]


def _of_owner(group: Group, segment: BoundSegment, host: HostRows, homes: _Homes, owner: int) -> _Piece:
    """The rows of an owner that `homes` gives."""
    first, last = (int(edge) for edge in segment.split.bounds(owner))
    offset = segment.offsets[owner]
    homes_K = homes(group.name, owner, offset, offset + last - first)
    return _Piece(homes_K, first - offset, lambda name, some: host.values(group.name, owner, homes_K[some], name))


def _of_hot(segment: BoundSegment, arrays: Mapping[str, LazyArray]) -> _Piece:
    """Hot rows of the table."""

    def values(name: str, some: slice) -> np.ndarray:
        return arrays[name].read((some, *(slice(0, n) for n in arrays[name].shape[1:])))

    return _Piece(np.array(segment.band.used(0, segment.band.size), np.int32), 0, values)


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
    tables = {segment.spec.name: (group, segment) for group in bound.cached for segment in group.segments}
    for name, (group, segment) in tables.items():
        if name not in written:
            return False
        alike = as_lazy(written[name][TABLE]).load().tolist() == [segment.spec.rows, seed, NAME_BITS]
        if not alike or as_lazy(written[name][INITIAL]).load().tolist() != _initial(group, segment):
            return False
    for name, (group, segment) in tables.items():
        held = {key: as_lazy(array) for key, array in written[name].items()}
        positions_K, layout = held[POSITIONS].load(), host.records[group.name]
        if len(positions_K) and not 0 <= positions_K.min() <= positions_K.max() < segment.spec.rows:
            raise TrainingError(f"the checkpoint holds rows of table {name!r} beyond its {segment.spec.rows:,}.")
        for part in held[ROWS].parts():
            some = part[0]
            number_K, here_K = segment.band.number(positions_K[some])
            owner_K, within_K = segment.split.owner_and_offset(number_K)
            if here_K is not None:  # others are hot
                owner_K = np.where(here_K, owner_K, -1)
            owners = np.intersect1d(owner_K, host.owners[group.name]).tolist()
            if not owners:  # all are other processes'
                continue
            arrays = {
                key: held[key].read((some, *(slice(0, n) for n in tail))).view(dtype)
                for key, _, dtype, tail in layout.fields
            }
            records = layout.join(arrays)
            for owner in owners:
                mine = np.flatnonzero(owner_K == owner)
                homes_K = (within_K[mine] + segment.offsets[owner]).astype(np.int32)
                host.put(group.name, owner, homes_K, records[mine])
    return True
