"""The TFDS writer of blocks as records, and their reader. Import it only when needed: TFDS loads slowly.

A record is one block: the arrays of a `Batch`, each stored as raw bytes, so decoding costs per block and not per row.
TFDS writes ArrayRecord files, which can be read at random, and never imports TensorFlow for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.storage.manifest import BLOCKS, BLOCKS_PER_FILE

VERSION = "1.0.0"  # of the record layout
NAME = BLOCKS
FOLDER = f"{NAME}/{VERSION}"  # of the files, below the folder of the prepared data; TFDS's own layout
# A block is read alone. Compression (zstd:1) would take half the room of Criteo's blocks, and twice the time to read.
_WRITER_OPTIONS = "group_size:1,uncompressed"


def write(
    schema: Schema, splits: Mapping[str, Iterable[Batch]], folder: Path, finished: Callable[[Path], object]
) -> None:
    """Writes the blocks below `folder`, each as soon as it is there; `tfds.builder_from_directory` reads the result.

    (A TFDS builder class would hold a whole split until its last example is there, in order to sort them.)

    Args:
      schema: the columns of every block.
      splits: the blocks of every split, read once; no split is empty.
      folder: an existing folder.
      finished: called with every file of blocks as soon as it is complete.

    Raises:
      OSError: the file system refuses. An error raised by the blocks themselves is raised as it is.
    """
    data_dir = folder / FOLDER
    data_dir.mkdir(parents=True)
    try:
        written = {split: _write_split(schema, data_dir, split, blocks, finished) for split, blocks in splits.items()}
        write_info(schema, folder, written)
    except RuntimeError as error:  # so the ArrayRecord writer says that the disk is full
        raise OSError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Written:
    """Files and bytes that were written of a split.

    Attributes:
      blocks: in each of its files.
      bytes: of all records.
    """

    blocks: list[int]
    bytes: int


def write_info(schema: Schema, folder: Path, splits: Mapping[str, Written]) -> None:
    """Writes the description by which TFDS finds the blocks below `folder`, which need not be there yet."""
    data_dir = folder / FOLDER
    data_dir.mkdir(parents=True, exist_ok=True)
    identity = tfds.core.DatasetIdentity(
        name=NAME, version=tfds.core.Version(VERSION), data_dir=str(data_dir), module_name=__name__
    )
    info = tfds.core.DatasetInfo(builder=identity, features=_record_layout(schema), disable_shuffling=True)
    info.set_file_format("array_record")
    infos = [
        tfds.core.SplitInfo(
            name=split, shard_lengths=of.blocks, num_bytes=of.bytes, filename_template=_template(data_dir, split)
        )
        for split, of in splits.items()
    ]
    info.set_splits(tfds.core.SplitDict(infos))
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces itself where `--json` promises silence
        info.write_to_directory(str(data_dir))


def _template(data_dir: Path, split: str) -> Any:
    return tfds.core.ShardedFileTemplate(
        data_dir=data_dir,
        dataset_name=NAME,
        split=split,
        filetype_suffix="array_record",
        template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",  # how many files there will be is not known yet
    )


def file_name(split: str, index: int) -> str:
    """The name below the folder of the prepared data of file number `index` of a split."""
    return f"{FOLDER}/{Path(_template(Path(), split).sharded_filepath(shard_index=index, num_shards=None)).name}"


def _write_split(
    schema: Schema, data_dir: Path, split: str, blocks: Iterable[Batch], finished: Callable[[Path], object]
) -> Written:
    """Writes the files of one split."""
    counts: list[int] = []
    size = 0
    stream = iter(blocks)
    for first in stream:
        file = data_dir / Path(file_name(split, len(counts))).name
        count, written = write_file(
            schema, itertools.chain([first], itertools.islice(stream, BLOCKS_PER_FILE - 1)), file
        )
        counts.append(count)
        size += written
        finished(file)
    return Written(counts, size)


def write_file(schema: Schema, blocks: Iterable[Batch], file: Path) -> tuple[int, int]:
    """Writes one file of blocks; returns their number, and the bytes of their records."""
    writer = ArrayRecordWriter(str(file), _WRITER_OPTIONS)
    count = size = 0
    for block in blocks:
        record = _serialized(block)
        writer.write(record)
        count += 1
        size += len(record)
    writer.close()
    return count, size


class Reader:
    """Random access to the blocks of one split, safe to use from several threads."""

    def __init__(self, schema: Schema, folder: Path, split: str) -> None:
        """Opens what `write` wrote below `folder`."""
        self._schema = schema
        builder: Any = tfds.builder_from_directory(str(folder / FOLDER))
        self._records = builder.as_data_source(split=split)

    def read(self, index: int) -> Batch:
        """Block `index`; raises whatever TFDS, the file format or the disk raise."""
        return _from_record(self._records[index], self._schema)


def read_file(schema: Schema, file: Path) -> Iterator[Batch]:
    """The blocks of one file, in their order; raises whatever TFDS, the file format or the disk raise."""
    features = _record_layout(schema)
    reader = ArrayRecordReader(str(file))
    for index in range(reader.num_records()):
        yield _from_record(features.deserialize_example_np(reader.read([index])[0]), schema)
    reader.close()


def _from_record(record: Mapping[str, Any], schema: Schema) -> Batch:
    bags = {}
    for feature in schema.features:
        columns = record["bags"][feature.name]
        bags[feature.name] = Bags(columns["ids"], columns.get("lengths"), columns.get("weights"))
    labels, lengths = record["labels"], None
    if schema.label_group:
        lengths = bags[schema.labelled_features[0]].lengths
    dense = record.get("dense", np.zeros((len(labels if lengths is None else lengths), 0), np.float32))
    return Batch(dense, bags, labels, record["weights"], label_lengths=lengths)


def as_stored(block: Batch, schema: Schema) -> Batch:
    """The same block in the types of the record: float32, int32 lengths, ids int32 where the rows allow it."""
    bags = {}
    for feature in schema.features:
        columns = block.bags[feature.name]
        ids = columns.ids.astype(_ids_dtype(feature), copy=False)  # of ANY_ID unsigned ones by their bits
        if columns.lengths is None and columns.weights is None:
            bags[feature.name] = columns if ids is columns.ids else Bags(ids)
            continue
        bags[feature.name] = Bags(
            ids,
            None if columns.lengths is None else columns.lengths.astype(np.int32, copy=False),
            None if columns.weights is None else columns.weights.astype(np.float32, copy=False),
        )
    floats = (array.astype(np.float32, copy=False) for array in (block.dense, block.labels, block.weights))
    dense, labels, weights = floats
    lengths = bags[schema.labelled_features[0]].lengths if schema.label_group else None
    return Batch(dense, bags, labels, weights, block.position, lengths)


def arrays(block: Batch) -> Iterator[np.ndarray]:
    """The arrays of a block, in a fixed order: what a checksum of its content covers."""
    yield from (block.dense, block.labels, block.weights)
    for columns in block.bags.values():
        yield from (array for array in (columns.ids, columns.lengths, columns.weights) if array is not None)


def _ids_dtype(feature: Feature) -> np.dtype:
    return np.dtype(np.int32 if feature.rows < 2**31 else np.int64)


def _record_layout(schema: Schema) -> tfds.features.FeaturesDict:
    def array(dtype: Any, *shape: int) -> tfds.features.Tensor:
        encoding = tfds.features.Encoding.BYTES
        return tfds.features.Tensor(shape=(None, *shape), dtype=np.dtype(dtype), encoding=encoding)

    bags: dict[str, dict[str, tfds.features.Tensor]] = {}
    for feature in schema.features:
        shape = () if feature.bag is None else (feature.bag,)
        bags[feature.name] = {"ids": array(_ids_dtype(feature), *shape)}
        if feature.bag is None:
            bags[feature.name]["lengths"] = array(np.int32)
        if feature.weighted:
            bags[feature.name]["weights"] = array(np.float32, *shape)
    each = (len(schema.labels),) if schema.labels else ()
    columns: dict[str, Any] = {"labels": array(np.float32, *each), "weights": array(np.float32, *each), "bags": bags}
    if schema.dense:  # TFDS cannot read an array of no columns
        columns["dense"] = array(np.float32, len(schema.dense))
    return tfds.features.FeaturesDict(columns)


def _serialized(block: Batch) -> bytes:
    """The record of a block: byte for byte what TFDS makes of it by `_record_layout`, with one copy of the arrays.

    It is a `tf.train.Example`: nested messages, each after a tag and its length (protobuf.dev, "Encoding").
    """
    arrays = {"labels": block.labels, "weights": block.weights}
    for name, bags in block.bags.items():
        arrays[f"bags/{name}/ids"] = bags.ids
        if bags.lengths is not None:
            arrays[f"bags/{name}/lengths"] = bags.lengths
        if bags.weights is not None:
            arrays[f"bags/{name}/weights"] = bags.weights
    if block.dense.shape[1] > 0:
        arrays["dense"] = block.dense
    parts: list[bytes | memoryview] = []
    for head, name in _frame(tuple((name, array.nbytes) for name, array in arrays.items())):
        parts += [head, np.ascontiguousarray(arrays[name]).data]
    return b"".join(parts)


@functools.lru_cache(64)  # most blocks are alike
def _frame(sizes: tuple[tuple[str, int], ...]) -> list[tuple[bytes, str]]:
    """The order of arrays in a record, and the bytes before each, by their names and sizes in bytes."""
    size_of = dict(sizes)
    heads, length = [], 0
    for name in _order(tuple(size_of)):
        size = size_of[name]
        value = _tag(1, size)  # of BytesList; then of Feature, and of the entry of the map
        value = _tag(1, len(value) + size) + value
        entry = _tag(1, len(name.encode())) + name.encode() + _tag(2, len(value) + size) + value
        heads.append((_tag(1, len(entry) + size) + entry, name))
        length += len(heads[-1][0]) + size
    return [(_tag(1, length) + heads[0][0], heads[0][1]), *heads[1:]]


def _tag(field: int, length: int) -> bytes:
    """The tag of a field that is a message, text or bytes, and its length."""
    found = bytearray([field << 3 | 2])
    while length > 127:
        found.append(length & 127 | 128)
        length >>= 7
    found.append(length)
    return bytes(found)


@functools.lru_cache
def _order(names: tuple[str, ...]) -> list[str]:
    """The order in which this process's protobuf writes the entries of a map of these names, which it may choose."""
    marks = {name: b"\xff\xfe%06d" % i for i, name in enumerate(names)}  # no text
    values = {name: tf_feature_pb2.Feature(bytes_list=tf_feature_pb2.BytesList(value=[marks[name]])) for name in names}
    text = tf_example_pb2.Example(features=tf_feature_pb2.Features(feature=values)).SerializeToString()
    return sorted(names, key=lambda name: text.index(marks[name]))
