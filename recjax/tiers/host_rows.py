"""Records of all rows of tables with caches, in the host's memory or on a disk: those written, and initial ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.errors import ConfigError
from recjax.parallel.mesh import first_holders, parts_here
from recjax.tiers.caches import CachedGroup, cached_groups
from recjax.tiers.changes import Changes
from recjax.tiers.disk import OnDisk
from recjax.tiers.moves import InitialRecords
from recjax.tiers.records import record_bytes
from recjax.tiers.store import Budget, InMemory, Places, RowStore
from recjax.utils.paths import expanded
from recjax.utils.units import size_text

_WRITTEN_AT_ONCE = 1 << 16
ROWS_AT_ONCE = 1 << 15  # of which the host holds whole records where it wants a part of each


@dataclasses.dataclass(frozen=True, eq=False)
class GroupRows:
    """The rows of a group by their homes, of the parts of its buffer that this process's devices hold.

    A part is what one device holds: the rows of an owner, all of their columns or some (`Group.place`).

    Attributes:
      cached: the group, and the layout of its records.
      local_parts: the parts whose rows are here, ascending.
      given: those of them whose rows this process gives to checkpoints: others may hold the same.
      changes: which rows have changed since a checkpoint; None: nobody wants to know.
      first: records before any is written.
      stores: of each part that is here.
    """

    cached: CachedGroup
    local_parts: tuple[int, ...]
    given: tuple[int, ...]
    changes: Changes | None
    first: InitialRecords
    stores: Mapping[int, RowStore]

    @property
    def group(self) -> Group:
        """The group."""
        return self.cached.group

    def parts(self, part: int, homes_K: np.ndarray, aside: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads records of some homes, a part of them at a time.

        Args:
          part: of the buffer.
          homes_K: int32 [K].
          aside: for an evaluation or a checkpoint, which is counted apart.

        Yields:
          Which of the homes, and their records as they were written, or initial ones: uint8 [k, record].
        """
        store = self.stores[part]
        written_K = store.is_written(homes_K)
        stored = np.flatnonzero(written_K)
        stored = stored[store.order(homes_K[stored])]
        for first in range(0, len(stored), ROWS_AT_ONCE):
            at = stored[first : first + ROWS_AT_ONCE]
            yield at, store.read(homes_K[at], aside)
        others = np.flatnonzero(~written_K)
        for first in range(0, len(others), ROWS_AT_ONCE):
            at = others[first : first + ROWS_AT_ONCE]
            yield at, self.first.make(part, homes_K[at])

    def values(self, part: int, homes_K: np.ndarray, field: str) -> np.ndarray:
        """One of the arrays of some homes' records, [K, ...] as `CachedGroup.split` gives it, without the others."""
        dtype, tail = next((dtype, tail) for name, _, dtype, tail in self.cached.fields if name == field)
        values = np.empty((len(homes_K), *tail), dtype)
        for at, records in self.parts(part, homes_K, aside=True):
            values[at] = self.cached.split(records, field)
        return values

    def written(self, part: int, first: int, last: int) -> np.ndarray:
        """The homes of a part from `first` to below `last` that were ever written, in that order: int32 [K]."""
        return self.stores[part].written_between(first, last)

    def changed(self, part: int, first: int, last: int) -> np.ndarray:
        """The homes of `written` that had changed when the last checkpoint began, in the same order: int32 [K]."""
        assert self.changes is not None
        homes_K = self.changes.homes(self.group.name, self.group.owner_of(part), first, last)
        ordered_K: np.ndarray = homes_K[self.stores[part].order(homes_K)]
        return ordered_K

    def put(self, part: int, homes_K: np.ndarray, records: np.ndarray) -> None:
        """Writes records of some homes, all different."""
        self.stores[part].write(homes_K, records)

    def write_initial(self) -> None:
        """Writes all rows that are here at their initial values: then reads are those of a long training."""
        for part in self.local_parts:
            for first in range(0, self.group.home_rows, _WRITTEN_AT_ONCE):
                homes_K = np.arange(first, min(first + _WRITTEN_AT_ONCE, self.group.home_rows), dtype=np.int32)
                self.put(part, homes_K, self.first.make(part, homes_K))

    def differ(self, part: int, homes_K: np.ndarray, records: np.ndarray, columns: int) -> np.ndarray:
        """Returns whether each home's record is another than the initial one in its first columns, bool [K]."""
        initial, differ_K = self.first.make(part, homes_K), np.zeros(len(homes_K), bool)
        for _, first, dtype, tail in self.cached.fields:
            cells = slice(first, first + (columns if tail else 1) * dtype.itemsize)
            differ_K |= (initial[:, cells] != records[:, cells]).any(axis=1)
        return differ_K

    @property
    def directory_bytes(self) -> int:
        """Bytes that find the rows of the parts that are here: slots on their devices, and places on the host."""
        marks = 0 if self.changes is None else self.group.owners * self.group.home_rows // 4
        return self.cached.find_bytes(self.local_parts) + marks

    def about(self) -> str:
        """A line: how many rows the cache holds of how many, and what the host keeps to find them."""
        who = "the host" if len(self.local_parts) == self.group.parts else "this process"
        return (
            f"{self.group.name}: a device has room for {self.group.rows:,} of its {self.group.home_rows:,} rows "
            f"({self.cached.record_bytes} bytes each, with the optimizer's state); {who} finds its own by "
            f"{size_text(self.directory_bytes)}"
        )


class HostRows:
    """The rows of all groups with caches, as far as this process's devices hold parts of them.

    Attributes:
      mesh: the devices.
      groups: the rows of each group, by its name.
      changes: which rows have changed since a checkpoint; None: nobody wants to know.
    """

    def __init__(
        self,
        bound: BoundPlan,
        mesh: Mesh,
        seed: int,
        dtype: Any,
        dram_bytes: int = 0,
        disk: str = "",
        track: bool = False,
    ) -> None:
        """Nothing is written: all rows are at their initial values.

        Args:
          bound: a plan with caches.
          mesh: its devices; one of this process's draws initial values.
          seed: of the run.
          dtype: of tables and slots.
          dram_bytes: of the host's memory for this process's rows; 0: as many as they need.
          disk: folder for the rest; "": none.
          track: whether there are `changes`.

        Raises:
          ConfigError: nothing can be written there.
        """
        me = jax.process_index()
        self.mesh = mesh
        here = [device for device in mesh.devices.flat if device.process_index == me]
        self.changes = Changes({group.name: group for group in bound.cached}) if track else None
        self._budget = Budget(dram_bytes or None, "tier.dram_bytes")
        self._disk = folder_of(disk) if disk else None
        self._all = cached_groups(bound, dtype)
        self.groups: dict[str, GroupRows] = {}
        for name, cached in self._all.items():
            axes, parts = cached.group.partition_axes, cached.group.parts
            local = parts_here(mesh, axes, parts)
            given = tuple(part for part, process in enumerate(first_holders(mesh, axes, parts)) if process == me)
            stores = {part: RowStore(cached.group.home_rows, self._places(cached, len(local))) for part in local}
            first = InitialRecords(cached, seed, here[0])
            self.groups[name] = GroupRows(cached, local, given, self.changes, first, stores)
        item, on_host = np.dtype(dtype).itemsize, here[0].platform == "cpu"
        caches = (len(here) * group.rows * group.row_bytes(item) for group in bound.cached)
        self._cache_bytes = sum(caches) if on_host else 0

    def _places(self, cached: CachedGroup, local: int) -> Places:
        """An empty place for the records of one of so many parts that are here."""
        if self._disk is None:
            return InMemory(cached.record_bytes, self._budget)
        limit = (self._budget.limit or 0) * cached.group.parts // local  # as if all processes had as much
        share = cached.dram_share(self._all.values(), limit)
        return OnDisk(self._disk, cached.group.name, cached.record_bytes, share)

    def mark(self, named: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Notes that a step changes the homes that its batch names, group name -> of each owner, if need be."""
        if self.changes is not None:
            for name, of_owners in named.items():
                for owner, homes_U in enumerate(of_owners):
                    self.changes.mark(name, owner, homes_U)

    def clear(self) -> None:
        """Forgets all rows: they are at their initial values."""
        self._budget.left = self._budget.limit
        if self.changes is not None:
            self.changes.clear()
        for rows in self.groups.values():
            for store in rows.stores.values():
                store.clear(self._places(rows.cached, len(rows.local_parts)))

    def figures(self) -> dict[str, int]:
        """Returns counts since the last `clear`, over all groups and the parts that are here.

        Keys: "written_rows", of which the host has a record; "disk_rows", of which the disk has one; "records_read" and
        "records_written", by the disk; "records_read_aside", of these for evaluations and checkpoints; "disk_bytes", of
        its files, and "padded_bytes", of all written rows if they were there; "row_bytes", of the host's memory for
        rows, with those of devices that have no other; "directory_bytes", of what finds the rows.
        """
        names = ("written_rows", "disk_rows", "records_read", "records_written", "disk_bytes")
        counts = dict.fromkeys((*names, "records_read_aside", "padded_bytes", "row_bytes"), 0)
        for rows in self.groups.values():
            size = rows.cached.record_bytes
            for store in rows.stores.values():
                counts["written_rows"] += store.written
                counts["padded_bytes"] += store.written * record_bytes(size)
                counts["row_bytes"] += 0 if self._budget.limit else store.written * size
                if isinstance(store.places, OnDisk):
                    counts["disk_rows"] += store.places.stored_records
                    counts["records_read"] += store.places.read_records
                    counts["records_read_aside"] += store.places.read_aside
                    counts["records_written"] += store.places.written_records
                    counts["disk_bytes"] += store.places.file_bytes
        counts["row_bytes"] += (self._budget.limit or 0) + self._cache_bytes
        counts["directory_bytes"] = sum(rows.directory_bytes for rows in self.groups.values())
        if self._disk is not None:  # where each record is in memory, and whether it is on the disk
            counts["directory_bytes"] += 5 * counts["written_rows"]
        return counts

    def close(self) -> None:
        """Gives memory and files back."""
        for rows in self.groups.values():
            for store in rows.stores.values():
                store.close()


def folder_of(path: str) -> Path:
    """A folder for scratch files, which is made if need be; ConfigError if it cannot be."""
    folder = expanded(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"tier.disk={path}: the folder cannot be made: {error.strerror or error}. Choose one on a disk with room "
            "for all rows that are touched."
        ) from error
    return folder
