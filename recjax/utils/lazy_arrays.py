"""Arrays of which a part at a time is made or read, so that nobody needs memory for all of one."""

from __future__ import annotations

import dataclasses
import functools
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
class Runs:
    """The place of a piece of an array that has scattered rows of it, one after the other.

    Attributes:
      rows_Kx2: int64, the first row of each run of rows and the one after its last; ascending, with rows between them.
      corner: least index on all axes but the first.
    """

    rows_Kx2: np.ndarray
    corner: tuple[int, ...]

    @functools.cached_property
    def before_K(self) -> np.ndarray:
        """Rows of the piece before those of each run, and all in the end, int64 [K+1]."""
        return np.concatenate([[0], np.cumsum(np.diff(self.rows_Kx2, axis=1)[:, 0])])

    def within(self, start: int, stop: int) -> tuple[slice, np.ndarray]:
        """The rows of the piece that lie in [start, stop) of the array, and their places there, counted from start."""
        first_K, last_K = self.rows_Kx2.T
        some = slice(int(np.searchsorted(last_K, start, "right")), int(np.searchsorted(first_K, stop, "left")))
        begin_M, length_M = np.maximum(first_K[some], start), np.minimum(last_K[some], stop)
        length_M = length_M - begin_M
        if not len(length_M):
            return slice(0, 0), np.zeros(0, np.int64)
        at = int(self.before_K[some][0] + begin_M[0] - first_K[some][0])
        count, ahead_M = int(length_M.sum()), np.cumsum(length_M) - length_M
        return slice(at, at + count), np.repeat(begin_M - start - ahead_M, length_M) + np.arange(count)


Place = tuple[int, ...] | Runs  # of a piece of an array: the least index of a rectangle, or several runs of rows


@dataclasses.dataclass(frozen=True)
class Spread:
    """An array of which this process holds some pieces, or none, and other processes the rest.

    Attributes:
      shape: of the whole array.
      dtype: as of a NumPy array.
      pieces: the place of each piece, and the piece.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[Place, LazyArray], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what this process holds."""
        return sum(piece.nbytes for _, piece in self.pieces)


def joined(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[tuple[Place, LazyArray]]) -> LazyArray:
    """The whole array of its pieces.

    Raises:
      ValueError: they do not cover it once.
    """
    boxes = [_box(at, piece) for at, piece in pieces]
    inside = all(a >= 0 and z <= n for box in boxes for (a, z), n in zip(box, shape, strict=True))
    apart = all(
        any(z <= b or y <= a for (a, z), (b, y) in zip(boxes[one], boxes[other], strict=True))
        or not _share_rows(pieces[one], pieces[other])
        for one, other in itertools.combinations(range(len(pieces)), 2)
    )
    fitting = all(at.before_K[-1] == piece.shape[0] for at, piece in pieces if isinstance(at, Runs))
    fitting &= sum(math.prod(piece.shape) for _, piece in pieces) == math.prod(shape)
    if not (inside and apart and fitting):
        raise ValueError(f"its pieces do not make up an array of shape {shape}")

    def read(index: Index) -> np.ndarray:
        out = np.empty([axis.stop - axis.start for axis in index], dtype)
        for (at, piece), box in zip(pieces, boxes, strict=True):
            spans = [(max(i.start, a), min(i.stop, z)) for i, (a, z) in zip(index, box, strict=True)]
            if any(start >= stop for start, stop in spans):
                continue
            to: list[Any] = [slice(a - i.start, z - i.start) for (a, z), i in zip(spans, index, strict=True)]
            there = [slice(a - first, z - first) for (a, z), (first, _) in zip(spans, box, strict=True)]
            if isinstance(at, Runs):
                there[0], to[0] = at.within(index[0].start, index[0].stop)
            if not there or there[0].start < there[0].stop:
                out[tuple(to)] = piece.read(tuple(there))
        return out

    return LazyArray(shape, dtype, read, block_of(shape, dtype))


def chosen_rows(array: LazyArray, rows_K: np.ndarray) -> LazyArray:
    """Some rows of an array, int [K], ascending; each block that has one is read by itself."""
    shape = (len(rows_K), *array.shape[1:])

    def read(index: Index) -> np.ndarray:
        some_K, size = rows_K[index[0]], array.block[0]
        out = np.empty([axis.stop - axis.start for axis in index], array.dtype)
        starts = np.flatnonzero(np.diff(some_K // size, prepend=-1)).tolist()
        for start, stop in itertools.pairwise([*starts, len(some_K)]):
            first, last = int(some_K[start]), int(some_K[stop - 1]) + 1
            out[start:stop] = array.read((slice(first, last), *index[1:]))[some_K[start:stop] - first]
        return out

    return LazyArray(shape, array.dtype, read, block_of(shape, array.dtype))


def _box(at: Place, piece: LazyArray) -> list[tuple[int, int]]:
    """The smallest box around a piece: its first index on each axis, and the one after its last."""
    if isinstance(at, Runs):
        rows = int(at.rows_Kx2[0, 0]), int(at.rows_Kx2[-1, 1])
        return [rows, *((a, a + n) for a, n in zip(at.corner, piece.shape[1:], strict=True))]
    return [(a, a + n) for a, n in zip(at, piece.shape, strict=True)]


def _share_rows(one: tuple[Place, LazyArray], other: tuple[Place, LazyArray]) -> bool:
    """Returns True if some row is in both pieces."""
    runs = [at.rows_Kx2 if isinstance(at, Runs) else np.array(_box(at, piece)[:1]) for at, piece in (one, other)]
    if not all(run.size for run in runs):
        return True  # numbers, which have no rows
    both_Kx2 = np.concatenate(runs)
    both_Kx2 = both_Kx2[np.argsort(both_Kx2[:, 0], kind="stable")]
    return bool((both_Kx2[1:, 0] < both_Kx2[:-1, 1]).any())


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
