"""Files of records, written in parts and in any order."""

from pathlib import Path

import numpy as np

from recjax.tiers.records import Head, RecordWriter


def head(rows: int, row_bytes: int, table: str = "t", owner: str = "here") -> Head:
    """What such a file says of itself."""
    return Head(rows, row_bytes, owner, table)


def written(file: Path, rows: int, row_bytes: int, seed: int = 0, table: str = "t") -> np.ndarray:
    """Writes a file of random rows, and returns these, uint8 [rows, row_bytes]."""
    made = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
    writer = RecordWriter(file, head(rows, row_bytes, table))
    order = np.random.default_rng(1).permutation(rows)
    for part in np.array_split(order, 3):
        writer.write(part, made[part])
    writer.close()
    return made
