"""The rates of a disk, as the store of rows uses it: with checksums, around the page cache, from its threads."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np

from recjax.tiers.disk import OnDisk

_RECORD = 4096 - 8  # bytes, with the checksum a block
_BLOCKS = 16_384  # of the file
_QUEUE = 1024  # records asked for at once, to keep all threads at the disk


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
    places = OnDisk(folder, "speed", _RECORD, _QUEUE * _RECORD)
    try:
        rng = np.random.default_rng(0)
        records = rng.integers(0, 256, (_QUEUE // 4, _RECORD), np.uint8)
        began = time.perf_counter()
        for first in range(0, _BLOCKS, len(records)):
            places.write(np.arange(first, first + len(records), dtype=np.int32), records)
        written = places.written_records * (_RECORD + 8) / (time.perf_counter() - began)
        done, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or not done:
            before = places.read_records
            places.read(rng.integers(0, _BLOCKS - 2 * _QUEUE, _QUEUE).astype(np.int32))
            done += places.read_records - before
        reads = done / spent
        order = itertools.cycle(rng.permutation(_BLOCKS // 4))

        def write() -> None:
            places.write(4 * np.fromiter(order, np.int32, len(records)) + rng.integers(0, 4, dtype=np.int32), records)

        for _ in range(_QUEUE // len(records)):  # those that lie in order leave the memory
            write()
        before, began = places.written_records, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or places.written_records == before:
            write()
        return DiskRates(reads, written, (places.written_records - before) / spent)
    finally:
        places.close()
