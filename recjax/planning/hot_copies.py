"""Copies of hot rows on a mesh: bytes that a device holds of them, and what a step does for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from recjax.embedding.segment import HOT, HOT_PER_HOST
from recjax.planning.work import Work

_PASSES = 10  # over the rows of which all are read and written: copied beside the others, their gradients, the new rows


@dataclasses.dataclass(frozen=True)
class HotCopies:
    """Copies of hot rows on the devices of a replica group: see `recjax.embedding.exchange.copies`.

    Attributes:
      devices: N.
      hosts: H, in which these stand.
      per_host: whether every host has a copy, divided over its devices, and not every device.
    """

    devices: int
    hosts: int = 1
    per_host: bool = False

    @property
    def placement(self) -> str:
        """Placement of segments of these rows."""
        return HOT_PER_HOST if self.per_host else HOT

    @property
    def holders(self) -> int:
        """Number of devices that hold a copy together."""
        return self.devices // self.hosts if self.per_host else 1

    @property
    def all_devices(self) -> dict[str, float]:
        """Sizes of a collective of all devices beside its bytes."""
        return {"devices": float(self.devices)} | ({"hosts": float(self.hosts)} if self.hosts > 1 else {})

    def held_bytes(self, row_bytes: Any, slot_bytes: Any) -> Any:
        """Bytes of a row that a device holds between steps, with its part of the optimizer's slots; elementwise."""
        return row_bytes / self.holders + slot_bytes / self.devices

    def step_bytes(self, row_bytes: Any, slot_bytes: Any) -> Any:
        """Bytes of a row in a step, in which devices that hold ranges have all rows besides; elementwise."""
        return self.held_bytes(row_bytes, slot_bytes) + (row_bytes if self.holders > 1 else 0)

    def works(self, rows: int, row_bytes: float) -> list[Work]:
        """Work of a device for so many hot rows of one width in a step."""
        moved, N = rows * row_bytes, self.devices
        marked = moved + 4 * rows  # gradients, and how many devices touched each row
        if self.per_host:
            E, H = self.holders, self.hosts
            inside, across = {"devices": float(E), "hosts": 1.0}, {"devices": float(H), "hosts": float(H)}
            sent = [("all_gather", moved, inside), ("reduce_scatter", marked, inside)]
            sent += [("reduce_scatter", marked / E, across), ("all_gather", moved / E, across)]
        else:
            sent = [("reduce_scatter", marked, self.all_devices), ("all_gather", moved, self.all_devices)]
        works = [Work(kind, {"bytes": size, **among}, 0.0, size) for kind, size, among in sent]
        passes = (_PASSES * moved, 4 * moved / N)  # over all rows, and over those that a device updates
        return works + [Work("elementwise", {"bytes": size}, 0.0, size) for size in passes]
