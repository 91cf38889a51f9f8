"""How fast are raw files prepared, how much memory does that take, and how fast are prepared blocks read?

    python benchmarks/prepare_speed.py [--rows 4000000] [--scale 1.5] [--min-count 1] [--folder DIR]

Writes a file in the Criteo Kaggle format (criteo_like.py) and prepares it on two cores; prints rows/s, processor time
and peak memory of each stage, then rows/s of reading blocks on one core, and where its time goes. For 50 million
distinct values: --rows 45840617 --scale 3.3. Each measurement has a process of its own. Linux only.
"""

import argparse
import cProfile
import multiprocessing
import os
import pstats
import shutil
import sys
import tempfile
import time
from pathlib import Path

import criteo_like

from recjax.data.datasets.criteo import CriteoKaggle, open_raw
from recjax.data.datasets.options import prepare_as
from recjax.data.prepare import prepare as engine
from recjax.data.prepare.ids import Frequency
from recjax.data.prepare.progress import PrepareProgress
from recjax.data.storage.blocks import open_prepared


def peak_gib() -> float:
    """The most memory that this process held so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM"))


stages: list["Stages"] = []  # the preparation makes one for itself


class Stages(PrepareProgress):
    """Prints what each stage took, when the next one begins."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._wall, self._cpu = "", 0.0, 0.0
        stages.append(self)

    def stage(self, name: str, rows: int = 0, done: float = 0.0) -> None:
        """Ends a stage and begins the next."""
        super().stage(name, rows, done)
        wall, cpu = time.perf_counter(), time.process_time()
        if self._name:
            taken = f"{wall - self._wall:8.1f} s  {cpu - self._cpu:8.1f} s of CPU"
            print(f"{self._name:10} {taken}  {peak_gib():5.2f} GiB at most so far", flush=True)
        self._name, self._wall, self._cpu = name, wall, cpu


def measure_prepare(raw: Path, out: Path, min_count: int) -> None:
    """Prepares and prints."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    setattr(engine, "PrepareProgress", Stages)  # noqa: B010 (a measurement, not an interface)
    wall, cpu = time.perf_counter(), time.process_time()
    config = CriteoKaggle(ids=Frequency(min_count))
    made = prepare_as(config, open_raw(config, raw), out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stages[-1].stage("end")
    rows = sum(int(made.row_counts(split).sum()) for split in ("train", "validation", "test"))
    ids = sum(feature.rows for feature in made.schema.features)
    print(f"{rows:,} rows, {ids:,} table rows, {raw.stat().st_size / 1e9:.2f} GB of text", flush=True)
    print(f"prepare: {rows / wall:,.0f} rows/s  {1e6 * cpu / rows:.2f} us of CPU a row  {peak_gib():.2f} GiB at most")


def measure_read(out: Path) -> None:
    """Reads up to 1000 blocks twice, the second time under the profiler, and prints."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    source = open_prepared(out)
    counts = source.row_counts("train")[:1000]
    source.read("train", 0)
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(len(counts)):
        source.read("train", index)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"read: {counts.sum() / wall:,.0f} rows/s  {counts.sum() / cpu:,.0f} rows per second of CPU", flush=True)
    with cProfile.Profile() as profile:
        for index in range(len(counts)):
            source.read("train", index)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(6)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--scale", type=float, default=1.5, help="of the distinct values of the large fields")
    parser.add_argument("--min-count", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps the file there for the next time (default: temporary)")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        raw = Path(options.folder or temporary) / f"criteo_like_{options.rows}_{options.scale}.txt"
        if not raw.exists():
            criteo_like.write(raw, options.rows, options.scale)
        out = Path(temporary) / "prepared"
        for target, arguments in ((measure_prepare, (raw, out, options.min_count)), (measure_read, (out,))):
            process = processes.Process(target=target, args=arguments)
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{target.__name__} ended with status {process.exitcode}")
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
