"""The keys that have a row of one table: which come, which leave, decided batch by batch.

Let a batch name some keys, each as often as it does: these are its sightings. Then

- a key that has a row keeps it;
- of the others those qualify that have been sighted `admit_after` times, with this batch. By age they come in the order
  in which the batch names them; by frequency those with more sightings first, and then in that order;
- rows that were never given are given first, ascending. Then a key takes the row of another: by age of that which was
  named least recently, by frequency of that with the fewest sightings, if these are fewer than its own; of several such
  the least recently named, and of these the lowest row. Rows that the batch names stay;
- who gets no row looks up the row of unknown keys, and waits with its sightings. When more than `waiting` keys wait, a
  quarter of these is forgotten: those sighted least recently, of these the lowest keys.

All this is a function of the batches in their order. A key that leaves is forgotten: it comes back as a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from recjax.embedding.dynamic.key_index import ABSENT, KeyIndex, distinct_keys
from recjax.embedding.routing.keys import distinct
from recjax.embedding.spec import DynamicIds

COUNTS = ("admitted", "evicted", "turned_away", "forgotten", "ids", "unknown_ids")
_MOST = np.int64(2**31 - 1)  # sightings are counted up to here
_LEAST_LOW = 4096
_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Keys that get rows before the step of a batch: int32 [K] all different, and int64 [K]."""

    rows_K: np.ndarray = dataclasses.field(default_factory=lambda: _NONE)
    keys_K: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))


class IdMap:
    """The map of one table.

    Attributes:
      options: how it decides.
      held: keys that have a row.
      counts: COUNTS since the beginning: keys that got a row; that lost theirs; times that a batch named a key which
        qualified and got none; keys that waited and were forgotten; ids of all batches, and those of them that looked
        up the row of unknown keys.
    """

    def __init__(self, options: DynamicIds) -> None:
        """No key has a row."""
        self.options, self._by_age = options, options.evict == "age"
        self._most = options.waiting or options.capacity
        self.clear()

    def clear(self) -> None:
        """Starts again from nothing."""
        rows = self.options.capacity
        self._index, self._batch, self.held = KeyIndex(rows), 0, 0
        self._key_R = np.zeros(rows, np.int64)
        self._last_R = np.zeros(rows + 1, np.int64)  # the batch that named it last; with the row of unknown keys
        self._sightings_R = np.zeros(0 if self._by_age else rows + 1, np.int64)
        self._low, self._edge = np.zeros(0, np.int64), -1
        self._waiting = _Waiting()
        self.counts = dict.fromkeys(COUNTS, 0)

    @property
    def unknown(self) -> int:
        """The row of unknown keys: the one after those that keys have."""
        return self.options.capacity

    @property
    def waiting(self) -> int:
        """Keys that wait."""
        return len(self._waiting.index)

    def find(self, keys_L: np.ndarray) -> np.ndarray:
        """The rows of some keys as they are now, int32 [L]."""
        rows_L = self._index.find(keys_L)
        rows_L[rows_L == ABSENT] = self.unknown
        return rows_L

    def advance(self, keys_L: np.ndarray) -> tuple[np.ndarray, Admitted]:
        """Takes in the next batch.

        Args:
          keys_L: int64, all ids of the batch in its order.

        Returns:
          the row of each, int32 [L]; and which rows must be drawn before the step.
        """
        self._batch += 1
        rows_L = self._index.find(keys_L)
        new_M = np.flatnonzero(rows_L == ABSENT)
        rows_L[new_M] = self.unknown
        self._last_R[rows_L] = self._batch
        if not self._by_age:
            self._count(rows_L)
        self.counts["ids"] += len(keys_L)
        if not len(new_M):
            return rows_L, Admitted()
        first_U, number_M = distinct_keys(keys_L[new_M])
        keys_U, sightings_U = keys_L[new_M[first_U]], np.bincount(number_M)
        counted = self.options.admit_after > 1 or not self._by_age  # else it does not matter how often
        if counted:
            sightings_U = np.minimum(sightings_U + self._waiting.sightings(keys_U), _MOST)
        qualified_Q = np.flatnonzero(sightings_U >= self.options.admit_after)
        if not self._by_age:
            qualified_Q = qualified_Q[np.argsort(-sightings_U[qualified_Q], kind="stable")]
        rows_K = self._rows_for(sightings_U[qualified_Q])
        come_K = qualified_Q[: len(rows_K)]
        self._give(rows_K, keys_U[come_K], sightings_U[come_K])
        self.counts["turned_away"] += len(qualified_Q) - len(rows_K)
        if counted:
            stay_U = np.ones(len(keys_U), bool)
            stay_U[come_K] = False
            self._waiting.drop(keys_U[come_K])
            self._waiting.note(keys_U[stay_U], sightings_U[stay_U], self._batch)
            self.counts["forgotten"] += self._waiting.forget(self._most)
        row_U = np.full(len(keys_U), self.unknown, np.int32)
        row_U[come_K] = rows_K
        rows_L[new_M] = row_M = row_U[number_M]
        self.counts["unknown_ids"] += int(np.count_nonzero(row_M == self.unknown))
        return rows_L, Admitted(rows_K, keys_U[come_K])

    def _count(self, rows_L: np.ndarray) -> None:
        """Adds the sightings of rows."""
        if len(self._sightings_R) <= 4 * len(rows_L):
            self._sightings_R += np.bincount(rows_L, minlength=len(self._sightings_R))
            np.minimum(self._sightings_R, _MOST, out=self._sightings_R)
        else:
            rows_U, inverse_L = distinct(rows_L, len(self._sightings_R))
            self._sightings_R[rows_U] = np.minimum(self._sightings_R[rows_U] + np.bincount(inverse_L), _MOST)

    def _rows_for(self, sightings_Q: np.ndarray) -> np.ndarray:
        """Rows for as many of some keys as can have one, the first ones of them: int32 [K]."""
        free = min(self.options.capacity - self.held, len(sightings_Q))
        rows_K = np.arange(self.held, self.held + free)
        left_Q = sightings_Q[free:]
        if len(left_Q):
            victims_K = self._victims(len(left_Q))
            if not self._by_age:  # here theirs fall, and those of the victims rise
                better = self._sightings_R[victims_K] < left_Q[: len(victims_K)]
                victims_K = victims_K[: int(np.argmin(better)) if not better.all() else len(better)]
            rows_K = np.concatenate([rows_K, victims_K])
        return rows_K.astype(np.int32)

    def _give(self, rows_K: np.ndarray, keys_K: np.ndarray, sightings_K: np.ndarray) -> None:
        taken_K = rows_K[rows_K < self.held]
        self._index.remove(self._key_R[taken_K])
        self._index.add(keys_K, rows_K)
        self._key_R[rows_K], self._last_R[rows_K] = keys_K, self._batch
        if not self._by_age:
            self._sightings_R[rows_K] = sightings_K
            self._low = np.union1d(self._low, rows_K)  # they may have fewer than others that are not in it
        self.counts["admitted"] += len(keys_K)
        self.counts["evicted"] += len(taken_K)
        self.held += len(rows_K) - len(taken_K)

    def _scores(self, rows_M: np.ndarray) -> np.ndarray:
        """The lower, the sooner a row is taken; where equal, the lower row is."""
        last_M = self._last_R[rows_M]
        return last_M if self._by_age else self._sightings_R[rows_M] << 32 | last_M

    def _victims(self, count: int) -> np.ndarray:
        """The first rows that would be taken, as many as there are of `count`, in this order: int64 [K].

        `_low` has all rows whose scores are below `_edge`. A score falls when a row is given alone, so the lowest of
        all is mostly found among few.
        """
        for looked_at in ("low", "all"):
            if looked_at == "all":
                rows_R = np.arange(self.held)
                scores_R = self._scores(rows_R)
                open_R = scores_R[self._last_R[: self.held] < self._batch]
                most = min(len(open_R), max(2 * count, self.held // 16, _LEAST_LOW))
                if not most:
                    return np.zeros(0, np.int64)
                self._edge = int(np.partition(open_R, most - 1)[most - 1]) + 1
                self._low = rows_R[scores_R < self._edge]
            rows_M = self._low[self._scores(self._low) < self._edge]
            self._low = rows_M
            rows_M = rows_M[self._last_R[rows_M] < self._batch]
            if len(rows_M) >= count:
                break
        scores_M = self._scores(rows_M)
        if len(rows_M) > count:
            few = np.flatnonzero(scores_M <= np.partition(scores_M, count - 1)[count - 1])
            rows_M, scores_M = rows_M[few], scores_M[few]
        return rows_M[np.argsort(scores_M, kind="stable")[:count]]

    def state(self) -> dict[str, np.ndarray]:
        """All of it as arrays, independent of how it is held: a copy."""
        rows = slice(self.held)
        return {
            "keys": self._key_R[rows].copy(),
            "last": self._last_R[rows].copy(),
            "sightings": self._sightings_R[rows].copy(),
            **{f"waiting_{name}": array for name, array in self._waiting.state().items()},
            "counts": np.array([self._batch, *(self.counts[name] for name in COUNTS)], np.int64),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on where the map was that gave this `state`."""
        self.clear()
        self._batch, *counts = (int(count) for count in state["counts"])
        self.counts = dict(zip(COUNTS, counts, strict=True))
        self.held = held = len(state["keys"])
        self._key_R[:held], self._last_R[:held] = state["keys"], state["last"]
        if not self._by_age:
            self._sightings_R[:held] = state["sightings"]
        self._index.add(self._key_R[:held], np.arange(held, dtype=np.int32))
        self._waiting.load({name: state[f"waiting_{name}"] for name in ("keys", "sightings", "last")})


class _Waiting:
    """Keys without a row: how often each was sighted, and in which batch last."""

    def __init__(self) -> None:
        self.load(dict.fromkeys(("keys", "sightings", "last"), np.zeros(0, np.int64)))

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._keys_W, self._sightings_W = np.array(state["keys"]), np.array(state["sightings"])
        self._last_W, self._end = np.array(state["last"]), len(self._keys_W)
        self.index = KeyIndex(self._end)
        self.index.add(self._keys_W, np.arange(self._end, dtype=np.int32))

    def state(self) -> dict[str, np.ndarray]:
        there = np.flatnonzero(self._last_W[: self._end] >= 0)
        there = there[np.argsort(self._keys_W[there])]
        arrays = {"keys": self._keys_W, "sightings": self._sightings_W, "last": self._last_W}
        return {name: array[there] for name, array in arrays.items()}

    def sightings(self, keys_U: np.ndarray) -> np.ndarray:
        """0 of keys that do not wait."""
        at_U = self.index.find(keys_U)
        return np.where(at_U == ABSENT, 0, self._sightings_W[at_U] if self._end else 0)

    def drop(self, keys_K: np.ndarray) -> None:
        """Forgets keys, of which some may not be there."""
        at_K = self.index.find(keys_K)
        there_K = at_K != ABSENT
        self.index.remove(keys_K[there_K])
        self._last_W[at_K[there_K]] = -1

    def note(self, keys_U: np.ndarray, sightings_U: np.ndarray, batch: int) -> None:
        """Notes the sightings of keys in a batch."""
        at_U = self.index.find(keys_U)
        new_U = np.flatnonzero(at_U == ABSENT)
        at_U[new_U] = self._end + np.arange(len(new_U))
        self._end += len(new_U)
        if self._end > len(self._keys_W):
            more = np.zeros(self._end, np.int64)  # so many again
            self._keys_W, self._sightings_W, self._last_W = (
                np.concatenate([array, more]) for array in (self._keys_W, self._sightings_W, self._last_W)
            )
        self.index.add(keys_U[new_U], at_U[new_U])
        self._keys_W[at_U], self._sightings_W[at_U], self._last_W[at_U] = keys_U, sightings_U, batch

    def forget(self, most: int) -> int:
        """Forgets a quarter of `most` keys if there are more; returns how many it has forgotten."""
        if len(self.index) <= most and self._end <= 2 * most + _LEAST_LOW:
            return 0
        state, before = self.state(), len(self.index)
        if before > most:
            kept = np.sort(np.argsort(state["last"], kind="stable")[before - (most - most // 4) :])
            state = {name: array[kept] for name, array in state.items()}
        self.load(state)
        return before - len(self.index)
