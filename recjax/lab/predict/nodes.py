"""Nodes that a training needs, by bytes and by bandwidth, with all rows in device memory or with tiers: a calculator.

Every input has a name. What the dense part computes counts where a need and a node say how much, and asks for the same
nodes either way; so does, beside tiers, the memory by which a host finds rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recjax.errors import ConfigError
from recjax.planning.tier_model import Cache, Classes, cache
from recjax.tiers.records import record_bytes

_MOST = 1 << 20
_WIDTH = 0.01  # of classes of rows, as a share of how often they are asked for


@dataclasses.dataclass(frozen=True)
class Node:
    """A kind of node. Rates are of the whole node, and of one direction.

    Attributes:
      name: of it, with where the figures are from.
      device_bytes: of all its devices' memory that tables and caches may take.
      device_rate: bytes a second of all its devices' memory.
      link_rate: bytes a second between host and devices.
      dram_bytes: of the host's memory that rows may take.
      disk_bytes: of its disks; 0: it has none.
      disk_reads: random blocks of 4 KiB a second.
      disk_rate: bytes a second that its disks take.
      flops: floating-point operations a second that all its devices reach; 0: computing does not count.
    """

    name: str
    device_bytes: float
    device_rate: float
    link_rate: float
    dram_bytes: float = 0.0
    disk_bytes: float = 0.0
    disk_reads: float = 0.0
    disk_rate: float = 0.0
    flops: float = 0.0

    def __post_init__(self) -> None:
        if not (self.device_bytes > 0 and self.device_rate > 0 and self.link_rate > 0):
            raise ConfigError(f"node {self.name!r}: bytes and rates of devices and of their link must be above 0.")
        if self.disk_bytes and not (self.disk_reads > 0 and self.disk_rate > 0):
            raise ConfigError(f"node {self.name!r}: rates of its disks must be above 0.")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that are asked for by one law.

    Attributes:
      classes: by how often batches name them.
      row_bytes: of a row with its optimizer's state.
      ids: that a batch looks up.
    """

    classes: Classes
    row_bytes: float
    ids: float


@dataclasses.dataclass(frozen=True)
class Need:
    """A training.

    Attributes:
      name: of it.
      tables: of the model.
      steps_per_s: global batches a second.
      look_ahead: batches in sight.
      flop: of the dense part, of a global batch with all gradients.
      home_bytes, slot_bytes: of the hosts' memory, by which each row, and each row of a cache, is found; 0: a node's
        `dram_bytes` do not hold them.
    """

    name: str
    tables: Sequence[Table]
    steps_per_s: float
    look_ahead: float = 4.0
    flop: float = 0.0
    home_bytes: float = 0.0
    slot_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of all rows with their optimizers' state."""
        return sum(t.classes.rows * t.row_bytes for t in self.tables)

    @property
    def disk_bytes(self) -> float:
        """The same as records on a disk, which are padded."""
        return sum(t.classes.rows * record_bytes(round(t.row_bytes)) for t in self.tables)

    @property
    def device_bytes_per_s(self) -> float:
        """Bytes that devices move: the row of each id is read, each distinct row with its state read and written."""
        return self.steps_per_s * sum((t.ids + 2 * t.classes.named) * t.row_bytes for t in self.tables)

    def find_bytes(self, cache_bytes: float) -> float:
        """Bytes of all hosts' memory by which rows are found, with so many bytes of caches."""
        rows = sum(t.classes.rows for t in self.tables)
        return self.home_bytes * rows + self.slot_bytes * rows * min(1.0, cache_bytes / self.bytes)

    @functools.cached_property
    def rows(self) -> Classes:
        """All rows, those that are asked for about equally often together."""
        return self._merged(lambda table: 1.0)

    @functools.cached_property
    def by_bytes(self) -> Classes:
        """The same as one cache of bytes sees them, in which a row weighs what it takes."""
        return self._merged(lambda table: table.row_bytes)

    def _merged(self, weight: Callable[[Table], float]) -> Classes:
        q_K = np.concatenate([t.classes.q_K for t in self.tables])
        rows_K = np.concatenate([t.classes.rows_K * weight(t) for t in self.tables])
        bin_K = np.rint(np.log(np.maximum(q_K, 1e-300)) / _WIDTH)
        _, bin_K = np.unique(bin_K, return_inverse=True)
        rows_B, named_B = np.bincount(bin_K, rows_K), np.bincount(bin_K, rows_K * q_K)
        return Classes(rows_B, named_B / np.maximum(rows_B, 1e-300))


def bounds(need: Need, node: Node, nodes: int, tiers: bool) -> dict[str, float]:
    """Shares of the resources of so many nodes that are asked for: 1 is all of it.

    Returns:
      "bytes" and "device bandwidth", and "computing" if the node says how fast it is; with tiers also "link", and with
      a disk "host memory", "disk reads" and "disk writes".
    """
    used = {"device bandwidth": need.device_bytes_per_s / (nodes * node.device_rate)}
    if node.flops:
        used["computing"] = need.steps_per_s * need.flop / (nodes * node.flops)
    if not tiers:
        return {"bytes": need.bytes / (nodes * node.device_bytes), **used}
    # Every row that has left a device has its place behind it, whether or not it is back.
    find = need.find_bytes(nodes * node.device_bytes)
    behind = need.disk_bytes / node.disk_bytes if node.disk_bytes else (need.bytes + find) / max(node.dram_bytes, 1.0)
    held = cache(need.by_bytes, nodes * node.device_bytes, need.look_ahead)
    if held.within == math.inf:
        behind = find = 0.0
    used = {"bytes": behind / nodes, **used, "link": need.steps_per_s * held.misses / (nodes * node.link_rate)}
    if not node.disk_bytes:
        return used
    used["host memory"] = find / (nodes * max(node.dram_bytes, 1.0))
    memory = nodes * node.dram_bytes - find
    within = held.behind(memory) if memory > 0 else held.within
    reads = need.steps_per_s * Cache(need.rows, within, 0.0).misses
    used["disk reads"] = reads / (nodes * node.disk_reads)
    # As many rows go as come, and a disk gives each a block of 4 KiB, whatever the row takes.
    used["disk writes"] = 4096 * reads / (nodes * node.disk_rate)
    return used


def fewest(need: Need, node: Node, tiers: bool) -> dict[str, Any]:
    """The fewest nodes on which no resource is asked for more than there is.

    Returns:
      "nodes", None if a million are not enough; "bound_by", the resource that is asked for most with these; "used", the
      shares of `bounds`.
    """
    low, high = 0, 1
    while max(bounds(need, node, high, tiers).values()) > 1:
        low, high = high, 2 * high
        if high > _MOST:
            return {"nodes": None, "bound_by": None, "used": bounds(need, node, low, tiers)}
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if max(bounds(need, node, middle, tiers).values()) > 1 else (low, middle)
    # One node fewer lacks what binds; on a single node it is what is asked for most.
    used = bounds(need, node, high, tiers)
    lacking = bounds(need, node, high - 1, tiers) if high > 1 else used
    return {"nodes": high, "bound_by": max(lacking, key=lacking.__getitem__), "used": used}


def compared(need: Need, node: Node) -> dict[str, Any]:
    """Nodes with all rows in device memory, with tiers, and how many times fewer: None where one is not to be had."""
    without, with_ = fewest(need, node, False), fewest(need, node, True)
    times = without["nodes"] / with_["nodes"] if without["nodes"] and with_["nodes"] else math.nan
    return {
        "name": need.name,
        "node": dataclasses.asdict(node),
        "bytes": need.bytes,
        "steps_per_s": need.steps_per_s,
        "without": without,
        "with": with_,
        "times": None if math.isnan(times) else times,
    }
