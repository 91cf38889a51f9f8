"""Zipf-distributed ids over any number of rows, without a table of that size."""

from __future__ import annotations

import numpy as np

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
