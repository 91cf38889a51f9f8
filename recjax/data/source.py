"""Sources of rows: a source of blocks, and the three operations on the rows of a block.

A block is a `Batch` of up to `BLOCK_ROWS` consecutive rows of one split; its `position` is the index of its first
row in the split. Blocks exist because one Python call and one read per row would be far too slow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from recjax.data.batch import Bags, Batch, Rows, Schema
from recjax.errors import DataError

BLOCK_ROWS = 4096  # rows of a full block; only the last block of a split holds fewer
SPLITS = ("train", "validation", "test")
_ALSO_VALIDATION = ("valid", "val", "dev")  # as other libraries call it


class BlockSource(Protocol):
    """Random access to the blocks of a dataset; safe to read from several threads.

    Attributes:
      name: the dataset's name, as in `recjax data prepare NAME`.
      schema: the columns of every block.
      fingerprint: a hash of schema and content: equal fingerprints mean equal data.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (described above)

    @property
    def schema(self) -> Schema: ...  # noqa: D102 (described above)

    @property
    def fingerprint(self) -> str: ...  # noqa: D102 (described above)

    def row_counts(self, split: str) -> np.ndarray:
        """Rows of each block of `split` ("train", "validation" or "test"): int64 [blocks]; reads no block."""
        ...

    def read(self, split: str, index: int) -> Batch:
        """Block `index` of `split`."""
        ...


def has_blocks(source: BlockSource) -> bool:
    """Returns whether blocks can be read: not those that a run has kept (`recjax.data.storage.run_snapshot`)."""
    return bool(getattr(source, "has_blocks", True))


def rows_of(source: BlockSource, split: str, pack: bool = False) -> Rows | None:
    """Returns the rows of a split, of which any can be taken (`PreparedSource.rows`); None if it has blocks alone."""
    rows = getattr(source, "rows", None)
    return rows(split, pack) if rows else None


class DrawnSplits:
    """Splits of a source that draws its rows: as many as its config's `train_rows` and so on, in full blocks."""

    name: ClassVar[str]
    config: Any

    @functools.cached_property
    def _counts(self) -> dict[str, np.ndarray]:
        return {split: even_blocks(getattr(self.config, f"{split}_rows")) for split in SPLITS}

    def row_counts(self, split: str) -> np.ndarray:
        """See `BlockSource`."""
        if split not in self._counts:
            raise DataError(f"{self.name} data have no split {split!r}; the splits are {', '.join(SPLITS)}.")
        return self._counts[split]


def split_called(name: str) -> str | None:
    """The split that a name means, in upper or lower case: "Val" is validation; None if it means none."""
    name = name.lower()
    if name in _ALSO_VALIDATION:
        return "validation"
    return name if name in SPLITS else None


def require_rows(source: BlockSource, split: str) -> None:
    """Refuses a split without rows.

    Raises:
      DataError: it has none, or there is no such split.
    """
    if source.row_counts(split).sum() == 0:
        there = ", ".join(name for name in SPLITS if source.row_counts(name).sum() > 0) or "no split"
        raise DataError(
            f"split {split!r} of {source.name} has no rows, so no batch can be read from it (rows are in: {there}). "
            "Give the split rows when preparing the data (or in the synthetic data's config)."
        )


def split_to_measure(source: BlockSource) -> str:
    """The split that the results of a run are of: test, or if that has no rows validation; "" if neither has."""
    return next((split for split in ("test", "validation") if source.row_counts(split).sum() > 0), "")


def even_blocks(rows: int) -> np.ndarray:
    """Row counts of `rows` rows cut into full blocks and one short one: int64 [ceil(rows / BLOCK_ROWS)]."""
    starts = np.arange(0, rows, BLOCK_ROWS, dtype=np.int64)
    return np.minimum(rows - starts, BLOCK_ROWS)


def take(batch: Batch, rows: np.ndarray) -> Batch:
    """The rows of `batch` at the indices `rows` (integers [n], in any order, repeats allowed), copied."""

    def places(lengths_B: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """The entries of these rows, and how many each has."""
        if lengths_B is None:
            return rows, None
        lengths = np.take(lengths_B, rows)
        # An entry's old place is the old start of its bag plus its place within the bag.
        old_starts = np.take(np.cumsum(lengths_B, dtype=np.int64) - lengths_B, rows)
        new_ends = np.cumsum(lengths, dtype=np.int64)
        shift = np.repeat(old_starts - (new_ends - lengths), lengths)
        return shift + np.arange(len(shift)), lengths

    def take_bags(bags: Bags) -> Bags:
        at, lengths = places(bags.lengths)
        weights = None if bags.weights is None else np.take(bags.weights, at, axis=0)
        return Bags(np.take(bags.ids, at, axis=0), lengths, weights)

    at, label_lengths = places(batch.label_lengths)
    return Batch(
        dense=np.take(batch.dense, rows, axis=0),
        bags={name: take_bags(bags) for name, bags in batch.bags.items()},
        labels=np.take(batch.labels, at, axis=0),
        weights=np.take(batch.weights, at, axis=0),
        position=batch.position,
        label_lengths=label_lengths,
    )


def one_label_a_row(batch: Batch, schema: Schema, names: Iterable[str]) -> Batch:
    """The same labels with a row for each, where elements have labels; else the batch as it is.

    Args:
      batch: the rows.
      schema: of these.
      names: features that are wanted. One of the elements that have labels has their id; of others those of the row.
    """
    if batch.label_lengths is None:
        return batch
    labelled = schema.labelled_features
    bags = {name: batch.bags[name] for name in names if name not in labelled}
    no_labels = np.zeros(batch.size, np.float32)
    rows = take(Batch(batch.dense, bags, no_labels, no_labels, batch.position), batch.label_samples)
    elements = {name: Bags(batch.bags[name].ids[:, None]) for name in names if name in labelled}
    return Batch(rows.dense, {**rows.bags, **elements}, batch.labels, batch.weights, batch.position)


def between(batch: Batch, start: int, stop: int) -> Batch:
    """Rows `start` to `stop` (exclusive) of `batch`, as views of its arrays; its position moves with `start`."""

    def entries(lengths_B: np.ndarray | None) -> slice:
        if lengths_B is None:
            return slice(start, stop)
        first = int(lengths_B[:start].sum(dtype=np.int64))
        return slice(first, first + int(lengths_B[start:stop].sum(dtype=np.int64)))

    def cut(bags: Bags) -> Bags:
        at, lengths = entries(bags.lengths), None if bags.lengths is None else bags.lengths[start:stop]
        return Bags(bags.ids[at], lengths, None if bags.weights is None else bags.weights[at])

    labelled = entries(batch.label_lengths)
    return Batch(
        dense=batch.dense[start:stop],
        bags={name: cut(bags) for name, bags in batch.bags.items()},
        labels=batch.labels[labelled],
        weights=batch.weights[labelled],
        position=batch.position + start,
        label_lengths=None if batch.label_lengths is None else batch.label_lengths[start:stop],
    )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of one or more batches of one schema, one after the other, copied; the position of the first."""

    def join(name: str) -> Bags:
        parts = [batch.bags[name] for batch in batches]
        lengths = [bags.lengths for bags in parts if bags.lengths is not None]
        weights = [bags.weights for bags in parts if bags.weights is not None]
        return Bags(
            np.concatenate([bags.ids for bags in parts]),
            np.concatenate(lengths) if lengths else None,
            np.concatenate(weights) if weights else None,
        )

    label_lengths = [batch.label_lengths for batch in batches if batch.label_lengths is not None]
    return Batch(
        dense=np.concatenate([batch.dense for batch in batches]),
        bags={name: join(name) for name in batches[0].bags},
        labels=np.concatenate([batch.labels for batch in batches]),
        weights=np.concatenate([batch.weights for batch in batches]),
        position=batches[0].position,
        label_lengths=np.concatenate(label_lengths) if label_lengths else None,
    )


def mean_ids(source: BlockSource) -> dict[str, float]:
    """Returns how many ids a bag of each jagged feature has, the mean over the first block of training samples.

    Features with bags of fixed size are left out; {} if there are no such samples. Without jagged features nothing is
    read.

    Raises:
      DataError: the block cannot be read.
    """
    jagged = [feature.name for feature in source.schema.features if feature.bag is None]
    if not jagged or not source.row_counts("train").sum() or not has_blocks(source):
        return {}
    block = source.read("train", 0)
    return {name: block.bags[name].ids.size / block.size for name in jagged}
