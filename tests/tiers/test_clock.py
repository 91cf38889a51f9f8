"""The memory before a disk against a clock that looks at one slot at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recjax.tiers.clock import Clock


@given(st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=16), min_size=1, max_size=40))
def test_it_holds_what_was_written_last_and_loses_nothing(writes: list[set[int]]) -> None:
    """Of 32 slots; the disk has every record that is not there, as it was written last."""
    clock, slab = Clock(32), np.full(32, -1)
    disk: dict[int, int] = {}
    truth: dict[int, int] = {}
    for number, places in enumerate(writes):
        places_K = np.array(sorted(places), np.int32)
        choice = clock.choose(places_K)
        assert len(np.unique(choice.slots_K)) == len(places_K)
        disk |= dict(zip(clock.place_of[choice.stale].tolist(), slab[choice.stale].tolist(), strict=True))
        clock.take(places_K, choice)
        slab[choice.slots_K] = number
        truth |= dict.fromkeys(places, number)
        slots = {place: int(clock.slot_of[place]) for place in truth}
        held = {place: int(slab[slot]) for place, slot in slots.items() if slot >= 0}
        assert {place: held.get(place, disk.get(place)) for place in truth} == truth
        assert places <= held.keys() and len(held) == min(32, len(truth))
        assert len({slot for slot in slots.values() if slot >= 0}) == len(held)


def test_who_leaves_by_hand() -> None:
    """32 slots full of 0 to 31: all are marked, so that the hand takes the marks of all and begins anew."""
    clock = Clock(32)

    def write(*places: int) -> tuple[list[int], list[int]]:
        choice = clock.choose(np.array(places, np.int32))
        found = clock.place_of[choice.gone].tolist(), clock.place_of[choice.stale].tolist()
        clock.take(np.array(places, np.int32), choice)
        return found

    assert write(*range(16)) == write(*range(16, 32)) == ([], [])
    assert write(40) == ([0], [0, 1])  # a sixteenth of the slots is made ready: record 1 is on the disk, too
    assert write(3, 4) == ([], [])  # marked again
    assert write(41) == ([1], [])
    assert write(42, 43) == ([2, 5], [2, 5])
    assert write(1) == ([6], [6, 7])
    assert write(7) == ([], [])  # it was ready to leave, and is not any more
    assert write(44) == ([8], [8, 9])
