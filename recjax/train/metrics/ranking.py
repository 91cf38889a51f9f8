"""Measures of the best K items that were found for each user, against the items that were right.

As ranx has them (https://github.com/AmenRA/ranx), with binary relevance. Of R right items, for a list of K:

  recall    hits among the K / R
  hit       1 if there is any hit, else 0
  ndcg      sum over hits of 1 / log2(rank + 1), over what min(K, R) hits in front would give
  mrr       1 / rank of the first hit; 0 without one
  map       sum over hits of (hits up to this rank / rank), / R
  coverage  share of all items that are in the list of any user

Each is the mean over the users, but for the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Ranking:
    """Sums of the measures over users, who come in any number of parts."""

    def __init__(self, cutoffs: Sequence[int], rows: int) -> None:
        """Starts without users.

        Args:
          cutoffs: values of K.
          rows: largest item + 1.
        """
        self.cutoffs = tuple(cutoffs)
        self.users = 0
        self._sums = {f"{name}@{k}": 0.0 for k in self.cutoffs for name in ("recall", "ndcg", "hit", "mrr", "map")}
        self._listed = {k: np.zeros(rows, bool) for k in self.cutoffs}

    def add(self, items_UxK: np.ndarray, hits_UxK: np.ndarray, right_U: np.ndarray) -> None:
        """Takes in further users.

        Args:
          items_UxK: the items, best first; -1 where there are no more. K is the largest of the cutoffs.
          hits_UxK: which of them are right, bool.
          right_U: the number of items that are right, at least 1, whether they were found or not.
        """
        K = items_UxK.shape[1]
        rank_K = np.arange(1, K + 1)
        gain_K = 1 / np.log2(rank_K + 1)
        ideal_K = np.cumsum(gain_K)
        so_far_UxK = np.cumsum(hits_UxK, axis=1)
        self.users += len(right_U)
        for k in self.cutoffs:
            hits_Uxk, so_far_Uxk = hits_UxK[:, :k], so_far_UxK[:, :k]
            number_U = hits_Uxk.sum(axis=1)
            first_U = np.where(number_U > 0, np.argmax(hits_Uxk, axis=1) + 1, np.inf)
            values = {
                "recall": number_U / right_U,
                "ndcg": hits_Uxk @ gain_K[:k] / ideal_K[np.minimum(right_U, k) - 1],
                "hit": number_U > 0,
                "mrr": 1 / first_U,
                "map": np.where(hits_Uxk, so_far_Uxk / rank_K[:k], 0).sum(axis=1) / right_U,
            }
            for name, value_U in values.items():
                self._sums[f"{name}@{k}"] += float(value_U.sum(dtype=np.float64))
            listed = items_UxK[:, :k].ravel()
            self._listed[k][listed[listed >= 0]] = True

    def result(self, items: int) -> dict[str, float]:
        """The measures, as NAME@K; NaN without users. `items` is how many there are to choose from."""
        means = {name: value / self.users if self.users else float("nan") for name, value in self._sums.items()}
        return means | {f"coverage@{k}": float(self._listed[k].sum()) / max(1, items) for k in self.cutoffs}
