"""All rows that are not on the devices, and their traffic with the caches there.

For each batch of a training a `CacheStage` decides which rows come and which leave. What comes is read by threads while
the step before is under way; what leaves is copied to the host meanwhile, and written by one thread, in order. A row
that is asked for again before it is written is taken from the copy that waits to be written.

Of several processes each decides that for the rows of its own devices, which it reads and writes; all call the same
programs.

The truth about a cache is its `homes`, on the device: a batch that was prepared but never trained on moved nothing.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from recjax.errors import ConfigError
from recjax.parallel import distributed
from recjax.parallel.malloc import return_free
from recjax.parallel.mesh import own as parts_of_this_process
from recjax.parallel.mesh import put
from recjax.tiers.caches import ROWS, Arrays
from recjax.tiers.directory import NO_MOVES, Moves
from recjax.tiers.host_rows import ROWS_AT_ONCE, GroupRows, HostRows
from recjax.tiers.moves import Mover

_NONE = np.zeros(0, np.int32)
_READERS = 2
_WAITING_BYTES = 2**26  # of rows that have left and are not written; those of one step may be more

OfOwners = dict[str, list[Any]]  # group name -> something of each owner


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
      leaving: group name -> of each part that is here what has left, or is to leave, and is not written.
      waiting: reads to begin once the caches that the course before it filled are empty; None: they are.
      hits, misses: rows that its batches so far named and that were, or were not, in the caches of all processes.
    """

    def __init__(self, parts: Mapping[str, Sequence[int]]) -> None:
        """Not begun; `parts` are those of each group that are here."""
        self.leaving: dict[str, dict[int, list[Leaving]]] = {
            name: {part: [] for part in of_group} for name, of_group in parts.items()
        }
        self.waiting: list[Any] | None = []
        self.hits = self.misses = 0


@dataclasses.dataclass(frozen=True)
class Admission:
    """Rows that move before the step of a batch: see `Tier.admit`.

    Attributes:
      course: of the stage that made it.
      moves: group name -> of each part of its buffer; of parts that are elsewhere none.
      named: group name -> of each owner the homes that the batch names, int32, ascending.
      left: group name -> of each part that is here a future of the records of the rows that leave.
      records: the records of the rows that come, for each group and part; of parts that are elsewhere none.
      longest: group name -> the most rows that come to any part of it, here or elsewhere, and the most that leave one.
    """

    course: Course
    moves: dict[str, list[Moves]]
    named: OfOwners
    left: dict[str, dict[int, Future[np.ndarray]]]
    records: Future[dict[str, list[np.ndarray]]]
    longest: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


class Tier:
    """Rows of a plan that caches hold a part of. It belongs to one state at a time, the newest.

    In a profile its part of a step in the thread that trains is called admit.

    Attributes:
      rows: those of the host.
      read_while_waiting: rows that were asked for again before they were written.
    """

    def __init__(self, rows: HostRows) -> None:
        """Moves these rows, none of which is written yet, to caches and back."""
        self.rows = rows
        self._groups = rows.groups
        self._movers = {name: Mover(of_group.cached, rows.mesh) for name, of_group in self._groups.items()}
        self._lander = ThreadPoolExecutor(1, "tier-land")
        self._writer = ThreadPoolExecutor(1, "tier-write")
        self._readers = ThreadPoolExecutor(_READERS, "tier-read")
        self._lock = threading.Lock()
        self._course: Course | None = None
        self._admitted = False  # whether the caches hold the rows of a batch that was not trained on yet
        self._steps = 0  # that were begun
        self._flushed = False  # whether the store is up to date with the caches
        self._view_rows = dict.fromkeys(self._groups, 64)
        self._writing: list[Future[None]] = []
        self._landing: list[Future[Future[None]]] = []
        self._waiting: list[int] = []  # bytes of each of these
        self.read_while_waiting = 0

    def course(self) -> Course:
        """Returns a new course; it begins with the first of its batches that is admitted."""
        return Course({name: rows.local_parts for name, rows in self._groups.items()})

    # What the stage asks for, a batch or more ahead of the step.

    def prepare(self, course: Course, moves: Mapping[str, Mapping[int, Moves]], named: OfOwners) -> Admission:
        """Begins to read the rows that come for a batch.

        Args:
          course: of the stage that asks.
          moves: group name -> of each owner of which parts are here.
          named: group name -> of each owner the homes that the batch names, int32, ascending.

        Returns:
          An admission without `longest`, which is of all owners.
        """
        of_parts = {
            name: [moves[name].get(rows.group.owner_of(part), NO_MOVES) for part in range(rows.group.parts)]
            for name, rows in self._groups.items()
            if name in moves
        }
        left: dict[str, dict[int, Future[np.ndarray]]] = {}
        jobs: list[tuple[str, int, np.ndarray, list[Leaving]]] = []
        for name, of_group in of_parts.items():
            left[name] = {}
            for part in self._groups[name].local_parts:
                moved = of_group[part]
                with self._lock:
                    before = list(course.leaving[name][part])
                    records: Future[np.ndarray] = Future()
                    left[name][part] = records
                    if count := moved.leaving:
                        order_K = np.argsort(moved.leave_K[:count])
                        course.leaving[name][part].append(Leaving(moved.leave_K[:count][order_K], order_K, records))
                jobs.append((name, part, moved.come_K, before))
        read: Future[dict[str, list[np.ndarray]]] = Future()

        def begin() -> None:
            self._readers.submit(self._read_all, jobs, read)

        with self._lock:
            if course.waiting is None:
                begin()
            else:
                course.waiting.append(begin)
        return Admission(course, of_parts, named, left, read)

    def _read_all(
        self, jobs: Sequence[tuple[str, int, np.ndarray, list[Leaving]]], into: Future[dict[str, list[np.ndarray]]]
    ) -> None:
        try:
            records = {
                name: [np.empty((0, rows.cached.record_bytes), np.uint8)] * rows.group.parts  # of parts elsewhere
                for name, rows in self._groups.items()
            }
            for name, part, homes_K, before in jobs:
                records[name][part] = self._read_behind(self._groups[name], part, homes_K, before)
            into.set_result(records)
        except BaseException as error:
            into.set_exception(error)

    def _read_behind(self, rows: GroupRows, part: int, homes_K: np.ndarray, before: Sequence[Leaving]) -> np.ndarray:
        """Records of homes, of which some may be among those that left before and are not written."""
        records = np.empty((len(homes_K), rows.cached.record_bytes), np.uint8)
        stored_K = np.ones(len(homes_K), bool)
        for leaving in before:  # the latest one counts
            at_K = np.minimum(np.searchsorted(leaving.homes_K, homes_K), len(leaving.homes_K) - 1)
            if len(waiting := np.flatnonzero(leaving.homes_K[at_K] == homes_K)):
                records[waiting] = leaving.records.result()[leaving.order_K[at_K[waiting]]]
                stored_K[waiting] = False
        self.read_while_waiting += len(homes_K) - int(stored_K.sum())
        here = np.flatnonzero(stored_K)
        for at, stored in rows.parts(part, homes_K[here]):
            records[here[at]] = stored
        return records

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
        if self._steps == 1:
            return_free()  # the first step was compiled, which leaves much of it
        self._admitted, self._flushed = True, False
        self.rows.mark(admission.named)
        records = admission.records.result()
        tables, slots, homes = dict(state.tables), dict(state.slots), dict(state.homes)
        for name, moves in admission.moves.items():
            buffers = {ROWS: tables[name], **slots[name]}
            counts = [own.leaving for own in moves]
            come, leave = admission.longest[name]
            if leave:
                of_parts = [own.slots_K[:count] for own, count in zip(moves, counts, strict=True)]
                taken = self._movers[name].take(buffers, of_parts, leave)
                rows = self._groups[name]
                self._hold_back(sum(counts[part] for part in rows.local_parts) * rows.cached.record_bytes)
                left = admission.left.pop(name)  # nobody keeps rows longer than they are needed
                self._landing.append(self._lander.submit(self._land, course, name, moves, taken, left))
                del left
            if come:
                of_parts, homes_of = [own.slots_K for own in moves], [own.come_K for own in moves]
                buffers, homes[name] = self._movers[name].put(
                    buffers, homes[name], of_parts, homes_of, records.pop(name), come
                )
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
        left: dict[int, Future[np.ndarray]],
    ) -> Future[None]:
        """Receives rows that leave, and has them written; a slow disk keeps nobody from those that wait for it."""
        counts = [moves[part].leaving for part in left]
        try:
            records = self._on_host(name, counts, taken)
        except BaseException as error:
            for future in left.values():
                future.set_exception(error)
            raise
        for future, of_part in zip(left.values(), records, strict=True):
            future.set_result(of_part)
        return self._writer.submit(self._write_left, course, name, moves, left)

    def _write_left(
        self, course: Course, name: str, moves: Sequence[Moves], left: dict[int, Future[np.ndarray]]
    ) -> None:
        for part, records in left.items():
            if count := moves[part].leaving:
                self._groups[name].put(part, moves[part].leave_K[:count], records.result())
                with self._lock:
                    leaving = course.leaving[name][part]
                    leaving[:] = [other for other in leaving if other.records is not records]

    def _on_host(self, name: str, counts: Sequence[int], taken: list[tuple[int, Arrays]]) -> list[np.ndarray]:
        """Records of the rows of a group that `Mover.take` took, so many of each part that is here."""
        cached = self._groups[name].cached
        records = [np.empty((count, cached.record_bytes), np.uint8) for count in counts]
        for start, arrays in taken:
            host = {field: parts_of_this_process(x) for field, x in arrays.items()}
            size = len(host[ROWS]) // len(counts)
            for n, count in enumerate(counts):
                stop = min(count - start, size)
                if stop > 0:
                    of_part = slice(n * size, n * size + stop)
                    records[n][start : start + stop] = cached.join({field: x[of_part] for field, x in host.items()})
            arrays.clear()  # on the devices, and their copies on the host
        return records

    def _begin(self, state: Any, course: Course) -> Any:
        """Empties the caches for a course whose directories begin empty."""
        self.flush(state)
        homes = dict(state.homes)
        for name in self._groups:
            homes[name] = put(np.full(homes[name].shape, -1, np.int32), homes[name].sharding)
        with self._lock:
            waiting, course.waiting = course.waiting or [], None
            self._course = course
        for begin in waiting:
            begin()
        return dataclasses.replace(state, homes=homes)

    def flush(self, state: Any) -> None:
        """Brings the store up to date with the caches of a state, which stay as they are. All processes call it."""
        self._settle(0)
        return_free()  # an evaluation or a checkpoint begins, which takes memory of its own
        if self._flushed:
            return
        for name, rows in self._groups.items():
            homes_PxR = parts_of_this_process(state.homes[name]).reshape(-1, rows.group.rows)
            homes = dict(zip(rows.local_parts, homes_PxR, strict=True))
            slots = {part: self._unsaved(name, part, homes_R) for part, homes_R in homes.items()}
            filled = max(map(len, slots.values()))
            most = max(map(int, distributed.gather("rows of a cache", str(filled))))
            buffers = {ROWS: state.tables[name], **state.slots[name]}
            for first in range(0, most, ROWS_AT_ONCE):
                some = {part: own[first : first + ROWS_AT_ONCE] for part, own in slots.items()}
                of_parts = [some.get(part, _NONE) for part in range(rows.group.parts)]
                taken = self._movers[name].take(buffers, of_parts, min(most - first, ROWS_AT_ONCE))
                records = self._on_host(name, [len(own) for own in some.values()], taken)
                for writing in self._writing[:-2]:  # so that no more than that waits in memory
                    writing.result()
                self._writing.append(self._writer.submit(self._write, name, homes, some, records))
        for writing in self._writing:
            writing.result()
        self._writing, self._flushed = [], True

    def _unsaved(self, name: str, part: int, homes_R: np.ndarray) -> np.ndarray:
        """Slots of a part's cache whose rows the host may have no record of as they are, int32."""
        slots_K = np.flatnonzero(homes_R >= 0).astype(np.int32)
        changes = self.rows.changes
        owner = self._groups[name].group.owner_of(part)
        return slots_K if changes is None else slots_K[changes.marked(name, owner, homes_R[slots_K])]

    def begin_checkpoint(self, state: Any) -> None:
        """Does what `flush` does; from here on, the rows that change are for the checkpoint after this one."""
        self.flush(state)
        if self.rows.changes is not None:
            self.rows.changes.begin()

    def _write(
        self, name: str, homes: dict[int, np.ndarray], slots: dict[int, np.ndarray], records: Sequence[np.ndarray]
    ) -> None:
        for (part, own), new in zip(slots.items(), records, strict=True):
            if len(own):
                self._groups[name].put(part, homes[part][own], new)

    def _raise(self) -> None:
        """Raises what went wrong in the writer's thread."""
        while self._landing and self._landing[0].done() and self._landing[0].result().done():
            self._waiting.pop(0)
            self._landing.pop(0).result().result()

    def _hold_back(self, size: int) -> None:
        """Waits until rows that wait to be written leave memory for so many bytes more."""
        self._settle(max(0, _WAITING_BYTES - size))
        self._waiting.append(size)

    def wait_for_writes(self) -> None:
        """Waits until all rows that have left are written.

        Raises:
          TrainingError: the store cannot take them.
        """
        self._settle(0)

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
        self._steps += 1

    def view(self, state: Any, homes: OfOwners) -> Any:
        """A state to predict one batch with: its tables hold the rows of the batch and no others.

        Args:
          state: the `TrainState`, which stays as it is.
          homes: of each group and owner, as `ReadStage` gave them.
        """
        tables = dict(state.tables)
        for name, of_owners in homes.items():
            rows, size = self._groups[name], self._view_rows[name]
            while size < max(map(len, of_owners)):
                size += size // 4
            self._view_rows[name] = size
            _, _, dtype, tail = rows.cached.fields[0]
            whole = np.zeros((rows.group.parts, size, *tail), dtype)
            for part in rows.local_parts:
                for at, records in rows.parts(part, of_owners[rows.group.owner_of(part)], aside=True):
                    whole[part, at] = rows.cached.split(records, ROWS)
            tables[name] = put(whole.reshape(-1, *tail), state.tables[name].sharding)
        return dataclasses.replace(state, tables=tables)

    def clear(self) -> None:
        """Forgets all rows: they are at their initial values."""
        for landing in self._landing:
            if landing.exception() is None:
                landing.result().exception()
        self._landing, self._waiting, self._writing, self._course = [], [], [], None
        self._flushed = False
        self.rows.clear()

    def figures(self) -> dict[str, int]:
        """Returns those of `HostRows.figures`; "hits" and "misses", rows that were, or were not, on the devices.

        The latter count the rows that batches named since the last `clear`, a row of which several parts hold columns
        once. Counts of several processes are added up, for which all of them call this; bytes of memory are those of
        this process alone.
        """
        course, own = self._course, self.rows.figures()
        of_all = [json.loads(text) for text in distributed.gather("figures of tiers", json.dumps(own))]
        memory = ("row_bytes", "directory_bytes")
        summed = {name: own[name] if name in memory else sum(of[name] for of in of_all) for name in own}
        return {"hits": course.hits if course else 0, "misses": course.misses if course else 0, **summed}

    def close(self) -> None:
        """Ends the threads, and gives memory and files back."""
        self._lander.shutdown()
        self._writer.shutdown()
        self._readers.shutdown()
        self.rows.close()
