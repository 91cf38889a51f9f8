"""Exact quality measures of a binary classifier, from its logits, in float64 on the host.

All of them take labels 0 or 1 of shape [n], scores or logits of shape [n], and optional
non-negative sample weights of shape [n] (None: all 1). A sample of weight 0, such as a padding
row, counts nowhere. A measure that has no value, such as the AUC of a single class, is nan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from recjax.data import baselines
from recjax.train.metrics.samples import Floats, checked_samples


def evaluate(labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike | None = None) -> dict[str, float]:
    """All measures at once.

    Args:
      labels_n: 0 or 1, [n].
      logits_n: natural-log odds of label 1, [n].
      weights_n: as for `auc`.

    Returns:
      `auc`; `logloss`, the weighted mean cross-entropy in nats, sum(w * l) / sum(w), l = ln(1 + e^-x) or ln(1 + e^x);
      `ne`, that over the entropy of the weighted base rate (He et al., "Practical Lessons from Predicting Clicks on Ads
      at Facebook", ADKDD 2014, equation 1; below 1 beats predicting the base rate); `calibration`, expected over
      observed positives, sum(w * sigmoid(x)) / sum(w * y) (He et al.; 1 is calibrated); and `samples`, the number of
      samples with weight above 0 (an int). What has no value is nan.

    Raises:
      TrainingError, DataError: as for `auc`.
    """
    labels, logits, weights = checked_samples(labels_n, logits_n, weights_n)
    return {
        "auc": baselines.auc(labels, logits, weights),
        "logloss": _log_loss(labels, logits, weights),
        "ne": _normalized_entropy(labels, logits, weights),
        "calibration": _calibration(labels, logits, weights),
        "samples": len(labels),
    }


def _log_loss(labels_n: Floats, logits_n: Floats, weights_n: Floats) -> float:
    if len(labels_n) == 0:
        return float("nan")
    return float(np.sum(weights_n * losses(labels_n, logits_n)) / np.sum(weights_n))


def _normalized_entropy(labels_n: Floats, logits_n: Floats, weights_n: Floats) -> float:
    base = entropy(float(np.sum(weights_n * labels_n)), float(np.sum(weights_n * (1 - labels_n))))
    return _log_loss(labels_n, logits_n, weights_n) / base


def _calibration(labels_n: Floats, logits_n: Floats, weights_n: Floats) -> float:
    positives = float(np.sum(weights_n * labels_n))
    if positives == 0:
        return float("nan")
    return float(np.sum(weights_n * probabilities(logits_n))) / positives


def losses(labels_n: Floats, logits_n: Floats) -> Floats:
    """Cross-entropy of each sample in nats, [n]."""
    return np.asarray(np.logaddexp(0.0, (1 - 2 * labels_n) * logits_n))


def probabilities(logits_n: Floats) -> Floats:
    """The predicted probability of label 1, sigmoid(x), [n]."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits_n)))


def entropy(positives: float, negatives: float) -> float:
    """Entropy in nats of a label that is 1 for `positives` out of both together; nan when either is 0."""
    if positives == 0 or negatives == 0:
        return float("nan")
    # By the rarer class, so that a rate close to 1 loses no digits.
    rate = min(positives, negatives) / (positives + negatives)
    if rate == 0:  # one class outweighs the other beyond what floats tell
        return float("nan")
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))
