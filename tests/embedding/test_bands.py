"""Bands of rows against plain Python sets: numbers without gaps, both ways, in NumPy and JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.embedding.bind import bands
from recjax.embedding.optim import Sgd
from recjax.embedding.row_order import FEW, Band, RowOrder
from recjax.embedding.segment import RowIds, Segment
from recjax.embedding.spec import TableSpec

LARGEST = 2**31 - 1


@st.composite
def some_bands(draw):
    """A band of a small table, and the positions of its rows."""
    rows = draw(st.integers(1, 40))
    chosen = sorted(draw(st.sets(st.integers(0, rows - 1))))
    inverted = draw(st.booleans())
    inside = sorted(set(range(rows)) - set(chosen)) if inverted else chosen
    return Band(rows, tuple(chosen), inverted), inside


@settings(max_examples=300, deadline=None)
@given(some_bands())
@example((Band(3), [0, 1, 2]))
@example((Band(2, (0, 1), inverted=True), []))
@example((Band(2, ()), []))
def test_rows_are_numbered_in_the_order_of_their_positions(case):
    band, inside = case
    assert band.size == len(inside)
    number, is_inside = band.number(np.arange(band.rows))
    if band.chosen is None:
        assert is_inside is None
    else:
        assert np.flatnonzero(is_inside).tolist() == inside
    assert number[inside].tolist() == list(range(len(inside)))
    assert all(n == sum(row < position for row in inside) for position, n in enumerate(number))
    assert band.position(np.arange(band.size)).tolist() == inside


@settings(max_examples=200, deadline=None)
@given(some_bands(), st.data())
def test_a_span_holds_the_rows_of_a_range_of_positions(case, data):
    for band, inside in (case, (Band(case[0].rows), range(case[0].rows))):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, band.rows)] * 2), "range"))
        first, last = band.span(start, stop)
        assert type(first) is type(last) is int
        assert [inside[n] for n in range(first, last)] == [row for row in inside if start <= row < stop]
        runs = band.runs(first, last).tolist()
        assert [row for a, z in runs for row in range(a, z)] == list(inside[first:last])
        assert all(z < a for (_, z), (a, _) in zip(runs, runs[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.integers(FEW, 200), st.integers(0, 2**32), st.booleans(), st.sampled_from([np.int32, np.int64]))
@example(FEW, 0, False, np.int32)
def test_many_positions_are_found_as_a_few_are(rows, seed, inverted, dtype):
    """By bits, against running sums over all rows of the table; at both ends of words of 32, too."""
    rng = np.random.default_rng(seed)
    is_chosen = np.zeros(rows, bool)
    is_chosen[rng.choice(rows, rng.integers(FEW, rows + 1), replace=False)] = True
    inside = is_chosen != inverted
    band = Band(rows, tuple(np.flatnonzero(is_chosen).tolist()), inverted)
    asked = rng.integers(0, rows, 500).astype(dtype)
    number, found = band.number(asked)
    assert number.dtype == dtype and found.dtype == bool
    assert found.tolist() == inside[asked].tolist()
    assert number.tolist() == (np.cumsum(inside) - inside)[asked].tolist()


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1, 33]), st.booleans(), st.integers(0, 2**32))
def test_int32_is_enough_in_numpy_and_jax(count, inverted, seed):
    """The largest table, rows at both ends, against int64."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([np.arange(64), LARGEST - 1 - np.arange(64), rng.integers(0, LARGEST, 64)])
    chosen = sorted(set(rng.choice(ends, count).tolist()) | {int(rng.integers(0, 2)) * (LARGEST - 1)})[:count]
    band = Band(LARGEST, tuple(chosen), inverted)
    truth, is_inside = band.number(ends)
    assert is_inside.tolist() == [(position in chosen) != inverted for position in ends.tolist()]
    numbers = truth[is_inside]
    assert numbers.min(initial=0) >= 0 and numbers.max(initial=0) < band.size
    np.testing.assert_array_equal(band.position(numbers), ends[is_inside])
    for convert in (lambda x: x.astype(np.int32), lambda x: jnp.asarray(x, jnp.int32)):
        number, inside = band.number(convert(ends))
        assert number.dtype == np.int32
        np.testing.assert_array_equal(number, truth)
        np.testing.assert_array_equal(inside, is_inside)
        position = band.position(convert(np.where(is_inside, truth, 0)))
        assert position.dtype == np.int32
        np.testing.assert_array_equal(position[is_inside], ends[is_inside])


def test_device_code_can_use_it():
    band = Band(10, (2, 3, 7), inverted=True)
    number, inside = jax.jit(band.number)(jnp.arange(10, dtype=jnp.int32))
    assert number[inside].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert jax.jit(band.position)(jnp.arange(7, dtype=jnp.int32)).tolist() == [0, 1, 4, 5, 6, 8, 9]


def test_bands_by_hand():
    """Rows 0 to 6 are at the positions 0, 4, 1, 5, 2, 6, 3."""
    table = TableSpec("t", 7, 4, Sgd())
    hot, warm, rest = RowIds((1, 3)), RowIds((0, 6), "warm.txt", "ab"), "rest"
    found = bands([Segment("row_wise", rows) for rows in (hot, rest, warm, rest)], table)
    left = Band(7, (0, 3, 4, 5), inverted=True)
    assert found == (Band(7, (4, 5)), left, Band(7, (0, 3)), left)
    assert left.position(np.arange(3)).tolist() == [1, 2, 6]  # rows 2, 4 and 5
    assert bands([Segment("row_wise")], table) == bands([Segment("row_wise", "rest")], table) == (Band(7),)


@pytest.mark.parametrize("rows", [1, 2, 30, 5000])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.booleans(), st.integers(0, 2**32))
def test_bands_of_a_partition_have_each_row_once(rows, count, with_rest, seed):
    of_row = np.random.default_rng(seed).integers(0, count, rows)
    sets = [np.flatnonzero(of_row == n) for n in range(count)]
    selectors = [RowIds(tuple(ids.tolist())) for ids in sets]
    if with_rest:
        selectors[-1] = "rest"
    found = bands([Segment("row_wise", selector) for selector in selectors], TableSpec("t", rows, 4, Sgd()))
    positions = RowOrder(rows).position(np.arange(rows))
    for band, ids in zip(found, sets, strict=True):
        number, inside = band.number(positions)
        if inside is None:
            inside = np.ones(rows, bool)
        np.testing.assert_array_equal(np.flatnonzero(inside), ids)
        np.testing.assert_array_equal(np.sort(number[inside]), np.arange(band.size))
        assert dataclasses.replace(band) == band and hash(dataclasses.replace(band)) == hash(band)
