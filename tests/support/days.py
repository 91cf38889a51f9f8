"""Clicks of users, day by day, as CSV files: the users of a day are partly those of the day before."""

from pathlib import Path
from typing import Any

import numpy as np

from support.commands import inside

KINDS = 7
MODEL = (
    "model=dlrm",
    "model.bottom=12-8",
    "model.top=16-1",
    "embedding.dim=8",
    "mesh.devices=1",
    "small.below_rows=0",
    "train.batch_size=64",
)
TABLE = (
    "data.label=clicked",
    "data.columns=user:id,kind:id,price:dense",
    "data.split=column",
    "data.split_column=fold",
)


def write_day(
    path: Path, users: range, rows: int, seed: int, test: int = 40, mean: float = 5.0, more: str = "", prefix: str = "u"
) -> Path:
    """Writes `rows` training rows and `test` test rows; whether users click is a matter of their own taste.

    `more` is a further column, of five values; `mean` that of the price.
    """
    rng, taste = np.random.default_rng(seed), np.random.default_rng(77).normal(size=1000)
    lines = ["user,kind,price,clicked,fold" + (f",{more}" if more else "")]
    for row in range(rows + test):
        user, kind, price = rng.integers(users.start, users.stop), rng.integers(KINDS), rng.normal(mean, 2)
        clicked = int(rng.random() < 1 / (1 + np.exp(-2 * taste[user] - 0.5 * (kind - 3))))
        fold = "train" if row < rows else "test"
        lines.append(f"{prefix}{user},k{kind},{price:.3f},{clicked},{fold}" + (f",m{rng.integers(5)}" if more else ""))
    path.write_text("\n".join(lines) + "\n")
    return path


def train(data: Path, out: Path, *more: str) -> dict[str, Any]:
    """Trains on raw rows, and returns the summary."""
    return inside("train", "table", f"data.from={data}", *TABLE, *MODEL, *more, "--out", out, "--json").result


def scores(run: Path, rows: Path, out: Path) -> np.ndarray:
    """Logits of rows."""
    done = inside("predict", run, "--input", rows, "--out", out, "--overwrite")
    assert done.status == 0, done.err
    return np.genfromtxt(out, delimiter=",", skip_header=1)[:, 1]
