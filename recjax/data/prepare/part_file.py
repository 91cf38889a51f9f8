"""The file of a part of a preparation: one chunk, dictionary coded, each split by itself, as an uncompressed .npz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np

from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import CodedChunk, counts
from recjax.data.prepare.counting import Run
from recjax.data.source import SPLITS

_TRAIN = SPLITS.index("train")


def save(stream: BinaryIO, chunk: CodedChunk) -> None:
    """Writes a chunk, and for every column how often each value stands in the training rows."""
    arrays: dict[str, np.ndarray] = {}
    for i, column in enumerate(chunk.columns.values()):
        arrays[f"{i}.values"] = column.values
    for split in range(len(SPLITS)):
        of_split = chunk.rows(split)
        if split == _TRAIN:
            all_ = np.ones(len(of_split.labels), bool)
            arrays |= {f"{i}.counts": counts(column, all_) for i, column in enumerate(of_split.columns.values())}
        if not len(of_split.labels):
            continue
        arrays |= {f"labels.{split}": of_split.labels, f"dense.{split}": of_split.dense}
        if of_split.weights is not None:
            arrays[f"weights.{split}"] = of_split.weights
        for i, column in enumerate(of_split.columns.values()):
            arrays[f"{i}.codes.{split}"] = column.codes
            if column.lengths is not None:
                arrays[f"{i}.lengths.{split}"] = column.lengths
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # its stub takes the names for flags


def rows(arrays: Mapping[str, np.ndarray], split: int, features: Sequence[str]) -> CodedChunk:
    """The rows of one split of a part, which has some.

    Args:
      arrays: what `save` wrote, opened by `recjax.utils.npy.open_arrays`.
      split: an index into SPLITS.
      features: names of the columns.
    """
    columns = {}
    for i, name in enumerate(features):
        lengths = arrays[f"{i}.lengths.{split}"] if f"{i}.lengths.{split}" in arrays else None
        columns[name] = Coded(arrays[f"{i}.values"], arrays[f"{i}.codes.{split}"], lengths)
    weights = arrays[f"weights.{split}"] if f"weights.{split}" in arrays else None
    labels = arrays[f"labels.{split}"]
    of_split = np.full(len(labels), split, np.uint8)
    return CodedChunk(labels, arrays[f"dense.{split}"], columns, of_split, weights)


def train_counts(arrays: Mapping[str, np.ndarray], feature: int) -> Run:
    """The distinct values of feature number `feature` in a part, and how often its training rows hold them."""
    return arrays[f"{feature}.values"], arrays[f"{feature}.counts"]
