"""Criteo files to prepared data and back, against plain Python; damaged files; the split conventions."""

import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import criteo as criteo_support
from support.commands import assert_refused, inside

from recjax.data.datasets.criteo import Criteo1TB, CriteoKaggle, CriteoReader, open_raw
from recjax.data.datasets.options import prepare_as
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.source import SPLITS, concatenate
from recjax.data.storage.blocks import open_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.errors import ConfigError, DataError

ROWS = criteo_support.random_rows(70)


def prepare(config, raw, out):
    return prepare_as(config, open_raw(config, raw), out)


def write(folder, rows, name="train.txt"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(rows if isinstance(rows, bytes) else criteo_support.text(rows))
    return folder


def whole(source, split):
    blocks = [source.read(split, i) for i in range(len(source.row_counts(split)))]
    return concatenate(blocks) if blocks else None


def check(source, rows, ends, ids):
    """Every row of prepared data against plain Python; ends: split -> (first, last) row of the file."""
    train = rows[slice(*ends["train"])]
    for split, (first, last) in ends.items():
        found, truth = whole(source, split), rows[first:last]
        assert (0 if found is None else found.size) == last - first
        if found is None:
            continue
        assert found.labels.tolist() == [row[0] for row in truth]
        assert (found.weights == 1).all()
        dense = [[criteo_support.log1p(value) for value in row[1]] for row in truth]
        np.testing.assert_allclose(found.dense, dense, rtol=3e-7)
        for i in range(26):
            values, seen = ([row[2][i] for row in part] for part in (truth, train))
            if isinstance(ids, Frequency):
                expected = criteo_support.frequency_rows(values, seen, ids.min_count, ids.modulo)
            else:
                expected = [ids.rows[0] if v is None else v % ids.rows[0] for v in values]
            assert found.bags[f"C{i + 1}"].ids[:, 0].tolist() == expected


@settings(max_examples=15)
@given(
    rows=criteo_support.rows(40),
    ids=st.builds(Frequency, st.integers(1, 3), st.sampled_from([0, 0, 3, 1000])) | st.just(Modulo((7,))),
    split=st.sampled_from(["dlrm", "torchrec"]),
)
def test_prepared_data_are_the_rows_of_the_file(tmp_path_factory, rows, ids, split):
    folder = tmp_path_factory.mktemp("round")
    source = prepare(CriteoKaggle(ids=ids, split=split), write(folder / "raw", rows), folder / "out")
    tail = len(rows) // 7
    begin = len(rows) - tail
    middle = begin + math.ceil(tail / 2)
    first, second = ("test", "validation") if split == "dlrm" else ("validation", "test")
    check(source, rows, {"train": (0, begin), first: (begin, middle), second: (middle, len(rows))}, ids)
    assert not (folder / ".out.work").exists()


def test_hashed_ids(tmp_path):
    source = prepare(CriteoKaggle(ids=Hash((100,))), write(tmp_path / "raw", ROWS), tmp_path / "out")
    for split in SPLITS:
        assert whole(source, split).bags["C1"].ids.max() <= 100
    train = whole(source, "train")
    missing = [row[2][0] is None for row in ROWS[:60]]
    assert (train.bags["C1"].ids[:, 0] == 100).tolist() == missing
    assert source.schema.feature("C1").rows == 101


def test_plain_zipped_windows_and_marked_files_give_the_same(tmp_path):
    raw = criteo_support.text(ROWS)
    plain = prepare(CriteoKaggle(), write(tmp_path / "a", raw), tmp_path / "plain")
    odd = b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    write(tmp_path / "b", gzip.compress(odd), "train.txt.gz")
    assert prepare(CriteoKaggle(), tmp_path / "b", tmp_path / "odd").fingerprint == plain.fingerprint
    file = tmp_path / "b" / "train.txt.gz"
    assert prepare(CriteoKaggle(), file, tmp_path / "file").fingerprint == plain.fingerprint


def test_random_split(tmp_path):
    rows = criteo_support.random_rows(3000)
    folder = write(tmp_path / "raw", rows)
    sources = [
        prepare(CriteoKaggle(split="random", split_seed=seed), folder, tmp_path / f"{seed}{i}")
        for i, seed in enumerate((0, 0, 1))
    ]
    assert sources[0].fingerprint == sources[1].fingerprint != sources[2].fingerprint
    counts = [int(sources[0].row_counts(split).sum()) for split in SPLITS]
    assert sum(counts) == 3000
    np.testing.assert_allclose(np.array(counts) / 3000, [0.8, 0.1, 0.1], atol=0.03)
    assert "80, 10 and 10%" in sources[0].about["splits"]


def days(folder, rows, last=23):
    write(folder, rows[:20], "day_0")
    write(folder, gzip.compress(criteo_support.text(rows[20:35])), "day_1.gz")
    write(folder, rows[35:], f"day_{last}")
    return folder


@pytest.mark.parametrize(
    ("split", "first", "second"), [("dlrm", "test", "validation"), ("torchrec", "validation", "test")]
)
def test_days_of_the_terabyte(tmp_path, split, first, second):
    config = Criteo1TB(days=(0, 1, 23), split=split, ids=Frequency(2))
    source = prepare(config, days(tmp_path / "raw", ROWS), tmp_path / "out")
    check(source, ROWS, {"train": (0, 35), first: (35, 53), second: (53, 70)}, config.ids)
    assert f"first half of day 23 {first}" in source.about["splits"]
    assert set(source.about["files"]) == {"day_0", "day_1.gz", "day_23"}


def test_negatives_are_left_out(tmp_path):
    rows = criteo_support.random_rows(4000)
    config = Criteo1TB(days=(0, 1, 23), subsample_negatives=0.875)
    source = prepare(config, days(tmp_path / "raw", rows), tmp_path / "out")
    labels = np.concatenate([whole(source, split).labels for split in SPLITS if len(source.row_counts(split))])
    positives = sum(row[0] for row in rows)
    assert labels.sum() == positives
    assert (labels == 0).sum() == pytest.approx((4000 - positives) / 8, abs=60)


def test_impossible_options():
    for change, message in (
        ({"days": ()}, "days is"),
        ({"days": (3, 1)}, "ascending"),
        ({"days": (0, 24)}, "0 to 23"),
        ({"days": (5,)}, "leaves nothing to train on"),
        ({"subsample_negatives": 1.0}, "subsample_negatives is 1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Criteo1TB(**change)


def test_chunks_may_begin_anywhere(tmp_path):
    """What `chunks(start)` promises, with pieces so small that lines cross them."""
    reader = open_raw(CriteoKaggle(), write(tmp_path / "raw", ROWS))
    small = CriteoReader(CriteoKaggle(), reader.paths, lambda n: n // 7, "", 0.0, piece_bytes=700)
    chunks = list(small.chunks(0))
    assert len(chunks) > 10 and sum(chunk.rows for chunk in chunks) == 70
    for start in (1, 7, len(chunks)):
        again = list(small.chunks(start))
        assert len(again) == len(chunks) - start
        for one, other in zip(again, chunks[start:], strict=True):
            np.testing.assert_array_equal(one.dense, other.dense)
            assert one.columns["C1"].keys.tolist() == other.columns["C1"].keys.tolist()
            assert one.split.tolist() == other.split.tolist()
    assert chunks[-1].done == 1


LINE = criteo_support.line(ROWS[0]).encode()
GOOD = criteo_support.text(ROWS[:20])
DAMAGE = {
    "column count": (GOOD + LINE + b"\t\n" + GOOD, r"train.txt:21: the line has 41 field\(s\) instead of 40"),
    "blank line": (GOOD + b"\n" + GOOD, r"train.txt:21: the line has 1 field\(s\)"),
    "category": (GOOD + LINE + b"xyz\n", r"train.txt:21: C26 \(column 40\) is .*xyz'"),
    "integer": (GOOD + LINE.replace(b"\t", b"\tx", 1) + b"\n", r"train.txt:21: I1 \(column 2\) is 'x"),
    "label": (GOOD + b"2" + LINE[1:] + b"\n", r"train.txt:21: the label \(column 1\) is '2', not 0 or 1"),
    "nul": (GOOD + b"\0" * 300, r"train.txt:21: the line has 1 field"),
    "cut line": (GOOD + LINE[:100], r"train.txt:21: the line has \d+ field"),
    "long integer": (GOOD + LINE.replace(b"\t", b"\t" + b"9" * 40, 1), r"train.txt:21: I1 \(column 2\) is '9999"),
    "not ascii": (GOOD + LINE.replace(b"\t", "\té".encode(), 1), r"train.txt:21: I1 \(column 2\) is 'é"),
    "utf-16": (GOOD.decode().encode("utf-16"), r"train.txt:1: the label \(column 1\) is '\\xff\\xfe1"),
    "empty": (b"", "train.txt is empty"),
    "zipped": (gzip.compress(GOOD), "train.txt is gzipped, but its name does not end in .gz"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(tmp_path, name):
    data, message = DAMAGE[name]
    raw = write(tmp_path / "raw", data)
    done = inside("data", "prepare", "criteo_kaggle", "--from", raw, "--out", tmp_path / "out", "--json")
    assert_refused(done, 3, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]  # nothing that a later run would trust


@pytest.mark.parametrize("name", ["column count", "blank line", "category", "integer", "label", "nul", "cut line"])
def test_malformed_lines_are_left_out_and_counted(tmp_path, name):
    data, _ = DAMAGE[name]
    good = criteo_support.text(ROWS[:20])
    kept = 40 if data.endswith(good) and len(data) > 1.5 * len(good) else 20
    raw = write(tmp_path / "raw", data)
    done = inside(
        "data", "prepare", "criteo_kaggle", "--from", raw, "--out", tmp_path / "out", "--json", "on_error=skip"
    )
    assert sum(done.result["rows"].values()) == kept
    assert sum(done.result["skipped"].values()) == 1
    assert "on_error=skip left out malformed lines: 1 (" in done.err
    assert open_prepared(tmp_path / "out").about["skipped"] == done.result["skipped"]


def test_a_file_of_malformed_lines_has_no_rows(tmp_path):
    source = prepare(CriteoKaggle(on_error="skip"), write(tmp_path / "raw", b"a\nb\n"), tmp_path / "out")
    assert source.about["skipped"] == {"field count": 2}
    assert all(source.row_counts(split).sum() == 0 for split in SPLITS)


def test_missing_sources(tmp_path):
    (tmp_path / "folder" / "train.txt").mkdir(parents=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.txt.gz").write_bytes(gzip.compress(criteo_support.text(ROWS))[:-30])
    for place, message in (
        (None, "does not ship with recjax. Give the place of its files with --from"),
        (tmp_path / "absent", "absent is not a folder"),
        (tmp_path / "folder", "train.txt is a folder where a file should be"),
        (tmp_path / "cut", "is no complete gzip file"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(CriteoKaggle(), place, tmp_path / "out")
    with pytest.raises(DataError, match="has neither day_5 nor day_5.gz"):
        prepare(Criteo1TB(days=(0, 5)), days(tmp_path / "raw", ROWS), tmp_path / "out")


def test_a_config_that_disagrees_is_refused_with_both_values(tmp_path):
    out = tmp_path / "out"
    prepare(CriteoKaggle(ids=Frequency(3)), write(tmp_path / "raw", ROWS), out)
    assert CriteoKaggle(path=str(out), ids=Frequency(3)).open().name == "criteo_kaggle"
    for config, message in (
        (CriteoKaggle(path=str(out)), r"ids.min_count=3, but the config says 10. Set data.ids.min_count=3"),
        (CriteoKaggle(path=str(out), ids=Hash()), r"ids=frequency, but the config says hash"),
        (CriteoKaggle(path=str(out), ids=Frequency(3), dense="none"), r"dense=log1p, but the config says none"),
        (Criteo1TB(path=str(out)), "holds the dataset 'criteo_kaggle', but the config asks for 'criteo_1tb'"),
        (
            CriteoKaggle(ids=Frequency(4)),
            "data.path names none.*recjax data prepare criteo_kaggle --from PATH --out DIR ids.min_count=4",
        ),
    ):
        with pytest.raises(DataError, match=message):
            config.open()


def test_info_describes_prepared_data(tmp_path):
    prepare(CriteoKaggle(), write(tmp_path / "raw", ROWS), tmp_path / "out")
    described = inside("data", "info", tmp_path / "out", "--json").result
    assert described["about"]["options"]["ids.min_count"] == 10
    assert described["about"]["files"].keys() == {"train.txt"}
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert any(name.startswith("vocabulary/") for name in manifest["files"])


def test_integers_as_categories(tmp_path):
    """39 features: integers in the buckets of plain Python, which are told apart by their ids, and one dense column."""
    raw, config = write(tmp_path / "raw", ROWS), CriteoKaggle(ids=Frequency(), integers="categories", dense="none")
    source = prepare(config, raw, tmp_path / "out")
    assert source.schema.dense == ("integers_missing",)
    assert [f.name for f in source.schema.features] == [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)]
    train = whole(source, "train")
    rows = ROWS[: train.size]
    assert train.dense[:, 0].tolist() == [row[1].count(None) for row in rows]
    for i in range(13):
        buckets = [
            None if (x := row[1][i]) is None else x if x <= 2 else ("log", int(math.log(x) ** 2)) for row in rows
        ]
        ids = train.bags[f"I{i + 1}"].ids[:, 0].tolist()
        assert len(set(zip(buckets, ids, strict=True))) == len(set(buckets)) == len(set(ids))
    assert open_prepared(tmp_path / "out").schema == source.schema
