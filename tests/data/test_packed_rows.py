"""Rows packed on disk give the batches that blocks give, to the last bit; nothing damaged is read."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.data.batch import Bags, Batch, Feature, Label, Schema
from recjax.data.pipeline import Order, batches
from recjax.data.storage.blocks import open_prepared, write_prepared

FIXED = Schema(("a", "b"), (Feature("one", 50), Feature("many", 7, 3), Feature("two", 9)))
ANY = Schema(
    ("a",),
    (Feature("bag", 2**40, None, True), Feature("one", 50), Feature("large", 2**33, 2), Feature("weighed", 5, 2, True),
     Feature("list", 30, None)),
)  # fmt: skip
LABELLED = Schema((), (Feature("one", 50), Feature("list", 4, None)), (Label("x"), Label("y", "number")))


def draw_rows(schema: Schema, rows: int, seed: int) -> Batch:
    """Rows of every value that a column may have, the largest ids among them."""
    rng = np.random.default_rng(seed)
    bags = {}
    for feature in schema.features:
        lengths = None if feature.bag else rng.integers(0, 4, rows).astype(np.int32)
        shape = (rows, feature.bag) if feature.bag else (int(lengths.sum()),)
        ids = rng.choice([0, feature.rows - 1, feature.rows // 2, 1], shape)
        weights = rng.random(shape).astype(np.float32) if feature.weighted else None
        bags[feature.name] = Bags(ids.astype(np.int32 if feature.rows < 2**31 else np.int64), lengths, weights)
    shape = (rows, len(schema.labels)) if schema.labels else (rows,)
    dense = rng.normal(size=(rows, len(schema.dense))).astype(np.float32)
    labels, weights = (rng.random(shape) < 0.5).astype(np.float32), rng.random(shape).astype(np.float32)
    return Batch(dense, bags, labels, weights)


def one_row(block: Batch, row: int) -> list[object]:
    """All values of a row, by a slow reading of the arrays of its block."""
    values = [block.dense[row].tolist(), np.array(block.labels[row]).tolist(), np.array(block.weights[row]).tolist()]
    for name, bags in block.bags.items():
        ends = None if bags.lengths is None else np.cumsum(bags.lengths)
        at = row if ends is None else slice(int(ends[row] - bags.lengths[row]), int(ends[row]))
        values.append([name, bags.ids[at].tolist(), None if bags.weights is None else bags.weights[at].tolist()])
    return values


def rows_of_batch(batch: Batch) -> list[list[object]]:
    return [one_row(batch, row) for row in range(batch.size)]


def expected_batches(blocks: list[Batch], size: int, seed: int, shuffle: bool, window: int, position: int, epochs: int):
    """The batches by the definition: windows of blocks in the order of the epoch, rows mixed within each."""
    counts = np.array([block.size for block in blocks])
    order, total = Order(counts, seed, shuffle, window if shuffle else 1), int(counts.sum())
    for epoch in range(position // total, epochs):
        numbers, number = order.epoch(epoch)[0], 0
        rows = []  # (rank in the epoch by window, block, row; the row)
        for first in range(0, len(numbers), order.shuffle_blocks):
            lie = [(place, row) for place in range(first, min(first + order.shuffle_blocks, len(numbers)))
                   for row in range(counts[numbers[place]])]  # fmt: skip
            mixed = order.within(epoch, number, len(lie))
            rows += [lie[int(i)] for i in mixed] if mixed is not None else lie
            number += 1
        start = position % total if epoch == position // total else 0
        for begin in range(start, total, size):
            some = sorted(rows[begin : begin + size])
            yield epoch * total + begin, [one_row(blocks[numbers[place]], row) for place, row in some]


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    schema=st.sampled_from([FIXED, ANY, LABELLED]),
    size=st.integers(1, 25),
    seed=st.integers(0, 2**40),
    window=st.integers(1, 4),
    shuffle=st.booleans(),
    per_file=st.sampled_from([2, 1024]),
    data=st.data(),
)
def test_batches_of_packed_rows_have_the_bits_of_blocks(counts, schema, size, seed, window, shuffle, per_file, data):
    blocks = [draw_rows(schema, count, i) for i, count in enumerate(counts)]
    position = data.draw(st.integers(0, 2 * sum(counts)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for module in ("recjax.data.storage.builder", "recjax.data.storage.blocks"):
            patch.setattr(f"{module}.BLOCKS_PER_FILE", per_file)
        path = write_prepared(Path(folder) / "data", "toy", schema, {"train": blocks}, {}).path
        more = {"seed": seed, "shuffle": shuffle, "shuffle_blocks": window, "position": position, "epochs": 2}
        stream = batches(open_prepared(path), "train", size, pack=True, workers=0, **more)
        found = [(batch.position, rows_of_batch(batch)) for batch in stream]
        assert list(path.glob("packed/*.rows"))
    assert found == list(expected_batches(blocks, size, seed, shuffle, window, position, 2))
