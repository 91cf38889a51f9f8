"""Ways to spread the buffer of one table group over devices: who owns which rows and columns, along which mesh axes.

N are the devices of one replica group, on H hosts of E devices each. What a step sends for each way is for the
exchanges: see `exchange/base.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, BATCH_AXES, INSIDE_HOST, MODEL_AXES


@dataclasses.dataclass(frozen=True)
class Sharding(abc.ABC):
    """A way to spread a buffer [parts * R, W] over the devices of a replica group.

    Attributes:
      devices: N.
      hosts: H, machines in which they stand, N / H in each.
    """

    spread: ClassVar[bool] = True  # whether devices differ in what they hold
    listed: ClassVar[bool] = True  # whether devices list the rows that they fetch
    updates_apart: ClassVar[bool] = True  # whether devices differ in the rows that they update
    devices: int
    hosts: int

    @property
    def parts(self) -> int:
        """Parts of the buffer: N, or 1 if every device holds all of it."""
        return self.devices

    @property
    def per_host(self) -> int:
        """E, devices of a host."""
        return self.devices // self.hosts

    @property
    @abc.abstractmethod
    def owners(self) -> int:
        """O, parts among which a row is sought."""

    @property
    def column_parts(self) -> int:
        """Over how many devices or hosts the columns of a row are spread."""
        return 1

    @property
    def two_step(self) -> bool:
        """Returns whether rows travel in two steps, inside a host and across hosts."""
        return 1 < self.hosts < self.devices

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the exchange with the owners: of the whole of it, or of its step across hosts."""
        return ACROSS_HOSTS if self.two_step else MODEL_AXES

    def padded(self, rows: int) -> int:
        """Rows that a part of the buffer has if it is to hold so many."""
        return rows

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Mesh axes that the buffer's rows are split over; the arguments are as `Group` has them."""
        return MODEL_AXES if synchronous else BATCH_AXES

    @property
    def of_slots(self) -> Sharding | None:
        """None, or how the optimizer's slots are spread where not as the rows are: see `Group.slot_group`."""
        return None

    @property
    def of_values(self) -> Sharding | None:
        """None, or how the values are spread between steps where a step has more: see `Group.value_group`."""
        return None

    def place(self, part: Any) -> tuple[Any, Any]:
        """(owner, number of its columns) of a part of the buffer: the rows and the columns that it holds."""
        return part % self.owners, part // self.owners

    def this_part(self) -> jax.Array:
        """int32 []: the part that this device holds, inside `jax.shard_map`."""
        return jax.lax.axis_index(MODEL_AXES)


@dataclasses.dataclass(frozen=True)
class RowSharding(Sharding):
    """Each device holds some rows of the stacked tables, whole."""

    @property
    def owners(self) -> int:
        """O = N."""
        return self.devices


@dataclasses.dataclass(frozen=True)
class ColumnSharding(Sharding):
    """Each device holds some columns of all rows: ceil(D / N) of them."""

    column_axes: ClassVar[tuple[str, ...]] = MODEL_AXES  # along which devices hold other columns of the same rows

    @property
    def owners(self) -> int:
        """O = 1: all devices have every row."""
        return 1

    @property
    def column_parts(self) -> int:
        """N."""
        return self.devices


@dataclasses.dataclass(frozen=True)
class GridSharding(ColumnSharding):
    """Each device holds some columns, by its host, of some rows, by its place within the host."""

    column_axes: ClassVar[tuple[str, ...]] = ACROSS_HOSTS

    @property
    def owners(self) -> int:
        """O = E: the devices of one host share the rows."""
        return self.per_host

    @property
    def column_parts(self) -> int:
        """H."""
        return self.hosts


@dataclasses.dataclass(frozen=True)
class ReplicatedSharding(Sharding):
    """Every device holds everything."""

    spread: ClassVar[bool] = False
    updates_apart: ClassVar[bool] = False

    @property
    def parts(self) -> int:
        """One: all of the buffer."""
        return 1

    @property
    def owners(self) -> int:
        """O = 1."""
        return 1

    @property
    def two_step(self) -> bool:
        """Never: no row travels."""
        return False

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Split only where replica groups hold values of their own."""
        return ACROSS_GROUPS if independent else ()

    def this_part(self) -> jax.Array:
        """Part 0."""
        return jnp.int32(0)


@dataclasses.dataclass(frozen=True)
class RangeSharding(RowSharding):
    """Layout of hot rows or of their slots between steps: equal ranges, and the same along the other mesh axes.

    Replica groups that hold the same have the same ranges.

    Attributes:
      over: the axes, of MODEL_AXES, along which the ranges follow each other.
    """

    over: tuple[str, ...] = MODEL_AXES

    @property
    def parts(self) -> int:
        """Number of ranges."""
        sizes = dict(zip(MODEL_AXES, (self.hosts, self.per_host), strict=True))
        return math.prod(sizes[axis] for axis in self.over)

    @property
    def owners(self) -> int:
        """O: all ranges."""
        return self.parts

    def partition_axes(self, synchronous: bool, independent: bool) -> tuple[str, ...]:
        """Axes of the buffer's rows: what they are made of is known to be alike."""
        return (*ACROSS_GROUPS, *self.over) if independent else self.over

    def this_part(self) -> jax.Array:
        """int32 []: the number of this device's range."""
        return jax.lax.axis_index(self.over)

    def gather(self, x_M: jax.Array) -> jax.Array:
        """All rows [parts * M, ...] of an array of which devices hold ranges [M, ...]."""
        return jax.lax.all_gather(x_M, self.over, tiled=True)

    def own(self, x_R: jax.Array) -> jax.Array:
        """This device's range of an array of all rows: the inverse of `gather`."""
        each = len(x_R) // self.parts
        return jax.lax.dynamic_slice_in_dim(x_R, self.this_part() * each, each)


@dataclasses.dataclass(frozen=True)
class HotSharding(ReplicatedSharding):
    """Every device holds all rows, and updates a part of them."""

    listed: ClassVar[bool] = False
    updates_apart: ClassVar[bool] = True

    @property
    def divided(self) -> tuple[str, ...]:
        """Mesh axes along which each device holds an equal range of the rows between steps: none here."""
        return ()

    @property
    def copied(self) -> tuple[str, ...]:
        """The other ones of MODEL_AXES, along which devices hold the same rows, of which each updates a range."""
        return tuple(axis for axis in MODEL_AXES if axis not in self.divided)

    def padded(self, rows: int) -> int:
        """Like `Sharding.padded`: as many for each device."""
        return -(-rows // self.devices) * self.devices

    @property
    def of_values(self) -> Sharding | None:
        """Like `Sharding.of_values`: None, or an equal range of the rows on each device of a host."""
        return RangeSharding(self.devices, self.hosts, self.divided) if self.divided else None

    @property
    def of_slots(self) -> Sharding:
        """Like `Sharding.of_slots`: an equal range of the rows on each device, within those that it holds."""
        return RangeSharding(self.devices, self.hosts, (*self.divided, *self.copied))


@dataclasses.dataclass(frozen=True)
class HotPerHostSharding(HotSharding):
    """Every host holds all rows, an equal range on each of its devices, which has them all within a step."""

    @property
    def divided(self) -> tuple[str, ...]:
        """Like `HotSharding.divided`: those within a host, which are all if there is one host."""
        return INSIDE_HOST if self.hosts > 1 else MODEL_AXES
