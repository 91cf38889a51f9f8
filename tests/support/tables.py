"""A small table of clicks with a column of every role, as Arrow and as files of every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as parquet

from recjax.data.batch import Batch
from recjax.data.prepare.encoder import Encoder
from recjax.data.source import SPLITS, concatenate
from recjax.data.storage.blocks import PreparedSource


def clicks(rows: int = 300, seed: int = 0, lists: bool = True) -> pa.Table:
    """Texts, 64-bit integers, booleans, numbers, missing values of all; what is clicked depends on user and item."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 30, rows), rng.integers(0, 20, rows)
    likes = rng.random(rows) < 1 / (1 + np.exp(-(user % 5 - 2.0) - (item % 3 - 1.0)))
    kinds = ["a", "b, c", 'say "é"', "NA"]
    columns: dict[str, Any] = {
        "user": pa.array([f"u{i:02}" for i in user]),
        "item_id": pa.array(item.astype(np.int64) * 10**15 - 5),
        "kind": pa.array([None if rng.random() < 0.1 else kinds[i % 4] for i in range(rows)]),
        "paid": pa.array(rng.random(rows) < 0.5),
        "price": pa.array([None if rng.random() < 0.1 else round(float(x), 3) for x in rng.lognormal(size=rows)]),
        "when": pa.array(1_700_000_000 + 60 * np.arange(rows)),
        "clicked": pa.array(likes.astype(np.int64)),
    }
    if lists:
        columns["tags"] = pa.array(
            [None if i % 17 == 0 else [int(t) for t in rng.integers(0, 9, i % 4)] for i in range(rows)],
            pa.list_(pa.int64()),
        )
        columns["vector"] = pa.array(rng.normal(size=(rows, 2)).astype(np.float32).tolist(), pa.list_(pa.float32()))
    return pa.table(columns)


def write(table: pa.Table, path: Path) -> Path:
    """A table in the format that the name of the file tells."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".orc":
        orc.write_table(table, path)
    else:
        feather.write_feather(table, path, chunksize=40)
    return path


def whole(source: PreparedSource, split: str) -> Batch | None:
    """All rows of a split; None if it has none."""
    blocks = [source.read(split, i) for i in range(len(source.row_counts(split)))]
    return concatenate(blocks) if blocks else None


def original(source: PreparedSource, encoder: Encoder) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split, with the values that their ids stand for, None for missing ones, "?" for unknown ones."""
    found: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        batch = whole(source, split)
        rows: list[dict[str, Any]] = [{} for _ in range(0 if batch is None else batch.size)]
        if batch is None:
            found[split] = rows
            continue
        for feature, map_ in zip(encoder.features, encoder.maps, strict=True):
            first = 2 if feature.optional else 1
            values = ["?", *([None] if feature.optional else []), *map_.vocabulary.values.tolist()]
            assert len(values) == first + len(map_.vocabulary.values) == map_.table_rows
            bags = batch.bags[feature.name]
            at = 0
            for row, length in zip(rows, [1] * batch.size if bags.lengths is None else bags.lengths, strict=True):
                entries = [values[i] for i in bags.ids.ravel()[at : at + length]]
                row[feature.name], at = (entries if feature.jagged else entries[0]), at + length
        for row, label, weight, dense in zip(rows, batch.labels, batch.weights, batch.dense, strict=True):
            row |= {"label": float(label), "weight": float(weight)}
            row |= dict(zip(encoder.schema.dense, map(float, dense), strict=True))
        found[split] = rows
    return found
