"""A stream to measure speed on: skewed ids, random dense values and labels, with nothing in them to learn.

Ids are `(Generator.zipf(exponent) - 1) % rows`, as benchmark code commonly draws them: the law has no upper bound, so
that what lies beyond the rows wraps around, and with an exponent near 1 a large part of the ids is spread almost
evenly below the few that are frequent. (`synthetic` has a planted signal and a bounded law; train on that.)

The first `distinct_blocks` blocks of a split are drawn when they are first read and then kept; the stream repeats them
for as many rows as it has, so that reading costs no more than from memory. Samples are independent: shuffling them
changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.source import BLOCK_ROWS, SPLITS, DrawnSplits, between
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

# Distinct values of C1 to C26 in the whole Criteo Kaggle log.
CRITEO_KAGGLE_ROWS = tuple(
    int(count)
    for count in """
    1460 583 10_131_227 2_202_608 305 24 12_517 633 3 93_145 5683 8_351_593 3194 27 14_992 5_461_306 10 5652 2173 4
    7_046_547 18 15 286_181 105 142_572
    """.split()
)

_VERSION = 1  # raise it when the same config starts to give other data


@dataclasses.dataclass(frozen=True)
class ZipfStream:
    """Config of a stream without meaning, for measuring speed. A tuple of length 1 applies to every table."""

    kind: ClassVar[str] = "zipf_stream"

    rows: tuple[int, ...] = (1000,)  # V, rows of each table before the two settings below: one feature a table
    scale: float = 1.0  # factor of the rows; the product is rounded up
    max_rows: int = 2**31 - 1  # largest number of rows of a scaled table
    ids_per_bag: tuple[int, ...] = (1,)  # H, ids per bag of each table
    dense: int = 13  # K, dense features, standard normal
    exponent: float = 1.1  # exponent of the Zipf law; 0: all ids are equally frequent
    click_rate: float = 0.25  # probability of the label 1, whatever the features
    distinct_blocks: int = 64  # blocks of 4096 rows after which the stream repeats itself; they are kept in memory
    train_rows: int = 2**26  # rows of the training split
    validation_rows: int = 0  # rows of the validation split
    test_rows: int = 65_536  # rows of the test split
    seed: int = 0  # seed of the data; independent of the seed of training
    path: str = ""  # folder that `recjax data prepare PRESET` wrote the stream to, to read it; empty: it is drawn

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1:
            raise ConfigError("rows must give at least one table, and each at least 1 row.")
        if len(self.ids_per_bag) not in (1, len(self.rows)) or min(self.ids_per_bag) < 1:
            raise ConfigError(
                f"ids_per_bag is {self.ids_per_bag}: give one size of at least 1 for all, or one for each table."
            )
        even = self.exponent == 0
        if not 0 < self.scale <= 1e6 or not (even or 1.001 <= self.exponent <= 10) or not 0 < self.click_rate < 1:
            raise ConfigError(
                f"scale is {self.scale}, exponent {self.exponent} and click_rate {self.click_rate}; they must be above "
                "0, at least 1.001 (or 0 for ids that are equally frequent), and between 0 and 1."
            )
        splits = dict.fromkeys(("train_rows", "validation_rows", "test_rows"), (0, 2**50))
        check_ranges(self, max_rows=(1, None), dense=(0, None), distinct_blocks=(1, None), seed=(0, None), **splits)

    def open(self) -> ZipfStreamSource | PreparedSource:
        """The data that this config describes; of a folder only which one it is."""
        return open_prepared(self.path, self.kind) if self.path else ZipfStreamSource(self)


class ZipfStreamSource(DrawnSplits):
    """The blocks of a `ZipfStream` (a `BlockSource`)."""

    name = "zipf_stream"

    def __init__(self, config: ZipfStream) -> None:
        """Draws nothing yet."""
        self.config = config
        bags = config.ids_per_bag * (len(config.rows) // len(config.ids_per_bag))
        rows = [min(config.max_rows, int(np.ceil(r * config.scale))) for r in config.rows]
        self.schema = Schema(
            dense=tuple(f"dense_{k}" for k in range(config.dense)),
            features=tuple(Feature(f"sparse_{f}", r, h) for f, (r, h) in enumerate(zip(rows, bags, strict=True))),
        )
        # NumPy may draw other numbers in another version, which it promises only for its bit generators.
        drawn = dataclasses.asdict(dataclasses.replace(config, path=""))
        del drawn["path"]
        text = json.dumps([_VERSION, np.__version__, drawn], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._kept: dict[tuple[str, int], Batch] = {}

    def draw(self, split: str) -> None:
        """Draws all distinct blocks of a split that are missing, so that reading costs the same from the beginning."""
        for index in range(min(self.config.distinct_blocks, self.row_counts(split).size)):
            self.read(split, index)

    def read(self, split: str, index: int) -> Batch:
        """Block `index` of `split`."""
        rows, drawn = int(self.row_counts(split)[index]), index % self.config.distinct_blocks
        block = self._kept.get((split, drawn))
        if block is None or block.size < rows:  # two threads may draw the same block: it is the same
            block = self._kept[split, drawn] = self._draw(SPLITS.index(split), drawn)
        bags = {name: Bags(b.ids[:rows]) for name, b in block.bags.items()}
        return Batch(block.dense[:rows], bags, block.labels[:rows], block.weights[:rows], index * BLOCK_ROWS)

    def blocks(self, split: str) -> Iterator[Batch]:
        """Draws all blocks of a split, in their order; none is another's repetition, and none is kept."""
        for index, rows in enumerate(self.row_counts(split).tolist()):
            yield between(self._draw(SPLITS.index(split), index), 0, rows)

    def _draw(self, split: int, index: int) -> Batch:
        config, n = self.config, BLOCK_ROWS
        bags = {}
        for f, feature in enumerate(self.schema.features):
            draws = np.random.default_rng([config.seed, split, index, f])
            shape = n, feature.bag or 1
            ids = draws.zipf(config.exponent, shape) - 1 if config.exponent else draws.integers(0, feature.rows, shape)
            ids %= feature.rows
            bags[feature.name] = Bags(ids.astype(np.int32))
        draws = np.random.default_rng([config.seed, split, index, len(bags)])
        dense = draws.standard_normal((n, config.dense), np.float32)
        labels = (draws.random(n) < config.click_rate).astype(np.float32)
        return Batch(dense, bags, labels, np.ones(n, np.float32))
