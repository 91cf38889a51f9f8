r"""Compares recipes of training for tables of one's own on several data sets at once, and leaves each one out in turn.

    pip download --no-deps recbole==1.2.1
    python benchmarks/table_recipe.py recbole-1.2.1-py3-none-any.whl --movielens ml-latest-small \
        --recipes recipes.json --results results.jsonl

The data sets: ml-100k (of RecBole's wheel; rows by chance), movietweetings, ml-latest-small (both by time), and three
synthetic laws (frequent ids, many rare ids, lists). Recipes are settings of the preset `table`, each of which changes
the present one. They are compared by the AUC of the validation split at the step that it chose, mean over the seeds,
as a difference to the present recipe on the same data; test is printed and chooses nothing. "Left out" is what a data
set would lose if the others alone had chosen.
"""

import argparse
import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import recjax
from recjax.data.source import SPLITS, BlockSource
from recjax.data.synthetic.clicks import Synthetic

FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
TWEETS = Path(recjax.__file__).parent / "data" / "files" / "movietweetings"

LAWS = {
    "frequent ids": Synthetic(train_rows=65_536, validation_rows=16_384, test_rows=16_384, signal=1.5),
    "rare ids": Synthetic(
        rows=(20_000, 5000, 300, 20),
        zipf=0.8,
        planted_rows=2000,
        train_rows=131_072,
        validation_rows=16_384,
        test_rows=16_384,
        seed=1,
    ),
    "lists": Synthetic(
        rows=(2000, 1000, 300, 40),
        ids_per_bag=(1, 1, 0, 0),
        dense=8,
        train_rows=49_152,
        validation_rows=16_384,
        test_rows=16_384,
        seed=2,
    ),
}


def drawn_splits(rows: int, seed: int) -> list[str]:
    """80/10/10 by chance."""
    uniforms = np.random.default_rng(seed).random(rows)
    return [str(name) for name in np.array(SPLITS)[np.searchsorted([0.8, 0.9], uniforms, "right")]]


def splits_by_time(times: np.ndarray, shares: tuple[float, float]) -> list[str]:
    """The split of each row: `shares` of the rows train and validate, the latest are the test."""
    rank = np.empty(len(times), np.int64)
    rank[np.argsort(times, kind="stable")] = np.arange(len(times))
    edges = np.cumsum(shares) * len(times)
    return [str(name) for name in np.array(SPLITS)[np.searchsorted(edges, rank, "right")]]


def movielens_100k(wheel: Path, seed: int) -> pa.Table:
    """The ratings of RecBole's file with their users' and items' columns, as a person would join them into one CSV."""
    tables = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in ("inter", "user", "item"):
            text = archive.read(f"{FOLDER}.{name}").decode()
            rows = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
            tables[name] = [{key.partition(":")[0]: value for key, value in row.items()} for row in rows]
    users = {row["user_id"]: row for row in tables["user"]}
    items = {row["item_id"]: row for row in tables["item"]}
    joined = [row | users[row["user_id"]] | items[row["item_id"]] for row in tables["inter"]]
    return pa.table(
        {
            "user": [int(row["user_id"]) for row in joined],
            "item": [int(row["item_id"]) for row in joined],
            "age": [int(row["age"]) for row in joined],
            "gender": [row["gender"] for row in joined],
            "occupation": [row["occupation"] for row in joined],
            "year": [int(row["release_year"]) if row["release_year"].isdecimal() else None for row in joined],
            "genres": [row["class"].replace(" ", "|") for row in joined],
            "label": [int(float(row["rating"]) >= 4) for row in joined],
            "split": drawn_splits(len(joined), seed),
        }
    )


def of_ratings(
    ratings: list[tuple[str, str, float, int]], genres: dict[str, str], years: dict[str, int | None], threshold: float
) -> dict[str, Any]:
    """Columns of (user, movie, rating, time) lines."""
    return {
        "user": [f"u{user}" for user, *_ in ratings],
        "movie": [f"m{movie}" for _, movie, *_ in ratings],
        "year": [years[movie] for _, movie, *_ in ratings],
        "genres": [genres[movie] for _, movie, *_ in ratings],
        "label": [int(rating >= threshold) for _, _, rating, _ in ratings],
    }


def year_of(title: str) -> int | None:
    """The year in brackets at the end of a title."""
    digits = title.strip()[-5:-1]
    return int(digits) if digits.isdecimal() else None


def movietweetings(shares: tuple[float, float]) -> pa.Table:
    """The ratings that ship with recjax."""
    ratings, genres, years = [], {}, {}
    with gzip.open(TWEETS / "movies.dat.gz", "rt") as file:
        for line in file:
            movie, title, of_movie = line.rstrip("\n").split("::")
            genres[movie], years[movie] = of_movie, year_of(title)
    with gzip.open(TWEETS / "ratings.dat.gz", "rt") as file:
        for line in file:
            user, movie, rating, at = line.rstrip("\n").split("::")
            ratings.append((user, movie, float(rating), int(at)))
    columns = of_ratings(ratings, genres, years, 8)
    return pa.table(columns | {"split": splits_by_time(np.array([at for *_, at in ratings]), shares)})


def movielens_small(folder: Path, shares: tuple[float, float]) -> pa.Table:
    """The ratings of ml-latest-small."""
    ratings, genres, years = [], {}, {}
    with (folder / "movies.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            genres[row["movieId"]], years[row["movieId"]] = row["genres"], year_of(row["title"])
    with (folder / "ratings.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            ratings.append((row["userId"], row["movieId"], float(row["rating"]), int(row["timestamp"])))
    columns = of_ratings(ratings, genres, years, 4)
    return pa.table(columns | {"split": splits_by_time(np.array([at for *_, at in ratings]), shares)})


def of_source(source: BlockSource) -> pa.Table:
    """All rows of a source as a table with a column `split`: ids as text, lists of ids as lists."""
    columns: dict[str, list[Any]] = {}
    for split in SPLITS:
        for index in range(len(source.row_counts(split))):
            batch = source.read(split, index)
            for k, name in enumerate(source.schema.dense):
                columns.setdefault(name, []).extend(batch.dense[:, k].tolist())
            for feature in source.schema.features:
                bags, column = batch.bags[feature.name], columns.setdefault(feature.name, [])
                if bags.lengths is None:
                    column.extend(f"v{value}" for value in bags.ids[:, 0])
                else:
                    parts = np.split(bags.ids.ravel(), np.cumsum(bags.lengths)[:-1])
                    column.extend([f"v{value}" for value in part] for part in parts)
            columns.setdefault("label", []).extend(batch.labels.astype(int).tolist())
            columns.setdefault("split", []).extend([split] * batch.size)
    return pa.table(columns)


def tables(wheel: Path, movielens: Path | None, split_seed: int, as_presets: bool) -> dict[str, Callable[[], pa.Table]]:
    """Returns, by name of the data set, a function that makes its table."""
    tweets, ratings = (0.7, 0.1), (0.7, 0.1)
    if as_presets:
        tweets, ratings = ((0.8 * (1 - share), 0.8 * share) for share in (0.0112, 0.02))
    found: dict[str, Callable[[], pa.Table]] = {
        "ml-100k": functools.partial(movielens_100k, wheel, split_seed),
        "movietweetings": functools.partial(movietweetings, tweets),
    }
    if movielens:
        found["ml-latest-small"] = functools.partial(movielens_small, movielens, ratings)
    return found | {name: functools.partial(of_law, law) for name, law in LAWS.items()}


def of_law(law: Synthetic) -> pa.Table:
    """All rows of a law."""
    return of_source(law.open())


def measure(folder: Path, data: Path, overrides: list[str], seed: int) -> dict[str, float]:
    """Validation AUC at the chosen step, test AUC, epochs trained, seconds."""
    began = time.monotonic()
    config = recjax.load("table", [f"data.path={data}", f"seed={seed}", "mesh.devices=1", *overrides])
    with tempfile.TemporaryDirectory(dir=folder) as out, contextlib.redirect_stderr(io.StringIO()):
        summary = recjax.fit(config, Path(out) / "run")
        lines = [json.loads(text) for text in (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()]
        best = max(line["auc"] for line in lines if line["split"] == "validation")
    seconds = round(time.monotonic() - began, 1)
    return {"validation": best, "test": summary["eval"]["auc"], "samples": summary["samples"], "seconds": seconds}


def compare(lines: Sequence[Mapping[str, Any]], recipes: Mapping[str, Sequence[str]]) -> str:
    """A line a recipe, with the difference of each data set's means to the first recipe; and what is left out."""
    sets = list(dict.fromkeys(line["data"] for line in lines))
    means: dict[tuple[str, str, str], float] = {}
    for name, overrides in recipes.items():
        for data in sets:
            of = [line for line in lines if line["data"] == data and line["overrides"] == list(overrides)]
            for key in ("validation", "test"):
                means[name, data, key] = float(np.mean([line[key] for line in of])) if of else float("nan")
    first, *_ = recipes
    text = [f"{'validation/test':24}" + "".join(f"{data:>18}" for data in sets)]
    for name in recipes:
        if name == first:
            shown = (f"{means[name, data, 'validation']:.4f}/{means[name, data, 'test']:.4f}" for data in sets)
        else:
            pairs = (
                [means[name, data, key] - means[first, data, key] for key in ("validation", "test")] for data in sets
            )
            shown = (f"{validation:+.4f}/{test:+.4f}" for validation, test in pairs)
        text.append(f"{name:24}" + "".join(f"{each:>18}" for each in shown))
    whole = [name for name in recipes if all(means[name, data, "validation"] > 0 for data in sets)]

    def chosen(of: Sequence[str]) -> str:
        return max(
            whole,
            key=lambda name: sum(means[name, data, "validation"] - means[first, data, "validation"] for data in of),
        )

    if len(sets) > 1:
        text.append(f"chosen by all: {chosen(sets)}")
        for data in sets:
            other = chosen([each for each in sets if each != data])
            costs = [means[other, data, key] - means[chosen(sets), data, key] for key in ("validation", "test")]
            text.append(f"left out {data}: {other}, costs {costs[0]:+.4f}/{costs[1]:+.4f} there")
    return "\n".join(text)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of recbole 1.2.1")
    parser.add_argument("--movielens", type=Path, help="folder of ml-latest-small (default: without)")
    parser.add_argument("--recipes", type=Path, required=True, help="a JSON file: recipe -> list of settings")
    parser.add_argument("--only", nargs="*", help="data sets to take (default: all)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--split-seeds", type=int, nargs="+", default=[2026], help="draws of the splits of ml-100k")
    parser.add_argument("--presets", action="store_true", help="split as the data sets' own presets do")
    parser.add_argument("--results", type=Path, required=True, help="JSON Lines, read first and added to")
    options = parser.parse_args()
    recipes: dict[str, list[str]] = json.loads(options.recipes.read_text())
    done = {}
    if options.results.exists():
        for old in map(json.loads, options.results.read_text().splitlines()):
            done[old["data"], tuple(old["overrides"]), old["seed"], old["split_seed"]] = old
    with tempfile.TemporaryDirectory() as temporary:
        folder, prepared = Path(temporary), dict[tuple[Any, ...], Path]()
        for split_seed in options.split_seeds:
            made = tables(options.wheel, options.movielens, split_seed, options.presets)
            for name, recipe, seed in itertools.product(made, recipes, range(options.seeds)):
                overrides = recipes[recipe]
                split = split_seed if name == "ml-100k" else -int(options.presets)
                key = (name, tuple(overrides), seed, split)
                if key in done or options.only and name not in options.only:
                    continue
                own = tuple(text.removeprefix("data.") for text in overrides if text.startswith("data."))
                if (name, split, own) not in prepared:
                    prepared[name, split, own] = folder / f"data-{len(prepared)}"
                    with contextlib.redirect_stderr(io.StringIO()):
                        recjax.prepare(made[name](), "label", prepared[name, split, own], own, split_column="split")
                settings = [text for text in overrides if not text.startswith("data.")]
                about: dict[str, Any] = {"data": name, "overrides": overrides, "seed": seed, "split_seed": split}
                done[key] = line = about | measure(folder, prepared[name, split, own], settings, seed)
                with options.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(recipe, line, file=sys.stderr, flush=True)
    splits = {*options.split_seeds, -int(options.presets)}
    shown = [line for line in done.values() if line["split_seed"] in splits and line["seed"] < options.seeds]
    print(compare([line for line in shown if not options.only or line["data"] in options.only], recipes))


if __name__ == "__main__":
    main()
