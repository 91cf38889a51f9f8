"""A hash map from 64-bit keys to small integers, all of whose operations work on whole arrays.

Open addressing with linear probing (Knuth, The Art of Computer Programming 3, 6.4) over cells of key and value, 16
bytes that are read at once. At most three eighths of the cells are used; then the map is made again. An empty cell has
the value ABSENT. One whose key was removed gets a key in its place that nobody looks for there: one whose search begins
at the next cell. Where a key lies changes no result.
"""

from __future__ import annotations

import numpy as np

from recjax.embedding.routing.keys import distinct

ABSENT = -1  # value of a key that is not there
_REMOVED = -2
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio (Knuth): a product spreads in its upper bits
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)
_LEAST_BITS = 6
_DIGITS = 48  # bits of a hash by which equal keys are brought together


class KeyIndex:
    """The map. Keys are int64, values int32 from 0 on.

    Takes 43 to 86 bytes for each key that it has room for.
    """

    def __init__(self, room: int = 0) -> None:
        """An empty map, which grows when more than `room` keys were added."""
        self._clear(room)

    def _clear(self, room: int) -> None:
        bits = max(_LEAST_BITS, (8 * room // 3).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._cells_Sx2 = np.full((1 << bits, 2), ABSENT, np.int64)
        self._used = 0  # cells that are not empty
        self._length = 0

    def __len__(self) -> int:
        """Keys that are there."""
        return self._length

    def find(self, keys_L: np.ndarray) -> np.ndarray:
        """The values of some keys, int32 [L]; ABSENT of those that are not there. Keys may come repeatedly."""
        at_L = self._home(keys_L)
        cells_Lx2 = self._read(at_L)
        values_L = cells_Lx2[:, 1].astype(np.int32)
        open_M = np.flatnonzero(cells_Lx2[:, 0] != keys_L)
        open_M = open_M[values_L[open_M] != ABSENT]
        at_M, keys_M = at_L[open_M], keys_L[open_M]
        while len(open_M):
            at_M = at_M + 1 & self._mask
            cells_Mx2 = self._read(at_M)
            here_M = cells_Mx2[:, 1]
            values_L[open_M] = here_M  # of another key for now, unless the search ends here
            more = np.flatnonzero((cells_Mx2[:, 0] != keys_M) & (here_M != ABSENT))
            open_M, at_M, keys_M = open_M[more], at_M[more], keys_M[more]
        return values_L

    def add(self, keys_K: np.ndarray, values_K: np.ndarray) -> None:
        """Adds keys that are not there, all different."""
        if not len(keys_K):
            return
        if 8 * (self._used + len(keys_K)) > 3 * len(self._cells_Sx2):
            there = self._cells_Sx2[self._cells_Sx2[:, 1] >= 0]
            self._clear(max(2 * len(there), len(there) + len(keys_K), (self._mask + 1) * 3 // 8 - 1))
            self._write(there[:, 0], there[:, 1])
        self._write(keys_K, values_K)

    def remove(self, keys_K: np.ndarray) -> None:
        """Removes keys that are there, all different."""
        at_K = self._home(keys_K)
        open_M = np.arange(len(keys_K))
        while len(open_M):
            open_M = open_M[self._cells_Sx2[at_K[open_M], 0] != keys_K[open_M]]
            at_K[open_M] = at_K[open_M] + 1 & self._mask
        others = (at_K + 1 & self._mask).view(np.uint64) << self._shift
        self._cells_Sx2[at_K, 0] = (others * np.uint64(_INVERSE)).view(np.int64)
        self._cells_Sx2[at_K, 1] = _REMOVED
        self._length -= len(keys_K)

    def _write(self, keys_K: np.ndarray, values_K: np.ndarray) -> None:
        at_K, open_M = self._home(keys_K), np.arange(len(keys_K))
        while len(open_M):
            at_M = at_K[open_M]
            here = open_M[self._cells_Sx2[at_M, 1] == ABSENT]
            self._cells_Sx2[at_K[here], 0] = keys_K[here]
            self._cells_Sx2[at_K[here], 1] = values_K[here]  # of several in one cell the last one stays, in both
            open_M = open_M[self._cells_Sx2[at_M, 0] != keys_K[open_M]]
            at_K[open_M] = at_K[open_M] + 1 & self._mask
        self._used += len(keys_K)
        self._length += len(keys_K)

    def _home(self, keys_L: np.ndarray) -> np.ndarray:
        """The cell at which the search for each key begins."""
        hashed: np.ndarray = keys_L.view(np.uint64) * np.uint64(_MULTIPLIER) >> self._shift
        return hashed.view(np.int64)

    def _read(self, at_M: np.ndarray) -> np.ndarray:
        """Cells, [M, 2]."""
        cells: np.ndarray = self._cells_Sx2.view(np.complex128).ravel().take(at_M)  # 16 bytes at once
        return cells.view(np.int64).reshape(-1, 2)


def distinct_keys(keys_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Brings equal keys together.

    Args:
      keys_L: int64.

    Returns:
      where each distinct key comes first, ascending: int64 [U]; and for each key the number of its distinct one: int64
      [L].
    """
    hashes_L = keys_L.view(np.uint64) * np.uint64(_MULTIPLIER) >> np.uint64(64 - _DIGITS)
    _, inverse_L = distinct(hashes_L.view(np.int64), 1 << _DIGITS)
    first_U = _first(inverse_L)
    if not np.array_equal(keys_L[first_U][inverse_L], keys_L):  # two have one hash
        _, inverse_L = np.unique(keys_L, return_inverse=True)
        first_U = _first(inverse_L)
    order_U = np.argsort(first_U)
    number_U = np.empty(len(order_U), np.int64)
    number_U[order_U] = np.arange(len(order_U))
    return first_U[order_U], number_U[inverse_L]


def _first(inverse_L: np.ndarray) -> np.ndarray:
    first_U = np.empty(int(inverse_L.max(initial=-1)) + 1, np.int64)
    first_U[inverse_L[::-1]] = np.arange(len(inverse_L) - 1, -1, -1)  # the last one that is written stays
    return first_U
