"""How fast are Yelp's files prepared on one core, and in how much memory?

    python tests/benchmarks/yelp_speed.py [--reviews 1000000] [--folder DIR]

Writes files in the format of the open dataset, with reviews of 700 bytes as in the real one (5.3 GB for 7 million),
0.28 users and 0.021 businesses for each review; users have long lists of friends. Prints reviews/s of reading and
joining, of the whole preparation, and the peak memory of each, all on one core.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from prepare_speed import peak_gib

from recjax.data.options import prepare_as
from recjax.data.yelp import Yelp, open_raw


def write(folder: Path, reviews: int, seed: int = 0) -> None:
    """Writes the three files."""
    rng = np.random.default_rng(seed)
    users, businesses = max(1, int(0.28 * reviews)), max(1, int(0.021 * reviews))

    def key(kind: str, number: int) -> str:
        return f"{kind}{number:021d}"

    with (folder / "yelp_academic_dataset_business.json").open("w") as file:
        for i in range(businesses):
            row = {"business_id": key("b", i), "name": f"Shop {i}", "address": "1 Road", "city": f"City {i % 900}",
                   "state": f"S{i % 27}", "stars": 3.5, "review_count": 9, "is_open": 1, "attributes": {"WiFi": "no"},
                   "categories": f"Restaurants, Kind {i % 1300}, Other {i % 77}", "hours": None}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    friends = ", ".join(key("u", i) for i in range(60))
    with (folder / "yelp_academic_dataset_user.json").open("w") as file:
        for i in range(users):
            row = {"user_id": key("u", i), "name": "A", "review_count": 3, "yelping_since": "2010-03-04 05:06:07",
                   "friends": friends, "fans": 0, "average_stars": 4.0}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    who = (users * rng.random(reviews) ** 3).astype(int).tolist()
    where = (businesses * rng.random(reviews) ** 2).astype(int).tolist()
    stars = rng.integers(1, 6, reviews).tolist()
    times = np.datetime64("2008-01-01T00:00:00") + rng.integers(0, 4 * 10**8, reviews)
    days = [str(time).replace("T", " ") for time in times]
    text = 'The tea was "fine",\nthe rest not so. ' * 13
    with (folder / "yelp_academic_dataset_review.json").open("w") as file:
        for i in range(reviews):
            row = {"review_id": key("r", i), "user_id": key("u", who[i]), "business_id": key("b", where[i]),
                   "stars": float(stars[i]), "useful": 0, "funny": 0, "cool": 0, "text": text,
                   "date": days[i]}  # fmt: skip
            file.write(json.dumps(row) + "\n")


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
            write(folder, options.reviews)
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
