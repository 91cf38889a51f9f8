"""One's own data: written by a few lines of Python, trained on as data=prepared."""

from pathlib import Path

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.datasets.prepared import Prepared
from recjax.data.storage.blocks import write_prepared
from recjax.errors import DataError


def test_blocks_of_ones_own_are_read_back(tmp_path: Path) -> None:
    schema = Schema(dense=("age",), features=(Feature("item", rows=10), Feature("tags", rows=5, bag=None)))
    tags = Bags(np.array([0, 4, 1]), lengths=np.array([2, 0, 1], np.int32))
    block = Batch(
        dense=np.array([[0.5], [1.0], [2.0]], np.float32),
        bags={"item": Bags(np.array([[3], [9], [0]])), "tags": tags},
        labels=np.array([1, 0, 1], np.float32),
        weights=np.ones(3, np.float32),
    )
    write_prepared(tmp_path / "own", "my_shop", schema, {"train": [block], "validation": [], "test": [block]}, {})
    source = Prepared(str(tmp_path / "own")).open()
    assert source.name == "my_shop"
    assert source.schema == schema
    read = source.read("train", 0)
    np.testing.assert_array_equal(read.bags["item"].ids, [[3], [9], [0]])
    np.testing.assert_array_equal(read.bags["tags"].ids, [0, 4, 1])
    np.testing.assert_array_equal(read.dense, block.dense)


def test_a_missing_path_says_what_to_give() -> None:
    with pytest.raises(DataError, match="data.path=DIR"):
        Prepared().open()
