"""Raw rows are encoded as their dataset prepared them; and Criteo text as it comes, whole and malformed."""

import gzip
import json
import re

import criteo_support
import numpy as np
import pytest

from recjax.data import avazu, criteo, movietweetings
from recjax.data.criteo_text import CATEGORIES, DENSE
from recjax.data.encoder import open_encoder
from recjax.data.ids import Frequency, Hash, Modulo
from recjax.data.options import prepare_as
from recjax.data.ratings import prepare_ratings
from recjax.data.source import between, concatenate
from recjax.errors import ConfigError, DataError
from recjax.serving import rows


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
    return concatenate([encoder.encode(chunk) for chunk in rows.read(file, source.name, encoder)])


def whole(source, split):
    return concatenate([source.read(split, index) for index in range(len(source.row_counts(split)))])


def shipped(name):
    return gzip.decompress((movietweetings._SHIPPED / f"{name}.gz").read_bytes()).decode().splitlines()


def test_raw_ratings_are_encoded_as_the_prepared_ones(tmp_path):
    """The shipped files as plain Python reads them; a year is both a category and a number."""
    source = prepare_ratings(
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
        rows.read(tmp_path / "rows.jsonl.gz", avazu.Avazu.kind, None)


def line(number):
    integers = [str(number), "-2", *[""] * 11]
    return "\t".join([str(number % 2), *integers, f"{number:08x}", "0000beef", "", *["a1"] * 23])


def bare(text):
    return "\n".join(line.partition("\t")[2] for line in text.split("\n"))


def content(file):
    """All rows as one: dense, keys and missing of all columns."""
    chunks = list(rows.criteo(file))
    assert {name for chunk in chunks for name in chunk.columns} == set(CATEGORIES)
    keys = np.concatenate([np.stack([chunk.columns[n].keys for n in CATEGORIES]) for chunk in chunks], axis=1)
    missing = np.concatenate([np.stack([chunk.columns[n].missing for n in CATEGORIES]) for chunk in chunks], axis=1)
    return np.concatenate([chunk.dense for chunk in chunks]), keys, missing


@pytest.mark.parametrize("piece", [64, 997, 1 << 21])
def test_the_same_rows_in_every_form(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(rows, "_PIECE_BYTES", piece)
    text = "\n".join(line(number) for number in range(50))
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
            assert keys[0].tolist() == list(range(50)) and set(keys[1]) == {0xBEEF} and set(keys[3]) == {0xA1}
            assert dense[:, 0].tolist() == list(range(50)) and set(dense[:, 1]) == {-2} and np.isnan(dense[:, 2]).all()
            assert missing[2].all() and not missing[[0, 1, 3]].any()
        for ours, theirs in zip(found, (dense, keys, missing), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("piece", [64, 1 << 21])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda line: line + "\t", "the line has {one_more} field(s) instead of {fields}, as line 1 has them"),
        (lambda line: "", "the line has {empty} field(s) instead of {fields}"),
        (lambda line: line.replace("\t-2\t", "\t-x\t"), "I2 (column {I2}) is '-x', not an integer"),
        (lambda line: line.replace("beef", "beeg"), "C2 (column {C2}) is '0000beeg', not up to 8 hexadecimal digits"),
    ],
    ids=["too many fields", "empty line", "no integer", "no category"],
)
def test_a_malformed_line_is_named(tmp_path, monkeypatch, piece, labels, change, pattern):
    monkeypatch.setattr(rows, "_PIECE_BYTES", piece)
    lines = [line(number) if labels else bare(line(number)) for number in range(9)]
    lines[6] = change(lines[6])
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(lines) + "\n")
    numbers = {"fields": 40, "one_more": 41, "empty": 1, "I2": 3, "C2": 16}
    wanted = pattern.format(**{name: n - (not labels and name != "empty") for name, n in numbers.items()})
    with pytest.raises(DataError) as caught:
        list(rows.criteo(file))
    assert f"{file}:7: {wanted}" in str(caught.value)


def test_a_wrong_label_is_named(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(line(0) + "\n2" + line(0)[1:])
    with pytest.raises(DataError, match=r"rows\.txt:2: the label \(column 1\) is '2'"):
        list(rows.criteo(file))
