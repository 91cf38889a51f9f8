"""The stream for measuring speed: its law, its size, and that it repeats itself."""

import numpy as np
import pytest

from recjax.data.pipeline import batches
from recjax.data.synthetic.stream import ZipfStream
from recjax.errors import ConfigError


def test_ids_follow_the_law_wrapped_around() -> None:
    source = ZipfStream(rows=(1_000_000, 7), dense=0, exponent=1.5).open()
    ids = np.concatenate([source.read("train", i).bags["sparse_0"].ids.ravel() for i in range(16)])
    # zeta(1.5) = 2.6123753: P(id = k) = (k + 1)^-1.5 / 2.6123753
    for k in range(4):
        p = (k + 1) ** -1.5 / 2.6123753
        assert np.mean(ids == k) == pytest.approx(p, abs=5 * np.sqrt(p / len(ids)))
    small = source.read("train", 0).bags["sparse_1"].ids
    assert set(np.unique(small)) == set(range(7))


def test_ids_may_be_equally_frequent() -> None:
    ids = ZipfStream(rows=(50,), exponent=0).open().read("train", 0).bags["sparse_0"].ids
    counts = np.bincount(ids.ravel(), minlength=50)
    assert len(counts) == 50 and abs(counts - 4096 / 50).max() < 5 * np.sqrt(4096 / 50)


def test_rows_are_scaled_then_capped() -> None:
    source = ZipfStream(rows=(10, 1001, 50), scale=0.1, max_rows=100, ids_per_bag=(1, 2, 3)).open()
    assert [(f.rows, f.bag) for f in source.schema.features] == [(1, 1), (100, 2), (5, 3)]


def test_the_stream_repeats_itself_and_splits_differ() -> None:
    source = ZipfStream(rows=(1000,), distinct_blocks=2, train_rows=5 * 4096 + 10, test_rows=4096).open()
    assert source.row_counts("train").tolist() == [4096] * 5 + [10]
    blocks = [source.read("train", i) for i in range(6)]
    assert (blocks[0].dense == blocks[4].dense).all() and (blocks[0].dense != blocks[1].dense).any()
    assert blocks[4].position == 4 * 4096
    assert blocks[5].size == 10 and (blocks[5].labels == blocks[1].labels[:10]).all()
    assert (source.read("test", 0).dense != blocks[0].dense).any()
    again = ZipfStream(rows=(1000,), distinct_blocks=2).open().read("train", 1)
    assert (again.bags["sparse_0"].ids == blocks[1].bags["sparse_0"].ids).all()
    stream = batches(source, "train", 4096, workers=0)
    assert (next(stream).labels == blocks[0].labels).all()


def test_labels_have_the_click_rate_and_nothing_else() -> None:
    source = ZipfStream(click_rate=0.1).open()
    labels = np.concatenate([source.read("train", i).labels for i in range(8)])
    assert set(np.unique(labels)) == {0, 1}
    assert labels.mean() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ()},
        {"rows": (5, 0)},
        {"rows": (5, 5, 5), "ids_per_bag": (1, 2)},
        {"ids_per_bag": (0,)},
        {"exponent": 1.0},
        {"scale": 0.0},
        {"click_rate": 1.0},
        {"distinct_blocks": 0},
        {"train_rows": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ZipfStream(**wrong)  # type: ignore[arg-type]
