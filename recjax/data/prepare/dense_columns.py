"""Dense columns: statistics over the training split, the named transforms, and missing values kept apart."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

DenseTransform = Literal["log1p", "log_shift", "none", "standard"]


@dataclasses.dataclass(frozen=True)
class Line:
    """The transform of one column by constants of its dataset: x becomes (min(x, most) - zero) / unit."""

    zero: float
    unit: float
    least: float | None = None  # less counts as missing
    most: float | None = None


FLOAT32 = "a number of float32 (3.4e38 at most)"  # what a raw value of a dense column must be, in words
_MOST = float(np.finfo(np.float32).max)
_ROWS = 64  # reduced at once
_CACHED_ROWS = 4096  # a whole number of _ROWS, whose float64 values stay in the processor's cache through all passes

Transform = DenseTransform | tuple[Line, ...] | tuple[DenseTransform, ...]  # of all columns, or one for each


@dataclasses.dataclass(frozen=True)
class DenseStats:
    """Statistics of each of K columns, missing values left out; float64 [K] each.

    Attributes:
      count: values.
      mean: their mean; 0 if there are none.
      squares: sum of squared distances from the mean.
      least: the least value; infinity if there are none.
    """

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    least: np.ndarray

    @classmethod
    def of(cls, dense: np.ndarray) -> Self:
        """Statistics of the rows `dense`, floating [n, K], NaN where missing."""
        K = dense.shape[1]
        # Of one column NumPy adds up pairs of pairs, so that its sums would depend on where it is cut.
        step = _CACHED_ROWS if K > 1 else max(1, len(dense))
        starts = range(0, len(dense), step)
        missing, least = np.zeros(K, np.int64), np.full(K, np.inf)
        total, squares = np.zeros(K), np.zeros(K)
        for start in starts:
            values, none = _held(dense[start : start + step])
            missing += _over_rows(np.add, none.astype(np.int64), 0)
            least = np.fmin(least, _over_rows(np.fmin, values, np.inf))
            _clear(values, none)
            total = _added(total, values)
        count = (len(dense) - missing).astype(np.float64)
        mean = total / np.maximum(count, 1)
        for start in starts:
            values, none = _held(dense[start : start + step])
            values -= mean
            values *= values
            _clear(values, none)
            squares = _added(squares, values)
        return cls(count, mean, squares, least)

    def __add__(self, other: Self) -> Self:
        """Statistics of both sets of rows (Chan, Golub, LeVeque, "Updating formulae", 1979)."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        return type(self)(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.count * share,
            np.minimum(self.least, other.least),
        )

    @classmethod
    def total(cls, parts: Iterable[Self], columns: int) -> Self:
        """Statistics of `columns` columns of all parts together, added up in their order, for sums depend on it."""
        return functools.reduce(operator.add, parts, cls.of(np.zeros((0, columns))))

    def of_columns(self, chosen: np.ndarray) -> Self:
        """Statistics of the columns where `chosen`, bool [K], is true."""
        return type(self)(self.count[chosen], self.mean[chosen], self.squares[chosen], self.least[chosen])

    def to_json(self) -> dict[str, list[float | None]]:
        """JSON values; None for an infinite least value."""
        return {
            field.name: [v if np.isfinite(v) else None for v in getattr(self, field.name).tolist()]
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{name: np.array([np.inf if v is None else v for v in column]) for name, column in values.items()})


def _held(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as float64, copied; and where they are missing."""
    values = rows.astype(np.float64)
    return values, np.isnan(values)


def _added(total: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`total` and then each row, in this order: of several columns the sums do not depend on where they are cut.

    Changes the first row of `values`.
    """
    if len(total) == 1:
        return np.asarray(total + values.sum(axis=0))
    values[0] += total
    return np.asarray(values.sum(axis=0))


def _clear(values: np.ndarray, missing: np.ndarray) -> None:
    """`values[missing] = 0`, three times as fast: by a mask of all bits, or none."""
    bits = values.view(f"u{values.itemsize}")
    bits &= missing.astype(bits.dtype) - bits.dtype.type(1)


def _over_rows(ufunc: np.ufunc, x: np.ndarray, initial: float) -> np.ndarray:
    """`ufunc.reduce` over the rows of [n, K], whose order must not matter: many at a time, for K alone is short."""
    n, K = x.shape
    whole = n - n % _ROWS
    wide = ufunc.reduce(x[:whole].reshape(whole // _ROWS, _ROWS * K), axis=0, initial=initial).reshape(_ROWS, K)
    return np.asarray(ufunc.reduce(np.concatenate([wide, x[whole:]]), axis=0, initial=initial))


def fits_float32(values: Any) -> Any:
    """Returns where raw values of dense columns are finite as float32, in which batches hold them.

    Args:
      values: an array, or a number of Python's, of any size.

    Returns:
      bool of the same shape; False also for NaN, which stands for a missing value.
    """
    return abs(values) <= _MOST


@dataclasses.dataclass(frozen=True)
class DenseEncoder:
    """Turns raw dense values into those of a batch.

    A missing value becomes 0 after the transform. With x the raw value:

    * log1p: log(max(x, 0) + 1), as facebookresearch/dlrm.
    * log_shift: log(max(x - m, 0) + 2), m the column's least training value. TorchRec's log(x - m + 2) takes m over
      all columns of a file, so that it differs from file to file.
    * standard: (x - mean) / standard deviation of the column's training values; a constant column is only shifted.
    * none: x.
    * a `Line` for each column, or the name of one of these for each.

    Attributes:
      transform: which.
      indicators: after the K columns follow K more, `NAME_missing`: 1 where the value is missing, else 0.
      stats: over the training split.
    """

    transform: Transform
    indicators: bool
    stats: DenseStats

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        transform: Any = self.transform
        if isinstance(transform, tuple):
            transform = [dataclasses.asdict(each) if isinstance(each, Line) else each for each in transform]
        return {"transform": transform, "indicators": self.indicators, "stats": self.stats.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`, which takes what it knows of more values."""
        transform = values["transform"]
        if isinstance(transform, list):
            transform = tuple(Line(**each) if isinstance(each, dict) else each for each in transform)
        return cls(transform, values["indicators"], DenseStats.from_json(values["stats"]))

    def names(self, raw: Sequence[str]) -> tuple[str, ...]:
        """Names of the columns that `encode` makes out of columns of these names."""
        return (*raw, *(f"{name}_missing" for name in raw)) if self.indicators else tuple(raw)

    def encode(self, dense: np.ndarray) -> np.ndarray:
        """Floating [n, K], NaN where missing, to float32 [n, K], or [n, 2K] with indicators."""
        columns = self.transform if isinstance(self.transform, tuple) else ()
        lines = [line for line in columns if isinstance(line, Line)]
        if lines:
            least, most = (
                np.array([-np.inf if line.least is None else line.least for line in lines]),
                np.array([np.inf if line.most is None else line.most for line in lines]),
            )
            dense = np.where(dense < least, np.nan, np.minimum(dense, most))
        missing = np.isnan(dense)
        if lines:
            out = ((dense - [line.zero for line in lines]) / [line.unit for line in lines]).astype(np.float32)
        elif columns:
            out = np.empty(dense.shape, np.float32)
            for name in dict.fromkeys(columns):
                of = np.array([name == each for each in columns])
                out[:, of] = self._transformed(name, dense[:, of], self.stats.of_columns(of))
        else:
            out = self._transformed(self.transform, dense, self.stats).astype(np.float32)  # a copy
        _clear(out, missing)
        return np.concatenate([out, missing.astype(np.float32)], axis=1) if self.indicators else out

    @staticmethod
    def _transformed(name: Any, dense: np.ndarray, stats: DenseStats) -> np.ndarray:
        """The columns by the transform of a name; of missing values anything."""
        if name == "log1p":
            return np.log1p(np.maximum(dense, 0))
        if name == "log_shift":
            least = np.where(np.isfinite(stats.least), stats.least, 0.0).astype(dense.dtype)
            return np.log(np.maximum(dense - least, 0) + 2)
        if name == "standard":
            deviation = np.sqrt(stats.squares / np.maximum(stats.count, 1))
            apart = dense - stats.mean
            apart /= np.where(deviation > 0, deviation, 1.0)
            return apart
        return dense
