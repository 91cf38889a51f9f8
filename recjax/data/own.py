"""Advice for a user who names a table of their own, such as a CSV file, as the data."""

from __future__ import annotations

from pathlib import PurePath

_TABLES = (
    "csv",
    "tsv",
    "txt",
    "parquet",
    "feather",
    "arrow",
    "json",
    "jsonl",
    "xlsx",
    "pkl",
    "npz",
    "pandas",
    "libsvm",
)
HOW = (
    "Tables of one's own are first turned into prepared data, by a few lines of Python that call "
    "recjax.data.storage.blocks.write_prepared (`Your own data` in the README has them); then `recjax train synthetic "
    "data=prepared data.path=FOLDER` trains on them."
)


def hint(name: str) -> str:
    """Returns `HOW` and a space if `name` is a file of a tabular format, or such a format; else ""."""
    file = PurePath(name.lower())
    file = file.with_suffix("") if file.suffix in (".gz", ".zip", ".zst") else file
    return f"{HOW} " if (file.suffix or file.name).removeprefix(".") in _TABLES else ""
