"""A run as far as its tiers are concerned: hits and misses of its caches, and the time that the traffic takes.

The run's own batches go through the directories that its training has (`tier_replay`), as many as it trains on or as
there is time for. Beyond, a closed form of how often rows are named takes over (`tier_model`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, concatenate
from recjax.embedding.layout import BoundPlan
from recjax.embedding.spec import ids_per_sample
from recjax.planning.costs import Cost, Costs
from recjax.planning.machine import Machine, Quantity
from recjax.planning.predict import CORES, DEVICES, INTERPRETER, Prediction
from recjax.planning.tier_model import Classes, cache, table_classes, together, without_first
from recjax.planning.tier_replay import COUNTS, Homes, Replayed, homes_of, replay
from recjax.tiers.caches import CachedGroup, cached_groups
from recjax.tiers.directory import CacheTooSmallError
from recjax.tiers.disk import disk_rates, memory_records, unit_of
from recjax.tiers.host_rows import folder_of
from recjax.tiers.records import UNITS, Cells, record_bytes
from recjax.tiers.stage import too_small

MOST_IDS = 2**28  # that are replayed: a minute or so
_HOME_BYTES, _SLOT_BYTES = 9, 32  # of a replay's memory
_COUNTED_IDS = 2**24  # of data without a law
_DEFAULTS = {
    "host_link": Quantity(12e9, "B/s", "assumed: PCIe 3.0 x16"),
    "memory": Quantity(20e9, "B/s", "assumed"),
    "disk_reads": Quantity(12_700, "1/s", "assumed: 16 threads on a busy virtual machine"),
    "disk_write": Quantity(365e6, "B/s", "assumed: the same machine"),
    "disk_writes": Quantity(12_700, "1/s", "assumed: as many as reads"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as far as its tiers are concerned.

    Attributes:
      config: of it, as it is for so many rows.
      source: its data.
      bound: its plan, with caches.
      processes: that train it, each with as many of its devices and with `tier.dram_bytes` of its own.
    """

    config: RunConfig
    source: BlockSource
    bound: BoundPlan
    processes: int = 1

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        train = self.config.train
        each = -(-int(self.source.row_counts("train").sum()) // train.batch_size)
        return train.steps or train.epochs * each

    @functools.cached_property
    def caches(self) -> dict[str, CachedGroup]:
        """The groups with caches, by name."""
        return cached_groups(self.bound, np.dtype(f"float{8 * self.config.item_bytes}"))

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row of each group behind a cache, in all records that it is spread over."""
        return {name: c.record_bytes * c.group.sharding.column_parts for name, c in self.caches.items()}

    @property
    def _own_devices(self) -> int:
        """Devices of a process."""
        return max(1, self.bound.all_devices // self.processes)

    def directory_bytes(self) -> int:
        """Bytes by which each process finds the rows of its own devices, before any is touched."""
        return sum(c.find_bytes(range(min(self._own_devices, c.group.parts))) for c in self.caches.values())

    @functools.cached_property
    def unit(self) -> int:
        """Bytes of which all that the disk of `tier.disk` reads and writes is a multiple."""
        return unit_of(folder_of(self.config.tier.disk)) if self.config.tier.disk else UNITS[0]

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of memory, `tier.dram_bytes` of each process, for records as many as those of all parts of a group.

        A process holds the rows of its own devices, so that those of several replica groups each hold all.
        """
        limit, parts = self.config.tier.bytes_of("dram_bytes"), {g.name: g.parts for g in self.bound.cached}
        return {name: limit * of_group // min(self._own_devices, of_group) for name, of_group in parts.items()}

    @property
    def slots(self) -> dict[str, int]:
        """Records that each part of a group has memory for before a disk."""
        limits, caches = self.memory_bytes, self.caches
        return {
            name: memory_records(cached.record_bytes, cached.dram_share(caches.values(), limits[name]))
            for name, cached in caches.items()
        }

    @functools.cached_property
    def first_samples(self) -> Batch:
        """Training samples in which rows are counted, where the data have no law."""
        sizes = self.source.row_counts("train")
        ids = ids_per_sample(self.bound.features)
        enough = int(np.searchsorted(np.cumsum(sizes), max(1, _COUNTED_IDS // ids))) + 1
        return concatenate([self.source.read("train", n) for n in range(min(enough, len(sizes)))])

    @functools.cached_property
    def classes(self) -> dict[str, dict[str, Classes]]:
        """Rows of each table of each group with a cache by how often batches name them, by `BoundSegment.title`.

        Hot rows count as those named most, and are not among them.
        """
        classes: dict[str, dict[str, Classes]] = {}
        for group in self.bound.cached:
            classes[group.name] = {}
            for segment in group.segments:
                sources = [s for s in self.bound.sources_of(group) if s.segments[0].title == segment.title]
                features = [source.feature for source in sources]
                size = self.config.train.batch_size
                all_ = table_classes(self.source, segment.spec, features, size, lambda: self.first_samples)
                hot = segment.spec.rows - segment.band.members
                classes[group.name][segment.title] = without_first(all_, hot)
        return classes

    def homes(self) -> Iterator[Homes]:
        """Homes that the batches of its training name, one batch after the other."""
        train = self.config.train
        return batches(
            self.source,
            "train",
            train.batch_size,
            seed=self.config.seed,
            shuffle=train.shuffle,
            shuffle_blocks=train.shuffle_blocks,
            workers=train.workers,
            transform=functools.partial(homes_of, self.bound),
        )

    def replayed(self, most_ids: float = math.inf) -> Replayed | None:
        """The run's first steps, as many as have so many ids, or as there is time for.

        None where its directories are too large.

        Raises:
          TrainingError: a cache cannot hold two batches.
        """
        groups, train = self.bound.cached, self.config.train
        needed = sum(g.owners * (g.home_rows * _HOME_BYTES + g.rows * _SLOT_BYTES) for g in groups)
        if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4:
            return None
        ids = train.batch_size * sum(s.feature.ids for group in groups for s in self.bound.sources_of(group))
        steps = max(1, min(self.steps, int(min(most_ids, MOST_IDS) // ids)))
        memories = None
        if self.config.tier.disk:
            slots = self.slots
            memories = {name: (slots[name], cached.record_bytes) for name, cached in self.caches.items()}
        look_ahead = self.config.tier.look_ahead
        try:
            seen = itertools.islice(self.homes(), steps + max(1, look_ahead))
            return replay(self.bound, seen, steps, look_ahead, memories, self.unit)
        except CacheTooSmallError as short:
            raise too_small(groups[0], short.args[0]) from None


def modelled(run: Run) -> dict[str, Any]:
    """Figures of the closed form: of the whole run, of a step in the steady state, and where rows are at the end."""
    steps, tier, classes, all_slots = run.steps, run.config.tier, run.classes, run.slots
    step = dict.fromkeys(COUNTS, 0.0)
    misses = hits = least = 0.0
    parts = {}
    for group in run.bound.cached:
        all_ = together(list(classes[group.name].values()))
        held = cache(all_, group.owners * group.rows, tier.look_ahead)
        slots = float(group.owners * all_slots[group.name]) if tier.disk else np.inf
        reads = held.reads(slots) * group.sharding.column_parts if tier.disk else 0.0
        of_run = held.misses_of(steps)
        least += cache(all_, group.owners * group.rows, math.inf).misses
        misses, hits = misses + of_run, hits + steps * all_.named - of_run
        moved = {"hits": all_.named - held.misses, "misses": held.misses, "leaves": held.misses, "reads": reads}
        cells = Cells.of(record_bytes(run.caches[group.name].record_bytes), run.unit)
        read = 2 * reads if cells.per > 1 else reads  # what stays beside a record that is written is read before
        moved |= {"pieces_read": read, "bytes_read": read * cells.bytes}
        moved |= {"writes": reads, "pieces_written": reads, "bytes_written": reads * cells.bytes}
        step = {name: step[name] + moved.get(name, 0.0) for name in COUNTS}
        full = min(1.0, all_.touched(steps) / (group.owners * group.rows))
        away = {name: max(0.0, c.touched(steps) - full * held.rows_of(c)) for name, c in classes[group.name].items()}
        in_memory = min(1.0, slots / max(1.0, sum(away.values())))
        for name, own in classes[group.name].items():
            device = min(own.touched(steps), held.rows_of(own))
            parts[name] = {
                "device": device,
                "dram": away[name] * in_memory,
                "disk": away[name] * (1 - in_memory),
                "untouched": max(0.0, own.rows - device - away[name]),
            }
    named = step["hits"] + step["misses"]
    return {
        "hits": hits,
        "misses": misses,
        "parts": parts,
        "model_step": step,
        "model_hit_rate": hits / (hits + misses),
        "steady_hits": step["hits"],
        "steady_misses": step["misses"],
        "steady_hit_rate": step["hits"] / named,
        "belady_hit_rate": 1 - least / named,
    }


def rates(run: Run, machine: Machine | None) -> dict[str, Quantity]:
    """The rates that count, each with its source; those of a disk are measured if the machine has none."""
    known = dict(_DEFAULTS)
    folder = run.config.tier.disk
    if machine is not None:
        known |= {name: machine.rates[name] for name in known if name in machine.rates}
    if machine is not None and "disk_reads" in machine.rates:
        if "disk_writes" not in machine.rates:  # it was calibrated before these were
            known["disk_writes"] = dataclasses.replace(known["disk_reads"], source="assumed: as many as reads")
    elif folder:
        found, where = disk_rates(folder_of(folder)), f"measured in {folder}"
        known["disk_reads"] = Quantity(found.reads, "1/s", where)
        known["disk_write"] = Quantity(found.written, "B/s", where)
        known["disk_writes"] = Quantity(found.writes, "1/s", where)
    return known


def with_moves(step: Prediction, run: Run, counts: Mapping[str, float]) -> Prediction:
    """A step as it is if rows come and go beside it: what moves them takes time of the devices and of the host's cores.

    Nothing of it is known of a machine on which that was not measured (`tier_cases`).

    Args:
      step: with all rows on the devices.
      run: with caches, over which moves are taken to be spread evenly.
      counts: of a step, among them "hits" and "misses".
    """
    known, machine = Costs(step.machine), step.machine
    devices, caches = run.bound.devices, len(run.bound.cached)
    owners, parts = sum(g.owners for g in run.bound.cached), sum(g.parts for g in run.bound.cached)
    row_bytes = float(np.mean([cached.record_bytes for cached in run.caches.values()]))
    moved = {"rows": max(1.0, counts["misses"] / owners), "row_bytes": row_bytes}
    lookup = known.host("host_lookup", ids=max(1.0, (counts["hits"] + counts["misses"]) / owners))
    swap, programs = known.host("host_swap", **moved), known.host("device_swap", **moved)
    if counts["misses"] < 1:
        swap = programs = Cost(0.0)
    work_us = owners * lookup.us + parts * swap.us
    crowded = max(1.0, devices / machine.cores) if machine.shared else 1.0
    more = {DEVICES: caches * programs.us * crowded, INTERPRETER: max(0.0, work_us - caches * programs.us)}
    if machine.shared:
        more[CORES] = (owners * lookup.us * lookup.cores + parts * swap.us * swap.cores) / machine.cores
    bounds = {name: us + more.get(name, 0.0) for name, us in step.bounds.items()}
    return dataclasses.replace(step, bounds=bounds)


def costs(run: Run, step: dict[str, float], known: dict[str, Quantity], step_ms: float | None) -> dict[str, Any]:
    """Bytes of a step, the time that they take, and what of it a step hides.

    A disk that reads and writes takes as long as for one after the other. A piece of more than 4 KiB takes as long to
    read as so many of them, and to write as long as what lies in order.
    """
    sizes = run.row_bytes
    named = {g.name: g.owners * g.rows for g in run.bound.cached}
    record = float(np.average([sizes[n] for n in named], weights=list(named.values())))
    devices = run.bound.devices
    moved = {
        "to_devices": step["misses"] * record,
        "to_host": step["leaves"] * record,
        "disk_read": step["bytes_read"],
        "disk_written": step["bytes_written"],
    }
    reads = max(step["pieces_read"], step["bytes_read"] / 4096) / known["disk_reads"].value
    writes = step["pieces_written"] / known["disk_writes"].value
    times = {
        "link": 1e3 * max(moved["to_devices"], moved["to_host"]) / devices / known["host_link"].value,
        "disk": 1e3 * (reads + max(writes, step["bytes_written"] / known["disk_write"].value)),
    }
    longest = max(times.values())
    found: dict[str, Any] = {
        "bytes": moved,
        "ms": times,
        "hides_from_ms": longest,
        "bound_by": max(times, key=times.__getitem__),
        "step_ms": step_ms,
        "rates": {
            name: dataclasses.asdict(known[name]) for name in ("host_link", "disk_reads", "disk_write", "disk_writes")
        },
    }
    if step_ms is not None:
        found |= {"exposed_ms": max(0.0, longest - step_ms), "slowdown": max(1.0, longest / step_ms)}
    return found
