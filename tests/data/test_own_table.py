"""Tables of one's own, prepared: what was encoded is what was in the file, whatever the file's format."""

import dataclasses
import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bucket, tables

from recjax import settings as machinery
from recjax.data.arrow import chunk_columns, roles, splits
from recjax.data.arrow import reader as readers
from recjax.data.datasets import own_table
from recjax.data.datasets.own_table import Table, open_raw, prepare_table
from recjax.data.prepare.chunk import Chunk
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import Hash, stable_hash
from recjax.data.source import SPLITS
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError, DataError, TrainingError


def prepared(config, path, out):
    return prepare_table(config, open_raw(config, path), out, overwrite=True)


CLICKS = Table(label="clicked", columns=("auto", "when:skip"))

# A row: label, weight, two ids, a bag, a number.
ROW = st.tuples(
    st.integers(0, 1),
    st.floats(0, 3, width=32),
    st.none() | st.sampled_from(["", "a", "é", "NA", " x", "a longer word"]),
    st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    st.none() | st.lists(st.none() | st.integers(-2, 3), max_size=3),
    st.none() | st.floats(-100, 100, width=32),
)


@settings(max_examples=15)
@given(st.lists(ROW, min_size=2, max_size=20), st.sampled_from(["parquet", "feather"]), st.integers(0, 3))
def test_what_was_encoded_is_what_was_in_the_file(tmp_path_factory, rows, form, seed):
    """Every value of every row comes back from ids and vocabularies; values that training lacks are unknown."""
    if len({row[0] for row in rows}) < 2 or all(row[2] in (None, "") for row in rows) or not any(r[4] for r in rows):
        return
    if all(row[5] is None for row in rows):
        return
    folder = tmp_path_factory.mktemp("table")
    labels, weights, words, numbers, bags, prices = map(list, zip(*rows, strict=True))
    table = pa.table(
        {
            "y": labels,
            "w": weights,
            "word": words,
            "n": pa.array(numbers, pa.int64()),
            "bag": pa.array(bags, pa.list_(pa.int64())),
            "price": pa.array(prices, pa.float32()),
        }
    )
    columns = ("word:id", "n:id", "bag:jagged", "price:dense", "w:weight")
    config = Table(
        label="y", columns=columns, dense="none", missing_indicators=True, split="random:0.6,0.2,0.2", split_seed=seed
    )
    path = tables.write(table, folder / f"t.{form}")
    try:
        source = prepared(config, path, folder / "out")
    except DataError as error:
        assert "left to train on" in str(error)
        return
    found = tables.original(source, open_encoder(source.path))
    drawn = splits_of(config, path)
    for split, name in enumerate(SPLITS):
        truth = [row for row, at in zip(rows, drawn, strict=True) if at == split]
        assert len(found[name]) == len(truth)
        train = [row for row, at in zip(rows, drawn, strict=True) if at == 0]
        known = {row[2].encode() for row in train if row[2]}, {row[3] for row in train}
        known_entries = {entry for row in train for entry in row[4] or []}
        for got, (label, weight, word, number, bag, price) in zip(found[name], truth, strict=True):
            assert (got["label"], got["weight"]) == (label, weight)
            assert got["word"] == (None if not word else word.encode() if word.encode() in known[0] else "?")
            assert got["n"] == (number if number in known[1] else "?")
            assert got["bag"] == [e if e is None or e in known_entries else "?" for e in bag or []]
            assert got["price"] == (0 if price is None else price)
            assert got["price_missing"] == (price is None)


@pytest.fixture(scope="module")
def table():
    return tables.clicks()


@pytest.fixture(scope="module")
def source(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    return prepared(CLICKS, tables.write(table, folder / "t.parquet"), folder / "out")


def test_the_roles_and_values_of_the_clicks(table, source):
    """By hand: the standardised price and the vector come back with the training rows' mean and deviation."""
    encoder = open_encoder(source.path)
    kinds = {f.name: (f.jagged, f.optional, f.values) for f in encoder.features}
    assert kinds == {
        "user": (False, False, "text"),
        "item_id": (False, False, "integer"),
        "kind": (False, True, "text"),
        "paid": (False, False, "integer"),
        "tags": (True, False, "integer"),
    }
    assert source.schema.dense == ("price", "vector[0]", "vector[1]")
    assert source.about["label"] == "clicked" and "by chance (seed 0): train 0.8" in source.about["splits"]
    assert list(source.about["files"]) == ["t.parquet"]
    assert source.about["table"]["proposed"]["user"][0] == "id" and "when" not in source.about["table"]["proposed"]
    split = np.array(splits_of(CLICKS, source.path.parent / "t.parquet"))
    found = tables.original(source, encoder)
    for name, number in zip(SPLITS, range(3), strict=True):
        truth = table.filter(pa.array(split == number)).to_pylist()
        train = table.filter(pa.array(split == 0))["price"].drop_null().to_numpy()
        for got, row in zip(found[name], truth, strict=True):
            assert got["user"] == row["user"].encode() and got["item_id"] == row["item_id"]
            assert got["kind"] == (row["kind"] and row["kind"].encode()) and got["paid"] == int(row["paid"])
            assert got["tags"] == (row["tags"] or []) and got["label"] == row["clicked"]
            price = 0 if row["price"] is None else (row["price"] - train.mean()) / train.std()
            assert got["price"] == pytest.approx(price, abs=1e-6)


@pytest.mark.parametrize("form", ["feather", "orc", "csv", "parts"])
def test_every_format_gives_the_same_data(table, tmp_path, form):
    table = table.drop_columns(["tags", "vector"])  # which CSV cannot hold
    truth = prepared(CLICKS, tables.write(table, tmp_path / "t.parquet"), tmp_path / "truth")
    if form == "parts":
        (tmp_path / "parts").mkdir()
        for part in range(3):
            tables.write(table.slice(100 * part, 100), tmp_path / "parts" / f"part-{part}.parquet")
        path = tmp_path / "parts"
    else:
        path = tables.write(table, tmp_path / f"t.{form}")
    found = prepared(CLICKS, path, tmp_path / "found")
    assert found.fingerprint == truth.fingerprint
    assert {**found.about, "files": 0} == {**truth.about, "files": 0}


def test_lists_as_text(table, tmp_path):
    """As CSV may hold them: the same data as from lists."""
    config = dataclasses.replace(CLICKS, columns=("auto", "when:skip", "vector:skip", "tags:jagged"))
    truth = prepared(config, tables.write(table, tmp_path / "t.parquet"), tmp_path / "truth")
    words = ["|".join(map(str, bag or [])) for bag in table["tags"].to_pylist()]
    table = table.set_column(table.schema.names.index("tags"), "tags", pa.array(words)).drop_columns(["vector"])
    columns = tuple(name for name in config.columns if not name.startswith("vector"))
    as_text = dataclasses.replace(config, columns=columns)
    found = prepared(as_text, tables.write(table, tmp_path / "t.csv"), tmp_path / "found")
    assert found.fingerprint == truth.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"user": lambda c: c.dictionary_encode(), "kind": lambda c: c.cast(pa.large_string())},
        {"price": lambda c: c.fill_null(math.nan), "paid": lambda c: c.cast(pa.int8()).cast(pa.bool_())},
        {"price": lambda c: c.cast(pa.string()).cast(pa.decimal128(12, 3))},
        {"clicked": lambda c: c.cast(pa.bool_()), "tags": lambda c: c.cast(pa.large_list(pa.int32()))},
        {"clicked": lambda c: c.cast(pa.float64()), "vector": lambda c: c.cast(pa.list_(pa.float32(), 2))},
        {"kind": lambda c: c.fill_null(""), "tags": lambda c: pa.array([t or [] for t in c.to_pylist()], c.type)},
    ],
    ids=["dictionary", "nan", "decimal", "boolean label", "fixed lists", "empty text"],
)
def test_how_values_are_stored_makes_no_difference(table, source, tmp_path, change):
    for name, how in change.items():
        table = table.set_column(table.schema.names.index(name), name, how(table[name].combine_chunks()))
    found = prepared(CLICKS, tables.write(table, tmp_path / "t.parquet"), tmp_path / "found")
    assert found.fingerprint == source.fingerprint


def test_raw_rows_are_encoded_as_the_prepared_ones(table, source):
    check_raw_rows(source, table, np.array(splits_of(CLICKS, source.path.parent / "t.parquet")))


def check_raw_rows(source, table, split):
    """By the columns that the data keep, without the reader that prepared them."""
    specs = roles.from_json(open_prepared(source.path).about["table"])
    raw = chunk_columns.raw_columns({name: table[name] for name in table.schema.names}, specs, table.num_rows)
    assert raw.faults == []
    rows = table.num_rows
    batch = open_encoder(source.path).encode(
        Chunk(np.zeros(rows, np.float32), raw.dense, raw.columns, np.zeros(rows, np.uint8))
    )
    for number, name in enumerate(SPLITS):
        truth, keep = tables.whole(source, name), split == number
        np.testing.assert_array_equal(batch.dense[keep], truth.dense)
        for feature, bags in truth.bags.items():
            entries = keep if bags.lengths is None else np.repeat(keep, batch.bags[feature].lengths)
            np.testing.assert_array_equal(batch.bags[feature].ids[entries], bags.ids)


def test_the_config_as_text_and_back(source):
    config = machinery.override(CLICKS, ["from=clicks.parquet", "columns=user:id,price:dense", "split=time:0.5,0.5,0"])
    assert (config.from_, config.columns, config.split) == (
        "clicks.parquet",
        ("user:id", "price:dense"),
        "time:0.5,0.5,0",
    )
    assert machinery.from_json(Table, machinery.to_json(config)) == config
    assert json.loads(machinery.to_json(config))["from"] == "clicks.parquet"
    assert machinery.override(Table(), machinery.assignments(config)) == config
    with pytest.raises(ConfigError, match="unknown key 'from_'. Did you mean from"):
        machinery.override(CLICKS, ["from_=x"])
    opened = dataclasses.replace(CLICKS, path=str(source.path)).open()
    assert opened.fingerprint == source.fingerprint
    with pytest.raises(DataError, match="were prepared with columns=auto,when:skip, but the config says auto"):
        Table(str(source.path), label="clicked").open()


def test_one_preparation_serves_until_the_file_or_an_option_changes(table, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    path = tables.write(table, tmp_path / "my clicks.parquet")
    config = dataclasses.replace(CLICKS, from_=str(path))
    first = config.open()
    assert first.path.parent == tmp_path / "cache" and first.path.name.startswith("table-my-clicks-")
    assert "columns=auto takes the columns so:" in capsys.readouterr().err
    again = config.open()
    assert again.path == first.path and capsys.readouterr().err == ""
    other = dataclasses.replace(config, split_seed=1).open()
    assert other.path != first.path and other.fingerprint != first.fingerprint
    tables.write(table.slice(1), path)
    assert config.open().path not in (first.path, other.path)
    shutil.rmtree(first.path / "vocabulary")
    tables.write(table, path)
    assert config.open().path == first.path and (first.path / "vocabulary").is_dir()


def test_transforms_of_single_columns_against_plain_python(tmp_path):
    """And the same for raw rows that are read later."""
    rng = np.random.default_rng(3)
    data = {
        "y": [0, 1] * 200,
        "a": rng.lognormal(size=400),
        "b": rng.normal(size=400),
        "c": rng.normal(3, 2, 400),
        "age": [None if i % 40 == 7 else float(v) for i, v in enumerate(rng.integers(0, 50, 400))],
        "word": [f"w{i}" for i in rng.integers(0, 300, 400)],
        "bag": [[int(i), int(i) + 1] for i in rng.integers(0, 9, 400)],
    }
    path = small(tmp_path, **data)
    columns = ("a:dense:log1p", "b:dense:none", "c:dense", "age:id:bucket=4", "word:id:hash=10", "bag:jagged:hash=3")
    config = Table(label="y", columns=columns, split="random:0.7,0.1,0.2")
    source = prepared(config, path, tmp_path / "out")
    encoder, split = open_encoder(source.path), np.array(splits_of(config, path))
    ages = np.array([np.nan if age is None else age for age in data["age"]])
    edges = np.quantile(ages[(split == 0) & ~np.isnan(ages)], [0.25, 0.5, 0.75])
    words = stable_hash(np.array(data["word"], np.bytes_)) % np.uint64(10)
    found = tables.original(source, encoder)
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(split == number)
        assert len(rows) == len(found[name]) > 20
        for row, got in zip(rows, found[name], strict=True):
            assert got["age"] == (None if np.isnan(ages[row]) else sum(ages[row] >= edge for edge in edges))
            assert got["word"] == words[row]
            assert got["bag"] == [int(h) for h in stable_hash(np.array(data["bag"][row])) % np.uint64(3)]
            assert got["a"] == pytest.approx(math.log1p(data["a"][row]), rel=1e-6)
            assert got["b"] == pytest.approx(data["b"][row], rel=1e-6)
            train = data["c"][split == 0]
            assert got["c"] == pytest.approx((data["c"][row] - train.mean()) / train.std(), rel=1e-4, abs=1e-6)
    occurrences = np.bincount([got["age"] for got in found["train"] if got["age"] is not None])
    assert len(occurrences) == 4 and occurrences.min() > 0.15 * sum(occurrences)
    assert source.schema.feature("word").rows == 11 and source.schema.feature("bag").rows == 4
    check_raw_rows(source, pa.table(data), split)


def test_quantiles_of_a_sample(tmp_path, monkeypatch):
    """Of 1,000 training rows every seventh is looked at, from the first on, in batches of 40: 0, 7, ..., 994."""
    monkeypatch.setattr(readers, "_SAMPLE_ROWS", 150)
    path = tables.write(pa.table({"y": [0, 1] * 500, "x": np.arange(1000) * 1.0}), tmp_path / "t.feather")
    reader = open_raw(Table(label="y", columns=("x:id:bucket=2",), split="random:1,0,0"), path)
    assert reader.specs[0].edges == (497.0,)


def test_values_that_are_rare_in_one_column_alone(tmp_path):
    path = small(tmp_path, y=[0, 1] * 4, a=list("aaaabbcd"), b=list("aaaabbcd"))
    config = Table(label="y", columns=("a:id:min_count=3", "b:id"), split="random:1,0,0")
    source = prepared(config, path, tmp_path / "out")
    assert [feature.rows for feature in source.schema.features] == [2, 5]
    with pytest.raises(ConfigError, match="min_count counts values, and ids=hash does not"):
        Table(label="y", columns=("a:id:min_count=3",), ids=Hash())


def test_of_several_processes_one_prepares(table, tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    config = dataclasses.replace(CLICKS, from_=str(tables.write(table, tmp_path / "t.parquet")))
    passes = []
    whole = own_table.open_files
    monkeypatch.setattr(own_table, "open_files", lambda *given: passes.append(time.sleep(0.2)) or whole(*given))
    with ThreadPoolExecutor(3) as pool:
        found = [future.result().fingerprint for future in [pool.submit(config.open) for _ in range(3)]]
    assert len(passes) == 1 and len(set(found)) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TrainingError, match="cannot write to .*/file/cache.*RECJAX_CACHE"):
        config.open()


def small(tmp_path, **columns):
    return tables.write(pa.table(columns), tmp_path / "t.parquet")


def splits_of(config, path):
    return [split for chunk in open_raw(config, path).chunks(0) for split in chunk.split.tolist()]


def test_splits_of_rows(tmp_path):
    path = small(
        tmp_path,
        y=[0, 1] * 3,
        t=[3, 1, 2, 6, 5, 4],
        g=["a", "a", "b", "a", "b", "b"],
        s=["Train", "test", "valid", "train", "dev", "TEST"],
    )
    base = Table(label="y", columns=("g:id",))
    cases = [
        ({"split": "time:0.5,0.3,0.2", "time": "t"}, [0, 0, 0, 2, 1, 1]),
        ({"split": "last:1,1", "group": "g", "time": "t"}, [1, 0, 0, 2, 2, 1]),
        ({"split": "last:0,1", "group": "g"}, [0, 0, 0, 2, 0, 2]),
        ({"split": "column", "split_column": "s"}, [0, 2, 1, 0, 1, 2]),
    ]
    for options, truth in cases:
        assert splits_of(dataclasses.replace(base, **options), path) == truth
    other = tables.write(pa.table({"y": [0], "g": ["z"]}), tmp_path / "other.parquet")
    tables.write(pa.table({"y": [0], "g": ["z"]}), tmp_path / "more.parquet")
    config = dataclasses.replace(base, split="random:1,0,0", test=str(other), validation=f"{tmp_path}/m*.parquet")
    assert splits_of(config, path) == [0] * 6 + [1, 2]
    assert open_raw(config, path).splits.endswith("; validation and test from files of their own")
    assert splits_of(dataclasses.replace(base, test=str(other)), path)[-1] == 2
    with pytest.raises(ConfigError, match="t.parquet is to be read for two splits"):
        open_raw(dataclasses.replace(base, test=str(path)), path)


def test_times_as_text_and_as_times_order_alike(tmp_path):
    days = ["2026-01-03", "2026-01-01", "2026-01-02", "2026-01-04"]
    config = Table(label="y", columns=("x:id",), split="time:0.5,0.25,0.25", time="t")
    for times in (
        days,
        pa.array(days).cast(pa.timestamp("s")),
        pa.array(days).cast(pa.timestamp("s")).cast(pa.date32()),
    ):
        assert splits_of(config, small(tmp_path, y=[0, 1, 0, 1], x=[1, 2, 1, 2], t=times)) == [1, 0, 0, 2]


@pytest.mark.parametrize(
    ("options", "times", "noted"),
    [
        ({"split": "time:0.5,0.25,0.25", "time": "t"}, [1, 2, 2, 4], False),
        ({"split": "time:0.5,0.25,0.25", "time": "t"}, [1, 3, 2, 4], True),
        ({"split": "random:0.5,0.25,0.25"}, [1, 3, 2, 4], False),
    ],
)
def test_rows_out_of_the_order_of_time_are_noted(tmp_path, capsys, options, times, noted):
    path = small(tmp_path, y=[0, 1, 0, 1], x=[1, 2, 1, 2], t=times)
    open_raw(Table(label="y", columns=("x:id",), **options), path)
    assert ("not in the order of 't'" in capsys.readouterr().err) is noted


@pytest.mark.parametrize(
    ("options", "labels", "truth"),
    [
        ({}, [0, 1], [0, 1]),
        ({}, [True, False], [1, 0]),
        ({}, ["1", "0"], [1, 0]),
        ({}, ["false", "True"], [0, 1]),
        ({"threshold": 4.0}, [3.5, 4.0, 5.0], [0, 1, 1]),
        ({"threshold": 4.0}, ["3", "5"], [0, 1]),
        ({"positive": "yes"}, ["yes", "no", "maybe"], [1, 0, 0]),
        ({"positive": "2"}, [1, 2, 3], [0, 1, 0]),
        ({"positive": "2"}, [1.0, 2.0], [0, 1]),
        ({"positive": "-1"}, [1, -1], [0, 1]),
        ({"positive": "true"}, [True, False], [1, 0]),
    ],
)
def test_what_counts_as_1(tmp_path, options, labels, truth):
    for form in ("parquet", "csv"):
        path = tables.write(pa.table({"y": labels, "x": range(len(labels))}), tmp_path / f"t.{form}")
        reader = open_raw(Table(label="y", columns=("x:id",), split="random:1,0,0", **options), path)
        (chunk,) = reader.chunks(0)
        assert chunk.labels.tolist() == truth


def test_rows_of_all_chunks(tmp_path, monkeypatch):
    """Chunks of 7 rows from batches of other sizes; a resumed preparation begins at any of them."""
    monkeypatch.setattr(readers, "_CHUNK_ROWS", 7)
    path = small(tmp_path, y=[0, 1] * 100, x=list(range(200)), l=[[i] * (i % 3) for i in range(200)])
    reader = open_raw(Table(label="y", columns=("x:id", "l:jagged", "y:skip")), path)
    chunks = list(reader.chunks(0))
    assert [chunk.rows for chunk in chunks] == [7] * 28 + [4] and chunks[-1].done == 1
    assert [int(c.columns["x"].values[i]) for c in chunks for i in c.columns["x"].codes] == list(range(200))
    assert [n for c in chunks for n in c.columns["l"].lengths.tolist()] == [i % 3 for i in range(200)]
    drawn = np.concatenate([c.split for c in chunks])
    np.testing.assert_array_equal(drawn, splits.at_random(splits.parse(""), 0, 0, 200))
    for start in (3, 28, 29):
        again = list(reader.chunks(start))
        assert [c.labels.tolist() for c in again] == [c.labels.tolist() for c in chunks[start:]]
        assert [c.split.tolist() for c in again] == [c.split.tolist() for c in chunks[start:]]


@pytest.mark.parametrize("form", ["parquet", "csv", "feather"])
def test_files_in_a_bucket_are_the_same_data(tmp_path, form):
    gs = bucket.install()
    table = tables.clicks(lists=False)
    truth = prepared(CLICKS, tables.write(table, tmp_path / f"t.{form}"), tmp_path / "truth")
    gs().pipe(f"gs://b/data/t.{form}", (tmp_path / f"t.{form}").read_bytes())
    for path in (f"gs://b/data/t.{form}", "gs://b/data", f"gs://b/data/*.{form}"):
        found = prepared(CLICKS, path, tmp_path / "found")
        assert found.fingerprint == truth.fingerprint
    with pytest.raises(DataError, match="gs://b/absent.csv does not exist"):
        open_raw(CLICKS, "gs://b/absent.csv")
