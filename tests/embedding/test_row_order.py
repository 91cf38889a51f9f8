"""The storage order of rows: a bijection, in int32, that gives every owner its share; and the even split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.data.synthetic.clicks import BoundedZipf
from recjax.embedding.row_order import RowOrder, Split, row_at

pytestmark = pytest.mark.light_compile

LARGEST = 2**31 - 1
EDGES = [1, 2, 3, 4, 5, 7, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 12_289, 100_003]
row_counts = st.one_of(st.integers(1, 9000), st.integers(9000, LARGEST), st.integers(LARGEST - 9000, LARGEST))


def some(count: int, rng: np.random.Generator) -> np.ndarray:
    """Numbers below `count`: both ends and a sample, int64 [3072], of one length so that JAX compiles once."""
    ends = np.arange(1024)
    return np.concatenate([ends % count, count - 1 - ends % count, rng.integers(0, count, 1024)])


@pytest.mark.parametrize("rows", EDGES)
def test_every_position_is_used_once(rows):
    order = RowOrder(rows)
    positions = order.position(np.arange(rows))
    np.testing.assert_array_equal(np.sort(positions), np.arange(rows))
    np.testing.assert_array_equal(order.row(positions), np.arange(rows))


@settings(max_examples=60, deadline=None)
@given(row_counts, st.integers(0, 2**32))
@example(LARGEST, 0)
@example(LARGEST - 4096, 0)
def test_position_and_row_undo_each_other(rows, seed):
    """Both ways round, which together make a bijection; exact in int64."""
    order, sample = RowOrder(rows), some(rows, np.random.default_rng(seed))
    for forth, back in ((order.position, order.row), (order.row, order.position)):
        there = forth(sample)
        assert there.min() >= 0 and there.max() < rows
        np.testing.assert_array_equal(back(there), sample)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(row_counts, st.integers(0, 2**32))
@example(LARGEST, 0)
@example(LARGEST - 1, 0)
@example(LARGEST - 4096, 0)
def test_int32_is_enough(rows, seed):
    """NumPy and JAX in int32 against NumPy in int64, which cannot overflow here."""
    order, sample = RowOrder(rows), some(rows, np.random.default_rng(seed))
    narrow = sample.astype(np.int32)
    constants = [np.int32(v) for v in (order.quotient, order.classes, order.inverse)]
    for truth, got in (
        (order.position(sample), order.position(narrow)),
        (order.position(sample), order.position(jnp.asarray(narrow))),
        (order.row(sample), order.row(narrow)),
        (order.row(sample), order.row(jnp.asarray(narrow))),
        (order.row(sample), row_at(jnp.asarray(narrow), *map(jnp.asarray, constants))),
    ):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(np.asarray(got), truth)


def test_no_step_of_the_arithmetic_leaves_int32():
    """An overflow that two's complement happens to undo would still be one: redo the largest table in Python's int."""
    for rows in (LARGEST, LARGEST - 524_287, 2**31 - 2**19):
        order = RowOrder(rows)
        q, S = order.quotient, order.classes
        assert (S - 1) * order.stride < 2**31 and (S - 1) * order.inverse < 2**31
        assert (S - 1) * q + rows // S < 2**31  # the spread position, also of rows that do not take it
        assert (q - 1) * S + S - 1 < 2**31  # the way back


@pytest.mark.parametrize("rows", [LARGEST, 5])
def test_device_code_can_use_it(rows):
    order, split = RowOrder(rows), Split(rows, 8)
    sample = some(rows, np.random.default_rng(0))
    owner, offset = jax.jit(lambda r: split.owner_and_offset(order.position(r)))(jnp.asarray(sample, jnp.int32))
    truth = split.owner_and_offset(order.position(sample))
    np.testing.assert_array_equal(owner, truth[0])
    np.testing.assert_array_equal(offset, truth[1])


def test_the_stored_order_stays_as_it_is():
    """Checkpoints store rows in this order. If it must change, give it a new `rows.NAME` and only then new numbers."""
    assert RowOrder(7).position(np.arange(7)).tolist() == [0, 4, 1, 5, 2, 6, 3]
    large = RowOrder(40_000_000)
    assert (large.classes, large.quotient, large.stride) == (4000, 10_000, 2473)
    # row 1,234,567: class 2567, quotient 308; 2567 * 2473 mod 4000 = 191
    assert large.position(np.array([0, 1, 1_234_567])).tolist() == [0, 24_730_000, 191 * 10_000 + 308]
    last = RowOrder(LARGEST)
    assert last.rows - last.classes * last.quotient == 1
    assert last.position(np.array([LARGEST - 1])).tolist() == [LARGEST - 1]


def test_split_by_hand():
    split = Split(5, 4)
    assert [int(split.start(o)) for o in range(5)] == [0, 2, 3, 4, 5]  # 2, 1, 1, 1
    owner, offset = split.owner_and_offset(np.arange(5))
    assert owner.tolist() == [0, 0, 1, 2, 3]
    assert offset.tolist() == [0, 1, 0, 0, 0]
    assert split.longest == 2
    assert [int(Split(2, 4).start(o)) for o in range(5)] == [0, 1, 2, 2, 2]  # owners without a row


@settings(max_examples=60, deadline=None)
@given(row_counts, st.one_of(st.integers(1, 70), st.integers(1, 5000)), st.integers(0, 2**32))
@example(LARGEST, 3, 0)
@example(LARGEST, 1, 0)
@example(1, 8, 0)
def test_ranges_are_even_and_cover_everything(rows, owners, seed):
    split = Split(rows, owners)
    starts = np.array([int(split.start(o)) for o in range(owners + 1)])
    lengths = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == rows
    assert lengths.max() - lengths.min() <= 1 and lengths.max() == split.longest
    assert (np.diff(lengths) <= 0).all()
    positions = some(rows, np.random.default_rng(seed))
    truth = np.searchsorted(starts, positions, side="right") - 1
    for sample in (positions, positions.astype(np.int32)):
        owner, offset = split.owner_and_offset(sample)
        np.testing.assert_array_equal(owner, truth)
        np.testing.assert_array_equal(offset, positions - starts[truth])


def loads(rows: int, owners: int, ids: np.ndarray, *, contiguous: bool = False) -> np.ndarray:
    """How many of `ids` each owner holds."""
    positions = ids if contiguous else RowOrder(rows).position(ids)
    return np.bincount(Split(rows, owners).owner_and_offset(positions)[0], minlength=owners)


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.integers(2048, 9000), st.integers(9000, LARGEST)), st.integers(2, 64), st.data())
@example(40_000_000, 8, None)
@example(7590, 64, None)  # S = 3795, whose stride spreads worst of all
def test_any_run_of_ids_is_spread_evenly(rows, owners, data):
    """Each owner gets its share of at most 2,048 rows, give or take 32.

    The newest ids are a run at the end, the most frequent ones at the start. Contiguous ranges would give one owner
    everything.
    """
    length = min(rows, 4096) if data is None else data.draw(st.integers(1, min(rows, 4096)), "length")
    middle = rows // 2 if data is None else data.draw(st.integers(0, rows - length), "start")
    for start in (0, rows - length, min(middle, rows - length)):
        counts = loads(rows, owners, np.arange(start, start + length))
        assert np.abs(counts - length / owners).max() <= 32
    if rows > owners * length:
        assert loads(rows, owners, np.arange(length), contiguous=True)[0] == length


@pytest.mark.parametrize("owners", [2, 8, 64])
@pytest.mark.parametrize("rows", [20_000, 2_202_608])
def test_frequency_ordered_ids_are_spread_evenly(rows, owners):
    """Distinct rows of a Zipf batch of 4,096.

    A random layout would be off by about three deviations of a Poisson count; contiguous ranges put the frequent rows
    on one owner.
    """
    draws = np.random.default_rng(rows).random(4096)
    ids = np.unique(BoundedZipf(rows, 1.05).ids(draws))
    mean = len(ids) / owners
    assert loads(rows, owners, ids).max() <= mean + 3.5 * np.sqrt(mean)
    assert loads(rows, owners, ids, contiguous=True).max() > 1.4 * mean + 3.5 * np.sqrt(mean)
