"""Many small host arrays on their way to the devices as one, which the program that reads them takes apart.

A batch of 26 features is 33 arrays. Each costs the host about 50 us to send and 1 to 1.5 us in every dispatch, whatever
it holds: on an H100 the host took 5 of a step's 6 ms for them. So the arrays of a batch lie end to end in one of 32-bit
words, device by device, and several batches one below the other.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORD = np.dtype(np.int32)
_ALIGNED = 64  # bytes


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """The place of each array of a tree among the words of a device.

    Attributes:
      structure: of the tree.
      shapes: of its arrays, as one device has them.
      dtypes: of its arrays.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, tree: Any, devices: int) -> PackedForm:
        """Returns the form of arrays, or of shapes, whose leading axes are split evenly over so many devices."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple((x.shape[0] // devices, *x.shape[1:]) for x in leaves)
        return cls(structure, shapes, tuple(np.dtype(x.dtype) for x in leaves))

    @property
    def words(self) -> tuple[int, ...]:
        """Words that each array takes on one device."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return tuple(-(-math.prod(shape) * dtype.itemsize // _WORD.itemsize) for shape, dtype in sizes)

    def unpack(self, words_E: jax.Array) -> Any:
        """Returns the tree that `pack_words` laid end to end, of one device: int32 [E], with the same bits."""
        leaves, start = [], 0
        for shape, dtype, words in zip(self.shapes, self.dtypes, self.words, strict=True):
            leaves.append(_read(jax.lax.slice(words_E, (start,), (start + words,)), shape, dtype))
            start += words
        return jax.tree.unflatten(self.structure, leaves)


def pack_words(tree: Any, form: PackedForm, out_NxE: np.ndarray) -> None:
    """Lays the arrays of a tree end to end, device by device.

    Args:
      tree: NumPy arrays of this form, those of N devices one after the other.
      form: of the tree.
      out_NxE: int32 [N, E], all of which is written; E: the sum of `form.words`.
    """
    N, start = len(out_NxE), 0
    for x, dtype, words in zip(jax.tree.leaves(tree), form.dtypes, form.words, strict=True):
        part = out_NxE[:, start : start + words]
        start += words
        rows = np.ascontiguousarray(x, dtype).reshape(N, -1)
        if rows.shape[1] * dtype.itemsize == words * _WORD.itemsize:
            part[:] = rows.view(_WORD) if rows.size else 0
        else:  # bytes that do not fill the last word
            padded = np.zeros((N, words * _WORD.itemsize), np.uint8)
            padded[:, : rows.shape[1] * dtype.itemsize] = rows.view(np.uint8)
            part[:] = padded.view(_WORD)


def _read(words: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    if dtype.itemsize > _WORD.itemsize:
        words = words.reshape(-1, dtype.itemsize // _WORD.itemsize)
    read = jnp.uint8 if dtype == np.bool_ else dtype
    values = jax.lax.bitcast_convert_type(words, read).reshape(-1)[: math.prod(shape)]
    return values.reshape(shape).astype(dtype)


def aligned_words(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an int32 array, not written, where CPU devices take it without a copy."""
    words = np.empty(math.prod(shape) + _ALIGNED // 4, np.int32)
    start = -words.ctypes.data % _ALIGNED // 4
    return words[start : start + math.prod(shape)].reshape(shape)


@dataclasses.dataclass(frozen=True)
class WordSlot:
    """The place of the words of one batch among those of several.

    Attributes:
      words_KxNxE: int32, of all of them.
      place: the batch's number among them.
    """

    words_KxNxE: np.ndarray
    place: int

    @property
    def words_NxE(self) -> np.ndarray:
        """Words of the batch."""
        return self.words_KxNxE[self.place]


def join_slots(slots: Sequence[WordSlot]) -> np.ndarray:
    """Returns the words of batches one below the other, int32 [K, N, E]: as they are where they lie so, else copied."""
    first = slots[0]
    whole = first.words_KxNxE[first.place : first.place + len(slots)]
    if all(slot.words_KxNxE is first.words_KxNxE and slot.place == first.place + i for i, slot in enumerate(slots)):
        return whole
    joined_KxNxE = aligned_words((len(slots), *first.words_NxE.shape))
    for slot, out_NxE in zip(slots, joined_KxNxE, strict=True):
        out_NxE[:] = slot.words_NxE
    return joined_KxNxE


class WordSlots:
    """Slots for the batches of a stream, by their numbers, so that those that travel together lie together.

    Threads ask for them ahead, in about their order; each batch asks once.
    """

    def __init__(self) -> None:
        """Batches travel one by one until `expect` says otherwise."""
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Takes in that batches are counted from 0 again."""
        with self._lock:
            self._first, self._count, self._end = 0, 1, 0
            self._open: dict[int, WordSlot] = {}  # by number

    def expect(self, first: int, count: int) -> None:
        """Takes in that from batch `first` on `count` batches travel together."""
        with self._lock:
            self._first, self._count = first, count

    def take(self, number: int, shape: tuple[int, int]) -> WordSlot:
        """Returns the slot of a batch, of words int32 [N, E]."""
        with self._lock:
            while number >= self._end:
                count = self._count - (self._end - self._first) % self._count
                words_KxNxE = aligned_words((count, *shape))
                self._open |= {self._end + k: WordSlot(words_KxNxE, k) for k in range(count)}
                self._end += count
            slot = self._open.pop(number, None)
        return slot or WordSlot(aligned_words((1, *shape)), 0)
