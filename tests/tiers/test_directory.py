"""The directory of a cache against a dict that does the same by its definition."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.tiers import directory as directories
from recjax.tiers.directory import CacheTooSmallError, Directory


class Plain:
    """A cache by definition: who leaves is decided by a look at every row."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used: dict[int, int] = {}  # home -> the last batch that named it, so far as seen
        self.cached: set[int] = set()

    def admit(self, batch: int, window: list[set[int]]) -> set[int]:
        """Returns the homes that leave for the first batch of the window."""
        for number, homes in enumerate(window, batch):
            self.used |= dict.fromkeys(homes, number)
        come, pinned = window[0] - self.cached, set().union(*window[:2])
        left: set[int] = set()
        while len(self.cached) - len(left) + len(come) > self.slots:
            could = self.cached - left - pinned
            if not could:
                raise CacheTooSmallError
            following = {h: next((k for k, homes in enumerate(window) if h in homes), len(window)) for h in could}
            farthest = max(following.values())
            could = {home for home in could if following[home] == farthest}
            if farthest == len(window):  # none in sight: the least recently used
                oldest = min(self.used[home] for home in could)
                could = {home for home in could if self.used[home] == oldest}
            self.choices = could
            left.add(min(could))
        self.cached = self.cached - left | come
        return left


def shown(directory: Directory, homes: set[int]) -> None:
    directory.see(np.array(sorted(homes), np.int32))


@given(
    st.lists(st.sets(st.integers(0, 14), max_size=5), min_size=1, max_size=40),
    st.integers(4, 15),
    st.sampled_from([1, 2, 3, 4, 40]),  # the last one sees all: Belady's rule
    st.sampled_from([32, 2, 1]),
)
def test_rows_leave_as_the_definition_says(batches: list[set[int]], slots: int, ahead: int, many: int) -> None:
    with mock.patch.object(directories, "_MANY", many):
        rows_leave_as_the_definition_says(batches, slots, ahead)


def rows_leave_as_the_definition_says(batches: list[set[int]], slots: int, ahead: int) -> None:
    directory, plain = Directory(15, slots), Plain(slots)
    held: dict[int, int] = {}
    for batch in range(len(batches)):
        window = batches[batch : batch + 1 + ahead]
        for homes in window[directory.seen :]:
            shown(directory, homes)
        needed = len(set().union(*window[:2]))
        if needed > slots:
            before = set(held.values())
            try:
                directory.admit()
            except CacheTooSmallError as short:
                assert short.args[0] == needed
                assert len(before | window[0]) > slots
                return
            plain.cached = {home for home in range(15) if directory.slot_of[home] >= 0}
            held = {int(directory.slot_of[home]): home for home in plain.cached}
            for number, homes in enumerate(window, batch):
                plain.used |= dict.fromkeys(homes, number)
            continue
        was = set(plain.cached)
        moves = directory.admit()
        count = moves.leaving
        assert (moves.leave_K[count:] < 0).all()
        left = set(moves.leave_K[:count].tolist())
        assert [held[slot] for slot in moves.slots_K[:count].tolist()] == moves.leave_K[:count].tolist()
        assert not {slot for slot in moves.slots_K[count:].tolist()} & held.keys()
        assert set(moves.come_K.tolist()) == window[0] - was
        # Of rows that are alike any may leave: so many of each kind as by the definition, and nobody else.
        expected = plain.admit(batch, window)
        kind = {
            home: (next((k for k, homes in enumerate(window) if home in homes), len(window)), plain.used[home])
            for home in was
        }
        alike = [
            sorted(k if k[0] == len(window) else (k[0], 0) for k in map(kind.__getitem__, s)) for s in (left, expected)
        ]
        assert alike[0] == alike[1]
        plain.cached = was - left | window[0]
        held = {slot: home for slot, home in held.items() if home not in left}
        held |= dict(zip(moves.slots_K.tolist(), moves.come_K.tolist(), strict=True))
        assert {home: int(directory.slot_of[home]) for home in range(15) if directory.slot_of[home] >= 0} == {
            home: slot for slot, home in held.items()
        }
    assert directory.hits + directory.misses == sum(map(len, batches))


# Batches -> rows that leave for each of the first ones, by hand: three slots, three further batches in sight.
NONE: set[int] = set()
BY_HAND = {
    # For 3 one of 0 and 1 has to leave. 1 is named one batch later.
    "named last": ([NONE, NONE, {0, 1}, {2, 3}, NONE, {0}, {1}], [NONE, NONE, NONE, {1}]),
    # 0 has come for the batch before, and this one names it. Who leaves for 4 is 5, though it is named again.
    "named now": ([NONE, NONE, {0, 5}, {0, 3, 4}, NONE, {5}], [NONE, NONE, NONE, {5}]),
    # Nobody is in sight at the end. 1 comes when its last use, by batch 3, is known, and that of 0, by 4, is noted.
    "used first": ([{0}, {1}, {2}, {1}, {0}, {2}, {3}], [*[NONE] * 6, {1}]),
    "used once": ([{0}, NONE, NONE, NONE, {1}, {0}, {2}, {3}], [*[NONE] * 7, {1}]),
}


@pytest.mark.parametrize("many", [32, 3, 1])
@pytest.mark.parametrize("case", BY_HAND)
def test_rows_leave_as_by_hand(case: str, many: int) -> None:
    batches, expected = BY_HAND[case]
    directory = Directory(6, 3)
    with mock.patch.object(directories, "_MANY", many):
        for batch, leave in enumerate(expected):
            for homes in batches[batch + directory.seen : batch + 4]:
                shown(directory, homes)
            moves = directory.admit()
            assert set(moves.leave_K[: moves.leaving].tolist()) == leave, batch


def test_a_row_of_the_next_batch_stays() -> None:
    directory = Directory(9, 3)
    for homes in ({0, 1, 2}, {0, 3}, {0, 4}):
        shown(directory, homes)
    assert directory.admit().leaving == 0
    assert directory.admit().leave_K.tolist() in ([1], [2])
    with pytest.raises(CacheTooSmallError, match="^4$"):
        small = Directory(9, 2)
        shown(small, {0, 1})
        shown(small, {0, 2})
        small.admit()
        shown(small, {1, 3})
        small.admit()
