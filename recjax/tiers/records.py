"""Tables on disk that are larger than memory, read row by row: records with a checksum each, and a cache of rows.

Needs NumPy alone, and is copied beside the loader of an export that has such tables.

    file     4 KiB: JSON that says how many records of how many bytes there are; then the records
    record   the row's bytes, zeros, and 8 bytes of checksum: 64 bytes, or a power of two times as many up to 4 KiB, or
             a multiple of 4 KiB, so that no record lies in more blocks of the disk than it must

A record is read with its number, which enters the checksum: one that is damaged, or stands in another's place, is named
and not given out. Reads go around the page cache (O_DIRECT) where the file system lets them, for the cache of rows is
ours: what it holds is chosen by rows, not by blocks of which one row is wanted.
"""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "recjax-records/1"
_BLOCK = 4096
_THREADS = 16  # that wait for the disk
_RUN_BYTES = 16 * _BLOCK  # at most, that one read takes in
_PART_BYTES = 2**23  # of records that are in memory at a time, beside the rows that are read
_LEAST = 8  # reads for which another thread is worth it
UNITS = (512, _BLOCK)  # bytes that a disk can be asked for


class CorruptRecordError(Exception):
    """A record that is not what was written: names the file and the record; one paragraph."""


def record_bytes(row_bytes: int) -> int:
    """Bytes of a record of a row."""
    needed = row_bytes + 8
    return max(64, 1 << (needed - 1).bit_length()) if needed <= _BLOCK else -(-needed // _BLOCK) * _BLOCK


def checksums(payload: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Checksums of records, uint64 [n]: sums of their 32-bit words and numbers, each times an odd number of its own.

    A change of any bits of one word, or of the number, always changes it; other changes do but for one in 2^64 or so
    (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014).

    Args:
      payload: uint8 [n, P], P a multiple of 4.
      numbers: of the records, [n].
    """
    words = np.ascontiguousarray(payload).view("<u4").astype(np.uint64)
    odd = _splitmix(np.arange(words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    return (words * odd[1:]).sum(axis=1, dtype=np.uint64) + (numbers.astype(np.uint64) + np.uint64(1)) * odd[0]


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Well mixed 64 bits for each number (Steele et al. 2014)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RecordWriter:
    """Writes the records of one file, in any order; `close` completes it."""

    def __init__(self, file: Path, rows: int, row_bytes: int) -> None:
        """Makes a file for so many rows of so many bytes; OSError if it cannot."""
        self._bytes, self._row_bytes = record_bytes(row_bytes), row_bytes
        about = {"format": FORMAT, "records": rows, "row_bytes": row_bytes, "record_bytes": self._bytes}
        size = _BLOCK + -(-rows * self._bytes // _BLOCK) * _BLOCK
        with file.open("xb") as opened:
            opened.write(json.dumps(about).encode().ljust(_BLOCK))
            opened.truncate(size)
        mapped = np.memmap(file, np.uint8, "r+", _BLOCK)
        self._records = mapped[: rows * self._bytes].reshape(rows, self._bytes)
        self._mapped = mapped

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows, uint8 [n, row_bytes], as the records of these numbers."""
        record = np.zeros((len(rows), self._bytes), np.uint8)
        record[:, : self._row_bytes] = rows
        record[:, -8:] = checksums(record[:, :-8], numbers).astype("<u8").view(np.uint8).reshape(-1, 8)
        self._records[numbers] = record

    def close(self) -> None:
        """Has all of it on the disk."""
        self._mapped.flush()


class RecordFile:
    """Reads records by their numbers, from several threads at once.

    Attributes:
      records: how many there are.
      row_bytes: of each row.
      direct: whether reads go around the page cache.
      unit: bytes that are read at least, and of which all reads are a multiple.
      units_read: so far.
    """

    def __init__(self, file: Path, unit: int = 512) -> None:
        """Opens a file.

        Args:
          file: what `RecordWriter` wrote.
          unit: 512 or 4096; 4096 is taken where the disk cannot be asked for less.

        Raises:
          CorruptRecordError: it is none.
          OSError: it cannot be read.
        """
        self._file = file
        with file.open("rb") as opened:
            head = opened.read(_BLOCK)
        try:
            about: dict[str, Any] = json.loads(head)
            self.records, self.row_bytes, self._bytes = (
                int(about[k]) for k in ("records", "row_bytes", "record_bytes")
            )
            if about["format"] != FORMAT or self._bytes != record_bytes(self.row_bytes) or self.records < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise CorruptRecordError(
                f"{file} is no file of records, or its first block is damaged. Copy it again."
            ) from None
        self.direct, self.unit, self.units_read = hasattr(os, "O_DIRECT"), unit, 0
        try:
            self._descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system that has no such reads
            self.direct, self._descriptor = False, os.open(file, os.O_RDONLY)
        with mmap.mmap(-1, _BLOCK) as aligned:
            try:
                os.preadv(self._descriptor, [memoryview(aligned)[:unit]], 0)
            except OSError:  # a disk of larger sectors
                self.unit = _BLOCK
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "records")
        self._lock = threading.Lock()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of records, uint8 [n, row_bytes], in their order; each block is read once.

        Args:
          numbers: int [n], from 0 to below `records`.

        Raises:
          CorruptRecordError: naming the first record that is damaged.
        """
        rows = np.empty((len(numbers), self.row_bytes), np.uint8)
        for at, some in self.read_parts(numbers):
            rows[at] = some
        return rows

    def read_parts(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the same a part at a time: which of the numbers, and their rows. An error comes after the last one."""
        order, each = np.argsort(numbers, kind="stable"), max(1, _PART_BYTES // self._bytes)
        wrong = [np.zeros(0, np.int64)]
        for start in range(0, len(order), each):
            at = order[start : start + each]
            records = self._records(numbers[at])
            found = records[:, -8:].copy().view("<u8")[:, 0]
            wrong.append(numbers[at[found != checksums(records[:, :-8], numbers[at])]])
            yield at, records[:, : self.row_bytes]
        if len(damaged := np.concatenate(wrong)):
            raise CorruptRecordError(
                f"record {damaged[0]} of {self._file} is damaged: its checksum differs"
                + (f", and so do {len(damaged) - 1} more of {len(numbers)}" if len(damaged) > 1 else "")
                + ". Copy the file again."
            )

    def _records(self, numbers: np.ndarray) -> np.ndarray:
        """Whole records, uint8 [n, record]; a record is some units, or a unit some records."""
        number = numbers.astype(np.int64)
        each, per = -(-self._bytes // self.unit), max(1, self.unit // self._bytes)
        needed, at = np.unique(number // per, return_inverse=True)
        units = (needed[:, None] * each + np.arange(each)).ravel()
        held = self.read_units(units, each).reshape(len(needed), per, self._bytes)
        records: np.ndarray = held[at, number % per]
        return records

    def read_units(self, units: np.ndarray, each: int = 1) -> np.ndarray:
        """Units after the first block, by their numbers [n], ascending: uint8 [n, unit]; `each` make a record."""
        held = np.empty((len(units), self.unit), np.uint8)
        parts = max(1, min(_THREADS, len(units) // each // _LEAST))
        edges = np.linspace(0, len(units), parts + 1).astype(int).tolist()
        tasks = [self._pool.submit(self._fill, held, units, a, b) for a, b in zip(edges[1:], edges[2:], strict=False)]
        self._fill(held, units, *edges[:2])
        for task in tasks:
            task.result()
        with self._lock:
            self.units_read += len(units)
        return held

    def _fill(self, held: np.ndarray, units: np.ndarray, start: int, stop: int) -> None:
        """Reads some units, those that follow each other together."""
        with mmap.mmap(-1, _RUN_BYTES) as aligned:  # O_DIRECT writes to whole sectors alone
            for a, b in _runs(units[start:stop], _RUN_BYTES // self.unit):
                length = (b - a) * self.unit
                place = _BLOCK + int(units[start + a]) * self.unit
                with memoryview(aligned)[:length] as view:  # released also where the disk gives an error
                    got = os.preadv(self._descriptor, [view], place)
                if got != length:
                    raise CorruptRecordError(f"{self._file} ends too early: it was cut off. Copy it again.")
                held[start + a : start + b] = np.frombuffer(aligned, np.uint8, length).reshape(-1, self.unit)

    def close(self) -> None:
        """Ends the threads, and closes the file."""
        self._pool.shutdown()
        os.close(self._descriptor)


def _runs(units: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """(first, end) of units that follow each other, `most` at most."""
    ends = [*(np.flatnonzero(np.diff(units) != 1) + 1).tolist(), len(units)]
    start = 0
    for end in ends:
        for a in range(start, end, most):
            yield a, min(a + most, end)
        start = end


class CachedRows:
    """Rows of a file of records behind a cache of some bytes, which holds whole rows. Of one caller at a time.

    A row may lie in the slots of one set, each of which is a clock (Corbato 1968): so that a cache takes 5 bytes beside
    each of its rows, and nothing for those that it does not hold. With 64 slots a set hits are within half a point of
    those of one clock for all.

    Attributes:
      file: that they are in.
      room: rows that the cache can hold.
      hits: rows that were found in the cache.
      misses: rows that were read.
    """

    def __init__(self, file: RecordFile, cache_bytes: int, ways: int = 64) -> None:
        """A cache of as many rows as fit into so many bytes, in sets of `ways` slots or somewhat more."""
        self.file, self.hits, self.misses = file, 0, 0
        size = min(file.records, cache_bytes // (file.row_bytes + 5))
        self._whole = size == file.records  # then every row has a slot of its own
        self._sets = -(-size // ways) if self._whole else min(size, max(1, size // ways))
        ways = ways if self._whole else size // max(1, self._sets)
        self.room = self._sets * ways
        self._row_of = np.full((self._sets, ways), -1, np.int32)
        self._used = np.zeros((self._sets, ways), bool)
        self._hand = np.zeros(self._sets, np.int64)
        self._slab = np.zeros((self._sets, ways, file.row_bytes), np.uint8)

    def set_of(self, numbers: np.ndarray) -> np.ndarray:
        """The set of each row, int64 [n]; rows of neighbouring numbers are in sets far apart."""
        if self._whole:
            return numbers.astype(np.int64) // self._row_of.shape[1]
        return (_splitmix(numbers.astype(np.uint64)) % np.uint64(self._sets)).astype(np.int64)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of these distinct numbers, uint8 [n, row_bytes]; CorruptRecordError as `RecordFile.read`."""
        if not self._sets:
            self.misses += len(numbers)
            return self.file.read(numbers)
        sets = self.set_of(numbers)
        same = self._row_of[sets] == numbers[:, None]
        here, ways = same.any(axis=1), same.argmax(axis=1)
        found = np.empty((len(numbers), self.file.row_bytes), np.uint8)
        found[here] = self._slab[sets[here], ways[here]]
        self._used[sets[here], ways[here]] = True
        if not here.all():
            found[~here] = read = self.file.read(numbers[~here])
            self._keep(numbers[~here], sets[~here], read)
        self.hits += int(here.sum())
        self.misses += int((~here).sum())
        return found

    def _keep(self, numbers: np.ndarray, sets: np.ndarray, rows: np.ndarray) -> None:
        """Lets rows in, one of each set at a time."""
        order = np.argsort(sets, kind="stable")
        ordered = sets[order]
        nth = np.arange(len(sets)) - np.searchsorted(ordered, ordered)  # of its set
        for turn in range(int(nth.max()) + 1):
            now = order[nth == turn]
            of, ways = sets[now], self._victims(sets[now])
            self._row_of[of, ways], self._slab[of, ways] = numbers[now], rows[now]
            self._used[of, ways] = False  # until they are asked for once more

    def _victims(self, sets: np.ndarray) -> np.ndarray:
        """The way of each of these distinct sets that the hand comes to: it takes the marks of those that it passes."""
        ways = self._used.shape[1]
        ahead = (self._hand[sets][:, None] + np.arange(ways)) % ways
        used = self._used[sets[:, None], ahead]
        passed = np.where(used.all(axis=1), ways, used.argmin(axis=1))
        self._used[sets[:, None], ahead] = used & (np.arange(ways) >= passed[:, None])
        chosen = ahead[np.arange(len(sets)), passed % ways]
        self._hand[sets] = (chosen + 1) % ways
        return chosen
