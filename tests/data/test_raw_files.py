"""What holds of every dataset's raw files: harmless differences make none, damage is named, chunks begin anywhere."""

import dataclasses

import pytest
from support import damage, fuzzing

from recjax.data.datasets import avazu, criteo, movielens, movietweetings, readers, taobao, yelp
from recjax.data.prepare.chunk import check_chunk
from recjax.data.text import json_lines, table
from recjax.errors import DataError

pytestmark = pytest.mark.light_compile

DATASETS = {  # as support/fuzzing.py writes them
    "avazu": (avazu, avazu.Avazu()),
    "criteo": (criteo, criteo.CriteoKaggle(split="random")),
    "movielens, CSV": (movielens, movielens.MovieLens(variant="latest", tags=2)),
    "movielens, ::": (movielens, movielens.MovieLens(variant="1m")),
    "movielens, tabs": (movielens, movielens.MovieLens(variant="100k")),
    "movietweetings": (movietweetings, movietweetings.MovieTweetings()),
    "taobao": (taobao, taobao.Taobao()),
    "yelp": (yelp, yelp.Yelp()),
}


def write(name, folder):
    folder.mkdir()
    fuzzing.TARGETS[name].write(folder)
    return sorted(folder.iterdir())


def read(name, folder, start=0, **options):
    module, config = DATASETS[name]
    reader = module.open_raw(dataclasses.replace(config, **options), folder)
    chunks = list(reader.chunks(start))
    for chunk in chunks:
        check_chunk(chunk, reader)
    return chunks


def content(chunk):
    """All that a chunk holds, to the bit; what is missing may have any key."""
    found = {"labels": chunk.labels, "dense": chunk.dense, "split": chunk.split}
    for column, part in chunk.columns.items():
        keys = part.keys if part.missing is None else part.keys[~part.missing]
        found |= {column: keys, f"{column} missing": part.missing, f"{column} lengths": part.lengths}
    return {part: None if array is None else array.tolist() for part, array in found.items()} | chunk.skipped


@pytest.mark.parametrize("name", DATASETS)
def test_harmless_differences_make_none(tmp_path, name):
    write(name, tmp_path / "plain")
    (plain,) = map(content, read(name, tmp_path / "plain"))
    for number, (change, zipped) in enumerate((c, z) for c in damage.HARMLESS.values() for z in (False, True)):
        for file in write(name, tmp_path / str(number)):
            file.write_bytes(change(file.read_bytes()))
            if zipped:
                damage.zipped(file)
        (found,) = map(content, read(name, tmp_path / str(number)))
        assert str(found) == str(plain), "as text, in which NaN is like NaN"


@pytest.mark.parametrize("name", DATASETS)
def test_damage_is_named(tmp_path, name):
    files = [file.name for file in write(name, tmp_path / "good")]
    for file in files:
        for break_it in damage.FATAL:
            folder = tmp_path / f"{file} {break_it.__name__}"
            write(name, folder)
            message = break_it(folder / file)
            with pytest.raises(DataError, match=message):
                read(name, folder)


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"movietweetings"}))  # which leaves no line out
def test_chunks_can_begin_anywhere(tmp_path, name, monkeypatch):
    """Of files in which a line each is left out."""
    monkeypatch.setattr(table, "_PIECE_BYTES", 300)
    monkeypatch.setattr(json_lines, "_PIECE_BYTES", 100)
    monkeypatch.setattr(readers, "_CHUNK_ROWS", 2)
    files = write(name, tmp_path / "raw")
    for file in files:
        damage.blank_line(file)
    whole = read(name, tmp_path / "raw", on_error="skip")
    assert len(whole) > 1 or name == "criteo"  # whose pieces are those of tests/data/test_criteo.py
    assert sum(sum(chunk.skipped.values()) for chunk in whole) == len(files)
    assert [chunk.done for chunk in whole] == sorted(chunk.done for chunk in whole) and whole[-1].done == 1
    for start in range(len(whole) + 1):
        rest = read(name, tmp_path / "raw", start, on_error="skip")
        assert str([content(chunk) for chunk in rest]) == str([content(chunk) for chunk in whole[start:]])
