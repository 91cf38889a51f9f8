"""All rows that are not on the devices, and their traffic with the caches there.

For each batch of a training a `CacheStage` decides which rows come and which leave. What comes is read by threads while
the step before is under way; what leaves is copied to the host meanwhile, and written by one thread, in order. A row
that is asked for again before it is written is taken from the copy that waits to be written.

The truth about a cache is its `homes`, on the device: a batch that was prepared but never trained on moved nothing.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.layout import BoundPlan, Group
from recjax.errors import ConfigError
from recjax.tiers.directory import Directory, Moves
from recjax.tiers.disk import OnDisk
from recjax.tiers.moves import ROWS, Arrays, InitialRecords, Mover, Record
from recjax.tiers.records import record_bytes
from recjax.tiers.stage import Admission, OfOwners
from recjax.tiers.store import Budget, InMemory, Places, RowStore
from recjax.utils.paths import expanded
from recjax.utils.units import size_text

_READERS = 2
_ROWS_AT_ONCE = 1 << 16  # of which the host holds whole records where it wants a part of each
_WAITING_BYTES = 2**28  # of rows that have left and are not written


@dataclasses.dataclass(eq=False)
class Leaving:
    """Rows that leave a cache, until they are written.

    Attributes:
      homes_K: int32, ascending.
      order_K: which of the records is that of each.
      records: of the rows as they leave, uint8 [K, record].
    """

    homes_K: np.ndarray
    order_K: np.ndarray
    records: Future[np.ndarray]


class Course:
    """One pass of a stream through a stage that began with an empty cache.

    Attributes:
      directories: of the stage, by group and owner.
      leaving: group name -> of each owner what has left, or is to leave, and is not written.
      waiting: reads to begin once the caches that the course before it filled are empty; None: they are.
    """

    def __init__(self, directories: dict[str, list[Directory]]) -> None:
        """Not begun."""
        self.directories = directories
        self.leaving: dict[str, list[list[Leaving]]] = {name: [[] for _ in of] for name, of in directories.items()}
        self.waiting: list[Any] | None = []


class Tier:
    """Rows behind the caches of a plan. It belongs to one state at a time, the newest.

    In a profile its part of a step in the thread that trains is called admit.

    Attributes:
      records: group name -> the layout of its records.
      read_while_waiting: rows that were asked for again before they were written.
    """

    def __init__(
        self, bound: BoundPlan, mesh: Mesh, seed: int, dtype: Any, dram_bytes: int = 0, disk: str = ""
    ) -> None:
        """Nothing is written: all rows are at their initial values.

        Args:
          bound: a plan with caches.
          mesh: its devices.
          seed: of the run.
          dtype: of tables and slots.
          dram_bytes: of the host's memory for rows; 0: as many as they need.
          disk: folder for the rest; "": none.

        Raises:
          ConfigError: nothing can be written there.
        """
        self._groups = {group.name: group for group in bound.cached}
        self.records = {name: Record.of(group, dtype) for name, group in self._groups.items()}
        device = mesh.devices.flat[0]
        self._initial = {
            name: InitialRecords(group, seed, dtype, self.records[name], device) for name, group in self._groups.items()
        }
        self._movers = {name: Mover(group, mesh, self.records[name]) for name, group in self._groups.items()}
        self._budget = Budget(dram_bytes or None, "tier.dram_bytes")
        self._disk = folder_of(disk) if disk else None
        self._stores = {
            name: [RowStore(group.home_rows, self._places(name)) for _ in range(group.owners)]
            for name, group in self._groups.items()
        }
        self._lander = ThreadPoolExecutor(1, "tier-land")
        self._writer = ThreadPoolExecutor(1, "tier-write")
        self._readers = ThreadPoolExecutor(_READERS, "tier-read")
        self._lock = threading.Lock()
        self._course: Course | None = None
        self._admitted = False  # whether the caches hold the rows of a batch that was not trained on yet
        self._flushed = False  # whether the store is up to date with the caches
        self._view_rows = dict.fromkeys(self._groups, 64)
        self._writing: list[Future[None]] = []
        self._landing: list[Future[Future[None]]] = []
        self._waiting: list[int] = []  # bytes of each of these
        self.read_while_waiting = 0
        item, on_host = np.dtype(dtype).itemsize, device.platform == "cpu"
        self._cache_bytes = sum(g.parts * g.rows * g.row_bytes(item) for g in bound.cached) if on_host else 0

    def _places(self, name: str) -> Places:
        size = self.records[name].bytes
        if self._disk is None:
            return InMemory(size, self._budget)
        sizes = {n: record.bytes for n, record in self.records.items()}
        share = dram_share(self._groups[name], list(self._groups.values()), sizes, self._budget.limit or 0)
        return OnDisk(self._disk, name, size, share)

    def course(self, directories: dict[str, list[Directory]]) -> Course:
        """Returns a new course; it begins with the first of its batches that is admitted."""
        return Course(directories)

    # What the stage asks for, a batch or more ahead of the step.

    def prepare(self, course: Course, moves: dict[str, list[Moves]]) -> Admission:
        """Begins to read the rows that come for a batch."""
        left: dict[str, list[Future[np.ndarray]]] = {}
        jobs: list[tuple[str, int, np.ndarray, list[Leaving]]] = []
        for name, of_owners in moves.items():
            left[name] = []
            for owner, own in enumerate(of_owners):
                with self._lock:
                    before = list(course.leaving[name][owner])
                    records: Future[np.ndarray] = Future()
                    left[name].append(records)
                    if count := own.leaving:
                        order_K = np.argsort(own.leave_K[:count])
                        course.leaving[name][owner].append(Leaving(own.leave_K[:count][order_K], order_K, records))
                jobs.append((name, owner, own.come_K, before))
        read: Future[OfOwners] = Future()

        def begin() -> None:
            self._readers.submit(self._read_all, jobs, read)

        with self._lock:
            if course.waiting is None:
                begin()
            else:
                course.waiting.append(begin)
        return Admission(course, moves, left, read)

    def _read_all(self, jobs: Sequence[tuple[str, int, np.ndarray, list[Leaving]]], into: Future[OfOwners]) -> None:
        try:
            found: OfOwners = {}
            for name, owner, homes_K, before in jobs:
                found.setdefault(name, []).append(self._read_behind(name, owner, homes_K, before))
            into.set_result(found)
        except BaseException as error:
            into.set_exception(error)

    def _read_behind(self, name: str, owner: int, homes_K: np.ndarray, before: Sequence[Leaving]) -> np.ndarray:
        """Records of homes, of which some may be among those that left before and are not written."""
        records = np.empty((len(homes_K), self.records[name].bytes), np.uint8)
        stored_K = np.ones(len(homes_K), bool)
        for leaving in before:  # the latest one counts
            at_K = np.minimum(np.searchsorted(leaving.homes_K, homes_K), len(leaving.homes_K) - 1)
            if len(found := np.flatnonzero(leaving.homes_K[at_K] == homes_K)):
                records[found] = leaving.records.result()[leaving.order_K[at_K[found]]]
                stored_K[found] = False
        self.read_while_waiting += len(homes_K) - int(stored_K.sum())
        here = np.flatnonzero(stored_K)
        for at, found in self._parts(name, owner, homes_K[here]):
            records[here[at]] = found
        return records

    def _parts(
        self, name: str, owner: int, homes_K: np.ndarray, aside: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some of the homes at a time, and their records as the store has them, or initial ones."""
        store = self._stores[name][owner]
        written_K = store.is_written(homes_K)
        stored = np.flatnonzero(written_K)
        stored = stored[store.order(homes_K[stored])]
        for first in range(0, len(stored), _ROWS_AT_ONCE):
            at = stored[first : first + _ROWS_AT_ONCE]
            yield at, store.read(homes_K[at], aside)
        others = np.flatnonzero(~written_K)
        for first in range(0, len(others), _ROWS_AT_ONCE):
            at = others[first : first + _ROWS_AT_ONCE]
            yield at, self._initial[name].make(owner, homes_K[at])

    # What the loop does before a step.

    def admit(self, state: Any, admission: Admission) -> Any:
        """Moves rows between the caches of a state and the store, so that the caches hold those of a batch.

        Args:
          state: the `TrainState`, which is used up.
          admission: of the batch.

        Raises:
          TrainingError: the store cannot take, or give, what it must.
        """
        course = admission.course
        if course is not self._course:
            state = self._begin(state, course)
        self._raise()
        self._admitted, self._flushed = True, False
        records = admission.records.result()
        tables, slots, homes = dict(state.tables), dict(state.slots), dict(state.homes)
        for name, moves in admission.moves.items():
            buffers = {ROWS: tables[name], **slots[name]}
            counts = [own.leaving for own in moves]
            if any(counts):
                of_parts = [own.slots_K[:count] for own, count in zip(moves, counts, strict=True)]
                taken = self._movers[name].take(buffers, of_parts)
                self._hold_back(sum(counts) * self.records[name].bytes)
                left = admission.left.pop(name)  # nobody keeps rows longer than they are needed
                self._landing.append(self._lander.submit(self._land, course, name, moves, taken, left))
                del left
            if any(len(own.come_K) for own in moves):
                of_parts = [own.slots_K for own in moves]
                come = [own.come_K for own in moves]
                buffers, homes[name] = self._movers[name].put(buffers, homes[name], of_parts, come, records.pop(name))
            tables[name] = buffers.pop(ROWS)
            slots[name] = buffers
        records.clear()
        return dataclasses.replace(state, tables=tables, slots=slots, homes=homes)

    def _land(
        self,
        course: Course,
        name: str,
        moves: Sequence[Moves],
        taken: list[tuple[int, Arrays]],
        left: list[Future[np.ndarray]],
    ) -> Future[None]:
        """Receives rows that leave, and has them written; a slow disk keeps nobody from those that wait for it."""
        counts = [own.leaving for own in moves]
        try:
            records = self._on_host(self._groups[name], counts, taken)
        except BaseException as error:
            for future in left:
                future.set_exception(error)
            raise
        for future, of_owner in zip(left, records, strict=True):
            future.set_result(of_owner)
        return self._writer.submit(self._write_left, course, name, moves, left)

    def _write_left(
        self, course: Course, name: str, moves: Sequence[Moves], left: Sequence[Future[np.ndarray]]
    ) -> None:
        for owner, own in enumerate(moves):
            if count := own.leaving:
                self._stores[name][owner].write(own.leave_K[:count], left[owner].result())
                with self._lock:
                    kept = course.leaving[name][owner]
                    kept[:] = [other for other in kept if other.records is not left[owner]]

    def _on_host(self, group: Group, counts: Sequence[int], taken: list[tuple[int, Arrays]]) -> list[np.ndarray]:
        """Records of each owner of the rows that `Mover.take` took."""
        layout = self.records[group.name]
        found = [np.empty((count, layout.bytes), np.uint8) for count in counts]
        for start, arrays in taken:
            host = {name: np.asarray(x) for name, x in arrays.items()}
            size = len(host[ROWS]) // len(counts)
            for n, count in enumerate(counts):
                stop = min(count - start, size)
                if stop > 0:
                    own = slice(n * size, n * size + stop)
                    found[n][start : start + stop] = layout.join({name: x[own] for name, x in host.items()})
            arrays.clear()  # on the devices, and their copies on the host
        return found

    def _begin(self, state: Any, course: Course) -> Any:
        """Empties the caches for a course whose directories begin empty."""
        self.flush(state)
        homes = dict(state.homes)
        for name in self._groups:
            homes[name] = jax.device_put(np.full(homes[name].shape, -1, np.int32), homes[name].sharding)
        with self._lock:
            waiting, course.waiting = course.waiting or [], None
            self._course = course
        for begin in waiting:
            begin()
        return dataclasses.replace(state, homes=homes)

    def flush(self, state: Any) -> None:
        """Brings the store up to date with the caches of a state, which stay as they are."""
        self._settle(0)
        if self._flushed:
            return
        for name, group in self._groups.items():
            homes = np.asarray(state.homes[name]).reshape(-1, group.rows)[: group.parts]
            slots = [np.flatnonzero(own >= 0).astype(np.int32) for own in homes]
            if not any(map(len, slots)):
                continue
            buffers = {ROWS: state.tables[name], **state.slots[name]}
            for first in range(0, max(map(len, slots)), _ROWS_AT_ONCE):
                some = [own[first : first + _ROWS_AT_ONCE] for own in slots]
                records = self._on_host(group, [len(own) for own in some], self._movers[name].take(buffers, some))
                for writing in self._writing[:-2]:  # so that no more than that waits in memory
                    writing.result()
                self._writing.append(self._writer.submit(self._write, name, homes, some, records))
        for writing in self._writing:
            writing.result()
        self._writing, self._flushed = [], True

    def _write(self, name: str, homes: np.ndarray, slots: Sequence[np.ndarray], records: Sequence[np.ndarray]) -> None:
        for owner, (own, new) in enumerate(zip(slots, records, strict=True)):
            if len(own):
                self._stores[name][owner].write(homes[owner][own], new)

    def _raise(self) -> None:
        """Raises what went wrong in the writer's thread."""
        while self._landing and self._landing[0].done() and self._landing[0].result().done():
            self._waiting.pop(0)
            self._landing.pop(0).result().result()

    def _hold_back(self, size: int) -> None:
        """Waits until rows that wait to be written leave memory for so many bytes more."""
        self._settle(max(0, _WAITING_BYTES - size))
        self._waiting.append(size)

    def _settle(self, most: int) -> None:
        """Waits until at most so many bytes wait to be written; raises what went wrong."""
        while self._landing and sum(self._waiting) > most:
            self._waiting.pop(0)
            self._landing.pop(0).result().result()

    def require_admitted(self) -> None:
        """Refuses a step on a batch that was not admitted (ConfigError)."""
        if not self._admitted:
            raise ConfigError(
                "this measures steps of which all rows are on the devices, but with tier.device_bytes some are on the "
                "host. Set tier.device_bytes=0; or train, where rows come and go between the steps."
            )
        self._admitted = self._flushed = False

    # The whole tables, where the store is up to date: after `flush`, before the next `admit`.

    def values(self, name: str, owner: int, homes_K: np.ndarray, field: str) -> np.ndarray:
        """One of the arrays of some homes' records, [K, ...] as `Record.split` gives it, without all of the records."""
        layout = self.records[name]
        dtype, tail = next((dtype, tail) for found, _, dtype, tail in layout.fields if found == field)
        values = np.empty((len(homes_K), *tail), dtype)
        for at, records in self._parts(name, owner, homes_K, aside=True):
            values[at] = layout.split(records, field)
        return values

    def written(self, name: str, owner: int, first: int, last: int) -> np.ndarray:
        """The homes of an owner from `first` to below `last` that were ever written, in that order: int32 [K]."""
        return self._stores[name][owner].written_between(first, last)

    def initial(self, name: str, owner: int, homes_K: np.ndarray) -> np.ndarray:
        """Records of some homes of one owner as they are before any is written, uint8 [K, record]."""
        return self._initial[name].make(owner, homes_K)

    def put(self, name: str, owner: int, homes_K: np.ndarray, records: np.ndarray) -> None:
        """Writes records of some homes, all different."""
        self._stores[name][owner].write(homes_K, records)

    def view(self, state: Any, homes: OfOwners) -> Any:
        """A state to predict one batch with: its tables hold the rows of the batch and no others.

        Args:
          state: the `TrainState`, which stays as it is.
          homes: of each group and owner, as `ReadStage` gave them.
        """
        tables = dict(state.tables)
        for name, of_owners in homes.items():
            rows = self._view_rows[name]
            while rows < max(map(len, of_owners)):
                rows += rows // 4
            self._view_rows[name] = rows
            layout = self.records[name]
            _, _, dtype, tail = layout.fields[0]
            whole = np.zeros((len(of_owners), rows, *tail), dtype)
            for owner, homes_K in enumerate(of_owners):
                for at, records in self._parts(name, owner, homes_K, aside=True):
                    whole[owner, at] = layout.split(records, ROWS)
            tables[name] = jax.device_put(whole.reshape(-1, *tail), state.tables[name].sharding)
        return dataclasses.replace(state, tables=tables)

    def write(self, name: str, owner: int, homes_K: np.ndarray, records: np.ndarray) -> None:
        """Writes records of some homes, all different, unless all of them are at their initial values."""
        changed = (self._initial[name].make(owner, homes_K) != records).any(axis=1)
        changed |= self._stores[name][owner].is_written(homes_K)
        if changed.any():
            self._stores[name][owner].write(homes_K[changed], records[changed])

    def clear(self) -> None:
        """Forgets all rows: they are at their initial values."""
        for landing in self._landing:
            if landing.exception() is None:
                landing.result().exception()
        self._landing, self._waiting, self._writing, self._course = [], [], [], None
        self._flushed, self._budget.left = False, self._budget.limit
        for name, stores in self._stores.items():
            for store in stores:
                store.clear(self._places(name))

    def figures(self) -> dict[str, int]:
        """Counts since the last `clear`, over all groups and owners.

        Keys: "hits" and "misses", rows that batches named and that were, or were not, on the devices; "written_rows",
        of which the host has a record; "disk_rows", of which the disk has one; "records_read" and "records_written", by
        the disk; "records_read_aside", of these for evaluations and checkpoints; "disk_bytes", of its files, and
        "padded_bytes", of all written rows if they were there; "row_bytes", of the host's memory for rows, with those
        of devices that have no other; "directory_bytes", of what finds the rows.
        """
        names = ("hits", "misses", "written_rows", "disk_rows", "records_read", "records_written", "disk_bytes")
        found = dict.fromkeys((*names, "records_read_aside", "padded_bytes", "row_bytes"), 0)
        for name, stores in self._stores.items():
            for directory in self._course.directories[name] if self._course else ():
                found["hits"] += directory.hits
                found["misses"] += directory.misses
            for store in stores:
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
        found["directory_bytes"] = sum(map(_directory_bytes, self._groups.values()))
        if self._disk is not None:  # where each record is in memory, and whether it is on the disk
            found["directory_bytes"] += 5 * found["written_rows"]
        return found

    def about(self) -> list[str]:
        """A line for each cache: how many rows it holds of how many, and what the host keeps to find them."""
        lines = []
        for name, group in self._groups.items():
            homes, size = group.home_rows, self.records[name].bytes
            lines.append(
                f"{name}: a device has room for {group.rows:,} of its {homes:,} rows ({size} bytes each, with the "
                f"optimizer's state); the host finds all by {size_text(_directory_bytes(group))}"
            )
        return lines

    def close(self) -> None:
        """Ends the threads, and gives memory and files back."""
        self._lander.shutdown()
        self._writer.shutdown()
        self._readers.shutdown()
        for stores in self._stores.values():
            for store in stores:
                store.close()


def _directory_bytes(group: Group) -> int:
    return group.owners * (8 * group.home_rows + 28 * group.rows)


def dram_share(group: Group, groups: Sequence[Group], record_bytes: Mapping[str, int], limit: int) -> int:
    """Bytes of the host's memory for the records of each owner of a group, before a disk.

    Args:
      group: one of `groups`.
      groups: all that are behind caches.
      record_bytes: group name -> of its records.
      limit: bytes for all of them.
    """
    needs = {g.name: g.owners * g.home_rows * record_bytes[g.name] for g in groups}
    return limit * needs[group.name] // sum(needs.values()) // group.owners


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
