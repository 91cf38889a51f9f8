"""Sorting on the devices, against NumPy's stable sort."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.embedding.segment_sums import in_order

LARGEST = 2**31 - 1


@pytest.mark.parametrize("pairs", [False, True], ids=["as here", "as on a GPU"])
def test_equal_keys_keep_their_order(monkeypatch, pairs):
    if pairs:
        monkeypatch.setattr("recjax.embedding.segment_sums.target_platform", lambda: "gpu")
    sort = jax.jit(lambda keys: in_order(keys))

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.sampled_from([0, 1, 5, 6, 2**16, LARGEST - 1, LARGEST]), min_size=17, max_size=17))
    def check(keys):
        array = np.array(keys, np.int32)
        found, order = sort(array)
        expected = np.argsort(array, kind="stable")
        np.testing.assert_array_equal(order, expected)
        np.testing.assert_array_equal(found, array[expected])
        assert found.dtype == order.dtype == np.int32

    check()
