"""The file of a part of a preparation: one chunk, dictionary coded, each split by itself.

    arrays   as they lie in memory, each from a multiple of 64 bytes on
    table    JSON: array -> [dtype, shape, first byte, checksum (Adler-32: eight times as fast as CRC-32)]
    end      16 bytes: length of the table, and its checksum

An .npz file would take three times as long to write, and to be opened for each feature.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import struct
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import CodedChunk, counts
from recjax.data.prepare.counting import Run
from recjax.data.prepare.dense_columns import DenseStats
from recjax.data.source import SPLITS

SUFFIX = ".part"
_TRAIN = SPLITS.index("train")
_ALIGNED = 64
_END = struct.Struct("<QQ")


class DamagedPartError(ValueError):
    """A file that is not what was written."""


def save(stream: BinaryIO, chunk: CodedChunk) -> DenseStats:
    """Writes a chunk, and for every column how often each value stands in the training rows.

    Returns:
      statistics of the dense columns of the training rows.
    """
    arrays: dict[str, np.ndarray] = {}
    stats = None
    for i, column in enumerate(chunk.columns.values()):
        arrays[f"{i}.values"] = column.values
    for split in range(len(SPLITS)):
        of_split = chunk.rows(split)
        if split == _TRAIN:
            stats = DenseStats.of(of_split.dense)
            all_ = np.ones(len(of_split.split), bool)
            for i, column in enumerate(of_split.columns.values()):
                found = counts(column, all_)
                arrays[f"{i}.counts"] = found.astype(np.min_scalar_type(found.max(initial=0)))
        if not len(of_split.split):
            continue
        arrays |= {f"labels.{split}": of_split.labels} | _narrow(of_split.dense, split)
        if of_split.weights is not None:
            arrays[f"weights.{split}"] = of_split.weights
        if of_split.label_lengths is not None:
            arrays[f"label_lengths.{split}"] = of_split.label_lengths
        for i, column in enumerate(of_split.columns.values()):
            arrays[f"{i}.codes.{split}"] = column.codes
            if column.lengths is not None:
                arrays[f"{i}.lengths.{split}"] = column.lengths
    _write(stream, arrays)
    assert stats is not None
    return stats


def _narrow(dense: np.ndarray, split: int) -> dict[str, np.ndarray]:
    """The dense columns of a split, in half the room where float32 holds their float64 values, as it does integers."""
    if dense.dtype == np.float64:
        with np.errstate(over="ignore"):
            narrow = dense.astype(np.float32)
        if ((narrow == dense) | np.isnan(dense)).all():
            return {f"narrow.{split}": narrow}
    return {f"dense.{split}": dense}


def _write(stream: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    table: dict[str, tuple[str, list[int], int, int]] = {}
    at = 0
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
        table[name] = (array.dtype.str, list(array.shape), at, zlib.adler32(content))
        stream.write(content)
        padding = -len(content) % _ALIGNED
        stream.write(bytes(padding))
        at += len(content) + padding
    text = json.dumps(table).encode()
    stream.write(text)
    stream.write(_END.pack(len(text), zlib.adler32(text)))


@contextlib.contextmanager
def opened(file: Path | bytes) -> Iterator[_Arrays]:
    """The arrays of a file, or of its content, by name; each is checked when it is asked for; not writable.

    Raises:
      DamagedPartError, OSError: now or on reading: it is damaged, or cannot be read.
    """
    content = np.frombuffer(file, np.uint8) if isinstance(file, bytes) else _mapped(file)
    yield _Arrays(content)


def _mapped(file: Path) -> np.ndarray:
    if file.stat().st_size < _END.size:
        raise DamagedPartError("it is cut short")
    return np.memmap(file, np.uint8, "r")


class _Arrays(Mapping[str, np.ndarray]):
    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        length, checksum = _END.unpack(content[-_END.size :].tobytes())
        text = content[max(0, len(content) - _END.size - length) : -_END.size].tobytes()
        if not text or zlib.adler32(text) != checksum:
            raise DamagedPartError("the checksum of its table differs")
        self._table = _table(text)

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, start, checksum = self._table[name]
        of = self._content[start : start + math.prod(shape) * np.dtype(dtype).itemsize]
        if zlib.adler32(of.data) != checksum:
            raise DamagedPartError(f"the checksum of {name} differs")
        return np.asarray(of).view(dtype).reshape(shape)

    def span(self, ending: str) -> tuple[int, int]:
        """The first byte of the arrays whose names end so, which lie side by side, and that after the last."""
        entries = [entry for name, entry in self._table.items() if name.endswith(ending)]
        ends = [start + math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape, start, _ in entries]
        return min((start for _, _, start, _ in entries), default=0), max(ends, default=0)

    def __contains__(self, name: object) -> bool:
        return name in self._table  # Mapping would read the array

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


@functools.lru_cache(256)  # a part is opened once for each feature
def _table(text: bytes) -> Mapping[str, Any]:
    return types.MappingProxyType(json.loads(text))


def forget(file: Path, split: int) -> None:
    """Lets the system take the memory in which it holds the rows of a split, which are not read again.

    New files then need no new pages, which cost several times as much to fill. What an array still shows stays.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError, DamagedPartError):  # only a hint
        with opened(file) as arrays:
            start, stop = arrays.span(f".{split}")
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


def rows(arrays: Mapping[str, np.ndarray], split: int, features: Sequence[str]) -> CodedChunk:
    """The rows of one split of a part, which has some.

    Args:
      arrays: what `save` wrote, `opened`.
      split: an index into SPLITS.
      features: names of the columns.
    """
    columns = {}
    for i, name in enumerate(features):
        lengths = arrays[f"{i}.lengths.{split}"] if f"{i}.lengths.{split}" in arrays else None
        columns[name] = Coded(arrays[f"{i}.values"], arrays[f"{i}.codes.{split}"], lengths)
    weights, label_lengths = (
        arrays[f"{name}.{split}"] if f"{name}.{split}" in arrays else None for name in ("weights", "label_lengths")
    )
    labels = np.array(arrays[f"labels.{split}"])  # copied, for all else goes with the chunk: see `forget`
    of_split = np.full(len(labels if label_lengths is None else label_lengths), split, np.uint8)
    narrow = f"narrow.{split}" in arrays
    dense = arrays[f"narrow.{split}"].astype(np.float64) if narrow else arrays[f"dense.{split}"]
    return CodedChunk(labels, dense, columns, of_split, weights, label_lengths)


def train_counts(arrays: Mapping[str, np.ndarray], feature: int) -> Run:
    """The distinct values of feature number `feature` in a part, and how often its training rows hold them."""
    return arrays[f"{feature}.values"], arrays[f"{feature}.counts"].astype(np.int64)
