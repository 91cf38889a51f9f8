"""Loads of the tables by the ids of a run's data: what `plan=balanced` spreads evenly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from recjax.data.batch import Batch
from recjax.data.source import BlockSource, between, concatenate, has_blocks
from recjax.embedding.spec import FeatureSpec, TableSpec, by_table, ids_per_sample

MOST_IDS = 2**24  # in the samples that are read; where a block has more, nothing is read


@dataclasses.dataclass(frozen=True)
class FeatureUse:
    """One feature's part of the demands on a table.

    Attributes:
      name: of the feature.
      ids: of a sample, the mean over samples.
      new: distinct rows that a device's share of a batch asks for, without those that features before it ask for.
      pooled: False for a sequence.
    """

    name: str
    ids: float
    new: float
    pooled: bool = True


@dataclasses.dataclass(frozen=True)
class TableUse:
    """Demands of a run's samples on one table.

    Attributes:
      ids: ids of a sample, the mean over samples, summed over all features that look the table up.
      distinct: distinct rows that a device's share of a batch asks for.
      bags: features that look the table up; 0 if some of them are not pooled.
      features: those features: sequences first, then others, by ids of a sample; none if all are alike.
    """

    ids: float
    distinct: float
    bags: int = 1
    features: tuple[FeatureUse, ...] = ()

    def ids_of(self, name: str) -> float:
        """Ids of a bag of one feature, the mean."""
        return next((f.ids for f in self.features if f.name == name), self.ids / max(1, self.bags))

    def of(self, names: Collection[str]) -> TableUse:
        """The demands of some of the features alone; where they are not the first, with `new` rows in place of all."""
        own = [f for f in self.features if f.name in names]
        if len(own) == len(self.features):
            return self
        ids, distinct = sum(f.ids for f in own), sum(f.new for f in own)
        return TableUse(ids, distinct, len(own) if all(f.pooled for f in own) else 0, tuple(own))


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

    Where there are none, or a block has more than `MOST_IDS` ids, the schema has to do, with the mean of jagged bags as
    far as it is known, and all rows equally frequent. All processes and all runs on the same data get the same.

    Args:
      source: the data.
      tables: of the model.
      features: of the model.
      batch_size: B, over all devices.
      devices: all that share a batch, those of every replica group.
    """
    share = -(-batch_size // devices)
    block_sizes = source.row_counts("train")
    ids = ids_per_sample(features)  # as far as it is known
    if not block_sizes.sum() or not has_blocks(source):
        return _of_schema(tables, features, share, "the data have no training samples")
    if block_sizes[0] * ids > MOST_IDS:
        return _of_schema(tables, features, share, f"a block of the data has {round(block_sizes[0] * ids):,} ids")
    # A block at least, and no more ids than that however large the share is.
    enough = int(np.searchsorted(np.cumsum(block_sizes), min(share, MOST_IDS // ids))) + 1
    read = concatenate([source.read("train", n) for n in range(min(enough, len(block_sizes)))])
    first = between(read, 0, min(share, read.size))
    looking = by_table(features)
    return Profile(
        {t.name: _counted(t, looking[t.name], read, first, share) for t in tables},
        f"the first {read.size:,} training samples",
    )


def _counted(table: TableSpec, features: Sequence[FeatureSpec], read: Batch, first: Batch, share: int) -> TableUse:
    """The use of a table in the samples `read`, of which the distinct rows of `first` are counted."""
    ids = {f.name: read.bags[f.reads].ids.size / read.size for f in features}
    found = []
    asked_U, before = np.zeros(0, np.int32), 0.0
    for f in _in_order(features, ids):
        asked_U = np.union1d(asked_U, first.bags[f.reads].ids)
        # Where fewer samples were read than a device has: in proportion, which is the most that there can be.
        distinct = min(len(asked_U) * share / first.size, float(table.rows))
        found.append(FeatureUse(f.name, ids[f.name], distinct - before, f.pooling != "none"))
        before = distinct
    return TableUse(sum(ids.values()), before, _bags(features), tuple(found))


def _in_order(features: Sequence[FeatureSpec], ids: Mapping[str, float]) -> list[FeatureSpec]:
    """Orders features: first those whose rows travel, not vectors: sequences, then the others by ids of a bag."""
    return sorted(features, key=lambda f: (f.pooling != "none", ids[f.name]))


def _bags(features: Sequence[FeatureSpec]) -> int:
    return 0 if any(f.pooling == "none" for f in features) else len(features)


def _of_schema(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], share: int, why: str) -> Profile:
    found = {}
    looking = by_table(features)
    for table in tables:
        own = looking[table.name]
        ids = {f.name: float(f.ids) for f in own}
        uses, total, before = [], 0.0, 0.0
        for f in _in_order(own, ids):
            total += ids[f.name]
            missed = math.exp(share * total * math.log1p(-1 / table.rows)) if table.rows > 1 else 0.0
            distinct = table.rows * (1 - missed)
            uses.append(FeatureUse(f.name, ids[f.name], distinct - before, f.pooling != "none"))
            before = distinct
        found[table.name] = TableUse(total, before, _bags(own), tuple(uses))
    unknown = any(f.bag is None and f.mean_ids is None for f in features)
    bags = " and a jagged bag as one id" if unknown else ""
    return Profile(found, f"the schema, with all rows equally frequent{bags} ({why})")
