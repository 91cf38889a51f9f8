"""Samples of unlike lengths dealt to devices: no part has much more than the mean, and none is lost."""

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch
from recjax.data.source import between
from recjax.embedding.bind import bind
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing.capacity import PERIOD, CapacityLadder, Kinds
from recjax.embedding.routing.host import deal_rows, jagged_sizes
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import Share

TABLES = (TableSpec("item", 1000, 4, RowWiseAdagrad(0.1)),)
BOUND = bind(make_plan("row_wise", TABLES), TABLES, (FeatureSpec("items", "item", None, "none"),), 8)
B, N = 8192, 8


def zipf_batch(rng: np.random.Generator, size: int) -> Batch:
    """Lengths of 1 to 500, 40 on average, as Zipf's law has them; labels number the samples."""
    lengths, exponent = np.arange(1, 501), 1.2273945
    shares = lengths**-exponent
    assert abs(shares @ lengths / shares.sum() - 40) < 1e-3
    drawn = rng.choice(lengths, size, p=shares / shares.sum()).astype(np.int32)
    numbers = np.arange(size, dtype=np.float32)
    ids = np.repeat(np.arange(size), drawn)
    return Batch(np.zeros((size, 0), np.float32), {"items": Bags(ids, drawn)}, numbers, np.ones_like(numbers))


@pytest.mark.parametrize(("processes", "most", "fullest"), [(1, 1.1, 1.001), (2, 1.15, 1.03)])
def test_padding_is_little_beside_zipf_lengths(processes: int, most: float, fullest: float) -> None:
    """With the room that sizes leave: padded over useful elements, means of 40 batches; each process deals its own."""
    rng, ladder = np.random.default_rng(0), CapacityLadder({}, {}, 0, PERIOD, Kinds.of(BOUND))
    padded, needed = [], []
    for _ in range(40):
        whole, need = zipf_batch(rng, B), 0
        for process in range(processes):
            share = Share(N, process * N // processes, N // processes)
            own = between(whole, process * B // processes, (process + 1) * B // processes)
            need = max(need, jagged_sizes(deal_rows(own, BOUND, B, 1, share), BOUND, B // N)["items"])
        useful = len(whole.bags["items"].ids)
        padded.append(N * ladder.fit({"items": need})["items"] / useful)
        needed.append(N * need / useful)
    assert np.mean(padded) <= most and np.mean(needed) <= fullest


@pytest.mark.parametrize("size", [B, B - 1, 5000, 3, 0])
def test_every_sample_stays_with_its_own(size: int) -> None:
    """Also of batches that are not full, whose last devices have fewer samples, or none."""
    batch = zipf_batch(np.random.default_rng(1), size)
    dealt = deal_rows(batch, BOUND, B, 2, Share(N, 0, N))
    assert sorted(dealt.labels.tolist()) == list(range(size))
    numbers = dealt.labels.astype(int)
    before, after = (np.asarray(each.bags["items"].lengths) for each in (batch, dealt))
    np.testing.assert_array_equal(after, before[numbers])
    np.testing.assert_array_equal(dealt.bags["items"].ids, np.repeat(numbers, after))
