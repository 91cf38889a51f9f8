"""Places of rows: ways to spread a buffer over devices, segments in its parts, and the way back from these to rows.

N are the devices of one replica group, on H hosts of E devices each. A `Sharding` says who owns which rows and columns,
along which mesh axes; what a step sends for it is for the exchanges: see `exchange/base.py`.

A row has an owner and, in the owner's part of the buffer, a *home*: one of R numbers that its segment, band and storage
position determine (`BoundSegment.locate`; back again: `Places`). The *slot* is the row of the buffer that holds it: the
home itself, but in a cache (`Group.cached`), whose R slots hold some of more homes, in each step others. Then the
device has an int32 array with the home of each slot, split as the buffer is; the host, which routes, has the way back
(`recjax.tiers.directory`).

Whatever depends on a row (rounding, initial values, export, import, the order of a sum over rows) asks for its
position, never for its slot.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.row_order import Band, RowOrder, Split, library
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import ACROSS_GROUPS, ACROSS_HOSTS, BATCH_AXES, INSIDE_HOST, MODEL_AXES

NO_HOME = -1  # of a slot of a cache that holds no row
# From homes [M] to (number of a segment, storage position, whether there is such a row); else any position.
Locate = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
Homes = dict[str, jax.Array]  # name of a cache -> int32 [versions * parts * R], the home of each slot


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

    def gather(self, x_M: jax.Array) -> jax.Array:
        """All rows of an array in which each device holds a range of them between steps: here it has all."""
        return x_M

    def take_range(self, x_R: jax.Array) -> jax.Array:
        """The inverse of `gather`."""
        return x_R


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

    def take_range(self, x_R: jax.Array) -> jax.Array:
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


@dataclasses.dataclass(frozen=True)
class BoundSegment:
    """A segment's place in its group's buffer.

    Attributes:
      spec: the table that it is a part of.
      placement: as the plan has it.
      split: the rows of its band, by their numbers, over the parts of the buffer that differ in rows.
      offsets: where its range starts in each of those parts, in rows.
      band: the rows of the table that it holds.
      first: its first column.
      last: the one after its last column.
      number: of the segment in the table's plan.
    """

    spec: TableSpec
    placement: str
    split: Split
    offsets: tuple[int, ...]
    band: Band
    first: int
    last: int
    number: int = 0

    @functools.cached_property
    def order(self) -> RowOrder:
        """Maps rows to storage positions."""
        return RowOrder(self.spec.rows)

    @property
    def title(self) -> str:
        """The name of its table, with its range of columns unless these are all."""
        return self.spec.name if self.whole_rows else f"{self.spec.name}[{self.first}:{self.last}]"

    @property
    def whole_rows(self) -> bool:
        """True if it holds all columns of the table."""
        return self.last - self.first == self.spec.dim

    def locate(self, ids: Any) -> tuple[Any, Any, Any]:
        """Returns (owner, home in the owner's part of the buffer, whether it is here) of each row id, elementwise.

        The last is None if the segment holds all rows of its table. For NumPy and JAX.
        """
        number, here = self.band.number(self.order.position(ids))
        if here is not None:
            number = library(ids).minimum(number, self.band.size - 1)  # rows elsewhere may count as one after the last
        owner, within = self.split.owner_and_offset(number)
        return owner, within + library(ids).asarray(self.offsets, ids.dtype)[owner], here


@dataclasses.dataclass(frozen=True)
class Piece:
    """Share of a segment that one part of a group's buffer holds.

    Attributes:
      part: which part, 0 to `Group.parts` - 1.
      offset: its first row there; its first column there is 0.
      start, stop: the rows that it holds, by their numbers in the segment's band.
      first, last: the columns of the table that it holds, `last` excluded.
    """

    part: int
    offset: int
    start: int
    stop: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Source:
    """The segments of one group that a feature looks its ids up in: bands of one table with the same columns.

    Attributes:
      name: unique in the bound plan; the feature's own where this is all that it looks up.
      feature: whose ids are sought.
      segments: which of them hold some of the rows.
    """

    name: str
    feature: FeatureSpec
    segments: tuple[BoundSegment, ...]

    def locate(self, ids: Any) -> tuple[Any, Any, Any]:
        """Like `BoundSegment.locate`, in whichever segment has the row."""
        owner, home, here = self.segments[0].locate(ids)
        where = library(ids).where
        for segment in self.segments[1:]:
            other_owner, other_home, there = segment.locate(ids)
            owner, home = where(there, other_owner, owner), where(there, other_home, home)
            here = here | there
        return owner, home, None if self.whole else here

    @property
    def whole(self) -> bool:
        """True if the segments have all rows of the table."""
        return sum(segment.band.members for segment in self.segments) == self.segments[0].spec.rows


class Places(NamedTuple):
    """Places of a group's T segments in the P parts of its buffer, as arguments of a program. All int32.

    Attributes:
      offset_PxT: where a segment's rows start.
      first_PxT: the first of them, by its number in the segment's band.
      stop_PxT: the one after the last.
    """

    offset_PxT: Any
    first_PxT: Any
    stop_PxT: Any

    @classmethod
    def of(cls, segments: Sequence[BoundSegment], sharding: Sharding) -> Places:
        """Returns the places of segments that share a buffer which is spread so."""
        owner_P = np.asarray(sharding.place(np.arange(sharding.parts))[0])
        offsets = [np.asarray(s.offsets)[owner_P] for s in segments]
        bounds = [s.split.bounds(owner_P) for s in segments]
        columns = offsets, [first for first, _ in bounds], [stop for _, stop in bounds]
        return cls(*(np.stack(column, axis=1).astype(np.int32) for column in columns))

    def locator(self, bands: Sequence[Band | None], part: Any) -> Locate:
        """From homes in one part of the buffer back to tables and rows, on the device.

        Args:
          bands: those of the segments; None is one of all rows.
          part: int32 [], which one.
        """
        offset_T, first_T, stop_T = self.offset_PxT[part], self.first_PxT[part], self.stop_PxT[part]

        def locate(homes_M: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            t_M = jnp.searchsorted(offset_T, homes_M, side="right") - 1
            number_M = first_T[t_M] + homes_M - offset_T[t_M]
            used_M = number_M < stop_T[t_M]
            position_M = number_M
            for t, band in enumerate(bands):
                if band is not None and band.chosen is not None:
                    mine_M = (t_M == t) & used_M
                    position_M = jnp.where(mine_M, band.position(jnp.where(mine_M, number_M, 0)), position_M)
            return t_M, position_M, used_M

        return locate


def homes_of(slots_M: jax.Array, homes_R: jax.Array | None, beyond: int = 0) -> jax.Array:
    """The homes of some slots of this device's part; of slots at R or beyond numbers at R or beyond, all different.

    Args:
      slots_M: int32.
      homes_R: int32 [R], of a cache; None: every slot is its own home.
      beyond: added to slots at R or beyond: what brings them beyond all homes.
    """
    if homes_R is None:
        return slots_M
    inside_M = slots_M < homes_R.shape[0]
    return jnp.where(inside_M, homes_R.at[jnp.where(inside_M, slots_M, 0)].get(), slots_M + beyond)
