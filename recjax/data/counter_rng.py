"""Random numbers that are a pure function of where they are used: (seed, purpose, place).

Everything is computed from the raw 64-bit output of the Philox4x64-10 counter generator (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). NumPy promises that stream for good, which it does not
for `Generator.permutation` or `Generator.random`; so neither the order of the samples nor the synthetic data
change with the NumPy version.
"""

from __future__ import annotations

import numpy as np


def bits(count: int, seed: int, purpose: int, *place: int) -> np.ndarray:
    """`count` random 64-bit words.

    Args:
      count: how many.
      seed: any integer; taken modulo 2^64.
      purpose: a small constant of the caller, so that two uses of one seed are independent.
      *place: up to three non-negative integers, for example (epoch, window).

    Returns:
      uint64 [count].
    """
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(place)] = place  # word 0 counts within the stream
    key = np.array([seed % 2**64, purpose], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniform(count: int, seed: int, purpose: int, *place: int) -> np.ndarray:
    """`count` numbers uniform on [0, 1): float64 [count], multiples of 2^-53. Arguments as `bits`."""
    return (bits(count, seed, purpose, *place) >> np.uint64(11)) * 2.0**-53


def permutation(count: int, seed: int, purpose: int, *place: int) -> np.ndarray:
    """A uniformly random order of 0..count-1: int64 [count]. Arguments as `bits`."""
    words = bits(count, seed, purpose, *place)
    # A third of a stable sort's time where NumPy has vector code, and the same order unless words are equal.
    order = np.argsort(words)
    ordered = words[order]
    return np.argsort(words, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order
