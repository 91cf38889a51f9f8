"""Smoothing against surfaces that are known."""

import numpy as np
import pytest
import scipy.optimize

from recjax.lab.calibrate.smoothing import _distinct, _Surface, smooth_us, smoothed


def grid(*axes):
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)


LOGS = grid(np.linspace(0, 10, 10), np.linspace(0, 8, 7))
# A kernel's start, and work that goes by both sizes: flat, then rising, with a bend between.
SURFACE = np.logaddexp(LOGS[:, 0] + 0.2 * LOGS[:, 1], 4 + 0.5 * LOGS[:, 1])


@pytest.mark.parametrize("seed", range(3))
def test_times_that_scatter_come_nearer_to_the_surface(seed):
    error = 0.2 * np.random.default_rng(seed).normal(size=len(SURFACE))
    left = smoothed(LOGS, SURFACE + error) - SURFACE
    assert np.abs(left).mean() < np.abs(error).mean() / 2


def test_times_that_do_not_scatter_stay():
    assert np.abs(smoothed(LOGS, SURFACE) - SURFACE).max() < 0.01
    stepped = SURFACE + 0.7 * (LOGS[:, 1] > 5)  # other code from some size on
    assert np.abs(smoothed(LOGS, stepped) - stepped).max() < 0.05


def test_the_derivatives_are_those_of_the_likelihood():
    error = 0.2 * np.random.default_rng(0).normal(size=len(SURFACE))
    surface, expected = _Surface(_distinct(LOGS), SURFACE + error), np.log([0.4, 2.5, 2.5, 0.1])
    for of in (expected, expected + [0.3, -0.5, 0.4, 0.2]):
        numeric = scipy.optimize.approx_fprime(of, lambda of: surface.unlikely(of, expected)[0], 1e-6)
        np.testing.assert_allclose(surface.unlikely(of, expected)[1], numeric, rtol=1e-3, atol=1e-2)


def test_sizes_that_are_all_alike_or_those_of_another_do_not_matter():
    """The rows and columns of square matrices, of which there is one number."""
    error = 0.2 * np.random.default_rng(1).normal(size=len(SURFACE))
    more = np.concatenate([LOGS, LOGS[:, :1] + 2, np.full((len(LOGS), 1), 3.0)], axis=1)
    np.testing.assert_allclose(smoothed(more, SURFACE + error), smoothed(LOGS, SURFACE + error), rtol=1e-9)


def test_few_points_stay_as_they_are_and_no_time_is_below_the_least():
    assert smooth_us([[2.0**e] for e in range(7)], range(1, 8), 1.0, 0.1) == pytest.approx(range(1, 8))
    rising = smooth_us([[2.0**e] for e in range(20)], [0.01] * 10 + [2.0**e for e in range(10)], 0.5, 0.05)
    assert min(rising) >= 0.05 and rising[-1] == pytest.approx(2**9, rel=0.3)
