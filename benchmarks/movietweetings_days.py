"""MovieTweetings day by day: a run that goes on each day, beside one that is trained again on all data each day.

    python benchmarks/movietweetings_days.py [--days 30] [--seeds 1] [--epochs 5] [--passes 5]

Takes the ratings that ship with recjax, by day (UTC); the last `--days` days that have ratings are foretold, each by
a model that has seen all days before it. `going on` trains once on what comes before these days (`--epochs`), and then
each day on that day's rows alone (`--passes` over them); `again` trains each day on all rows so far (`--epochs`), from
new weights. Both have the settings of the preset, without validation. Prints the AUC of each day, the means, and the
steps that were trained after the first day.
"""

import argparse
import gzip
import json
import re
import statistics
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

import recjax

SETTINGS = (
    "data.label=liked",
    "data.split=column",
    "data.split_column=fold",
    "small.below_rows=0",
    "model=dlrm",
    "model.bottom=32",
    "model.top=32-1",
    "model.interaction=cat",
    "embedding.dim=32",
    "embedding.optimizer=rowwise_adagrad",
    "embedding.optimizer.learning_rate=0.004",
    "train.optimizer=sgd",
    "train.optimizer.learning_rate=0.3",
    "train.batch_size=768",
    "train.shuffle=false",
    "train.patience=0",
    "train.eval_every=0",
    "mesh.devices=1",
)


def read_days() -> list[list[dict[str, Any]]]:
    """The rows of each day that has some, in the order of time."""
    folder = resources.files("recjax") / "data" / "files" / "movietweetings"

    def lines(name: str) -> list[list[str]]:
        with resources.as_file(folder / name) as file, gzip.open(file, "rt", encoding="utf-8") as text:
            return [line.rstrip("\n").split("::") for line in text]

    about = {}
    for movie, title, genres in lines("movies.dat.gz"):
        year = re.search(r"\((\d{4})\)$", title)
        about[movie] = {"year": int(year[1]) if year else None, "genres": genres.split("|") if genres else []}
    days: dict[int, list[dict[str, Any]]] = {}
    for user, movie, rating, time in sorted(lines("ratings.dat.gz"), key=lambda line: int(line[3])):
        row = {"user": int(user), "movie": int(movie), "liked": int(int(rating) >= 8), "fold": "train", **about[movie]}
        days.setdefault(int(time) // 86400, []).append(row)
    return [days[day] for day in sorted(days)]


def write(rows: list[dict[str, Any]], file: Path, tested: list[dict[str, Any]] | None = None) -> Path:
    """Writes rows that train, and others that are the test split."""
    parquet.write_table(pa.Table.from_pylist([*rows, *({**row, "fold": "test"} for row in tested or [])]), file)
    return file


def main() -> None:
    """Trains both ways and prints the days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30, help="days that are foretold (default: 30)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 (default: 1)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over all rows of a training (default: 5)")
    parser.add_argument("--passes", type=int, default=5, help="passes over a day of going on (default: 5)")
    parser.add_argument("--min-count", type=int, default=2, help="ratings from which a user has a row (default: 2)")
    parser.add_argument("--on-alone", action="store_true", help="leave out the trainings again")
    options = parser.parse_args()
    days = read_days()
    before, foretold = days[: -options.days], days[-options.days :]
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = compare(folder, before, foretold, seed, options)
        print(json.dumps({"seed": seed, **found}))
        for way in ("on", "again"):
            if found[way]:
                last = statistics.mean(found[way][-10:])
                print(f"{way}: mean AUC {statistics.mean(found[way]):.4f}, of the last ten days {last:.4f}")


def compare(
    folder: Path, before: list[Any], foretold: list[Any], seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The AUC of each day and the steps of both ways."""

    def fit(rows: list[dict[str, Any]], tested: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        data = write(rows, folder / f"{out.name}.parquet", tested)
        columns = f"user:id:min_count={options.min_count},movie:id,genres:jagged:min_count=50,year:id:min_count=20"
        own = (f"data.columns={columns}", f"data.from={data}", f"seed={seed}", f"train.epochs={options.epochs}")
        return recjax.fit(recjax.load("table", *own, *SETTINGS), out)

    past = [row for day in before for row in day]
    first = fit(past, foretold[0], folder / "on")
    on, again, steps_again, steps_on = [], [], 0, first["steps"]
    for number, day in enumerate(foretold):
        file = write(day, folder / f"day{number}.parquet")
        summary = recjax.go_on(folder / "on", file, f"train.epochs={options.passes}")
        on.append(summary["eval"]["auc"])
        steps_on = summary["steps"]
        if not options.on_alone:
            trained = first if number == 0 else fit(past, day, folder / f"again{number}")
            again.append(trained["eval"]["auc"])
            steps_again += trained["steps"] if number else 0
        past += day
        print(f"{number}: {len(day)} rows, on {on[-1]:.4f}" + (f", again {again[-1]:.4f}" if again else ""), flush=True)
    return {"on": on, "again": again, "steps_on": steps_on - first["steps"], "steps_again": steps_again}


if __name__ == "__main__":
    main()
