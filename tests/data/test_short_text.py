"""Short text as integers: the same order, the same distinct values, the same rows of a vocabulary as text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.arrow import convert
from recjax.data.prepare import counting, short_text
from recjax.data.prepare.vocabulary import Vocabulary

# NumPy's text knows no NUL at its end.
BYTES = st.lists(st.binary(max_size=8).map(lambda text: text.replace(b"\0", b"\xff")), min_size=1, max_size=30)


@given(BYTES, st.integers(1, 8))
def test_order_and_values_are_those_of_text(values, width):
    keys = np.array([value[:width] for value in values], f"S{width}")
    numbers = short_text.numbers(keys)
    assert numbers.dtype == np.uint64
    assert np.argsort(numbers, kind="stable").tolist() == np.argsort(keys, kind="stable").tolist()
    assert short_text.texts(numbers, keys.dtype).tolist() == keys.tolist()
    found, back = short_text.unique(keys)
    truth, at = np.unique(keys, return_inverse=True)
    assert found.dtype == truth.dtype and found.tolist() == truth.tolist() and back.tolist() == at.tolist()


@given(BYTES, BYTES)
def test_a_vocabulary_finds_what_a_dict_finds(known, asked):
    values = np.array(sorted(set(known)), np.bytes_)
    values = values if values.dtype.itemsize else values.astype("S1")
    vocabulary = Vocabulary.counted(values, np.arange(len(values), 0, -1))
    rows = {value: row for row, value in enumerate(values.tolist(), 1)}
    wanted = np.array(asked, "S8")  # of another width
    assert vocabulary.encode(wanted).tolist() == [rows.get(value, 0) for value in wanted.tolist()]
    assert vocabulary.encode(wanted.reshape(1, -1)).shape == (1, len(asked))


@given(st.lists(BYTES, min_size=1, max_size=4))
def test_counts_of_runs_of_several_widths(parts):
    runs = [np.unique(np.array(part, np.bytes_), return_counts=True) for part in parts]
    values, counts = counting.merge([(v if v.dtype.itemsize else v.astype("S1"), c) for v, c in runs])
    truth: dict[bytes, int] = {}
    for part in parts:
        for value in part:
            truth[value] = truth.get(value, 0) + 1
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == truth
    assert values.tolist() == sorted(truth)


@pytest.mark.parametrize("bad", ["a\0b", "\0", "x" * (convert.MOST_BYTES + 1)])
@given(values=st.lists(st.text(max_size=12).filter(lambda text: "\0" not in text), min_size=1, max_size=12))
def test_text_that_can_be_no_key_among_text_that_can(bad, values):
    import pyarrow as pa

    array = pa.array(["skipped", *values, bad])[1:]  # with an offset, as of a slice
    coded, wrong = convert.code(array, "text")
    assert wrong.tolist() == [False] * len(values) + [True]
    keys = [None if code == len(coded.values) else coded.values[code] for code in coded.codes.tolist()]
    assert keys == [value.encode() or None for value in values] + [None]
    coded, wrong = convert.code(array[:-1], "text")
    assert wrong is None
    assert [coded.values[c] for c in coded.codes.tolist() if c < len(coded.values)] == [v.encode() for v in values if v]
