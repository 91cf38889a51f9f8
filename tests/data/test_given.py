"""Blocks as one's own code gives them: what can be meant in one way is taken, all else refused with its place."""

# mypy: disable-error-code="arg-type,dict-item"

import dataclasses
import json
import re

import numpy as np
import pytest

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.batch_checks import validate
from recjax.data.datasets.prepared import Prepared
from recjax.data.given import fitted
from recjax.data.source import take
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.embedding.bind import bind
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import make_plan
from recjax.embedding.routing.host import pack, route_on_host
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import DataError

SCHEMA = Schema(("age",), (Feature("item", 10), Feature("pair", 6, bag=2), Feature("tags", 5, bag=None)))
BLOCK = Batch(
    dense=np.array([[0.5], [1.0], [2.0]], np.float32),
    bags={
        "item": Bags(np.array([[3], [9], [0]])),
        "pair": Bags(np.array([[0, 1], [2, 3], [4, 5]])),
        "tags": Bags(np.array([0, 4, 1]), np.array([2, 0, 1])),
    },
    labels=np.array([1, 0, 1], np.float32),
    weights=np.ones(3, np.float32),
)


def with_bags(**bags):
    return dataclasses.replace(BLOCK, bags={**BLOCK.bags, **bags})


def fit(block):
    return fitted(block, SCHEMA, "train", 4, 100)


@pytest.mark.parametrize(
    "block",
    [
        dataclasses.replace(BLOCK, weights=None),
        dataclasses.replace(BLOCK, weights=[1, 1, 1]),
        dataclasses.replace(BLOCK, dense=[[0.5], [1], [2]]),
        dataclasses.replace(BLOCK, dense=np.array([0.5, 1, 2], np.float64)),
        dataclasses.replace(BLOCK, dense=np.array([[0.5], [1], [2]], object)),
        dataclasses.replace(BLOCK, labels=[True, False, True]),
        dataclasses.replace(BLOCK, labels=np.array([[1], [0], [1]])),
        with_bags(item=Bags(np.array([3, 9, 0]))),
        with_bags(item=np.array([3, 9, 0], np.uint8)),
        with_bags(item=[3, 9, 0]),
        with_bags(item=np.array([3.0, 9.0, 0.0])),
        with_bags(item=np.array([[3], [9], [0]], object)),
        with_bags(pair=[[0, 1], [2, 3], [4, 5]]),
        with_bags(tags=[[0, 4], [], [1]]),
        with_bags(tags=Bags([0, 4, 1], [2, 0, 1])),
        with_bags(tags=Bags(np.array([0, 4, 1], np.uint64), np.array([2, 0, 1], np.uint64))),
    ],
)
def test_what_can_be_meant_in_one_way_is_taken(block):
    made = fit(block)
    assert made.position == 100
    for name in ("dense", "labels", "weights"):
        np.testing.assert_array_equal(getattr(made, name), getattr(BLOCK, name))
    for name, bags in BLOCK.bags.items():
        np.testing.assert_array_equal(made.bags[name].ids, bags.ids)
        np.testing.assert_array_equal(made.bags[name].lengths, bags.lengths)


def test_an_array_is_bags_of_equal_size():
    made = fit(with_bags(tags=np.array([[0, 1], [2, 3], [4, 0]]))).bags["tags"]
    assert (made.ids.tolist(), made.lengths.tolist()) == ([0, 1, 2, 3, 4, 0], [2, 2, 2])


@pytest.mark.parametrize(
    ("block", "pattern"),
    [
        ({"labels": 1}, r"block 4 is a dict, not a recjax.data.batch.Batch"),
        (dataclasses.replace(BLOCK, labels=None), "block 4: labels is None. Give 0 or 1"),
        (dataclasses.replace(BLOCK, labels=np.array([1, np.nan, 0])), r"block 4: labels is nan in sample 101 \(row 1"),
        (dataclasses.replace(BLOCK, labels=np.array(["1", "0", "1"])), "labels must be numbers, but row 0 is .*'1'"),
        (dataclasses.replace(BLOCK, labels=np.zeros((3, 2))), r"labels have shape \(3, 2\)"),
        (dataclasses.replace(BLOCK, dense=None), "block 4: dense must be an array, but is None"),
        (dataclasses.replace(BLOCK, dense=np.array([[1], ["old"], [2]], object)), "dense .* row 1 of 'age' is 'old'"),
        (dataclasses.replace(BLOCK, dense=[[1], [2, 3], [4]]), "dense .* a list whose rows differ in length"),
        (dataclasses.replace(BLOCK, dense=np.zeros((3, 2))), r"dense has shape \(3, 2\).*\(age\) ask for \(3, 1\)"),
        (
            dataclasses.replace(BLOCK, dense=np.array([[1.0], [2.0], [1e39]])),
            r"block 4: dense feature 'age' is 1e\+39 in sample 102 .*must be finite as float32",
        ),
        (dataclasses.replace(BLOCK, weights=np.ones(2)), r"block 4: .*weights has shape \(2,\)"),
        (dataclasses.replace(BLOCK, bags=[1]), r"bags is a list, not a dict"),
        (dataclasses.replace(BLOCK, bags={"item": [1, 2, 3]}), "has no feature 'pair'; it has item"),
        (with_bags(other=[1, 2, 3]), "has a feature 'other' that the schema does not name; it names item, pair, tags"),
        (with_bags(item=["a", "b", "c"]), r"feature 'item': ids must be integers, but row 0 is .*'a'.*Map the values"),
        (with_bags(item=np.array([1, np.nan, 2])), r"feature 'item': ids must be integers, but row 1 is .*nan"),
        (with_bags(item=np.array([1, 2.5, 2])), r"feature 'item': ids must be integers, but row 1 is .*2\.5"),
        (with_bags(item=[1, 2, 10]), r"block 4: id 10 of feature 'item' in sample 102 \(row 2"),
        (with_bags(item=[[1, 2], [3, 4], [5, 6]]), r"feature 'item': ids have shape \(3, 2\), .* ask for \(3, 1\)"),
        (with_bags(pair=np.arange(6)), r"feature 'pair': ids have shape \(6,\), but 3 samples of 2 id\(s\)"),
        (with_bags(item=Bags(np.array([1, 2, 3]), np.ones(3, int))), "'item': lengths are given.*declare .* jagged"),
        (with_bags(tags=Bags(np.array([0, 4, 1]))), "'tags': the feature is jagged, so Bags needs .* lengths"),
        (with_bags(tags=np.array([0, 4, 1])), "feature 'tags': an? ndarray of shape .3,. does not say which"),
        (with_bags(tags=[[0], ["x"], []]), "feature 'tags': ids of row 1 must be integers, but row 0 is"),
        (with_bags(tags=Bags(np.array([0, 4, 1]), np.array([2, 0, 2]))), "'tags', .* lengths sum to 4"),
    ],
)
def test_what_else_is_refused_with_its_place(block, pattern):
    with pytest.raises(DataError) as caught:
        fit(block)
    text = str(caught.value)
    assert text.startswith("split 'train', block 4") and re.search(pattern, text) and "\n" not in text, text


def test_a_table_is_not_printed_whole(tmp_path):
    class DataFrame(dict):  # what matters of pandas's
        shape, columns = (1000, 1), ["label"]

    frame = DataFrame(label=list(range(1000)))
    for splits in ({"train": frame}, frame, {"train": [frame]}):
        with pytest.raises(DataError, match=r"a DataFrame of shape \(1000, 1\)") as caught:
            write_prepared(tmp_path / "own", "own", SCHEMA, splits, {})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_ids_and_lengths(dtype):
    """Of 300 bags of three ids, in whatever order the rows are taken."""
    ids, lengths = np.arange(900) % 200, np.full(300, 3)
    bags = Bags(ids.astype(dtype), lengths.astype(dtype))
    batch = Batch(np.zeros((300, 0), np.float32), {"tags": bags}, np.zeros(300, np.float32), np.ones(300, np.float32))
    validate(batch, Schema((), (Feature("tags", 200, None),)))
    rows = np.array([299, 0, 7])
    taken = take(batch, rows).bags["tags"]
    assert taken.ids.tolist() == [ids[3 * row + i] for row in rows for i in range(3)]
    feature = FeatureSpec("tags", "tags", None, "none")
    tables = (TableSpec("tags", 200, 4, RowWiseAdagrad(), None),)
    bound = bind(make_plan("row_wise", tables), tables, (feature,), 2)
    signed = dataclasses.replace(batch, bags={"tags": Bags(ids, lengths)})
    ours, theirs = (
        pack(counted, bound, counted.required_capacities).features["tags"]
        for counted in (route_on_host(one, bound, 300) for one in (batch, signed))
    )
    np.testing.assert_array_equal(ours.inverse, theirs.inverse)


def test_an_unsigned_id_that_no_signed_one_is_equal_to():
    batch = with_bags(item=np.array([[3], [9], [2**64 - 1]], np.uint64))
    with pytest.raises(DataError, match=f"id {2**64 - 1} of feature 'item' in sample 102"):
        fit(batch)


@pytest.mark.parametrize("name", ["valid", "val", "dev", "Validation", "VAL"])
def test_other_names_of_the_validation_split(tmp_path, name):
    splits = {"Train": [BLOCK, BLOCK], name: BLOCK, "test": [BLOCK]}  # and one block alone stands for a list
    source = write_prepared(tmp_path / "own", "own", SCHEMA, splits, {})
    assert {split: source.row_counts(split).tolist() for split in ("train", "validation", "test")} == {
        "train": [3, 3],
        "validation": [3],
        "test": [3],
    }
    assert source.read("validation", 0).labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("splits", "pattern"),
    [
        ({"train": [BLOCK], "holdout": [BLOCK]}, "there is no split 'holdout'. The splits are train, validation, test"),
        ({"train": [BLOCK], "eval": [BLOCK]}, "there is no split 'eval'"),
        ({"train": [BLOCK], "val": [BLOCK], "dev": []}, "'train', 'val', 'dev': two of these mean validation"),
        ({"train": None}, "split 'train' is None, not a list"),
        ([BLOCK], "the splits are a list, not a dict"),
    ],
)
def test_splits_that_mean_nothing_are_refused(tmp_path, splits, pattern):
    with pytest.raises(DataError, match=pattern):
        write_prepared(tmp_path / "own", "own", SCHEMA, splits, {})
    assert not (tmp_path / "own").exists()


def test_a_folder_of_an_older_version_whose_split_is_called_valid(tmp_path, monkeypatch):
    """It kept any name; its fingerprint stays, for runs were made with it."""
    with monkeypatch.context() as older:
        older.setattr("recjax.data.given.named_splits", dict)
        made = write_prepared(tmp_path / "own", "own", SCHEMA, {"train": [BLOCK], "valid": [BLOCK], "test": []}, {})
    assert "valid" in json.loads((tmp_path / "own" / MANIFEST).read_text())["splits"]
    source = Prepared(str(tmp_path / "own")).open()
    assert source.row_counts("validation").tolist() == [3] and source.fingerprint == made.fingerprint
    assert source.read("validation", 0).labels.tolist() == [1, 0, 1]
    open_prepared(tmp_path / "own").verify()


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        (Schema("age", ()), r"dense is 'age', not a tuple\. Write dense=\(\"age\",\), with its comma"),
        (Schema((), Feature("item", 3)), "features is a Feature, not a tuple"),
        (Schema((), ("item",)), "the schema has 'item' among its features"),
        (Schema((), (Feature("item", 10.5),)), r"feature 'item' of the schema has rows=10\.5"),
        (Schema((), (Feature("item", 10, bag=0),)), "bag=0"),
        (Schema(("x", "x"), ()), "names 'x' twice"),
        ({"item": 10}, "the schema is a dict, not a recjax.data.batch.Schema"),
    ],
)
def test_a_schema_that_makes_no_sense(tmp_path, schema, pattern):
    with pytest.raises(DataError, match=pattern):
        write_prepared(tmp_path / "own", "own", schema, {"train": [BLOCK]}, {})


def test_what_is_said_of_the_data_must_be_json(tmp_path):
    with pytest.raises(DataError, match="`about` must be a dict of JSON values"):
        write_prepared(tmp_path / "own", "own", SCHEMA, {"train": [BLOCK]}, {"made": {1, 2}})
    schema = Schema(["age"], list(SCHEMA.features))  # lists do as well
    made = write_prepared(tmp_path / "own", "own", schema, {"train": [BLOCK]}, {"names": ("a", "b")})
    assert made.schema == SCHEMA and made.about == {"names": ["a", "b"]}
