"""The way of tables out of a tier, to checkpoints, and back: whole, in storage order, as `embedding/collection.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.embedding.collection import Saved
from recjax.embedding.layout import BoundPlan, BoundSegment, Group
from recjax.tiers.host_rows import HostRows
from recjax.tiers.moves import ROWS, Record
from recjax.utils.lazy_arrays import Index, LazyArray, as_lazy, block_of


def export_cached(bound: BoundPlan, host: HostRows) -> dict[str, dict[str, LazyArray]]:
    """Tables of caches as `export_tables` gives others, after `Tier.flush`: good until the next `Tier.admit`."""
    return {
        segment.spec.name: {name: _export(group, segment, host, name) for name, *_ in host.records[group.name].fields}
        for group in bound.cached
        for segment in group.segments
    }


def _export(group: Group, segment: BoundSegment, host: HostRows, name: str) -> LazyArray:
    layout: Record = host.records[group.name]
    kind, shape = next((dtype, tail) for field, _, dtype, tail in layout.fields if field == name)
    dtype = outside(kind)
    whole = (segment.spec.rows, *shape)

    def read(part: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in part], dtype)
        for owner, homes_K, rows in _runs(group, segment, part[0].start, part[0].stop):
            values = host.values(group.name, owner, homes_K, name).view(dtype)
            out[rows] = values[(slice(None), *part[1:])]
        return out

    return LazyArray(whole, dtype, read, block_of(whole, dtype))


def outside(kind: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in checkpoints of what records hold as `kind`."""
    return np.dtype(jnp.bfloat16) if kind == np.uint16 else kind


def _runs(group: Group, segment: BoundSegment, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, slice]]:
    """(owner, homes, where among them) of the rows at the storage positions from `start` to below `stop`."""
    for owner in range(group.owners):
        first, last = (int(edge) for edge in segment.split.bounds(owner))
        a, z = max(start, first), min(stop, last)
        if a < z:
            offset = segment.offsets[owner] - first
            yield owner, np.arange(a + offset, z + offset, dtype=np.int32), slice(a - start, z - start)


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
                for owner, homes_K, at in _runs(group, segment, rows[0].start, rows[0].stop):
                    host.write(group.name, owner, homes_K, layout.join({name: x[at] for name, x in values.items()}))
