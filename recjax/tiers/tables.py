"""The way of tables out of a tier, to checkpoints, and back: whole, in storage order, as `embedding/collection.py`.

A table with hot rows lies in two places: these are on the devices, as `hot_rows` gives them, and the rest is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.embedding.buffers import GroupSlots, Tables
from recjax.embedding.collection import Overlap, Saved, export_segment, outside, overlaps
from recjax.embedding.layout import BoundPlan
from recjax.embedding.sharding import BoundSegment
from recjax.errors import ConfigError
from recjax.parallel import distributed
from recjax.tiers.caches import ROWS
from recjax.tiers.host_rows import GroupRows, HostRows
from recjax.utils.lazy_arrays import Index, LazyArray, as_lazy, block_of

# Name of a table -> each of its segments of hot rows: their arrays [K, ...] by the rows' numbers in the segment's band.
Hot = dict[str, list[tuple[BoundSegment, dict[str, Any]]]]


def hot_rows(bound: BoundPlan, tables: Tables, slots: GroupSlots) -> Hot:
    """The hot rows of tables of which caches hold the rest, to be read before the next step."""
    return {
        segment.spec.name: [
            (hot, export_segment(group, hot, tables, slots))
            for group, hot in bound.segments(segment.spec.name)
            if not group.cached
        ]
        for cached in bound.cached
        for segment in cached.segments
    }


CachedTable = list[tuple[GroupRows, BoundSegment]]  # segments of a table, each with the rows of its group


def cached_tables(host: HostRows) -> dict[str, CachedTable]:
    """The segments of each table with caches, but for those of hot rows: one, or one for each range of columns."""
    tables: dict[str, CachedTable] = {}
    for rows in host.groups.values():
        for segment in rows.group.segments:
            tables.setdefault(segment.spec.name, []).append((rows, segment))
    return tables


def export_cached(host: HostRows, hot: Hot) -> dict[str, dict[str, LazyArray]]:
    """Tables of caches as `export_tables` gives others, after `Tier.flush`: good until the next `Tier.admit`.

    Raises:
      ConfigError: several processes, of which none has all rows.
    """
    if distributed.processes() > 1:
        raise ConfigError(
            "tier.device_bytes is set, and of several processes each has some rows of a table alone: none can give "
            "whole tables. Open the newest checkpoint of the run in one process, which has room for what it holds."
        )
    return {
        table: {name: _export(segments, name, hot[table]) for name, *_ in segments[0][0].cached.fields}
        for table, segments in cached_tables(host).items()
    }


def _export(segments: CachedTable, name: str, hot: Sequence[Any]) -> LazyArray:
    first_rows, spec = segments[0][0], segments[0][1].spec
    kind, tail = next((dtype, tail) for field, _, dtype, tail in first_rows.cached.fields if field == name)
    dtype = outside(kind)
    whole = (spec.rows, spec.dim)[: 1 + len(tail)]

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for rows, segment in segments:
            for piece in overlaps(rows.group.pieces(segment), segment.band, part):
                if len(part) == 1 and (segment.first or rows.group.place(piece.part)[1]):
                    continue  # the first columns have all of it, and the others the same
                values = rows.values(piece.part, _homes(piece.homes), name).view(dtype)
                out[(piece.rows, *piece.columns)] = values[(slice(None), *_in_buffer(piece))]
        for of, arrays in hot:
            first, last = of.band.span(part[0].start, part[0].stop)
            if first < last:
                out[of.band.used(first, last) - part[0].start] = arrays[name].read((slice(first, last), *part[1:]))
        return out

    return LazyArray(whole, dtype, read, block_of(whole, dtype))


def _in_buffer(piece: Overlap) -> tuple[slice, ...]:
    """The columns of an overlap, counted from the first one of the buffer."""
    return tuple(slice(at, at + axis.stop - axis.start) for at, axis in zip(piece.offset, piece.columns, strict=True))


def _homes(homes: range | np.ndarray) -> np.ndarray:
    if isinstance(homes, range):
        return np.arange(homes.start, homes.stop, dtype=np.int32)
    return homes.astype(np.int32)


def import_cached(host: HostRows, saved: Saved | Sequence[Saved]) -> None:
    """The inverse of `export_cached`, from what any mesh, plan and tier gave, into a tier of which nothing is written.

    The host holds one part at a time. Rows at their initial values are not written.
    """
    source: Any = saved if isinstance(saved, dict) else saved[0]
    for table, segments in cached_tables(host).items():
        arrays = {name: as_lazy(source[table][name]) for name, *_ in segments[0][0].cached.fields}
        for part in arrays[ROWS].parts():
            _import(segments, arrays, part[0])


def _import(segments: CachedTable, arrays: dict[str, LazyArray], some: slice) -> None:
    """Writes some rows of a table; a row of which any column is not at its initial value, in all of its pieces."""
    spec = segments[0][1].spec
    values = {name: array.read((some, *(slice(0, n) for n in array.shape[1:]))) for name, array in arrays.items()}
    changed_M = np.zeros(some.stop - some.start, bool)
    pieces: list[tuple[GroupRows, Overlap, np.ndarray]] = []
    for rows, segment in segments:
        for piece in overlaps(rows.group.pieces(segment), segment.band, (some, slice(0, spec.dim))):
            arrays_K = {}
            for name, _, dtype, tail in rows.cached.fields:
                columns = piece.columns[: len(tail)]
                arrays_K[name] = np.ascontiguousarray(values[name][(piece.rows, *columns)]).view(dtype)
            pieces.append((rows, piece, rows.cached.join(arrays_K)))
            width = piece.columns[0].stop - piece.columns[0].start
            changed_M[piece.rows] |= rows.differ(piece.part, _homes(piece.homes), pieces[-1][2], width)
    for rows, piece, records in pieces:
        changed_K = changed_M[piece.rows]
        if piece.part in rows.local_parts and changed_K.any():
            rows.put(piece.part, _homes(piece.homes)[changed_K], records[changed_K])
