"""Preparation by many machines gives the data that one machine gives.

The stages are run by plain loops here, and by Beam's own DirectRunner where Beam is installed (it needs older packages
than the rest of recjax: `pip install -e ".[beam]" pytest hypothesis` into an environment of its own).
"""

import collections
import gzip
import importlib.util
import itertools
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bucket
from support.commands import assert_refused, inside
from support.criteo import random_rows, text
from support.yelp import many

from recjax import settings as machinery
from recjax.data import catalog, statistics
from recjax.data.datasets.criteo import CriteoReader
from recjax.data.datasets.movietweetings import _FILES, _SHIPPED
from recjax.data.prepare import beam
from recjax.data.prepare import beam_steps as steps
from recjax.data.prepare.ids import Frequency
from recjax.data.storage.blocks import open_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.data.text.source_files import find_file, read_bytes
from recjax.errors import DataError
from recjax.utils.paths import place

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
pytestmark = [pytest.mark.filterwarnings("ignore")] if HAS_BEAM else []  # of its older packages


def run_here(stage, items, work, *, flags, progress):
    for item in reversed(items):  # in an order that nothing may depend on
        work(item)


def read_here(job, tasks, flags, progress):
    groups, parts, by_feature = collections.defaultdict(list), [], collections.defaultdict(list)
    for key, value in itertools.chain.from_iterable(steps.read_task(job, task) for task in reversed(tasks)):
        (groups[key] if key >= 0 else parts).append(value)
    steps.write_json(place(job.work) / "parts.json", parts)
    for key, runs in groups.items():
        feature, run = steps.count_shard(job, key, runs)
        by_feature[feature].append(run)
    ids = getattr(job.config, "ids", Frequency())
    for feature in range(len(job.reader.features)) if isinstance(ids, Frequency) else ():
        steps.make_vocabulary(job, feature, [None, *by_feature[feature]])


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(beam, "_run", run_here)
    monkeypatch.setattr(beam, "_read", read_here)


@pytest.fixture
def small(monkeypatch):
    """Many pieces, many tasks, many files."""
    monkeypatch.setattr(CriteoReader.__init__, "__defaults__", (2000,))  # bytes of a piece
    monkeypatch.setattr("recjax.data.datasets.criteo._TASK_PIECES", 3)
    for module in ("storage.builder", "storage.blocks", "prepare.beam_steps"):
        monkeypatch.setattr(f"recjax.data.{module}.BLOCKS_PER_FILE", 2)
    for module in ("prepare.prepare", "prepare.beam_steps"):
        monkeypatch.setattr(f"recjax.data.{module}.BLOCK_ROWS", 32)


def assert_same(kind, raw, folder, *overrides, flags="--runner=DirectRunner"):
    config = machinery.override(catalog.default(kind), overrides)
    one = catalog.prepare(config, raw, folder / "one")
    many = catalog.prepare(config, str(raw), str(folder / "many"), beam=flags)
    assert many == one | {"path": many["path"]}
    a, b = (folder / name for name in ("one", "many"))
    assert sorted(os.listdir(folder)) == sorted({"one", "many", *(p for p in os.listdir(folder) if "raw" in p)})
    files = sorted(str(file.relative_to(a)) for file in a.rglob("*") if file.is_file())
    assert files == sorted(str(file.relative_to(b)) for file in b.rglob("*") if file.is_file())
    for name in files:  # protobuf writes maps in any order, so files of blocks differ from run to run
        if "array_record" not in name and name != MANIFEST:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    manifests = [json.loads((each / MANIFEST).read_text()) for each in (a, b)]
    for manifest in manifests:
        for name, entry in manifest["files"].items():
            if "array_record" in name:
                entry["sha256"] = ""
    assert json.dumps(manifests[0]) == json.dumps(manifests[1])
    for each in (a, b):
        statistics.describe(catalog.open_verified(str(each)))
    return one


def days(folder, count=3, rows=100, zipped=()):
    folder.mkdir()
    for day in range(count):
        data = text(random_rows(rows, day))
        if day in zipped:
            (folder / f"day_{day}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"day_{day}").write_bytes(data)
    return folder


@pytest.mark.full
@pytest.mark.usefixtures("here", "small")
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("ids.min_count=2", "ids.modulo=50", "missing_indicators=true", "dense=standard"),
        ("split=random", "subsample_negatives=0.5", "ids=hash", "ids.rows=100"),
    ],
)
def test_criteo_with_many_tasks_and_files(tmp_path, overrides):
    raw = days(tmp_path / "raw", zipped=(1,))
    made = assert_same("criteo_1tb", raw, tmp_path, "days=0,1,2", *overrides)
    assert made["rows"]["train"] > 60
    names = [name for name in os.listdir(tmp_path / "many/blocks/1.0.0") if "train" in name]
    assert len(names) > 1


@pytest.mark.full
@pytest.mark.usefixtures("here", "small")
def test_malformed_lines_are_counted_or_named(tmp_path):
    raw = days(tmp_path / "raw")
    with (raw / "day_1").open("ab") as file:
        file.write(b"2\tx\n")
    made = assert_same("criteo_1tb", raw, tmp_path, "days=0,1,2", "on_error=skip")
    assert made["skipped"] == {"field count": 1}
    config = machinery.override(catalog.default("criteo_1tb"), ("days=0,1,2",))
    with pytest.raises(DataError, match=r"day_1:101: the line has 2 field\(s\)"):
        catalog.prepare(config, str(raw), str(tmp_path / "other"), beam="")
    with pytest.raises(DataError, match="already holds prepared data"):
        catalog.prepare(config, str(raw), str(tmp_path / "many"), beam="")


@pytest.mark.usefixtures("here")
def test_other_datasets_are_read_by_one_machine(tmp_path):
    assert_same("yelp", many(tmp_path / "raw"), tmp_path, "ids.min_count=1", "dense=standard")


@pytest.mark.usefixtures("here")
def test_ratings_keep_their_own_transform_and_baselines(tmp_path):
    (tmp_path / "raw").mkdir()
    for name, lines in zip(_FILES, (3000, 10**6), strict=True):
        data = b"".join(read_bytes(find_file(_SHIPPED, name)).splitlines(keepends=True)[:lines])
        (tmp_path / "raw" / name).write_bytes(data)
    assert_same("movietweetings", tmp_path / "raw", tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("here", "small")
def test_from_a_bucket_to_a_bucket(tmp_path):
    bucket.install()
    raw = days(tmp_path / "raw", zipped=(2,))
    for file in raw.iterdir():
        (place("gs://b/raw") / file.name).write_bytes(file.read_bytes())
    config = machinery.override(catalog.default("criteo_1tb"), ("days=0,1,2", "ids.min_count=2"))
    one = catalog.prepare(config, raw, tmp_path / "one")
    catalog.prepare(config, "gs://b/raw", "gs://b/made", beam="")
    made = open_prepared("gs://b/made", "criteo_1tb", str(tmp_path / "cache"))
    made.verify()
    assert made.fingerprint == one["fingerprint"] and made.about == open_prepared(tmp_path / "one").about
    assert {path.name for path in place("gs://b").iterdir()} == {"raw", "made"}, "the work folder is gone"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
@settings(max_examples=50)
def test_files_of_blocks_hold_every_row_once(rows):
    step = steps.BLOCKS_PER_FILE * steps.BLOCK_ROWS
    parts = [{"number": i, "rows": [n * 10**6, 0, n]} for i, n in enumerate(rows)]
    for split, total in (("train", sum(rows) * 10**6), ("validation", 0), ("test", sum(rows))):
        files = steps.block_files(parts, split)
        assert [file.first for file in files] == list(range(0, total, step))
        assert sum(file.rows for file in files) == total
        size = dict(enumerate(part["rows"][("train", "validation", "test").index(split)] for part in parts))
        for file in files:
            held = [max(0, min(file.first + file.rows, at + size[n]) - max(file.first, at)) for n, at in file.parts]
            assert sum(held) == file.rows and all(held)


def test_without_beam_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "apache_beam.options.pipeline_options", None)
    raw = days(tmp_path / "raw")
    done = inside("data", "prepare", "criteo_1tb", "--from", raw, "--out", tmp_path / "x", "days=0,1,2", "--beam=")
    assert_refused(done, 2, r"pip install -e '\.\[beam\]'")


@pytest.mark.skipif(not HAS_BEAM, reason="Apache Beam is not installed")
@pytest.mark.parametrize("overrides", [("ids.min_count=2",), ("split=random", "ids=hash", "ids.rows=100")])
def test_the_direct_runner(tmp_path, small, overrides):
    assert_same("criteo_1tb", days(tmp_path / "raw", zipped=(0,)), tmp_path, "days=0,1,2", *overrides)


@pytest.mark.skipif(not HAS_BEAM, reason="Apache Beam is not installed")
def test_errors_through_beam(tmp_path):
    raw = days(tmp_path / "raw")
    with (raw / "day_1").open("ab") as file:
        file.write(b"2\tx\n")
    config = machinery.override(catalog.default("criteo_1tb"), ("days=0,1,2",))
    with pytest.raises(DataError, match=r"day_1:101: the line has 2 field\(s\) instead of 40: .* counts them\.$"):
        catalog.prepare(config, str(raw), str(tmp_path / "many"), beam="--runner=DirectRunner")
