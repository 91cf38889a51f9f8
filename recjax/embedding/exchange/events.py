"""Collectives of an exchange, as it tells them itself: phase, kind, who takes part, bytes with padding."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from recjax.parallel.mesh import ACROSS_GROUPS, AXES
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class Event:
    """A collective of a step, of an exchange.

    Attributes:
      phase: of the step.
      kind: as XLA calls it, such as "all-to-all".
      axes: of the mesh, along which devices take part together.
      members: those that device 0 takes part with, by their numbers in the mesh.
      padded_bytes: of its result on one device, with what is no use.
      inside: whether it is the step inside a host of an exchange in two steps.
      places: the first place in the lists that travels and the one after the last, where these go in pieces.
      piece: number of this piece.
    """

    phase: Phase
    kind: str
    axes: tuple[str, ...]
    members: tuple[int, ...]
    padded_bytes: float
    inside: bool = False
    places: tuple[int, int] | None = None
    piece: int = 0

    @property
    def devices(self) -> int:
        """Number of devices that take part together."""
        return len(self.members)

    @property
    def across_groups(self) -> bool:
        """True if devices of several replica groups take part, one of each."""
        return self.axes == ACROSS_GROUPS

    def between(self, per_host: int) -> str:
        """Returns what it connects: "devices" of one host, "hosts" (one device of each), or "both"."""
        hosts = len({number // per_host for number in self.members})
        return "devices" if hosts == 1 else "hosts" if hosts == self.devices else "both"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Devices that may take part in events: sizes of the mesh axes, replica groups, hosts of each, devices there."""

    replicas: int
    hosts: int
    per_host: int

    @functools.lru_cache(maxsize=256)  # noqa: B019  # of a few meshes
    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the devices that meet device 0 along some axes, by their numbers in the mesh."""
        sizes = dict(zip(AXES, (self.replicas, self.hosts, self.per_host), strict=True))
        numbers = np.arange(self.replicas * self.hosts * self.per_host).reshape(tuple(sizes.values()))
        return tuple(numbers[tuple(slice(None) if axis in axes else 0 for axis in AXES)].ravel().tolist())

    def event(self, phase: Phase, kind: str, axes: tuple[str, ...], padded_bytes: float, inside: bool = False) -> Event:
        """Makes an event among the devices; the arguments are as `Event` has them."""
        return Event(phase, kind, axes, self.members(axes), padded_bytes, inside)
