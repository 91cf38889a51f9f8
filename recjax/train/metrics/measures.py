"""Exact quality measures of a binary classifier, from its logits, in float64 on the host.

All of them take labels 0 or 1 of shape [n], scores or logits of shape [n], and optional
non-negative sample weights of shape [n] (None: all 1). A sample of weight 0, such as a padding
row, counts nowhere. A measure that has no value, such as the AUC of a single class, is nan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recjax.errors import DataError, TrainingError

_Floats = NDArray[np.float64]


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
    return _auc(*checked_samples(labels_n, scores_n, weights_n))


def log_loss(labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike | None = None) -> float:
    """Weighted mean cross-entropy in nats: sum(w * l) / sum(w), l = ln(1 + e^-x) or ln(1 + e^x).

    Never rounds a probability to 0 or 1, so that it is accurate for logits of any size.

    Args:
      labels_n: 0 or 1, [n].
      logits_n: natural-log odds of label 1, [n].
      weights_n: as for `auc`.

    Returns:
      A value >= 0; nan when the weights sum to 0.

    Raises:
      TrainingError, DataError: as for `auc`.
    """
    return _log_loss(*checked_samples(labels_n, logits_n, weights_n))


def normalized_entropy(labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike | None = None) -> float:
    """Log loss over the entropy of the weighted base rate; below 1 beats predicting the base rate.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014,
    equation 1. Arguments and errors as for `log_loss`; nan when one of the two classes is missing.
    """
    return _normalized_entropy(*checked_samples(labels_n, logits_n, weights_n))


def calibration(labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike | None = None) -> float:
    """Expected over observed positives: sum(w * sigmoid(x)) / sum(w * y); 1 is calibrated.

    Source: He et al. 2014, as for `normalized_entropy`. Arguments and errors as for `log_loss`; nan
    when no positive has weight.
    """
    return _calibration(*checked_samples(labels_n, logits_n, weights_n))


def evaluate(labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike | None = None) -> dict[str, float]:
    """All measures at once.

    Args:
      labels_n: 0 or 1, [n].
      logits_n: natural-log odds of label 1, [n].
      weights_n: as for `auc`.

    Returns:
      `auc`, `logloss`, `ne`, `calibration`, and `samples`, the number of samples with weight above 0
      (an int). What has no value is nan.

    Raises:
      TrainingError, DataError: as for `auc`.
    """
    checked = checked_samples(labels_n, logits_n, weights_n)
    return {
        "auc": _auc(*checked),
        "logloss": _log_loss(*checked),
        "ne": _normalized_entropy(*checked),
        "calibration": _calibration(*checked),
        "samples": len(checked[0]),
    }


def group_aucs(
    labels_n: ArrayLike, scores_n: ArrayLike, groups_n: ArrayLike, weights_n: ArrayLike | None = None
) -> tuple[NDArray[np.int64], _Floats, _Floats]:
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
    positive_w, negative_w = (weights * labels)[order], (weights * (1 - labels))[order]
    new_group = np.concatenate(([True], groups[1:] != groups[:-1]))
    # Ties first, as in `_auc`; `first_tie` is then where each group begins among them.
    ties = np.flatnonzero(new_group | np.concatenate(([True], scores[1:] != scores[:-1])))
    tie_positives, tie_negatives = np.add.reduceat(positive_w, ties), np.add.reduceat(negative_w, ties)
    first_tie = np.flatnonzero(new_group[ties])
    before = np.cumsum(tie_negatives) - tie_negatives
    below = before - np.repeat(before[first_tie], np.diff(first_tie, append=len(ties)))
    won = np.add.reduceat(tie_positives * (below + tie_negatives / 2), first_tie)
    positives, negatives = np.add.reduceat(tie_positives, first_tie), np.add.reduceat(tie_negatives, first_tie)
    pairs = positives * negatives
    aucs = np.divide(won, pairs, out=np.full(len(won), np.nan), where=pairs > 0)
    return groups[new_group], aucs, positives + negatives


def _auc(labels_n: _Floats, scores_n: _Floats, weights_n: _Floats) -> float:
    positives = float(np.sum(weights_n * labels_n))
    negatives = float(np.sum(weights_n * (1 - labels_n)))
    if positives == 0 or negatives == 0:
        return float("nan")
    order = np.argsort(scores_n)
    sorted_scores = scores_n[order]
    positive_w, negative_w = (weights_n * labels_n)[order], (weights_n * (1 - labels_n))[order]
    # One group per distinct score; a positive gains the negatives of all lower groups and half of its own.
    starts = np.flatnonzero(np.concatenate(([True], sorted_scores[1:] != sorted_scores[:-1])))
    group_positives = np.add.reduceat(positive_w, starts)
    group_negatives = np.add.reduceat(negative_w, starts)
    below = np.cumsum(group_negatives) - group_negatives
    return float(np.sum(group_positives * (below + group_negatives / 2)) / (positives * negatives))


def _log_loss(labels_n: _Floats, logits_n: _Floats, weights_n: _Floats) -> float:
    if len(labels_n) == 0:
        return float("nan")
    return float(np.sum(weights_n * losses(labels_n, logits_n)) / np.sum(weights_n))


def _normalized_entropy(labels_n: _Floats, logits_n: _Floats, weights_n: _Floats) -> float:
    base = entropy(float(np.sum(weights_n * labels_n)), float(np.sum(weights_n * (1 - labels_n))))
    return float(_log_loss(labels_n, logits_n, weights_n) / base)


def _calibration(labels_n: _Floats, logits_n: _Floats, weights_n: _Floats) -> float:
    positives = float(np.sum(weights_n * labels_n))
    if positives == 0:
        return float("nan")
    return float(np.sum(weights_n * probabilities(logits_n)) / positives)


def losses(labels_n: _Floats, logits_n: _Floats) -> _Floats:
    """Cross-entropy of each sample in nats, [n]."""
    return np.asarray(np.logaddexp(0.0, (1 - 2 * labels_n) * logits_n))


def probabilities(logits_n: _Floats) -> _Floats:
    """The predicted probability of label 1, sigmoid(x), [n]."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits_n)))


def entropy(positives: float, negatives: float) -> float:
    """Entropy in nats of a label that is 1 for `positives` out of both together; nan when either is 0."""
    if positives == 0 or negatives == 0:
        return float("nan")
    # By the rarer class, so that a rate close to 1 loses no digits.
    rate = min(positives, negatives) / (positives + negatives)
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def checked_samples(
    labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None, first: int = 0
) -> tuple[_Floats, _Floats, _Floats]:
    """The three as float64 [n], without the samples of weight 0.

    Args:
      labels: 0 or 1, [n].
      scores: finite, [n].
      weights: non-negative, [n]; None weighs all samples 1.
      first: number of the first sample, for messages.

    Raises:
      TrainingError, DataError: as for `auc`.
    """
    labels_n, scores_n = np.asarray(labels, np.float64), np.asarray(scores, np.float64)
    weights_n = np.ones_like(labels_n) if weights is None else np.asarray(weights, np.float64)
    if labels_n.ndim != 1 or scores_n.shape != labels_n.shape or weights_n.shape != labels_n.shape:
        raise TrainingError(
            f"evaluation: labels have shape {labels_n.shape}, logits {scores_n.shape} and weights "
            f"{weights_n.shape}, but all three must be one vector of the same length. A model must return one "
            "logit per sample, of shape [n]."
        )
    if not np.isfinite(scores_n).all():
        row = int(np.argmax(~np.isfinite(scores_n)))
        raise TrainingError(
            f"evaluation: the logit of sample {first + row} is {scores_n[row]} ({int((~np.isfinite(scores_n)).sum())} "
            f"of {scores_n.size} are not finite). The model has diverged: go back to an earlier checkpoint and lower "
            "the learning rate."
        )
    if not np.isin(labels_n, (0, 1)).all():
        row = int(np.argmax(~np.isin(labels_n, (0, 1))))
        raise DataError(
            f"evaluation: the label of sample {first + row} is {labels_n[row]}, but these measures are defined for "
            "labels 0 and 1 only. Correct the label column and prepare the data again."
        )
    if not (np.isfinite(weights_n) & (weights_n >= 0)).all():
        row = int(np.argmax(~(np.isfinite(weights_n) & (weights_n >= 0))))
        raise DataError(
            f"evaluation: the weight of sample {first + row} is {weights_n[row]}; weights must be finite and not "
            "negative. Correct the weight column and prepare the data again."
        )
    counted = weights_n > 0
    if not counted.all():
        labels_n, scores_n, weights_n = labels_n[counted], scores_n[counted], weights_n[counted]
    return labels_n, scores_n, weights_n
