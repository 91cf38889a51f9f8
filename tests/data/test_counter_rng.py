"""Random orders: the same with every version of NumPy, and on every processor."""

import numpy as np
import pytest

from recjax.data import counter_rng


@pytest.mark.parametrize("most", [3, 2**64 - 1])
def test_a_permutation_is_the_stable_order_of_the_words_also_where_some_are_equal(monkeypatch, most):
    words = np.random.default_rng(0).integers(0, most, 5000, np.uint64, endpoint=True)
    monkeypatch.setattr(counter_rng, "bits", lambda count, *place: words[:count])
    for count in (0, 1, 1000, 5000):
        expected = sorted(range(count), key=words.tolist().__getitem__)  # Python's is stable
        assert counter_rng.permutation(count, 0, 0).tolist() == expected
