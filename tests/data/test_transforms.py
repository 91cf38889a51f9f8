"""Recorded transforms of a table's columns: raw rows are encoded as the prepared ones, however they come."""

import datetime
import json
import math
import zoneinfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tables
from support.commands import assert_refused, inside

import recjax
from recjax.data.arrow import row_filter
from recjax.data.datasets.own_table import Table, open_raw, prepare_table
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import Frequency, Hash, stable_hash
from recjax.data.source import SPLITS
from recjax.data.storage.blocks import open_prepared
from recjax.errors import ConfigError, DataError
from recjax.serving import rows as serving_rows
from recjax.serving.faults import RowFaults

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

ZONE = zoneinfo.ZoneInfo("America/New_York")
FIRST = datetime.datetime(1995, 1, 1, tzinfo=datetime.UTC)

# A row: label, word, number of an id, price, list, vector, time.
ROW = st.tuples(
    st.integers(0, 1),
    st.none() | st.sampled_from(["", "a", "b*", "\\", "*", "é"]),
    st.none() | st.integers(-3, 3),
    st.none() | st.floats(-9, 9, width=16),
    st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3),
    st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=2),
    st.none() | st.integers(0, 40 * 365 * 86400),
)
# Beside those drawn: rows of both labels that keep to all conditions below, and one where all is missing.
ALWAYS = [(0, "a", 1, 1.0, [1], [0, 0], 10**8), (1, "b*", -1, 2.0, [], [1, 1], 10**9), (1, *[None] * 4, [0, 2], None)]
DENSE = st.sampled_from(["log1p", "log_shift", "standard", "none"])
OF_IDS = st.sampled_from(["", ":min_count=2", ":hash=3"])


@st.composite
def options(draw):
    """Every transform there is, by chance on columns that can have it."""
    ids = draw(st.sampled_from([Frequency(), Frequency(2), Hash((5,))]))
    count = OF_IDS if isinstance(ids, Frequency) else st.sampled_from(["", ":hash=3"])
    price = draw(st.sampled_from([f"dense:{draw(DENSE)}", "id:bucket=3"]))
    zone = draw(st.sampled_from(["", ":zone=America/New_York"]))
    columns = [
        f"word:id{draw(count)}",
        f"n:id{draw(count)}",
        f"price:{price}",
        f"list:jagged{draw(count)}",
        f"vector:vector:{draw(DENSE)}",
        f"t:time:year:month:day:weekday:hour:minute{zone}",
        f"word*n:cross{draw(count)}",
        f"t.hour*word*n:cross{draw(count)}",
    ]
    if columns[2].startswith("price:id"):
        columns.append("price*word:cross")
    where = draw(st.sampled_from([(), ("n>=-2",), ("word!=", "price<8"), ("t>1996-01-01",), ("word=a|b*",)]))
    return Table(
        label="y",
        columns=tuple(columns),
        ids=ids,
        missing_indicators=draw(st.booleans()),
        where=where,
        split="random:0.7,0.1,0.2",
        split_seed=draw(st.integers(0, 3)),
    )


def table_of(rows, form):
    labels, words, numbers, prices, lists, vectors, times = map(list, zip(*rows, strict=True))
    return pa.table(
        {
            "y": labels,
            "word": pa.array(words, pa.string()),
            "n": pa.array(numbers, pa.int64()),
            "price": pa.array(prices, pa.float64()),
            "list": pa.array(lists, pa.list_(pa.int64())),
            "vector": pa.array(vectors, pa.list_(pa.float64())),
            "t": pa.array(
                [None if t is None else FIRST + datetime.timedelta(seconds=t) for t in times], pa.timestamp("s", "UTC")
            ),
        }
    )


def as_json(row):
    return {name: value.isoformat() if isinstance(value, datetime.datetime) else value for name, value in row.items()}


def encoded(path, source):
    """Rows of a file as `predict` reads them: their numbers from 0, and one batch of all."""
    encoder, faults = open_encoder(source.path), RowFaults()
    parts = list(serving_rows.read(path, "table", encoder, faults, (), source.about["table"]))
    assert len(parts) == 1 and not faults.count
    return parts[0].numbers - 1, encoder.encode(parts[0].chunk), faults.left_out


@pytest.mark.full
@settings(max_examples=10)
@given(st.lists(ROW, max_size=16), options(), st.sampled_from(["parquet", "feather"]))
def test_raw_rows_are_encoded_as_prepared_ones(tmp_path_factory, rows, config, form):
    rows = [*ALWAYS, *rows, *ALWAYS]
    folder = tmp_path_factory.mktemp("transforms")
    table = table_of(rows, form)
    path = tables.write(table, folder / f"t.{form}")
    try:
        reader = open_raw(config, path)
    except DataError as error:
        assert "left to train on" in str(error)
        return
    source = prepare_table(config, reader, folder / "out")
    split = np.concatenate([chunk.split for chunk in reader.chunks(0)])
    lines = folder / "t.jsonl"
    lines.write_text("".join(json.dumps(as_json(row)) + "\n" for row in table.to_pylist()))
    for raw in (path, lines):
        numbers, batch, left_out = encoded(raw, source)
        assert left_out == source.about["table"].get("where", {}).get("left_out", 0) == len(rows) - len(numbers)
        for number, name in enumerate(SPLITS):
            keep, truth = split == number, tables.whole(source, name)
            if truth is None:
                assert not keep.any()
                continue
            np.testing.assert_array_equal(batch.dense[keep], truth.dense)
            for feature, bags in truth.bags.items():
                entries = keep if bags.lengths is None else np.repeat(keep, batch.bags[feature].lengths)
                np.testing.assert_array_equal(batch.bags[feature].ids[entries], bags.ids, feature)


def by_hand(row, config):
    """Values of parts and crosses of a row in plain Python."""
    time = row["t"] if row["t"] is None else row["t"].astimezone(ZONE)
    parts = {name: None if time is None else getattr(time, name) for name in ("year", "month", "day", "hour", "minute")}
    parts["weekday"] = None if time is None else time.weekday()
    word = row["word"] or None
    escaped = word and word.replace("\\", "\\\\").replace("*", "\\*")
    sides = (escaped, row["n"])
    found = {f"t.{name}": value for name, value in parts.items()}
    found["word*n"] = None if None in sides else f"{escaped}*{row['n']}".encode()
    triple = (parts["hour"], *sides)
    found["t.hour*word*n"] = None if None in triple else f"{parts['hour']}*{escaped}*{row['n']}".encode()
    return found


COLUMNS = (
    "word:id",
    "n:id",
    "t:time:year:month:day:weekday:hour:minute:zone=America/New_York",
    "word*n:cross",
    "t.hour*word*n:cross",
)


@settings(max_examples=5)
@given(st.lists(ROW, max_size=16))
def test_parts_of_times_and_crosses_against_plain_python(tmp_path_factory, rows):
    rows = [*ALWAYS, *rows]
    folder = tmp_path_factory.mktemp("transforms")
    config = Table(label="y", columns=COLUMNS, split="random:1,0,0")
    table = table_of(rows, "parquet")
    source = prepare_table(config, open_raw(config, tables.write(table, folder / "t.parquet")), folder / "out")
    found = tables.original(source, open_encoder(source.path))["train"]
    for got, row in zip(found, table.to_pylist(), strict=True):
        truth = by_hand(row, config)
        assert {name: got[name] for name in truth} == truth


def test_a_cross_may_be_hashed_and_its_rare_values_merged(tmp_path):
    table = pa.table({"y": [0, 1] * 3, "a": list("xxxyyz"), "b": [1, 1, 2, 1, 1, 1]})
    path = tables.write(table, tmp_path / "t.parquet")
    config = Table(
        label="y", columns=("a:id", "b:id", "a*b:cross:min_count=2", "b*a:cross:hash=4"), split="random:1,0,0"
    )
    source = prepare_table(config, open_raw(config, path), tmp_path / "out")
    rows = tables.original(source, open_encoder(source.path))["train"]
    assert [row["a*b"] for row in rows] == [b"x*1", b"x*1", "?", b"y*1", b"y*1", "?"]
    keys = np.array([f"{b}*{a}" for a, b in zip("xxxyyz", [1, 1, 2, 1, 1, 1], strict=True)], "S")
    assert [row["b*a"] for row in rows] == [int(v) for v in stable_hash(keys) % np.uint64(4)]


@pytest.mark.parametrize(
    ("times", "kind"),
    [
        (pa.array([86400 + 3600, None], pa.int64()), "seconds"),
        (pa.array([(1_700_000_000 + 3600) * 1000, None], pa.int64()), "milliseconds"),
        (pa.array(["1970-01-02 01:00:00", ""]), "text"),
        (pa.array([datetime.date(1970, 1, 2), None]), "dates"),
    ],
)
def test_how_times_may_be_stored(tmp_path, times, kind):
    path = tables.write(pa.table({"y": [0, 1], "t": times}), tmp_path / "t.parquet")
    config = Table(label="y", columns=("t:time",), split="random:1,0,0")
    source = prepare_table(config, open_raw(config, path), tmp_path / "out")
    rows = tables.original(source, open_encoder(source.path))["train"]
    truth = {"seconds": (1, 4), "milliseconds": (23, 1), "text": (1, 4), "dates": (0, 4)}[kind]
    assert [(row["t.hour"], row["t.weekday"]) for row in rows] == [truth, (None, None)]


def test_every_format_keeps_to_the_same_conditions(tmp_path):
    days = [datetime.datetime(2026, 1, day + 1) for day in range(6)]
    table = pa.table(
        {
            "y": [0, 1] * 3,
            "word": ["a", None, "b", "7", "07", "a"],
            "n": [1, 2, None, 4, 5, 6],
            "x": [1.0, 2.5, 3.0, math.nan, 7.0, 7.0],
            "t": days,
        }
    )
    cases = {
        "word=a|b": [0, 2, 5],
        "word!=a|b": [1, 3, 4],
        "word=": [1],
        "word!=": [0, 2, 3, 4, 5],
        "word=7": [3],
        "word=07": [4],
        "n>2": [3, 4, 5],
        "n<=2": [0, 1],
        "n=4|5": [3, 4],
        "n=4.0": [3],
        "n=": [2],
        "x=7": [4, 5],
        "x>=2.5": [1, 2, 4, 5],
        "x!=": [0, 1, 2, 4, 5],
        "t>=2026-01-05": [4, 5],
        "t<2026-01-02": [0],
    }
    for form in ("parquet", "csv"):
        path = tables.write(table, tmp_path / f"t.{form}")
        for where, truth in cases.items():
            config = Table(label="y", columns=("n:id",), where=(where,), split="random:1,0,0")
            if len({row % 2 for row in truth}) < 2:  # one label alone is no table: ask the condition itself
                (condition,) = row_filter.parse([where])
                assert np.flatnonzero(condition.holds(table[condition.column])[0]).tolist() == truth, where
                continue
            reader = open_raw(config, path)
            (chunk,) = reader.chunks(0)
            assert chunk.labels.tolist() == [row % 2 for row in truth], (form, where)
            assert reader.left_out == 6 - len(truth)


def test_a_fault_is_named_by_its_row_in_the_file(tmp_path):
    table = pa.table({"y": [0, 1, 0, 1, 1], "n": [1, 2, 3, 4, 5], "x": ["1", "2", "3", "cheap", "5"]})
    path = tables.write(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t.parquet row 4: column 'x' is 'cheap', not a finite number"):
        recjax.prepare(path, "y", tmp_path / "out", columns="x:dense", where="n>=2", split="random:1,0,0")
    with pytest.raises(
        DataError, match=r"t.parquet row 4: column 'x' is 'cheap', not a number that the condition x>0 could compare"
    ):
        recjax.prepare(path, "y", tmp_path / "out", columns="n:id", where="x>0", split="random:1,0,0")
    how = {"columns": "n:id,x:dense", "where": "x!=cheap,x>1", "split": "random:1,0,0"}
    assert recjax.prepare(path, "y", tmp_path / "out", **how)["rows"]["train"] == 3


@pytest.mark.parametrize(
    ("options", "status", "patterns"),
    [
        (["where=price"], 2, ["where: 'price' is no condition", "price>0,country=DE|FR"]),
        (["where=price>dear"], 2, ["compares with 'dear', which is no number"]),
        (["where=prise>0"], 2, ["where: .* has no column 'prise'. Did you mean 'price'"]),
        (["where=price>100"], 3, ["no row of .* keeps to 'where=price>100'"]),
        (["where=user>1"], 3, ["row 1: column 'user' is 'a', not a number that the condition user>1 could compare"]),
        (["columns=user:id,user*prise:cross"], 2, ["'user.prise' crosses 'prise', which is no id"]),
        (
            ["columns=user:id,price:dense,user*price:cross"],
            2,
            ["crosses 'price'", "Add price:id, or of numbers price:id:bucket=10"],
        ),
        (["columns=user:id,user*user:cross"], 2, ["is no cross of several features"]),
        (["columns=user:time"], 3, ["row 1: column 'user' is 'a', not a time"]),
        (["columns=user:string"], 2, ["'user:string' is not COLUMN:ROLE", "Did you mean user:id?"]),
        (["columns=user:id,day:date"], 2, ["'day:date' is not COLUMN:ROLE", "Did you mean day:time?"]),
        (["columns=day:time:hours"], 2, ["no option 'hours'", "year, month, day, weekday, hour, minute"]),
        (["columns=day:time:zone=Mars"], 2, ["no time zone 'Mars'", "Europe/Berlin"]),
    ],
)
def test_what_is_refused(tmp_path, options, status, patterns):
    table = pa.table({"user": ["a", "b", "a", "b"], "price": [1.0, 2, 3, 4], "day": [1, 2, 3, 4], "y": [0, 1, 1, 0]})
    path = tables.write(table, tmp_path / "t.parquet")
    done = inside("data", "prepare", "table", "--from", path, "--out", tmp_path / "out", "label=y", *options)
    assert_refused(done, status, *patterns)


def test_data_from_before_conditions_are_opened_as_ever(tmp_path):
    """Their options name none; and data with conditions are not taken for data without."""
    path = tables.write(pa.table({"y": [0, 1] * 4, "n": range(8)}), tmp_path / "t.parquet")
    config = Table(label="y", columns=("n:id",))
    source = prepare_table(config, open_raw(config, path), tmp_path / "out")
    assert "where" not in source.about["options"] and "where" not in source.about["table"]
    assert Table(str(source.path), label="y", columns=("n:id",)).open().fingerprint == source.fingerprint
    some = Table(label="y", columns=("n:id",), where=("n<6",))
    with pytest.raises(DataError, match="prepared with where=, but the config says n<6"):
        Table(str(source.path), label="y", columns=("n:id",), where=("n<6",)).open()
    prepare_table(some, open_raw(some, path), tmp_path / "some")
    with pytest.raises(DataError, match="prepared with where=n<6, but"):
        Table(str(tmp_path / "some"), label="y", columns=("n:id",)).open()
    assert open_prepared(tmp_path / "some").about["table"]["where"] == {"conditions": ["n<6"], "left_out": 2}
    with pytest.raises(ConfigError, match="'n' is no condition"):
        Table(where=("n",))
