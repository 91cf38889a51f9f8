"""Tables ten times a budget of memory: the store on disk against a memory map whose page cache has that same budget.

    python benchmarks/serve_from_disk.py FOLDER [--share 0.1] [--p99-ms 10] [--seconds 10] [--rounds 3]

FOLDER is that of `recjax study sdm --out FOLDER`, whose exports are made here if they are not there. Each way runs in a
process of its own, by turns: "store" reads around the page cache and keeps `share` of the tables' bytes in caches of
rows; "map" reads the same files through a memory map, in a control group (version 1 or 2, which takes root; else it
says so, and the page cache is not limited). The group's limit is moved until the kernel says that as many bytes of the
files are in memory (mincore) as the store's caches have, before each measurement.
Requests that wait are served together, --together at most, in both ways, and the next batch's rows are read while the
model runs. Prints for each round:

    iops, disk_qps    records a second of the disk, and over the rows that a request misses: the bound by the disk
    hit_rate          of the store, after traffic that changes all that the cache holds; offline_hit_rate by the curve
    qps               requests a second, --together at a time, as fast as they are answered: the bound by the processor,
                      the highest of three
    cached_qps        the same with every row in the cache: a bound that no cache of this size reaches
    loads             Poisson arrivals at shares of the lower of qps and disk_qps; "map" gets the rates of "store"
                      before its own, but for those above its qps, where times only grow
    most              the highest rate found whose p99 is within --p99-ms, and the lowest found where it is above

`before` holds the disk's records a second just before each of them and, of the map, the MiB of files in memory.
`--ways hits` prints hits and the curve's for caches of 2, 5, 10 and 20% instead, each round with other users and bags.
Ends with status 1 if scores are not bit by bit those of tables in memory.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from recjax.lab.bench.machine_load import Others
from recjax.lab.studies.sdm import measure
from recjax.lab.studies.sdm.workload import Size, Workload, export_both
from recjax.serving import loader
from recjax.serving.scoring import Scorer

GROUPS = {  # where control groups are made -> file of the limit, of what is used
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
}


LEAST = 1000  # requests that a p99 is taken of
LONGEST_S = 8.0
WAYS = ("store", "map")
SLACK = 4 * 2**20  # bytes for what the model takes for a moment
SHARES = (0.5, 0.7, 0.9)  # of the bound


class Sent:
    """Sends requests to one way, each time others than before: what was asked for lately would be in the cache."""

    def __init__(self, start, asked, together):
        self._start, self._asked, self._together = start, asked, together

    def _turn(self, sent):
        sent = int(sent) % len(self._asked)
        self._asked = self._asked[sent:] + self._asked[:sent]

    def closed(self, seconds):
        rate = measure.closed_loop(self._start, self._asked, seconds, self._together)
        self._turn(rate * seconds)
        return rate

    def open(self, qps, seconds, seed):
        found = measure.open_loop(self._start, self._asked, qps, seconds, seed, self._together)
        self._turn(found["requests"])
        return found


def at_rate(sent, qps, options, seed):
    """Times at a rate, of `LEAST` requests or more if these come within `LONGEST_S`; after half a second."""
    sent.open(qps, 0.5, seed + 1000)
    return sent.open(qps, max(options.seconds, min(LONGEST_S, LEAST / qps)), seed)


def most_qps(sent, most, options, beside, steps=5):
    """The highest rate found at which p99 is within a bound, by bisection up to `most`; and the times there."""
    low, high, best = 0.0, most, {"qps": 0.0}
    for step in range(steps):
        middle = (low + high) / 2
        before = beside()
        found = at_rate(sent, middle, options, step) | {"before": before}
        if found["p99_ms"] <= options.p99_ms:
            low, best = middle, found
        else:
            high = middle
    return best | {"least_above": high}


class MappedRows:
    """Rows of files of records through memory maps: what a store is compared with. Does not compare checksums.

    The kernel hears that reads of the maps are random, so that it reads no pages ahead.
    """

    def __init__(self, files):
        """Maps files, `records.RecordFile` by name."""
        self._rows, self._pages = {}, []
        for name, file in files.items():
            with file.path.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            self._pages.append(np.frombuffer(mapped, np.uint8))
            held = np.frombuffer(mapped, np.uint8, file.records * file.record_bytes, 4096)
            self._rows[name] = held.reshape(file.records, file.record_bytes)[:, : file.row_bytes]

    def rows(self, asked):
        """As `row_cache.CachedRows.rows`."""
        return {name: self._rows[name][numbers] for name, numbers in asked.items()}

    def resident_bytes(self):
        """Bytes of the files that are in the page cache."""
        pages = 0
        for held in self._pages:
            found = np.zeros(-(-len(held) // mmap.PAGESIZE), np.uint8)
            arguments = [ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(len(held))]
            if ctypes.CDLL(None).mincore(*arguments, ctypes.c_void_p(found.ctypes.data)):
                raise OSError("mincore failed")
            pages += int((found & 1).sum())
        return pages * mmap.PAGESIZE


class Group:
    """A control group for memory, or none where these cannot be made."""

    def __init__(self):
        self.folder = None
        for place, (limit, used) in GROUPS.items():
            with contextlib.suppress(OSError):
                folder = place / f"recjax_{os.getpid()}"
                folder.mkdir()
                if (folder / limit).exists():
                    self.folder, self._limit, self._used = folder, folder / limit, folder / used
                    return
                folder.rmdir()

    def enter(self):
        """Moves this process into it, before it takes memory."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def used(self):
        """Bytes that it uses."""
        return int(self._used.read_text())

    def beside_files(self):
        """Bytes that it uses of which none can be read from a file once more."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        return self.used() - stat.get("cache", stat.get("file", 0))

    def limit(self, limit_bytes):
        """Limits it to so many bytes."""
        with contextlib.suppress(OSError):  # the kernel may find too little to take away just now
            self._limit.write_text(str(limit_bytes))


def hold(group, mapped, budget, serve):
    """Limits a group so that as many bytes of the files stay in memory as the budget has, while requests come."""
    limit = group.used() + budget
    for _ in range(40):
        group.limit(limit)
        serve(0.4)
        surplus = mapped.resident_bytes() - budget
        if abs(surplus) < 0.05 * budget:
            return
        least = group.beside_files() + budget // 2 + SLACK  # with less the kernel would end the process
        limit = max(min(limit, group.used()) - surplus * 3 // 4, least)


def forget(files):
    """Takes files out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def loads(sent, rates, most, options, beside):
    """Times at rates, with what was seen beside each; of those above `most` none."""
    found = []
    for seed, (name, qps) in enumerate(rates):
        seen = {"before": beside(), **at_rate(sent, qps, options, seed)} if qps < most else {"p99_ms": None}
        found.append({"rate": name, "qps": qps, **seen})
    return found


def hits(options):
    """Prints hits and those of the offline curve; times do not matter."""
    disk, _ = export_both(Size(rows=options.rows), options.folder / "exports")
    model = loader.load(disk, cache_bytes=1)
    table_bytes = sum(file.records * file.row_bytes for file in model.stores.files.values())
    for seed in range(options.rounds):
        size = Size(rows=options.rows, seed=seed)
        for share in (0.02, 0.05, 0.1, 0.2):
            workload = Workload(size)
            measure.fill(model, workload, int(share * table_bytes) // size.tables, 512, 0)
            rates = measure.hit_rates(model, workload, options.requests, options.requests)
            found = dict(zip(("hit_rate", "offline_hit_rate"), rates, strict=True))
            print(json.dumps({"way": "hits", "share": share, "seed": seed, **found}), flush=True)


def child(way, options):
    """Measures one way; prints JSON."""
    group = Group()
    if way == "map":
        group.enter()
    size = Size(rows=options.rows)
    disk, memory = export_both(size, options.folder / "exports")
    workload = Workload(size)
    model = loader.load(disk, cache_bytes=1)
    scorer = Scorer(model, options.together * size.candidates)
    scorer.warm_up()  # else a program would be compiled in the midst of a measurement
    asked = [workload.request(user) for user in workload.users(options.requests).tolist()]
    gc.collect()
    gc.freeze()  # no server holds so many requests: the collector would go through them
    table_bytes = sum(file.records * file.row_bytes for file in model.stores.files.values())
    budget = int(options.share * table_bytes)
    files = list(model.stores.files.values())
    found = {"way": way, "table_mib": table_bytes / 2**20, "budget_mib": budget / 2**20}
    rates = json.loads(options.rates)
    sent = Sent(scorer.start, asked, options.together)

    def beside():
        return {"iops": measure.records_per_s(files, 512, 0.5)}

    found["iops"] = measure.records_per_s(files, 512, options.seconds)
    if way == "store":
        truth = Scorer(loader.load(memory, verify=False), size.candidates)
        found["same_bits"] = all(np.array_equal(truth([r])[0], scorer([r])[0]) for r in asked[:100])
        full = size.rows * (model.manifest["tables"]["sparse_0"]["shape"][1] + 5)
        measure.fill(model, workload, full, 512, 0)
        found["cached_qps"] = sent.closed(options.seconds)
        measure.fill(model, workload, budget // size.tables, 512, 0)
        counted = options.requests // 2
        found["hit_rate"], found["offline_hit_rate"] = measure.hit_rates(model, workload, counted, counted)
        found["missed"] = measure.counted(model)["misses"] / counted
        found["disk_qps"] = found["iops"] / found["missed"]
    else:
        sent.closed(2.0)  # until it has all the memory that it takes
        forget([file.path for file in files])
        mapped = MappedRows(model.stores.files)
        model.stores.rows = mapped.rows
        found["limited"] = group.folder is not None

        def beside():
            iops = measure.records_per_s(files, 512, 0.5)
            if found["limited"]:
                hold(group, mapped, budget, sent.closed)
            return {"iops": iops, "resident_mib": mapped.resident_bytes() / 2**20}

    found["before"] = beside()
    found["all_qps"] = [sent.closed(options.seconds) for _ in range(3)]
    found["qps"] = max(found["all_qps"])  # other programs only lower it
    bound = min(found["qps"], found.get("disk_qps", found["qps"]))
    rates += [(f"{share:.0%} of {way}", share * bound) for share in SHARES]
    found["loads"] = loads(sent, rates, found["qps"], options, beside)
    found["most"] = most_qps(sent, found["qps"], options, beside)
    if way == "map":
        found["resident_mib_at_the_end"] = mapped.resident_bytes() / 2**20
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--p99-ms", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000, help="different ones, and of each count of hits")
    parser.add_argument("--rates", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options)
    export_both(Size(rows=options.rows), options.folder / "exports")
    if options.ways == "hits":
        return hits(options)
    others, same = Others([]), True
    for _ in range(options.rounds):
        rates = []
        for way in options.ways.split(","):
            process = subprocess.run(
                [sys.executable, *sys.argv, "--child", way, "--rates", json.dumps(rates)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(process.stdout.splitlines()[-1])
            rates = [(line["rate"], line["qps"]) for line in found["loads"]] if way == "store" else []
            same &= found.get("same_bits", True)
            print(json.dumps(found), flush=True)
            for left in (group for place in GROUPS for group in place.glob("recjax_*")):
                with contextlib.suppress(OSError):
                    left.rmdir()
    print(f"others took {others.share():.0%} of this machine's cores meanwhile")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
