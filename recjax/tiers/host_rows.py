"""Records of all rows of tables with caches, in the host's memory or on a disk: those written, and initial ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.routing.host import LISTED_ROWS
from recjax.errors import ConfigError
from recjax.parallel.mesh import first_holders, parts_here
from recjax.tiers.changes import Changes
from recjax.tiers.disk import OnDisk
from recjax.tiers.moves import InitialRecords, Record
from recjax.tiers.records import record_bytes
from recjax.tiers.store import Budget, InMemory, Places, RowStore
from recjax.utils.paths import expanded
from recjax.utils.units import size_text

ROWS_AT_ONCE = 1 << 15  # of which the host holds whole records where it wants a part of each


class HostRows:
    """The rows of each group with a cache by their homes, of the parts of its buffer that this process's devices hold.

    A part is what one device holds: the rows of an owner, all of their columns or some (`Group.place`).

    Attributes:
      mesh: the devices.
      groups: group name -> the group.
      records: group name -> the layout of its records.
      local_parts: group name -> the parts whose rows are here, ascending.
      given: group name -> those of them whose rows this process gives to checkpoints: others may hold the same.
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
        self.groups = {group.name: group for group in bound.cached}
        self.records = {name: Record.of(group, dtype) for name, group in self.groups.items()}
        self._initial = {
            name: InitialRecords(group, seed, dtype, self.records[name], here[0]) for name, group in self.groups.items()
        }
        self.local_parts: dict[str, tuple[int, ...]] = {}
        self.given: dict[str, tuple[int, ...]] = {}
        for name, group in self.groups.items():
            self.local_parts[name] = parts_here(mesh, group.partition_axes, group.parts)
            holders = first_holders(mesh, group.partition_axes, group.parts)
            self.given[name] = tuple(part for part, process in enumerate(holders) if process == me)
        self._budget = Budget(dram_bytes or None, "tier.dram_bytes")
        self._disk = folder_of(disk) if disk else None
        self._stores = {
            name: {part: RowStore(group.home_rows, self._places(name)) for part in self.local_parts[name]}
            for name, group in self.groups.items()
        }
        self.changes = Changes(self.groups) if track else None
        item, on_host = np.dtype(dtype).itemsize, here[0].platform == "cpu"
        caches = (len(here) * g.rows * g.row_bytes(item) for g in bound.cached)
        self._cache_bytes = sum(caches) if on_host else 0

    def _places(self, name: str) -> Places:
        size = self.records[name].bytes
        if self._disk is None:
            return InMemory(size, self._budget)
        sizes = {n: record.bytes for n, record in self.records.items()}
        group = self.groups[name]
        limit = (
            (self._budget.limit or 0) * group.parts // len(self.local_parts[name])
        )  # as if all processes had as much
        share = dram_share(group, list(self.groups.values()), sizes, limit)
        return OnDisk(self._disk, name, size, share)

    def parts(
        self, name: str, part: int, homes_K: np.ndarray, aside: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads records of some homes, a part of them at a time.

        Args:
          name: of the group.
          part: of its buffer.
          homes_K: int32 [K].
          aside: for an evaluation or a checkpoint, which is counted apart.

        Yields:
          Which of the homes, and their records as they were written, or initial ones: uint8 [k, record].
        """
        store = self._stores[name][part]
        written_K = store.is_written(homes_K)
        stored = np.flatnonzero(written_K)
        stored = stored[store.order(homes_K[stored])]
        for first in range(0, len(stored), ROWS_AT_ONCE):
            at = stored[first : first + ROWS_AT_ONCE]
            yield at, store.read(homes_K[at], aside)
        others = np.flatnonzero(~written_K)
        for first in range(0, len(others), ROWS_AT_ONCE):
            at = others[first : first + ROWS_AT_ONCE]
            yield at, self._initial[name].make(part, homes_K[at])

    def values(self, name: str, part: int, homes_K: np.ndarray, field: str) -> np.ndarray:
        """One of the arrays of some homes' records, [K, ...] as `Record.split` gives it, without all of the records."""
        layout = self.records[name]
        dtype, tail = next((dtype, tail) for found, _, dtype, tail in layout.fields if found == field)
        values = np.empty((len(homes_K), *tail), dtype)
        for at, records in self.parts(name, part, homes_K, aside=True):
            values[at] = layout.split(records, field)
        return values

    def written(self, name: str, part: int, first: int, last: int) -> np.ndarray:
        """The homes of a part from `first` to below `last` that were ever written, in that order: int32 [K]."""
        return self._stores[name][part].written_between(first, last)

    def changed(self, name: str, part: int, first: int, last: int) -> np.ndarray:
        """The homes of `written` that had changed when the last checkpoint began, in the same order: int32 [K]."""
        assert self.changes is not None
        owner = self.groups[name].owner_of(part)
        homes_K = self.changes.homes(name, owner, first, last)
        found: np.ndarray = homes_K[self._stores[name][part].order(homes_K)]
        return found

    def mark(self, named: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Notes that a step changes the homes that its batch names, group name -> of each owner, if need be."""
        if self.changes is not None:
            for name, of_owners in named.items():
                for owner, homes_U in enumerate(of_owners):
                    self.changes.mark(name, owner, homes_U)

    def initial(self, name: str, part: int, homes_K: np.ndarray) -> np.ndarray:
        """Records of some homes of one part as they are before any is written, uint8 [K, record]."""
        return self._initial[name].make(part, homes_K)

    def put(self, name: str, part: int, homes_K: np.ndarray, records: np.ndarray) -> None:
        """Writes records of some homes, all different."""
        self._stores[name][part].write(homes_K, records)

    def differ(self, name: str, part: int, homes_K: np.ndarray, records: np.ndarray, columns: int) -> np.ndarray:
        """Returns whether each home's record is another than the initial one in its first columns, bool [K]."""
        initial, differ_K = self._initial[name].make(part, homes_K), np.zeros(len(homes_K), bool)
        for _, first, dtype, tail in self.records[name].fields:
            cells = slice(first, first + (columns if tail else 1) * dtype.itemsize)
            differ_K |= (initial[:, cells] != records[:, cells]).any(axis=1)
        return differ_K

    def clear(self) -> None:
        """Forgets all rows: they are at their initial values."""
        self._budget.left = self._budget.limit
        if self.changes is not None:
            self.changes.clear()
        for name, stores in self._stores.items():
            for store in stores.values():
                store.clear(self._places(name))

    def figures(self) -> dict[str, int]:
        """Returns counts since the last `clear`, over all groups and the parts that are here.

        Keys: "written_rows", of which the host has a record; "disk_rows", of which the disk has one; "records_read" and
        "records_written", by the disk; "records_read_aside", of these for evaluations and checkpoints; "disk_bytes", of
        its files, and "padded_bytes", of all written rows if they were there; "row_bytes", of the host's memory for
        rows, with those of devices that have no other; "directory_bytes", of what finds the rows.
        """
        names = ("written_rows", "disk_rows", "records_read", "records_written", "disk_bytes")
        found = dict.fromkeys((*names, "records_read_aside", "padded_bytes", "row_bytes"), 0)
        for name, stores in self._stores.items():
            for store in stores.values():
                size = self.records[name].bytes
                found["written_rows"] += store.written
                found["padded_bytes"] += store.written * record_bytes(size)
                found["row_bytes"] += 0 if self._budget.limit else store.written * size
                if isinstance(store.places, OnDisk):
                    found["disk_rows"] += store.places.stored_records
                    found["records_read"] += store.places.read_records
                    found["records_read_aside"] += store.places.read_aside
                    found["records_written"] += store.places.written_records
                    found["disk_bytes"] += store.places.file_bytes
        found["row_bytes"] += (self._budget.limit or 0) + self._cache_bytes
        found["directory_bytes"] = sum(map(self._directory_bytes, self.groups.values()))
        if self._disk is not None:  # where each record is in memory, and whether it is on the disk
            found["directory_bytes"] += 5 * found["written_rows"]
        return found

    def about(self) -> list[str]:
        """A line for each cache: how many rows it holds of how many, and what the host keeps to find them."""
        lines = []
        for name, group in self.groups.items():
            homes, size = group.home_rows, self.records[name].bytes
            who = "the host" if len(self.local_parts[name]) == group.parts else "this process"
            lines.append(
                f"{name}: a device has room for {group.rows:,} of its {homes:,} rows ({size} bytes each, with the "
                f"optimizer's state); {who} finds its own by {size_text(self._directory_bytes(group))}"
            )
        return lines

    def _directory_bytes(self, group: Group) -> int:
        """Bytes that find the rows of the parts that are here: slots on their devices, and places on the host."""
        marks = 0 if self.changes is None else group.owners * group.home_rows // 4
        return find_bytes(group, self.local_parts[group.name]) + marks

    def close(self) -> None:
        """Gives memory and files back."""
        for stores in self._stores.values():
            for store in stores.values():
                store.close()


def find_bytes(group: Group, parts: Sequence[int]) -> int:
    """Bytes by which a process finds the rows of some parts of a group: slots on the devices, and places on the host.

    The slots of an owner's rows are found once, whatever the number of parts that hold columns of them.
    """
    hot = (s.spec.rows for s in group.segments if s.band.vacant and s.spec.rows <= LISTED_ROWS)
    owners = len({group.owner_of(part) for part in parts})
    return 4 * sum(hot) + owners * (4 * group.home_rows + 28 * group.rows) + len(parts) * 4 * group.home_rows


def dram_share(group: Group, groups: Sequence[Group], record_bytes: Mapping[str, int], limit: int) -> int:
    """Bytes of the host's memory for the records of each part of a group, before a disk.

    Args:
      group: one of `groups`.
      groups: all that have caches.
      record_bytes: group name -> of its records.
      limit: bytes for all of them.
    """
    needs = {g.name: g.parts * g.home_rows * record_bytes[g.name] for g in groups}
    return limit * needs[group.name] // sum(needs.values()) // group.parts


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
