"""Marks of changed rows, against sets of homes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recjax.tiers import changes as marks
from recjax.tiers.changes import Changes

HOMES = 203


@pytest.fixture
def changes() -> Changes:
    groups: Any = {"a": SimpleNamespace(home_rows=HOMES, owners=2), "b": SimpleNamespace(home_rows=8, owners=1)}
    return Changes(groups)


def mark(changes: Changes, owner: int, homes: set[int]) -> None:
    changes.mark("a", owner, np.array(sorted(homes), np.int32))


def found(changes: Changes, owner: int, first: int = 0, last: int = HOMES) -> set[int]:
    return set(changes.homes("a", owner, first, last).tolist())


def test_they_are_those_that_were_marked_since_the_last_complete_checkpoint(
    changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random: marks, checkpoints that begin, and of these some that are complete."""
    monkeypatch.setattr(marks, "_AT_ONCE", 3)
    rng = np.random.default_rng(0)
    saved = 0
    new: list[set[int]] = [set(), set()]
    begun: list[set[int]] = [set(), set()]
    for step in range(300):
        what = rng.integers(0, 8)
        if what < 5:
            owner = int(rng.integers(0, 2))
            homes = set(rng.choice(HOMES, rng.integers(0, 30), replace=False).tolist())
            mark(changes, owner, homes)
            new[owner] |= homes
        elif what < 7:
            changes.begin()
            begun, new = [before | after for before, after in zip(begun, new, strict=True)], [set(), set()]
            saved += 1
        else:
            changes.complete((step,))
            begun = [set(), set()]
            assert changes.since == (step,)
        first, last = sorted(rng.integers(0, HOMES + 1, 2).tolist())
        for owner in (0, 1):
            assert found(changes, owner) == begun[owner]
            assert found(changes, owner, first, last) == {home for home in begun[owner] if first <= home < last}
            at_K = rng.permutation(HOMES).astype(np.int32)
            assert changes.marked("a", owner, at_K).tolist() == [home in new[owner] for home in at_K.tolist()]
    assert changes.begun == saved > 50
    assert not len(changes.homes("b", 0, 0, 8))


def test_after_clear_there_is_no_checkpoint_that_others_could_follow(changes: Changes) -> None:
    mark(changes, 0, {3, 202})
    changes.begin()
    changes.complete(("one",))
    mark(changes, 1, {0})
    changes.begin()
    mark(changes, 1, {5})
    changes.clear()
    assert changes.since == ()
    assert not changes.marked("a", 1, np.arange(HOMES, dtype=np.int32)).any()
    changes.begin()
    assert found(changes, 0) == found(changes, 1) == set()
