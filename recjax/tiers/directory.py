"""The rows of one owner that a cache holds, and those that leave for others: decided from the batches that follow.

A row that leaves is one that the batches in sight do not name, of these the least recently used; if all others are
named, the one that is named last (Belady 1966, within the window). Rows of this batch and of the next one stay: then a
row that leaves is not asked for again before the step after next, and its way out has a step's time.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

_NONE = np.zeros(0, np.int32)
_MANY = 32  # batches in sight, beyond which the last one that names a home is kept and not looked for
NEVER = np.iinfo(np.int32).max  # no batch in sight names a home
_STALE = 4  # entries of the queues for each slot of the cache, from which they are made anew


class CacheTooSmallError(Exception):
    """A cache cannot hold the rows of two batches; the argument is how many it would have to hold."""


@dataclasses.dataclass(frozen=True)
class Moves:
    """Rows that come into a cache for one batch, and those in whose place they come.

    Attributes:
      slots_K: int32, slots of the cache that get rows, all different.
      come_K: int32, homes of the rows that come there, ascending.
      leave_K: int32, homes of the rows that were there; -1 where there was none. Those with rows come first.
    """

    slots_K: np.ndarray
    come_K: np.ndarray
    leave_K: np.ndarray

    @property
    def leaving(self) -> int:
        """Number of rows that leave, which are the first ones of `leave_K`."""
        return int(np.count_nonzero(self.leave_K >= 0))


NO_MOVES = Moves(_NONE, _NONE, _NONE)


class NextUse:
    """The next batch in sight that names each home. Takes 8 bytes a home, and 4 for each that a batch names.

    Batches come into sight at one end and are admitted at the other. They are two runs. Of the older one it is known
    which batch names each of a batch's homes next: that was found once, backwards. Of the newer one only which of its
    batches names a home first. When the older run is used up, the newer one takes its place. So a batch costs as many
    steps as it names homes, however many batches are in sight.
    """

    def __init__(self, homes: int, batch: int, window: Iterable[np.ndarray]) -> None:
        """Batches in sight, the first of which has the number `batch`: of each the distinct homes that it names."""
        self._batch = batch  # the oldest one in sight
        self._newer = list(window)
        self._in_newer = np.full(homes, NEVER, np.int32)  # of each home the first batch of that run to name it
        self._in_older = np.full(homes, NEVER, np.int32)
        self._older: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()  # homes, their next batches
        self._take_newer()  # `_in_newer` is not that of a run yet

    def see(self, homes_U: np.ndarray) -> None:
        """Has another batch in sight."""
        number = self._batch + len(self._older) + len(self._newer)
        self._newer.append(homes_U)
        self._in_newer[homes_U[self._in_newer[homes_U] == NEVER]] = number

    def admit(self) -> None:
        """Leaves out the oldest batch."""
        if not self._older:
            self._take_newer()
        homes_U, next_U = self._older.popleft()
        self._in_older[homes_U] = next_U
        self._batch += 1

    def of(self, homes_K: np.ndarray) -> np.ndarray:
        """Batches that name these homes next: int32 [K]; NEVER where none in sight does."""
        return np.minimum(self._in_older[homes_K], self._in_newer[homes_K])

    def _take_newer(self) -> None:
        """Has the newer run take the place of the older one, which is used up."""
        for number, homes_U in reversed(list(enumerate(self._newer, self._batch))):
            self._older.appendleft((homes_U, self._in_older[homes_U]))
            self._in_older[homes_U] = number
            self._in_newer[homes_U] = NEVER
        self._newer = []


class Directory:
    """Slots of the homes of one owner's part. Batches are shown to it by `see`, and admitted in the same order.

    Takes 4 bytes for each home, 4 more where more than `_MANY` batches are in sight, 8 more once a row has left that is
    in sight, and some 24 for each slot.

    Attributes:
      slot_of: int32 [homes], the slot of each; -1 where the cache does not hold it.
      hits: rows that were there when a batch asked for them.
      misses: rows that were not.
    """

    def __init__(self, homes: int, slots: int) -> None:
        """An empty cache of `slots` rows out of `homes`."""
        self.slot_of = np.full(homes, -1, np.int32)
        self._home_of = np.full(slots, -1, np.int32)
        self._last = np.full(slots, -1, np.int64)  # of each slot: the last batch known to name its row
        self._window: collections.deque[np.ndarray] = collections.deque()  # homes of the batches seen, not admitted
        self._named: np.ndarray | None = None  # int32 [homes], the last batch to name each; None if few are seen
        self._next: NextUse | None = None  # None as long as no row has left that is in sight
        self._queues: dict[int, collections.deque[np.ndarray]] = {}  # slots by `_last`
        self._stamped: list[int] = []  # the batches that have queues, ascending
        self._entries = 0  # of all queues, stale ones too
        self._batch = 0  # the next one to admit
        self._filled = 0  # slots that have ever held a row: the first ones
        self.hits = self.misses = 0

    @property
    def seen(self) -> int:
        """Batches that were shown but not admitted."""
        return len(self._window)

    @property
    def oldest(self) -> np.ndarray:
        """Homes that the next batch to admit names: int32, ascending."""
        return self._window[0]

    def see(self, homes_U: np.ndarray) -> None:
        """Shows the next batch.

        Args:
          homes_U: int32, the distinct homes that it names, ascending.
        """
        number = self._batch + len(self._window)
        self._window.append(homes_U)
        if self._named is not None:
            self._named[homes_U] = number
        elif len(self._window) > _MANY:
            self._named = np.zeros(len(self.slot_of), np.int32)
            for of_window, named_U in enumerate(self._window, self._batch):
                self._named[named_U] = of_window
        if self._next is not None:
            self._next.see(homes_U)
        slots_U = self.slot_of[homes_U]
        self._stamp(slots_U[slots_U >= 0], number)

    def admit(self) -> Moves:
        """Makes room for the oldest batch that was seen, and moves on: `slot_of` has a slot for each of its homes.

        Raises:
          CacheTooSmallError: the cache cannot hold its rows and those of the next batch that was seen.
        """
        homes_U = self._window[0]
        come_K = homes_U[self.slot_of[homes_U] < 0]
        self.hits += len(homes_U) - len(come_K)
        self.misses += len(come_K)
        if len(come_K):
            moves = self._move(come_K)
        else:
            moves = NO_MOVES
        self._window.popleft()
        if self._next is not None:
            self._next.admit()
        self._batch += 1
        return moves

    def _move(self, come_K: np.ndarray) -> Moves:
        free = min(len(self._home_of) - self._filled, len(come_K))
        slots_K = np.arange(self._filled, self._filled + free, dtype=np.int32)
        self._filled += free
        if free < len(come_K):
            slots_K = np.concatenate([self._victims(len(come_K) - free), slots_K])
        leave_K = self._home_of[slots_K]
        self.slot_of[leave_K[leave_K >= 0]] = -1
        self._home_of[slots_K] = come_K
        self.slot_of[come_K] = slots_K
        last_K = self._latest(come_K)
        for number in np.unique(last_K).tolist():
            self._stamp(slots_K[last_K == number], number)
        return Moves(slots_K, come_K, leave_K)

    def _latest(self, come_K: np.ndarray) -> np.ndarray:
        """The last batch in sight that names each of these homes, which the oldest one names: int [K]."""
        if self._named is not None:
            return self._named[come_K]
        last_K = np.full(len(come_K), self._batch, np.int64)
        for number, homes_U in enumerate(self._window, self._batch):
            if number > self._batch and len(homes_U):
                at_K = np.minimum(np.searchsorted(homes_U, come_K), len(homes_U) - 1)
                last_K[homes_U[at_K] == come_K] = number
        return last_K

    def _stamp(self, slots_M: np.ndarray, number: int) -> None:
        """Notes that a batch names the rows in some slots."""
        if not len(slots_M):
            return
        self._last[slots_M] = number
        self._entries += len(slots_M)
        if number not in self._queues:
            self._queues[number] = collections.deque()
            bisect.insort(self._stamped, number)  # rows may come for a batch before those already seen
        self._queues[number].append(slots_M)
        if self._entries > _STALE * len(self._home_of):
            self._renew()

    def _renew(self) -> None:
        """Leaves stale entries out of the queues."""
        for number, queue in list(self._queues.items()):
            kept = [np.unique(slots_M[self._last[slots_M] == number]) for slots_M in queue]
            self._queues[number] = collections.deque(slots_M for slots_M in kept if len(slots_M))
            if not self._queues[number]:
                self._forget(number)
        self._entries = sum(len(slots_M) for queue in self._queues.values() for slots_M in queue)

    def _forget(self, number: int) -> None:
        """Drops the queue of a batch."""
        del self._queues[number]
        del self._stamped[bisect.bisect_left(self._stamped, number)]

    def _victims(self, count: int) -> np.ndarray:
        """Slots of `count` rows that leave, all different."""
        found: list[np.ndarray] = []
        while count and self._stamped and self._stamped[0] < self._batch:
            number = self._stamped[0]
            queue = self._queues[number]
            slots_M = queue.popleft()
            self._entries -= len(slots_M)
            slots_M = np.unique(slots_M[self._last[slots_M] == number])
            if len(slots_M) > count:
                queue.appendleft(slots_M[count:])
                self._entries += len(slots_M) - count
                slots_M = slots_M[:count]
            if not queue:
                self._forget(number)
            self._last[slots_M] = -1
            found.append(slots_M)
            count -= len(slots_M)
        if count:
            found.append(self._named_last(count, np.concatenate([_NONE, *found])))
        return np.concatenate(found)

    def _named_last(self, count: int, taken: np.ndarray) -> np.ndarray:
        """Slots of rows that batches in sight name, but neither this one nor the next."""
        if self._next is None:
            self._next = NextUse(len(self.slot_of), self._batch, self._window)
        next_S = self._next.of(self._home_of)
        next_S[taken] = -1
        next_S[self._home_of < 0] = -1
        could = np.flatnonzero(next_S > self._batch + 1)
        if len(could) < count:
            both = np.unique(np.concatenate(list(self._window)[:2]))
            raise CacheTooSmallError(len(both))
        least = np.partition(next_S[could], -count)[-count]
        could = could[next_S[could] >= least]  # not all are sorted, only those that may leave
        order = np.argsort(-next_S[could], kind="stable")[:count]
        slots_M = could[order].astype(np.int32)
        self._last[slots_M] = -1
        return slots_M
