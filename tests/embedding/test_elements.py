"""Rows of bags end to end: places, sums, repeats, softmax and rectangles, against NumPy bag by bag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.embedding import segment_sums
from recjax.embedding.elements import Elements


def packed(bags, spare, dim=2):
    """`Elements` of bags of whole numbers, with `spare` places where there is nothing; and the bags."""
    rng = np.random.default_rng(len(bags))
    rows = [rng.integers(-9, 10, (n, dim)).astype(np.float32) for n in bags]
    segments = np.repeat(np.arange(len(bags) + 1), [*bags, spare]).astype(np.int32)
    together = np.concatenate([*rows, np.zeros((spare, dim), np.float32)])
    return Elements(jnp.asarray(together), jnp.asarray(segments), len(bags)), rows


@pytest.mark.full  # each shape compiles
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 5))
def test_as_numpy_bag_by_bag(platform, bags, spare, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_sums, "target_platform", lambda: platform)
        elements, rows = packed(bags, spare)
        there = sum(bags)
        assert elements.mask_L.tolist() == [True] * there + [False] * spare
        assert elements.positions_L[:there].tolist() == [place for n in bags for place in range(n)]
        assert elements.lengths_b.tolist() == bags
        np.testing.assert_array_equal(elements.sum(elements.rows_LxD), [each.sum(axis=0) for each in rows])
        of_samples = jnp.arange(1.0, len(bags) + 1)[:, None]
        repeated = elements.repeat(of_samples)[:, 0].tolist()
        assert repeated == [float(b + 1) for b, n in enumerate(bags) for _ in range(n)] + [0.0] * spare
        scores = jnp.concatenate([elements.rows_LxD[:there, 0], jnp.full(spare, jnp.nan)])
        weights = np.exp([x for each in rows for x in each[:, 0] - each[:, 0].max(initial=-99)])
        totals = np.repeat([np.exp(each[:, 0] - each[:, 0].max(initial=-99)).sum() for each in rows], bags)
        np.testing.assert_allclose(elements.softmax(scores), [*(weights / totals), *[0] * spare], rtol=1e-6)
        rows_bxHxD, mask_bxH = elements.padded(longest)
        for b, each in enumerate(rows):
            shown = each[:longest]
            np.testing.assert_array_equal(rows_bxHxD[b, : len(shown)], shown)
            assert mask_bxH[b].tolist() == [True] * len(shown) + [False] * (longest - len(shown))
            assert not rows_bxHxD[b, len(shown) :].any()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gradients(platform, monkeypatch):
    """Each is linear, so its gradient is the transpose of its matrix, which ones at each place in turn spell out."""
    monkeypatch.setattr(segment_sums, "target_platform", lambda: platform)
    elements, _ = packed([2, 0, 3], 2)
    L, b = 7, 3
    sums = jax.jacrev(lambda x: elements.sum(x[:, None])[:, 0])(jnp.zeros(L))
    np.testing.assert_array_equal(sums, [[1, 1, 0, 0, 0, 0, 0], [0] * L, [0, 0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(jax.jacrev(lambda x: elements.repeat(x[:, None])[:, 0])(jnp.zeros(b)), sums.T)

    def attended(scores):
        return elements.sum(elements.softmax(scores)[:, None] * elements.rows_LxD).sum()

    scores = jnp.asarray([0.3, -1, 0.2, 2, 0, 5, jnp.inf], jnp.float32)
    found = jax.grad(attended)(scores)
    p, values = np.exp([0.2, 2, 0]) / np.exp([0.2, 2, 0]).sum(), np.asarray(elements.rows_LxD[2:5].sum(axis=1))
    np.testing.assert_allclose(found[2:5], p * (values - p @ values), rtol=1e-5)
    assert found[5:].tolist() == [0, 0]


def test_a_rectangle_of_bags_that_differ_needs_its_width():
    elements, _ = packed([2, 0, 3], 2)
    with pytest.raises(ValueError, match="needs `longest`"):
        elements.padded()
