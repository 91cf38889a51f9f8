"""Loads of the tables by the ids of a run's data: what `plan=balanced` spreads evenly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from recjax.data.batch import Batch
from recjax.data.source import BlockSource, between, concatenate
from recjax.embedding.spec import FeatureSpec, TableSpec

MOST_IDS = 2**24  # in the samples that are read; where a block has more, nothing is read


@dataclasses.dataclass(frozen=True)
class TableUse:
    """Demands of a run's samples on one table.

    Attributes:
      ids: ids of a sample, the mean over samples, summed over all features that look the table up.
      distinct: distinct rows that a device's share of a batch asks for.
      bags: features that look the table up; 0 if some of them are not pooled.
    """

    ids: float
    distinct: float
    bags: int = 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """Demands of a run's samples on its tables.

    Attributes:
      tables: by table name.
      origin: where the figures come from, for people.
    """

    tables: dict[str, TableUse]
    origin: str


def profile_of(
    source: BlockSource,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    batch_size: int,
    devices: int,
) -> Profile:
    """Counts ids and distinct rows in the first training samples, as many as one device has of a batch, or in a block.

    Where there are none, or a block has more than `MOST_IDS` ids, the schema has to do: a jagged bag is one id, and all
    rows are equally frequent. All processes and all runs on the same data get the same.

    Args:
      source: the data.
      tables: of the model.
      features: of the model.
      batch_size: B, over all devices.
      devices: all that share a batch, those of every replica group.
    """
    share = -(-batch_size // devices)
    block_sizes = source.row_counts("train")
    ids = sum(f.bag or 1 for f in {f.reads: f for f in features}.values())  # of a sample, as far as it is known
    if not block_sizes.sum():
        return _of_schema(tables, features, share, "the data have no training samples")
    if block_sizes[0] * ids > MOST_IDS:
        return _of_schema(tables, features, share, f"a block of the data has {block_sizes[0] * ids:,} ids")
    # A block at least, and no more ids than that however large the share is.
    enough = int(np.searchsorted(np.cumsum(block_sizes), min(share, MOST_IDS // ids))) + 1
    read = concatenate([source.read("train", n) for n in range(min(enough, len(block_sizes)))])
    first = between(read, 0, min(share, read.size))
    return Profile(
        {t.name: _counted(t, [f for f in features if f.table == t.name], read, first, share) for t in tables},
        f"the first {read.size:,} training samples",
    )


def _counted(table: TableSpec, features: Sequence[FeatureSpec], read: Batch, first: Batch, share: int) -> TableUse:
    """The use of a table in the samples `read`, of which the distinct rows of `first` are counted."""
    ids = sum(read.bags[f.reads].ids.size for f in features) / read.size
    asked = np.concatenate([first.bags[f.reads].ids.ravel() for f in features])
    # Where fewer samples were read than a device has: in proportion, which is the most that there can be.
    return TableUse(ids, min(len(np.unique(asked)) * share / first.size, float(table.rows)), _bags(features))


def _bags(features: Sequence[FeatureSpec]) -> int:
    return 0 if any(f.pooling == "none" for f in features) else len(features)


def _of_schema(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], share: int, why: str) -> Profile:
    found = {}
    for table in tables:
        own = [f for f in features if f.table == table.name]
        ids = sum(f.bag or 1 for f in own)
        missed = math.exp(share * ids * math.log1p(-1 / table.rows)) if table.rows > 1 else 0.0
        found[table.name] = TableUse(float(ids), table.rows * (1 - missed), _bags(own))
    return Profile(found, f"the schema, with all rows equally frequent and a jagged bag as one id ({why})")
