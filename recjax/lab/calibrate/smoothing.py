"""Smooths measured times over the sizes of a class, since sizes that lie near each other take nearly the same.

A case is measured a few times only, on a machine whose speed may change by a third within a second: a point alone is
no better than that. The logarithms of a class's times are taken for a Gaussian process over the logarithms of its sizes
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006): a linear trend (section 2.7), deviations from
it that are alike for near sizes (Matern 5/2, equation 4.17, with a length for each size) and an error of each point.
Those make the process that under which the measured times are most likely (equation 5.8). So points whose neighbours
agree stay as they are, be the surface steep or not, and those that scatter are drawn to the surface.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.linalg
import scipy.optimize

_FEWEST = 8  # points: of fewer nobody can tell how they scatter
# Deviation of the constant and of each slope of the trend, in logs: nearly any is as likely as another.
_TREND = (5.0, 1.0)
# What is expected, and by how many times it may well be off (e): deviations from the trend, lengths, errors.
_DEVIATION, _LENGTH, _ERROR = 0.4, 2.5, 0.1
_LEAST_ERROR, _MOST_ERROR = 0.01, 1.0


def smoothed(logs_PxS: np.ndarray, log_times_P: np.ndarray) -> np.ndarray:
    """Smooths times.

    Args:
      logs_PxS: float64, logarithms of the sizes of each point.
      log_times_P: float64, logarithms of their times.

    Returns:
      float64 [P], logarithms of the times of the surface at these points; as they are if there are fewer than 8.
    """
    if len(log_times_P) < _FEWEST:
        return log_times_P
    logs_PxS = _distinct(logs_PxS)
    surface = _Surface(logs_PxS, log_times_P)
    S = logs_PxS.shape[1]
    expected = np.log([_DEVIATION, *[_LENGTH] * S, _ERROR])
    bounds = [(-4.0, 2.0), *[(-2.0, 4.0)] * S, (math.log(_LEAST_ERROR), math.log(_MOST_ERROR))]
    best = scipy.optimize.minimize(surface.unlikely, expected, (expected,), jac=True, bounds=bounds, method="L-BFGS-B")
    return surface.at_points(best.x)


def _distinct(logs_PxS: np.ndarray) -> np.ndarray:
    """The sizes that differ among the points, without those that always equal another, about their means."""
    kept: list[np.ndarray] = []
    for logs_P in logs_PxS.T:
        centred_P = logs_P - logs_P.mean()
        if np.ptp(centred_P) > 0 and not any(np.allclose(centred_P, other_P) for other_P in kept):
            kept.append(centred_P)
    return np.stack(kept, axis=1) if kept else np.zeros((len(logs_PxS), 0))


class _Surface:
    """The process of a class, for given logarithms of (deviation, length of each size, error)."""

    def __init__(self, logs_PxS: np.ndarray, log_times_P: np.ndarray) -> None:
        self._squares_SxPxP = (logs_PxS.T[:, :, None] - logs_PxS.T[:, None, :]) ** 2
        basis_PxT = np.concatenate([np.ones((len(logs_PxS), 1)), logs_PxS], axis=1)
        scale_T = np.array([_TREND[0], *[_TREND[1]] * logs_PxS.shape[1]])
        self._trend_PxP = (basis_PxT * scale_T**2) @ basis_PxT.T
        self._mean = float(log_times_P.mean())
        self._rest_P = log_times_P - self._mean

    def _alike(self, of: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Covariance of the deviations [P, P], and its derivatives by the logarithms of all but the error."""
        deviation, lengths_S = math.exp(of[0]), np.exp(of[1:-1])
        apart_SxPxP = self._squares_SxPxP / lengths_S[:, None, None] ** 2
        scaled_PxP = np.sqrt(5 * apart_SxPxP.sum(axis=0))
        decay_PxP = deviation**2 * np.exp(-scaled_PxP)
        alike_PxP = decay_PxP * (1 + scaled_PxP + scaled_PxP**2 / 3)
        by_length = [decay_PxP * (1 + scaled_PxP) * 5 / 3 * apart_PxP for apart_PxP in apart_SxPxP]
        return alike_PxP, [2 * alike_PxP, *by_length]

    def unlikely(self, of: np.ndarray, expected: np.ndarray) -> tuple[float, np.ndarray]:
        """The negative logarithm of the likelihood of the times and of `of` itself, and its derivatives."""
        alike_PxP, derivatives = self._alike(of)
        error2 = math.exp(2 * of[-1])
        P = len(self._rest_P)
        factor = scipy.linalg.cho_factor(alike_PxP + self._trend_PxP + error2 * np.eye(P), lower=True)
        weights_P = scipy.linalg.cho_solve(factor, self._rest_P)
        inverse_PxP = scipy.linalg.cho_solve(factor, np.eye(P))
        value = 0.5 * self._rest_P @ weights_P + np.log(np.diag(factor[0])).sum()
        slopes = [
            0.5 * ((inverse_PxP * d_PxP).sum() - weights_P @ d_PxP @ weights_P)
            for d_PxP in (*derivatives, 2 * error2 * np.eye(P))
        ]
        off = of - expected
        return float(value + 0.5 * (off**2).sum()), np.array(slopes) + off

    def at_points(self, of: np.ndarray) -> np.ndarray:
        """The surface at the points (equation 2.23)."""
        known_PxP = self._alike(of)[0] + self._trend_PxP
        P = len(self._rest_P)
        found_P: np.ndarray = known_PxP @ np.linalg.solve(known_PxP + math.exp(2 * of[-1]) * np.eye(P), self._rest_P)
        return self._mean + found_P


def smooth_us(sizes: Sequence[Sequence[float]], us: Sequence[float], start_us: float, least_us: float) -> list[float]:
    """Smooths the times of a class.

    Args:
      sizes: of each point, all of the same length.
      us: its time, without its start.
      start_us: what starting one takes: below that nobody cares how near a time is.
      least_us: that a time has.
    """
    logs_PxS = np.log(np.maximum(np.array(sizes, float), 1.0))
    smooth_P = np.exp(smoothed(logs_PxS, np.log(start_us + np.array(us, float)))) - start_us
    return np.maximum(smooth_P, least_us).tolist()
