"""From raw values to table rows: frequent values get a row each, all others share row 0."""

from __future__ import annotations

import hashlib

import numpy as np


class Vocabulary:
    """Rows of the values that occur often enough, in descending frequency (ties: ascending value).

    Row 0 is out of vocabulary: values seen fewer than `min_count` times, or never. Count on the training split only,
    or the other splits leak into the model.
    """

    def __init__(self, seen: np.ndarray, min_count: int = 1) -> None:
        """Counts `seen`, integers or strings [n], one entry for each occurrence."""
        values, counts = np.unique(seen, return_counts=True)
        keep = counts >= min_count
        values, counts = values[keep], counts[keep]
        rank = np.argsort(-counts, kind="stable")
        self._sorted = values
        self._row_of_sorted = np.empty(len(values), np.int32)
        self._row_of_sorted[rank] = np.arange(1, len(values) + 1)
        self.values = values[rank]  # self.values[i] has row i + 1

    @property
    def rows(self) -> int:
        """V, the rows of a table for this vocabulary: one for each value, and row 0."""
        return len(self.values) + 1

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The row of every value: int32 of the same shape."""
        if len(self._sorted) == 0:
            return np.zeros(np.shape(values), np.int32)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self._sorted) - 1)
        return np.where(self._sorted[at] == values, self._row_of_sorted[at], 0).astype(np.int32)

    def sha256(self) -> str:
        """Hash of the values in the order of their rows: equal hashes mean the same rows for the same values."""
        return hashlib.sha256("\n".join(str(value) for value in self.values).encode()).hexdigest()
