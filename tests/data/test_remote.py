"""Prepared data on object storage: only what is read is copied, nothing that is not what was written."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import bucket, fuzzing, shop
from support.commands import assert_refused, inside

from recjax.data.batch import Batch, Schema
from recjax.data.prepare.encoder import open_encoder
from recjax.data.storage import manifest as manifests
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.data.storage.remote import put_folder
from recjax.data.storage.run_snapshot import open_snapshot, snapshot_data
from recjax.errors import ConfigError, DataError
from recjax.utils.paths import escapes, is_remote, place

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

URL = "gs://shop/prepared"


@pytest.fixture
def gs():
    return bucket.install()


@pytest.fixture
def prepared(gs, tmp_path):
    made = shop.prepare_shop(tmp_path / "here")
    put_folder(made.path, place(URL), MANIFEST)
    gs.opened.clear()
    return made


def assert_same(one, other):
    for split in ("train", "validation", "test"):
        assert one.row_counts(split).tolist() == other.row_counts(split).tolist()
        for index in range(len(one.row_counts(split))):
            a, b = one.read(split, index), other.read(split, index)
            assert a.position == b.position
            np.testing.assert_array_equal(a.labels, b.labels)
            for name in a.bags:
                np.testing.assert_array_equal(a.bags[name].ids, b.bags[name].ids)


def test_a_bucket_holds_the_same_data_as_the_folder(prepared, tmp_path):
    there = open_prepared(URL, "shop", str(tmp_path / "cache"))
    assert there.fingerprint == prepared.fingerprint and there.about == prepared.about
    assert_same(prepared, there)
    there.verify()
    assert open_encoder(there.path).schema == prepared.schema
    snapshot_data(there, tmp_path / "kept")
    assert open_snapshot(tmp_path / "kept").about == prepared.about


def test_only_files_that_are_read_are_copied_and_only_once(prepared, gs, tmp_path):
    cache = str(tmp_path / "cache")
    there = open_prepared(URL, None, cache)
    assert not [name for name in gs.opened if "array_record" in name]
    there.read("validation", 0)
    there.read("validation", 0)
    assert [name for name in gs.opened if "array_record" in name] == [
        "/shop/prepared/blocks/1.0.0/blocks-validation.array_record-00000"
    ]
    gs.opened.clear()
    again = open_prepared(URL, None, cache)
    again.read("validation", 0)
    assert gs.opened == [f"/shop/prepared/{MANIFEST}"]


def test_the_second_file_of_a_split_is_found(gs, tmp_path, monkeypatch):
    schema = Schema(("x",), ())

    def one(i):
        return Batch(np.full((1, 1), i, np.float32), {}, np.zeros(1, np.float32), np.ones(1, np.float32))

    for module in ("recjax.data.storage.builder", "recjax.data.storage.blocks"):
        monkeypatch.setattr(f"{module}.BLOCKS_PER_FILE", 2)
    made = write_prepared(tmp_path / "here", "x", schema, {"train": map(one, range(5))}, {})
    put_folder(made.path, place(URL), MANIFEST)
    there = open_prepared(URL, cache=str(tmp_path / "cache"))
    assert [there.read("train", i).dense[0, 0] for i in (4, 0, 2, 3, 1)] == [4, 0, 2, 3, 1]


def test_a_changed_object_is_refused(prepared, gs, tmp_path):
    name = "/shop/prepared/blocks/1.0.0/blocks-train.array_record-00000"
    data = bytearray(gs.store[name].getvalue())
    data[len(data) // 2] ^= 1
    gs.store[name].seek(0)
    gs.store[name].write(bytes(data))
    there = open_prepared(URL, cache=str(tmp_path / "cache"))
    there.read("test", 0)
    with pytest.raises(DataError, match=rf"{URL}/blocks/1.0.0/blocks-train.array_record-00000 is not what"):
        there.read("train", 0)
    assert not list((tmp_path / "cache").rglob("blocks-train*"))


@pytest.mark.parametrize("error", [OSError("401 ?token=abc"), RuntimeError("x"), ImportError("no gcsfs")])
def test_a_place_that_cannot_be_reached(prepared, gs, tmp_path, error):
    there = open_prepared(URL, cache=str(tmp_path / "cache"))
    gs.refuse = error
    for call in (lambda: open_prepared(URL), lambda: there.read("train", 0)):
        with pytest.raises(DataError, match=f"{URL}.* cannot be reached") as caught:
            call()
        assert "abc" not in str(caught.value)
        assert ("'.[remote]'" in str(caught.value)) == isinstance(error, ImportError)


def test_nothing_there(gs):
    with pytest.raises(DataError, match="no prepared data at gs://shop/prepared: there is no such folder"):
        open_prepared(URL)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..", "", "gs://b/x", "a\\..\\x"])
def test_names_cannot_leave_the_folder(prepared, gs, tmp_path, name):
    assert escapes(name)
    described = json.loads(gs.store[f"/shop/prepared/{MANIFEST}"].getvalue())
    described["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    place(URL).joinpath(MANIFEST).write_text(json.dumps(described))
    (tmp_path / "here" / MANIFEST).write_text(json.dumps(described))
    for path in (URL, tmp_path / "here"):
        with pytest.raises(DataError, match="lies outside of the folder"):
            open_prepared(path, cache=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_manifest_cannot_ask_for_memory(tmp_path):
    made = shop.prepare_shop(tmp_path / "here")
    described = json.loads((made.path / MANIFEST).read_text())
    described["splits"]["train"]["blocks"] = [[4096, 2**31 - 1]] * 1000
    parts = (described["dataset"], described["schema"], described["splits"])
    described["fingerprint"] = manifests.fingerprint(*parts)
    (made.path / MANIFEST).write_text(json.dumps(described))
    with pytest.raises(DataError, match="damaged"):
        open_prepared(made.path)


@pytest.mark.parametrize("url", ["ftp://host/x", "https://host/x", "memory://x"])
def test_other_urls_are_refused(url):
    assert is_remote(url)
    with pytest.raises(ConfigError, match="not a place that recjax can read"):
        open_prepared(url)


@pytest.mark.full
def test_processes_share_a_cache(tmp_path):
    """Several processes copy the same files at once; each ends with whole ones."""
    made = shop.prepare_shop(tmp_path / "here")
    code = f"""
        from support import bucket
        from recjax.data.storage.blocks import open_prepared
        from recjax.utils.paths import place
        from recjax.data.storage.remote import put_folder
        from pathlib import Path
        bucket.install()
        put_folder(Path({str(made.path)!r}), place({URL!r}), "recjax.json")
        open_prepared({URL!r}, cache={str(tmp_path / "cache")!r}).verify()
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    tests = str(Path(__file__).parents[1])
    script = f"import sys\nsys.path[:0] = [{tests!r}]\n{code}"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    [folder] = (tmp_path / "cache").iterdir()
    for file in made.path.rglob("*"):
        if file.is_file() and file.name != MANIFEST:
            assert (folder / file.relative_to(made.path)).read_bytes() == file.read_bytes()


@pytest.mark.full
def test_training_from_a_bucket_gives_the_same_numbers(prepared, gs, tmp_path):
    run = ("train", "synthetic", "data=prepared", "train.steps=2", "train.batch_size=64", "mesh.devices=1", "--json")
    here = inside(*run, f"data.path={prepared.path}", "--out", tmp_path / "a").result
    there = inside(*run, f"data.path={URL}", f"data.cache={tmp_path / 'cache'}", "--out", tmp_path / "b").result
    assert here["eval"] == there["eval"]
    info = inside("data", "info", URL, "--json").result
    assert info["fingerprint"] == prepared.fingerprint
    assert_refused(inside(*run, "data.path=gs://shop/other", "--out", tmp_path / "c"), 3, "no prepared data at gs://")


@pytest.mark.parametrize("name", ["taobao", "movielens, CSV", "movielens, ::", "yelp", "avazu"])
def test_raw_files_are_read_from_a_bucket_too(gs, tmp_path, name):
    target = fuzzing.TARGETS[name]
    target.write(tmp_path)
    for file in tmp_path.iterdir():
        (place("gs://b/raw") / file.name).write_bytes(file.read_bytes())
    target.read(place("gs://b/raw"))
    with pytest.raises(DataError, match=r"gs://b/other.* (is not a folder|does not exist)"):
        target.read(place("gs://b/other"))


def test_only_beam_writes_to_a_bucket(tmp_path):
    done = inside("data", "prepare", "movietweetings", "--out", URL)
    assert_refused(done, 2, "Prepare to a folder of this machine and copy it there")
