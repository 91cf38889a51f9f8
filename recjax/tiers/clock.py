"""The choice of numbered records that a memory of fixed size holds: a clock (Corbato 1968) over its slots.

Records come by being written. One that has to make room is the next one that was not written since the hand last came
by. Those that differ from the disk's are written there before, some more than needed at a time, so that they can be
sorted: these stay until their slots are taken.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_SHARE = 16  # of the slots: so many are made ready at least when room is needed
_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Slots for records that are to be written.

    Attributes:
      slots_K: int32, of each.
      gone: slots among them whose records leave the memory.
      stale: slots whose records the disk has to get before.
    """

    slots_K: np.ndarray
    gone: np.ndarray
    stale: np.ndarray


class Clock:
    """Slots of records, by their numbers. One thread writes; `slot_of` is read under the lock of `take`'s caller.

    Attributes:
      slot_of: int32, of each number up to the highest so far; -1 where the memory does not hold it.
      place_of: int32 [slots], the number of each slot's record; -1 where there is none.
    """

    def __init__(self, slots: int) -> None:
        """An empty memory."""
        self.slot_of = np.full(1024, -1, np.int32)
        self.place_of = np.full(slots, -1, np.int32)
        self._used = np.zeros(slots, bool)
        self._dirty = np.zeros(slots, bool)
        self._stays = np.zeros(slots, bool)
        self._free = slots  # slots at the end that were never used
        self._ready = _NONE  # slots that may be taken before the hand moves on, unless they were written again
        self._hand = 0

    @property
    def most(self) -> int:
        """Records that one call of `choose` has always room for."""
        return len(self.place_of) // 2

    def choose(self, places_K: np.ndarray) -> Choice:
        """Slots for up to `most` records, all different; nothing changes hands before `take`."""
        highest = int(places_K.max(initial=-1))
        if highest >= len(self.slot_of):
            more = np.full(max(highest + 1, 2 * len(self.slot_of)) - len(self.slot_of), -1, np.int32)
            self.slot_of = np.concatenate([self.slot_of, more])
        slots_K = self.slot_of[places_K]
        new = np.flatnonzero(slots_K < 0)
        count, size = len(new), len(self.place_of)
        taken = min(count, self._free)
        found = np.arange(size - self._free, size - self._free + taken, dtype=np.int32)
        self._free -= taken
        gone = stale = _NONE
        if taken < count:
            kept = np.concatenate([slots_K[slots_K >= 0], found])
            self._stays[kept] = True
            gone, stale = self._room(count - taken, size - len(kept))
            self._stays[kept] = False
        slots_K[new] = np.concatenate([found, gone])
        return Choice(slots_K, gone, stale)

    def _room(self, count: int, others: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots of `count` records that leave, and which the disk has to get; of `others` any may."""
        ready = self._ready
        ready = ready[~(self._used[ready] | self._dirty[ready] | self._stays[ready])]
        gone, self._ready = ready[:count], ready[count:]
        lacking = count - len(gone)
        if not lacking:
            return gone, _NONE
        self._stays[gone] = True
        go = self._turn(min(max(lacking, len(self.place_of) // _SHARE), others - len(gone)))
        self._stays[gone] = False
        self._ready = go[lacking:]
        return np.concatenate([gone, go[:lacking]]), go[self._dirty[go]]

    def _turn(self, wanted: int) -> np.ndarray:
        """Moves the hand on until it has passed so many slots whose records may leave; all marks on its way go."""
        found: list[np.ndarray] = []
        size = len(self.place_of)
        while wanted:
            end = min(size, self._hand + max(1024, 2 * wanted))
            ahead = np.arange(self._hand, end, dtype=np.int32)
            could = ahead[~(self._used[ahead] | self._stays[ahead])][:wanted]
            if len(could) == wanted:
                end = int(could[-1]) + 1
            self._used[self._hand : end] = False
            self._stays[could] = True  # until the hand is done, which may come round
            self._hand = end % size
            found.append(could)
            wanted -= len(could)
        go = np.concatenate([_NONE, *found])
        self._stays[go] = False
        return go

    def take(self, places_K: np.ndarray, choice: Choice) -> None:
        """Does what `choose` chose, once the disk has the stale records."""
        self._dirty[choice.stale] = False
        before = self.place_of[choice.gone]
        self.slot_of[before[before >= 0]] = -1
        self.slot_of[places_K] = choice.slots_K
        self.place_of[choice.slots_K] = places_K
        self._used[choice.slots_K] = True
        self._dirty[choice.slots_K] = True
