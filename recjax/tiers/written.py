"""Tables behind caches in checkpoints: the rows that were ever written, where they are, and what all others are.

    written/TABLE/positions   int64 [K], storage positions of these rows, ascending (`row_order.py`)
    written/TABLE/ARRAY       [K, ...], their values: "rows" and each of the optimizer's slots
    written/TABLE/table       int64 [2], rows V of the table, and the seed of the run
    written/TABLE/initial     float64 [1 + slots]: half the width of the uniform distribution of initial rows, and what
                              each slot is initially, in the order of their names

With these any other run goes on, whether it has caches or not: `whole_tables` makes tables of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.embedding.buffers import initial_rows
from recjax.embedding.layout import BoundPlan, BoundSegment, Group
from recjax.embedding.row_order import RowOrder
from recjax.errors import TrainingError
from recjax.tiers.moves import ROWS
from recjax.tiers.tables import outside
from recjax.tiers.tier import Tier
from recjax.utils.lazy_arrays import Index, LazyArray, as_lazy, block_of

WRITTEN = "written"
_POSITIONS, _TABLE, _INITIAL = "positions", "table", "initial"
_CHUNK = 1 << 16  # rows at a time

Written = dict[str, dict[str, Any]]  # table -> what the module says


def export_written(bound: BoundPlan, tier: Tier, seed: int) -> Written:
    """The rows that were ever written, after `Tier.flush`: good until the next `Tier.admit`."""
    return {
        segment.spec.name: _written(group, segment, tier, seed) for group in bound.cached for segment in group.segments
    }


def _written(group: Group, segment: BoundSegment, tier: Tier, seed: int) -> dict[str, Any]:
    owners, homes, positions = [], [], []
    for owner in range(group.owners):
        first, last = (int(edge) for edge in segment.split.bounds(owner))
        offset = segment.offsets[owner]
        own_K = tier.written(group.name, owner, offset, offset + last - first)
        owners.append(np.full(len(own_K), owner, np.int32))
        homes.append(own_K)
        positions.append(own_K.astype(np.int64) + first - offset)
    positions_K = np.concatenate(positions)
    order_K = np.argsort(positions_K, kind="stable")  # of named owners in any order; else it is sorted
    owners_K, homes_K = np.concatenate(owners)[order_K], np.concatenate(homes)[order_K]
    positions_K = positions_K[order_K]
    layout = tier.records[group.name]

    def array(name: str, kind: np.dtype[Any], tail: tuple[int, ...]) -> LazyArray:
        dtype = outside(kind)
        shape = (len(homes_K), *tail)

        def read(part: Index) -> np.ndarray:
            out = np.empty([axis.stop - axis.start for axis in part], dtype)
            for owner in range(group.owners):
                mine = np.flatnonzero(owners_K[part[0]] == owner)
                values = layout.split(tier.read(group.name, owner, homes_K[part[0]][mine]), name).view(dtype)
                out[mine] = values[(slice(None), *part[1:])]
            return out

        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    return {
        _POSITIONS: positions_K,
        _TABLE: np.array([segment.spec.rows, seed], np.int64),
        _INITIAL: np.array(_initial(group, segment), np.float64),
        **{name: array(name, dtype, tail) for name, _, dtype, tail in layout.fields},
    }


def _initial(group: Group, segment: BoundSegment) -> list[float]:
    slots = group.slots()
    return [float(segment.spec.scale), *(float(slots[name].initial) for name in sorted(slots))]


def whole_tables(written: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, LazyArray]]:
    """Whole tables of written rows, to be read a part at a time: table -> ROWS and slots, in storage order."""
    return {name: _whole(name, of_table) for name, of_table in written.items()}


def _whole(table: str, written: Mapping[str, Any]) -> dict[str, LazyArray]:
    held = {name: as_lazy(array) for name, array in written.items()}
    rows, seed = held.pop(_TABLE).load().tolist()
    scale, *initial = held.pop(_INITIAL).load().tolist()
    positions_K = held.pop(_POSITIONS).load()
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
                    drawn = initial_rows(seed, table, jnp.asarray(ids), of.shape[1], scale)
                    out[first - start : first - start + len(ids)] = np.asarray(drawn).astype(of.dtype)
            else:
                out = np.full((stop - start, *of.shape[1:]), values[name], of.dtype)
            low, high = np.searchsorted(positions_K, [start, stop]).tolist()
            if low < high:
                tail = tuple(slice(0, n) for n in of.shape[1:])
                out[positions_K[low:high] - start] = of.read((slice(low, high), *tail))
            return out[(slice(None), *part[1:])]

        return LazyArray(shape, of.dtype, read, block_of(shape, of.dtype))

    return {name: array(name, of) for name, of in held.items()}


def import_written(bound: BoundPlan, tier: Tier, seed: int, written: Mapping[str, Mapping[str, Any]]) -> bool:
    """Puts written rows behind the caches, whose tables are all at their initial values.

    Returns False, and does nothing, where tables are missing, or their initial values were others.

    Raises:
      TrainingError: positions beyond a table.
    """
    tables = {segment.spec.name: (group, segment) for group in bound.cached for segment in group.segments}
    for name, (group, segment) in tables.items():
        if name not in written:
            return False
        alike = as_lazy(written[name][_TABLE]).load().tolist() == [segment.spec.rows, seed]
        if not alike or as_lazy(written[name][_INITIAL]).load().tolist() != _initial(group, segment):
            return False
    for name, (group, segment) in tables.items():
        held = {key: as_lazy(array) for key, array in written[name].items()}
        positions_K, layout = held[_POSITIONS].load(), tier.records[group.name]
        if len(positions_K) and not 0 <= positions_K[0] <= positions_K[-1] < segment.spec.rows:
            raise TrainingError(f"the checkpoint holds rows of table {name!r} beyond its {segment.spec.rows:,}.")
        for part in held[ROWS].parts():
            some = part[0]
            arrays = {
                key: held[key].read((some, *(slice(0, n) for n in tail))).view(dtype)
                for key, _, dtype, tail in layout.fields
            }
            records = layout.join(arrays)
            owner_K, within_K = segment.split.owner_and_offset(positions_K[some])
            for owner in np.unique(owner_K).tolist():
                mine = np.flatnonzero(owner_K == owner)
                homes_K = (within_K[mine] + segment.offsets[owner]).astype(np.int32)
                tier.put(group.name, owner, homes_K, records[mine])
    return True
