"""Training steps with rows in tiers against rows in a plain memory map whose page cache has the same bytes.

    python benchmarks/tiers_against_map.py FOLDER [PRESET a.b=value ...] [--device 0.05] [--dram 0.15]

Both train the same batches with the same model, each in a process of its own, by turns. "tiers" has caches of --device
of the rows, records of --dram of them in memory, and the others in a file in FOLDER, past the page cache. "map" gathers
the records that a batch names from a memory map of all of them before each step, and writes them back after it. It runs
in a control group that may use what the process takes at most without the map, the bytes of the two budgets, and 16 MiB
more; that takes root (else the page cache has no limit, and "limited" says so). A record is a row with its optimizer's
state, so that a page that is missing is missed once; and the kernel hears that no pages are to be read ahead.

Every row is written before the first step; twice --warm steps come before those that are timed. Prints for each process
the time of a step, and at the end the median and range of how many times longer a step takes over the map than with
tiers in the same round. Ends with status 1 if the two give other dense parameters, in any bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from serve_from_disk import GROUPS, Group, forget

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.embedding.routing import capacity
from recjax.lab.predict.tier_plan import host_bytes, with_share
from recjax.lab.studies.tiers.measure import Arm, Contestant
from recjax.tiers.caches import ROWS, CachedGroup
from recjax.tiers.moves import InitialRecords
from recjax.tiers.stage import ReadStage
from recjax.train.build import build_trainer
from recjax.train.inputs import InputStream

PRESET = ("bench_kaggle16", "data.max_rows=400000", "data.distinct_blocks=512")
WAYS = ("tiers", "map")
CHUNK = 1 << 15  # rows at a time
SPARE = 2**24  # bytes by which a process may grow after its peak was taken; the page cache has what is left of them


class MapContestant:
    """Trains on the records of a file through a memory map, on one device."""

    def __init__(self, config: RunConfig, source: Any, file: Path) -> None:
        """Writes all rows at their initial values."""
        trainer = build_trainer(config, source)
        (group,) = (group for group in trainer.bound.groups if group.spread)
        ids = config.train.batch_size * sum(s.feature.bag or 1 for s in group.sources)
        self.group = dataclasses.replace(group, rows=min(group.rows, ids), homes=group.rows, lines=None)
        self.trainer = dataclasses.replace(trainer, bound=trainer.bound.with_groups({group.name: self.group}))
        self.layout, self.file = CachedGroup(self.group, self.trainer.dtype), file
        initial = InitialRecords(self.layout, config.seed, self.trainer.mesh.devices.flat[0])
        with file.open("wb") as opened:
            for first in range(0, group.rows, CHUNK):
                homes_K = np.arange(first, min(first + CHUNK, group.rows), dtype=np.int32)
                opened.write(initial.make(0, homes_K).data)
        self.map()
        self.state: Any = self.trainer.init_state()
        read, epoch = self.trainer.train_reader(), self.trainer.samples_per_epoch
        stages = (ReadStage(self.trainer.bound),)
        batch_size = config.train.batch_size
        self.stream = InputStream(read, self.trainer.router, batch_size, epoch, capacity.PERIOD, stages)

    def map(self) -> None:
        """Maps the file."""
        with self.file.open("r+b") as opened:
            self.mapped = mmap.mmap(opened.fileno(), 0)
        self.mapped.madvise(mmap.MADV_RANDOM)
        self.records = np.frombuffer(self.mapped, np.uint8).reshape(-1, self.layout.record_bytes)

    def forget(self) -> None:
        """Takes the file out of the page cache."""
        self.mapped.flush()
        del self.records
        self.mapped.close()
        forget([self.file])
        self.map()

    def step(self) -> None:
        """Trains one step."""
        inputs, name = next(self.stream), self.group.name
        (homes_U,) = self.stream.latest.routed.admission[name]
        records = self.records[homes_U]
        arrays = {field: self._placed(self.layout.split(records, field)) for field, *_ in self.layout.fields}
        tables = {**self.state.tables, name: arrays.pop(ROWS)}
        slots, homes = {**self.state.slots, name: arrays}, {**self.state.homes, name: self._placed(homes_U, -1)}
        state = dataclasses.replace(self.state, tables=tables, slots=slots, homes=homes)
        self.state, _ = self.trainer.train_step(state, inputs)
        after = {ROWS: self.state.tables[name], **self.state.slots[name]}
        self.records[homes_U] = self.layout.join({field: np.asarray(x)[: len(homes_U)] for field, x in after.items()})

    def _placed(self, own_U: np.ndarray, rest: int = 0) -> jax.Array:
        whole = np.full((self.group.rows, *own_U.shape[1:]), rest, own_U.dtype)
        whole[: len(own_U)] = own_U
        return jax.device_put(whole, self.state.homes[self.group.name].sharding)

    def turn(self, steps: int) -> dict[str, float]:
        """Trains so many steps; milliseconds of each."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return {"ms": 1e3 * (time.perf_counter() - began) / steps}


class Peak:
    """The most memory that a control group's processes hold for themselves, without the page cache."""

    def __init__(self, group: Group) -> None:
        self._group, self.bytes, self._end = group, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._group.folder is not None and not self._end.wait(0.01):
            self.bytes = max(self.bytes, self._group.beside_files())

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def child(way: str, options: argparse.Namespace) -> None:
    """Measures one way; prints JSON."""
    limits = Group()
    if way == "map":
        limits.enter()
    config = presets.load(options.preset[0], [*options.preset[1:], "mesh.devices=1"])
    source = config.data.open()
    for number in range(-(-(2 * options.warm + options.steps + 16) * config.train.batch_size // 4096)):
        source.read("train", number)  # drawn before, not while steps are timed
    arm = Arm("tiers", options.device, options.dram, str(options.folder))
    cached = with_share(config, source, arm.device)
    budget = cached.tier.bytes_of("device_bytes") + int(arm.dram * host_bytes(cached, source))
    found: dict[str, Any] = {"way": way, "budget_mib": budget / 2**20}
    if way == "tiers":
        one: Any = Contestant(arm, config, source)
        one.turn(options.warm)
    else:
        one = MapContestant(config, source, options.folder / "map.records")
        peak = Peak(limits)
        one.turn(options.warm)
        peak.end()
        one.forget()
        if limits.folder is not None:
            limits.limit(peak.bytes + budget + SPARE)
        found |= {"limited": limits.folder is not None, "own_mib": peak.bytes / 2**20}
        found["file_mib"] = one.file.stat().st_size / 2**20
    one.turn(options.warm)  # until the page cache is full, too
    found |= one.turn(options.steps)
    state = one._state if way == "tiers" else one.state
    found["steps"] = int(state.step)
    found["dense"] = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state.dense))).hexdigest()
    if way == "tiers":
        one.close()
    else:
        one.stream.close()
        one.file.unlink()
    print(json.dumps(found))


def main() -> int:
    """Returns 1 if the two ways differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("preset", nargs="*", default=list(PRESET))
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--dram", type=float, default=0.15)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.child, options)
        return 0
    ratios, same = [], True
    for _ in range(options.rounds):
        of = {}
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--child", way]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            of[way] = json.loads(process.stdout.splitlines()[-1])
            print(json.dumps(of[way]), flush=True)
            for left in (group for place in GROUPS for group in place.glob("recjax_*")):
                with contextlib.suppress(OSError):
                    left.rmdir()
        ratios.append(of["map"]["ms"] / of["tiers"]["ms"])
        same &= of["map"]["dense"] == of["tiers"]["dense"]
    print(f"the map takes {np.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
