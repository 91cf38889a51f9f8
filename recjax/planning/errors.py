"""Errors of predicted times against measured ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from recjax.planning.machine import HeldOut


def of_pairs(pairs: Sequence[tuple[float, float]]) -> HeldOut:
    """The error of predictions.

    Ratios are stricter than GMAE, the measure of Lin et al. (arXiv:2201.07821), a geometric mean of relative errors:
    that goes to 0 with one lucky hit, and is the lesser number also otherwise.

    Args:
      pairs: (predicted, measured), one at least, all positive.
    """
    logs = np.abs(np.log([predicted / measured for predicted, measured in pairs]))
    relative = [max(abs(predicted / measured - 1), 1e-9) for predicted, measured in pairs]
    p50, p90 = np.percentile(np.exp(logs), [50, 90])
    gmae = math.exp(float(np.mean(np.log(relative))))
    return HeldOut(len(pairs), float(np.exp(logs.mean())), float(p50), float(p90), gmae)
