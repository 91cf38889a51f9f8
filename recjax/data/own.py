"""Advice for a user who names a table of their own, such as a CSV file, as the data."""

from __future__ import annotations

from pathlib import PurePath

_READ = ("csv", "tsv", "parquet", "pq", "jsonl", "ndjson", "feather", "arrow", "ipc")
_OTHERS = ("txt", "json", "xlsx", "pkl", "npz", "libsvm")
_PYTHON = ("pandas", "polars", "duckdb", "numpy")
_TRAIN = "`recjax train table data.from=FILE data.label=COLUMN`"
HOW = (
    f"A table of one's own (Parquet, ORC, CSV, JSON Lines or Arrow) is trained on by {_TRAIN}; in Python "
    "recjax.prepare takes a frame. See docs/guides/own_data.md."
)


def hint(name: str) -> str:
    """Returns advice and a space if `name` is a file of a tabular format, or such a format; else "".

    Args:
      name: what was given as a preset or as data; also a setting, `data=FILE`.
    """
    name = name.removeprefix("data.from=").removeprefix("data=")
    file = PurePath(name)
    inner = file.with_suffix("") if file.suffix.lower() in (".gz", ".zip", ".zst", ".bz2") else file
    form = (inner.suffix or inner.name).removeprefix(".").lower()
    if form in _OTHERS:
        return f"Write the table as Parquet or CSV first. {HOW} "
    if form in _READ and inner.suffix:
        return f"To train on this table: {_TRAIN.replace('FILE', name)}. See docs/guides/own_data.md. "
    return f"{HOW} " if form in (*_READ, *_PYTHON) else ""
