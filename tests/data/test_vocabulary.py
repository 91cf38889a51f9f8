import collections

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.prepare.vocabulary import Vocabulary


def test_by_hand():
    vocabulary = Vocabulary.of(np.array([7, 3, 9, 3, 7, 5, 3, 9, 11]), min_count=2)
    assert vocabulary.values.tolist() == [3, 7, 9]  # 3 three times; 7 and 9 twice, the smaller first
    assert vocabulary.rows == 4
    assert vocabulary.encode(np.array([3, 7, 9, 5, 11, -1, 10**12])).tolist() == [1, 2, 3, 0, 0, 0, 0]


@given(
    seen=st.lists(st.text("abc", min_size=1, max_size=2), max_size=60),
    asked=st.lists(st.text("abc", min_size=1, max_size=3), max_size=20),
    least=st.integers(1, 4),
)
def test_rows_follow_frequency_then_value(seen, asked, least):
    counts = collections.Counter(seen)
    kept = sorted((value for value in counts if counts[value] >= least), key=lambda value: (-counts[value], value))
    vocabulary = Vocabulary.of(np.array(seen, np.str_), least)
    assert vocabulary.rows == len(kept) + 1
    expected = [kept.index(value) + 1 if value in kept else 0 for value in asked]
    assert vocabulary.encode(np.array(asked, np.str_)).tolist() == expected


def test_the_hash_tells_orders_apart():
    one, same, other = (Vocabulary.of(np.array(seen)) for seen in ([1, 1, 2], [1, 2, 1], [1, 2, 2]))
    assert one.sha256() == same.sha256() != other.sha256()
