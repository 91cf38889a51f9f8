"""Arrays of which a part at a time is made or read, so that nobody needs memory for all of one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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


@dataclasses.dataclass(frozen=True)
class Spread:
    """An array of which this process holds some rectangles, or none, and other processes the rest.

    Attributes:
      shape: of the whole array.
      dtype: as of a NumPy array.
      pieces: the least index of each rectangle, and the rectangle.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[tuple[int, ...], LazyArray], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what this process holds."""
        return sum(piece.nbytes for _, piece in self.pieces)


def joined(
    shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[tuple[tuple[int, ...], LazyArray]]
) -> LazyArray:
    """The whole array of its rectangles.

    Raises:
      ValueError: they do not cover it once.
    """
    boxes = [[(at, at + n) for at, n in zip(corner, piece.shape, strict=True)] for corner, piece in pieces]
    inside = all(a >= 0 and z <= n for box in boxes for (a, z), n in zip(box, shape, strict=True))
    apart = all(
        any(z <= b or y <= a for (a, z), (b, y) in zip(one, other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )
    if sum(math.prod(piece.shape) for _, piece in pieces) != math.prod(shape) or not (inside and apart):
        raise ValueError(f"its pieces do not make up an array of shape {shape}")

    def read(index: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in index], dtype)
        for corner, piece in pieces:
            ends = (at + length for at, length in zip(corner, piece.shape, strict=True))
            spans = [(max(i.start, at), min(i.stop, end)) for i, at, end in zip(index, corner, ends, strict=True)]
            if all(start < stop for start, stop in spans):
                inside = tuple(slice(a - i.start, z - i.start) for (a, z), i in zip(spans, index, strict=True))
                there = tuple(slice(a - at, z - at) for (a, z), at in zip(spans, corner, strict=True))
                out[inside] = piece.read(there)
        return out

    return LazyArray(shape, dtype, read, block_of(shape, dtype))


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
    made: dict[str, Any] = {}
    for key, value in arrays.items():
        if isinstance(value, dict):
            made[key] = load(value)
        elif isinstance(value, Spread):
            pieces = tuple((at, as_lazy(piece.load())) for at, piece in value.pieces)
            made[key] = dataclasses.replace(value, pieces=pieces)
        else:
            made[key] = value.load() if isinstance(value, LazyArray) else value
    return made


def block_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The block in which an array is kept: whole rows, cut evenly into as few as PART_BYTES allow.

    Even, because the store fills up the last block: its padding stays below one row for each block.
    """
    if not shape:
        return ()
    size = math.prod(shape) * dtype.itemsize
    return (max(1, -(-shape[0] // max(1, -(-size // PART_BYTES)))), *(max(1, length) for length in shape[1:]))
