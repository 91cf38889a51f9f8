"""Writes a file in the format of Criteo Kaggle with the statistics of the real one, none of its rows.

    python benchmarks/criteo_like.py OUT.txt [--rows 1000000] [--scale 1.0] [--seed 0] [--signal]

Per field: distinct values as in the full log (times --scale for the ten large fields), Zipf-like skew, share of missing
values; I2 goes down to -2, I5 up to 2 million; a quarter of the labels are 1. A name that ends in .gz is gzipped.

Labels are drawn at random, or with --signal from a planted model: main effects of all values, products of effects of 26
pairs of fields, effects of the integers. The best AUC that any model can expect is then printed. Much of that signal
sits in values that a small sample holds once, which a model can only learn by heart.
"""

import argparse
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from recjax.data import counter_rng
from recjax.data.synthetic.clicks import BoundedZipf, expected_auc
from recjax.data.synthetic.stream import CRITEO_KAGGLE_ROWS as ROWS

MISSING_INTEGERS = (0.45, 0, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.043, 0.45, 0.043, 0.77, 0.22)
MISSING_CATEGORIES = {
    3: 0.034,
    4: 0.034,
    6: 0.12,
    12: 0.034,
    16: 0.034,
    19: 0.44,
    20: 0.44,
    21: 0.034,
    22: 0.76,
    24: 0.034,
    25: 0.44,
    26: 0.44,
}
SCALE_OF_INTEGERS = (3, 20, 20, 7, 3000, 50, 10, 12, 90, 1, 3, 1, 8)
CLICK_RATE = 0.2562
PARTNERS = (5, 8, 13, 16, 19, 21, 22, 24, 5, 8, 13, 16, 19, 3, 2, 11, 20, 8, 0, 1, 2, 5, 8, 9, 10, 15)  # of each field
_BLOCK = 1 << 18
_HEX4 = np.frombuffer(b"".join(b"%04x" % i for i in range(1 << 16)), np.uint32)  # 4 digits in the bytes of a word


def hashes(field: int, ids: np.ndarray) -> np.ndarray:
    """The 32-bit value of every id of a field: uint32 [n], a bijection of the ids, different in every field."""
    x = ids.astype(np.uint32) + np.uint32(field * 0x9E3779B9 % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def effects(field: int, ids: np.ndarray) -> np.ndarray:
    """A number for every id of a field, as if drawn from a uniform distribution of mean 0 and variance 1."""
    return (hashes(100 + field, ids) / 2.0**32 - 0.5) * np.sqrt(12.0)


def probabilities(integers: list[np.ndarray], ids: list[np.ndarray]) -> np.ndarray:
    """P(label = 1) by the planted model, of 13 and 26 columns; -1 is a missing category, 0 a missing integer."""
    main = sum((1.4 if ROWS[f] < 6000 else 0.6) * effects(f, ids[f] + 1) for f in range(26)) / np.sqrt(26)
    hidden = [effects(26 + f, ids[f] + 1) for f in range(26)]
    pairs = sum(hidden[f] * hidden[PARTNERS[f]] for f in range(26)) / np.sqrt(26)
    dense = 0.0
    for i, values in enumerate(integers):
        x = np.log1p(np.maximum(values, 0.0)) / np.log1p(SCALE_OF_INTEGERS[i])
        dense += 0.4 * np.sin(0.7 * (i + 1)) * (x - 1)
    return np.asarray(1 / (1 + np.exp(1.1 - main - 0.6 * pairs - dense)))


def table(first: int, count: int, zipf: list[BoundedZipf], seed: int, signal: bool) -> tuple[pa.Table, np.ndarray]:
    """Rows `first` to `first + count` as columns of text and integers, null where missing; P(label = 1) of each."""
    columns: dict[str, Any] = {"label": None}
    integers, categories = [], []
    for i in range(13):
        u = counter_rng.uniform(2 * count, seed, 2, first, i)
        values = np.minimum(np.floor(np.expm1(-np.log1p(-u[:count]) * np.log1p(SCALE_OF_INTEGERS[i]))), 2_070_000)
        if i == 1:
            values -= 2
        missing = u[count:] < MISSING_INTEGERS[i]
        columns[f"I{i + 1}"] = pa.array(values.astype(np.int32), mask=missing)
        integers.append(np.where(missing, 0, values))
    for f in range(26):
        u = counter_rng.uniform(2 * count, seed, 3, first, f)
        ids = zipf[f].ids(u[:count])
        values = hashes(f, ids)
        digits = np.stack([_HEX4[values >> 16], _HEX4[values & 0xFFFF]], axis=1)
        held = u[count:] >= MISSING_CATEGORIES.get(f + 1, 0)
        categories.append(np.where(held, ids, -1))
        present = np.packbits(held, bitorder="little")
        offsets = np.arange(0, 8 * count + 1, 8, dtype=np.int32)
        buffers = [pa.py_buffer(present), pa.py_buffer(offsets), pa.py_buffer(digits)]
        columns[f"C{f + 1}"] = pa.Array.from_buffers(pa.string(), count, buffers)
    p = probabilities(integers, categories) if signal else np.full(count, CLICK_RATE)
    columns["label"] = pa.array((counter_rng.uniform(count, seed, 1, first) < p).astype(np.int8))
    return pa.table(columns), p


def write(out: Path, rows: int, scale: float = 1.0, seed: int = 0, signal: bool = False) -> np.ndarray:
    """Writes the file; gives P(label = 1) of every row."""
    drawn = []
    zipf = [BoundedZipf(max(1, round(v * scale)) if v > 100_000 else v, 1.05) for v in ROWS]
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with gzip.open(out, "wb", 1) if out.suffix == ".gz" else out.open("wb") as stream:
        for first in range(0, rows, _BLOCK):
            block, p = table(first, min(_BLOCK, rows - first), zipf, seed, signal)
            csv.write_csv(block, stream, options)
            drawn.append(p.astype(np.float32))
    return np.concatenate(drawn)


def main() -> None:
    """Writes what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--scale", type=float, default=1.0, help="of the distinct values of the large fields")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", action="store_true", help="labels from a planted model")
    options = parser.parse_args()
    p = write(options.out, options.rows, options.scale, options.seed, options.signal)
    if options.signal:
        print(f"click rate {p.mean():.4f}, best possible AUC {expected_auc(p):.4f}")


if __name__ == "__main__":
    main()
