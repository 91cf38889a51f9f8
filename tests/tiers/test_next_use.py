"""The next batch that names a home against a look at all batches in sight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recjax.tiers.directory import NEVER, NextUse

HOMES = 6
SETS = st.sets(st.integers(0, HOMES - 1), max_size=4)


def array(homes: set[int]) -> np.ndarray:
    return np.array(sorted(homes), np.int32)


@given(st.lists(SETS, max_size=6), st.lists(st.one_of(SETS, st.none()), max_size=30), st.integers(0, 9))
def test_next_uses_are_those_of_the_definition(window: list[set[int]], then: list[set[int] | None], batch: int) -> None:
    """Batches come into sight and, for None, are admitted; in between the window may be empty."""
    window = list(window)
    following = NextUse(HOMES, batch, map(array, window))
    for homes in then:
        if homes is not None:
            window.append(homes)
            following.see(array(homes))
        elif window:
            window.pop(0)
            following.admit()
            batch += 1
        named = list(enumerate(window, batch))
        expected = [next((number for number, of in named if home in of), NEVER) for home in range(HOMES)]
        assert following.of(np.arange(HOMES)).tolist() == expected
