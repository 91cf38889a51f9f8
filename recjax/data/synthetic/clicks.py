"""Synthetic click data with a planted signal whose best possible AUC is known, of Zipf-distributed ids; no disk.

The label of a row is drawn with probability sigmoid(logit), where

    logit = bias + signal * (sum_f pooled_f + dense . coefficients + interaction * x_0 * x_1) / sqrt(terms)

`pooled_f` is the weighted sum of the effects of the bag's ids over sqrt(mean bag size), and x_0, x_1 are second
hidden effects of the first two features, so a model needs an interaction to reach the optimum. Ids at or beyond
`planted_rows` have no effect: the signal is equally learnable at any table size. Ids follow a bounded Zipf law with
id 0 the most frequent.

With `labels` there are several, label_0, label_1, ..., of the kinds that it lists. Each has a logit of its own: of the
formula above once with effects that all labels share, s, and once with its own, o, it takes sqrt(c) s + sqrt(1 - c) o
in the place of the sum, c being `correlation`. So the logits of any two labels correlate by c. A binary label is drawn
from its probability; a number is the logit with normal noise of half its scale; a class is 2, 1 or 0, where the same
uniform number is below half the probability, below the whole, or above. With `masked` all labels but the first weigh 0
in rows where the first is not above 0.

Every block is a pure function of (config, split, index), made of counter-based random numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, ClassVar

import numpy as np

from recjax.data import counter_rng
from recjax.data.batch import ANY_ID, Bags, Batch, Feature, Label, LabelKind, Schema
from recjax.data.prepare.ids import stable_hash
from recjax.data.source import BLOCK_ROWS, SPLITS, DrawnSplits
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

_HEAD = 4096  # ranks whose probabilities are summed one by one


class BoundedZipf:
    """Ids 0 <= id < rows with P(id) proportional to (id + 1)^-exponent: id 0 is the most frequent.

    One uniform number gives one id, through the inverse of the distribution function. The first 4096 ranks are
    exact; beyond, a rank's probability is the integral of t^-exponent over [rank - 1/2, rank + 1/2], which is off
    by less than exponent * (exponent + 1) / (24 * 4096^2) of itself (5e-9 for exponent 1).

    (`numpy.random.zipf` has no upper bound and needs an exponent above 1; taking it modulo the rows, as benchmark
    code does, is another distribution.)
    """

    def __init__(self, rows: int, exponent: float) -> None:
        """Prepares the inverse for `rows` >= 1 ids and any `exponent` >= 0 (0 is uniform)."""
        self._rows, self._exponent = rows, exponent
        head = np.arange(1, min(rows, _HEAD) + 1, dtype=np.float64) ** -exponent
        self._head = np.cumsum(head)
        self._tail_start = self._integral(np.array(_HEAD + 0.5))
        tail = self._integral(np.array(rows + 0.5)) - self._tail_start if rows > _HEAD else 0.0
        self._total = float(self._head[-1] + tail)

    def ids(self, uniforms: np.ndarray) -> np.ndarray:
        """Ids for numbers uniform on [0, 1): int64 of the same shape."""
        mass = uniforms * self._total
        ranks = np.searchsorted(self._head, mass, side="right")
        if self._rows > _HEAD:
            tail = mass >= self._head[-1]
            x = self._inverse(mass[tail] - self._head[-1] + self._tail_start)
            ranks[tail] = np.rint(x).astype(np.int64) - 1
        return np.minimum(ranks, self._rows - 1)  # rounding at the very end

    def probability(self, ranks: np.ndarray) -> np.ndarray:
        """Probability of the ids below `ranks` (from 1 on) by one, each, float64."""
        found: np.ndarray = np.asarray(ranks, np.float64) ** -self._exponent / self._total
        return found

    def _integral(self, x: np.ndarray) -> np.ndarray:
        """The integral of t^-exponent from 1 to x."""
        power = 1.0 - self._exponent
        return np.log(x) if power == 0 else np.expm1(power * np.log(x)) / power

    def _inverse(self, y: np.ndarray) -> np.ndarray:
        power = 1.0 - self._exponent
        return np.exp(y if power == 0 else np.log1p(power * y) / power)


# Purposes of draws: one for each kind of column. The place is (split, block, feature).
_EFFECTS, _FACTORS, _COEFFICIENTS, _LENGTHS, _IDS, _WEIGHTS, _DENSE, _LABELS, _SHUFFLE = range(10, 19)
_NOISE = 19
_OF_SEVERAL = ("labels", "correlation", "masked")  # settings that mean nothing for one label
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
    planted_rows: int = 50  # first id that has no effect on the label
    signal: float = 2.0  # scale of the logit; 0 makes labels independent of everything
    interaction: float = 0.5  # weight of the product of two features in the logit; 0 makes it additive
    bias: float = -0.5  # logit of a row without any effect
    shuffle_labels: bool = False  # permute the labels over the rows (block by block): the best AUC becomes 0.5
    seed: int = 0  # seed of the data; independent of the seed of training
    labels: tuple[LabelKind, ...] = ()  # kinds of several labels; empty: one binary label
    correlation: float = 0.5  # correlation of the logits of any two of several labels
    masked: bool = False  # let all but the first of several labels count only where the first is above 0
    raw_ids: bool = False  # ids are 64-bit hashes, as of a column without a vocabulary: for tables with ids=dynamic

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
            correlation=(0, 1),
        )

    def open(self) -> SyntheticSource:
        """The data that this config describes."""
        return SyntheticSource(self)


class SyntheticSource(DrawnSplits):
    """The blocks of a `Synthetic` config (a `BlockSource`); reading generates them."""

    name = "synthetic"

    def __init__(self, config: Synthetic) -> None:
        """Draws the planted effects."""
        self.config = config
        self.schema = _schema(config)
        settings = dataclasses.asdict(config)
        if not config.labels:  # as before there were several
            settings = {key: value for key, value in settings.items() if key not in _OF_SEVERAL}
        if not settings["raw_ids"]:  # likewise
            del settings["raw_ids"]
        text = json.dumps([_VERSION, settings], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._zipf = [BoundedZipf(rows, config.zipf) for rows in config.rows]
        planted = [min(rows, config.planted_rows) for rows in config.rows]
        self._planted = [_Planted.draw(config, planted, t) for t in range(1 + len(config.labels))]

    def read(self, split: str, index: int) -> Batch:
        """Block `index` of `split`."""
        return self._generate(split, index)[0]

    def probabilities(self, split: str, index: int) -> np.ndarray:
        """P(label = 1) of every row of a block given its features, before any shuffling: float64 [n].

        Of several labels [n, T]; what it says of those that are not binary, the description above tells.
        """
        return self._generate(split, index)[1]

    def _generate(self, split: str, index: int) -> tuple[Batch, np.ndarray]:
        config, n = self.config, int(self.row_counts(split)[index])
        place = (SPLITS.index(split), index)
        dense = _unit(n * config.dense, config.seed, _DENSE, *place).reshape(n, config.dense).astype(np.float32)
        bags = {feature.name: self._bags(f, n, *place) for f, feature in enumerate(self.schema.features)}
        sums = [self._sum(planted, dense, bags) for planted in self._planted]
        if config.raw_ids:
            hashes = {name: stable_hash(of.ids.astype(np.int64)).view(np.int64) for name, of in bags.items()}
            bags = {name: dataclasses.replace(of, ids=hashes[name]) for name, of in bags.items()}
        if config.labels:
            return self._several(dense, bags, sums, *place)
        p = self._probability(sums[0])
        labels = (counter_rng.uniform(n, config.seed, _LABELS, *place) < p).astype(np.float32)
        if config.shuffle_labels:
            labels = labels[counter_rng.permutation(n, config.seed, _SHUFFLE, *place)]
        return Batch(dense, bags, labels, np.ones(n, np.float32), index * BLOCK_ROWS), p

    def _sum(self, planted: _Planted, dense: np.ndarray, bags: dict[str, Bags]) -> np.ndarray:
        """The sum of all effects in the logit, before it is scaled: float64 [n]."""
        signal = dense.astype(np.float64) @ planted.coefficients
        product = np.full(len(dense), self.config.interaction if len(planted.factors) == 2 else 0.0)
        for f, bag in enumerate(bags.values()):
            signal += self._pool(planted.effects[f], f, bag)
            if f < 2:
                product *= self._pool(planted.factors[f], f, bag)
        return np.asarray(signal + product)

    def _probability(self, sums: np.ndarray) -> np.ndarray:
        terms = len(self.schema.features) + self.config.dense + 1
        return np.asarray(1 / (1 + np.exp(-self.config.bias - self.config.signal * sums / np.sqrt(terms))))

    def _several(
        self, dense: np.ndarray, bags: dict[str, Bags], sums: list[np.ndarray], split: int, index: int
    ) -> tuple[Batch, np.ndarray]:
        """The batch of several labels, from the shared sum and those of each; and their probabilities, [n, T]."""
        config, n = self.config, len(dense)
        shared, labels, probabilities = np.sqrt(config.correlation) * sums[0], [], []
        for t, kind in enumerate(config.labels):
            p = self._probability(shared + np.sqrt(1 - config.correlation) * sums[1 + t])
            u = counter_rng.uniform(n, config.seed, _LABELS, split, index, 1 + t)
            found: Any = (u < p) * 1.0
            if kind == "class":
                found = found + (u < p / 2)
            elif kind == "number":  # the mean of 12 uniform numbers, scaled, for a normal one
                many = counter_rng.uniform(12 * n, config.seed, _NOISE, split, index, 1 + t).reshape(12, n)
                found = np.log(p / (1 - p)) + config.signal / 2 * (many.sum(axis=0) - 6)
            if config.shuffle_labels:
                found = found[counter_rng.permutation(n, config.seed, _SHUFFLE, split, index, 1 + t)]
            labels.append(found)
            probabilities.append(p)
        labels_nxT = np.stack(labels, axis=1).astype(np.float32)
        weights_nxT = np.ones_like(labels_nxT)
        if config.masked:
            weights_nxT[:, 1:] = labels_nxT[:, :1] > 0
        return Batch(dense, bags, labels_nxT, weights_nxT, index * BLOCK_ROWS), np.stack(probabilities, axis=1)

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


@dataclasses.dataclass(frozen=True)
class _Planted:
    """The effects of all features on one logit.

    Attributes:
      effects: of the ids of each feature, and a 0 for all beyond the planted ones: float64 [planted + 1].
      factors: of the product of the first two features, likewise.
      coefficients: of the dense features, [K].
    """

    effects: list[np.ndarray]
    factors: list[np.ndarray]
    coefficients: np.ndarray

    @classmethod
    def draw(cls, config: Synthetic, planted: list[int], number: int) -> _Planted:
        """Returns the parameters of the logit called `number`: 0 is that of the only label, or what several share."""
        return cls(
            [np.append(_unit(n, config.seed, _EFFECTS, f, number), 0.0) for f, n in enumerate(planted)],
            [np.append(_unit(n, config.seed, _FACTORS, f, number), 0.0) for f, n in enumerate(planted[:2])],
            _unit(config.dense, config.seed, _COEFFICIENTS, number),
        )


def best_auc(source: SyntheticSource, split: str) -> float:
    """The AUC that the true probabilities are expected to reach on a split, over the draw of its only label.

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
            # H = 0 is jagged
            Feature(f"sparse_{f}", ANY_ID if config.raw_ids else config.rows[f], bags[f] or None, weighted[f])
            for f in range(tables)
        ),
        labels=tuple(Label(f"label_{t}", kind, 3 if kind == "class" else 0) for t, kind in enumerate(config.labels)),
    )
