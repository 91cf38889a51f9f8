"""Synthetic click data with a planted signal whose best possible AUC is known. Generated on the fly; no disk.

The label of a row is drawn with probability sigmoid(logit), where

    logit = bias + signal * (sum_f pooled_f + dense . coefficients + interaction * x_0 * x_1) / sqrt(terms)

`pooled_f` is the weighted sum of the effects of the bag's ids over sqrt(mean bag size), and x_0, x_1 are second
hidden effects of the first two features, so a model needs an interaction to reach the optimum. Ids at or beyond
`planted_rows` have no effect: the signal is equally learnable at any table size. Ids follow a bounded Zipf law with
id 0 the most frequent.

Every block is a pure function of (config, split, index), made of counter-based random numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import ClassVar

import numpy as np

from recjax.data import counter_rng
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.source import BLOCK_ROWS, SPLITS, even_blocks
from recjax.data.synthetic.zipf import BoundedZipf
from recjax.errors import ConfigError, DataError
from recjax.settings.values import check_ranges

# Purposes of draws: one for each kind of column. The place is (split, block, feature).
_EFFECTS, _FACTORS, _COEFFICIENTS, _LENGTHS, _IDS, _WEIGHTS, _DENSE, _LABELS, _SHUFFLE = range(10, 19)
_VERSION = 1  # raise it when the same config starts to give other data


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Config of synthetic data. A tuple of length 1 applies to every table."""

    kind: ClassVar[str] = "synthetic"

    rows: tuple[int, ...] = (1000, 1000, 1000, 1000)  # V, rows of each table: one categorical feature a table
    ids_per_bag: tuple[int, ...] = (1,)  # H, ids per bag of each table; 0 is jagged: 0 to 2 * mean_ids ids
    mean_ids: int = 4  # mean bag size of jagged tables; sizes are uniform on 0 .. 2 * mean_ids
    weighted: tuple[bool, ...] = (False,)  # whether the ids of each table carry weights, uniform on [0.5, 1.5)
    dense: int = 4  # K, number of dense features, uniform with mean 0 and variance 1
    zipf: float = 1.05  # exponent of the id distribution; 0 is uniform
    train_rows: int = 524_288  # rows of the training split
    validation_rows: int = 32_768  # rows of the validation split
    test_rows: int = 65_536  # rows of the test split
    planted_rows: int = 50  # ids from here on have no effect on the label
    signal: float = 2.0  # scale of the logit; 0 makes labels independent of everything
    interaction: float = 0.5  # weight of the product of two features in the logit; 0 makes it additive
    bias: float = -0.5  # logit of a row without any effect
    shuffle_labels: bool = False  # permute the labels over the rows (block by block): the best AUC becomes 0.5
    seed: int = 0  # of the data; independent of the seed of training

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError("rows is empty; give the rows of at least one table.")
        for name in ("ids_per_bag", "weighted"):
            length = len(getattr(self, name))
            if length not in (1, len(self.rows)):
                raise ConfigError(
                    f"{name} has {length} values, but rows has {len(self.rows)}: give one value for each table, "
                    "or a single one for all."
                )
        check_ranges(
            self,
            rows=(1, 2**31 - 1),
            ids_per_bag=(0, 2**20),
            mean_ids=(1, 2**20),
            dense=(0, 2**20),
            zipf=(0, 10),
            train_rows=(0, 2**50),
            validation_rows=(0, 2**50),
            test_rows=(0, 2**50),
            planted_rows=(0, 2**24),
        )

    def open(self) -> SyntheticSource:
        """The data that this config describes."""
        return SyntheticSource(self)


class SyntheticSource:
    """The blocks of a `Synthetic` config (a `BlockSource`); reading generates them."""

    name = "synthetic"

    def __init__(self, config: Synthetic) -> None:
        """Draws the planted effects."""
        self.config = config
        self.schema = _schema(config)
        text = json.dumps([_VERSION, dataclasses.asdict(config)], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._zipf = [BoundedZipf(feature.rows, config.zipf) for feature in self.schema.features]
        planted = [min(feature.rows, config.planted_rows) for feature in self.schema.features]
        self._effects = [np.append(_unit(n, config.seed, _EFFECTS, f), 0.0) for f, n in enumerate(planted)]
        self._factors = [np.append(_unit(n, config.seed, _FACTORS, f), 0.0) for f, n in enumerate(planted[:2])]
        self._coefficients = _unit(config.dense, config.seed, _COEFFICIENTS)
        self._counts = {
            split: even_blocks(rows)
            for split, rows in zip(SPLITS, (config.train_rows, config.validation_rows, config.test_rows), strict=True)
        }

    def row_counts(self, split: str) -> np.ndarray:
        """Rows of each block: int64 [blocks]."""
        if split not in self._counts:
            raise DataError(f"synthetic data have no split {split!r}; the splits are {', '.join(SPLITS)}.")
        return self._counts[split]

    def read(self, split: str, index: int) -> Batch:
        """Block `index` of `split`."""
        return self._generate(split, index)[0]

    def probabilities(self, split: str, index: int) -> np.ndarray:
        """P(label = 1) of every row of a block given its features, before any shuffling: float64 [n]."""
        return self._generate(split, index)[1]

    def _generate(self, split: str, index: int) -> tuple[Batch, np.ndarray]:
        config, n = self.config, int(self.row_counts(split)[index])
        place = (SPLITS.index(split), index)
        dense = _unit(n * config.dense, config.seed, _DENSE, *place).reshape(n, config.dense).astype(np.float32)
        signal = dense.astype(np.float64) @ self._coefficients
        bags = {}
        product = np.full(n, config.interaction if len(self._factors) == 2 else 0.0)
        for f, feature in enumerate(self.schema.features):
            bags[feature.name] = bag = self._bags(f, n, *place)
            signal += self._pool(self._effects[f], f, bag)
            if f < 2:
                product *= self._pool(self._factors[f], f, bag)
        terms = len(bags) + config.dense + 1
        p = 1 / (1 + np.exp(-config.bias - config.signal * (signal + product) / np.sqrt(terms)))
        labels = (counter_rng.uniform(n, config.seed, _LABELS, *place) < p).astype(np.float32)
        if config.shuffle_labels:
            labels = labels[counter_rng.permutation(n, config.seed, _SHUFFLE, *place)]
        return Batch(dense, bags, labels, np.ones(n, np.float32), index * BLOCK_ROWS), p

    def _bags(self, f: int, n: int, split: int, index: int) -> Bags:
        """Bags of feature number `f` for the `n` rows of a block."""
        feature, seed, place = self.schema.features[f], self.config.seed, (split, index, f)
        if feature.bag is None:
            sizes = counter_rng.uniform(n, seed, _LENGTHS, *place) * (2 * self.config.mean_ids + 1)
            lengths = sizes.astype(np.int32)
            shape: tuple[int, ...] = (int(lengths.sum()),)
        else:
            lengths, shape = None, (n, feature.bag)
        count = int(np.prod(shape))
        ids = self._zipf[f].ids(counter_rng.uniform(count, seed, _IDS, *place)).astype(np.int32)
        weights = None
        if feature.weighted:
            weights = (counter_rng.uniform(count, seed, _WEIGHTS, *place) + 0.5).astype(np.float32).reshape(shape)
        return Bags(ids.reshape(shape), lengths, weights)

    def _pool(self, table: np.ndarray, f: int, bags: Bags) -> np.ndarray:
        """Weighted sum over each bag of the planted values of its ids, over sqrt(mean bag size): float64 [n]."""
        values = table[np.minimum(bags.ids, len(table) - 1)]  # the last entry is the 0 of all rows without effect
        if bags.weights is not None:
            values = values * bags.weights
        scale = np.sqrt(self.schema.features[f].bag or self.config.mean_ids)
        if bags.lengths is None:
            return values.sum(axis=1) / scale
        rows = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
        return np.bincount(rows, values, minlength=len(bags.lengths)) / scale


def best_auc(source: SyntheticSource, split: str) -> float:
    """The AUC that the true probabilities are expected to reach on a split, over the draw of its labels.

    With `shuffle_labels` it is 0.5: the features then say nothing about the labels. No model that has seen only
    the training split can expect more.
    """
    if source.config.shuffle_labels:
        return 0.5
    blocks = range(len(source.row_counts(split)))
    return expected_auc(np.concatenate([source.probabilities(split, i) for i in blocks]))


def expected_auc(probabilities: np.ndarray) -> float:
    """Expected number of pairs in the right order over the expected number of pairs, for independent labels.

    A pair is a positive i and a negative j, j != i; it counts 1 if p_i > p_j and 1/2 if they are equal:
    sum_{i != j} p_i (1 - p_j) ([p_i > p_j] + [p_i = p_j] / 2) / sum_{i != j} p_i (1 - p_j), in O(n log n).

    Args:
      probabilities: P(label = 1), float [n], n >= 2.
    """
    p, counts = np.unique(np.asarray(probabilities, np.float64), return_counts=True)
    positives, negatives = counts * p, counts * (1 - p)
    selves = counts * p * (1 - p)  # the pairs with j = i, which are none
    below = np.cumsum(negatives) - negatives
    right = np.sum(positives * below + 0.5 * (positives * negatives - selves))
    return float(right / (positives.sum() * negatives.sum() - selves.sum()))


def _unit(count: int, seed: int, purpose: int, *place: int) -> np.ndarray:
    """Numbers uniform on [-sqrt(3), sqrt(3)): mean 0, variance 1; float64 [count]."""
    return (counter_rng.uniform(count, seed, purpose, *place) - 0.5) * np.sqrt(12.0)


def _schema(config: Synthetic) -> Schema:
    tables = len(config.rows)
    bags = config.ids_per_bag * (tables // len(config.ids_per_bag))
    weighted = config.weighted * (tables // len(config.weighted))
    return Schema(
        dense=tuple(f"dense_{k}" for k in range(config.dense)),
        features=tuple(
            Feature(f"sparse_{f}", config.rows[f], bags[f] or None, weighted[f])  # H = 0 is jagged
            for f in range(tables)
        ),
    )
