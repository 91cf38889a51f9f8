"""Statistics in parts against NumPy's over the whole; transforms by hand."""

import functools
import json
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.prepare.dense_columns import _CACHED_ROWS, DenseEncoder, DenseStats, Line

NAN = float("nan")
VALUES = st.lists(st.just(NAN) | st.floats(-1e6, 1e6), max_size=30)


@given(st.lists(VALUES, min_size=1, max_size=6))
def test_statistics_of_parts_add_up(parts):
    stats = functools.reduce(operator.add, (DenseStats.of(np.array(part, np.float64)[:, None]) for part in parts))
    stats = DenseStats.from_json(json.loads(json.dumps(stats.to_json())))
    values = np.array([value for part in parts for value in part if not np.isnan(value)], np.float64)
    assert stats.count[0] == len(values)
    if len(values):
        scale = max(np.abs(values).max(), 1e-6)
        assert stats.least[0] == values.min()
        np.testing.assert_allclose(stats.mean[0] / scale, values.mean() / scale, atol=1e-12)
        squares = ((values - values.mean()) ** 2).sum()
        np.testing.assert_allclose(stats.squares[0] / scale**2, squares / scale**2, atol=1e-9)


@pytest.mark.parametrize("rows", [0, 63, 64, 65, 300])
def test_statistics_of_several_columns_and_many_rows(rows):
    rng = np.random.default_rng(rows)
    dense = rng.normal(size=(rows, 3)).astype(np.float32)
    dense[rng.random(dense.shape) < 0.3] = NAN
    dense[:, 1] = NAN
    before = dense.copy()
    stats = DenseStats.of(dense)
    np.testing.assert_array_equal(dense, before)
    for column in range(3):
        values = [float(x) for x in dense[:, column] if x == x]
        mean = sum(values) / max(len(values), 1)
        assert (stats.count[column], stats.least[column]) == (len(values), min(values, default=float("inf")))
        assert stats.mean[column] == pytest.approx(mean, abs=1e-12)
        assert stats.squares[column] == pytest.approx(sum((x - mean) ** 2 for x in values), abs=1e-9)


@pytest.mark.parametrize("rows", [1, _CACHED_ROWS, 2 * _CACHED_ROWS + 1003])
def test_sums_are_taken_row_by_row(rows):
    """To the last bit as in one pass over all rows, on which data that are prepared already depend."""
    rng = np.random.default_rng(rows)
    dense = rng.normal(size=(rows, 2)) * 10.0 ** rng.integers(-6, 6, (rows, 2))
    dense[rng.random(dense.shape) < 0.2] = NAN
    stats = DenseStats.of(dense)
    for column in range(2):
        values = [x for x in dense[:, column].tolist() if x == x]
        mean = functools.reduce(operator.add, values, 0.0) / max(len(values), 1)
        squares = functools.reduce(operator.add, ((x - mean) * (x - mean) for x in values), 0.0)
        assert (stats.mean[column], stats.squares[column]) == (mean, squares)
    alone, missing = DenseStats.of(dense[:, :1]), np.isnan(dense[:, :1])  # NumPy adds up one column in pairs
    mean = np.where(missing, 0.0, dense[:, :1]).sum() / max(stats.count[0], 1)
    squares = np.where(missing, 0.0, (dense[:, :1] - mean) * (dense[:, :1] - mean)).sum()
    assert (alone.mean[0], alone.squares[0]) == (mean, squares)


DENSE = np.array([[3.0, -2.0], [NAN, 0.0], [0.0, NAN], [1.0, 6.0]], np.float32)


def encoder(transform, indicators=False, train=DENSE):
    return DenseEncoder(transform, indicators, DenseStats.of(train))


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        ("none", [[3, -2], [0, 0], [0, 0], [1, 6]]),
        ("log1p", [[np.log(4), 0], [0, 0], [0, 0], [np.log(2), np.log(7)]]),
        ("log_shift", [[np.log(5), np.log(2)], [0, np.log(4)], [np.log(2), 0], [np.log(3), np.log(10)]]),
        (
            "standard",  # means 4/3 and 4/3; variances 14/9 and 104/9
            [[5 / 14**0.5, -10 / 104**0.5], [0, -4 / 104**0.5], [-4 / 14**0.5, 0], [-1 / 14**0.5, 14 / 104**0.5]],
        ),
    ],
)
def test_transforms_by_hand(transform, expected):
    found = encoder(transform).encode(DENSE)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_transform_for_each_column():
    """As the same one for all columns gives it, of that column."""
    for names in (("standard", "none"), ("log1p", "log_shift"), ("none", "none")):
        found = encoder(names).encode(DENSE)
        assert found.dtype == np.float32
        for column, name in enumerate(names):
            np.testing.assert_array_equal(found[:, column], encoder(name).encode(DENSE)[:, column])


def test_lines_by_hand():
    by = encoder((Line(zero=1, unit=2), Line(zero=-2, unit=4, least=-1, most=2)), indicators=True)
    np.testing.assert_array_equal(by.encode(DENSE), [[1, 0, 0, 1], [0, 0.5, 1, 0], [-0.5, 0, 0, 1], [0, 1, 0, 0]])


def test_indicators_tell_a_missing_value_from_a_zero():
    by = encoder("log1p", indicators=True)
    assert by.names(["a", "b"]) == ("a", "b", "a_missing", "b_missing")
    np.testing.assert_array_equal(by.encode(DENSE)[:, 2:], [[0, 0], [1, 0], [0, 1], [0, 0]])


def test_values_below_every_training_value_and_columns_without_any():
    train = np.array([[1.0, NAN]], np.float32)
    rows = np.array([[-5.0, 3.0]], np.float32)
    np.testing.assert_allclose(encoder("log_shift", train=train).encode(rows), [[np.log(2), np.log(5)]], rtol=1e-6)
    np.testing.assert_allclose(encoder("standard", train=train).encode(rows), [[-6, 3]])
