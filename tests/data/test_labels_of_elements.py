"""Labels and weights of the elements of a group, from tables of every form; hand-worked, and mistakes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from recjax.data.arrow.reader import LabelledReader
from recjax.data.arrow.scan import find
from recjax.data.batch import Label
from recjax.data.batch_checks import validate
from recjax.data.datasets.own_table import Table, prepare_files
from recjax.data.pipeline import batches
from recjax.data.prepare.encoder import open_encoder
from recjax.errors import ConfigError, DataError

ROWS = [
    {
        "u": 1,
        "hist": [{"item": 5}, {"item": 7}],
        "cands": [{"item": 7, "y": 1, "w": 2.0}, {"item": 5, "y": 0, "w": 0.5}],
    },
    {"u": 2, "hist": [], "cands": []},
    {"u": 1, "hist": [{"item": 5}], "cands": [{"item": 5, "y": 0, "w": 1.0}]},
    {"u": 2, "hist": None, "cands": [{"item": 7, "y": 1, "w": 3.0}, {"item": 5, "y": 1, "w": 0.0}]},
]
COLUMNS = ("u:id", "hist:list(item:like=cands.item)", "cands:list(item,y,w)")
CONFIG = Table(label="y:weight=w", columns=COLUMNS, split="random:1,0,0")


def written(rows, path):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_labels_and_weights_by_hand(tmp_path, ending):
    source = prepare_files(CONFIG, written(ROWS, tmp_path / f"t.{ending}"), tmp_path / "out")
    assert source.schema.label_group == "cands" and source.schema.labels == (Label("cands.y", weight="cands.w"),)
    assert [(g.name, g.features, g.like) for g in source.schema.groups] == [
        ("hist", ("hist.item",), ("cands.item",)),
        ("cands", ("cands.item",), ("",)),
    ]
    block = source.read("train", 0)
    validate(block, source.schema)
    assert block.size == 4 and block.label_lengths.tolist() == [2, 0, 1, 2]
    assert block.labels[:, 0].tolist() == [1, 0, 0, 1, 0]  # the last weighs nothing, so its label is none
    assert block.weights[:, 0].tolist() == [2, 0.5, 1, 3, 0]
    five, seven = block.bags["cands.item"].ids[[1, 0]]
    assert block.bags["hist.item"].ids.tolist() == [five, seven, five]
    (again,) = LabelledReader(find(tmp_path / f"t.{ending}"), source).chunks(0)
    encoded = open_encoder(tmp_path / "out").encode(again)
    np.testing.assert_array_equal(encoded.labels, block.labels)
    np.testing.assert_array_equal(encoded.label_lengths, block.label_lengths)


def test_one_binary_label_columns_apart_and_text(tmp_path):
    """Lists in text, with a separator of their own, and the weight of a row, which is that of each of its labels."""
    path = tmp_path / "t.csv"
    path.write_text("u,item,y,w\n1,7;5,1;0,2\n2,,,1\n1,5,0,3\n")
    columns = ("u:id", "cands:list(item:split=;,y:split=;)", "w:weight")
    source = prepare_files(Table(label="y", columns=columns, split="random:1,0,0"), path, tmp_path / "out")
    block = source.read("train", 0)
    assert source.schema.label_group == "cands" and source.schema.labels == ()
    assert block.labels.tolist() == [1, 0, 0] and block.weights.tolist() == [2, 2, 3]
    assert block.label_lengths.tolist() == [2, 0, 1]


def test_splits_and_any_order_keep_labels_beside_their_elements(tmp_path):
    """Some thousand rows, in blocks and packed: each label says which its item and user are."""
    rng = np.random.default_rng(0)
    rows = []
    for row in range(9000):
        items = rng.integers(0, 50, rng.integers(0, 4)).tolist()
        rows.append({"u": row, "cands": [{"item": item, "y": item + 100 * row} for item in items]})
    config = Table(label="y:number", columns=("u:id", "cands:list(item,y)"), split="random:0.8,0.1,0.1")
    source = prepare_files(config, written(rows, tmp_path / "t.parquet"), tmp_path / "out")
    item_of = {int(r): int(v) for v, r in zip(*values_of(tmp_path / "out", "cands.item"), strict=True)}
    user_of = {int(r): int(v) for v, r in zip(*values_of(tmp_path / "out", "u"), strict=True)}
    seen = 0
    for split in ("train", "validation", "test"):
        for pack in (False, True):
            for batch in batches(source, split, 700, seed=1, shuffle=True, epochs=1, workers=0, pack=pack):
                labels, items = batch.labels[:, 0].astype(int), batch.bags["cands.item"].ids
                assert len(labels) == len(items) == batch.label_lengths.sum()
                for row, label, item in zip(batch.label_samples, labels, items, strict=True):
                    assert label % 100 == item_of[int(item)]
                    user = int(batch.bags["u"].ids[row, 0])
                    assert user not in user_of or label // 100 == user_of[user]
                seen += batch.size
    assert seen == 2 * len(rows)


def values_of(folder, name):
    """The values of a feature, and the row of each."""
    encoder = open_encoder(folder)
    number = [feature.name for feature in encoder.features].index(name)
    values = encoder.maps[number].vocabulary.values
    return values, encoder.maps[number].rows_of(values)


APART = [{"y": [1, 0], "item": [1, 2], "w": [1.0, 1.0]}, {"y": [0], "item": [3], "w": [1.0]}]


BOTH = ["c:list(item,y)"]


@pytest.mark.parametrize(
    ("label", "columns", "rows", "words"),
    [
        (
            "y",
            BOTH,
            [*APART, {"y": [1], "item": [1, 2]}],
            r"t.parquet row 3: column 'y' is \[1\], a list of another length",
        ),
        ("y:weight=w", ["c:list(item,y,w)"], [*APART, {"y": [1], "item": [1], "w": []}], "'w' has 0 entries and 'y' 1"),
        (
            "y",
            BOTH,
            [{"y": 1, "item": [1]}, {"y": 0, "item": [2]}],
            r"column 'y' holds no lists, but c:list\(...\) has",
        ),
        ("y", BOTH, [*APART, {"y": [1, 2], "item": [1, 2]}], "row 3, element 2: the label 'y' is 2, not 0 or 1"),
        ("y,z", BOTH, [{**row, "z": 1} for row in APART], r"label: y is in c:list\(...\), z is in no list"),
        ("y", ["c:list(y)"], APART, r"c:list\(...\) has nothing but labels"),
        ("y", ["item:jagged"], APART, r"the label 'y' holds lists. .*list\(item,y\)"),
    ],
)
def test_mistakes(tmp_path, label, columns, rows, words):
    config = Table(label=label, columns=tuple(columns), split="random:1,0,0")
    with pytest.raises((ConfigError, DataError), match=words):
        prepare_files(config, written(rows, tmp_path / "t.parquet"), tmp_path / "out")
