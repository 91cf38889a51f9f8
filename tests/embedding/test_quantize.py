"""Rows encoded for the way between devices, against bounds in closed form, with NumPy in float64 as the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.embedding.quantize import decode, encode, encoded_bytes

REDUCED = ("bfloat16", "float16", "int8", "float8_e4m3", "float8_e5m2")
M, D = 3, 5
TINY = 2.0**-110  # far below any value that matters; row ranges and values below it may vanish


@jax.jit
def _all(x):
    return {p: (e := encode(x, p), decode(e, p)) for p in ("float32", *REDUCED)}


def round_trip(x, precision):
    encoded, decoded = _all(jnp.asarray(x, jnp.float32))[precision]
    assert decoded.dtype == jnp.float32 and decoded.shape == np.shape(x)
    assert encoded.nbytes == encoded_bytes(np.shape(x)[-1], precision, 4) * len(x)
    return np.asarray(encoded), np.asarray(decoded)


def bound(x, precision):
    """The largest error that the module's docstring allows; [M, D] or [M, 1]."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    if precision == "bfloat16":
        return 2.0**-8 * np.abs(x)
    if precision == "float16":
        return np.maximum(2.0**-11 * np.abs(x), 2.0**-39 * largest)
    if precision == "float8_e4m3":
        return np.maximum(2.0**-4 * np.abs(x), 2.0**-17 * largest)
    if precision == "float8_e5m2":
        return np.maximum(2.0**-3 * np.abs(x), 2.0**-31 * largest)
    # half a step, and the rounding of float32 arithmetic on the row's values
    return np.ptp(x, axis=1, keepdims=True) / 255 / 2 * (1 + 2.0**-12) + 2.0**-22 * largest


floats = st.floats(-(2.0**124), 2.0**124, width=32, allow_subnormal=False)
rows = st.lists(st.lists(floats, min_size=D, max_size=D), min_size=M, max_size=M)


@settings(max_examples=150)
@given(rows)
@example([[3e37, -3e37, 1, 0, -1], [1e-30] * D, [65520.0, 65504.0, 1e-8, 6e-5, 0]])  # beyond float16 as it is
@example([[1e6, 1e6 + 1, 1e6 + 0.5, 1e6 + 0.25, 1e6 - 1], [2.0**-28, 1, 0, -1, 2.0**-40], [0] * D])
@example([[2.0**127, 1, 0, 2.0**100, 2.0**90], [1.1e-38, 0, 0, 0, 0], [255, 0, 1, 2.5, 3.5]])
def test_errors_are_within_their_bounds(values):
    x = np.array(values, np.float32)
    for precision in REDUCED:
        decoded = round_trip(x, precision)[1]
        error = np.abs(decoded.astype(np.float64) - x.astype(np.float64))
        assert (error <= bound(x, precision) + TINY).all(), (precision, error, bound(x, precision))


def test_float32_is_untouched():
    x = np.array([[-0.0, np.nan, np.inf, 1e-42, 1 / 3]], np.float32)
    encoded, decoded = round_trip(x, "float32")
    assert encoded.view(np.uint32).tolist() == decoded.view(np.uint32).tolist() == x.view(np.uint32).tolist()


def test_bounds_are_reached_and_ties_go_to_even():
    """Hand-worked values halfway between two neighbours: else a bound twice too wide would not be noticed."""
    ulp = 2.0**-7
    x = [[1 + ulp / 2, 1 + 1.5 * ulp, 1 + ulp / 2 + 2.0**-20, -1 - ulp / 2, 3]]
    assert round_trip(x, "bfloat16")[1].tolist() == [[1, 1 + 2 * ulp, 1 + ulp, -1, 3]]
    ulp = 2.0**-10
    x = [[1 + ulp / 2, 1 + 1.5 * ulp, 1 + ulp / 2 + 2.0**-20, -1 - ulp / 2, 3]]
    assert round_trip(x, "float16")[1].tolist() == [[1, 1 + 2 * ulp, 1 + ulp, -1, 3]]
    # e4m3 has steps of 1/8 between 1 and 2, e5m2 of 1/4; 128 and 2^14 are what 1 is brought to
    x = [[1, 1 + 1 / 16, 1 + 3 / 16, -1 - 1 / 16 - 2.0**-20, 2.0**-18]]
    encoded, decoded = round_trip(x, "float8_e4m3")
    assert decoded.tolist() == [[1, 1, 1.25, -1.125, 0]]
    assert encoded[0].tolist() == [0x70, 0x70, 0x72, 0xF1, 0, 127]
    x = [[1, 1 + 1 / 8, 1 + 3 / 8, -1 - 1 / 8 - 2.0**-20, 2.0**-32]]
    encoded, decoded = round_trip(x, "float8_e5m2")
    assert decoded.tolist() == [[1, 1, 1.5, -1.25, 0]]
    assert encoded[0].tolist() == [0x74, 0x74, 0x76, 0xF5, 0, 127]
    # scale 1, bias -100: 255 steps
    x = [[-100, 155, 0.5, 1.5, 7.25]]
    encoded, decoded = round_trip(x, "int8")
    assert decoded.tolist() == [[-100, 155, 0, 2, 7]]
    assert encoded[0, :5].tolist() == [0, 255, 100, 102, 107]
    assert encoded[0, 5:].view(np.float32).tolist() == [1, -100]


def test_bfloat16_and_float16_are_the_casts_of_numpy():
    """float16 up to the power of two: rows whose largest value is 2^14 to 2^15 need none."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, D)) * np.exp2(rng.integers(-6, 13, (64, D)))).astype(np.float32)
    x[:, 0] = 2**14
    x = np.clip(x, -(2**14), 2**14)
    assert (round_trip(x, "bfloat16")[1] == x.astype(jnp.bfloat16)).all()
    assert (round_trip(x, "float16")[1] == x.astype(np.float16)).all()


@pytest.mark.parametrize("precision", REDUCED)
def test_zeros_constants_and_signs(precision):
    x = np.array([[0] * D, [-0.0] * D, [0.375] * D, [-3.0] * D, [1, -1, 1, -1, 0]], np.float32)
    decoded = round_trip(x, precision)[1]
    assert (decoded[:4] == x[:4]).all()  # also what marks "nothing here" arrives as exact zeros
    assert np.abs(decoded[4] - x[4]).max() <= (2.0**-23 if precision != "int8" else 1 / 255 + 2.0**-23)


def test_float16_of_any_size_keeps_its_bits():
    """Rows are scaled by a power of two and back: the same relative errors at 1e-30, 1 and 1e30."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(9, D)).astype(np.float32)
    one = round_trip(x, "float16")[1]
    for exponent in (-100, -60, 17, 100, 120):
        scaled = round_trip(np.ldexp(x, exponent), "float16")[1]
        assert (scaled == np.ldexp(one, exponent)).all()


@settings(max_examples=60)
@given(rows, st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]), st.integers(0, M - 1), st.integers(0, D - 1))
def test_what_is_not_finite_stays_so_and_spoils_no_other_row(values, odd, row, column):
    x = np.array(values, np.float32)
    clean = {p: round_trip(x, p)[1] for p in REDUCED}
    x[row, column] = odd
    for precision in REDUCED:
        decoded = round_trip(x, precision)[1]
        assert not np.isfinite(decoded[row, column])
        others = np.arange(M) != row
        assert (decoded[others] == clean[precision][others]).all()


def test_overflow_is_not_silent():
    top = np.finfo(np.float32).max
    x = np.array([[top, -top, 0, 1, 2]], np.float32)
    assert np.isnan(round_trip(x, "int8")[1]).all()
    assert np.isinf(round_trip(x, "bfloat16")[1][0, :2]).all()
    assert np.isinf(round_trip(x, "float16")[1][0, :2]).all()
    assert not np.isfinite(round_trip(x, "float8_e4m3")[1][0, :2]).any()
    assert np.isinf(round_trip(x, "float8_e5m2")[1][0, :2]).all()
    for precision in REDUCED:
        bits = {"float8_e4m3": 4, "float8_e5m2": 3}.get(precision, 8)
        below = np.array([[top * (1 - 2.0**-bits), 0, 0, 1, 2]], np.float32)
        assert np.isfinite(round_trip(below, precision)[1]).all()


def test_a_row_does_not_depend_on_its_company():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, D)).astype(np.float32)
    for precision in REDUCED:
        together = round_trip(x, precision)[1]
        alone = np.concatenate([round_trip(x[i : i + 1], precision)[1] for i in range(8)])
        # of int8, XLA may or may not round the product in bias + q * scale
        np.testing.assert_allclose(together, alone, rtol=0, atol=2.0**-22 if precision == "int8" else 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bfloat16_rows_travel_as_they_are(precision):
    x = jnp.asarray([[1.5, -0.0, jnp.inf, 3e38]], jnp.bfloat16)
    encoded = encode(x, precision)
    assert encoded.dtype == jnp.uint16 and encoded.shape == x.shape
    assert np.asarray(decode(encoded, precision)).tolist() == np.asarray(x, np.float32).tolist()


def test_bytes_of_a_row():
    assert [encoded_bytes(16, p, 4) for p in ("float32", *REDUCED)] == [64, 32, 34, 24, 17, 17]
    assert encoded_bytes(16, "float32", 8) == 128
