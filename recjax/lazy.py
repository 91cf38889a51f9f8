"""Arrays of which a part at a time is made or read, so that nobody needs memory for all of one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Index = tuple[slice, ...]  # one slice with start and stop for each axis
PART_BYTES = 64 * 2**20  # of an array in memory at a time, about; so much freed at once goes back to the system


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array whose parts are read on demand.

    Attributes:
      shape: as of a NumPy array.
      dtype: as of a NumPy array.
      read: gives one part, as an array that nobody else changes.
      block: shape of the blocks in which it is kept; reading whole ones reads nothing twice.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Index], np.ndarray]
    block: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self) -> Iterator[Index]:
        """Cuts the array into parts of whole blocks and, where blocks allow, at most PART_BYTES."""
        steps, size = list(self.block), math.prod(self.block) * self.dtype.itemsize
        for axis in reversed(range(len(steps))):  # the last axis first, so that parts are contiguous
            length = max(1, self.shape[axis])
            more = max(1, min(PART_BYTES // max(size, 1), -(-length // steps[axis])))
            steps[axis], size = min(steps[axis] * more, length), size * more
        starts = (range(0, length, step) for length, step in zip(self.shape, steps, strict=True))
        for corner in itertools.product(*starts):
            yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, steps, self.shape, strict=True))

    def load(self) -> np.ndarray:
        """The whole array in memory of its own."""
        whole = np.empty(self.shape, self.dtype)
        for part in self.parts():
            whole[part] = self.read(part)
        return whole


def as_lazy(array: np.ndarray | LazyArray) -> LazyArray:
    """A NumPy array in this form; its parts are views of it."""
    if isinstance(array, LazyArray):
        return array

    def part(index: Index) -> np.ndarray:
        whole: Any = array  # NumPy's types do not foresee such an index; its dots keep a scalar an array
        return np.asarray(whole[(*index, ...)])

    return LazyArray(array.shape, array.dtype, part, block_of(array.shape, array.dtype))


def load(arrays: dict[str, Any]) -> dict[str, Any]:
    """A nested dict with every lazy array in memory of its own; NumPy arrays stay what they are."""
    made = {}
    for key, value in arrays.items():
        made[key] = load(value) if isinstance(value, dict) else value.load() if isinstance(value, LazyArray) else value
    return made


def block_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The block in which an array is kept: whole rows, cut evenly into as few as PART_BYTES allow.

    Even, because the store fills up the last block: its padding stays below one row for each block.
    """
    if not shape:
        return ()
    size = math.prod(shape) * dtype.itemsize
    return (max(1, -(-shape[0] // max(1, -(-size // PART_BYTES)))), *(max(1, length) for length in shape[1:]))
