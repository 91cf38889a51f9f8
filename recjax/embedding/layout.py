"""A plan bound to a number of devices: the buffer of each table, and the place of each row in it. See `bind.py`.

Tables whose rows are spread (row-wise; table-row-wise: over one host; table-wise: all rows on one device) and whose D,
dtype, optimizer and precision of the exchange are equal share one buffer and one set of exchanges, whatever their
placement. So do column-wise tables among each other, those in a grid (columns over hosts, rows over the devices of
each), and replicated ones. With one host a grid has all columns together, so its tables are row-wise; with one device a
host they are column-wise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recjax.embedding.optim import SlotSpec
from recjax.embedding.plan import EXACT, Exchange
from recjax.embedding.row_order import RowOrder, Split, library
from recjax.embedding.spec import FeatureSpec, Rounding, TableDtype, TableSpec

if TYPE_CHECKING:
    from recjax.embedding.sharding.base import Sharding

ACROSS = " across hosts"  # after a group's name: the name of the capacity of its exchange across hosts
SUMMED = " across replicas"  # the same for the rows whose gradients a device sends to the other replica groups


@dataclasses.dataclass(frozen=True)
class BoundTable:
    """A table's place in its group's buffer.

    Attributes:
      spec: the table.
      placement: as the plan has it.
      split: its storage positions over the parts of the buffer that differ in rows.
      offsets: where its range starts in each of those parts, in rows.
    """

    spec: TableSpec
    placement: str
    split: Split
    offsets: tuple[int, ...]

    @functools.cached_property
    def order(self) -> RowOrder:
        """Maps rows to storage positions."""
        return RowOrder(self.spec.rows)

    def locate(self, ids: Any) -> tuple[Any, Any]:
        """Returns (owner, slot in the owner's part of the buffer) of each row id, elementwise. For NumPy and JAX."""
        owner, within = self.split.owner_and_offset(self.order.position(ids))
        return owner, within + library(ids).asarray(self.offsets, ids.dtype)[owner]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rectangle of a table in one part of its group's buffer.

    Attributes:
      part: which part, 0 to `Group.parts` - 1.
      offset: its first row there; its first column there is 0.
      start, stop: the storage positions that it holds.
      first, last: the columns that it holds, `last` excluded.
    """

    part: int
    offset: int
    start: int
    stop: int
    first: int
    last: int


class _InReplicas:
    """Base of what is spread over `replicas` groups of `devices` devices each."""

    devices: int
    replicas: int
    independent: bool

    @property
    def all_devices(self) -> int:
        """Devices of all replica groups, over which the batch is split."""
        return self.devices * self.replicas

    @property
    def synchronous(self) -> bool:
        """True if several groups of devices hold the same values, and agree on the gradients in each step."""
        return self.replicas > 1 and not self.independent


@dataclasses.dataclass(frozen=True)
class Group(_InReplicas):
    """Tables that share a buffer and its exchanges.

    Attributes:
      name: stable and readable, for example "row_wise_D16_rowwise_adagrad".
      sharding: the way in which the buffer is spread over N devices, with its exchanges.
      rows: R, rows of one device's part of the buffer.
      tables: the stacked tables; all have this group's D and optimizer.
      features: the features that look them up.
      dedup: True if a row travels once, however many of a device's ids ask for it.
      exchange: precision in which rows and gradients travel; not used where all devices hold all rows.
      replicas: groups of N devices that each hold all of this; the batch is split over all of them.
      independent: True if each group of devices holds values of its own, and updates them by its own samples alone.
    """

    name: str
    sharding: Sharding
    rows: int
    tables: tuple[BoundTable, ...]
    features: tuple[FeatureSpec, ...]
    dedup: bool = True
    exchange: Exchange = EXACT
    replicas: int = 1
    independent: bool = False

    @property
    def versions(self) -> int:
        """Versions of the values: each is a buffer, and in the array they follow one another."""
        return 1 if self.synchronous else self.replicas

    @property
    def devices(self) -> int:  # type: ignore[override]  # the base declares a field; here it can only be read
        """N, devices of one replica group."""
        return self.sharding.devices

    @property
    def hosts(self) -> int:
        """H, machines that the N devices are in, N / H in each."""
        return self.sharding.hosts

    @property
    def partition_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the buffer's rows are split."""
        return self.sharding.partition_axes(self.synchronous, self.independent)

    @property
    def dim(self) -> int:
        """D, the embedding dimension of all its tables."""
        return self.tables[0].spec.dim

    @property
    def dtype(self) -> TableDtype:
        """The dtype of the values of all its tables: see `TableSpec`."""
        return self.tables[0].spec.dtype

    @property
    def rounding(self) -> Rounding:
        """The rounding of updated values, if they are bfloat16."""
        return self.tables[0].spec.rounding

    @property
    def optimizer(self) -> Any:
        """The sparse optimizer of all its tables."""
        return self.tables[0].spec.optimizer

    @property
    def spread(self) -> bool:
        """True if the devices hold different rows or columns, so that rows travel."""
        return self.sharding.spread

    @property
    def parts(self) -> int:
        """Number of parts of one version of the buffer [parts * R, width]: N, or 1 if every device holds all of it."""
        return self.sharding.parts

    @property
    def per_host(self) -> int:
        """E, devices of a host."""
        return self.sharding.per_host

    @property
    def owners(self) -> int:
        """O, parts among which a row is sought: N if rows are spread, those of one host in a grid, else 1."""
        return self.sharding.owners

    @property
    def columns(self) -> Split:
        """The split of the D columns over devices or hosts; into one part where a device has whole rows."""
        return Split(self.dim, self.sharding.column_parts)

    @property
    def width(self) -> int:
        """W, columns of the buffer: D, or the most that a part has if the columns are spread."""
        return self.columns.longest

    def place(self, part: Any) -> tuple[Any, Any]:
        """Returns (owner, part of `columns`) of a part of the buffer: the rows and the columns that it holds."""
        return self.sharding.place(part)

    @property
    def two_step(self) -> bool:
        """True if rows travel in two steps, inside a host and across hosts: see `routing/hierarchical.py`."""
        return self.sharding.two_step

    @property
    def num_row_lists(self) -> int:
        """Number of lists of rows that a device fetches: one from each owner, or in two steps from each relay."""
        return min(self.owners, self.per_host) if self.two_step else self.owners

    @property
    def num_peers(self) -> int:
        """Number of owners that one list is gathered from: 1, or in two steps, if rows are spread, one of each host."""
        return self.owners // self.num_row_lists

    def destination(self, owner: Any) -> Any:
        """Returns the number of an owner in the order of (list, owner within the list)."""
        if self.num_peers == 1:
            return owner
        return owner % self.num_row_lists * self.num_peers + owner // self.num_row_lists

    def slots(self) -> dict[str, SlotSpec]:
        """Returns the optimizer's slots for every row in one part of the buffer, by slot name."""
        slots: dict[str, SlotSpec] = self.optimizer.slots(self.width)
        return slots

    def table(self, name: str) -> BoundTable:
        """Returns the stacked table called `name`."""
        return next(t for t in self.tables if t.spec.name == name)

    def pieces(self, table: BoundTable, part: int | None = None) -> Iterator[Piece]:
        """Yields the pieces of a table in all parts of the buffer, or in one."""
        for k in range(self.parts) if part is None else (part,):
            owner, column = self.place(k)
            start, stop = int(table.split.start(owner)), int(table.split.start(owner + 1))
            first, last = int(self.columns.start(column)), int(self.columns.start(column + 1))
            yield Piece(k, table.offsets[owner], start, stop, first, last)


@dataclasses.dataclass(frozen=True)
class BoundPlan(_InReplicas):
    """A plan bound to N devices in equal hosts, or to as many in each of some replica groups.

    Attributes:
      devices: N.
      hosts: machines that these are in.
      groups: the table groups.
      features: all features.
      replicas: groups of N devices.
      independent: as `Group` has it.
    """

    devices: int
    hosts: int
    groups: tuple[Group, ...]
    features: tuple[FeatureSpec, ...]
    replicas: int = 1
    independent: bool = False
