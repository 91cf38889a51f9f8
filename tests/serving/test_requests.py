"""Requests become what `recjax predict` makes of the same rows, or are refused in its words."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tables
from support.shop import Reader, prepare_shop, rows

import recjax
from recjax.data.batch import Schema
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import Hash
from recjax.data.storage.blocks import open_prepared
from recjax.errors import DataError
from recjax.serving.export import _signature
from recjax.serving.faults import RowFaults
from recjax.serving.program import input_shapes
from recjax.serving.requests import BadRequestError, EncodedColumns, IdColumns, RequestReader, TableColumns
from recjax.serving.rows import json_lines, json_lines_of_table
from recjax.serving.table_rows import other_columns


def signature(schema: Schema, user=()):
    return _signature(schema, input_shapes(schema, user).inputs, user)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    prepare_shop(folder / "data")
    return open_encoder(folder / "data"), folder


def reader_of(encoder, user=(), most=600):
    return RequestReader(EncodedColumns(encoder, {}), signature(encoder.schema, user), most)


def asked(candidates, user=None):
    return json.dumps({"candidates": candidates} | ({} if user is None else {"user": user})).encode()


def without(row, name):
    return {other: value for other, value in row.items() if other != name}


def assert_same(scorable, batch):
    np.testing.assert_array_equal(scorable.dense, batch.dense)
    assert scorable.dense.dtype == np.float32 and list(scorable.bags) == list(batch.bags)
    for name, bags in batch.bags.items():
        np.testing.assert_array_equal(scorable.bags[name].ids, bags.ids)
        assert (bags.lengths is None) == (scorable.bags[name].lengths is None)
        if bags.lengths is not None:
            np.testing.assert_array_equal(scorable.bags[name].lengths, bags.lengths)


def test_rows_are_encoded_as_those_that_trained(shop):
    encoder, _ = shop
    (chunk,) = Reader().chunks(0)
    batch = encoder.encode(chunk)
    half = len(rows()) // 2
    reader = reader_of(encoder, most=700)
    found = reader.read(asked(rows()))
    assert found.users == found.size == 2 * half
    assert_same(found, batch)
    assert reader.columns == ["user", "city", "tags", "age", "price"]


@pytest.mark.parametrize("shared", [["user"], ["tags", "age"], ["city", "price", "tags", "user"], []])
def test_what_stands_under_user_is_that_of_every_candidate(shop, shared):
    encoder, _ = shop
    made = rows()[:9]
    source = next(row for row in made if len(set(row["tags"])) > 1)
    user = {name: source[name] for name in shared}
    candidates = [{name: value for name, value in row.items() if name not in shared} for row in made]
    whole = reader_of(encoder).read(asked([row | user for row in candidates]))
    assert_same(reader_of(encoder).read(asked(candidates, user)), whole)
    once = reader_of(encoder, ["user", "tags"]).read(asked(candidates, user))
    if {"user", "tags"} <= set(shared):
        assert once.users == 1 and once.bags["user"].ids.shape == (1, 1)
        assert once.bags["tags"].lengths.tolist() == [len(user["tags"])]
        np.testing.assert_array_equal(np.repeat(once.bags["user"].ids, 9, axis=0), whole.bags["user"].ids)
        np.testing.assert_array_equal(once.bags["city"].ids, whole.bags["city"].ids)
    else:
        assert once.users == 9
        assert_same(once, whole)


TEXTS = ["", "Zürich 3", "t1", "a\0b", "1f", "0x1f", "g", "123456789", " 1"]
VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(-5, 9),
    st.floats(-1e30, 1e30),
    st.sampled_from(TEXTS),
    st.sampled_from([3.0, 2.0**60, math.inf, 1e301]),
)
ANY = st.one_of(VALUE, st.lists(VALUE, max_size=3))
GOOD = {
    "user": st.integers(-5, 9),
    "city": st.sampled_from(["Zürich 3", "x", None, ""]),
    "tags": st.lists(st.sampled_from(["t1", "t9", ""]), max_size=3),
    "age": st.floats(-9, 9),
    "price": st.one_of(st.integers(-9, 9), st.none()),
}
ROW = st.fixed_dictionaries({name: st.one_of(good, good, good, good, ANY) for name, good in GOOD.items()})


@settings(max_examples=60)
@example([{"user": 1, "city": "", "tags": ["t1"], "age": 1.5, "price": 2}])
@given(st.lists(ROW, min_size=1, max_size=3))
def test_requests_and_files_are_read_alike(shop, made):
    """The truth is the reader of files, which goes row by row; ours takes columns at once where it can."""
    encoder, folder = shop
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    try:
        (found,) = json_lines(file, encoder, RowFaults())
    except DataError as error:
        with pytest.raises(BadRequestError) as refused:
            reader_of(encoder).read(asked(made))
        where, _, what = str(refused.value).partition(": ")
        line, _, said = str(error).removeprefix(f"{file}:").partition(": ")
        assert where == f"candidates[{int(line) - 1}]" and said.startswith(what)
    else:
        assert_same(reader_of(encoder).read(asked(made)), encoder.encode(found.chunk))


def test_hashed_hexadecimal_values(tmp_path):
    """The rarest form of ids: as integers of base 16, in capitals or not."""
    from recjax.data.prepare.chunk import RawFeature
    from recjax.serving.whole_columns import whole_columns

    hexadecimal = RawFeature("c", values="hex")
    columns, _ = whole_columns([{"c": "00ff"}, {"c": "A"}, {"c": "ffffffff"}], [hexadecimal], [])
    assert columns["c"].keys.tolist() == [255, 10, 2**32 - 1]
    for rare in ("", "0x1f", " 1", "1_0", "123456789", 3, None):
        assert whole_columns([{"c": "1"}, {"c": rare}], [hexadecimal], []) is None
    prepare_shop(tmp_path / "data", ids=Hash(rows=(50,)))
    encoder = open_encoder(tmp_path / "data")
    (chunk,) = Reader().chunks(0)
    assert_same(reader_of(encoder, most=700).read(asked(rows())), encoder.encode(chunk))


def test_mistakes_are_named(shop):
    encoder, _ = shop
    row = rows()[0]
    rest = {name: value for name, value in row.items() if name != "user"}
    for body, words in (
        (b"", "the request is not valid JSON"),
        (b"\xff", "the request is not UTF-8"),
        (b'{"candidates": [], "candidates": []}', "'candidates' stands twice"),
        (b"[]", "the request is no object. Send"),
        (b'{"rows": []}', "the request has the keys 'rows'. Send"),
        (b'{"user": [], "candidates": [{}]}', "user must be an object"),
        (b'{"candidates": [3]}', r"candidates\[0\] is no object"),
        (b'{"candidates": []}', "candidates is empty. Give 1 to 600"),
        (asked([row] * 601), "has 601 candidates"),
        (b'{"candidates": [' + b"{}," * 10**6 + b"{}]}", "has 1,000,002 objects, and at most 600"),
        (asked([row, rest]), r"candidates\[1\]: the key 'user' is missing; the row has city"),
        (asked([rest, row], {"user": 3}), r"candidates\[1\] has 'user', which stands under user too"),
        (asked([rest], {"user": "x"}), "user: 'user' is \"x\", not an integer of 64 bits"),
        (asked([row | {"age": 1e41}]), r"candidates\[0\]: 'age' is 1e\+41, not a number of float32"),
        (asked([row, row | {"age": 1e39}]), r"candidates\[1\]: 'age' is 1e\+39, not a number of float32"),
        (
            asked([row], {"nobody": 1}),
            "user has the key 'nobody', which is no column that the model takes, or that the data say they had. The",
        ),
        (asked([row, row | {"ctiy": 1}]), r"candidates\[1\] has the key 'ctiy', .* Did you mean 'city'\? The model"),
        (asked([row | {"x" * 99_999: 1}]), "has the key 'x{80}', which is no column"),
        (
            asked([without(row, "tags")] * 600, {"tags": ["t1"] * 4000}),
            "'tags' has 4,000 values, and all features have 4,000, looked up for each of 6",
        ),
        (asked([row | {"tags": ["a" * 1025]}]), r"candidates\[0\]: 'tags' is .*, not text .* at most 1,024 bytes"),
        (asked([row | {"tags": ["é" * 513]}]), r"candidates\[0\]: 'tags' is .*, not text .* at most 1,024 bytes"),
        (b"[" * 10_000, "nested more than 64 deep"),
        (b'{"candidates": [{"user": ' + b"9" * 9000 + b"}]}", "has too many digits"),
    ):
        with pytest.raises(BadRequestError, match=words) as raised:
            reader_of(encoder).read(body)
        assert "\n" not in str(raised.value)


def test_ids_where_the_data_know_no_values():
    from recjax.data.batch import Feature

    schema = Schema(("d",), (Feature("x", 10), Feature("y", 20, 2), Feature("z", 5, None, weighted=True)))
    reader = RequestReader(IdColumns(signature(schema)), signature(schema), 5)
    rest = {"x": 9, "y": [3, 19]}
    found = reader.read(asked([{"z": [[4, 0.5], 1], **rest}, {"z": [], **rest}], {"d": 2.5}))
    assert found.dense.tolist() == [[2.5], [2.5]] and found.bags["x"].ids.tolist() == [[9], [9]]
    assert found.bags["y"].ids.tolist() == [[3, 19], [3, 19]] and found.bags["z"].ids.tolist() == [4, 1]
    assert found.bags["z"].lengths.tolist() == [2, 0] and found.bags["z"].weights.tolist() == [0.5, 1.0]
    for wrong, words in (
        ({"x": 10}, "'x' holds 10, no id of its table: those are the integers 0 to 9. Correct it"),
        ({"x": True}, "'x' holds True, no id"),
        ({"y": [1]}, r"'y' is \[1\], not a list of 2 ids"),
        ({"z": [[4, "a"]]}, "the weight of 'z' is a, not a number"),
        ({"z": [[1, 2, 3]]}, "each as .id, weight"),
        ({"d": 1e39}, r"'d' is 1e\+39, not a number of float32"),
    ):
        with pytest.raises(BadRequestError, match=words):
            reader.read(asked([{"d": 1, "z": [], **rest} | wrong]))
    with pytest.raises(BadRequestError, match="the key 'x' is missing; the row has d"):
        reader.read(asked([{"d": 1}]))


def test_rows_of_a_table_of_ones_own(tmp_path):
    """Ids, lists, numbers and vectors: as files of such rows are read."""
    recjax.prepare(tables.clicks(), label="clicked", out=tmp_path / "out", columns="auto,when:skip,paid:weight")
    source, encoder = open_prepared(tmp_path / "out"), open_encoder(tmp_path / "out")
    made = tables.clicks(40, seed=1).drop_columns(["clicked", "when", "paid"]).to_pylist()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (found,) = json_lines_of_table(tmp_path / "rows.jsonl", source.about["table"], RowFaults())
    columns = TableColumns(encoder, source.about["table"], other_columns(source.about))
    reader = RequestReader(columns, signature(source.schema, ["user"]), 40)
    assert_same(reader.read(asked(made)), encoder.encode(found.chunk))
    beside = {"clicked": "x", "when": None, "paid": [1]}  # the label, what was left out, the weight
    assert_same(reader.read(asked([row | beside for row in made])), encoder.encode(found.chunk))
    assert set(reader.columns) == set(made[0]) and reader.user == ["user"]
    names = list(made[0])
    user = {name: made[3][name] for name in names[::2]}
    candidates = [{name: row[name] for name in names[1::2]} for row in made]
    whole = RequestReader(columns, signature(source.schema), 40)
    assert_same(whole.read(asked(candidates, user)), whole.read(asked([row | user for row in made])))
    for wrong, words in (
        ({"user": [1]}, r"candidates\[1\]: 'user' is \[1\], not one value"),
        ({"usr": 1}, r"candidates\[1\] has the key 'usr', which is no column that .* Did you mean 'user'"),
        ({"price": 1e39}, r"candidates\[1\]: column 'price' is '1e\+39', not a number of float32"),
        ({"item_id": "x"}, r"candidates\[1\]: column 'item_id' is 'x', not an integer of 64 bits. Correct"),
    ):
        with pytest.raises(BadRequestError, match=words):
            reader.read(asked([made[0], made[1] | wrong]))
    for name in names:
        with pytest.raises(BadRequestError, match=f"user: the key {name!r}|0.: the key {name!r} is missing"):
            reader.read(asked([{n: value for n, value in made[0].items() if n != name}]))


@pytest.mark.parametrize("label", [{"label": "kind", "positive": "a"}, {"label": "price", "threshold": 1.0}])
def test_whole_rows_of_the_table_are_taken(tmp_path, label):
    """With the label and the columns that nobody named; keys that the table did not have are refused."""
    table = tables.clicks()
    table = table.filter(table[label["label"]].is_valid())
    recjax.prepare(table, out=tmp_path / "out", columns="user:id,item_id:id", **label)
    source, encoder = open_prepared(tmp_path / "out"), open_encoder(tmp_path / "out")
    described, made = source.about["table"], table.slice(0, 9).to_pylist()
    reader = RequestReader(TableColumns(encoder, described, other_columns(source.about)), signature(source.schema), 40)
    few = [{"user": row["user"], "item_id": row["item_id"]} for row in made]
    truth = reader.read(asked(few))
    assert_same(reader.read(asked(made)), truth)
    with pytest.raises(BadRequestError, match="the key 'colour', which is no column that the model takes, or that the"):
        reader.read(asked([made[0] | {"colour": 1}]))
    earlier = {**source.about, "table": {key: value for key, value in described.items() if key != "names"}}
    reader = RequestReader(TableColumns(encoder, described, other_columns(earlier)), signature(source.schema), 40)
    assert_same(reader.read(asked([row | {label["label"]: 0} for row in few])), truth)


def test_crosses_of_users_with_candidates_and_conditions(tmp_path):
    """A cross of both sides is made of both; parts of a time stand where the time does; rows left out are refused."""
    columns = "user:id,kind:id,when:time,price:dense,user*kind:cross,when.hour*user:cross"
    recjax.prepare(tables.clicks(), "clicked", tmp_path / "out", columns=columns, where="price<9,item_id!=3,clicked!=2")
    source, encoder = open_prepared(tmp_path / "out"), open_encoder(tmp_path / "out")
    reader = RequestReader(TableColumns(encoder, source.about["table"]), signature(source.schema, ["user"]), 40)
    made = [{name: row[name] for name in ("user", "kind", "when", "price")} for row in tables.clicks(9).to_pylist()]
    made = [row | {"user": "u07", "price": 1.5} for row in made]
    together = reader.read(asked(made))
    assert set(reader.columns) == {"user", "kind", "when", "price"} and reader.user == ["user"]
    for side in (["user"], ["user", "when"], ["kind"], ["user", "kind", "when"]):
        alike = [row | {name: made[0][name] for name in side} for row in made]
        user = {name: made[0][name] for name in side}
        candidates = [{name: value for name, value in row.items() if name not in side} for row in made]
        found, truth = reader.read(asked(candidates, user)), reader.read(asked(alike))
        for name, bags in truth.bags.items():
            np.testing.assert_array_equal(np.broadcast_to(found.bags[name].ids, bags.ids.shape), bags.ids, name)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (chunk,) = json_lines_of_table(tmp_path / "rows.jsonl", source.about["table"], RowFaults())
    assert_same(together, encoder.encode(chunk.chunk))
    for wrong, words in (
        ({"price": 12}, r"candidates\[1\]: column 'price' is '12', and only rows with price<9 trained"),
        ({"item_id": 3}, r"candidates\[1\]: column 'item_id' is '3', and only rows with item_id!=3"),
    ):
        with pytest.raises(BadRequestError, match=words):
            reader.read(asked([row | (wrong if at == 1 else {"item_id": 1}) for at, row in enumerate(made)]))


def test_values_of_the_user_count_together_over_all_features():
    from recjax.data.batch import Feature

    schema = Schema((), (*(Feature(f"x{i}", 10, None) for i in range(3)), Feature("y", 10)))
    reader = RequestReader(IdColumns(signature(schema)), signature(schema), 600)
    candidates = [{"y": 1}] * 512
    assert reader.read(asked(candidates, {f"x{i}": [1] * 1365 for i in range(3)})).bags["x0"].ids.size == 512 * 1365
    with pytest.raises(BadRequestError, match="'x1' has 1,367 values, and all features have 4,097, looked up for each"):
        reader.read(asked(candidates, {"x0": [1] * 1365, "x1": [1] * 1367, "x2": [1] * 1365}))
