"""Slots of the rows that a batch names, told to all processes by those that hold the rows.

A process decides which rows come to the caches of its own devices, and which leave: it alone has their directories. Its
devices ask others for rows by their slots there. So each process sends the slots of the rows of its own that the batch
names, 4 bytes each, in the order of their homes, which all processes know (`recjax.train.named_rows`). They travel over
the mesh while the batch before is made ready. Where several processes hold the same rows, or other columns of them, the
first one tells their slots, and a checksum of what the others have decided says whether it is the same.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.capacity import rung
from recjax.errors import TrainingError
from recjax.parallel.mesh import Share, everywhere, put_share, sharded
from recjax.tiers.admission import OfOwners

_HEAD = 3  # numbers before an owner's slots
Owner = tuple[str, int]  # a group's name, and the number of one of its owners


@dataclasses.dataclass(frozen=True)
class OwnerSlots:
    """Decisions on one owner's caches for one batch.

    Attributes:
      slots_U: int32, the slot of each home that the batch names, in the order of the homes.
      come: number of rows that come.
      leave: number of rows that leave.
      needed: 0, or how many rows the cache would have to hold and cannot; then the others mean nothing.
    """

    slots_U: np.ndarray
    come: int
    leave: int
    needed: int = 0


class SlotExchange:
    """Sends each process's decisions about its own rows to all others. All call it alike, batch after batch."""

    def __init__(self, bound: BoundPlan, mesh: Mesh) -> None:
        """Exchanges slots of the caches of a plan on these devices."""
        self._mesh, self._shares, self._size = mesh, Share.of_all(mesh), 0
        self._holders: dict[Owner, list[int]] = {}  # owner of rows -> the processes that hold some, the first one tells
        for group in bound.cached:
            where: Any = sharded(mesh, group.partition_axes).devices_indices_map((group.parts,))
            parts = [((index or (slice(None),))[0].start or 0, device.process_index) for device, index in where.items()]
            for owner in range(group.owners):
                held = {process: None for part, process in sorted(parts) if group.owner_of(part) == owner}
                self._holders[group.name, owner] = list(held)

    def begin(self, named: OfOwners, decided: Mapping[Owner, OwnerSlots]) -> jax.Array:
        """Sends what this process has decided; nothing is awaited.

        Args:
          named: group name -> of each owner the homes that the batch names.
          decided: for each owner of which this process holds some rows.
        """
        own = self._shares[jax.process_index()]
        lengths = [self._length(process, named) for process in range(len(self._shares))]
        needed = max(-(-n // share.count) for n, share in zip(lengths, self._shares, strict=True))
        if needed > self._size:
            self._size = rung(needed)  # each is a program
        message = self._message(jax.process_index(), decided)
        lists = np.zeros(own.count * self._size, np.int32)
        lists[: len(message)] = message
        return everywhere(put_share(lists.reshape(own.count, self._size), self._mesh))

    def finish(self, lists: jax.Array, named: OfOwners) -> dict[Owner, OwnerSlots]:
        """Returns what all processes have sent for a batch, of all owners.

        Raises:
          TrainingError: processes that hold the same rows have decided differently.
        """
        lists_NxC = np.asarray(lists)
        told: dict[Owner, OwnerSlots] = {}
        sums = []
        for process, share in enumerate(self._shares):
            message = lists_NxC[share.first : share.first + share.count].ravel()
            sums.append(int(message[:1].view(np.uint32)[0]))
            at = 1
            for owner in self._told_by(process):
                needed, come, leave = message[at : at + _HEAD].tolist()
                count = len(named[owner[0]][owner[1]])
                told[owner] = OwnerSlots(message[at + _HEAD : at + _HEAD + count], come, leave, needed)
                at += _HEAD + count
        if astray := [n for n, own_sum in enumerate(sums) if own_sum != self._checksum(n, told)]:
            raise TrainingError(
                f"process{'es' if len(astray) > 1 else ''} {', '.join(map(str, astray))} decided otherwise than other "
                "processes that hold the same rows which of them go to the devices' caches (tier.device_bytes), though "
                "all got the same batches. Check their memory, give all the same software, and start the same command "
                "again: the run goes on from its last checkpoint."
            ).in_all()
        return told

    def _told_by(self, process: int) -> list[Owner]:
        return [owner for owner, holders in self._holders.items() if holders[0] == process]

    def _length(self, process: int, named: OfOwners) -> int:
        return 1 + sum(_HEAD + len(named[name][owner]) for name, owner in self._told_by(process))

    def _message(self, process: int, decided: Mapping[Owner, OwnerSlots]) -> np.ndarray:
        """The checksum of what others tell, then for each owner that this process tells its numbers and slots."""
        pieces = [np.array([self._checksum(process, decided)], np.uint32).view(np.int32)]
        for owner in self._told_by(process):
            own = decided[owner]
            pieces += [np.array([own.needed, own.come, own.leave], np.int32), own.slots_U]
        return np.concatenate(pieces)

    def _checksum(self, process: int, decided: Mapping[Owner, OwnerSlots]) -> int:
        """Checksum of the slots of rows that a process holds but does not tell."""
        found = 0
        for owner, holders in self._holders.items():
            if process in holders[1:]:
                found = zlib.crc32(np.ascontiguousarray(decided[owner].slots_U).tobytes(), found)
        return found
