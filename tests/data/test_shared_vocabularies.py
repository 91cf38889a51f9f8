"""Columns with one vocabulary: `like=` against counts in plain Python, and features that share a table without it."""

import collections
import json

import numpy as np
import pyarrow as pa
import pytest
from support import tables
from support.commands import assert_refused, inside

from recjax.data.datasets.own_table import Table, open_raw, prepare_table
from recjax.data.prepare.encoder import open_encoder
from recjax.data.row_values import row_values
from recjax.errors import ConfigError, DataError

ITEMS = 300


def shop(rows=1200, text=False, null=True, lists=True, seed=0):
    """An item, or none, and a list of items, of which each is there; the last item is in no row but in lists."""
    rng = np.random.default_rng(seed)
    name = (lambda i: f"item {i}") if text else int
    item = [name(i) for i in np.r_[np.arange(ITEMS - 1), rng.zipf(1.5, rows) % (ITEMS - 1)][:rows]]
    if null:
        item[-1] = None
    history = [[name(j) for j in (rng.permutation(ITEMS)[: i % 4 + 1])] for i in range(rows)]
    history[:ITEMS] = [[name(ITEMS - 1 - i)] for i in range(ITEMS)]
    if not lists:
        history = [bag[0] for bag in history]
    user = [f"u{i % 40}" for i in range(rows)]
    return pa.table({"user": user, "item": item, "history": history, "clicked": [i % 2 for i in range(rows)]})


def prepared(folder, *columns, table=None, **options):
    config = Table(label="clicked", columns=columns, **{"split": "random:0.9,0.05,0.05"} | options)
    path = tables.write(shop() if table is None else table, folder / "t.parquet")
    return prepare_table(config, open_raw(config, path), folder / "out", overwrite=True)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("least", [1, 4])
def test_the_values_of_both_are_counted_together(tmp_path, text, lists, least):
    """Rows by descending count over both columns of the training rows, then by value: after unknown and missing."""
    table = shop(text=text, lists=lists)
    role = "jagged" if lists else "id"
    count = f":min_count={least}" if least > 1 else ""
    source = prepared(tmp_path, f"history:{role}:like=item", "user:id", f"item:id{count}", table=table)
    drawn = open_raw(Table(label="clicked", columns=("user:id",), split="random:0.9,0.05,0.05"), tmp_path / "t.parquet")
    counts = collections.Counter()
    (chunk,) = drawn.chunks(0)
    rows = table.to_pylist()
    for row, at in zip(rows, chunk.split, strict=True):
        if at == 0:
            bag = row["history"] if lists else [row["history"]]
            counts.update([*bag, *([] if row["item"] is None else [row["item"]])])
    order = sorted((value for value in counts if counts[value] >= least), key=lambda value: (-counts[value], value))
    row_of = {value: 2 + i for i, value in enumerate(order)}
    assert {f.name: f.rows for f in source.schema.features if f.name != "user"} == {
        "history": 2 + len(order),
        "item": 2 + len(order),
    }
    for number, name in enumerate(("train", "validation", "test")):
        batch = tables.whole(source, name)
        truth = [row for row, at in zip(rows, chunk.split, strict=True) if at == number]
        items = [1 if row["item"] is None else row_of.get(row["item"], 0) for row in truth]
        bags = [[row_of.get(v, 0) for v in (row["history"] if lists else [row["history"]])] for row in truth]
        assert batch.bags["item"].ids.ravel().tolist() == items
        assert batch.bags["history"].ids.ravel().tolist() == [v for bag in bags for v in bag]
    hashes = source.about["vocabularies"]
    assert hashes["item"] == hashes["history"] != hashes["user"]
    written = sorted(file.parent.name for file in (source.path / "vocabulary").rglob("values.npy"))
    assert written == ["1", "2"]  # that of history, number 0, is the item's


def test_new_rows_have_the_rows_of_the_shared_vocabulary(tmp_path):
    """Read again as for scores, from what the data say of themselves."""
    source = prepared(tmp_path, "history:jagged:like=item", "item:id")
    encoder = open_encoder(source.path)
    assert encoder.maps[0].vocabulary is encoder.maps[1].vocabulary
    assert [feature.like for feature in encoder.features] == ["item", ""]
    values = row_values(source, ("item", "history"))
    assert values["item"].sha256() == values["history"].sha256()


def test_three_columns_of_unlike_forms(tmp_path):
    """Unsigned and signed integers, a column that is empty, and a name that needs quotes."""
    table = pa.table(
        {
            "a,b": pa.array([2**63, 5, 7, 7], pa.uint64()),
            "small": pa.array([[5, 7], [], [7], [7]], pa.list_(pa.int32())),
            "none": pa.array([[], [], [], []], pa.list_(pa.null())),
            "clicked": [0, 1, 0, 1],
        }
    )
    columns = ('"a,b":id', 'small:jagged:like="a,b"', 'none:jagged:like="a,b"')
    source = prepared(tmp_path, *columns, table=table, split="random:1,0,0")
    assert [feature.rows for feature in source.schema.features] == [4, 4, 4]
    batch = source.read("train", 0)
    assert batch.bags["a,b"].ids.ravel().tolist() == [3, 2, 1, 1]
    assert batch.bags["small"].ids.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "error", "pattern"),
    [
        (("item:id", "history:jagged:like=itm"), ConfigError, "there is no column 'itm'. Did you mean 'item'"),
        (("item:id:like=item",), ConfigError, "the column is the same one"),
        (
            ("user:id", "item:id:like=user", "history:jagged:like=item"),
            ConfigError,
            "'history:jagged:like=item': 'item' itself has the vocabulary of 'user'. Name that column",
        ),
        (("item:id:like=history", "history:jagged:like=item"), ConfigError, "itself has the vocabulary of"),
        (("item:dense", "history:jagged:like=item"), ConfigError, "'item' is dense, which has no vocabulary"),
        (("item:id:hash=50", "history:jagged:like=item"), ConfigError, "'item' is id:hash=50, which has no"),
        (("item:id:bucket=5", "history:jagged:like=item"), ConfigError, "'item' is id:bucket=5, which has no"),
        (("history:jagged:like=item",), ConfigError, "'item' is left out, so it has no vocabulary. Add item:id, or"),
        (("item:skip", "history:jagged:like=item"), ConfigError, "'item' is skip, which has no vocabulary"),
        (("item:id", "history:jagged:hash=9:like=item"), ConfigError, "so hash, bucket and min_count make no sense"),
        (("item:id", "history:jagged:min_count=2:like=item"), ConfigError, "min_count may stand there"),
        (("item:id", "history:jagged:like="), ConfigError, "has no option 'like='"),
        (("item:dense:like=user",), ConfigError, "has no option 'like=user'"),
        (("user:id", "item:id:like=user"), DataError, "'user' holds text and 'item' integers, so they cannot share"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, columns, error, pattern):
    with pytest.raises(error) as caught:
        prepared(tmp_path, *columns)
    assert pattern in str(caught.value)


def test_ids_that_are_computed_have_no_vocabulary(tmp_path):
    command = ("data", "prepare", "table", "--from", tmp_path / "x.csv", "--out", tmp_path / "out", "label=clicked")
    done = inside(*command, "columns=item:id,history:jagged:like=item", "ids=hash")
    assert_refused(done, 2, "like shares a vocabulary, and ids=hash makes none")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tables.write(shop(), tmp_path / "shop.parquet")


def test_a_table_is_not_shared_by_features_whose_rows_mean_different_values(file, tmp_path):
    """Both have 301 rows, of 299 items and a missing one and of 300 items; then as the error says."""
    columns = "data.columns=user:id,item:id,history:jagged"
    command = (f"data.from={file}", "data.label=clicked", "data.split=random:1,0,0", "data.validation=", columns)
    config = Table(label="clicked", columns=("user:id", "item:id", "history:jagged"), split="random:1,0,0")
    features = prepare_table(config, open_raw(config, file), tmp_path / "prepared").schema.features
    assert [feature.rows for feature in features] == [41, 301, 301]
    share = ("embedding.features.history.share=item", "train.steps=1")
    refused = assert_refused(
        inside("plan", "table", *command, *share),
        2,
        r"embedding.features.history.share=item: .* mean the same in both, but ",
        r"(\d+ is (no row|row \d+) of 'history' and (no row|row \d+) of 'item'; ){2}\d+ is ",
        "Prepare the data with one vocabulary for both features: "
        "data.columns=user:id,item:id,history:jagged:like=item.$",
    )
    advice = refused.rsplit(" ", 1)[1].removesuffix(".")
    assert inside("plan", "table", *command[:-1], advice, *share).status == 0


def test_other_numbers_of_rows_are_refused_with_the_same_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    file = tables.write(shop(null=False), tmp_path / "shop.parquet")
    command = ("plan", "table", f"data.from={file}", "data.label=clicked", "data.split=random:1,0,0")
    done = inside(*command, "embedding.features.history.share=item")
    assert_refused(
        done, 2, r"history has 301 rows and item has 300", "features: data.columns=auto,history:jagged:like=item.$"
    )


@pytest.mark.parametrize(
    ("history", "null", "ids", "what"),
    [
        (pa.string(), False, ["hash", "99"], "for text, hashed to 99 rows and those of 'item' for integer, hashed to"),
        (pa.int64(), True, ["modulo", "99,98"], "those of 'item' for integer, modulo to 98 rows or missing"),
        (pa.int64(), False, ["hash", "99"], ""),
    ],
)
def test_computed_rows_are_shared_where_one_function_makes_them(tmp_path, monkeypatch, history, null, ids, what):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    table = shop(null=null)
    table = table.set_column(2, "history", table["history"].cast(pa.list_(history)))
    file = tables.write(table, tmp_path / "shop.parquet")
    done = inside(
        *("plan", "table", f"data.from={file}", "data.label=clicked", "data.columns=history:jagged,item:id"),
        *(f"data.ids={ids[0]}", f"data.ids.rows={ids[1]}", "embedding.features.history.share=item"),
    )
    if what:
        assert_refused(done, 2, f"share=item: .* {what}", "Prepare the data with values of one type")
    else:
        assert done.status == 0, done.err


def test_a_description_that_is_damaged_is_refused(tmp_path):
    """As an editor leaves it, in data whose other parts are whole."""
    source = prepared(tmp_path, "item:id", "history:jagged")
    for described in ({"columns": [{"name": "item"}]}, {"columns": 5}, {"column": []}, [1]):
        source.about["table"] = described
        with pytest.raises(DataError, match="what they say of their columns makes no sense. Prepare them again"):
            row_values(source, ("item", "history"))


def test_data_whose_ids_are_row_numbers_share_by_count(good, tmp_path):
    """As before: nothing is known of what their rows stand for."""
    from recjax.data.storage.blocks import open_prepared

    assert row_values(open_prepared(good), ("x", "y")) == {}


def test_data_that_were_prepared_before_have_their_description(tmp_path):
    """Of columns without like nothing is added, so that old data are the same as new ones."""
    source = prepared(tmp_path, "item:id", "history:jagged")
    described = json.dumps(source.about)
    assert "like" not in described
