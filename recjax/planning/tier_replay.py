"""Hits and misses of caches for a run's own batches: the batches go through the directories that a training has.

What moves is decided by ids alone, so that no row, device or disk is needed: the counts are those of a training, but
for evaluations and checkpoints, which write the caches' rows, and for moments in which a row is asked for while it is
still on its way to the host.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from recjax.data.batch import Batch
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.keys import distinct
from recjax.tiers.clock import Clock
from recjax.tiers.directory import Directory
from recjax.tiers.disk import WRITE_BYTES
from recjax.tiers.records import READ_BYTES, Cells, record_bytes
from recjax.tiers.stage import split_by_owner

COUNTS = tuple("hits misses first leaves reads pieces_read bytes_read writes pieces_written bytes_written".split())
Homes = dict[str, list[np.ndarray]]  # group name -> of each owner the distinct homes that a batch names, ascending


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of one table after a replay, by where they are; they sum up to its rows.

    Attributes:
      device: in a cache.
      dram: in the host's memory, and in no cache.
      disk: on the disk alone.
      untouched: nowhere, at their initial values.
    """

    device: float
    dram: float
    disk: float
    untouched: float


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Findings of a replay.

    Attributes:
      counts: int64 [steps, len(COUNTS)], of each step: rows that its batch names which were on the devices, which were
        not, of these the ones that were never touched before; rows that left; records that the disk read, the pieces in
        which it did, and their bytes; and that it wrote. Pieces read are also those that hold records which stay beside
        others that are written.
      parts: of each table that has a cache, or range of its columns (`BoundSegment.title`), without its hot rows.
    """

    counts: np.ndarray
    parts: dict[str, Part]

    def total(self, name: str, first: int = 0) -> int:
        """The sum of one count over all steps from `first` on."""
        return int(self.counts[first:, COUNTS.index(name)].sum())

    def hit_rate(self, first: int = 0) -> float:
        """Share of the rows that batches named which were on the devices, of steps from `first` on."""
        hits, misses = self.total("hits", first), self.total("misses", first)
        return hits / max(1, hits + misses)


def homes_of(bound: BoundPlan, batch: Batch) -> Homes:
    """The distinct homes of each owner that a batch names, as `tiers.stage.homes_by_owner` gives them."""
    found: Homes = {}
    for group in bound.cached:
        all_L = np.concatenate(
            [
                group.codes(s, batch.bags[s.feature.reads].ids.ravel().astype(np.int32, copy=False))
                for s in bound.sources_of(group)
            ]
        )
        each = group.home_rows
        keys_U, _ = distinct(all_L[all_L >= 0], group.owners * each)  # others are hot
        found[group.name] = split_by_owner(group, keys_U)
    return found


def replay(
    bound: BoundPlan,
    batches: Iterable[Homes],
    steps: int,
    look_ahead: int,
    memories: Mapping[str, tuple[int, int]] | None = None,
    unit: int = 512,
) -> Replayed:
    """Sends batches through directories that begin empty.

    Args:
      bound: a plan with caches.
      batches: at least one; those beyond `steps` are looked at ahead.
      steps: how many are trained.
      look_ahead: L of the run.
      memories: group name -> records that each part has memory for before a disk, and their bytes; None: no disk.
      unit: bytes of which all that the disk reads and writes is a multiple.

    Raises:
      CacheTooSmallError: a cache cannot hold two batches.
    """
    owners: dict[str, list[_Owner]] = {}
    for group in bound.cached:
        slots, record = memories[group.name] if memories else (0, 0)
        cells = Cells.of(record_bytes(record), unit)
        owners[group.name] = [_Owner(group.home_rows, group.rows, slots, cells) for _ in range(group.owners)]
    window: collections.deque[Homes] = collections.deque()
    coming, counts = iter(batches), []
    for _ in range(steps):
        while len(window) <= max(1, look_ahead) and (following := next(coming, None)) is not None:
            window.append(following)
        if not window:
            break
        step = np.zeros(len(COUNTS), np.int64)
        for group in bound.cached:
            of_group = np.zeros(len(COUNTS), np.int64)
            for number, owner in enumerate(owners[group.name]):
                of_group += owner.step([homes[group.name][number] for homes in window])
            of_group[COUNTS.index("reads") :] *= group.sharding.column_parts  # each holds a record of a row
            step += of_group
        counts.append(step)
        window.popleft()
    return Replayed(np.array(counts).reshape(-1, len(COUNTS)), _parts(bound, owners))


def _parts(bound: BoundPlan, owners: Mapping[str, Sequence[_Owner]]) -> dict[str, Part]:
    """Rows of the tables by their places."""
    rows: dict[str, np.ndarray] = {}
    for group in bound.cached:
        for segment in group.segments:
            for number, owner in enumerate(owners[group.name]):
                first, last = (int(edge) for edge in segment.split.bounds(number))
                offset = segment.offsets[number]
                of_owner = owner.where(offset, offset + last - first)
                rows[segment.title] = rows.get(segment.title, np.zeros(4, np.int64)) + of_owner
            rows[segment.title][-1] -= segment.band.size - segment.band.members  # homes of hot rows
    return {title: Part(*of_segment.tolist()) for title, of_segment in rows.items()}


class _Owner:
    """One owner's cache."""

    def __init__(self, homes: int, rows: int, slots: int, cells: Cells) -> None:
        """A cache of so many rows out of `homes`, and a memory of so many slots before a disk with these cells."""
        self.directory = Directory(homes, rows)
        self._place_of = np.full(homes, -1, np.int32)  # of each home that has ever left
        self._touched = np.zeros(homes, bool)
        self._written = 0
        self._clock = Clock(slots) if slots else None
        self._cells, self._cells_there = cells, 0  # in the file
        self._before = np.zeros(0, np.int32)  # homes that left for the last batch, and are on their way

    def step(self, window: Sequence[np.ndarray]) -> np.ndarray:
        """Admits the first batch of a window, of each of which these are the homes, and counts."""
        for homes_U in window[self.directory.seen :]:
            self.directory.see(homes_U)
        hits, misses = self.directory.hits, self.directory.misses
        moves = self.directory.admit()
        first = int(np.count_nonzero(~self._touched[moves.come_K]))
        self._touched[moves.come_K] = True
        reads, traffic = 0, np.zeros(2, np.int64)
        if self._clock is not None:
            places_K = self._place_of[moves.come_K]
            places_K = places_K[places_K >= 0]
            places_K = places_K[self._clock.slot_of[places_K] < 0]
            reads, traffic = len(places_K), self._traffic(np.unique(places_K // self._cells.per), READ_BYTES)
        writes, reread, written = self._write(self._before)
        self._before = moves.leave_K[: moves.leaving]
        return np.array(
            [
                self.directory.hits - hits,
                self.directory.misses - misses,
                first,
                len(self._before),
                reads,
                *(traffic + reread),
                writes,
                *written,
            ]
        )

    def _traffic(self, cells_C: np.ndarray, most_bytes: int) -> np.ndarray:
        """(Pieces, bytes) of ascending cells, int64 [2]."""
        return np.array([len(self._cells.firsts(cells_C, most_bytes)), len(cells_C) * self._cells.bytes])

    def _write(self, homes_K: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Has rows written; the records that the disk got, (pieces, bytes) that it read for them, and that it wrote."""
        new = homes_K[self._place_of[homes_K] < 0]
        self._place_of[new] = np.arange(self._written, self._written + len(new), dtype=np.int32)
        self._written += len(new)
        records, reread, written = 0, np.zeros(2, np.int64), np.zeros(2, np.int64)
        if self._clock is not None:
            places_K = self._place_of[homes_K]
            for start in range(0, len(places_K), self._clock.most):
                some = places_K[start : start + self._clock.most]
                choice = self._clock.choose(some)
                cells_C, counts = np.unique(self._clock.place_of[choice.stale] // self._cells.per, return_counts=True)
                partial = (counts < self._cells.per) & (cells_C < self._cells_there)
                records += len(choice.stale)
                reread += self._traffic(cells_C[partial], READ_BYTES)
                written += self._traffic(cells_C, WRITE_BYTES)
                self._cells_there = max(self._cells_there, int(cells_C[-1]) + 1 if len(cells_C) else 0)
                self._clock.take(some, choice)
        return records, reread, written

    def where(self, first: int, last: int) -> np.ndarray:
        """Numbers of rows from one home to below another: (device, dram, disk, untouched), int64 [4]."""
        self._write(self._before)
        self._before = self._before[:0]
        cached = self.directory.slot_of[first:last] >= 0
        places_K = self._place_of[first:last]
        behind = ~cached & (places_K >= 0)
        in_memory = int(behind.sum())
        if self._clock is not None:
            in_memory = int(np.count_nonzero(self._clock.slot_of[places_K[behind]] >= 0))
        counts = [int(cached.sum()), in_memory, int(behind.sum()) - in_memory]
        return np.array([*counts, last - first - sum(counts)])
