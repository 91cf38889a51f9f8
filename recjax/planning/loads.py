"""Loads of each device under a plan: bytes that it holds, bytes that it reads, bytes that it sends, and ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from recjax.embedding.bands import BoundSegment
from recjax.embedding.layout import BoundPlan, Group
from recjax.embedding.quantize import encoded_bytes
from recjax.embedding.segment import Exchange, ExchangeKind
from recjax.embedding.spec import TableSpec
from recjax.planning.profile import Profile, TableUse
from recjax.utils.text import aligned

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
