"""Rows packed on disk give the batches that blocks give, to the last bit; nothing damaged is read."""

import errno
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bucket

from recjax.data.batch import Bags, Batch, Feature, Label, RowLayout, Schema
from recjax.data.pipeline import Order, batches
from recjax.data.storage.blocks import open_prepared, write_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.data.storage.remote import put_folder
from recjax.errors import DataError
from recjax.utils.paths import place

FIXED = Schema(("a", "b"), (Feature("one", 50), Feature("many", 7, 3), Feature("two", 9)))
ANY = Schema(
    ("a",),
    (Feature("bag", 2**40, None, True), Feature("one", 50), Feature("large", 2**33, 2), Feature("weighed", 5, 2, True),
     Feature("list", 30, None)),
)  # fmt: skip
LABELLED = Schema((), (Feature("one", 50), Feature("list", 4, None)), (Label("x"), Label("y", "number")))


def draw_rows(schema: Schema, rows: int, seed: int) -> Batch:
    """Rows of every value that a column may have, the largest ids among them."""
    rng = np.random.default_rng(seed)
    bags = {}
    for feature in schema.features:
        lengths = None if feature.bag else rng.integers(0, 4, rows).astype(np.int32)
        shape = (rows, feature.bag) if feature.bag else (int(lengths.sum()),)
        ids = rng.choice([0, feature.rows - 1, feature.rows // 2, 1], shape)
        weights = rng.random(shape).astype(np.float32) if feature.weighted else None
        bags[feature.name] = Bags(ids.astype(np.int32 if feature.rows < 2**31 else np.int64), lengths, weights)
    shape = (rows, len(schema.labels)) if schema.labels else (rows,)
    dense = rng.normal(size=(rows, len(schema.dense))).astype(np.float32)
    labels, weights = (rng.random(shape) < 0.5).astype(np.float32), rng.random(shape).astype(np.float32)
    return Batch(dense, bags, labels, weights)


def one_row(block: Batch, row: int) -> list[object]:
    """All values of a row, by a slow reading of the arrays of its block."""
    values = [block.dense[row].tolist(), np.array(block.labels[row]).tolist(), np.array(block.weights[row]).tolist()]
    for name, bags in block.bags.items():
        at = row if bags.lengths is None else slice(int(bags.lengths[:row].sum()), int(bags.lengths[: row + 1].sum()))
        values.append([name, bags.ids[at].tolist(), None if bags.weights is None else bags.weights[at].tolist()])
    return values


def rows_of_batch(batch: Batch) -> list[list[object]]:
    return [one_row(batch, row) for row in range(batch.size)]


def expected_batches(blocks: list[Batch], size: int, seed: int, shuffle: bool, window: int, position: int, epochs: int):
    """The batches by the definition: windows of blocks in the order of the epoch, rows mixed within each."""
    counts = np.array([block.size for block in blocks])
    order, total = Order(counts, seed, shuffle, window if shuffle else 1), int(counts.sum())
    for epoch in range(position // total, epochs):
        numbers, number = order.epoch(epoch)[0], 0
        rows = []  # (rank in the epoch by window, block, row; the row)
        for first in range(0, len(numbers), order.shuffle_blocks):
            lie = [(place, row) for place in range(first, min(first + order.shuffle_blocks, len(numbers)))
                   for row in range(counts[numbers[place]])]  # fmt: skip
            mixed = order.within(epoch, number, len(lie))
            rows += [lie[int(i)] for i in mixed] if mixed is not None else lie
            number += 1
        start = position % total if epoch == position // total else 0
        for begin in range(start, total, size):
            some = sorted(rows[begin : begin + size])
            yield epoch * total + begin, [one_row(blocks[numbers[place]], row) for place, row in some]


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    schema=st.sampled_from([FIXED, ANY, LABELLED]),
    size=st.integers(1, 25),
    seed=st.integers(0, 2**40),
    window=st.integers(1, 4),
    shuffle=st.booleans(),
    per_file=st.sampled_from([2, 1024]),
    data=st.data(),
)
def test_batches_of_packed_rows_have_the_bits_of_blocks(counts, schema, size, seed, window, shuffle, per_file, data):
    blocks = [draw_rows(schema, count, i) for i, count in enumerate(counts)]
    position = data.draw(st.integers(0, 2 * sum(counts)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for module in ("recjax.data.storage.builder", "recjax.data.storage.blocks"):
            patch.setattr(f"{module}.BLOCKS_PER_FILE", per_file)
        path = write_prepared(Path(folder) / "data", "toy", schema, {"train": blocks}, {}).path
        more = {"seed": seed, "shuffle": shuffle, "shuffle_blocks": window, "position": position, "epochs": 2}
        stream = batches(open_prepared(path), "train", size, pack=True, workers=0, **more)
        found = [(batch.position, rows_of_batch(batch)) for batch in stream]
        assert list(path.glob("packed/*.rows"))
    assert found == list(expected_batches(blocks, size, seed, shuffle, window, position, 2))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    blocks = [draw_rows(ANY, 3000, seed) for seed in range(3)]
    return write_prepared(tmp_path / "data", "toy", ANY, {"train": blocks}, {}).path


def read_all(folder: Path) -> list[list[list[object]]]:
    return [rows_of_batch(b) for b in batches(open_prepared(folder), "train", 700, epochs=1, pack=True, workers=0)]


@pytest.mark.full
def test_a_flipped_bit_is_named_and_never_read(prepared: Path) -> None:
    expected = read_all(prepared)
    for ending in ("rows", "values"):
        file = next(prepared.glob(f"packed/*.{ending}"))
        good = file.read_bytes()
        for at in np.random.default_rng(0).integers(0, len(good), 3).tolist():
            file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            with pytest.raises(DataError, match=f"damaged: {prepared}/packed/train-00000.rows.*Delete the folder"):
                read_all(prepared)
        file.write_bytes(good)
    assert read_all(prepared) == expected


@pytest.mark.full
def test_short_files_and_damaged_descriptions_are_made_again(prepared: Path) -> None:
    expected = read_all(prepared)
    for file in sorted(prepared.glob("packed/train-*")):
        good = file.read_bytes()
        for content in (good[:-5], b"", b"{" * 99):
            file.write_bytes(content)
            assert read_all(prepared) == expected and file.read_bytes() == good


def test_rows_of_other_blocks_are_not_read(prepared: Path, tmp_path: Path) -> None:
    read_all(prepared)
    other = write_prepared(tmp_path / "other", "toy", ANY, {"train": [draw_rows(ANY, 3000, s) for s in (5, 6, 7)]}, {})
    shutil.copytree(prepared / "packed", other.path / "packed")
    assert read_all(other.path)[0][0] == one_row(draw_rows(ANY, 3000, 5), 0)


@pytest.mark.parametrize("why", ["read-only", "link"])
def test_rows_lie_in_the_cache_where_there_is_no_place_beside_the_blocks(
    why: str, prepared: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "link":
        (tmp_path / "elsewhere").mkdir()
        (prepared / "packed").symlink_to(tmp_path / "elsewhere")
    else:
        refuse_writing_below(prepared, errno.EROFS, monkeypatch)
    assert len(read_all(prepared)) == 13 and list(cache.rglob("train-00000.rows"))
    assert not list((prepared / "packed").glob("*.rows"))


def refuse_writing_below(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no file be opened to be written in a folder, as a full or read-only disk does."""
    opens = Path.open

    def refuse(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" in mode and path.is_relative_to(folder):
            raise OSError(number, os.strerror(number), str(path))
        return opens(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def test_blocks_are_read_where_rows_have_no_place(
    prepared: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_all(prepared)
    shutil.rmtree(prepared / "packed")
    refuse_writing_below(tmp_path, errno.ENOSPC, monkeypatch)
    source = open_prepared(prepared)
    with caplog.at_level("INFO"):
        for _ in range(2):
            stream = batches(source, "train", 700, epochs=1, pack=True, workers=0)
            assert [rows_of_batch(batch) for batch in stream] == expected
    notes = [record.getMessage() for record in caplog.records if "cannot be packed" in record.getMessage()]
    assert len(notes) == 1 and "No space left" in notes[0] and "RECJAX_CACHE" in notes[0]
    assert not list(tmp_path.rglob("*.rows")) and not list(tmp_path.rglob("*unfinished*"))


def test_a_disk_that_is_full_in_the_midst_of_a_file_leaves_nothing_of_it(prepared: Path, cache: Path) -> None:
    """Neither beside the blocks nor in the cache folder: no file may be longer than half of the rows."""
    expected = read_all(prepared)
    size = next(prepared.glob("packed/*.rows")).stat().st_size
    shutil.rmtree(prepared / "packed")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limit[1]))
    try:
        assert read_all(prepared) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not [
        file for file in (*prepared.glob("packed/*"), *cache.rglob("*")) if file.is_file() and file.stat().st_size
    ]
    assert read_all(prepared) == expected and next(prepared.glob("packed/*.rows")).stat().st_size == size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dense": np.zeros((9, 1), np.float32)}, r"dense has shape \(9, 1\), but the schema asks for \(9, 2\)"),
        ({"dense": np.zeros((9, 0), np.float32)}, r"dense has shape \(9, 0\)"),
        ({"labels": np.zeros((9, 2), np.float32)}, r"labels has shape \(9, 2\)"),
        ({"many": Bags(np.zeros((9, 1), np.int32))}, r"'many'.*shape \(9, 1\).*3 ids"),
        ({"many": Bags(np.zeros(27, np.int32), np.full(9, 3, np.int32))}, "'many'.*3 ids"),
        ({"two": None}, "no feature 'two'"),
    ],
)
def test_arrays_that_are_not_those_of_the_schema_are_never_packed(wrong: dict[str, Any], message: str) -> None:
    """NumPy would repeat one column as often as there is room, and of none leave what was in memory."""
    good = draw_rows(FIXED, 9, 0)
    bags = {name: wrong.get(name, bag) for name, bag in good.bags.items() if wrong.get(name, bag) is not None}
    bad = Batch(wrong.get("dense", good.dense), bags, wrong.get("labels", good.labels), good.weights)
    with pytest.raises(DataError, match=message):
        RowLayout(FIXED).pack(bad)


@pytest.mark.full
def test_processes_that_pack_at_once_read_the_same(prepared: Path) -> None:
    program = f"""
        import hashlib, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_packed_rows import *
        print(hashlib.sha256(repr(read_all(Path({str(prepared)!r}))).encode()).hexdigest())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate()[0].split()[-1] for process in processes}
    assert found == {hashlib.sha256(repr(read_all(prepared)).encode()).hexdigest()}


def test_a_bucket_is_read_once_for_its_rows(prepared: Path, cache: Path, tmp_path: Path) -> None:
    expected, gs = read_all(prepared), bucket.install()
    put_folder(prepared, place("gs://toy/data"), MANIFEST)
    gs.opened.clear()
    for _ in range(2):
        source = open_prepared("gs://toy/data", cache=str(tmp_path / "copies"))
        stream = batches(source, "train", 700, epochs=1, pack=True, workers=0)
        assert [rows_of_batch(batch) for batch in stream] == expected
        assert one_row(source.read("train", 1), 5) == one_row(draw_rows(ANY, 3000, 1), 5)
    assert len([name for name in gs.opened if "array_record" in name]) == 1
    assert list((tmp_path / "copies").rglob("*.rows")) and not list((tmp_path / "copies").rglob("blocks-*"))
