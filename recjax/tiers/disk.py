"""Records on a disk behind a cache of them in host memory, for rows that are in no device's cache.

The file has no name from the moment it is open: it goes when the process does, however that ends, and is never read by
another. Reads and writes go around the page cache where the file system lets them, many at a time, since a disk does
more of them so than one after the other, and in units of 512 bytes, or of 4 KiB where it takes no less.
Records are written when they leave the memory, many at a time and sorted by place. One of a unit or more is written by
itself; of smaller ones, a unit in which only some are new is read first. Every record has a checksum, which is checked
on each read.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import mmap
import os
import secrets
import threading
import time
from pathlib import Path

import numpy as np

from recjax.errors import ConfigError, TrainingError
from recjax.tiers.clock import Clock
from recjax.tiers.records import UNITS, Cells, CorruptRecordError, Head, RecordFile, aligned, checksums, record_bytes
from recjax.tiers.transfers import Transfers
from recjax.utils.files import disk_error

_BLOCK = 4096
WRITE_BYTES = 64 * _BLOCK  # at most, that one write takes in
_PART_BYTES = 2**23  # of records that are made ready at a time
# Of a file by which a disk is measured:
_TRIED_RECORD = 4096 - 8  # bytes, with the checksum a block
_TRIED_BLOCKS = 16_384  # of the file
_TRIED_AT_ONCE = 1024  # records asked for at once, to keep all threads at the disk


def memory_records(record: int, memory_bytes: int) -> int:
    """Records of so many bytes that a memory holds, with what finds them there."""
    return max(64, memory_bytes // (record + 9))


class OnDisk:
    """Records as `recjax.tiers.store.Places` has them. One thread writes, any may read.

    Attributes:
      unit: bytes of which all that is read and written is a multiple.
      read_records: from the disk, so far.
      read_aside: of these for no training step.
      written_records: to the disk, so far.
      stored_records: different ones, of these.
    """

    def __init__(self, folder: Path, name: str, record: int, memory_bytes: int) -> None:
        """Makes the file.

        Args:
          folder: an existing one on the disk.
          name: of what it holds, for messages.
          record: bytes of a record, a multiple of 4.
          memory_bytes: for records that are not on the disk, or not only.

        Raises:
          ConfigError: no file can be made there.
        """
        head = Head(0, record, secrets.token_hex(4), name)
        self._path, self._bytes = folder / f"recjax-{name}-{head.owner}.rows", record
        self._padded, self._transfers = record_bytes(record), Transfers()
        try:
            with self._path.open("xb") as opened:
                opened.write(head.block())
            self._file = RecordFile(self._path, head, self._transfers, UNITS[0])
            flags = os.O_WRONLY | (getattr(os, "O_DIRECT", 0) if self._file.direct else 0)
            self._descriptor = os.open(self._path, flags)
            self.unit = self._file.unit = _unit(self._descriptor, self._file.unit)
            self._path.unlink()
        except OSError as error:
            raise ConfigError(
                f"tier.disk: a file for rows cannot be made in {folder}: {error.strerror or error}. Choose another "
                "folder, on a disk with room for all rows that are touched."
            ) from error
        self._cells = Cells.of(self._padded, self.unit)
        self._cells_there = 0  # in the file, after its first block
        size = memory_records(record, memory_bytes)
        self._slab = np.empty((size, record), np.uint8)
        self._clock = Clock(size)
        self._lock = threading.Lock()
        self._is_stored = np.zeros(1024, bool)  # of each place
        self.read_records = self.read_aside = self.written_records = self.stored_records = 0

    def read(self, places_K: np.ndarray, aside: bool = False) -> np.ndarray:
        """See `Places.read`; TrainingError where the disk gives something else than was written, or nothing."""
        records = np.empty((len(places_K), self._bytes), np.uint8)
        with self._lock:
            slots_K = self._clock.slot_of[places_K]
            here_K = slots_K >= 0
            records[here_K] = self._slab[slots_K[here_K]]
        absent = np.flatnonzero(~here_K)
        if len(absent):
            self._from_disk(places_K[absent], records, absent)
            with self._lock:
                self.read_records += len(absent)
                self.read_aside += len(absent) if aside else 0
        return records

    def _from_disk(self, places_K: np.ndarray, into: np.ndarray, at_K: np.ndarray) -> None:
        try:
            for some, records in self._file.read_parts(places_K):
                into[at_K[some]] = records
        except CorruptRecordError as damage:
            raise TrainingError(
                f"{str(damage).partition('. Copy')[0]}. It is a scratch file of tier.disk, and holds something else "
                "than was written: check the disk, and start the same command again. A run resumes from its newest "
                "checkpoint, and needs none of the file."
            ) from damage
        except OSError as error:
            raise TrainingError(
                f"{self._path}, a scratch file of tier.disk, cannot be read: {error.strerror or error}. Check the "
                "disk, and start the same command again: a run resumes from its newest checkpoint."
            ) from error

    def write(self, places_K: np.ndarray, records: np.ndarray) -> None:
        """See `Places.write`; TrainingError where the disk does not take what must leave the memory for them."""
        most = self._clock.most
        for first in range(0, len(places_K), most):
            self._write(places_K[first : first + most], records[first : first + most])

    def _write(self, places_K: np.ndarray, records: np.ndarray) -> None:
        choice = self._clock.choose(places_K)
        self._to_disk(self._clock.place_of[choice.stale], choice.stale)
        with self._lock:
            self._clock.take(places_K, choice)
            self._slab[choice.slots_K] = records

    def _to_disk(self, places_K: np.ndarray, slots_K: np.ndarray) -> None:
        """Writes the records of some slots to their places in the file."""
        order_K, each = np.argsort(places_K), max(1, _PART_BYTES // self._padded)
        for first in range(0, len(order_K), each):
            some = order_K[first : first + each]
            self._write_part(places_K[some].astype(np.int64), self._slab[slots_K[some]])

    def _write_part(self, places_K: np.ndarray, records: np.ndarray) -> None:
        """Writes records, ascending by their places."""
        count, per = len(places_K), self._cells.per
        cells_C, at_K = np.unique(places_K // per, return_inverse=True)
        held = aligned(len(cells_C), self._cells.bytes)
        records_CxP = held.reshape(len(cells_C), per, self._padded)
        try:
            if per > 1:
                held[:] = 0
                known_C = (np.bincount(at_K) < per) & (cells_C < self._cells_there)
                held[known_C] = self._file.read_units(cells_C[known_C])
            inside_K = places_K % per
            records_CxP[at_K, inside_K, : self._bytes] = records
            records_CxP[at_K, inside_K, self._bytes : -8] = 0
            sums_K = checksums(records, places_K, self._file.seed).astype("<u8")
            records_CxP[at_K, inside_K, -8:] = sums_K[:, None].view(np.uint8)
            first = self._cells.firsts(cells_C, WRITE_BYTES)
            self._transfers.write(self._cells.pieces(first, self._descriptor, cells_C, held), self._file.direct)
        except OSError as error:
            failed = disk_error(self._path, error, held.nbytes)
            raise TrainingError(f"{failed} It is a scratch file of tier.disk.") from error
        self._cells_there = max(self._cells_there, int(cells_C[-1]) + 1)
        if (highest := int(places_K[-1])) >= len(self._is_stored):
            more = np.zeros(max(highest + 1, 2 * len(self._is_stored)) - len(self._is_stored), bool)
            self._is_stored = np.concatenate([self._is_stored, more])
        self.stored_records += count - int(np.count_nonzero(self._is_stored[places_K]))
        self._is_stored[places_K] = True
        self.written_records += count

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return _BLOCK + self._cells_there * self._cells.bytes

    def close(self) -> None:
        """Gives memory and the disk's room back."""
        self._file.close()
        self._transfers.close()
        os.close(self._descriptor)
        self._slab = self._slab[:0]


def unit_of(folder: Path) -> int:
    """Bytes of which all is a multiple that records in a folder, an existing one, are read and written in.

    Raises:
      ConfigError: no file can be made there.
    """
    places = OnDisk(folder, "unit", 4, 0)
    try:
        return places.unit
    finally:
        places.close()


def _unit(descriptor: int, readable: int) -> int:
    """Bytes of which all writes to a new file are multiples: as few as it can be read in, where it takes such writes.

    Tries the first block, from its end: nobody reads it once the file is open.

    Raises:
      OSError: it takes no write of a whole block either.
    """
    for unit in UNITS:
        if unit >= readable:
            try:
                with mmap.mmap(-1, _BLOCK) as blank, memoryview(blank)[:unit] as part:
                    part[:] = b" " * unit
                    os.pwrite(descriptor, part, _BLOCK - unit)
                return unit
            except OSError as error:
                if error.errno != errno.EINVAL or unit == UNITS[-1]:
                    raise
    raise AssertionError(readable)


@dataclasses.dataclass(frozen=True)
class DiskRates:
    """Rates of a disk.

    Attributes:
      reads: random records of 4 KiB a second.
      written: bytes a second, of records that lie in order.
      writes: random records of 4 KiB a second.
    """

    reads: float
    written: float
    writes: float


def disk_rates(folder: Path, seconds: float = 0.5) -> DiskRates:
    """Measures the disk of a folder with a file of 64 MiB, which is gone afterwards.

    Args:
      folder: an existing one.
      seconds: of reading, and of random writing.

    Raises:
      ConfigError, TrainingError: the file cannot be made, written or read.
    """
    places = OnDisk(folder, "speed", _TRIED_RECORD, _TRIED_AT_ONCE * _TRIED_RECORD)
    try:
        rng = np.random.default_rng(0)
        records = rng.integers(0, 256, (_TRIED_AT_ONCE // 4, _TRIED_RECORD), np.uint8)
        began = time.perf_counter()
        for first in range(0, _TRIED_BLOCKS, len(records)):
            places.write(np.arange(first, first + len(records), dtype=np.int32), records)
        written = places.written_records * (_TRIED_RECORD + 8) / (time.perf_counter() - began)
        done, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or not done:
            before = places.read_records
            places.read(rng.integers(0, _TRIED_BLOCKS - 2 * _TRIED_AT_ONCE, _TRIED_AT_ONCE).astype(np.int32))
            done += places.read_records - before
        reads = done / spent
        order = itertools.cycle(rng.permutation(_TRIED_BLOCKS // 4))

        def write() -> None:
            places.write(4 * np.fromiter(order, np.int32, len(records)) + rng.integers(0, 4, dtype=np.int32), records)

        for _ in range(_TRIED_AT_ONCE // len(records)):  # those that lie in order leave the memory
            write()
        before, began = places.written_records, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or places.written_records == before:
            write()
        return DiskRates(reads, written, (places.written_records - before) / spent)
    finally:
        places.close()
