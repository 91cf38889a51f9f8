"""Values to rows: the hash against its definition in plain Python, modulo, and the row of missing values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.ids import Frequency, Hash, Modulo, computed_map, reduced, stable_hash
from recjax.errors import ConfigError

OPTIONAL, PLAIN = RawFeature("x", optional=True), RawFeature("x")


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def hash_text(text):
    h = mix((len(text) + 0x9E3779B97F4A7C15) % 2**64)
    for i in range(0, len(text), 8):
        h = mix(h ^ int.from_bytes(text[i : i + 8], "little"))
    return h


def test_the_hash_is_splitmix64():
    """First outputs of the published generator for seed 0: mix of 1, 2 and 3 times the golden number."""
    golden = 0x9E3779B97F4A7C15
    found = stable_hash(np.array([0, golden, 2 * golden % 2**64], np.uint64)).tolist()
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_the_hash_of_integers(values):
    truth = [mix((value + 0x9E3779B97F4A7C15) % 2**64) for value in values]
    assert stable_hash(np.array(values, np.int64)).tolist() == truth


@given(st.integers(-128, 127))
def test_the_hash_does_not_depend_on_the_type(value):
    hashes = {int(stable_hash(np.array([value], dtype))[0]) for dtype in (np.int8, np.int16, np.int32, np.int64)}
    assert len(hashes) == 1


@given(st.lists(st.binary(max_size=20).filter(lambda text: b"\0" not in text), min_size=1), st.integers(0, 9))
def test_the_hash_of_text_does_not_depend_on_the_width(texts, more):
    width = max(map(len, texts)) + more or 1
    assert stable_hash(np.array(texts, f"S{width}")).tolist() == [hash_text(text) for text in texts]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(1, 2**31 - 3))
def test_modulo_is_never_negative(values, modulo):
    for dtype in (np.int32, np.int64):
        assert reduced(np.array(values, dtype), modulo).tolist() == [value % modulo for value in values]


def test_narrow_integers_modulo_a_wide_number():
    assert reduced(np.array([-1, 127], np.int8), 1000).tolist() == [999, 127]


def test_missing_values_have_the_last_row():
    for options in (Hash((50,)), Modulo((50,))):
        optional, plain = (computed_map(options, feature, 0, 1) for feature in (OPTIONAL, PLAIN))
        assert (optional.table_rows, optional.missing_row, plain.table_rows) == (51, 50, 50)
        values = np.arange(1000, dtype=np.uint32)
        assert set(optional.rows_of(values).tolist()) == set(range(50))
        assert (optional.rows_of(values) == plain.rows_of(values)).all()


def test_rows_for_each_feature():
    options = Hash((10, 20))
    assert [computed_map(options, PLAIN, i, 2).table_rows for i in range(2)] == [10, 20]
    with pytest.raises(ConfigError, match="ids.rows has 2 values, but there are 3 features"):
        computed_map(options, PLAIN, 0, 3)


def test_text_has_no_modulo():
    with pytest.raises(ConfigError, match="text cannot be taken modulo"):
        reduced(np.array([b"a"]), 5)


@pytest.mark.parametrize("make", [lambda: Hash((0,)), lambda: Modulo((2**31,)), lambda: Frequency(min_count=0)])
def test_impossible_options(make):
    with pytest.raises(ConfigError, match="it must be"):
        make()
