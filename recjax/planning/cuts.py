"""Splits tables into shards that can be divided evenly among devices.

A shard of which any load exceeds a device's share of that is split:

  by rows     as far as its ids do so, since each shard of columns asks for all ids once more
  by columns  else, into ranges of one width for all tables, which then share a buffer, and what remains; of 32 at
              least, or so many that the rows on a device can be counted in int32
  by rows     where columns are as few as they may be

The same if its bytes exceed a device's share of those in the same buffer, which would be larger on all devices for this
shard alone. Buffers that hold next to nothing may be uneven (`_SPARE`), so that the small tables of every width stay
whole.

The common width is the one with which samples send least: the columns of a table's vector from each part of its rows,
and its ids to each range of its columns. Rows are split evenly among distinct devices. A table that is split by rows
and would come to as many shards as there are devices is split by rows alone, among all of them: that asks for its ids
once.

Rows of tables whose owners pool are split for bytes held, since each part sends as many vectors, and for more ids than
`LISTED` times a device's share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from recjax.embedding.bind import stack_of
from recjax.embedding.segment import Exchange
from recjax.embedding.spec import MAX_ROWS, TableSpec
from recjax.planning.loads import LOADS, Workload

NARROWEST = 32  # columns that a split leaves a shard
_SPARE = 0.03  # of the bytes that a device holds: those that all buffers together may allocate in vain for one shard
LISTED = 2.0  # times the mean that a device may have of ids, and read, where owners pool
_ROUNDS = 20
_ID_BYTES = 200  # that a GPU sends while an owner gathers, adds up and sorts one id more: 8 ns on a V100 at 25 GB/s
_HELD, _READ, _EXCHANGED, _POOLED, _IDS = range(len(LOADS))  # as `LOADS` has them
_SENT_K = np.array([0, 0, 2, 2, 12])  # bytes sent in a step for each load: there and back, ids with statistics of rows

Stack = tuple[Any, ...]  # what segments that share a buffer have in common: see `bind.stack_of`


@dataclasses.dataclass(frozen=True)
class Cut:
    """A table cut into ranges of columns, each of so many parts of rows."""

    spec: TableSpec
    width: int  # columns of each range; the last may have fewer
    rows: int = 1
    why: str = ""

    @functools.cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The first column of each range, and the one after its last."""
        dim = self.spec.dim
        return tuple((first, min(first + self.width, dim)) for first in range(0, dim, self.width))

    @functools.cached_property
    def widths(self) -> dict[int, int]:
        """Columns of a range -> how many ranges have as many."""
        whole, rest = divmod(self.spec.dim, self.width)
        return {self.width: whole} | ({rest: 1} if rest else {})


@dataclasses.dataclass(frozen=True)
class Shares:
    """Loads of shards in shares of a device: those of `LOADS`, of each buffer its bytes, then ids pooled; M in all.

    Attributes:
      demand: whose they are.
      total_K: the loads of all devices together.
      stacks: number of each buffer.
      room_GxL: bytes and ids of each buffer that are right for a device: the mean, or those of its largest shard.
      uneven_K: loads that are, where owners pool.
    """

    demand: Demand
    total_K: np.ndarray
    stacks: dict[Stack, int]
    room_GxL: np.ndarray
    uneven_K: np.ndarray

    @functools.cached_property
    def mean_K(self) -> np.ndarray:
        """Means over devices; 1 where there is nothing. Of ids where owners pool `uneven_K`."""
        mean_K = self.total_K / self.demand.work.devices
        if self.pools:
            mean_K[[_READ, _IDS]] = self.uneven_K[[_READ, _IDS]]
        return np.where(mean_K > 0, mean_K, 1.0)

    def of_shard(self, cut: Cut, width: int) -> np.ndarray:
        """Returns the loads of one part of the rows of so many columns of a table, float64 [M]."""
        loads_K, stack = self.demand.of_part(cut, width)
        shares_GxL = np.zeros((len(self.stacks), 2))
        shares_GxL[self.stacks[stack]] = loads_K[[_HELD, _IDS]] / self.room_GxL[self.stacks[stack]]
        shares_GxL[:, 1] *= self.demand.pools(cut)
        return np.concatenate([loads_K / self.mean_K, shares_GxL.T.ravel()])

    @functools.cached_property
    def base_NxM(self) -> np.ndarray:
        """Loads that the devices have before, float64 [N, M]."""
        base_NxG = np.zeros((self.demand.work.devices, len(self.stacks)))
        for stack, bytes_N in self.demand.base_stacks.items():
            base_NxG[:, self.stacks[stack]] = bytes_N / self.room_GxL[self.stacks[stack], 0]
        return np.concatenate([self.demand.base_NxK / self.mean_K, base_NxG, np.zeros_like(base_NxG)], axis=1)

    def imbalance(self, loads_NxM: np.ndarray) -> float:
        """The most over the mean of any load, or bytes allocated over those held."""
        return max(float(loads_NxM[:, : len(LOADS)].max()), self.costs(loads_NxM)[0])

    @property
    def pools(self) -> bool:
        """True if pooled vectors are exchanged."""
        return bool(self.total_K[_POOLED])

    def costs(self, loads_NxM: np.ndarray) -> tuple[float, float, float]:
        """Returns costs of padding by the fullest devices.

        These are bytes allocated over those held; bytes that a device sends in a step, about; and those that it could
        send while owners work on padding: on as many ids for each buffer as its fullest owner has.
        """
        G = len(self.stacks)
        loads_NxK, filled_NxG, ids_NxG = np.split(loads_NxM, [len(LOADS), len(LOADS) + G], axis=1)
        bytes_G, ids_G = self.room_GxL.T
        allocated = self.demand.other_bytes + float((filled_NxG.max(0) * bytes_G).sum())
        padding = float((ids_NxG.max(0) * ids_G).sum() - (ids_NxG * ids_G).sum(1).max(initial=0))
        sent = float((loads_NxK.max(0) * self.mean_K * _SENT_K).sum())
        return allocated / float(self.mean_K[_HELD]), sent, _ID_BYTES * padding


@dataclasses.dataclass(frozen=True, eq=False)
class Demand:
    """Loads of tables that are to be placed in the presence of others.

    Attributes:
      work: the step's work, and the devices that share it.
      exchange: of all tables to be placed.
      base_NxK: loads by other tables.
      base_stacks: bytes of other tables in buffers that tables to be placed may share, on each device, [N].
      other_bytes: of one device, in all other buffers.
      fewer: times that vectors have to be fewer bytes than rows to be exchanged, where the kind is left open.
      wider: columns that a table must have more than for that.
    """

    work: Workload
    exchange: Exchange
    base_NxK: np.ndarray
    base_stacks: dict[Stack, np.ndarray]
    other_bytes: float
    fewer: float = 1.0
    wider: int = 0
    # What is asked again for many cuts, by the table's name and what it depends on; the same for any `fewer`.
    _sent: dict[tuple[str, int, int], tuple[float, float]] = dataclasses.field(default_factory=dict)
    _loads: dict[tuple[str, int, int, bool], tuple[np.ndarray, Stack]] = dataclasses.field(default_factory=dict)

    def bytes_sent(self, cut: Cut) -> tuple[float, float]:
        """Bytes of a device in a step if distinct rows of a table that is cut so travel, and if vectors do."""
        spec, ranges = cut.spec, len(cut.ranges)
        if (key := (spec.name, ranges, cut.rows)) not in self._sent:
            self._sent[key] = self.work.bytes_sent(spec, self.exchange, spec.dim, ranges, cut.rows)
        return self._sent[key]

    def exchange_of(self, cut: Cut) -> Exchange:
        """The exchange of a table that is cut so; the kind, if that is left open, by the bytes."""
        return dataclasses.replace(self.exchange, kind="pooled" if self.pools(cut) else "rows")

    def pools(self, cut: Cut) -> bool:
        """True if a table that is cut so exchanges pooled vectors."""
        if self.exchange.kind != "auto":
            return self.exchange.kind == "pooled"
        rows, vectors = self.bytes_sent(cut)
        return vectors * self.fewer < rows and cut.spec.dim > self.wider and self.work.devices > 1

    def of_part(self, cut: Cut, width: int) -> tuple[np.ndarray, Stack]:
        """Loads of one part of the rows of so many columns of a table, [K], and what shares a buffer with them."""
        spec = cut.spec
        if (key := (spec.name, width, cut.rows, self.pools(cut))) not in self._loads:
            exchange = self.exchange_of(cut)
            loads_K = self.work.of_columns(spec, width, exchange, parts=cut.rows)
            self._loads[key] = loads_K, stack_of(spec, width, exchange)
        return self._loads[key]

    def shares(self, cuts: Sequence[Cut], spare: float = 0.0) -> Shares:
        """Returns a device's share if tables are cut so; of a buffer at least `spare` of all bytes held."""
        number_of = {stack: number for number, stack in enumerate(self.base_stacks)}
        numbers, times, pooled, parts = [], [], [], []  # of the ranges of equal columns of each cut
        for cut in cuts:
            for width, count in cut.widths.items():
                loads_K, stack = self.of_part(cut, width)
                numbers.append(number_of.setdefault(stack, len(number_of)))
                times.append(count * cut.rows)
                pooled.append(self.pools(cut))
                parts.append(loads_K)
        loads_PxK = np.reshape(parts, (len(parts), len(LOADS)))
        total_K = np.vstack([self.base_NxK.sum(0), np.array(times)[:, None] * loads_PxK]).sum(0)
        sums_GxL, most_GxL = np.zeros((len(number_of), 2)), np.zeros((len(number_of), 2))  # bytes, ids pooled
        for number, bytes_N in enumerate(self.base_stacks.values()):
            sums_GxL[number, 0], most_GxL[number, 0] = bytes_N.sum(), bytes_N.max()
        loads_PxL = loads_PxK[:, [_HELD, _IDS]]
        loads_PxL[:, 1] *= pooled
        np.add.at(sums_GxL, numbers, np.array(times)[:, None] * loads_PxL)
        np.maximum.at(most_GxL, numbers, loads_PxL)
        mean_K = total_K / self.work.devices
        if spare:
            most_GxL[:, 0] = mean_K[_HELD] * spare
        room_GxL = np.maximum(np.maximum(sums_GxL / self.work.devices, most_GxL), 1e-9)
        uneven_K = LISTED * mean_K if spare else np.maximum(mean_K, loads_PxK.max(0, initial=0))
        return Shares(self, total_K, number_of, room_GxL, uneven_K)


def cut_width(cuts: Sequence[Cut], demand: Demand) -> int:
    """The width of ranges of columns with which samples send least: see the module; of equal ones the widest."""
    finest = narrowest(cuts, demand.work.devices)
    dims = {cut.spec.dim for cut in cuts}
    widths = {w for dim in dims for w in range(finest, dim + 1) if dim % w == 0} | {max(dims, default=1)}

    def sent(width: int) -> float:
        finer = cut_all(cuts, demand, width, 1.0)
        ids = sum(len(cut.ranges) * demand.work.profile.tables[cut.spec.name].ids for cut in finer)
        return ids + sum(cut.rows * cut.spec.dim for cut in finer)

    return min(sorted(widths, reverse=True), key=sent)


def narrowest(cuts: Sequence[Cut], devices: int) -> int:
    """Columns of which a device's share of all values has at most half the rows that int32 can count."""
    values = sum(cut.spec.rows * cut.spec.dim for cut in cuts) / devices
    return max(NARROWEST, math.ceil(values / (MAX_ROWS / 2)))


def cut_to(cut: Cut, width: float) -> Cut:
    """The cut in ranges of so many columns, where it has more and what remains is not too narrow."""
    return dataclasses.replace(cut, width=int(width), why="one width for all") if _divisible(cut, width) else cut


def _divisible(cut: Cut, width: float) -> bool:
    rest = cut.spec.dim % width
    free = cut.spec.placement is None
    return free and cut.width == cut.spec.dim > width and (rest == 0 or rest >= NARROWEST)


def spread(cut: Cut, devices: int) -> Cut:
    """The cut in as many parts of rows as there are devices for each of its ranges."""
    if cut.spec.placement is not None:
        return cut
    rows = max(1, min(devices // len(cut.ranges), cut.spec.rows))
    return dataclasses.replace(cut, rows=rows, why="rows of equal lists")


def cut_all(cuts: Sequence[Cut], demand: Demand, width: int, most: float) -> Sequence[Cut]:
    """The cuts, finer where a shard has more than `most` of a device's share of anything.

    Args:
      cuts: to begin with.
      demand: of all tables.
      width: of the ranges of columns.
      most: in shares of a device.
    """
    for _ in range(_ROUNDS):
        stacks = {demand.of_part(cut, w)[1] for cut in cuts for w in cut.widths} | demand.base_stacks.keys()
        shares = demand.shares(cuts, _SPARE / max(1, len(stacks)))
        finer = [_split(cut, shares, most, width) for cut in cuts]
        if finer == cuts:
            break
        cuts = finer
    return cuts


def _split(cut: Cut, shares: Shares, most: float, width: int) -> Cut:
    """The cut, finer if one of its shards has more than `most` of anything."""
    everywhere = min(shares.demand.work.devices, cut.spec.rows)
    if cut.rows == everywhere or cut.spec.placement is not None:
        return cut
    divisible = _divisible(cut, width)
    excess, why, ids = 0.0, "", 0.0
    for columns in cut.widths:
        loads_K, stack = shares.demand.of_part(cut, columns)
        shares_K = loads_K / shares.mean_K
        if shares.demand.pools(cut):
            shares_K[_READ] = 0
            if not divisible:  # each part of the rows would send as many vectors
                shares_K[_POOLED] = 0
        worst, ids = int(shares_K.argmax()), float(shares_K[_IDS])
        in_buffer = float(loads_K[_HELD]) / float(shares.room_GxL[shares.stacks[stack], 0])
        if in_buffer > max(excess, float(shares_K[worst])):
            excess, why = in_buffer, f"{in_buffer:.2f} of a device's part of a buffer of {columns} columns"
        elif shares_K[worst] > excess:
            excess = float(shares_K[worst])
            why = f"{excess:.2f} of a device's {list(LOADS.values())[worst]}"
    if excess <= most:
        return cut
    if divisible and ids <= most:
        columns, rows = width, cut.rows
    else:
        columns, rows = cut.width, min(everywhere, math.ceil(cut.rows * (ids if divisible else excess) / most))
    if rows > 1 and rows * math.ceil(cut.spec.dim / columns) >= everywhere:
        columns, rows = cut.spec.dim, everywhere
    return Cut(cut.spec, columns, rows, cut.why or why)
