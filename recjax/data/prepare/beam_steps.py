"""One machine's share of a preparation on Apache Beam. Nothing here knows Beam; see beam.py for the whole.

All that machines share is the work folder. What is done twice (Beam repeats work that failed, or is slow) writes the
same bytes to the same name again.

    WORK/scan/00003.json          a raw file: its checksum, and where its pieces begin
    WORK/parts/part-000012.part   a chunk, dictionary coded
    WORK/vocabulary/7/            the vocabulary of feature number 7
    WORK/blocks/train-00000.json  a finished file of blocks: its size and checksum
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import Batch, Schema
from recjax.data.batch_checks import validate
from recjax.data.datasets.criteo import CriteoReader
from recjax.data.prepare import ids as id_maps
from recjax.data.prepare.chunk import Chunk, Reader, check_chunk
from recjax.data.prepare.coding import code_chunk
from recjax.data.prepare.counting import Counter, Run
from recjax.data.prepare.dense_columns import DenseEncoder
from recjax.data.prepare.encoder import Encoder
from recjax.data.prepare.ids import Frequency, IdMap, IdOptions, first_row, stable_hash
from recjax.data.prepare.part_file import SUFFIX, opened, save, train_counts
from recjax.data.prepare.part_file import rows as part_rows
from recjax.data.prepare.prepare import counted, least_count
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.data.source import BLOCK_ROWS, SPLITS, between, concatenate
from recjax.data.storage import builder
from recjax.data.storage.manifest import BLOCKS_PER_FILE, described_split
from recjax.data.text.chunks import TextFile
from recjax.data.text.source_files import sha256
from recjax.errors import DataError
from recjax.utils import strict_json
from recjax.utils.files import replacing
from recjax.utils.paths import is_remote, place

SHARDS = 16  # of the values of a feature, counted apart
_COPY_BYTES = 1 << 22


OpenRaw = Callable[[Any, str | None], Reader]  # a function of a module, which all machines import


@dataclasses.dataclass(frozen=True)
class Job:
    """Facts about a preparation that all machines know.

    Attributes:
      config: of the dataset.
      source: where the raw files are.
      open_raw: gives a reader of them, for config and source.
      work: the work folder.
      target: the folder that gets the files of blocks.
    """

    config: Any
    source: str | None
    open_raw: OpenRaw
    work: str
    target: str

    @property
    def reader(self) -> Reader:
        """The reader of the raw files; one for each process."""
        return _reader(self)


@functools.lru_cache(maxsize=2)
def _reader(job: Job) -> Reader:
    reader = fresh_reader(job)
    folder = place(job.work) / "scan"
    if isinstance(reader, CriteoReader) and (folder / "00000.json").exists():
        described = [read_json(folder / f"{i:05}.json")["pieces"] for i in range(len(reader.paths))]
        reader.scanned(
            [
                TextFile(path, each["size"], each["lines"], tuple(each["first_lines"]))
                for path, each in zip(reader.paths, described, strict=True)
            ]
        )
    return reader


def forget() -> None:
    """Forgets what an earlier preparation in this process has read."""
    for cached in (_reader, vocabulary_folder, _encoder):
        cached.cache_clear()


def read_json(file: Path) -> Any:
    """A file of the work folder."""
    return strict_json.parse(file.read_bytes())


def write_json(file: Path, value: Any) -> None:
    """Writes a file of the work folder, whole or not at all."""
    put(json.dumps(value).encode(), file)


def put(data: bytes, file: Path) -> None:
    """Writes a file, whole or not at all: object storage shows only complete objects, a folder gets a renamed file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(file):
        file.write_bytes(data)
        return
    with replacing(file) as unfinished:
        unfinished.write_bytes(data)


def scan_file(job: Job, index: int) -> None:
    """The first look at raw file number `index`; of readers that know no single files, at all of them."""
    reader = fresh_reader(job)
    file = place(job.work) / "scan" / f"{index:05}.json"
    if not isinstance(reader, CriteoReader):
        write_json(file, {"files": dict(reader.files())})
        return
    path = reader.paths[index]
    found = reader.scan(path)
    pieces = {"size": found.size, "lines": found.lines, "first_lines": found.first_lines}
    write_json(file, {"files": {path.name: sha256(path)}, "pieces": pieces})


def fresh_reader(job: Job) -> Reader:
    """A reader of the raw files that knows nothing of an earlier look at them."""
    return job.open_raw(job.config, job.source)


def read_task(job: Job, task: tuple[int, int, int] | None) -> Iterator[tuple[int, Any]]:
    """Reads, codes and stores the chunks of a task (None: all chunks).

    Yields:
      (-1, what the preparation must know of a part) and (feature * SHARDS + shard, values and counts).
    """
    reader = job.reader
    chunks: Iterable[tuple[int, Chunk]]
    if task is None:
        chunks = enumerate(reader.chunks(0))
    else:
        assert isinstance(reader, CriteoReader)
        chunks = reader.chunks_of(task)
    ids = getattr(job.config, "ids", Frequency())
    for number, chunk in chunks:
        check_chunk(chunk, reader)
        coded = code_chunk(chunk)
        stream = io.BytesIO()
        dense = save(stream, coded)
        put(stream.getvalue(), part_file(job, number))
        yield (
            -1,
            {
                "number": number,
                "rows": np.bincount(chunk.split, minlength=len(SPLITS)).tolist(),
                "skipped": dict(chunk.skipped),
                "dense": dense.to_json(),
            },
        )
        if not isinstance(ids, Frequency):
            continue
        with opened(stream.getvalue()) as arrays:
            for i in range(len(reader.features)):
                values, counts = counted(train_counts(arrays, i), ids)
                values, counts = values[counts > 0], counts[counts > 0]  # as `Counter` has it
                shards = (stable_hash(values) % np.uint64(SHARDS)).astype(np.int64)
                for shard in np.unique(shards).tolist():
                    yield i * SHARDS + shard, (values[shards == shard], counts[shards == shard])


def part_file(job: Job, number: int) -> Path:
    """The file of a chunk."""
    return place(job.work) / "parts" / f"part-{number:06}{SUFFIX}"


def count_shard(job: Job, key: int, runs: Iterable[Run]) -> tuple[int, Run]:
    """(feature, the values of a shard that occur often enough and their counts)."""
    feature = key // SHARDS
    least = least_count(getattr(job.config, "ids", Frequency()), job.reader.features[feature])
    with tempfile.TemporaryDirectory() as folder:
        counter = Counter(Path(folder))
        for values, counts in runs:
            counter.add(values, counts)
        return feature, counter.total(least)


def make_vocabulary(job: Job, feature: int, shards: Iterable[Run | None]) -> int:
    """Stores the vocabulary of a feature; a shard of None stands for a feature that the raw rows may not have."""
    runs = [shard for shard in shards if shard is not None]
    values, counts = (np.concatenate([run[k] for run in runs]) if runs else np.zeros(0, np.int64) for k in (0, 1))
    order = np.argsort(values, kind="stable")
    vocabulary = Vocabulary.counted(values[order], counts[order], 1, first_row(job.reader.features[feature]))
    with tempfile.TemporaryDirectory() as folder:
        vocabulary.save(Path(folder))
        for file in Path(folder).iterdir():
            put(file.read_bytes(), place(job.work) / "vocabulary" / str(feature) / file.name)
    return feature


@functools.lru_cache(maxsize=2)
def vocabulary_folder(job: Job) -> Path:
    """The vocabularies, copied once to this machine's disk for each process."""
    remote = place(job.work) / "vocabulary"
    if not is_remote(remote):
        return remote
    local = Path(tempfile.mkdtemp(prefix="recjax-vocabulary-"))
    for feature in range(len(job.reader.features)):
        for name in ("values.npy", "rows.npy"):
            file = remote / str(feature) / name
            if file.exists():
                put(file.read_bytes(), local / str(feature) / name)
    return local


def maps_of_job(job: Job) -> list[IdMap]:
    """The map of every feature."""
    ids: IdOptions = getattr(job.config, "ids", Frequency())
    return id_maps.load_maps(vocabulary_folder(job), ids, job.reader.features)


@functools.lru_cache(maxsize=2)
def _encoder(job: Job, by: str) -> Encoder:
    reader, dense = job.reader, DenseEncoder.from_json(read_json(place(job.work) / by))
    return Encoder(reader.name, reader.features, reader.dense, maps_of_job(job), dense)


@dataclasses.dataclass(frozen=True)
class BlockFile:
    """A file of blocks to write.

    Attributes:
      split: of its rows.
      index: number of the file in the split.
      first: number of its first row among those of the split.
      rows: how many it holds.
      parts: chunks that hold them, and the number of each chunk's first row in the split.
    """

    split: str
    index: int
    first: int
    rows: int
    parts: tuple[tuple[int, int], ...]


def block_files(parts: list[dict[str, Any]], split: str) -> list[BlockFile]:
    """The files of a split, given what is known of all parts in their order."""
    rows = np.array([part["rows"][SPLITS.index(split)] for part in parts], np.int64)
    starts = np.concatenate([[0], np.cumsum(rows)])
    step, total = BLOCKS_PER_FILE * BLOCK_ROWS, int(rows.sum())
    made = []
    for index, first in enumerate(range(0, total, step)):
        last = min(first + step, total)
        inside = np.flatnonzero((starts[1:] > first) & (starts[:-1] < last) & (rows > 0))
        chosen = tuple((parts[i]["number"], int(starts[i])) for i in inside)
        made.append(BlockFile(split, index, first, last - first, chosen))
    return made


def write_blocks(job: Job, by: str, file: BlockFile) -> None:
    """Writes one file of blocks, and beside the work what it is."""
    encoder = _encoder(job, by)
    with tempfile.TemporaryDirectory(prefix="recjax-blocks-") as folder:
        local = Path(folder) / "blocks"
        blocks, size = builder.write_file(encoder.schema, _blocks(job, encoder, file), local)
        name = builder.file_name(file.split, file.index)
        target = place(job.target) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext(target) if is_remote(target) else replacing(target) as copy:
            with local.open("rb") as source, copy.open("wb") as to:
                shutil.copyfileobj(source, to, _COPY_BYTES)
        described = {"name": name, "bytes": local.stat().st_size, "sha256": sha256(local)}
    described |= {"split": file.split, "index": file.index, "blocks": blocks, "record_bytes": size}
    write_json(place(job.work) / "blocks" / f"{file.split}-{file.index:05}.json", described)


def _blocks(job: Job, encoder: Encoder, file: BlockFile) -> Iterator[Batch]:
    split, last = SPLITS.index(file.split), file.first + file.rows
    names = [feature.name for feature in encoder.schema.features]
    rest: list[Batch] = []
    held = 0
    for number, start in file.parts:
        with opened(part_file(job, number).read_bytes()) as arrays:
            rows = encoder.encode_coded(part_rows(arrays, split, names))
        rest.append(between(rows, max(0, file.first - start), min(rows.size, last - start)))
        held += rest[-1].size
        if held >= BLOCK_ROWS:
            joined = concatenate(rest)
            whole = held - held % BLOCK_ROWS
            for at in range(0, whole, BLOCK_ROWS):
                yield _stored(between(joined, at, at + BLOCK_ROWS), encoder.schema)
            rest, held = [between(joined, whole, held)], held - whole
    if held:
        yield _stored(concatenate(rest), encoder.schema)


def _stored(block: Batch, schema: Schema) -> Batch:
    validate(block, schema)
    return builder.as_stored(block, schema)


def hash_split(job: Job, schema: Schema, split: str, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Reads all blocks of a split back, in their order; the manifest's entry of it.

    Raises:
      DataError: a file is not what was written.
    """
    digest = hashlib.sha256()
    rows: list[int] = []
    for described in files:
        with tempfile.TemporaryDirectory(prefix="recjax-blocks-") as folder:
            local = Path(folder) / "blocks"
            source = place(job.target) / described["name"]
            with source.open("rb") as stream, local.open("wb") as to:
                shutil.copyfileobj(stream, to, _COPY_BYTES)
            if sha256(local) != described["sha256"]:
                raise DataError(f"{source} is not what was written to it. Prepare the data again.")
            for block in builder.read_file(schema, local):
                rows.append(block.size)
                for array in builder.arrays(block):
                    digest.update(np.ascontiguousarray(array).data)
    return described_split(rows, digest.hexdigest())
