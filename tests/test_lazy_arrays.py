"""Arrays in parts: every element once, whole blocks, and never more than a part in memory."""

import math

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recjax.utils import lazy_arrays
from recjax.utils.lazy_arrays import LazyArray, as_lazy, block_of, chosen_rows, load

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(SHAPES, st.data(), st.sampled_from(["float32", "int8", "float64"]))
def test_parts_cover_every_element_once_in_whole_blocks(shape, data, dtype):
    block = tuple(data.draw(st.integers(1, max(1, length))) for length in shape)
    array = LazyArray(shape, np.dtype(dtype), lambda part: np.zeros(0), block)
    limit = data.draw(st.integers(1, 4000))
    seen = np.zeros(shape, int)
    with lazy_parts_of(limit):
        for part in array.parts():
            seen[part] += 1
            held = math.prod(axis.stop - axis.start for axis in part) * array.dtype.itemsize
            assert held <= max(limit, math.prod(block) * array.dtype.itemsize)
            for axis, length, step in zip(part, shape, block, strict=True):
                assert axis.start % step == 0 and (axis.stop % step == 0 or axis.stop == length)
    assert (seen == 1).all()


class lazy_parts_of:  # noqa: N801 (hypothesis does not go together with pytest's monkeypatch)
    def __init__(self, limit):
        self.limit, self.before = limit, lazy_arrays.PART_BYTES

    def __enter__(self):
        lazy_arrays.PART_BYTES = self.limit

    def __exit__(self, *_):
        lazy_arrays.PART_BYTES = self.before


@given(SHAPES, st.integers(1, 4000))
def test_blocks_are_whole_rows_that_fit_and_waste_less_than_a_row_each(shape, limit):
    with lazy_parts_of(limit):
        block = block_of(shape, np.dtype(np.float32))
    assert len(block) == len(shape)
    if 0 in shape or not shape:
        return
    assert block[1:] == shape[1:]
    count = -(-shape[0] // block[0])
    assert count * block[0] - shape[0] < count  # what the store adds to the last block
    row_bytes = 4 * math.prod(shape[1:])
    assert block[0] * row_bytes < limit + row_bytes


@given(st.integers(1, 60), st.integers(1, 9), st.sets(st.integers(0, 59)), st.integers(4, 300))
def test_chosen_rows_are_read_a_block_at_a_time(rows, block, chosen, limit):
    values, asked = np.arange(rows * 2).reshape(rows, 2), []

    def read(part):
        asked.append((part[0].start // block, (part[0].stop - 1) // block))
        return values[part]

    rows_K = np.array(sorted(row for row in chosen if row < rows), np.int32)
    array = chosen_rows(LazyArray(values.shape, values.dtype, read, (block, 2)), rows_K)
    with lazy_parts_of(limit):
        assert (array.load() == values[rows_K]).all()
    assert all(first == last for first, last in asked)


def test_small_blocks_are_read_many_at_a_time():
    """A checkpoint whose blocks are single rows, as Orbax makes them where the number of rows is a prime."""
    rows = LazyArray((1_000_003, 16), np.dtype(np.float32), lambda part: np.zeros(0), (1, 16))
    assert len(list(rows.parts())) == 1
    columns = LazyArray((1_000_003, 16), np.dtype(np.float32), lambda part: np.zeros(0), (1_000_003, 1))
    assert len(list(columns.parts())) == 1


def test_numpy_arrays_and_back():
    scalar = np.array(1.5, ml_dtypes.bfloat16)
    arrays = {"a": np.arange(12.0).reshape(4, 3)[::2, ::-1], "b": {"scalar": scalar, "empty": np.zeros((0, 3))}}
    as_parts = {"a": as_lazy(arrays["a"]), "b": {key: as_lazy(value) for key, value in arrays["b"].items()}}
    assert as_lazy(as_parts["a"]) is as_parts["a"]
    assert as_parts["a"].nbytes == 48
    loaded = load(as_parts)
    for got, expected in ((loaded["a"], arrays["a"]), *zip(loaded["b"].values(), arrays["b"].values(), strict=True)):
        assert type(got) is np.ndarray and got.dtype == expected.dtype and got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
        assert not np.shares_memory(got, expected)
    assert load(arrays)["a"] is arrays["a"], "what is in memory already is not copied"
