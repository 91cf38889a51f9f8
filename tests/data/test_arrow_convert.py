"""Arrow arrays to keys and numbers, against plain Python, for every way in which Arrow stores the same values."""

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.data.arrow import convert

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


TAKEN = {pa.string(): ["unused"], pa.large_string(): ["unused"], pa.binary(): [b"unused"]} | {
    getattr(pa, f"{sign}int{bits}")(): [7] for sign in ("", "u") for bits in (8, 16, 32, 64)
}  # a value that only the dictionary has


def decoded(coded):
    """The values of all entries, None where missing."""
    values = [*coded.values.tolist(), None]
    return [values[code] for code in coded.codes.tolist()]


STORED_AS = {
    "plain": lambda array: array,
    "chunks": lambda array: pa.chunked_array([array.slice(0, 1), array.slice(1)], array.type),
    "a dictionary": lambda array: array.dictionary_encode(),
    "a part of one with a larger dictionary": lambda array: pa.concat_arrays(
        [pa.array(TAKEN[array.type], array.type), array]
    ).dictionary_encode()[1:],
    "runs": lambda array: pa.compute.run_end_encode(array) if len(array) else array,
}


@pytest.mark.parametrize("stored", STORED_AS)
@settings(max_examples=40)
@given(st.lists(st.none() | TEXT, max_size=8))
def test_texts_keep_their_bytes(stored, values):
    """Nothing and empty text are missing."""
    truth = [None if not value else value.encode() for value in values]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary()):
        if stored not in ("plain", "chunks") and kind == pa.string_view():
            continue  # Arrow cannot
        given_values = [v if v is None or kind != pa.binary() else v.encode() for v in values]
        coded, wrong = convert.code(convert.plain(STORED_AS[stored](pa.array(given_values, kind))), "text")
        assert decoded(coded) == truth and wrong is None
        assert coded.values.tolist() == sorted({v for v in truth if v is not None})


@pytest.mark.parametrize("stored", STORED_AS)
@settings(max_examples=40)
@given(st.data())
def test_integers_of_every_width_keep_their_value(stored, data):
    for bits in (8, 16, 32, 64):
        for kind, least in ((f"int{bits}", -(2 ** (bits - 1))), (f"uint{bits}", 0)):
            bound = st.integers(least, least + 2**bits - 1)
            values = data.draw(st.lists(st.none() | bound, max_size=5))
            wanted = "unsigned" if kind == "uint64" else "integer"
            coded, wrong = convert.code(convert.plain(STORED_AS[stored](pa.array(values, kind))), wanted)
            assert decoded(coded) == values and wrong is None
            assert coded.values.dtype == (np.uint64 if wanted == "unsigned" else np.int64)


@settings(max_examples=100)
@given(st.lists(st.none() | st.integers(-(2**65), 2**65), max_size=6), st.sampled_from(["integer", "unsigned"]))
def test_integers_written_as_text_are_those_integers_or_wrong(values, wanted):
    least, most = (0, 2**64 - 1) if wanted == "unsigned" else (-(2**63), 2**63 - 1)
    fits = [v is None or least <= v <= most for v in values]
    coded, wrong = convert.code(pa.array([None if v is None else str(v) for v in values], pa.string()), wanted)
    assert decoded(coded) == [v if good else None for v, good in zip(values, fits, strict=True)]
    assert (np.zeros(len(values), bool) if wrong is None else wrong).tolist() == [not good for good in fits]


def test_how_integers_may_be_written():
    words = [
        "7",
        " 7 ",
        "7.0",
        "+7",
        "007",
        "-0",
        "7.5",
        "x",
        "0x7",
        "1e3",
        "1_000",
        "",
        "NaN",
        "NA",
        "null",
        "٣",
        None,
    ]
    coded, wrong = convert.code(pa.array(words), "integer")
    assert decoded(coded)[:6] == [7, 7, 7, 7, 7, 0] and decoded(coded)[6:] == [None] * 11
    assert [word for word, bad in zip(words, wrong, strict=True) if bad] == ["7.5", "x", "0x7", "1e3", "1_000", "٣"]


def test_whole_floats_are_integers_where_they_are_exact():
    """As pandas has integers of a column in which some are missing."""
    values = [1.0, -3.0, math.nan, None, 2.0**53 - 1, 2.0**53, 1.5, math.inf]
    coded, wrong = convert.code(pa.array(values), "integer")
    assert decoded(coded) == [1, -3, None, None, 2**53 - 1, None, None, None]
    assert wrong.tolist() == [False] * 5 + [True] * 3


def test_booleans_are_0_and_1_however_they_are_written():
    for array in (pa.array([True, None, False]), pa.array(["true", "", "False"]), pa.array([1, None, 0])):
        coded, wrong = convert.code(array, "boolean")
        assert decoded(coded) == [1, None, 0] and wrong is None
    coded, wrong = convert.code(pa.array(["true", "yes", "2"]), "boolean")
    assert decoded(coded) == [1, None, None] and wrong.tolist() == [False, True, True]


def test_what_no_text_key_can_be():
    long = "x" * (convert.MOST_BYTES + 1)
    coded, wrong = convert.code(pa.array([b"a", b"a\0", b"\xff", long.encode(), "é".encode()]), "text")
    assert decoded(coded) == [b"a", None, None, None, "é".encode()]
    assert wrong.tolist() == [False, True, True, True, False]
    coded, wrong = convert.code(pa.array([7, None]), "text")  # as in a file that writes the ids as integers
    assert decoded(coded) == [b"7", None] and wrong is None
    coded, wrong = convert.code(pa.array([datetime.date(2026, 1, 1), None]), "text")
    assert decoded(coded) == [None, None] and wrong.tolist() == [True, False]


@settings(max_examples=60)
@given(st.lists(st.none() | st.floats(allow_infinity=False, allow_nan=False), max_size=6))
def test_numbers_are_the_same_from_floats_and_from_their_text(values):
    truth = np.array([math.nan if v is None else v for v in values], np.float64)
    for array in (
        pa.array(values, pa.float64()),
        pa.array([None if v is None else repr(v) for v in values], pa.string()),
    ):
        numbers, wrong = convert.numbers(array)
        np.testing.assert_array_equal(numbers, truth)
        assert wrong is None


def test_numbers_of_other_types():
    for values, kind, truth in (
        ([1, None, -2], pa.int8(), [1, math.nan, -2]),
        ([2**63, None], pa.uint64(), [2.0**63, math.nan]),
        ([True, False, None], pa.bool_(), [1, 0, math.nan]),
        ([decimal.Decimal("1.25"), None], pa.decimal128(5, 2), [1.25, math.nan]),
        ([np.float16(0.5), None], pa.float16(), [0.5, math.nan]),
        ([None, None], pa.null(), [math.nan] * 2),
        ([datetime.date(1970, 1, 2), None], pa.date32(), [86400, math.nan]),
        ([datetime.datetime(1970, 1, 1, 0, 1)], pa.timestamp("ns"), [60]),
        (
            [datetime.datetime(1970, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1)))],
            pa.timestamp("us", "Europe/Berlin"),
            [0],
        ),
    ):
        numbers, wrong = convert.numbers(convert.plain(pa.array(values, kind)))
        np.testing.assert_array_equal(numbers, truth)
        assert wrong is None and numbers.dtype == np.float64
    numbers, wrong = convert.numbers(pa.array([1.0, math.inf]))
    assert wrong.tolist() == [False, True] and math.isnan(numbers[1])
    numbers, wrong = convert.numbers(pa.array(["1,5", " 2.5 ", "+1e-2", "true", "inf", "0x1p3", "NA", None, ".5"]))
    np.testing.assert_array_equal(numbers, [math.nan, 2.5, 0.01, 1, math.nan, math.nan, math.nan, math.nan, 0.5])
    assert np.flatnonzero(wrong).tolist() == [0, 4, 5]


def test_times_as_text():
    words = ["1970-01-02", "1970-01-01 00:00:01.5", "1970-01-01T01:00:00+01:00", "1970-01-01T00:00:05Z", "soon", None]
    numbers, wrong = convert.numbers(pa.array(words), "time")
    np.testing.assert_array_equal(numbers, [86400, 1.5, 0, 5, math.nan, math.nan])
    assert np.flatnonzero(wrong).tolist() == [4]
    assert convert.times(pa.array(["1970-01-02", "1970-01-03"]))[0].tolist() == [86400, 172800]
    assert convert.times(pa.array(["1970-01-01T00:00:01Z"]))[0].tolist() == [1]


@settings(max_examples=60)
@given(st.lists(st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=3), max_size=6), st.integers(0, 2))
def test_bags_end_to_end(rows, skipped):
    """Also of a slice, whose offsets do not begin at 0."""
    truth = rows[skipped:]
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_view(pa.int64())):
        entries, lengths = convert.bags(convert.plain(pa.array(rows, kind).slice(skipped)))
        assert lengths.tolist() == [len(bag or []) for bag in truth] and lengths.dtype == np.int32
        assert entries.to_pylist() == [entry for bag in truth for entry in bag or []]


def test_bags_of_text():
    for kind in (pa.string(), pa.binary()):
        array = pa.array(["a|b", "", None, "c", "|"], pa.string()).cast(kind)
        entries, lengths = convert.bags(array, "|")
        assert lengths.tolist() == [2, 0, 0, 1, 2]
        assert decoded(convert.code(entries, "text")[0]) == [b"a", b"b", b"c", None, None]
    offsets, sizes = pa.array([2, 0, 1], pa.int32()), pa.array([1, 2, 0], pa.int32())
    view = pa.ListViewArray.from_arrays(offsets, sizes, pa.array([7, 8, 9]))  # in another order than its entries
    entries, lengths = convert.bags(view)
    assert entries.to_pylist() == [9, 7, 8] and lengths.tolist() == [1, 2, 0]
    array = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    entries, lengths = convert.bags(array)
    assert entries.to_pylist() == [1, 2, 3, 4] and lengths.tolist() == [2, 0, 2]


def test_marks_of_entries_as_marks_of_rows():
    marks = convert.of_rows(np.array([False, True, False, True]), np.array([0, 2, 1, 0, 1]))
    assert marks.tolist() == [False, True, False, False, True]
    assert convert.of_rows(None, np.array([1])) is None
