"""Demands of a run's data on its tables, and the loads of each device under a plan, in bytes and ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.batch import Batch
from recjax.data.source import BlockSource, between, concatenate, has_blocks
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.quantize import encoded_bytes
from recjax.embedding.segment import Exchange, ExchangeKind
from recjax.embedding.sharding import BoundSegment
from recjax.embedding.spec import FeatureSpec, TableSpec, by_table, ids_per_sample
from recjax.utils.text import aligned

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


# K loads of a device: keys of `describe_loads`, and what they are called.
LOADS = {
    "held_bytes": "bytes held",
    "read_bytes": "bytes read a step",
    "exchanged_bytes": "bytes of rows exchanged a step",
    "pooled_bytes": "bytes of pooled vectors a step",
    "ids": "ids a step",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step's work on the tables.

    Attributes:
      profile: what samples ask of them.
      batch_size: B, over all devices.
      devices: N, those of one replica group.
      hosts: that these stand in.
      replicas: groups.
      item_bytes: of a table's element, if that is not bfloat16, and of a slot's.
      dedup: whether a row travels once for all ids of a device that ask for it.
      groups_agree: whether the groups hold the same tables, and add the gradients of all before each update.
      all_hosts: that all groups stand in.
    """

    profile: Profile
    batch_size: int
    devices: int
    hosts: int = 1
    replicas: int = 1
    item_bytes: int = 4
    dedup: bool = True
    groups_agree: bool = True
    all_hosts: int = 1

    @property
    def samples(self) -> int:
        """Samples of a device."""
        return -(-self.batch_size // (self.devices * self.replicas))

    def bytes_sent(
        self,
        spec: TableSpec,
        exchange: Exchange,
        columns: int,
        ranges: int = 1,
        parts: int = 1,
        use: TableUse | None = None,
    ) -> tuple[float, float]:
        """Bytes that a device has to do with for one table in a step, both ways, with ids.

        Args:
          spec: the table.
          exchange: the precisions.
          columns: how many of its columns.
          ranges: in which these are held; ids go to each.
          parts: in which its rows are held; each sends a vector.
          use: of the table by some of its features; None: by all.

        Returns:
          if distinct rows travel; and if pooled vectors do, infinite if some of its bags are not pooled.
        """
        use = use or self.profile.tables[spec.name]
        held_bytes = 2 if spec.dtype == "bfloat16" else self.item_bytes
        back = encoded_bytes(columns, exchange.backward, self.item_bytes)
        row = encoded_bytes(columns, exchange.forward, held_bytes) + back
        vector = encoded_bytes(columns, exchange.forward, self.item_bytes) + back
        samples = self.batch_size / self.devices / self.replicas
        vectors = samples * (use.bags * parts * vector + use.ids * 4 * ranges) if use.bags else math.inf
        return use.distinct * (4 * ranges + row), vectors

    def of_columns(
        self,
        spec: TableSpec,
        columns: int,
        exchange: Exchange,
        width: int = 0,
        parts: float = 1,
        use: TableUse | None = None,
    ) -> np.ndarray:
        """The loads of so many columns of a table's rows, or of one of equal parts of these.

        Bytes read are those of the rows of all ids, be they equal or not. Bytes of rows exchanged are those that leave
        for the devices that asked, one way: gradients return as many if their precision is the same. So with vectors,
        of which each part of the rows sends one for every bag.

        Args:
          spec: the table.
          columns: how many of its columns.
          exchange: what travels, and its precision; the kind is not left open.
          width: columns that the buffer has, with padding; 0: no more.
          parts: of the rows.
          use: of the table by some of its features; None: by all.

        Returns:
          float64 [K], in the order of `LOADS`.
        """
        use, width = use or self.profile.tables[spec.name], width or columns
        value_bytes = 2 if spec.dtype == "bfloat16" else self.item_bytes
        slots = sum(math.prod(slot.shape) for slot in spec.optimizer.slots(width).values())
        ids = use.ids * self.batch_size / self.replicas
        travelling = use.distinct * self.devices if self.dedup else ids
        pooled = exchange.kind == "pooled"
        bags = use.bags * self.batch_size / self.replicas * parts
        found = [
            spec.rows * (width * value_bytes + slots * self.item_bytes),
            ids * columns * value_bytes,
            0 if pooled else travelling * encoded_bytes(columns, exchange.forward, value_bytes),
            bags * encoded_bytes(columns, exchange.forward, self.item_bytes) if pooled else 0,
            ids,
        ]
        return np.array(found, np.float64) / parts

    def of_plan(self, bound: BoundPlan) -> np.ndarray:
        """The loads of each device under a plan: float64 [N, K]. All rows of a table count as equally frequent."""
        streams = [stream for exchange in bound.pooled for of_group in exchange.streams for stream in of_group]
        pooling: dict[tuple[str, int, int], set[str]] = {}  # features of which vectors travel
        for stream in streams:
            for s in stream.source.segments:
                pooling.setdefault((s.spec.name, s.number, s.first), set()).add(stream.feature.name)
        loads_NxK = np.zeros((self.devices, len(LOADS)))
        for group in bound.groups:
            if group.spread:
                for segment in group.segments:
                    of_vectors = pooling.get((segment.spec.name, segment.number, segment.first), set())
                    loads_NxK += self._of_spread(group, segment, of_vectors)
                continue
            for segment in group.segments:  # each device looks its own samples up in its copy
                of_all_K = self.of_columns(segment.spec, group.dim, group.exchange)
                fraction = segment.band.size / segment.spec.rows
                loads_NxK += fraction * of_all_K * np.array([0, 1 / self.devices, 0, 0, 1 / self.devices])
                loads_NxK[:, 0] += segment.band.size * group.row_bytes(self.item_bytes)
        return loads_NxK

    def _of_spread(self, group: Group, segment: BoundSegment, pooled: Collection[str]) -> np.ndarray:
        """The loads of each device by a segment of which they hold different rows or columns: float64 [N, K].

        `pooled` names the features of which vectors travel.
        """
        rows_N, columns_N = group.counts(segment)
        all_of = self.profile.tables[segment.spec.name]
        by_rows = [f.name for f in all_of.features if f.name not in pooled] if pooled else []
        ways: list[tuple[ExchangeKind, TableUse]] = [
            ("pooled" if pooled else "rows", all_of.of(pooled) if by_rows else all_of)
        ]
        if by_rows:
            ways.append(("rows", all_of.of(by_rows)))

        def of_part(rows: int, columns: int) -> np.ndarray:
            found_K = np.zeros(len(LOADS))
            for kind, use in ways if rows else ():
                exchange = dataclasses.replace(group.exchange, kind=kind)
                parts = segment.spec.rows / rows
                of_way_K = self.of_columns(segment.spec, columns, exchange, group.width, parts, use)
                of_way_K[0] -= found_K[0]  # held once
                found_K += of_way_K
            return found_K

        held = list(zip(rows_N.tolist(), columns_N.tolist(), strict=True))
        loads = {part: of_part(*part) for part in set(held)}
        used_K = np.full(len(LOADS), segment.band.members / segment.band.size)
        used_K[0] = 1.0  # rows that are hot have room here, too
        return np.array([loads[part] for part in held]) * used_K


def describe_loads(work: Workload, bound: BoundPlan) -> dict[str, Any]:
    """The loads of each device, as JSON values.

    Returns:
      "profile": where the figures come from; for each key of `LOADS` "per_device", "min", "max" and "imbalance", which
      is the most over the mean (1 where there is nothing); "allocated_bytes": the bytes that every device has buffers
      for, and their "imbalance", over the mean of what is held.
    """
    loads_NxK = work.of_plan(bound)
    described: dict[str, Any] = {"profile": work.profile.origin}
    for key, load_N in zip(LOADS, loads_NxK.T, strict=True):
        described[key] = {
            "per_device": [round(load) for load in load_N.tolist()],
            "min": round(float(load_N.min())),
            "max": round(float(load_N.max())),
            "imbalance": imbalance(load_N),
        }
    allocated, mean = bound.buffer_bytes(work.item_bytes), float(loads_NxK[:, 0].mean())
    described["allocated_bytes"] = {"each": allocated, "imbalance": allocated / mean}
    return described


def imbalance(load_N: np.ndarray) -> float:
    """The most over the mean; 1 where there is nothing."""
    mean = float(load_N.mean())
    return float(load_N.max()) / mean if mean else 1.0


def loads_table(described: dict[str, Any]) -> str:
    """The same as text."""
    cells = [["load of a device", "min", "max", "max/mean"]]
    for key, words in LOADS.items():
        load = described[key]
        cells.append([words, f"{load['min']:,}", f"{load['max']:,}", f"{load['imbalance']:.3f}"])
    allocated = described["allocated_bytes"]
    each = f"{allocated['each']:,}"
    cells.insert(2, ["bytes allocated, over the mean of those held", each, each, f"{allocated['imbalance']:.3f}"])
    return "\n".join([*aligned(cells), f"ids and distinct rows from {described['profile']}"])
