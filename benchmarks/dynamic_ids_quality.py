"""Rows given to keys against hashing into as many rows, on MovieTweetings, whose users and movies come as 64-bit keys.

    python benchmarks/dynamic_ids_quality.py [--part 4] [--seeds 3]

Each user and each movie of the training split has a row in "all rows"; the others have a `part` of these. Hashing takes
the key modulo the number of rows, of keys that are hashes ("hashed") or the vocabulary's numbers, by which the most
frequent ones never meet ("numbers"). Prints the test AUC of each seed, of the step that validation chose.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import recjax
from recjax.data.batch import ANY_ID, Batch
from recjax.data.datasets.movietweetings import MovieTweetings
from recjax.data.prepare.ids import stable_hash
from recjax.data.source import SPLITS
from recjax.data.storage.blocks import PreparedSource, write_prepared

FEATURES = ("user", "movie")
Ids = Callable[[np.ndarray, int], np.ndarray]  # the vocabulary's numbers and its rows -> ids


def write(source: PreparedSource, folder: Path, ids: Ids, rows: Callable[[int], int]) -> Path:
    """The data with other ids of users and movies."""
    of = {name: source.schema.feature(name).rows for name in FEATURES}
    features = tuple(
        dataclasses.replace(f, rows=rows(of[f.name])) if f.name in of else f for f in source.schema.features
    )

    def blocks(split: str) -> Iterator[Batch]:
        for index in range(len(source.row_counts(split))):
            block = source.read(split, index)
            new = {
                n: dataclasses.replace(block.bags[n], ids=ids(block.bags[n].ids.astype(np.int64), of[n])) for n in of
            }
            yield dataclasses.replace(block, bags={**block.bags, **new})

    schema = dataclasses.replace(source.schema, features=features)
    write_prepared(folder, "movietweetings_keys", schema, {split: blocks(split) for split in SPLITS}, {})
    return folder


def auc(folder: Path, data: Path, seed: int, *settings: str) -> tuple[float, Any]:
    """The test AUC of a run, and what its summary says of keys."""
    given = ["data=prepared", f"data.path={data}", "mesh.devices=1", f"seed={seed}", *settings]
    summary = recjax.fit(recjax.load("movietweetings", given), out=folder)
    return summary["eval"]["auc"], summary.get("ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    source = MovieTweetings(min_user_count=1).open()
    rows = {name: source.schema.feature(name).rows for name in FEATURES}
    few = {name: V // options.part for name, V in rows.items()}
    print(f"rows of all: {rows}; of a part: {few}", flush=True)

    def settings(evict: str, capacity: dict[str, int], admit_after: int = 1) -> list[str]:
        keys = {name: f"embedding.tables.{name}.ids" for name in FEATURES}
        return [
            text
            for name, key in keys.items()
            for text in (
                f"{key}=dynamic",
                f"{key}.capacity={capacity[name] - 1}",
                f"{key}.evict={evict}",
                f"{key}.admit_after={admit_after}",
            )
        ]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        keyed = write(source, folder / "keys", lambda ids, _: stable_hash(ids).view(np.int64), lambda _: ANY_ID)
        hashed = write(
            source,
            folder / "hashed",
            lambda ids, V: (stable_hash(ids) % np.uint64(V // options.part)).astype(np.int64),
            lambda V: V // options.part,
        )
        numbers = write(
            source, folder / "numbers", lambda ids, V: ids % (V // options.part), lambda V: V // options.part
        )
        ways = {
            "all rows": (source.path, []),
            "hashed": (hashed, []),
            "numbers": (numbers, []),
            "by frequency": (keyed, settings("frequency", few)),
            "by age": (keyed, settings("age", few)),
            "by age, after 2": (keyed, settings("age", few, 2)),
        }
        for name, (data, how) in ways.items():
            found = [auc(folder / f"{name} {seed}", data, seed, *how) for seed in range(options.seeds)]
            each = [value for value, _ in found]
            counts = found[0][1]
            print(json.dumps({"rows": name, "auc": each, "mean": statistics.mean(each), "ids": counts}), flush=True)


if __name__ == "__main__":
    main()
