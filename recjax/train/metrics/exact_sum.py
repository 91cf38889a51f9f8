"""Sums that depend on neither the order of their terms nor on who added which."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from recjax.train.metrics.samples import Gather

_LEAST = 1073 + 53  # a finite float64 is a whole multiple of 2**-_LEAST
_HALF = 26  # bits of the lower part of a mantissa
_AT_ONCE = 2**25  # terms whose parts of 27 bits add up exactly in a float64


class ExactSum:
    """The sum of float64 terms as one large integer, rounded once in the end.

    (The long accumulator of Kulisch, "Computer Arithmetic and Validity", chapter 8, in Python's integers.) Terms that
    are not finite are added up apart.
    """

    def __init__(self) -> None:
        """Begins without terms."""
        self._units = 0  # of 2**-_LEAST
        self._infinite = 0.0

    def add(self, terms: ArrayLike) -> None:
        """Adds terms of any shape."""
        terms_n = np.asarray(terms, np.float64).ravel()
        finite = np.isfinite(terms_n)
        if not finite.all():
            self._infinite += float(np.sum(terms_n[~finite]))
            terms_n = terms_n[finite]
        for start in range(0, len(terms_n), _AT_ONCE):
            parts, exponents = np.frexp(terms_n[start : start + _AT_ONCE])
            mantissas = np.ldexp(parts, 53).astype(np.int64)
            at = exponents + (_LEAST - 53)  # 0 or more
            high, low = np.bincount(at, mantissas >> _HALF), np.bincount(at, mantissas & (2**_HALF - 1))
            for exponent in np.flatnonzero((high != 0) | (low != 0)).tolist():
                self._units += ((int(high[exponent]) << _HALF) + int(low[exponent])) << exponent

    def join(self, gather: Gather) -> None:
        """Adds what all processes have added; each calls it."""
        size = (self._units.bit_length() + 8) // 8
        of_all = gather(np.frombuffer(self._units.to_bytes(size, "little", signed=True), np.uint8))
        self._units = sum(int.from_bytes(units.tobytes(), "little", signed=True) for units in of_all)
        self._infinite = float(np.sum(gather(np.array([self._infinite]))))

    def __float__(self) -> float:
        """The sum, to the nearest float64; infinite where it is beyond these."""
        if self._infinite != 0:  # NaN, too
            return self._infinite
        try:
            return float(Fraction(self._units, 2**_LEAST))
        except OverflowError:
            return float("inf") if self._units > 0 else float("-inf")
