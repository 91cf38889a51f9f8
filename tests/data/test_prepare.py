"""The engine with a reader of its own: text, integers and jagged bags against plain Python; encoding."""

import collections
import dataclasses
import hashlib
import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.toy_rows import Toy, chunk, prepare, rows_of

from recjax.data.prepare import prepare as engine
from recjax.data.prepare.chunk import Column, RawFeature
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import Frequency, Hash
from recjax.data.source import BLOCK_ROWS, SPLITS, concatenate
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.errors import ConfigError, DataError

# A row: label, dense or None, word or None, tags (a bag), split.
ROW = st.tuples(
    st.integers(0, 1),
    st.none() | st.integers(-3, 9),
    st.none() | st.sampled_from(["a", "bb", "é", "a longer word"]),
    st.lists(st.integers(-2, 3), max_size=3),
    st.integers(0, 2),
)


def whole(source, split):
    return concatenate([source.read(split, i) for i in range(len(source.row_counts(split)))])


def rank(values, min_count, first):
    counts = collections.Counter(values)
    kept = sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))
    return {value: row for row, value in enumerate(kept, first)}


def test_data_are_those_of_blocks_that_are_checked_one_by_one(tmp_path):
    """The checksum of a split is that of its arrays in their order; who writes the same blocks gets the same data."""
    rows = [(i % 2, i % 7, "ab"[i % 2], [i % 3] * (i % 3), i % 11 == 0) for i in range(2 * BLOCK_ROWS + 50)]
    made = prepare(Toy(rows, 3000), tmp_path / "out")
    blocks = {
        split: [made.read(split, i) for i in range(len(made.row_counts(split)))] for split in ("train", "validation")
    }
    assert made.row_counts("train").tolist() == [BLOCK_ROWS, len([0 for row in rows if not row[4]]) - BLOCK_ROWS]
    for split, held in blocks.items():
        digest = hashlib.sha256()
        for block in held:
            word, tags = block.bags["word"], block.bags["tags"]
            for array in (block.dense, block.labels, block.weights, word.ids, tags.ids, tags.lengths):
                digest.update(array.tobytes())
        assert made.manifest["splits"][split]["sha256"] == digest.hexdigest()
    again = write_prepared(tmp_path / "again", "toy", made.schema, blocks | {"test": []}, {})
    assert again.fingerprint == made.fingerprint
    of_blocks = {name: entry for name, entry in made.manifest["files"].items() if "array_record" in name}
    assert of_blocks == {name: again.manifest["files"][name] for name in of_blocks}


def test_an_encoded_row_that_fits_no_schema_is_named(tmp_path):
    rows = [(0, 1, "a", [1], i % 2) for i in range(9)]
    rows[7] = (2, 1, "a", [1], 1)  # the fourth of validation, in the third chunk
    with pytest.raises(DataError, match="split 'validation': the label of sample 3 is 2.0; labels must be 0 or 1"):
        prepare(Toy(rows), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@settings(max_examples=20)
@given(st.lists(ROW, min_size=1, max_size=25), st.integers(1, 3), st.integers(1, 10), st.sampled_from([0, 4, 2**25]))
@example([(0, 1, word, [], 0) for word in ("a", "bb", "é", "a longer word")] + [(1, 1, "bb", [], 1)], 1, 5, 0)
def test_every_row_is_encoded_as_plain_python_does(tmp_path_factory, rows, min_count, chunk_rows, kept):
    """`kept`: room for rows of values that are found once for all splits."""
    out = tmp_path_factory.mktemp("toy") / "out"
    with mock.patch.object(engine, "_KEPT_ROWS", kept):
        source = prepare(Toy(rows, chunk_rows), out, Frequency(min_count), indicators=True)
    train = [row for row in rows if row[4] == 0]
    words = rank([row[2].encode() for row in train if row[2] is not None], min_count, 2)
    tags = rank([tag for row in train for tag in row[3]], min_count, 1)
    assert [feature.rows for feature in source.schema.features] == [len(words) + 2, len(tags) + 1]
    expected = {
        "word": [1 if row[2] is None else words.get(row[2].encode(), 0) for row in rows],
        "tags": [[tags.get(tag, 0) for tag in row[3]] for row in rows],
    }
    encoded = open_encoder(out).encode(chunk(rows))
    parts = [([i for i, row in enumerate(rows) if row[4] == split], name) for split, name in enumerate(SPLITS)]
    for at, found in [*((at, whole(source, name)) for at, name in parts if at), (range(len(rows)), encoded)]:
        assert found.labels.tolist() == [rows[i][0] for i in at]
        assert found.dense.tolist() == [[rows[i][1] or 0.0, float(rows[i][1] is None)] for i in at]
        assert found.bags["word"].ids[:, 0].tolist() == [expected["word"][i] for i in at]
        assert found.bags["tags"].lengths.tolist() == [len(rows[i][3]) for i in at]
        assert found.bags["tags"].ids.tolist() == [tag for i in at for tag in expected["tags"][i]]


def test_blocks_are_full_whatever_the_chunks(tmp_path):
    rows = rows_of(12_000)
    found = [prepare(Toy(rows, size), tmp_path / str(size)) for size in (1000, 5000, 12_000)]
    assert found[0].row_counts("train").tolist() == [BLOCK_ROWS, BLOCK_ROWS, 9600 - 2 * BLOCK_ROWS]
    assert len({source.fingerprint for source in found}) == 1


@pytest.mark.parametrize("transform", ["log1p", "log_shift", "standard"])
def test_statistics_are_of_the_training_split(tmp_path, transform):
    rows = [(0, value, "a", [], split) for value, split in [(2, 0), (4, 0), (None, 0), (100, 1), (-50, 2)]]
    encoder = open_encoder(prepare(Toy(rows, 2), tmp_path / "out", dense=transform).path)
    truth = {
        "log1p": np.log([3, 5, 1, 101, 1]),
        "log_shift": [np.log(2), np.log(4), 0, np.log(100), np.log(2)],
        "standard": [-1, 1, 0, 97, -53],
    }
    np.testing.assert_allclose(encoder.encode(chunk(rows)).dense[:, 0], truth[transform], rtol=1e-6)


def test_hashed_text(tmp_path):
    made = prepare(Toy(rows_of(50)), tmp_path / "out", Hash((7,)))
    encoder = open_encoder(made.path)
    assert [f.rows for f in encoder.schema.features] == [8, 7]
    assert encoder.schema == made.schema
    with pytest.raises(ConfigError, match="text cannot be taken modulo"):
        prepare(Toy(rows_of(50)), tmp_path / "other", Frequency(1, modulo=5))
    unread = Toy(rows_of(50))
    with pytest.raises(ConfigError, match="ids.rows has 3 values"):
        prepare(unread, tmp_path / "third", Hash((1, 2, 3)))
    assert unread.asked == []


def test_a_second_preparation_of_the_same_is_free_and_of_another_refused_before_the_work(tmp_path, capsys):
    prepare(Toy(rows_of(60)), tmp_path / "out")
    same = Toy(rows_of(60))
    prepare(same, tmp_path / "out")
    assert same.asked == [] and "holds these data already" in capsys.readouterr().err
    other = Toy(rows_of(60))
    with pytest.raises(DataError, match="already holds prepared data of other content"):
        prepare(other, tmp_path / "out", Frequency(2), options={"ids.min_count": 2})
    assert other.asked == []
    made = prepare(other, tmp_path / "out", Frequency(2), options={"ids.min_count": 2}, overwrite=True)
    assert other.asked and made.about["options"]["ids.min_count"] == 2


def without(name):
    """Columns of three rows of which one lacks an entry."""
    columns = chunk(rows_of(3)).columns
    return columns | {name: Column(columns[name].keys[1:], columns[name].lengths)}


def absent(name):
    """Columns of three rows of which one marks an entry as missing."""
    columns = chunk(rows_of(3)).columns
    return columns | {name: dataclasses.replace(columns[name], missing=columns[name].keys == columns[name].keys[0])}


def swapped():
    """Columns of three rows with the integers of one in the place of the other's text."""
    columns = chunk(rows_of(3)).columns
    return columns | {"word": Column(np.arange(3))}


def test_a_raw_column_of_two_uses_has_one_value(tmp_path):
    class Both(Toy):
        dense, features = ("age",), (*Toy.features, RawFeature("age", optional=True))
        wrong = 0

        def chunks(self, start):
            for good in super().chunks(start):
                age = good.dense[:, 0]
                keys = np.where(np.isnan(age), 0, age).astype(np.int64) + self.wrong
                yield dataclasses.replace(good, columns=good.columns | {"age": Column(keys, None, np.isnan(age))})

    rows = [(0, age, "a", [], 0) for age in (3, None, 4)]
    reader = Both(rows)
    assert prepare(reader, tmp_path / "good").schema.feature("age").rows == 4
    reader.wrong = 1
    with pytest.raises(DataError, match="'age' is a dense column and a feature, but their raw values differ"):
        prepare(reader, tmp_path / "bad")


def test_data_of_an_older_recjax_are_prepared_again(tmp_path):
    """They do not say whether a feature's values are integers, hexadecimal digits or text."""
    made = prepare(Toy(rows_of(9)), tmp_path / "out")
    manifest = json.loads((made.path / MANIFEST).read_text())
    for feature in manifest["about"]["encoder"]["features"]:
        del feature["values"]
    (made.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="prepared by an older recjax.*--overwrite"):
        open_encoder(made.path)
    with pytest.raises(DataError, match="already holds prepared data of other content"):
        prepare(Toy(rows_of(9)), tmp_path / "out")
    prepare(Toy(rows_of(9)), tmp_path / "out", overwrite=True)
    assert open_encoder(made.path).features[0].values == "text"


def test_a_reader_that_breaks_its_promise(tmp_path):
    class Wrong(Toy):
        def chunks(self, start):
            for good in super().chunks(start):
                yield dataclasses.replace(good, **self.change)

    encoder = open_encoder(prepare(Toy(rows_of(9)), tmp_path / "good").path)
    for change, message in (
        ({"labels": np.zeros(3)}, "labels are float64"),
        ({"split": np.zeros(2, np.uint8)}, r"split \(2,\)"),
        ({"columns": {}}, r"column 'word' \(text\) needs keys \[n\] of bytes"),
        ({"columns": swapped()}, r"column 'word' \(text\) needs keys \[n\] of bytes"),
        ({"columns": without("word")}, r"'word' \(jagged=False\) has 2 keys where 3 rows ask for 3"),
        ({"columns": absent("tags")}, "'tags' has no value in a row, but every row must have one"),
    ):
        reader = Wrong(rows_of(9))
        reader.change = change
        with pytest.raises(DataError, match=message):
            prepare(reader, tmp_path / "out")
        given = dataclasses.replace(chunk(rows_of(3)), **change)
        if "no value" in message:  # rows to score may lack one: it is then one that the vocabulary does not hold
            missing = given.columns["tags"].missing
            assert not encoder.encode(given).bags["tags"].ids[missing].any() and missing.any()
            continue
        with pytest.raises(DataError, match=message):
            encoder.encode(given)


def test_data_without_vocabularies_encode_nothing(tmp_path, good):
    with pytest.raises(DataError, match=r"\(own\) do not say how raw rows become ids"):
        open_encoder(good)
    made = prepare(Toy(rows_of(60)), tmp_path / "out")
    (made.path / "vocabulary" / "0" / "rows.npy").write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        open_encoder(made.path)


def test_attachments_are_part_of_the_data(tmp_path, good):
    source = open_prepared(good)
    file = tmp_path / "file"
    file.write_text("content")
    blocks = {split: [source.read(split, 0)] for split in SPLITS}
    write_prepared(tmp_path / "out", "own", source.schema, blocks, {}, attachments={"a/b": file})
    (tmp_path / "out" / "a" / "b").unlink()
    with pytest.raises(DataError, match="a/b is missing"):
        open_prepared(tmp_path / "out")
