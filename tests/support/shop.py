"""A small dataset of raw rows for tests: an integer, a text that may be missing, bags of texts, and two numbers."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.ids import Frequency, Hash
from recjax.data.prepare.prepare import prepare_data
from recjax.data.storage.blocks import PreparedSource

ROWS = 700


def rows() -> list[dict[str, Any]]:
    """Raw rows: an integer, a text that may be missing, a bag of texts, and two numbers of which one may be missing."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(ROWS):
        made.append(
            {
                "user": int(rng.zipf(1.5)) % 10**12 - 5,
                "city": None if rng.random() < 0.2 else f"Zürich {rng.integers(9)}",
                "tags": [f"t{i}" for i in rng.integers(0, 6, rng.integers(0, 4))],
                "age": float(rng.integers(100)),
                "price": None if rng.random() < 0.3 else float(rng.normal()),
            }
        )
    return made


class Reader:
    """Hands those rows to the preparation; all are training rows but the last 200."""

    name, label, splits = "shop", "bought", "the last rows"
    dense = ("age", "price")
    features = (
        RawFeature("user"),
        RawFeature("city", optional=True, values="text"),
        RawFeature("tags", jagged=True, values="text"),
    )

    def files(self) -> dict[str, str]:
        return {}

    def chunks(self, start: int) -> Iterator[Chunk]:
        made = rows()
        city = [row["city"] for row in made]
        columns = {
            "user": Column(np.array([row["user"] for row in made], np.int64)),
            "city": Column(
                np.array([(c or "").encode() for c in city], "S"), None, np.array([c is None for c in city])
            ),
            "tags": Column(
                np.array([tag.encode() for row in made for tag in row["tags"]], "S"),
                np.array([len(row["tags"]) for row in made], np.int32),
            ),
        }
        nan = math.nan
        dense = np.array([[row["age"], nan if row["price"] is None else row["price"]] for row in made])
        labels = (np.arange(ROWS) % 3 == 0).astype(np.float32)
        split = np.repeat([0, 1, 2], [500, 100, 100]).astype(np.uint8)
        yield from [Chunk(labels, dense, columns, split)][start:]


def prepare_shop(out: Path, reader: Any = Reader, ids: Frequency | Hash = Frequency(min_count=2)) -> PreparedSource:  # noqa: B008
    """Those rows as prepared data."""
    return prepare_data(reader(), out, ids=ids, dense="standard", missing_indicators=True, options={})
