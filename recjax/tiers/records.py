"""Tables on disk that are larger than memory, read row by row: records with a checksum each.

Needs NumPy and `transfers` alone, and is copied with it beside the loader of an export that has such tables.

    file     4 KiB: JSON that says whose records there are, how many, and of how many bytes (`Head`); then the records
    record   the row's bytes, zeros, and 8 bytes of checksum: 64 bytes, or a power of two times as many up to 4 KiB, or
             a multiple of 4 KiB, so that no record lies in more blocks of the disk than it must

Whoever opens a file says what its first block must be, and a file of another export, table or size is refused. The
record's number and whose it is enter the checksum: one that is damaged, stands in another's place, or is left of a file
that was there before is named and not given out. Reads go around the page cache (O_DIRECT) where the file system lets
them, for the cache of rows (`row_cache`) is ours: what it holds is chosen by rows, not by blocks of which one row is
wanted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from recjax.tiers.transfers import Transfers

FORMAT = "recjax-records/2"
_BLOCK = 4096
READ_BYTES = 16 * _BLOCK  # at most, that one read takes in
_PART_BYTES = 2**23  # of records that are in memory at a time, beside the rows that are read
_KEY = 40  # bits of a unit's number
UNITS = (512, _BLOCK)  # bytes that a disk can be asked for


class CorruptRecordError(Exception):
    """A file or a record that is not what was written: names the file and the record; one paragraph."""


def record_bytes(row_bytes: int) -> int:
    """Bytes of a record of a row."""
    needed = row_bytes + 8
    return max(64, 1 << (needed - 1).bit_length()) if needed <= _BLOCK else -(-needed // _BLOCK) * _BLOCK


class Head(NamedTuple):  # no dataclass: an export loads this file without its name in sys.modules
    """Says what is in a file: its first block.

    Attributes:
      records: how many there are.
      row_bytes: of each row.
      owner: id of the export, or of the run, that the file belongs to.
      table: whose rows they are.
    """

    records: int
    row_bytes: int
    owner: str
    table: str

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return _BLOCK + -(-self.records * record_bytes(self.row_bytes) // _BLOCK) * _BLOCK

    @property
    def seed(self) -> int:
        """64 bits of the owner and the table, for the checksums."""
        digest = hashlib.sha256(json.dumps([self.owner, self.table]).encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def block(self) -> bytes:
        """The first block."""
        whose = {"owner": self.owner, "table": self.table[:200]}  # a longer one does not fit, and is in the seed
        sizes = {"records": self.records, "row_bytes": self.row_bytes, "record_bytes": record_bytes(self.row_bytes)}
        return json.dumps({"format": FORMAT, **whose, **sizes}).encode().ljust(_BLOCK)

    def refuse(self, file: Path, block: bytes) -> None:
        """Raises CorruptRecordError for a file whose first block is another one, and says in what."""
        try:
            about = json.loads(block)
            form, owner, table = str(about["format"])[:40], about["owner"], about["table"]
        except (ValueError, KeyError, TypeError, RecursionError):
            form = owner = table = ""
        if re.fullmatch(r"recjax-records/\d+", form) and form != FORMAT:
            what = f"is of the format {form}, and {FORMAT} is read here. Export the model again"
        elif form == FORMAT and owner != self.owner:
            what = "belongs to another export. Copy the whole export once more"
        elif form == FORMAT and table != self.table[:200]:
            what = f"holds rows of the table {str(table)[:80]!r} instead of {self.table[:80]!r}. Copy the file again"
        else:
            what = "is no file of records, or its first block is damaged. Copy the file again"
        raise CorruptRecordError(f"{file} {what}.")


class Cells(NamedTuple):
    """The cells of a file, each read and written as a whole: a record of a unit or more, or a unit of several records.

    Attributes:
      per: records of a cell.
      bytes: of a cell.
    """

    per: int
    bytes: int

    @classmethod
    def of(cls, record: int, unit: int) -> Cells:
        """Cells of padded records of so many bytes, on a disk with so many bytes in a unit."""
        per = max(1, unit // record)
        return cls(per, per * record)

    def firsts(self, keys_K: np.ndarray, most_bytes: int) -> np.ndarray:
        """Indices among ascending cells at which pieces begin: cells that follow each other are moved together.

        Args:
          keys_K: int64, numbers of cells; those that differ by one lie beside each other.
          most_bytes: of a piece.
        """
        steps_K = np.arange(len(keys_K))
        begins_K = np.diff(keys_K, prepend=keys_K[:1] - 2) != 1
        run_K = np.maximum.accumulate(np.where(begins_K, steps_K, 0))
        return np.flatnonzero((steps_K - run_K) % max(1, most_bytes // self.bytes) == 0)

    def pieces(self, first_N: np.ndarray, descriptors: Any, numbers_K: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Pieces as `Transfers` takes them, int64 [N, 4].

        Args:
          first_N: which of the cells each begins with.
          descriptors: of their files, one or [N].
          numbers_K: of the cells in them.
          held: the cells in memory, uint8 [K, bytes].
        """
        place = _BLOCK + numbers_K[first_N] * self.bytes
        length = np.diff(first_N, append=len(numbers_K)) * self.bytes
        address = held.ctypes.data + first_N * self.bytes
        return np.stack([np.broadcast_to(descriptors, len(first_N)), place, length, address], axis=1)


def checksums(payload: np.ndarray, numbers: np.ndarray, seeds: np.ndarray | int) -> np.ndarray:
    """Checksums of records, uint64 [n]: the seed, and their 32-bit words and numbers each times an odd number.

    A change of any bits of one word, of the number, or of the seed always changes it; other changes do but for one in
    2^64 or so (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014).

    Args:
      payload: uint8 [n, P], P a multiple of 4.
      numbers: of the records, [n].
      seeds: of the file's `Head`, or uint64 [n] of several ones.
    """
    words = np.ascontiguousarray(payload).view("<u4")
    odd = _odd(words.shape[1] + 1)
    sums: np.ndarray = np.einsum("nw,w->n", words, odd[1:], dtype=np.uint64, casting="safe")  # makes no product whole
    return sums + (numbers.astype(np.uint64) + np.uint64(1)) * odd[0] + np.asarray(seeds, np.uint64)


@functools.cache
def _odd(count: int) -> np.ndarray:
    return _splitmix(np.arange(count, dtype=np.uint64)) | np.uint64(1)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Well mixed 64 bits for each number (Steele et al. 2014)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RecordWriter:
    """Writes the records of one file, in any order; `close` completes it."""

    def __init__(self, file: Path, head: Head) -> None:
        """Makes a file for as many rows as the head says; OSError if it cannot."""
        self._bytes, self._row_bytes, self._seed = record_bytes(head.row_bytes), head.row_bytes, head.seed
        with file.open("xb") as opened:
            opened.write(head.block())
            opened.truncate(head.file_bytes)
        mapped = np.memmap(file, np.uint8, "r+", _BLOCK)
        self._records = mapped[: head.records * self._bytes].reshape(head.records, self._bytes)
        self._mapped = mapped

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows, uint8 [n, row_bytes], as the records of these numbers."""
        record = np.zeros((len(rows), self._bytes), np.uint8)
        record[:, : self._row_bytes] = rows
        sums = checksums(record[:, :-8], numbers, self._seed)
        record[:, -8:] = sums.astype("<u8").view(np.uint8).reshape(-1, 8)
        self._records[numbers] = record

    def close(self) -> None:
        """Has all of it on the disk."""
        self._mapped.flush()


class RecordFile:
    """Reads records by their numbers, from several threads at once.

    Attributes:
      path: of the file.
      head: what its first block says.
      records: how many there are.
      row_bytes: of each row.
      record_bytes: of its record.
      seed: of its checksums.
      transfers: what reads it.
      descriptor: of the open file.
      direct: whether reads go around the page cache.
      unit: bytes that are read at least, and of which all reads are a multiple.
      units_read: so far.
    """

    def __init__(self, file: Path, head: Head, transfers: Transfers, unit: int = 512) -> None:
        """Opens a file.

        Args:
          file: what `RecordWriter` wrote.
          head: what it was written with.
          transfers: of it, which may serve other files too.
          unit: 512 or 4096; 4096 is taken where the disk cannot be asked for less.

        Raises:
          CorruptRecordError: it has another head or size.
          OSError: it cannot be read.
        """
        self.path, self.head, self.seed = file, head, head.seed
        self.records, self.row_bytes, self.record_bytes = head.records, head.row_bytes, record_bytes(head.row_bytes)
        with file.open("rb") as opened:
            block, size = opened.read(_BLOCK), os.fstat(opened.fileno()).st_size
        if block != head.block():
            head.refuse(file, block)
        if size != head.file_bytes:
            raise CorruptRecordError(f"{file} has {size:,} bytes instead of {head.file_bytes:,}. Copy it again.")
        self.transfers, self.direct, self.unit, self.units_read = transfers, hasattr(os, "O_DIRECT"), unit, 0
        try:
            self.descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system that has no such reads
            self.direct, self.descriptor = False, os.open(file, os.O_RDONLY)
        with mmap.mmap(-1, _BLOCK) as aligned:
            try:
                os.preadv(self.descriptor, [memoryview(aligned)[:unit]], 0)
            except OSError:  # a disk of larger sectors
                self.unit = _BLOCK
        self.lock = threading.Lock()

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
        order, each = np.argsort(numbers, kind="stable"), max(1, _PART_BYTES // self.record_bytes)
        wrong: list[tuple[Path, int]] = []
        for start in range(0, len(order), each):
            at = order[start : start + each]
            rows, damaged = _read([(np.zeros(len(at), np.int64), numbers[at], [self])])
            wrong += damaged
            yield at, rows[0]
        _refuse(wrong, len(numbers))

    def read_units(self, units: np.ndarray) -> np.ndarray:
        """Units after the first block, by their numbers [n], ascending: uint8 [n, unit]."""
        wanted = _Units([self], units.astype(np.int64), Cells(1, self.unit))
        wanted.check(self.transfers.read(wanted.pieces, self.direct))
        return wanted.held

    def close(self) -> None:
        """Closes the file."""
        os.close(self.descriptor)


Asked = tuple[np.ndarray, np.ndarray, Sequence[RecordFile]]
"""Which file each record is in, [n]; its number there, [n]; the files, alike in bytes of a row and of a unit."""


def read_together(asked: Sequence[Asked]) -> list[np.ndarray]:
    """Rows of several files, for each of `asked` uint8 [n, row_bytes]: all reads are under way at the same time.

    Raises:
      CorruptRecordError: naming the first record that is damaged.
    """
    rows, wrong = _read(asked)
    _refuse(wrong, sum(len(numbers) for _, numbers, _ in asked))
    return rows


def _read(asked: Sequence[Asked]) -> tuple[list[np.ndarray], list[tuple[Path, int]]]:
    """Rows as `read_together` gives them; and the file and number of each record that is damaged."""
    wanted = [_Records(*each) for each in asked]
    if not wanted:
        return [], []
    files = [file for _, _, files in asked for file in files]
    pieces = np.concatenate([each.units.pieces for each in wanted])
    got = files[0].transfers.read(pieces, all(file.direct for file in files))
    start, rows, wrong = 0, [], []
    for each in wanted:
        stop = start + len(each.units.pieces)
        each.units.check(got[start:stop])
        start = stop
        records = each.records()
        found = records[:, -8:].copy().view("<u8")[:, 0]
        seeds = np.array([file.seed for file in each.files], np.uint64)[each.of]
        damaged = np.flatnonzero(found != checksums(records[:, :-8], each.numbers, seeds))
        wrong += [(each.files[each.of[at]].path, int(each.numbers[at])) for at in damaged.tolist()]
        rows.append(records[:, : each.files[0].row_bytes])
    return rows, wrong


def _refuse(wrong: Sequence[tuple[Path, int]], count: int) -> None:
    if wrong:
        more = f", and so do {len(wrong) - 1} more of {count}" if len(wrong) > 1 else ""
        raise CorruptRecordError(
            f"record {wrong[0][1]} of {wrong[0][0]} is damaged, or of another file: its checksum differs{more}. Copy "
            "the file again."
        )


def aligned(count: int, width: int) -> np.ndarray:
    """Memory from the start of a page, as transfers around the page cache need it: uint8 [count, width]."""
    room = np.empty(count * width + _BLOCK, np.uint8)
    start = -room.ctypes.data % _BLOCK
    return room[start : start + count * width].reshape(count, width)


class _Units:
    """Cells of files, and the pieces that they are read in.

    Attributes:
      held: all of them, uint8 [m, bytes of a cell].
      pieces: as `Transfers.read` takes them.
    """

    def __init__(self, files: Sequence[RecordFile], keys: np.ndarray, cells: Cells) -> None:
        """Cells by ascending keys, int64 [m]: index of the file << _KEY, and the number in it."""
        self.held = aligned(len(keys), cells.bytes)
        first = cells.firsts(keys, READ_BYTES)
        self._files, self._of = files, keys[first] >> _KEY
        descriptors = np.array([file.descriptor for file in files])[self._of]
        self.pieces = cells.pieces(first, descriptors, keys & ((1 << _KEY) - 1), self.held)
        units = np.bincount(self._of, self.pieces[:, 2] // files[0].unit, len(files)).astype(int).tolist()
        for file, more in zip(files, units, strict=True):
            with file.lock:
                file.units_read += more

    def check(self, got: np.ndarray) -> None:
        """Raises CorruptRecordError if the file of a piece ended before it."""
        if len(short := np.flatnonzero(got != self.pieces[:, 2])):
            path = self._files[self._of[short[0]]].path
            raise CorruptRecordError(f"{path} ends too early: it was cut off. Copy it again.")


class _Records:
    """Records of files."""

    def __init__(self, of: np.ndarray, numbers: np.ndarray, files: Sequence[RecordFile]) -> None:
        """See `Asked`."""
        self.of, self.numbers, self.files = of, numbers, files
        self._cells = Cells.of(files[0].record_bytes, files[0].unit)
        keys, self._at = np.unique((of << _KEY) | numbers.astype(np.int64) // self._cells.per, return_inverse=True)
        self.units = _Units(files, keys, self._cells)

    def records(self) -> np.ndarray:
        """All of them, uint8 [n, record], once the units are read."""
        per = self._cells.per
        found: np.ndarray = self.units.held.reshape(-1, per, self._cells.bytes // per)[self._at, self.numbers % per]
        return found
