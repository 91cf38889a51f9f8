"""Counts of every value, however many there are: sorted runs, on disk if need be, merged by ranges of values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recjax.data.prepare import short_text
from recjax.utils.npy import map_array

_SLICE = 1 << 22  # entries merged at once
_SAMPLES = 256  # of every run, to cut all of them into ranges of similar size

Run = tuple[np.ndarray, np.ndarray]  # distinct values, ascending, and their counts (int64), both [n]


class Counter:
    """Adds up counts of values. Memory is bounded by `memory_entries` and by the result.

    What exceeds it is merged into a sorted run on disk (a sort-merge aggregation; Knuth, TAOCP vol. 3, 5.4).
    """

    def __init__(self, folder: Path, memory_entries: int = 1 << 24) -> None:
        """Starts with nothing.

        Args:
          folder: an existing folder for runs, which the caller removes.
          memory_entries: (value, count) pairs to hold before a run is written.
        """
        self._folder, self._limit = folder, memory_entries
        self._pending: list[Run] = []
        self._held = 0
        self._spilled: list[Run] = []

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Adds counts, integers [n], of values [n], distinct and ascending; values of count 0 are dropped."""
        seen = counts > 0
        if not seen.all():
            values, counts = values[seen], counts[seen]
        if len(values) == 0:
            return
        self._pending.append((values, counts))
        self._held += len(values)
        if self._held > self._limit:
            merged = merge(self._pending)
            self._pending, self._held = [merged], len(merged[0])
            if self._held > self._limit // 2:  # merging has not helped enough to be worth repeating soon
                self._spilled.append(self._spill(merged))
                self._pending, self._held = [], 0

    def total(self, min_count: int = 1) -> Run:
        """All values that occur at least `min_count` times."""
        return merge([*self._spilled, *self._pending], min_count)

    def _spill(self, run: Run) -> Run:
        """The same run, on disk."""
        saved = []
        for name, array in zip(("values", "counts"), run, strict=True):
            file = self._folder / f"run{len(self._spilled)}.{name}.npy"
            np.save(file, array, allow_pickle=False)
            saved.append(map_array(file))
        return saved[0], saved[1]


def merge(runs: Sequence[Run], min_count: int = 1) -> Run:
    """One run with the summed counts of all, of the values whose sum is at least `min_count`."""
    runs = [run for run in runs if len(run[0])]
    if not runs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if all(short_text.is_short(values.dtype) for values, _ in runs):
        width = max((values.dtype for values, _ in runs), key=lambda dtype: dtype.itemsize)
        values, counts = _merge([(short_text.numbers(values), counts) for values, counts in runs], min_count)
        return short_text.texts(values, width), counts
    return _merge(runs, min_count)


def _merge(runs: Sequence[Run], min_count: int) -> Run:
    slices = -(-sum(len(values) for values, _ in runs) // _SLICE)
    samples = np.sort(np.concatenate([values[:: -(-len(values) // _SAMPLES)] for values, _ in runs]))
    pivots = samples[np.arange(1, slices) * len(samples) // slices]
    cuts = [np.concatenate([[0], np.searchsorted(values, pivots), [len(values)]]) for values, _ in runs]
    merged = []
    for i in range(slices):
        parts = [(v[cut[i] : cut[i + 1]], c[cut[i] : cut[i + 1]]) for (v, c), cut in zip(runs, cuts, strict=True)]
        values, counts = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        order = np.argsort(values, kind="stable")  # merges the sorted runs that it finds
        values, counts = values[order], counts[order]
        first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
        sums = np.add.reduceat(counts, first, dtype=np.int64) if len(first) else np.zeros(0, np.int64)
        keep = sums >= min_count
        merged.append((values[first[keep]], sums[keep]))
    return np.concatenate([values for values, _ in merged]), np.concatenate([counts for _, counts in merged])
