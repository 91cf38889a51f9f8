"""Avazu click-through rates (Kaggle, 2014): ten days of mobile ads, one CSV file with a header.

Source: the file `train` of Kaggle's avazu-ctr-prediction, plain or gzipped; its terms do not let recjax ship a row. The
column `hour` (YYMMDDHH, UTC) gives the hour of the day and the day of the week; `id` numbers the rows and is left out.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from recjax.data.datasets.options import open_as
from recjax.data.datasets.readers import RawFiles
from recjax.data.prepare import day_split
from recjax.data.prepare.chunk import Chunk, Column, RawFeature, Unlabelled
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.text.fields import Faults, Rows
from recjax.data.text.source_files import find_file, require_source
from recjax.data.text.table import Form, names_of, read_rows
from recjax.errors import DataError
from recjax.settings.values import check_ranges

_INTEGERS = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
_HASHES = tuple(
    "site_id site_domain site_category app_id app_domain app_category device_id device_ip device_model".split()
)
_COLUMNS = ("click", "hour", *_INTEGERS, *_HASHES)
_FORM = Form(_COLUMNS, header=_COLUMNS)


@dataclasses.dataclass(frozen=True)
class Avazu:
    """Config of the Avazu data."""

    kind: ClassVar[str] = "avazu"

    path: str = ""  # folder of prepared data
    validation_days: int = 1  # days before the test days that validate
    test_days: int = 1  # last days of the file, which are test
    ids: Frequency | Hash | Modulo = Frequency(min_count=2)  # mapping of values to rows of tables
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(self, validation_days=(0, None), test_days=(0, None))

    open = open_as


def open_raw(config: Avazu, source: str | os.PathLike[str] | None) -> AvazuReader:
    """The reader of the raw file.

    Args:
      config: the options.
      source: the file, or the folder that holds it as train or train.csv; plain or with .gz after its name.

    Raises:
      DataError: the file cannot be read, or has too few days.
    """
    place = require_source(config.kind, source)
    file = place if place.is_file() else find_file(place, "train.csv", "train")
    return AvazuReader(config, file)


class AvazuReader(RawFiles):
    """Hands the log to the preparation in the order of the file (a `recjax.data.prepare.chunk.Reader`)."""

    name = Avazu.kind
    label = "the ad was clicked"
    dense = ("hour_sin", "hour_cos")  # the hour of the day as a point on a circle
    features = (
        *(RawFeature(name) for name in ("hour", "weekday", *_INTEGERS)),
        *(RawFeature(name, values="hex") for name in _HASHES),
    )

    def __init__(self, config: Avazu, file: Path) -> None:
        """Reads the hours of all rows, to see where the splits begin.

        Raises:
          DataError: the file cannot be read, or has too few days.
        """
        self._raw, self._skip = (file,), config.on_error == "skip"
        self.splits = day_split.in_words(config.validation_days, config.test_days)
        found, self._rows_in_all = set(), 0
        for rows in self._rows(Faults(self._skip), ("hour",)):
            found |= set(_day_and_hour(rows)[0][rows.ok].tolist())
            self._rows_in_all += len(rows)
        self._day_splits = day_split.choose(found, config.validation_days, config.test_days, file)

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        faults, read = Faults(self._skip), 0
        for number, rows in enumerate(self._rows(faults, _COLUMNS)):
            chunk = self._chunk(rows)
            skipped, read = faults.drain(), read + len(rows)
            if number >= start:
                yield dataclasses.replace(chunk, skipped=skipped, done=read / self._rows_in_all)

    def _rows(self, faults: Faults, columns: tuple[str, ...]) -> Iterator[Rows]:
        return read_rows(self._raw[0], _FORM, faults, columns)

    def _chunk(self, rows: Rows) -> Chunk:
        clicks = rows.integers("click", 0, 1)
        chunk, day = _features(rows)
        return dataclasses.replace(
            chunk, labels=clicks[rows.ok].astype(np.float32), split=self._day_splits.of(day[rows.ok])
        )


def read_unlabelled(file: Path, faults: Faults, carry: Sequence[str] | None = ()) -> Iterator[Unlabelled]:
    """The rows of a file in its order, all labels 0: it need not have the column click, as Kaggle's test file.

    A field may be empty, but for the hour.

    Args:
      file: the file.
      faults: takes malformed lines.
      carry: columns of the file to hand on as they are written; None: all.

    Raises:
      DataError: the file cannot be read, has no column of `carry`, or what `faults` raises.
    """
    form = Form(_COLUMNS[1:], header=_COLUMNS[1:])
    columns = {re.sub(r"^\([0-9]+\) ", "", name): name for name in names_of(file, form)}
    if strange := [name for name in carry or () if name not in columns]:
        raise DataError(f"{file} has no column {strange[0]!r} to carry. Its columns are {', '.join(columns)}.")
    carried = {name: columns[name] for name in (columns if carry is None else carry)}
    for rows in read_rows(file, form, faults, tuple(dict.fromkeys((*_COLUMNS[1:], *carried.values())))):
        raw = {name: rows.raw(column) for name, column in carried.items()}
        missing = {name: rows.missing(name) for name in (*_INTEGERS, *_HASHES)}
        chunk, _ = _features(rows)
        columns_read: dict[str, Any] = dict(chunk.columns)
        for name, absent in missing.items():
            columns_read[name] = dataclasses.replace(columns_read[name], missing=absent[rows.ok])
        chunk = dataclasses.replace(chunk, columns=columns_read)
        of_ok = {name: list(itertools.compress(values, rows.ok)) for name, values in raw.items()}
        yield Unlabelled(chunk, rows.lines[rows.ok] - 1, of_ok)


def _features(rows: Rows) -> tuple[Chunk, np.ndarray]:
    """The rows without label and split, which are 0, and the day of each, of malformed rows too."""
    day, hour = _day_and_hour(rows)
    columns = {"hour": hour, "weekday": (day + 3) % 7}  # 0 is Monday; 1970 began on a Thursday
    columns |= {name: rows.integers(name, -1) for name in _INTEGERS}
    columns |= {name: rows.hexadecimals(name) for name in _HASHES}
    angle = 2 * np.pi * hour[rows.ok] / 24
    n = len(angle)
    chunk = Chunk(
        labels=np.zeros(n, np.float32),
        dense=np.stack([np.sin(angle), np.cos(angle)], axis=1),
        columns={name: Column(values[rows.ok]) for name, values in columns.items()},
        split=np.zeros(n, np.uint8),
    )
    return chunk, day


def _day_and_hour(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Days since 1970 and hours of the day of YYMMDDHH: int64 [n] each."""
    stamps, at = np.unique(rows.integers("hour", 0, 99123123), return_inverse=True)  # a few for thousands of rows
    parsed = [_parse_hour(stamp) for stamp in stamps.tolist()]
    rows.refuse(np.array([when is None for when in parsed])[at], "hour", "not a time like 14102123 (YYMMDDHH)")
    hours = np.array([0 if when is None else int(when.timestamp()) // 3600 for when in parsed], np.int64)[at]
    return hours // 24, hours % 24


def _parse_hour(stamp: int) -> datetime.datetime | None:
    year, month, day, hour = 2000 + stamp // 10**6, stamp // 10**4 % 100, stamp // 100 % 100, stamp % 100
    try:
        return datetime.datetime(year, month, day, hour, tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        return None
