"""Rows of prepared data in files that are mapped: a batch of any of them is one copy, see `RowLayout`.

    packed/train-00000.rows      of the blocks of one file, int32 [rows, W]
    packed/train-00000.values    their bags that differ in size, end to end; only where there are such
    packed/train-00000.json      what these are made of, and checksums of every CHUNK rows

They are made of the blocks when a training first asks for them, file by file: beside the blocks, or in the cache folder
where these lie elsewhere or may not be written to. Where there is no room for them the blocks are read instead. A file
is either whole or not there, whoever else makes it at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import Batch, RowLayout
from recjax.data.source import concatenate
from recjax.errors import DataError
from recjax.utils import log, strict_json
from recjax.utils.files import replacing
from recjax.utils.locks import locked

PACKED = "packed"  # the folder
CHUNK = 4096  # rows of a checksum
_WORTH_SAYING = 10**8  # bytes
VERSION = 1  # of the files; raise it when a row looks different
_LEAST_BYTES, _SUM_BYTES = 4096, 16  # of a description, which is no longer than that and a number for every chunk


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """The rows of one file of blocks.

    Attributes:
      path: of the rows; its neighbours have other endings.
      layout: of a row.
      count: rows.
      origin: checksum of the file of blocks.
    """

    path: Path
    layout: RowLayout
    count: int
    origin: str

    def is_there(self) -> bool:
        """Returns whether it is complete, of these blocks and of this version; damage inside is found on reading."""
        about = self._read()
        if about is None:
            return False
        sizes = [(self.path, self.count * self.layout.words)]
        sizes += [(self.path.with_suffix(".values"), about["values"])] if self.layout.jagged else []
        return all(file.is_file() and file.stat().st_size == 4 * words for file, words in sizes)

    @functools.cached_property
    def rows_RxW(self) -> np.ndarray:
        """All rows: int32, mapped."""
        return np.memmap(self.path, np.int32, "r", shape=(self.count, self.layout.words)).view(np.ndarray)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The bags of all rows that differ in size: int32, mapped."""
        file = self.path.with_suffix(".values")
        if not self.layout.jagged or not file.stat().st_size:
            return np.zeros(0, np.int32)
        return np.memmap(file, np.int32, "r").view(np.ndarray)

    def write(self, blocks: Iterable[Batch]) -> None:
        """Writes it, of its blocks; keeps nothing of it where that fails.

        Raises:
          OSError: the disk is full or refuses.
        """
        end, nowhere = 0, contextlib.nullcontext(Path(os.devnull))
        values_path = replacing(self.path.with_suffix(".values")) if self.layout.jagged else nowhere
        with contextlib.ExitStack() as stack:
            rows_file = stack.enter_context(stack.enter_context(replacing(self.path)).open("wb"))
            values_file = stack.enter_context(stack.enter_context(values_path).open("wb"))
            for block in blocks:
                rows_BxW, values = self.layout.pack(block, end)
                rows_file.write(rows_BxW.data)
                values_file.write(values.data)
                end += len(values)
        sums = [self.checksum(chunk) for chunk in range(self.chunks)]
        with replacing(self.path.with_suffix(".json")) as unfinished:
            unfinished.write_text(json.dumps(self._described | {"values": end, "checksums": sums}), "utf-8")

    @property
    def chunks(self) -> int:
        """Pieces of CHUNK rows, the last with what is left."""
        return -(-self.count // CHUNK)

    def checksum(self, chunk: int) -> int:
        """Returns that of CHUNK rows, with their bags."""
        rows_BxW = self.rows_RxW[chunk * CHUNK : (chunk + 1) * CHUNK]
        total = zlib.crc32(np.ascontiguousarray(rows_BxW).data)
        if not self.layout.jagged:
            return total
        bags = self.values[self._start(chunk * CHUNK) : self._start((chunk + 1) * CHUNK)]
        return zlib.crc32(np.ascontiguousarray(bags).data, total)

    def _start(self, row: int) -> int:
        """Number of the first word of a row's bags; after the last row, how many there are."""
        if row >= self.count:
            return len(self.values)
        return int(np.ascontiguousarray(self.rows_RxW[row, self.layout.spans["start", ""]]).view(np.int64)[0])

    def require_intact(self, rows_B: np.ndarray) -> None:
        """Refuses rows whose checksum is not theirs (DataError); looks at each chunk once."""
        if self._intact.all():
            return
        chunks_B = rows_B // CHUNK
        if self._intact[chunks_B].all():
            return
        for chunk in np.unique(chunks_B[~self._intact[chunks_B]]).tolist():
            if self.checksum(chunk) != self._about["checksums"][chunk]:
                last = min(self.count, (chunk + 1) * CHUNK) - 1
                raise DataError(
                    f"packed rows are damaged: {self.path}, rows {chunk * CHUNK} to {last}, have not the checksum that "
                    f"they were written with. Delete the folder {self.path.parent}: recjax makes it again from the "
                    "prepared blocks."
                )
            self._intact[chunk] = True

    @functools.cached_property
    def _intact(self) -> np.ndarray:
        return np.zeros(self.chunks, bool)

    @functools.cached_property
    def _about(self) -> dict[str, Any]:
        about = self._read()
        assert about is not None  # see is_there
        return about

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        return {"version": VERSION, "origin": self.origin, "rows": self.count, "words": self.layout.words}

    def _read(self) -> dict[str, Any] | None:
        """Returns what was written beside the rows; None if that is not there, damaged or of other rows."""
        file = self.path.with_suffix(".json")
        try:
            if not file.is_file() or file.stat().st_size > _LEAST_BYTES + _SUM_BYTES * self.chunks:
                return None
            about = strict_json.parse(file.read_bytes())
        except (OSError, strict_json.JsonError):
            return None
        if not isinstance(about, dict) or {name: about.get(name) for name in self._described} != self._described:
            return None
        sums, values = about.get("checksums"), about.get("values")
        whole = isinstance(sums, list) and len(sums) == self.chunks and all(type(x) is int for x in sums)
        return about if whole and type(values) is int and values >= 0 else None


class PackedSplit:
    """All rows of a split (`Rows`)."""

    def __init__(self, files: Sequence[PackedFile]) -> None:
        """Rows of files that are there, in their order."""
        self._files, self.layout = tuple(files), files[0].layout
        self._ends = np.cumsum([file.count for file in files])

    @property
    def bytes(self) -> int:
        """Size of all rows, without bags that differ in size."""
        return int(self._ends[-1]) * self.layout.words * 4

    def take(self, numbers_B: np.ndarray, out_BxW: np.ndarray) -> None:
        """See `Rows`.

        Raises:
          DataError: a file is damaged.
        """
        for file, rows_B, part in self._runs(numbers_B):
            file.require_intact(rows_B)
            np.take(file.rows_RxW, rows_B, axis=0, out=out_BxW[part], mode="clip")  # "raise" would buffer `out`

    def columns(self, numbers_B: np.ndarray, rows_BxW: np.ndarray) -> Batch:
        """See `Rows`."""
        if not self.layout.jagged or not len(numbers_B):
            return self.layout.columns(rows_BxW, np.zeros(0, np.int32))
        return concatenate(
            [self.layout.columns(rows_BxW[part], file.values) for file, _, part in self._runs(numbers_B)]
        )

    def _runs(self, numbers_B: np.ndarray) -> Iterator[tuple[PackedFile, np.ndarray, slice]]:
        """Runs of rows of one file: the file, their numbers in it, and their place among all."""
        if len(self._files) == 1:
            yield self._files[0], numbers_B, slice(0, len(numbers_B))
            return
        file_B = np.searchsorted(self._ends, numbers_B, side="right")
        edges = [0, *(np.flatnonzero(np.diff(file_B)) + 1).tolist(), len(numbers_B)]
        for start, stop in itertools.pairwise(edges):
            if start < stop:
                file = self._files[file_B[start]]
                yield file, numbers_B[start:stop] - (self._ends[file_B[start]] - file.count), slice(start, stop)


def write_files(files: Sequence[PackedFile], blocks: Callable[[int], Iterable[Batch]], name: str) -> None:
    """Makes the files of a split that are not there, all in one folder, unless there is no room for all of them.

    Args:
      files: of the split.
      blocks: gives those of a file, by its number.
      name: of the data, to say that this takes a while.

    Raises:
      OSError: the disk is full or refuses.
    """
    folder = files[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(4 * file.count * file.layout.words for file in files if not file.is_there())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    if needed >= _WORTH_SAYING:
        log.info(f"packing rows of {name} for reading, once: {needed / 1e9:.1f} GB in {folder}")
    for number, file in enumerate(files):
        with locked(file.path.with_name(f".{file.path.name}.lock")):
            if not file.is_there():
                file.write(blocks(number))
