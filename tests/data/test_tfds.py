"""TFDS datasets by name: a small one that the tests prepare, its mapping, its splits, and what cannot be read."""

import contextlib
import io
import json
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from recjax.data.datasets.tfds import Tfds, open_raw
from recjax.data.prepare.chunk import check_chunk
from recjax.errors import ConfigError, DataError

COLUMNS = ("user:id", "genres:jagged", "words:jagged", "age:dense", "level:id", "member:dense")
SPLITS = ("train[:60%]", "train[60%:]", "test")


class Toy(tfds.core.GeneratorBasedBuilder):
    """Text, labels, lists, numbers and a nested column; 10 training rows and 3 test rows."""

    name = "toy"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "user": tfds.features.Text(),
            "age": np.float32,
            "level": tfds.features.ClassLabel(num_classes=3),
            "genres": tfds.features.Sequence(tfds.features.ClassLabel(names=["a", "b"])),
            "member": np.bool_,
            "words": tfds.features.Sequence(tfds.features.Text()),
            "nested": {"x": np.int64},
            "rating": np.float32,
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples(0, 10), "test": self._generate_examples(10, 13)}

    def _generate_examples(self, first, last):
        for i in range(first, last):
            yield i, row(i)


def row(i):
    return {
        "user": ["", "ann", "bé"][i % 3],
        "age": float("nan") if i == 4 else i / 2,
        "level": i % 3,
        "genres": [0, 1][: i % 3],
        "member": i % 2 == 0,
        "words": ["x", "", "zz"][: i % 4],
        "nested": {"x": i},
        "rating": float(i % 6),
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        Toy(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return folder


def open_toy(source, name="toy", columns=COLUMNS, label="rating", threshold=3.0, splits=SPLITS):
    return open_raw(Tfds("", name, columns, label, threshold, *splits), source)


@pytest.mark.parametrize("name", ["toy", "toy:1.0.0"])
def test_the_rows_are_those_that_were_written(data_dir, name):
    reader = open_toy(data_dir, name)
    chunks = list(reader.chunks(0))
    assert [chunk.split.tolist() for chunk in chunks] == [[0] * 6, [1] * 4, [2] * 3]
    assert [chunk.done for chunk in chunks] == pytest.approx([6 / 13, 10 / 13, 1])
    i = 0
    for chunk in chunks:
        check_chunk(chunk, reader)
        starts = {name: np.cumsum(c.lengths) - c.lengths for name, c in chunk.columns.items() if c.lengths is not None}
        for at in range(chunk.rows):
            truth = row(i)
            assert chunk.labels[at] == (truth["rating"] >= 3)
            np.testing.assert_array_equal(chunk.dense[at], [truth["age"], truth["member"]])
            for name, column in chunk.columns.items():
                if column.lengths is None:
                    found = column.keys[at]
                    missing = column.missing is not None and column.missing[at]
                else:
                    part = slice(starts[name][at], starts[name][at] + column.lengths[at])
                    found = column.keys[part].tolist()
                    missing = column.missing is not None and column.missing[part].tolist()
                if name == "words":
                    assert found == [word.encode() for word in truth[name]] and missing == [not w for w in truth[name]]
                elif name == "user":
                    assert found == truth[name].encode() and missing == (truth[name] == "")
                else:
                    assert found == truth[name] and missing is False
            i += 1
    assert [len(list(reader.chunks(start))) for start in range(4)] == [3, 2, 1, 0]
    assert "tensorflow" not in sys.modules


def test_the_folder_of_a_version_needs_no_name(data_dir):
    reader = open_toy(data_dir / "toy" / "1.0.0", "")
    assert sum(chunk.rows for chunk in reader.chunks(0)) == 13
    assert {"dataset_info.json", "features.json"} < reader.files().keys()
    assert reader.label == "rating >= 3" and "train=train[:60%]" in reader.splits


def test_labels_of_zero_and_one(data_dir):
    labels = np.concatenate([c.labels for c in open_toy(data_dir, label="level", columns=("user:id",)).chunks(0)])
    assert not labels.any()  # none is 3 or more
    member = open_toy(data_dir, label="member", columns=("user:id",), threshold=None)
    assert np.concatenate([c.labels for c in member.chunks(0)]).tolist() == [1, 0] * 6 + [1]
    with pytest.raises(DataError, match=r"toy/1.0.0 at .*: train row 2: rating is 2.0, not 0 or 1. Set threshold=X"):
        list(open_toy(data_dir, threshold=None).chunks(0))
    with pytest.raises(DataError, match="train row 4: age is nan"):
        list(open_toy(data_dir, label="age", columns=("user:id",)).chunks(0))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "toyy"}, DataError, "TFDS does not open 'toyy' below .*--from.*download=true"),
        ({"name": "toy:2.0.0"}, DataError, "TFDS does not open 'toy:2.0.0'"),
        ({"name": "no name"}, DataError, "TFDS does not open 'no name'"),
        ({"columns": ("user:id", "gone:id")}, DataError, "has no column 'gone'. Its columns are .*user"),
        ({"label": "gone"}, DataError, "has no column 'gone'"),
        ({"label": "level"}, ConfigError, "columns: 'level' is the label, so it cannot be a feature"),
        ({"columns": ("age:id",)}, DataError, r"column 'age' \(.*float32.*\) cannot be id"),
        ({"columns": ("nested:id",)}, DataError, "column 'nested' .* cannot be id"),
        ({"columns": ("user:dense",)}, DataError, "column 'user' .* cannot be dense"),
        ({"columns": ("user:jagged",)}, DataError, "column 'user' .* cannot be jagged"),
        ({"columns": ("genres:id",)}, DataError, "column 'genres' .* cannot be id"),
        ({"label": "user", "columns": ("level:id",)}, DataError, "column 'user' .* cannot be label"),
        ({"splits": ("train", "", "gone")}, DataError, "has no split 'gone'"),
        ({"splits": ("train[:x]", "", "")}, DataError, r"has no split 'train\[:x\]'"),
        ({"splits": ("train", "train[90%:]", "test")}, ConfigError, "train and validation share rows"),
        ({"splits": ("train", "test", "test")}, ConfigError, "validation and test share rows"),
        ({"columns": ("user",)}, ConfigError, "'user' is not COLUMN:ROLE"),
        ({"columns": ("user:ids",)}, ConfigError, "'user:ids' is not COLUMN:ROLE with a role of id, jagged, dense"),
        ({"columns": ("user:id", "user:id")}, ConfigError, "each column once"),
        ({"columns": ()}, ConfigError, "tfds needs columns. Write for example"),
        ({"label": ""}, ConfigError, "tfds needs label"),
        ({"splits": ("", "train", "test")}, ConfigError, "tfds needs train"),
    ],
)
def test_what_does_not_fit_the_dataset(data_dir, options, error, message):
    with pytest.raises(error, match=message) as raised:
        open_toy(data_dir, **options)
    assert "\n" not in str(raised.value)


def test_folders_that_hold_nothing(tmp_path):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(DataError, match="TFDS does not open 'toy' below"):
            open_toy(folder)


def damaged(data_dir, tmp_path):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    return copy, copy / "toy" / "1.0.0"


def test_a_format_that_needs_tensorflow(data_dir, tmp_path):
    copy, version = damaged(data_dir, tmp_path)
    info = json.loads((version / "dataset_info.json").read_text())
    (version / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    with pytest.raises(DataError, match="needs TensorFlow to read. Prepare it again with TFDS as ArrayRecord"):
        open_toy(copy)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_damaged_descriptions(data_dir, tmp_path, name):
    for content in ("", "{", None):
        copy, version = damaged(data_dir, tmp_path)
        (version / name).unlink()
        if content is not None:
            (version / name).write_text(content)
        with pytest.raises(DataError, match="TFDS does not open 'toy'"):
            open_toy(copy)
        shutil.rmtree(copy)


def flip(file):
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        flip,
    ],
    ids=["cut", "empty", "missing", "flipped bit"],
)
def test_damaged_rows(data_dir, tmp_path, damage):
    copy, version = damaged(data_dir, tmp_path)
    damage(next(version.glob("*train*")))
    with pytest.raises(DataError, match="toy/1.0.0 at .*(cannot be read|has no split)"):
        list(open_toy(copy).chunks(0))
