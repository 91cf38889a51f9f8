"""The way of tables out of a tier, to checkpoints, and back: whole, in storage order, as `embedding/collection.py`.

A table with hot rows lies in two places: these are on the devices, as `hot_rows` gives them, and the rest is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.embedding.bands import BoundSegment
from recjax.embedding.buffers import GroupSlots, Tables
from recjax.embedding.cells import overlaps
from recjax.embedding.collection import Saved, export_segment, outside
from recjax.embedding.layout import BoundPlan, Group
from recjax.errors import ConfigError
from recjax.parallel import distributed
from recjax.tiers.host_rows import HostRows
from recjax.tiers.moves import ROWS, Record
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


def export_cached(bound: BoundPlan, host: HostRows, hot: Hot) -> dict[str, dict[str, LazyArray]]:
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
        segment.spec.name: {
            name: _export(group, segment, host, name, hot[segment.spec.name])
            for name, *_ in host.records[group.name].fields
        }
        for group in bound.cached
        for segment in group.segments
    }


def _export(group: Group, segment: BoundSegment, host: HostRows, name: str, hot: Sequence[Any]) -> LazyArray:
    layout: Record = host.records[group.name]
    kind, shape = next((dtype, tail) for field, _, dtype, tail in layout.fields if field == name)
    dtype = outside(kind)
    whole = (segment.spec.rows, *shape)

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for found in overlaps(group, segment, part[:1]):
            values = host.values(group.name, _owner(group, found.part), _homes(found.homes), name).view(dtype)
            out[found.rows] = values[(slice(None), *part[1:])]
        for of, arrays in hot:
            first, last = of.band.span(part[0].start, part[0].stop)
            if first < last:
                out[of.band.used(first, last) - part[0].start] = arrays[name].read((slice(first, last), *part[1:]))
        return out

    return LazyArray(whole, dtype, read, block_of(whole, dtype))


def _owner(group: Group, part: int) -> int:
    return int(group.place(part)[0])


def _homes(homes: range | np.ndarray) -> np.ndarray:
    if isinstance(homes, range):
        return np.arange(homes.start, homes.stop, dtype=np.int32)
    return homes.astype(np.int32)


def import_cached(bound: BoundPlan, host: HostRows, saved: Saved | Sequence[Saved]) -> None:
    """The inverse of `export_cached`, from what any mesh, plan and tier gave, into a tier of which nothing is written.

    The host holds one part at a time. Rows at their initial values are not written.
    """
    source: Any = saved if isinstance(saved, dict) else saved[0]
    for group in bound.cached:
        layout = host.records[group.name]
        for segment in group.segments:
            arrays = {name: as_lazy(source[segment.spec.name][name]) for name, *_ in layout.fields}
            for part in arrays[ROWS].parts():
                rows = part[:1]
                values = {}
                for name, _, dtype, tail in layout.fields:
                    index = (*rows, *(slice(0, n) for n in tail))
                    values[name] = np.ascontiguousarray(arrays[name].read(index)).view(dtype)
                here = host.owners[group.name]
                for found in (found for found in overlaps(group, segment, rows) if _owner(group, found.part) in here):
                    records = layout.join({name: x[found.rows] for name, x in values.items()})
                    host.write(group.name, _owner(group, found.part), _homes(found.homes), records)
