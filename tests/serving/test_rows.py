"""Raw rows are encoded as their dataset prepared them; and Criteo text as it comes, whole and malformed."""

import gzip
import json
import re

import numpy as np
import pytest
from support import criteo as criteo_support
from support.shop import prepare_shop

from recjax.data.datasets import avazu, criteo, movietweetings
from recjax.data.datasets.options import prepare_as
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.source import between, concatenate
from recjax.data.text.criteo_lines import CATEGORIES, DENSE
from recjax.errors import ConfigError, DataError
from recjax.serving import rows
from recjax.serving.faults import RowFaults

pytestmark = pytest.mark.light_compile


def assert_same_columns(ours, theirs):
    """Two batches have the same dense values and ids; labels are left out."""
    np.testing.assert_allclose(ours.dense, theirs.dense, rtol=2e-7)  # log1p of float32 or of float64
    assert ours.bags.keys() == theirs.bags.keys()
    for name, bags in ours.bags.items():
        np.testing.assert_array_equal(bags.ids, theirs.bags[name].ids, err_msg=name)
        np.testing.assert_array_equal(bags.lengths, theirs.bags[name].lengths, err_msg=name)


def encoded(file, source):
    """The rows of a file as a batch."""
    encoder = open_encoder(source.path)
    return concatenate([encoder.encode(part.chunk) for part in rows.read(file, source.name, encoder, RowFaults())])


def whole(source, split):
    return concatenate([source.read(split, index) for index in range(len(source.row_counts(split)))])


def shipped(name):
    return gzip.decompress((movietweetings._SHIPPED / f"{name}.gz").read_bytes()).decode().splitlines()


@pytest.mark.full
def test_raw_ratings_are_encoded_as_the_prepared_ones(tmp_path):
    """The shipped files as plain Python reads them; a year is both a category and a number."""
    source = prepare_as(
        movietweetings.MovieTweetings(),
        movietweetings.open_raw(movietweetings.MovieTweetings(), None),
        tmp_path / "out",
    )
    films = {}
    for line in shipped("movies.dat"):
        movie, title, genres = line.split("::")
        year = re.search(r"\((\d{4})\)$", title.rstrip())
        films[int(movie)] = int(year[1]) if year else 0, [genre for genre in genres.split("|") if genre]
    ratings = [[int(field) for field in line.split("::")] for line in shipped("ratings.dat")]
    ratings.sort(key=lambda rating: rating[3])
    for split, part in (("test", ratings[-(len(ratings) // 5) :]), ("train", ratings[:9000])):
        file = tmp_path / f"{split}.jsonl"
        with file.open("w") as out:
            for user, movie, _, time in part:
                year, genres = films[movie]
                json.dump({"user": user, "movie": movie, "genres": genres, "year": year, "time": time}, out)
                out.write("\n")
        assert_same_columns(encoded(file, source), between(whole(source, split), 0, len(part)))


@pytest.mark.full
@pytest.mark.parametrize("ids", [Frequency(min_count=2), Hash(rows=(97,)), Modulo(rows=(97,))])
def test_criteo_rows_have_the_same_ids_as_text_and_as_json(tmp_path, ids):
    """Categories are hexadecimal digits in both, however many of them and in either case."""
    made = criteo_support.random_rows(300)
    raw = tmp_path / "train.txt"
    raw.write_bytes(criteo_support.text(made))
    config = criteo.CriteoKaggle(split="random", ids=ids)
    source = prepare_as(config, criteo.open_raw(config, raw), tmp_path / "out")
    with (tmp_path / "rows.jsonl").open("w") as out:
        for number, (_, integers, categories) in enumerate(made):
            form = ("08x", "x", "X")[number % 3]
            values = [None if value is None else format(value, form) for value in categories]
            json.dump(dict(zip((*DENSE, *CATEGORIES), (*integers, *values), strict=True)), out)
            out.write("\n")
    assert_same_columns(encoded(tmp_path / "rows.jsonl", source), encoded(raw, source))
    for wrong in (17, "0x1f", "", "123456789", " 1f", "1g"):
        row = dict.fromkeys(DENSE) | dict.fromkeys(CATEGORIES, "1f") | {"C3": wrong}
        (tmp_path / "wrong.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=r"wrong\.jsonl:1: 'C3' is .*, not text of 1 to 8 hexadecimal digits"):
            encoded(tmp_path / "wrong.jsonl", source)


def test_avazu_rows_are_its_own_text_alone(tmp_path):
    """Its `hour` becomes four columns, of which one is called so too."""
    with pytest.raises(ConfigError, match="rows of avazu are read as its own CSV text only"):
        rows.read(tmp_path / "rows.jsonl.gz", avazu.Avazu.kind, None, RowFaults())


MANY = 20_000  # lines that are more than is read at once


def line(number):
    integers = [str(number), "-2", *[""] * 11]
    return "\t".join([str(number % 2), *integers, f"{number:08x}", "0000beef", "", *["a1"] * 23])


def bare(text):
    return "\n".join(line.partition("\t")[2] for line in text.split("\n"))


def content(file):
    """All rows as one: dense, keys and missing of all columns."""
    chunks = [part.chunk for part in rows.criteo(file, RowFaults())]
    assert {name for chunk in chunks for name in chunk.columns} == set(CATEGORIES)
    keys = np.concatenate([np.stack([chunk.columns[n].keys for n in CATEGORIES]) for chunk in chunks], axis=1)
    missing = np.concatenate([np.stack([chunk.columns[n].missing for n in CATEGORIES]) for chunk in chunks], axis=1)
    return np.concatenate([chunk.dense for chunk in chunks]), keys, missing


@pytest.mark.parametrize("count", [50, MANY])
def test_the_same_rows_in_every_form(tmp_path, count):
    text = "\n".join(line(number) for number in range(count))
    dense, keys, missing = None, None, None
    for name, data in {
        "plain.txt": (text + "\n").encode(),
        "open.txt": text.encode(),
        "windows.txt": text.replace("\n", "\r\n").encode(),
        "bom.txt": b"\xef\xbb\xbf" + text.encode(),
        "bare.txt": bare(text).encode(),
        "bare_bom.txt": b"\xef\xbb\xbf" + bare(text).replace("\n", "\r\n").encode(),
        "zipped.txt.gz": gzip.compress(bare(text + "\n").removesuffix("\n").encode()),
    }.items():
        (tmp_path / name).write_bytes(data)
        found = content(tmp_path / name)
        if dense is None:
            dense, keys, missing = found
            assert keys[0].tolist() == list(range(count)) and set(keys[1]) == {0xBEEF} and set(keys[3]) == {0xA1}
            assert dense[:, 0].tolist() == list(range(count)) and set(dense[:, 1]) == {-2}
            assert np.isnan(dense[:, 2]).all()
            assert missing[2].all() and not missing[[0, 1, 3]].any()
        for ours, theirs in zip(found, (dense, keys, missing), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("before", [0, MANY])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda line: line + "\t", "the line has {one_more} field(s) instead of {fields}, as the first has them"),
        (lambda line: "", "the line has {empty} field(s) instead of {fields}"),
        (lambda line: line.replace("\t-2\t", "\t-x\t"), "I2 (column {I2}) is '-x', not an integer"),
        (lambda line: line.replace("beef", "beeg"), "C2 (column {C2}) is '0000beeg', not up to 8 hexadecimal digits"),
    ],
    ids=["too many fields", "empty line", "no integer", "no category"],
)
def test_a_malformed_line_is_named(tmp_path, before, labels, change, pattern):
    lines = [line(number) if labels else bare(line(number)) for number in range(9)]
    lines[6] = change(lines[6])
    lines = lines[:1] * before + lines
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(lines) + "\n")
    numbers = {"fields": 40, "one_more": 41, "empty": 1, "I2": 3, "C2": 16}
    wanted = pattern.format(**{name: n - (not labels and name != "empty") for name, n in numbers.items()})
    with pytest.raises(DataError) as caught:
        list(rows.criteo(file, RowFaults()))
    assert f"{file}:{before + 7}: {wanted}" in str(caught.value)


def test_a_wrong_label_is_named(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(line(0) + "\n2" + line(0)[1:])
    with pytest.raises(DataError, match=r"rows\.txt:2: the label \(column 1\) is '2'"):
        list(rows.criteo(file, RowFaults()))


def shop_rows(tmp_path, made, ids=None, **options):
    """The rows `made` as a file, encoded by the shop's vocabularies."""
    source = prepare_shop(tmp_path / "shop", **({} if ids is None else {"ids": ids}))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return encoded(file, source)


def test_a_missing_value_is_what_training_had_for_it(tmp_path):
    """City is optional, so it has a row of its own (1); user and tags are not, so null is a value that is unknown."""
    row = {"user": 1, "city": "Zürich 3", "tags": ["t1"], "age": 4, "price": 0.5}
    changes = [
        {},
        {"user": None},
        {"user": 10**15},
        {"city": None},
        {"city": ""},
        {"city": "Bern"},
        {"tags": None},
        {"tags": []},
        {"tags": ["t1", None]},
        {"tags": ["t1", "new"]},
    ]
    batch = shop_rows(tmp_path, [row | change for change in changes])
    users, cities = batch.bags["user"].ids[:, 0].tolist(), batch.bags["city"].ids[:, 0].tolist()
    assert users[0] > 0 and users[1:3] == [0, 0] and set(users[3:]) == {users[0]}
    assert cities[0] > 1 and cities[3:6] == [1, 1, 0]
    tags = batch.bags["tags"]
    assert tags.lengths.tolist() == [1] * 6 + [0, 0, 2, 2]
    assert tags.ids.tolist() == [tags.ids[0]] * 7 + [0, tags.ids[0], 0] and tags.ids[0] > 0


@pytest.mark.parametrize("value", [6, 6.0, -3.0, 2.0**52])
def test_whole_numbers_that_pandas_wrote_as_floats(tmp_path, value):
    row = {"user": 1, "city": None, "tags": [], "age": 4, "price": None}
    batch = shop_rows(tmp_path, [row | {"user": value}, row | {"user": int(value)}], Hash(rows=(1000,)))
    assert batch.bags["user"].ids[0] == batch.bags["user"].ids[1]


@pytest.mark.parametrize("value", ["6.5", "1e300", "9007199254740993.0"])
def test_other_floats_are_no_integers(tmp_path, value):
    source = prepare_shop(tmp_path / "shop")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"user": ' + value + ', "city": null, "tags": [], "age": 1, "price": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'user' is .*, not an integer of 64 bits"):
        encoded(file, source)


def test_without_a_row_for_missing_values_null_is_refused(tmp_path):
    row = {"user": 1, "city": None, "tags": [], "age": 4, "price": 0.5}
    with pytest.raises(
        DataError, match=r"jsonl:2: 'user' is null, but every training row had one, and ids=hash .*no row"
    ):
        shop_rows(tmp_path, [row, row | {"user": None}], Hash(rows=(1000,)))


def test_an_unknown_year_is_the_year_that_ratings_have_for_it(tmp_path):
    """0, which is also below the least year of the dense column."""
    movies = movietweetings.MovieTweetings()
    source = prepare_as(movies, movietweetings.open_raw(movies, None), tmp_path / "out")
    row = {"user": 6, "movie": 1483013, "genres": ["Action"], "year": 2013, "time": 1373234211}
    file = tmp_path / "rows.jsonl"
    nothing = dict.fromkeys(row)
    file.write_text("".join(json.dumps(r) + "\n" for r in (row | {"year": None}, row | {"year": 0}, row, nothing)))
    batch = encoded(file, source)
    years = batch.bags["year"].ids[:, 0].tolist()
    assert years[0] == years[1] != years[2]
    dense = dict(zip(source.schema.dense, batch.dense.T, strict=True))
    assert dense["year"][0] == dense["year"][1] == 0 != dense["year"][2]
    assert [batch.bags[name].ids[3, 0] for name in ("user", "movie")] == [0, 0] and dense["time"][3] == 0


def test_criteo_integers_as_pandas_writes_them(tmp_path):
    plain, floats = tmp_path / "plain.txt", tmp_path / "floats.txt"
    lines = [line(number) for number in range(9)]
    plain.write_text("\n".join(lines))
    floats.write_text("\n".join(lines).replace("\t-2\t", "\t-2.0\t"))
    for ours, theirs in zip(content(floats), content(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    floats.write_text("\n".join(lines).replace("\t-2\t", "\t-2.5\t"))
    with pytest.raises(DataError, match=r"floats\.txt:1: I2 \(column 3\) is '-2\.5', not an integer"):
        content(floats)


@pytest.mark.parametrize("bare_lines", [False, True])
def test_malformed_lines_are_left_out_counted_and_named(tmp_path, bare_lines):
    lines = [bare(line(number)) if bare_lines else line(number) for number in range(9)]
    lines[0], lines[4], lines[6] = "", lines[4].replace("beef", "beeg"), lines[6] + "\t"
    file, faults = tmp_path / "rows.txt", RowFaults(skip=True)
    file.write_text("\n".join(lines))
    parts = list(rows.criteo(file, faults, ["C1", "I1"]))
    assert np.concatenate([part.numbers for part in parts]).tolist() == [2, 3, 4, 6, 8, 9]
    assert [value for part in parts for value in part.carried["C1"]] == [f"{n:08x}" for n in (1, 2, 3, 5, 7, 8)]
    assert [value for part in parts for value in part.carried["I1"]] == [str(n) for n in (1, 2, 3, 5, 7, 8)]
    assert np.concatenate([part.chunk.columns["C1"].keys for part in parts]).tolist() == [1, 2, 3, 5, 7, 8]
    assert faults.count == 3 and [text.split(":")[0] for text in faults.first] == ["line 1", "line 5", "line 7"]
    with pytest.raises(DataError, match=r"has no column 'user' to carry\. Its columns are .*I1, I2"):
        list(rows.criteo(file, faults, ["user"]))
