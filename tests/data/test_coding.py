import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.prepare.chunk import Column
from recjax.data.prepare.coding import CodedChunk, code, counts


@pytest.mark.parametrize("dtype", ["uint32", "int64", "S2"])
@given(st.lists(st.none() | st.integers(0, 99), max_size=400))
def test_decoding_gives_the_entries_back(dtype, entries):
    keys = np.array([b"%d" % (e or 0) if dtype == "S2" else e or 0 for e in entries], dtype)
    missing = np.array([e is None for e in entries], bool)
    coded = code(Column(keys, None, missing if missing.any() else None))
    assert (coded.values[1:] > coded.values[:-1]).all()
    assert coded.codes.dtype.kind == "u" and coded.values.dtype == keys.dtype
    back = [None if c == len(coded.values) else int(coded.values[c]) for c in coded.codes.tolist()]
    assert back == entries
    train = np.arange(len(entries)) % 3 > 0
    truth = [sum(e == int(v) for e, t in zip(entries, train, strict=True) if t) for v in coded.values]
    assert counts(coded, train).tolist() == truth


@pytest.mark.parametrize("distinct", [255, 256, 65_535, 65_536])
def test_codes_have_room_for_missing(distinct):
    coded = code(Column(np.arange(distinct), None, np.arange(distinct) == 0))
    assert coded.codes.tolist() == [distinct - 1, *range(distinct - 1)]


def test_rows_of_a_split_with_jagged_bags():
    coded = code(Column(np.array([5, 6, 7, 5]), np.array([1, 0, 2, 1], np.int32)))
    zeros = np.zeros(4, np.float32)
    chunk = CodedChunk(zeros, zeros[:, None], {"x": coded}, np.array([0, 1, 1, 0], np.uint8), None).rows(1)
    assert chunk.columns["x"].lengths.tolist() == [0, 2]
    assert chunk.columns["x"].values[chunk.columns["x"].codes].tolist() == [6, 7]
    assert counts(coded, np.array([False, True, True, False])).tolist() == [0, 1, 1]
