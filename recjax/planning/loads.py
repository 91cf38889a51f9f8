"""Loads of each device under a plan: bytes that it holds, bytes that it reads, bytes that it sends, and ids."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from recjax.embedding.layout import BoundPlan, BoundSegment, Group
from recjax.embedding.plan import Exchange
from recjax.embedding.quantize import encoded_bytes
from recjax.embedding.spec import TableSpec
from recjax.planning.profile import Profile
from recjax.utils.text import aligned

# K loads of a device: keys of `describe_loads`, and what they are called.
LOADS = {
    "held_bytes": "bytes held",
    "read_bytes": "bytes read a step",
    "exchanged_bytes": "bytes exchanged a step",
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
    """

    profile: Profile
    batch_size: int
    devices: int
    hosts: int = 1
    replicas: int = 1
    item_bytes: int = 4
    dedup: bool = True

    def of_columns(self, spec: TableSpec, columns: int, exchange: Exchange, width: int = 0) -> np.ndarray:
        """The loads of so many columns of all rows of a table.

        Bytes read are those of the rows of all ids, be they equal or not. Bytes exchanged are those of the rows that
        leave for the devices that asked, one way: gradients return as many if their precision is the same.

        Args:
          spec: the table.
          columns: how many of its columns.
          exchange: precision in which rows travel.
          width: columns that the buffer has, with padding; 0: no more.

        Returns:
          float64 [K], in the order of `LOADS`.
        """
        use, width = self.profile.tables[spec.name], width or columns
        value_bytes = 2 if spec.dtype == "bfloat16" else self.item_bytes
        slots = sum(math.prod(slot.shape) for slot in spec.optimizer.slots(width).values())
        ids = use.ids * self.batch_size / self.replicas
        travelling = use.distinct * self.devices if self.dedup else ids
        return np.array(
            [
                spec.rows * (width * value_bytes + slots * self.item_bytes),
                ids * columns * value_bytes,
                travelling * encoded_bytes(columns, exchange.forward, value_bytes),
                ids,
            ],
            np.float64,
        )

    def of_plan(self, bound: BoundPlan) -> np.ndarray:
        """The loads of each device under a plan: float64 [N, K]. All rows of a table count as equally frequent."""
        loads_NxK = np.zeros((self.devices, len(LOADS)))
        for group in bound.groups:
            if group.spread:
                for segment in group.segments:
                    loads_NxK += self._of_spread(group, segment)
                continue
            for segment in group.segments:  # each device looks its own samples up in its copy
                of_all_K = self.of_columns(segment.spec, group.dim, group.exchange)
                fraction = segment.band.size / segment.spec.rows
                loads_NxK += fraction * of_all_K * np.array([1, 1 / self.devices, 0, 1 / self.devices])
        return loads_NxK

    def _of_spread(self, group: Group, segment: BoundSegment) -> np.ndarray:
        """The loads of each device by a segment of which they hold different rows or columns: float64 [N, K]."""
        rows_N, columns_N = group.counts(segment)
        of_all = {
            count: self.of_columns(segment.spec, count, group.exchange, group.width)
            for count in set(columns_N.tolist())
        }
        of_all_NxK = np.array([of_all[count] for count in columns_N.tolist()])
        return of_all_NxK * (rows_N / segment.spec.rows)[:, None]


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
