"""The measures of measures.py for samples that arrive batch by batch: exact, or by a histogram of their logits.

`Exact` keeps every sample; `Binned` keeps sums and a histogram, so that its memory does not grow with the samples, and
says between which two values the true AUC lies. Both have the same methods.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recjax.data.baselines import to_unit_scale
from recjax.train.metrics import measures
from recjax.train.metrics.exact_sum import ExactSum
from recjax.train.metrics.samples import Gather, checked_samples

_Floats = NDArray[np.float64]

BINS = 2**20  # of a histogram of a whole split: logits 6e-5 apart share a bin; 48 MiB
SLICE_BINS = 2**14  # of a slice of it, of which there are many: 0.004 apart; 0.75 MiB
_LARGEST = 32.0  # logits beyond it, either way, share the outermost bins


class Histogram:
    """Samples by logit, in bins of equal width from -32 to 32; the outermost two also hold all beyond.

    Attributes:
      positives: weight of the positive samples of each bin, float64 [bins].
      negatives: that of the negative ones.
      expected: sum over the samples of weight times predicted probability.
      samples: number of samples, int64 [bins].
      lowest: least logit; inf where there is none.
      highest: greatest logit; -inf where there is none.
    """

    def __init__(self, bins: int = BINS) -> None:
        """An empty histogram."""
        self.positives, self.negatives, self.expected = (np.zeros(bins) for _ in range(3))
        self.samples = np.zeros(bins, np.int64)
        self.lowest, self.highest = np.full(bins, np.inf), np.full(bins, -np.inf)

    def add(self, labels_n: _Floats, logits_n: _Floats, weights_n: _Floats) -> None:
        """Counts samples, as `metrics.checked_samples` gives them."""
        bins = len(self.samples)
        # Each operation rounds monotonically, so that a higher logit never lands in a lower bin.
        at = np.floor(logits_n * (bins / (2 * _LARGEST)) + bins / 2)
        index = np.clip(at, 0, bins - 1).astype(np.int64)
        np.add.at(self.positives, index, weights_n * labels_n)
        np.add.at(self.negatives, index, weights_n * (1 - labels_n))
        np.add.at(self.expected, index, weights_n * measures.probabilities(logits_n))
        np.add.at(self.samples, index, 1)
        np.minimum.at(self.lowest, index, logits_n)
        np.maximum.at(self.highest, index, logits_n)

    def join(self, gather: Gather) -> None:
        """Counts the samples of all processes; each calls it."""
        for name in ("positives", "negatives", "expected", "samples"):
            setattr(self, name, np.sum(gather(getattr(self, name)), axis=0))
        self.lowest = np.min(gather(self.lowest), axis=0)
        self.highest = np.max(gather(self.highest), axis=0)

    def auc_bounds(self) -> tuple[float, float]:
        """The least and the greatest AUC that samples with these counts can have; nan when a class is missing.

        A pair of samples in different bins is decided, and so is one in a bin whose samples all have one logit: a tie,
        which counts 1/2. Any other pair within a bin may count from 0 to 1, so that the true value lies between
        counting all of them 0 and all of them 1. Nothing is assumed of how logits spread within a bin. The bounds are
        exact but for the rounding of sums in float64, which whole weights do not suffer.
        """
        positives, negatives = to_unit_scale(self.positives), to_unit_scale(self.negatives)
        pairs = float(positives.sum()) * float(negatives.sum())
        if not pairs:
            return float("nan"), float("nan")
        below = np.cumsum(negatives) - negatives
        within = positives * negatives
        tied = self.lowest == self.highest
        decided = float(np.sum(positives * below + np.where(tied, within / 2, 0)))
        return decided / pairs, (decided + float(np.sum(np.where(tied, 0, within)))) / pairs


class Exact:
    """Keeps every sample: about 120 bytes of memory each at the end."""

    def __init__(self) -> None:
        """Without samples."""
        nothing = np.zeros(0)
        self._parts: list[tuple[_Floats, _Floats, _Floats]] = [(nothing, nothing, nothing)]

    def add(self, labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike, first: int = 0) -> None:
        """Takes samples in; arguments and errors as for `metrics.checked_samples`."""
        self._parts.append(checked_samples(labels_n, logits_n, weights_n, first))

    def join(self, gather: Gather) -> None:
        """Takes the samples of all processes, one process after the other; each calls it."""
        labels, logits, weights = (np.concatenate(gather(column)) for column in self._all())
        self._parts = [(labels, logits, weights)]

    def result(self) -> dict[str, float]:
        """See `metrics.evaluate`."""
        labels, logits, weights = self._all()
        return measures.evaluate(labels, logits, weights)

    def positives(self) -> float:
        """Share of the weight that is of positive samples; nan without samples."""
        labels, _, weights = self._all()
        return _ratio(float(np.sum(weights * labels)), float(np.sum(weights)))

    def histogram(self) -> Histogram:
        """Histogram of all samples."""
        histogram = Histogram()
        for labels, logits, weights in self._parts:
            histogram.add(labels, logits, weights)
        return histogram

    def _all(self) -> tuple[_Floats, _Floats, _Floats]:
        labels, logits, weights = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        return labels, logits, weights


class Binned:
    """Keeps sums and a histogram. All measures but the AUC are exact.

    None depends on the order of the samples, or on which process took which, as long as the weights of a bin add up
    exactly in float64: whole weights do.
    """

    def __init__(self, bins: int = BINS) -> None:
        """Without samples; `bins` of the histogram: the AUC's bounds narrow as it grows."""
        self._histogram = Histogram(bins)
        self._loss, self._expected = ExactSum(), ExactSum()  # of w * l, in nats, and of w * predicted probability

    def add(self, labels_n: ArrayLike, logits_n: ArrayLike, weights_n: ArrayLike, first: int = 0) -> None:
        """Takes samples in; arguments and errors as for `metrics.checked_samples`."""
        labels, logits, weights = checked_samples(labels_n, logits_n, weights_n, first)
        self._loss.add(weights * measures.losses(labels, logits))
        self._expected.add(weights * measures.probabilities(logits))
        self._histogram.add(labels, logits, weights)

    def join(self, gather: Gather) -> None:
        """Takes the samples of all processes; each calls it."""
        for part in (self._loss, self._expected, self._histogram):
            part.join(gather)

    def result(self) -> dict[str, float]:
        """Measures that `metrics.evaluate` gives, and `auc_low` and `auc_high`, between which the true AUC lies.

        `auc` is the middle of the two: the AUC if all samples in a bin had one logit.
        """
        counts = self._histogram
        low, high = counts.auc_bounds()
        positives, negatives = float(counts.positives.sum()), float(counts.negatives.sum())
        loss = _ratio(float(self._loss), positives + negatives)
        return {
            "auc": (low + high) / 2,
            "logloss": loss,
            "ne": _ratio(loss, measures.entropy(positives, negatives)),
            "calibration": _ratio(float(self._expected), positives),
            "samples": int(counts.samples.sum()),
            "auc_low": low,
            "auc_high": high,
        }

    def positives(self) -> float:
        """Share of the weight that is of positive samples; nan without samples."""
        positives = float(self._histogram.positives.sum())
        return _ratio(positives, positives + float(self._histogram.negatives.sum()))

    def histogram(self) -> Histogram:
        """Histogram of all samples."""
        return self._histogram


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")
