"""From raw values to table rows: frequent values get a row each, all others share row 0."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

import numpy as np

from recjax.data.prepare import short_text
from recjax.utils.npy import map_array

_VALUES, _ROWS = "values.npy", "rows.npy"  # the files of a saved vocabulary


class Vocabulary:
    """Rows of the values that occur often enough, in descending frequency (ties: ascending value).

    Row 0 is out of vocabulary: values seen fewer than `min_count` times, or never. Count on the training split only,
    or the other splits leak into the model.
    """

    def __init__(self, values: np.ndarray, rows: np.ndarray, first_row: int = 1) -> None:
        """A vocabulary of known rows; `counted`, `of` and `load` make one.

        Args:
          values: distinct integers or text (dtype S or U), ascending, [n].
          rows: int32 [n], a permutation of first_row .. first_row + n - 1.
          first_row: the rows before it belong to no value.
        """
        self._sorted, self._row_of_sorted, self._first_row = values, rows, first_row
        self._numbers: np.ndarray | None = None  # the values as `short_text.numbers`, once they are searched

    @classmethod
    def counted(cls, values: np.ndarray, counts: np.ndarray, min_count: int = 1, first_row: int = 1) -> Self:
        """From the number of occurrences.

        Args:
          values: distinct, ascending, [n].
          counts: integers [n].
          min_count: values with fewer occurrences are left out.
          first_row: the row of the most frequent value.
        """
        keep = counts >= min_count
        if not keep.all():
            values, counts = values[keep], counts[keep]
        rows = np.empty(len(values), np.int32)
        rows[_descending(counts)] = np.arange(first_row, first_row + len(values), dtype=np.int32)
        return cls(values, rows, first_row)

    @classmethod
    def of(cls, seen: np.ndarray, min_count: int = 1) -> Self:
        """Counts `seen`, integers or text [n], one entry for each occurrence."""
        values, counts = np.unique(seen, return_counts=True)
        return cls.counted(values, counts, min_count)

    @property
    def rows(self) -> int:
        """V, the rows of a table for this vocabulary: one for each value, and those before the first."""
        return len(self._sorted) + self._first_row

    @property
    def first_row(self) -> int:
        """The row of the first value."""
        return self._first_row

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values: integers, or text (S or U)."""
        return self._sorted.dtype

    @property
    def values(self) -> np.ndarray:
        """The values in the order of their rows: values[i] has row i + first_row."""
        values = np.empty_like(self._sorted)
        values[self._row_of_sorted - self._first_row] = self._sorted
        return values

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The row of every value: int32 of the same shape. Ascending values are found fastest."""
        if len(self._sorted) == 0:
            return np.zeros(np.shape(values), np.int32)
        if short_text.is_short(self._sorted.dtype) and short_text.is_short(values.dtype):
            return self._encode_short(values)
        wanted = values.astype(self._sorted.dtype, copy=False)  # or NumPy would convert the vocabulary instead
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        found = self._sorted[at] == values  # not `wanted`: the conversion may have changed a value
        return np.where(found, self._row_of_sorted[at], np.int32(0))

    def _encode_short(self, values: np.ndarray) -> np.ndarray:
        if self._numbers is None:
            self._numbers = short_text.numbers(np.ascontiguousarray(self._sorted))
        wanted = short_text.numbers(np.ascontiguousarray(values).ravel()).reshape(values.shape)
        at = np.minimum(np.searchsorted(self._numbers, wanted), len(self._numbers) - 1)
        return np.where(self._numbers[at] == wanted, self._row_of_sorted[at], np.int32(0))

    def grown(self, values: np.ndarray) -> Vocabulary:
        """The same rows, and after them one for each of these distinct values that has none yet, in their order."""
        new = values[self.encode(values) == 0] if len(values) else values
        if not len(new):
            return self
        known = self.values
        if {known.dtype.kind, new.dtype.kind} == {"i", "u"}:  # NumPy would make floats
            wide = np.int64 if min(known.min(initial=0), new.min(initial=0)) < 0 else np.uint64
            known, new = known.astype(wide), new.astype(wide)
        together = np.concatenate([known, new])
        order = np.argsort(together)
        return Vocabulary(together[order], (order + self._first_row).astype(np.int32), self._first_row)

    def sha256(self) -> str:
        """Hash of the values and their rows: equal hashes mean the same rows for the same values."""
        digest = hashlib.sha256(f"{self._sorted.dtype.str} {self._first_row}\n".encode())
        for array in (self._sorted, self._row_of_sorted):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Writes values.npy and rows.npy into `folder`, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / _VALUES, self._sorted, allow_pickle=False)
        np.save(folder / _ROWS, self._row_of_sorted, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, first_row: int) -> Self:
        """Reads what `save` wrote; OSError or ValueError if that cannot be read."""
        values, rows = (_read(folder / name) for name in (_VALUES, _ROWS))
        if values.dtype.kind not in "iuSU" or rows.dtype != np.int32 or len(values) != len(rows):
            raise ValueError(f"{folder} holds no vocabulary: {values.dtype} {values.shape}, {rows.dtype} {rows.shape}")
        if len(rows) and not (rows.min() >= first_row and rows.max() < first_row + len(rows)):
            raise ValueError(f"the rows in {folder / _ROWS} are not {first_row} to {first_row + len(rows) - 1}")
        return cls(values, rows, first_row)


def _read(file: Path) -> np.ndarray:
    """The array [n] of an .npy file; mapped before it is copied, so that a header cannot ask for memory."""
    try:
        array = np.array(map_array(file))
    except (OSError, ValueError):
        raise
    except Exception as error:  # NumPy's reader of headers raises many kinds
        raise ValueError(f"{file} has no header that NumPy can read ({error})") from None
    if array.ndim != 1:
        raise ValueError(f"{file} holds an array of {array.ndim} dimensions")
    return array


def _descending(counts: np.ndarray) -> np.ndarray:
    """The stable order of descending counts: int64 [n]."""
    most = np.iinfo(np.uint16).max
    # NumPy sorts 16 bits by radix, ten times as fast as 64; few values occur more often than that.
    order = np.argsort((most - np.minimum(counts, most)).astype(np.uint16), kind="stable")
    often = np.count_nonzero(counts >= most)
    order[:often] = order[:often][np.argsort(-counts[order[:often]].astype(np.int64), kind="stable")]
    return order
