"""Row operations against the same operations done row by row in plain Python."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.batch_checks import validate
from recjax.data.source import BLOCK_ROWS, between, concatenate, even_blocks, take
from recjax.errors import DataError

SCHEMA = Schema(
    ("a", "b"), (Feature("one", 50), Feature("fixed", 60, 3, weighted=True), Feature("bag", 70, None, weighted=True))
)


def make_batch(n: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, n).astype(np.int32)
    total = int(lengths.sum())
    return Batch(
        dense=rng.normal(size=(n, 2)).astype(np.float32),
        bags={
            "one": Bags(rng.integers(0, 50, (n, 1))),
            "fixed": Bags(rng.integers(0, 60, (n, 3)), None, rng.random((n, 3), np.float32)),
            "bag": Bags(rng.integers(0, 70, total), lengths, rng.random(total, np.float32)),
        },
        labels=rng.integers(0, 2, n).astype(np.float32),
        weights=rng.random(n, np.float32),
        position=1000 * seed,
    )


def as_rows(batch: Batch) -> list[tuple[Any, ...]]:
    """Every row of a batch as a plain tuple; the independent truth of these tests."""
    fixed, jagged = batch.bags["fixed"], batch.bags["bag"]
    assert fixed.weights is not None and jagged.lengths is not None and jagged.weights is not None
    ends = np.cumsum(jagged.lengths)
    rows = []
    for i in range(batch.size):
        bag = slice(ends[i] - jagged.lengths[i], ends[i])
        rows.append(
            (
                batch.dense[i].tolist(),
                batch.bags["one"].ids[i].tolist(),
                fixed.ids[i].tolist(),
                fixed.weights[i].tolist(),
                jagged.ids[bag].tolist(),
                jagged.weights[bag].tolist(),
                float(batch.labels[i]),
                float(batch.weights[i]),
            )
        )
    return rows


@given(n=st.integers(1, 20), seed=st.integers(0, 5), data=st.data())
def test_take_picks_whole_rows_in_any_order(n, seed, data):
    batch = make_batch(n, seed)
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=30)), np.int64)
    taken = take(batch, rows)
    validate(taken, SCHEMA)
    assert as_rows(taken) == [as_rows(batch)[i] for i in rows]


@given(n=st.integers(0, 20), seed=st.integers(0, 5), ends=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_between_is_a_slice_and_moves_the_position(n, seed, ends):
    batch, (start, stop) = make_batch(n, seed), sorted(min(end, n) for end in ends)
    part = between(batch, start, stop)
    validate(part, SCHEMA)
    assert as_rows(part) == as_rows(batch)[start:stop]
    assert part.position == batch.position + start


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_concatenate_keeps_every_row_in_order(sizes):
    batches = [make_batch(n, seed) for seed, n in enumerate(sizes)]
    whole = concatenate(batches)
    validate(whole, SCHEMA)
    assert as_rows(whole) == [row for batch in batches for row in as_rows(batch)]
    assert whole.position == batches[0].position


def test_concatenate_copies_even_a_single_batch():
    batch = make_batch(4, 0)
    concatenate([batch]).labels[:] = 7
    assert (batch.labels <= 1).all()


@pytest.mark.parametrize("dtype", ["i1", "i2", "<i4", ">i4", "<i8", ">i8", "u2"])
@pytest.mark.parametrize("id", [-1, 50, 100])
def test_ids_outside_the_table_are_found_in_every_integer_type(dtype, id):
    batch = make_batch(8, 1)
    ids = np.zeros((8, 2), dtype)[:, ::2]  # not contiguous
    batch.bags["one"] = Bags(ids)
    validate(batch, SCHEMA)
    ids[:] = 49
    validate(dataclasses.replace(batch, bags=batch.bags | {"one": Bags(ids)}), SCHEMA)
    ids[5] = max(id, 50) if dtype == "u2" else id
    with pytest.raises(DataError, match=r"of feature 'one' in sample 1005 .* is out of range: the table has 50 rows"):
        validate(dataclasses.replace(batch, bags=batch.bags | {"one": Bags(ids)}), SCHEMA)


def test_even_blocks():
    assert even_blocks(0).tolist() == []
    assert even_blocks(1).tolist() == [1]
    assert even_blocks(BLOCK_ROWS).tolist() == [BLOCK_ROWS]
    assert even_blocks(2 * BLOCK_ROWS + 5).tolist() == [BLOCK_ROWS, BLOCK_ROWS, 5]
