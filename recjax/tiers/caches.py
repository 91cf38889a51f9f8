"""The buffers of a plan that become caches: their sizes, and the layout of the records of their rows on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from recjax.embedding.group import LISTED_ROWS, Group
from recjax.embedding.layout import BoundPlan
from recjax.errors import ConfigError
from recjax.utils.units import size_text

ROWS = "rows"  # the name of a table's values among the arrays of a record
_ALIGNED = 64

Arrays = dict[str, Any]  # ROWS and the optimizer's slots -> [rows, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class CachedGroup:
    """A group whose buffer is a cache, and its records: of each row with its optimizer's state, padded to 64 bytes.

    Attributes:
      group: of a plan with caches.
      dtype: of tables and slots that do not say otherwise.
    """

    group: Group
    dtype: Any

    @functools.cached_property
    def fields(self) -> tuple[tuple[str, int, np.dtype[Any], tuple[int, ...]], ...]:
        """Name, first byte, dtype and shape of the part of each array, ROWS first."""
        slots = [(name, self.dtype, slot.shape) for name, slot in self.group.slots().items()]
        fields, first = [], 0
        for name, kind, shape in [(ROWS, self.group.storage_dtype(self.dtype), (self.group.width,)), *slots]:
            fields.append((name, first, np.dtype(kind), shape))
            first += math.prod(shape) * np.dtype(kind).itemsize
        return tuple(fields)

    @functools.cached_property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        _, first, dtype, shape = self.fields[-1]
        return -(-(first + math.prod(shape) * dtype.itemsize) // _ALIGNED) * _ALIGNED

    @property
    def all_bytes(self) -> int:
        """Bytes of the records of all rows, in all parts."""
        return self.group.parts * self.group.home_rows * self.record_bytes

    def join(self, arrays: Arrays) -> np.ndarray:
        """Records uint8 [K, record] of arrays [K, ...], which may lack the last columns: those are zeros."""
        count = len(arrays[ROWS])
        records = np.zeros((count, self.record_bytes), np.uint8)
        for name, first, _, _ in self.fields:
            cells = np.ascontiguousarray(arrays[name]).reshape(count, -1).view(np.uint8)
            records[:, first : first + cells.shape[1]] = cells
        return records

    def split(self, records: np.ndarray, name: str) -> np.ndarray:
        """One of the arrays [K, ...] of records."""
        _, first, dtype, shape = next(field for field in self.fields if field[0] == name)
        cells = np.ascontiguousarray(records[:, first : first + math.prod(shape) * dtype.itemsize])
        return cells.view(dtype).reshape(len(records), *shape)

    def find_bytes(self, parts: Sequence[int]) -> int:
        """Bytes by which a process finds the rows of some parts: slots on the devices, and places on the host.

        The slots of an owner's rows are found once, whatever the number of parts that hold columns of them.
        """
        group = self.group
        hot = (s.spec.rows for s in group.segments if s.band.vacant and s.spec.rows <= LISTED_ROWS)
        owners = len({group.owner_of(part) for part in parts})
        return 4 * sum(hot) + owners * (4 * group.home_rows + 28 * group.rows) + len(parts) * 4 * group.home_rows

    def dram_share(self, groups: Iterable[CachedGroup], limit: int) -> int:
        """Bytes of memory for the records of each part, before a disk, of a limit for those of all of these groups."""
        return limit * self.all_bytes // sum(cached.all_bytes for cached in groups) // self.group.parts


def cached_groups(bound: BoundPlan, dtype: Any) -> dict[str, CachedGroup]:
    """The groups of a plan with caches, by name; `dtype` is that of tables and slots that do not say otherwise."""
    return {group.name: CachedGroup(group, dtype) for group in bound.cached}


def with_caches(bound: BoundPlan, budget_bytes: int, item_bytes: int) -> BoundPlan:
    """The plan with caches in place of the buffers whose rows are spread over the devices.

    Each gets a share of the budget that is proportional to the bytes that a batch names of its rows, but no more
    than all of its rows: one that gets as much is no cache, unless it holds columns of tables of which others are.

    Args:
      bound: a plan; it is returned if all rows fit.
      budget_bytes: of a device, for these rows and their optimizer's state.
      item_bytes: as for `Group.row_bytes`.

    Raises:
      ConfigError: caches cannot do what the plan asks for.
    """
    spread = {group.name: group for group in bound.groups if group.spread}
    sizes = _sizes(bound, list(spread.values()), budget_bytes, item_bytes)
    if all(sizes[name] >= group.rows for name, group in spread.items()):
        return bound
    # A table is all in caches, or not at all: a group whose rows all fit may hold other columns of one that is.
    tables = {table for name, group in spread.items() if sizes[name] < group.rows for table in group.table_names}
    while more := {t for g in spread.values() if tables.intersection(g.table_names) for t in g.table_names} - tables:
        tables |= more
    becoming = [group for group in spread.values() if tables.intersection(group.table_names)]
    _check(bound, becoming)
    for group in becoming:
        if not sizes[group.name]:
            raise ConfigError(
                f"tier.device_bytes={size_text(budget_bytes)} has no room for a single row of {group.name} "
                f"({group.row_bytes(item_bytes):,} bytes). Raise it."
            )
    caches = {g.name: dataclasses.replace(g, rows=sizes[g.name], homes=g.rows, lines=None) for g in becoming}
    return bound.with_groups(caches)


def read_through(bound: BoundPlan) -> BoundPlan:
    """The plan for predictions, in which buffers of rows on the host may hold any number of them."""
    return bound.with_groups({g.name: dataclasses.replace(g, rows=g.home_rows) for g in bound.cached})


def _sizes(bound: BoundPlan, groups: list[Group], budget_bytes: int, item_bytes: int) -> dict[str, int]:
    """Rows of each group that fit into the budget."""
    sizes: dict[str, int] = {}
    left, open_ = budget_bytes, list(groups)
    ids = {g.name: sum(s.feature.ids for s in bound.sources_of(g)) for g in groups}  # of a sample
    while open_:
        wants = {g.name: g.row_bytes(item_bytes) * ids[g.name] or 1 for g in open_}
        share = {g.name: int(left * wants[g.name] / sum(wants.values())) // g.row_bytes(item_bytes) for g in open_}
        whole = [g for g in open_ if share[g.name] >= g.rows]
        if not whole:
            return sizes | share
        for group in whole:
            sizes[group.name] = group.rows
            left -= group.rows * group.row_bytes(item_bytes)
        open_ = [group for group in open_ if group not in whole]
    return sizes


def _check(bound: BoundPlan, groups: Sequence[Group]) -> None:
    """Refuses plans that caches do not serve, and groups whose buffer cannot be one (ConfigError)."""
    if bound.independent:
        raise ConfigError(
            "tier.device_bytes is set, and not all rows fit into it; but rows on the host do not go with replica "
            "groups that hold rows of their own (train.replica_sync other than exact) yet. Leave that out, or set "
            "tier.device_bytes=0, which holds all rows on the devices."
        )
    for group in groups:
        tables = ", ".join(group.table_names)
        if group.optimizer.every_row:
            raise ConfigError(
                f"tables {tables} do not all fit into tier.device_bytes, but their optimizer has every_row=true, which "
                "updates all rows in each step. Set every_row=false, which updates the rows that the batch names; or "
                "raise tier.device_bytes."
            )
        if any(segment.band.chosen is not None and not segment.band.vacant for segment in group.segments):
            raise ConfigError(
                f"tables {tables} do not all fit into tier.device_bytes, but some are split into segments by rows that "
                "are not hot, which rows on the host are not yet. Make these segments hot, or leave them out of the "
                "plan."
            )
        if not group.dedup:
            raise ConfigError("tier.device_bytes needs embedding.dedup=true: a cache holds each row once.")
        if group.ragged:
            raise ConfigError("tier.device_bytes does not go with embedding.ragged=true yet. Leave that false.")
