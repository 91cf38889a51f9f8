"""A table group: one buffer and one set of exchanges. See `layout.py` for what a plan has of them.

Segments whose rows are spread (row-wise; table-row-wise: over one host; table-wise: all rows on one device) and whose
D, dtype, optimizer and precision of the exchange are equal share one buffer and one set of exchanges, whatever their
placement. So do column-wise segments among each other, those in a grid (columns over hosts, rows over the devices of
each), and replicated ones. With one host a grid has all columns together, so its tables are row-wise; with one device a
host they are column-wise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recjax.embedding.exchange.events import Meeting
from recjax.embedding.lines import Lines
from recjax.embedding.optim import Frozen, SlotSpec
from recjax.embedding.row_order import Cut, Split
from recjax.embedding.segment import EXACT, Exchange
from recjax.embedding.sharding import BoundSegment, Locate, Piece, Places, Sharding, Source
from recjax.embedding.spec import FeatureSpec, Rounding, TableDtype

LISTED_ROWS = 2**26  # of a table with hot rows, for whose ids the host keeps a list: 256 MiB


class InReplicas:
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
class Group(InReplicas):
    """Tables that share a buffer and its exchanges.

    Attributes:
      name: stable and readable, for example "row_wise_D16_rowwise_adagrad".
      sharding: the way in which the buffer is spread over N devices, with its exchanges.
      rows: R, rows of one device's part of the buffer.
      segments: the stacked segments; all have this group's D and optimizer.
      sources: what the features look up whose rows travel; those of pooled vectors are in `BoundPlan.pooled`.
      dedup: True if a row travels once, however many of a device's ids ask for it.
      exchange: precision in which rows and gradients travel; not used where all devices hold all rows.
      replicas: groups of N devices that each hold all of this; the batch is split over all of them.
      independent: True if each group of devices holds values of its own, and updates them by its own samples alone.
      atomics: True if a GPU may add gradients up by atomic operations, in any order: see `segment_sums.py`.
      ragged: True if ids and rows travel without padding, which takes a collective that CPUs do not have.
      row_pieces: S, in which the rows that a device fetches are gathered and sent, each in a collective of its own; 1
        where no rows travel.
      homes: rows of tables that have their home in a part, if its buffer is a cache of R of them (`recjax.tiers`);
        0: the buffer holds them all.
      lines: layout of the buffer, if rows lie side by side in it: see `lines.py`.
    """

    name: str
    sharding: Sharding
    rows: int
    segments: tuple[BoundSegment, ...]
    sources: tuple[Source, ...]
    dedup: bool = True
    exchange: Exchange = EXACT
    replicas: int = 1
    independent: bool = False
    atomics: bool = False
    ragged: bool = False
    row_pieces: int = 1
    homes: int = 0
    lines: Lines | None = None

    @property
    def cached(self) -> bool:
        """True if the buffer is a cache of some rows, which changes from batch to batch."""
        return self.homes > 0

    @property
    def home_rows(self) -> int:
        """Homes of a part: R, unless the buffer is a cache."""
        return self.homes or self.rows

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
        """D, the columns of all its segments: those of their tables, unless these are split by columns."""
        return self.segments[0].last - self.segments[0].first

    @property
    def dtype(self) -> TableDtype:
        """The dtype of the values of all its tables: see `TableSpec`."""
        return self.segments[0].spec.dtype

    @property
    def rounding(self) -> Rounding:
        """The rounding of updated values, if they are bfloat16."""
        return self.segments[0].spec.rounding

    @property
    def optimizer(self) -> Any:
        """The sparse optimizer of all its tables."""
        return self.segments[0].spec.optimizer

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

    def owner_of(self, part: int) -> int:
        """Returns the owner whose rows a part of the buffer holds, all of their columns or some."""
        return int(self.place(part)[0])

    @property
    def meeting(self) -> Meeting:
        """The devices of all replica groups, as they meet in collectives."""
        return Meeting(self.replicas, self.hosts, self.per_host)

    @property
    def two_step(self) -> bool:
        """True if rows travel in two steps, inside a host and across hosts: see `routing/keys.py`."""
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

    @property
    def listed(self) -> bool:
        """True if devices list the rows that they fetch; else each has them all, of which some are touched."""
        return self.sharding.listed

    @functools.cached_property
    def slot_group(self) -> Group:
        """The group as the optimizer's slots lie on the devices between steps; see `_in_ranges`."""
        return self._in_ranges(self.sharding.of_slots)

    @functools.cached_property
    def value_group(self) -> Group:
        """The group as its values lie on the devices between steps; see `_in_ranges`."""
        return self._in_ranges(self.sharding.of_values)

    def _in_ranges(self, sharding: Sharding | None) -> Group:
        """The group spread in another way, in which a part has an equal range of the buffer's rows; None: itself."""
        if sharding is None:
            return self
        each = self.rows // sharding.parts
        segments = []
        for segment in self.segments:
            cut = Cut(segment.band.size, sharding.parts, offset=segment.offsets[0], each=each)
            offsets = tuple(max(0, segment.offsets[0] - part * each) for part in range(sharding.parts))
            segments.append(dataclasses.replace(segment, split=cut, offsets=offsets))
        return dataclasses.replace(self, sharding=sharding, rows=each, segments=tuple(segments))

    def codes(self, source: Source, ids_L: np.ndarray) -> np.ndarray:
        """Places of the rows of some ids, on the host.

        A table with hot rows has a list of these numbers, so that an id costs one look-up, however many rows are hot;
        but not where a cache holds some of the rest, for such a list is as long as the table.

        Args:
          source: one of its sources.
          ids_L: int32, in range.

        Returns:
          `destination` * homes of a part + home of each id, -1 where it is not here: integers [L].
        """
        segments = source.segments
        divided = not self.cached and any(s.band.vacant or not self.listed for s in segments)
        if not divided or segments[0].spec.rows > LISTED_ROWS:
            return self._codes(source, ids_L)
        key = (segments[0].spec.name, segments[0].first, tuple(s.number for s in segments))
        codes_V = self._codes_of_tables.get(key)
        if codes_V is None:
            fits = self.owners * self.home_rows < 2**31
            codes_V = self._codes(source, np.arange(segments[0].spec.rows, dtype=np.int32))
            codes_V = self._codes_of_tables[key] = codes_V.astype(np.int32 if fits else np.int64)
        return codes_V.take(ids_L)

    def _codes(self, source: Source, ids_L: np.ndarray) -> np.ndarray:
        owner_L, code_L, here_L = source.locate(ids_L)
        if self.owners > 1:  # or all devices have every row
            code_L = self.destination(owner_L) * np.int64(self.home_rows) + code_L
        found_L: np.ndarray = code_L if here_L is None else np.where(here_L, code_L, -1)
        return found_L

    @functools.cached_property
    def _codes_of_tables(self) -> dict[tuple[str, int, tuple[int, ...]], np.ndarray]:
        """Table, first column and numbers of segments -> the code of each id, [V]."""
        return {}

    @property
    def places(self) -> Places:
        """Places of its segments in the parts of the buffer."""
        return Places.of(self.segments, self.sharding)

    def locator(self, part: jax.Array) -> Locate:
        """Returns the function from homes in a part of the buffer, int32 [], to rows: see `Places.locator`."""
        places = Places(*map(jnp.asarray, self.places))
        return places.locator([segment.band for segment in self.segments], part)

    def shape(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole array, all versions and parts, of rows with this tail: (W,), or () of one number."""
        return self._shape_of(self.versions * self.parts * self.rows, tail)

    def part_shape(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The same of one part of one version."""
        return self._shape_of(self.rows, tail)

    def _shape_of(self, rows: int, tail: tuple[int, ...]) -> tuple[int, ...]:
        return self.lines.shape(rows) if self.lines is not None and tail else (rows, *tail)

    def part_at(self, index: Any) -> int:
        """The part of the buffers, version by version, that a shard with this index of the whole array is."""
        return int(index[0].start or 0) // self.part_shape((self.width,) * (len(index) - 1))[0]

    def lines_of(self, x: Any) -> Lines | None:
        """Returns the layout of an array, None where it is not in lines; one number a row never is."""
        return self.lines if len(x.shape) == 2 else None

    def get_rows(self, x: jax.Array, slots: jax.Array, **known: Any) -> jax.Array:
        """Rows of a part of the buffer, or of one of the optimizer's slots, [*slots.shape, ...].

        Args:
          x: [R, ...], or in lines.
          slots: int32, of any shape; those beyond R give zeros.
          known: facts about them, as `x.at[slots].get` takes them.
        """
        if (lines := self.lines_of(x)) is not None:
            return lines.get(x, slots)
        return x.at[slots].get(mode="fill", fill_value=0, **known)

    def set_rows(self, x: jax.Array, slots_M: jax.Array, new_MxW: jax.Array) -> jax.Array:
        """The same part with other values in some slots, ascending and each once; those beyond R are dropped."""
        if (lines := self.lines_of(x)) is not None:
            return lines.set(x, slots_M, new_MxW)
        return x.at[slots_M].set(new_MxW, mode="drop", unique_indices=True, indices_are_sorted=True)

    def storage_dtype(self, dtype: Any) -> np.dtype[Any]:
        """Dtype of its buffer where tables hold `dtype` unless they say otherwise: see `quantize.py`."""
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else dtype)

    def slots(self) -> dict[str, SlotSpec]:
        """Returns the optimizer's slots for every row in one part of the buffer, by slot name."""
        slots: dict[str, SlotSpec] = self.optimizer.slots(self.width)
        return slots

    @property
    def frozen(self) -> bool:
        """True if no step changes its rows."""
        return isinstance(self.optimizer, Frozen)

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The features that look rows up here."""
        return tuple(dict.fromkeys(source.feature for source in self.sources))

    @property
    def table_names(self) -> list[str]:
        """Names of the tables that it holds something of, in the order of its segments."""
        return list(dict.fromkeys(segment.spec.name for segment in self.segments))

    @property
    def divides_row_means(self) -> bool:
        """True if its optimizer asks for means over rows of which it has only some columns: see `row_statistic.py`."""
        return self.optimizer.row_wise and not self.segments[0].whole_rows

    def row_bytes(self, item_bytes: int) -> int:
        """Bytes of one row of the buffer and of its slots; `item_bytes` is that of an element that is not bfloat16.

        Values and slots that devices have a part of count as much.
        """
        values_bytes = self.width * (2 if self.dtype == "bfloat16" else item_bytes)
        slot_bytes = item_bytes * sum(math.prod(slot.shape) for slot in self.slots().values())
        held_bytes = values_bytes * self.value_group.rows // self.rows
        return held_bytes + slot_bytes * self.slot_group.rows // self.rows

    def counts(self, segment: BoundSegment) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many rows, and how many columns of them, each device holds of a segment: int64 [N] both."""
        owner, column = self.place(np.arange(self.parts))
        start, stop = segment.split.bounds(owner)
        columns = self.columns.start(column + 1) - self.columns.start(column)
        rows, devices = np.asarray(stop - start, np.int64), self.devices  # of named owners int32, too few for bytes
        return np.broadcast_to(rows, devices), np.broadcast_to(columns, devices)

    def holders(self, segment: BoundSegment) -> list[int]:
        """Returns the owners that hold rows of a segment."""
        start, stop = segment.split.bounds(np.arange(self.owners))
        holders: list[int] = np.flatnonzero(start < stop).tolist()
        return holders

    def pieces(self, segment: BoundSegment, part: int | None = None) -> Iterator[Piece]:
        """Yields the pieces of a segment in all parts of the buffer, or in one."""
        for k in range(self.parts) if part is None else (part,):
            owner, column = self.place(k)
            start, stop = segment.split.bounds(owner)
            first, last = int(self.columns.start(column)), int(self.columns.start(column + 1))
            yield Piece(k, segment.offsets[owner], int(start), int(stop), segment.first + first, segment.first + last)
