"""Labels, scores and weights as the measures take them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recjax.errors import DataError, TrainingError

Floats = NDArray[np.float64]
Gather = Callable[[np.ndarray], list[np.ndarray]]  # this process's array -> those of all, in the order of the processes


def alone(array: np.ndarray) -> list[np.ndarray]:
    """The `Gather` of a single process."""
    return [array]


def checked_samples(
    labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None, first: int = 0
) -> tuple[Floats, Floats, Floats]:
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
