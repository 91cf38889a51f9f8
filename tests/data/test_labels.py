"""Several labels: in a schema, in blocks of one's own, and as columns of a table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recjax
from recjax.data.arrow import labels
from recjax.data.arrow.label import Label as Meaning
from recjax.data.batch import Bags, Batch, Feature, Label, Schema
from recjax.data.batch_checks import validate
from recjax.data.datasets.own_table import Table
from recjax.data.prepare.encoder import open_encoder
from recjax.data.source import between, concatenate, take
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.errors import ConfigError, DataError

SCHEMA = Schema((), (Feature("x", 10),), (Label("click"), Label("rating", "number"), Label("stars", "class", 3)))


def block(n: int = 5) -> Batch:
    labels = np.stack([np.arange(n) % 2, np.linspace(-1, 1, n), np.arange(n) % 3], axis=1).astype(np.float32)
    return Batch(np.zeros((n, 0), np.float32), {"x": Bags(np.arange(n)[:, None])}, labels, np.ones_like(labels))


def test_blocks_of_several_labels_are_kept_as_they_are(tmp_path: Path) -> None:
    whole = dataclasses.replace(block(), weights=np.arange(15, dtype=np.float32).reshape(5, 3))
    made = write_prepared(tmp_path / "out", "own", SCHEMA, {"train": [whole]}, {})
    found = open_prepared(tmp_path / "out")
    assert (
        found.schema == made.schema == SCHEMA and json.loads((tmp_path / "out" / MANIFEST).read_text())["format"] == 2
    )
    read = found.read("train", 0)
    np.testing.assert_array_equal(read.labels, whole.labels)
    np.testing.assert_array_equal(read.weights, whole.weights)
    parts = concatenate([between(read, 0, 2), take(read, np.array([4, 2]))])
    np.testing.assert_array_equal(parts.labels, whole.labels[[0, 1, 4, 2]])
    np.testing.assert_array_equal(parts.weights, whole.weights[[0, 1, 4, 2]])


def test_weights_of_samples_are_those_of_each_label(tmp_path: Path) -> None:
    given: Any = dataclasses.replace(block(), weights=np.array([1, 2, 0, 1, 1.0]))
    read = write_prepared(tmp_path / "out", "own", SCHEMA, {"train": given}, {}).read("train", 0)
    np.testing.assert_array_equal(read.weights, np.repeat([[1], [2], [0], [1], [1]], 3, axis=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.labels.__setitem__((3, 0), 0.5), r"label 'click' of sample 3 is 0\.5; it must be 0 or 1"),
        (
            lambda b: b.labels.__setitem__((3, 2), 3),
            r"label 'stars' of sample 3 is 3\.0; it must be a class from 0 to 2",
        ),
        (lambda b: b.labels.__setitem__((3, 1), np.nan), r"labels is nan in sample 3"),
        (lambda b: b.weights.__setitem__((3, 1), -1), r"the weight of label 'rating' of sample 3 is -1"),
    ],
)
def test_labels_that_are_not_of_their_kind(change: Any, words: str) -> None:
    given = block()
    change(given)
    with pytest.raises(DataError, match=words):
        validate(given, SCHEMA)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("click", "not a tuple"),
        ((Label("a"), Label("a")), "two labels 'a'"),
        (("a",), "among its labels"),
        ((Label("a", kind="float"),), r"The kinds are binary, number, class"),  # type: ignore[arg-type]
        ((Label("a", "class"),), r"classes=0.*classes=5"),
        ((Label("a", "number", 3),), r"Leave that out"),
    ],
)
def test_schemas_that_make_no_sense(tmp_path: Path, of: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        write_prepared(tmp_path / "out", "own", dataclasses.replace(SCHEMA, labels=of), {"train": [block()]}, {})


def test_labels_of_another_width(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shape \(5, 3\), but the schema names 2: click, rating.*\[n, 2\]"):
        write_prepared(
            tmp_path / "out", "own", dataclasses.replace(SCHEMA, labels=SCHEMA.labels[:2]), {"train": [block()]}, {}
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clicked", None),
        ("rating:float", None),  # a name with a colon, as RecBole has it
        ("rating:number", [labels.Column(Meaning("rating"), "number")]),
        ("a:b:class,c", [labels.Column(Meaning("a:b"), "class"), labels.Column(Meaning("c"))]),
        ("a:weight=w:binary", [labels.Column(Meaning("a"), "binary", "w")]),
        ("a:threshold=4", [labels.Column(Meaning("a", 4.0))]),
        ("a:positive=yes,b", [labels.Column(Meaning("a", None, "yes")), labels.Column(Meaning("b"))]),
    ],
)
def test_the_grammar(text: str, expected: list[labels.Column] | None) -> None:
    found = labels.parse(text)
    assert (None if found is None else list(found.each)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,a", "'a' is named twice"),
        ("a,", "not at all"),
        ("a:number:threshold=3,b", "none to 'a' as a number label"),
        ("a:positive=1:threshold=3", "one of them at most"),
        ("a:threshold=x,b", "threshold=x is no number"),
    ],
)
def test_labels_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        labels.parse(text)
    with pytest.raises(ConfigError, match="threshold and positive are of a single"):
        Table(label="a,b", threshold=3)


ROWS: dict[str, Any] = {
    "user": [1, 2, 3, 1, 2, 3, 1, 2],
    "clicked": [1, 0, 1, 1, 0, 1, 0, 1],
    "bought": [True, None, False, True, None, False, None, True],
    "stars": ["10", "2", "2", "10", "3", "10", "2", "3"],
    "rating": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5],
    "weight": [1.0, 2, 1, 1, 1, 1, 1, 1],
}
LABELS = "clicked,bought:weight=clicked,stars:class,rating:number"


def prepared(folder: Path, rows: dict[str, Any], label: str = LABELS, **more: Any) -> Any:
    given = {"columns": "user:id,weight:weight", "split": "random:1,0,0", **more}
    recjax.prepare(pa.table(rows), label, folder / "out", **given)
    return open_prepared(folder / "out")


def test_a_table_of_several_labels(tmp_path: Path) -> None:
    source = prepared(tmp_path, ROWS)
    assert source.schema.labels == (
        Label("clicked"),
        Label("bought", weight="clicked"),
        Label("stars", "class", 3),
        Label("rating", "number"),
    )
    read = source.read("train", 0)
    clicked = np.array(ROWS["clicked"])
    bought, stars = [1, 0, 0, 1, 0, 0, 0, 1], [2, 0, 0, 2, 1, 2, 0, 1]  # classes 2, 3 and 10, as numbers
    np.testing.assert_array_equal(read.labels, np.stack([clicked, bought, stars, ROWS["rating"]], axis=1))
    weight = np.array(ROWS["weight"])
    np.testing.assert_array_equal(read.weights, np.stack([weight, weight * clicked, weight, weight], axis=1))
    assert [each["classes"] for each in source.about["table"]["labels"]] == [[], [], ["2", "3", "10"], []]
    assert "bought (binary, where clicked is above 0)" in source.about["label"]
    encoder = open_encoder(source.path)
    assert encoder.schema == source.schema


def test_columns_of_labels_are_no_features(tmp_path: Path) -> None:
    assert [f.name for f in prepared(tmp_path, ROWS, columns="auto").schema.features] == ["user", "weight"]
    with pytest.raises(ConfigError, match="'bought' is a label, or its weight"):
        prepared(tmp_path / "b", ROWS, columns="user:id,bought:id")
    with pytest.raises(ConfigError, match=r"label: .* has no column 'bougt'\. Did you mean 'bought'"):
        prepared(tmp_path / "c", ROWS, "clicked,bougt")


@pytest.mark.parametrize(
    ("label", "change", "words"),
    [
        ("clicked,bought", {}, r"row 2: column 'bought' is null, not a label of 0 or 1.*weight=COLUMN"),
        ("clicked,rating:number", {"rating": [None, *ROWS["rating"][1:]]}, r"row 1: column 'rating' is null"),
        ("clicked,stars:class", {"stars": ["2"] * 8}, r"'?stars'? is the same in all rows"),
        ("clicked,rating:number:weight=off", {"off": [0] * 8}, "of weight 0 in all rows"),
        ("clicked,rating:number:weight=off", {"off": [1, -1, *[1] * 6]}, "row 2: column 'off' is -1, not a weight"),
        (
            "clicked,rating:number:weight=off",
            {"off": [1, 1e39, *[1] * 6]},
            r"row 2: column 'off' is 1e\+39, not a weight",
        ),
        (
            "clicked,rating:number",
            {"rating": [1e39, *ROWS["rating"][1:]]},
            r"row 1: column 'rating' is 1e\+39, not a n",
        ),
        ("clicked,rating:class", {"rating": [[1]] * 8}, "holds lists"),
    ],
)
def test_labels_that_teach_nothing(tmp_path: Path, label: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        prepared(tmp_path, ROWS | change, label)


def test_one_label_is_prepared_as_before_there_were_several(tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    source = prepared(tmp_path, ROWS, "clicked")
    assert source.schema.labels == () and source.read("train", 0).labels.shape == (8,)
    manifest = json.loads((source.path / MANIFEST).read_text())
    assert manifest["format"] == 1 and set(manifest["schema"]) == {"dense", "features"}
