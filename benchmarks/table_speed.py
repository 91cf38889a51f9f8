"""Speed and memory of preparing a table of one's own.

    python benchmarks/table_speed.py [--rows 10000000] [--folder DIR] [--columns named|auto]

Writes a Parquet file of 13 integers and 26 strings of 8 characters with the statistics of Criteo Kaggle
(criteo_like.py; distinct values as in as many rows of it), in row groups of 128k, and prepares it on two cores; prints
rows/s, processor time and peak memory of each stage. Each measurement has a process of its own. Linux only.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import criteo_like
import pyarrow.parquet as pq
from prepare_speed import Stages, peak_gib, stages

from recjax import settings
from recjax.data import catalog
from recjax.data.prepare import prepare as engine
from recjax.data.storage.blocks import open_prepared
from recjax.data.synthetic.clicks import BoundedZipf
from recjax.parallel.malloc import environment

GROUP = 1 << 17
NAMED = ",".join([*(f"I{i}:dense" for i in range(1, 14)), *(f"C{i}:id" for i in range(1, 27))])


def write(path: Path, rows: int) -> None:
    """Writes the file."""
    share = rows / 45_840_617
    zipf = [BoundedZipf(max(3, round(n * (share if n > 100_000 else 1))), 1.1) for n in criteo_like.ROWS]
    writer = None
    for first in range(0, rows, GROUP):
        table, _ = criteo_like.table(first, min(GROUP, rows - first), zipf, 0, False)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measure(raw: Path, out: Path, columns: str) -> None:
    """Prepares and prints."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    setattr(engine, "PrepareProgress", Stages)  # noqa: B010 (a measurement, not an interface)
    wall, cpu = time.perf_counter(), time.process_time()
    config = settings.override(catalog.default("table"), ["label=label", f"columns={columns}"])
    catalog.prepare(config, raw, out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stages[-1].stage("end")
    made = open_prepared(out)
    rows = sum(int(made.row_counts(split).sum()) for split in ("train", "validation", "test"))
    ids = sum(feature.rows for feature in made.schema.features)
    print(f"{rows:,} rows, {ids:,} table rows, {raw.stat().st_size / 1e9:.2f} GB of Parquet", flush=True)
    print(f"{rows / wall:,.0f} rows/s, {rows / cpu:,.0f} per second of CPU, {peak_gib():.2f} GiB at most")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--columns", choices=("named", "auto"), default="named")
    parser.add_argument("--folder", type=Path, help="keeps the file there for the next time (default: temporary)")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        raw = Path(options.folder or temporary) / f"table_{options.rows}.parquet"
        if not raw.exists():
            write(raw, options.rows)
        out = Path(temporary) / "prepared"
        columns = NAMED if options.columns == "named" else "auto"
        os.environ |= environment()  # as `recjax data prepare` has it
        process = processes.Process(target=measure, args=(raw, out, columns))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"it ended with status {process.exitcode}")
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
