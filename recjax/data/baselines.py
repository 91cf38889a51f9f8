"""What simple means reach on the test split: the bar that a model has to clear."""

from __future__ import annotations

import numpy as np

from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.data.synthetic.clicks import SyntheticSource, best_auc

_SHRINKAGE = 5.0  # ratings at the global mean that every user and movie is given in advance


def references(source: BlockSource) -> dict[str, float]:
    """Test AUCs to compare a model with, by name; empty if there are none.

    For synthetic data it is the best possible one. For prepared data they are the dataset's baselines, which are
    computed when the data are prepared: they use raw ids, while the prepared ones have rare values merged.
    """
    if isinstance(source, PreparedSource):
        return dict(source.about.get("baselines", {}))
    if isinstance(source, SyntheticSource) and source.row_counts("test").sum() > 1:
        return {"best possible": best_auc(source, "test")}
    return {}


def mean_baselines(users: np.ndarray, movies: np.ndarray, labels: np.ndarray, known: int) -> dict[str, float]:
    """AUC of per-movie means, per-user means and their sum on the rows after the first `known`.

    A mean is over the first `known` labels (training and validation), shrunk to the global mean as if 5 more labels
    of that value had been seen; an unseen id gets the global mean.

    Args:
      users: raw user ids, integers [n], in the order of time.
      movies: raw movie ids, integers [n].
      labels: 0 or 1, [n].
      known: rows whose labels may be used.

    Returns:
      name -> AUC; empty if the rest has no row or only one class.
    """
    rest = labels[known:]
    if known == 0 or len(rest) == 0 or rest.min() == rest.max():
        return {}
    movie = _shrunk_means(movies, labels, known)
    user = _shrunk_means(users, labels, known)
    return {
        "per-movie mean": auc(rest, movie),
        "per-user mean": auc(rest, user),
        "per-movie + per-user mean": auc(rest, movie + user),
    }


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of (positive, negative) pairs that the scores put in the right order; a tie counts half."""
    positives, negatives = scores[labels == 1], np.sort(scores[labels == 0])
    below = np.searchsorted(negatives, positives, "left") + np.searchsorted(negatives, positives, "right")
    return float(below.sum() / (2 * len(positives) * len(negatives)))


def _shrunk_means(ids: np.ndarray, labels: np.ndarray, known: int) -> np.ndarray:
    """The mean of each later row's id: float64 [n - known]."""
    _, dense_ids = np.unique(ids, return_inverse=True)
    seen = dense_ids[:known]
    sums = np.bincount(seen, labels[:known], minlength=dense_ids.max() + 1)
    counts = np.bincount(seen, minlength=dense_ids.max() + 1)
    means = (sums + _SHRINKAGE * labels[:known].mean(dtype=np.float64)) / (counts + _SHRINKAGE)
    return means[dense_ids[known:]]
