"""The area under the ROC curve, exact: of all samples, and within groups of them.

Where samples are too many to sort, `binned.py` finds two values between which it lies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recjax.data import baselines
from recjax.train.metrics.samples import Floats, checked_samples


def auc(labels_n: ArrayLike, scores_n: ArrayLike, weights_n: ArrayLike | None = None) -> float:
    """Area under the ROC curve: how likely a positive outranks a negative, a tie counting one half.

    Sum over all pairs (positive p, negative q) of w_p * w_q * ([s_p > s_q] + [s_p = s_q] / 2), over
    the sum of w_p * w_q; found by one sort. Without weights it is exact, not an approximation by
    bins. Pass logits rather than probabilities: a sigmoid rounds large logits to equal values and
    so makes ties that the model did not.

    Args:
      labels_n: 0 or 1, [n].
      scores_n: any finite values that rank the samples, [n].
      weights_n: non-negative, [n]; None weighs all samples 1.

    Returns:
      A value in [0, 1]; nan when one of the two classes is missing.

    Raises:
      TrainingError: a score is not finite, or the shapes differ.
      DataError: a label other than 0 and 1, or a negative or non-finite weight.
    """
    labels, scores, weights = checked_samples(labels_n, scores_n, weights_n)
    return baselines.auc(labels, scores, weights)


def group_aucs(
    labels_n: ArrayLike, scores_n: ArrayLike, groups_n: ArrayLike, weights_n: ArrayLike | None = None
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The AUC within every group of samples, such as the impressions of one user; found by one sort.

    Args:
      labels_n: 0 or 1, [n].
      scores_n: any finite values that rank the samples, [n].
      groups_n: integers, equal for the samples of one group, [n].
      weights_n: as for `auc`.

    Returns:
      The G groups that have samples, ascending: int64 [G]; their AUC, nan where one of the two classes is missing,
      [G]; and the sum of their weights, [G].

    Raises:
      TrainingError, DataError: as for `auc`.
    """
    groups = np.asarray(groups_n, np.int64)
    if weights_n is not None:
        groups = groups[np.asarray(weights_n) != 0]  # those that `checked_samples` leaves
    labels, scores, weights = checked_samples(labels_n, scores_n, weights_n)
    if not len(groups):
        return groups, np.zeros(0), np.zeros(0)
    order = np.lexsort((scores, groups))
    groups, scores = groups[order], scores[order]
    labels, weights = labels[order], weights[order]
    new_group = np.concatenate(([True], groups[1:] != groups[:-1]))
    # Those of each group times a power of two, as `baselines.to_unit_scale` does it for all.
    first_row = np.flatnonzero(new_group)
    exponents = np.frexp(np.maximum.reduceat(weights, first_row))[1]
    scaled = np.ldexp(weights, -np.repeat(exponents, np.diff(first_row, append=len(weights))))
    positive_w, negative_w = scaled * labels, scaled * (1 - labels)
    # Ties first, as in `baselines.auc`; `first_tie` is then where each group begins among them.
    ties = np.flatnonzero(new_group | np.concatenate(([True], scores[1:] != scores[:-1])))
    tie_positives, tie_negatives = np.add.reduceat(positive_w, ties), np.add.reduceat(negative_w, ties)
    first_tie = np.flatnonzero(new_group[ties])
    before = np.cumsum(tie_negatives) - tie_negatives
    below = before - np.repeat(before[first_tie], np.diff(first_tie, append=len(ties)))
    won = np.add.reduceat(tie_positives * (below + tie_negatives / 2), first_tie)
    positives, negatives = np.add.reduceat(tie_positives, first_tie), np.add.reduceat(tie_negatives, first_tie)
    pairs = positives * negatives
    aucs = np.divide(won, pairs, out=np.full(len(won), np.nan), where=pairs > 0)
    return groups[new_group], aucs, np.add.reduceat(weights, first_row)
