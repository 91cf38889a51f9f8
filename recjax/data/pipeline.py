"""From a source of blocks to a stream of host batches: the order of the samples, and the threads that read ahead.

The order is a pure function of (seed, epoch) and the position in it is one integer, the global sample index
`epoch * rows + offset`. Neither processes, devices, threads nor the batch size enter. To shuffle rows without
holding a split in memory, every epoch permutes the blocks, walks them in windows of `shuffle_blocks` blocks and
permutes the rows within each window. A batch is a slice of that order. Within it, samples are sorted by window, block
and row: a batch is one sum, so that their order is free, and one of several processes that takes a part of each batch
need not read the blocks of the others' parts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from recjax.data import counter_rng
from recjax.data.batch import Batch, RowBatch, Rows
from recjax.data.batch_checks import validate
from recjax.data.source import BlockSource, between, concatenate, require_rows, rows_of, take
from recjax.errors import ConfigError

_BLOCKS_EACH = 8  # from which on parts of whole blocks are even enough
_BLOCK_ORDER, _ROW_ORDER = 1, 2  # purposes of draws: they keep the two kinds of permutation independent


@dataclasses.dataclass(frozen=True)
class Order:
    """In which order the rows of a split are visited.

    Attributes:
      row_counts: rows of each block in the order of the file, int64 [blocks].
      seed: any integer.
      shuffle: False is the order of the file, in every epoch.
      shuffle_blocks: blocks per window; larger mixes better and holds more rows in memory.
    """

    row_counts: np.ndarray
    seed: int
    shuffle: bool = True
    shuffle_blocks: int = 16

    @functools.cached_property
    def rows(self) -> int:
        """Rows of one epoch."""
        return int(self.row_counts.sum())

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch and where its windows begin.

        Returns:
          blocks: int64 [blocks], block indices in the order of visit; window w holds those from
            w * shuffle_blocks to (w + 1) * shuffle_blocks.
          starts: int64 [windows + 1], offset in the epoch of the first row of each window; the last is `rows`.
        """
        count = len(self.row_counts)
        blocks = counter_rng.permutation(count, self.seed, _BLOCK_ORDER, epoch) if self.shuffle else np.arange(count)
        ends = np.cumsum(self.row_counts[blocks])
        return blocks, np.concatenate([[0], ends[self.shuffle_blocks - 1 : -1 : self.shuffle_blocks], ends[-1:]])

    def within(self, epoch: int, window: int, rows: int) -> np.ndarray | None:
        """The order of the `rows` rows of a window: int64 [rows], or None for as they are."""
        return counter_rng.permutation(rows, self.seed, _ROW_ORDER, epoch, window) if self.shuffle else None


@dataclasses.dataclass(frozen=True)
class _Cuts:
    """First samples of batches: an epoch in batches of `size` samples, that of `position` from there on.

    `part` is the samples of each batch that are wanted, (first, end) counted in the batch. The offset `end` in each
    epoch is where it ends.
    """

    order: Order
    size: int
    position: int
    part: tuple[int, int]
    end: int

    def begin(self, epoch: int, at_least: int = 0) -> int:
        """Offset in the epoch of the batch that sample `at_least` is in; of the first one, if that is later."""
        first = self.position % self.order.rows if epoch == self.position // self.order.rows else 0
        return first + max(0, at_least - first) // self.size * self.size


def shares(row_counts: np.ndarray, weights: Sequence[int]) -> np.ndarray:
    """Divides a split, in the order of the file, among processes that each read a part of it.

    A part begins where a block does, so that no block is read twice, unless blocks are too few for even parts.

    Args:
      row_counts: rows of each block, int64 [blocks].
      weights: how the parts are to relate, [processes].

    Returns:
      The number of the first row of each part, and of all rows: int64 [processes + 1].
    """
    blocks = np.concatenate([[0], np.cumsum(row_counts)])
    ends = np.cumsum([0, *weights]) * int(blocks[-1]) // sum(weights)
    few = len(row_counts) < _BLOCKS_EACH * len(weights)
    return ends if few else blocks[np.searchsorted(blocks, ends)]


class _Window(Protocol):
    """The rows that batches have of a window."""

    def piece(self, batch: int) -> Any:
        """Rows of a batch; `batch` counts those that have rows of the window."""


class _Reader(Protocol):
    """Reads windows, and makes batches of what these hold of them."""

    def read(self, blocks: np.ndarray, wanted: Sequence[np.ndarray]) -> _Window:
        """Reads a window.

        Args:
          blocks: numbers of its blocks, in their order.
          wanted: for each batch its rows, as they are counted in the window: int64, ascending.
        """

    def join(self, pieces: Sequence[Any], number: int, position: int) -> Batch:
        """Returns the batch of a stream that has these pieces of windows."""


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of a window, and the rows of each batch in them.

    Attributes:
      blocks: those that are needed, one after the other; as one if their rows are in another order than theirs.
      ends: of each, in rows.
      of_batch: for each batch the rows that it has of the window: a range, or integers [n].
    """

    blocks: list[Batch]
    ends: np.ndarray
    of_batch: list[range | np.ndarray]

    def piece(self, batch: int) -> list[Batch]:
        """Rows of a batch: views of blocks, or copies."""
        rows = self.of_batch[batch]
        if isinstance(rows, np.ndarray):
            return [take(self.blocks[0], rows)]
        found = []
        starts = [0, *self.ends.tolist()]
        for block, start, end in zip(self.blocks, starts, starts[1:], strict=False):
            first, last = max(rows.start, start), min(rows.stop, end)
            if first < last:
                found.append(between(block, first - start, last - start))
        return found or [between(self.blocks[0], 0, 0)]


@dataclasses.dataclass(frozen=True)
class _BlockReader:
    """Reads whole blocks, of a source that has nothing else. Unless `shuffled`, a batch's rows follow each other."""

    source: BlockSource
    split: str
    row_counts: np.ndarray
    shuffled: bool

    def read(self, blocks: np.ndarray, wanted: Sequence[np.ndarray]) -> _Blocks:
        """See `_Reader`."""
        rows = np.concatenate(wanted)
        ends = np.cumsum(self.row_counts[blocks])
        block_of = np.searchsorted(ends, rows, side="right")
        needed = np.bincount(block_of, minlength=len(blocks)) > 0
        needed[0] |= not len(rows)  # no rows, but of the same columns
        kept = np.where(needed, self.row_counts[blocks], 0)
        moved = rows - (ends - np.cumsum(kept))[block_of]  # by the blocks that are left out before each
        read = [self.source.read(self.split, int(i)) for i in blocks[needed]]
        by_batch = np.split(moved, np.cumsum([len(of_batch) for of_batch in wanted])[:-1])
        if self.shuffled:
            return _Blocks([concatenate(read)], np.cumsum(kept)[-1:], list(by_batch))
        ranges = [range(int(at[0]), int(at[-1]) + 1) if len(at) else range(0) for at in by_batch]
        return _Blocks(read, np.cumsum(kept[needed]), list(ranges))

    def join(self, pieces: Sequence[list[Batch]], number: int, position: int) -> Batch:
        """See `_Reader`."""
        parts = list(itertools.chain.from_iterable(pieces))
        # A copy, so that a batch neither shares memory with the next ones nor keeps a window alive.
        whole = parts[0] if len(parts) == 1 and self.shuffled else concatenate(parts)
        return dataclasses.replace(whole, position=position)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Numbers in the split of the rows that each batch has of a window."""

    of_batch: Sequence[np.ndarray]

    def piece(self, batch: int) -> np.ndarray:
        """Returns those of a batch."""
        return self.of_batch[batch]


@dataclasses.dataclass(frozen=True)
class _RowReader:
    """Finds out the numbers of rows, which are taken later, all of a batch at once."""

    rows: Rows
    row_counts: np.ndarray

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum(self.row_counts) - self.row_counts

    def read(self, blocks: np.ndarray, wanted: Sequence[np.ndarray]) -> _Numbers:
        """See `_Reader`."""
        counts = self.row_counts[blocks]
        numbers = np.repeat(self._starts[blocks] - (np.cumsum(counts) - counts), counts)
        numbers += np.arange(len(numbers))
        return _Numbers([numbers.take(rows) for rows in wanted])

    def join(self, pieces: Sequence[np.ndarray], number: int, position: int) -> RowBatch:
        """See `_Reader`."""
        return RowBatch(self.rows, pieces[0] if len(pieces) == 1 else np.concatenate(pieces), position, number)


class _Windows:
    """The wanted rows of windows, batch by batch; each is read once and kept until the last of its batches has them."""

    def __init__(self, reader: _Reader, cuts: _Cuts) -> None:
        self._reader, self._cuts, self._order = reader, cuts, cuts.order
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], concurrent.futures.Future[tuple[_Window, int]]] = {}
        self._taken: collections.Counter[tuple[int, int]] = collections.Counter()  # batches that have their rows
        self.epoch = functools.lru_cache(maxsize=2)(self._order.epoch)

    def piece(self, epoch: int, window: int, batch: int) -> Any:
        """Rows that a batch has of a window; each batch asks once. `batch` counts those with rows of the window."""
        key = (epoch, window)
        with self._lock:
            first = key not in self._open
            content = self._open.setdefault(key, concurrent.futures.Future())
        if first:
            try:
                content.set_result(self._read(epoch, window))
            except BaseException as error:  # the threads that wait for this window raise it too
                content.set_exception(error)
        rows, count = content.result()
        with self._lock:
            self._taken[key] += 1
            if self._taken[key] == count:
                del self._open[key], self._taken[key]
        return rows.piece(batch)

    def _read(self, epoch: int, window: int) -> tuple[_Window, int]:
        """The rows of a window, and how many batches have some."""
        blocks, starts = self.epoch(epoch)
        first, last = int(starts[window]), int(starts[window + 1])
        within = self._order.within(epoch, window, last - first)
        last = min(last, self._cuts.end)
        wanted = []
        for start in range(self._cuts.begin(epoch, first), last, self._cuts.size):
            begin, stop = max(start, first), min(start + self._cuts.size, last)
            rows = np.arange(begin - first, stop - first) if within is None else within[begin - first : stop - first]
            low, high = (max(start + edge - begin, 0) for edge in self._cuts.part)
            wanted.append(np.sort(rows)[low:high])
        size = self._order.shuffle_blocks
        blocks = blocks[window * size : (window + 1) * size]
        return self._reader.read(blocks, wanted), len(wanted)


class _Batches:
    """Random access to the batches from `position` on: what Grain reads, from several threads."""

    def __init__(self, reader: _Reader, cuts: _Cuts, epochs: int | None) -> None:
        self._reader, self._windows, self._cuts = reader, _Windows(reader, cuts), cuts
        self._rows, self._size = cuts.order.rows, cuts.size
        self._epoch, offset = divmod(cuts.position, self._rows)
        self._first = -(-(cuts.end - offset) // self._size)  # batches left in the epoch of `position`
        self._each = -(-cuts.end // self._size)
        left = sys.maxsize if epochs is None else self._first + self._each * (epochs - self._epoch - 1)
        self._length = max(0, left)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        later, nth = divmod(index - self._first, self._each)
        epoch, nth = (self._epoch, index) if index < self._first else (self._epoch + 1 + later, nth)
        start = self._cuts.begin(epoch) + nth * self._size
        stop = min(start + self._size, self._cuts.end)
        _, starts = self._windows.epoch(epoch)
        pieces = []
        for window in range(int(np.searchsorted(starts, start, side="right")) - 1, len(starts) - 1):
            first = int(starts[window])
            if first >= stop:
                break
            number = (start - self._cuts.begin(epoch, first)) // self._size
            pieces.append(self._windows.piece(epoch, window, number))
        return self._reader.join(pieces, index, epoch * self._rows + min(start + self._cuts.part[0], stop))


def batches(
    source: BlockSource,
    split: str,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = False,
    position: int = 0,
    epochs: int | None = None,
    shuffle_blocks: int = 16,
    workers: int = 2,
    transform: Callable[[Batch], Any] | None = None,
    part: tuple[int, int] | None = None,
    end: int | None = None,
    pack: bool = False,
    check: bool = True,
) -> Iterator[Any]:
    """Host batches of a split, in order, read ahead by threads.

    A batch never crosses the end of an epoch: the last one of an epoch holds the remaining rows. Starting at a
    `position`, with any batch size, gives exactly the samples that an uninterrupted stream would still have given.

    Args:
      source: where the rows come from.
      split: "train", "validation" or "test".
      batch_size: B, rows of a full batch.
      seed: of the order; matters only with `shuffle`.
      shuffle: False visits the rows in the order of the file.
      position: global sample index of the first row: epoch * rows + offset.
      epochs: stop at the end of this many epochs, counted from position 0; None never stops.
      shuffle_blocks: blocks whose rows are mixed with each other; a part of what defines the order.
      workers: threads that read, check and transform ahead; 0 does so in the calling thread, when asked.
      transform: applied to every (checked) batch, in the worker.
      part: of every batch only the samples from the first number to below the second, counted in the batch; what is
        not there is left out, so that of the last batch of an epoch there may be none. None: whole batches.
      end: number of samples after which every epoch ends; None: all of the split.
      pack: whether rows on disk that are not yet packed, so that any can be taken, are packed now, for this and later
        passes; the batches are the same.
      check: whether batches are checked, `validate`, before `transform`; False: it does so itself.

    Returns:
      Iterator of `Batch`, or of what `transform` returns.

    Raises:
      ConfigError: an argument below its least value.
      DataError: the split is empty; and, while iterating, whatever the source or `validate` raises.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("position", position, 0),
        ("shuffle_blocks", shuffle_blocks, 1),
        ("workers", workers, 0),
    ):
        if value < least:
            raise ConfigError(f"{name}={value} makes no sense when reading batches: set it to {least} or more.")
    require_rows(source, split)
    # In the order of the file no window is needed to mix, and one block is the least to read.
    order = Order(source.row_counts(split), seed, shuffle, shuffle_blocks if shuffle else 1)
    cuts = _Cuts(order, batch_size, position, part or (0, batch_size), order.rows if end is None else end)
    rows = rows_of(source, split, pack)
    reader: _Reader = _BlockReader(source, split, order.row_counts, shuffle)
    reader = reader if rows is None else _RowReader(rows, order.row_counts)

    def finish(batch: Batch) -> Any:
        if check:
            validate(batch, source.schema)
        return batch if transform is None else transform(batch)

    stream = grain.MapDataset.source(_Batches(reader, cuts, epochs)).map(finish)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    return iter(stream.to_iter_dataset(options))
