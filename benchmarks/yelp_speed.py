"""How fast are Yelp's files prepared on one core, and in how much memory?

    python benchmarks/yelp_speed.py [--reviews 1000000] [--folder DIR]

On files of `yelp_like.py`. Prints reviews/s of reading and joining, of the whole preparation, and the peak memory of
each, all on one core.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import yelp_like
from prepare_speed import peak_gib

from recjax.data.datasets.options import prepare_as
from recjax.data.datasets.yelp import Yelp, open_raw


def measure(folder: Path, out: Path, reviews: int) -> None:
    """Prepares on one core and prints."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    start, cpu = time.perf_counter(), time.process_time()
    config = Yelp()
    reader = open_raw(config, folder)
    read, read_cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"read and join: {reviews / read:,.0f} reviews/s, {reviews / read_cpu:,.0f} per second of CPU", end="")
    print(f"  {peak_gib():.2f} GiB at most", flush=True)
    prepare_as(config, reader, out)
    whole, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(
        f"all: {reviews / whole:,.0f} reviews/s, {reviews / cpu:,.0f} per second of CPU  {peak_gib():.2f} GiB at most"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keeps the files there for the next time (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(options.folder or temporary) / f"yelp_like_{options.reviews}"
        if not folder.exists():
            folder.mkdir(parents=True)
            yelp_like.write(folder, options.reviews)
        sizes = ", ".join(
            f"{file.name.split('_')[-1]} {file.stat().st_size / 1e6:,.0f} MB" for file in folder.iterdir()
        )
        print(sizes, flush=True)
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(folder, Path(temporary) / "out", options.reviews)
        )
        process.start()
        process.join()
        sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
