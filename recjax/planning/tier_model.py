"""Hits of a cache by how often rows are asked for, where batches are too many, or tables too large, to replay.

A batch names row r with probability q_r, whatever others do (independent references). Then a row comes back after g
batches with probability q (1 - q)^(g - 1). A cache that lets go of the least recently used row, but sees the next L
batches, finds a row if it comes back within G batches: it stays for a = G - L batches after it was named, and from then
on until it is named if that is in sight. The rows that are there are, on average,

    sum over r of  1 - (1 - q_r)^G (1 + L q_r)

and G is such that these are as many as there are slots (the argument of Che, Tung and Wang 2002, for a window). With
L = 0 it is LRU; with L = G - 1, the most that is of use, it is Belady's rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from recjax.data.batch import Batch
from recjax.data.source import BlockSource
from recjax.data.synthetic.clicks import BoundedZipf, SyntheticSource
from recjax.data.synthetic.stream import ZipfStreamSource
from recjax.embedding.spec import FeatureSpec, TableSpec

_HEAD, _BINS = 4096, 400  # rows that are looked at one by one; classes of all others


@dataclasses.dataclass(frozen=True)
class Classes:
    """Rows that are asked for alike, together.

    Attributes:
      rows_K: how many, float64 [K].
      q_K: probability that a batch names one of them, float64 [K].
    """

    rows_K: np.ndarray
    q_K: np.ndarray

    @property
    def named(self) -> float:
        """Distinct rows that a batch names, the mean."""
        return float((self.rows_K * self.q_K).sum())

    @property
    def rows(self) -> float:
        """All rows."""
        return float(self.rows_K.sum())

    def touched(self, steps: float) -> float:
        """Rows that so many batches name, the mean."""
        return float((self.rows_K * -np.expm1(steps * np.log1p(-self.q_K))).sum())


def together(classes: Sequence[Classes]) -> Classes:
    """The rows of several tables."""
    return Classes(np.concatenate([c.rows_K for c in classes]), np.concatenate([c.q_K for c in classes]))


def without_first(classes: Classes, rows: int) -> Classes:
    """The rows of a table but for those, so many, that batches name most."""
    order_K = np.argsort(-classes.q_K, kind="stable")
    rows_K = classes.rows_K[order_K]
    gone_K = np.clip(rows - (np.cumsum(rows_K) - rows_K), 0, rows_K)
    return Classes(rows_K - gone_K, classes.q_K[order_K])


@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache in its steady state.

    Attributes:
      classes: of the rows that share it.
      within: G, batches within which a row has to come back to be found; infinite if all rows are there.
      ahead: L, as far as it is of use.
    """

    classes: Classes
    within: float
    ahead: float

    @property
    def misses(self) -> float:
        """Rows that a batch names which are not there, the mean."""
        return _later(self.classes, self.within)

    def misses_of(self, steps: int) -> float:
        """The same for all of so many batches, the first of which finds an empty cache."""
        whole = min(steps, math.floor(self.within)) if self.within < math.inf else steps
        return self.classes.touched(whole) + (steps - whole) * self.misses

    def rows_of(self, classes: Classes) -> float:
        """Rows of one of its tables that are there, the mean."""
        return _there(classes, self.within, self.ahead)

    def behind(self, slots: float) -> float:
        """Batches within which a row has to come back to be in this cache or in a memory beyond it.

        The memory has so many slots, and keeps the rows that left the cache last (`tiers.clock`).
        """
        classes = self.classes
        if self.within == math.inf:
            return math.inf
        left_K = classes.q_K * _power(classes.q_K, self.within)  # of a row, in a step

        def held(steps: float) -> float:
            return float((classes.rows_K * -np.expm1(steps * np.log1p(-left_K))).sum())

        if slots >= classes.rows:
            return math.inf
        return max(self.within, self.within - self.ahead + solve(held, slots))

    def reads(self, slots: float) -> float:
        """Rows that a batch names which are neither here nor in such a memory: the disk's reads of a step."""
        return _later(self.classes, self.behind(slots))


def cache(classes: Classes, slots: float, ahead: float) -> Cache:
    """A cache of some rows that sees so many batches ahead; `math.inf`: all (Belady)."""
    if slots >= classes.rows:
        return Cache(classes, math.inf, 0.0)
    within = solve(lambda steps: _there(classes, steps, min(ahead, steps - 1)), slots, 1.0)
    return Cache(classes, within, max(0.0, min(ahead, within - 1)))


def _power(q_K: np.ndarray, steps: float) -> np.ndarray:
    """(1 - q)^steps."""
    if steps == math.inf:
        return np.where(q_K > 0, 0.0, 1.0)
    power: np.ndarray = np.exp(steps * np.log1p(-q_K))
    return power


def _later(classes: Classes, steps: float) -> float:
    """Rows that a batch names and that none of so many batches before has named."""
    return float((classes.rows_K * classes.q_K * _power(classes.q_K, steps)).sum())


def _there(classes: Classes, within: float, ahead: float) -> float:
    return float((classes.rows_K * (1 - _power(classes.q_K, within) * (1 + max(0.0, ahead) * classes.q_K))).sum())


def solve(held: Callable[[float], float], slots: float, low: float = 0.0) -> float:
    """The number of steps at which a growing function is `slots`; infinite if it never is."""
    high = max(1.0, 2 * low)
    while held(high) < slots:
        high *= 2
        if high > 1e18:
            return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < slots else (low, middle)
    return low


def table_classes(
    source: BlockSource,
    table: TableSpec,
    features: Sequence[FeatureSpec],
    batch_size: int,
    read: Callable[[], Batch],
) -> Classes:
    """The rows of a table by how often batches name them: by the law of synthetic data, else counted.

    Args:
      source: the data.
      table: of the model.
      features: those that look it up.
      batch_size: B.
      read: gives some training samples, in which rows of data without a law are counted; rows that they do not name
        count as never named.
    """
    law = _law(source, table, features, batch_size)
    if law is not None:
        return law
    samples = read()
    ids = np.concatenate([samples.bags[feature.reads].ids.ravel() for feature in features])
    _, counts = np.unique(ids, return_counts=True)
    alike, rows = np.unique(counts, return_counts=True)
    named = -np.expm1(batch_size * np.log1p(-np.minimum(alike / samples.size, 1 - 1e-12)))
    return Classes(np.append(rows, table.rows - rows.sum()).astype(float), np.append(named, 0.0))


def _law(source: BlockSource, table: TableSpec, features: Sequence[FeatureSpec], batch_size: int) -> Classes | None:
    if not isinstance(source, (ZipfStreamSource, SyntheticSource)):
        return None
    from scipy.special import zeta  # no start of a training waits for it

    edges = np.arange(min(table.rows, _HEAD) + 1, dtype=np.float64)
    if table.rows > _HEAD:
        tail = np.unique(np.rint(np.geomspace(_HEAD, table.rows, _BINS + 1)))
        edges = np.append(edges, tail[1:])
    rows_K, middle_K = np.diff(edges), (edges[1:] + edges[:-1]) / 2 + 0.5  # ranks from 1 on
    ids = batch_size * sum(feature.ids for feature in features)
    if isinstance(source, ZipfStreamSource):
        s = source.config.exponent
        p_K = table.rows**-s * zeta(s, middle_K / table.rows) / zeta(s) if s else np.full(len(rows_K), 1 / table.rows)
    else:
        p_K = BoundedZipf(table.rows, source.config.zipf).probability(middle_K)
    return Classes(rows_K, np.minimum(-np.expm1(ids * np.log1p(-np.minimum(p_K, 1 - 1e-12))), 1 - 1e-12))
