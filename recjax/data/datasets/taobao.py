"""Taobao ad display clicks (Alibaba Tianchi, data set 56): eight days of May 2017, three CSV files.

raw_sample.csv has a line for each ad shown; ad_feature.csv tells of the ads and user_profile.csv of the users, and are
joined to it. About one row in twenty is of a user without a profile: those features are then missing, as are the
fields that the files leave empty or call NULL. Days, hours and weekdays are those of China (UTC+8). The terms do not
let recjax ship a row.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from recjax.data.datasets.options import open_as
from recjax.data.datasets.readers import RawFiles
from recjax.data.prepare import day_split
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.text.fields import Faults, Rows
from recjax.data.text.side_tables import read_keyed
from recjax.data.text.source_files import find_file, require_source
from recjax.data.text.table import Form, read_rows
from recjax.settings.values import check_ranges

_LEVELS = ("age_level", "pvalue_level", "shopping_level")  # of users; their order means something
_FEW = ("user", "adgroup_id", "cate_id", "brand")
_UTC_OFFSET = 8 * 3600  # of China, in seconds
_SAMPLES = ("user", "time_stamp", "adgroup_id", "pid", "clk")
_AD = ("cate_id", "campaign_id", "customer", "brand")
_PROFILE = tuple(
    """
    cms_segid cms_group_id final_gender_code age_level pvalue_level shopping_level occupation new_user_class_level
    """.split()
)


def _form(*columns: str) -> Form:
    return Form(columns, header=columns)


@dataclasses.dataclass(frozen=True)
class Taobao:
    """Config of the Taobao data."""

    kind: ClassVar[str] = "taobao"

    path: str = ""  # folder of prepared data
    validation_days: int = 1  # days before the test days that validate
    test_days: int = 1  # last days of the log, which are test
    ids: Frequency | Hash | Modulo = Frequency(min_count=10)  # mapping of values to rows of tables
    columns: Literal["all", "few"] = "all"  # few: price and three levels of the user, dense; user, ad, category, brand
    dense: DenseTransform = "log1p"  # transform of the price; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # one more dense column, price_missing: 1 where the price is missing
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(self, validation_days=(0, None), test_days=(0, None))

    open = open_as


def open_raw(config: Taobao, source: str | os.PathLike[str] | None) -> TaobaoReader:
    """The reader of the raw files.

    Args:
      config: the options.
      source: the folder of the three files, each plain or with .gz after its name.

    Raises:
      DataError: a file is missing or cannot be read, or there are too few days.
    """
    return TaobaoReader(config, require_source(config.kind, source))


class TaobaoReader(RawFiles):
    """Hands the log to the preparation in the order of the file (a `recjax.data.prepare.chunk.Reader`)."""

    name = Taobao.kind
    label = "the ad was clicked"
    dense: tuple[str, ...] = ("price",)
    features: tuple[RawFeature, ...] = (
        *(RawFeature(name) for name in ("user", "adgroup_id")),
        RawFeature("pid", values="text"),
        *(RawFeature(name) for name in ("hour", "weekday")),
        *(RawFeature(name, optional=True) for name in (*_AD, *_PROFILE)),
    )

    def __init__(self, config: Taobao, source: Path) -> None:
        """Reads ads and users of the folder `source`, and the times of all rows to see where the splits begin.

        Raises:
          DataError: a file is missing or cannot be read, or there are too few days.
        """
        if config.columns == "few":
            self.dense = ("price", *_LEVELS)
            self.features = tuple(feature for feature in self.features if feature.name in _FEW)
        names = ("raw_sample.csv", "ad_feature.csv", "user_profile.csv")
        self._raw = tuple(find_file(source, name) for name in names)
        self._skip = config.on_error == "skip"
        self.splits = day_split.in_words(config.validation_days, config.test_days)
        faults = Faults(self._skip)
        self._ads = read_keyed(self._raw[1], _form("adgroup_id", *_AD, "price"), "adgroup_id", _ad, faults)
        self._users = read_keyed(self._raw[2], _form("userid", *_PROFILE), "userid", _profile, faults)
        self._skipped = faults.drain()
        found, self._rows_in_all = set(), 0
        for rows in self._rows(faults, ("time_stamp",)):
            found |= set((_local_time(rows)[rows.ok] // 86400).tolist())
            self._rows_in_all += len(rows)
        self._day_splits = day_split.choose(found, config.validation_days, config.test_days, self._raw[0])

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        faults, read = Faults(self._skip), 0
        for number, rows in enumerate(self._rows(faults, _SAMPLES)):
            chunk = self._chunk(rows)
            skipped = collections.Counter(faults.drain())
            if number == 0:
                skipped.update(self._skipped)
            read += len(rows)
            if number >= start:
                yield dataclasses.replace(chunk, skipped=skipped, done=read / self._rows_in_all)

    def _rows(self, faults: Faults, columns: tuple[str, ...]) -> Iterator[Rows]:
        return read_rows(self._raw[0], _form(*_SAMPLES), faults, columns)

    def _chunk(self, rows: Rows) -> Chunk:
        clicks, time = rows.integers("clk", 0, 1), _local_time(rows)
        users, ads, places = rows.integers("user"), rows.integers("adgroup_id"), rows.text("pid")
        ok = rows.ok
        clicks, time, users, ads, places = clicks[ok], time[ok], users[ok], ads[ok], places[ok]
        day = time // 86400
        joined = self._ads.of(ads) | self._users.of(users)
        weekday = (day + 3) % 7  # 0 is Monday; 1970 began on a Thursday
        plain = {"user": users, "adgroup_id": ads, "pid": places, "hour": time % 86400 // 3600, "weekday": weekday}
        columns = {name: Column(values) for name, values in plain.items()} | joined
        return Chunk(
            labels=clicks.astype(np.float32),
            dense=np.stack([_numbers(columns[name]) for name in self.dense], axis=1),
            columns={feature.name: columns[feature.name] for feature in self.features},
            split=self._day_splits.of(day),
        )


def _numbers(column: Column) -> np.ndarray:
    """The values as float64 [n], NaN where missing."""
    return np.where(False if column.missing is None else column.missing, np.nan, column.keys)


def _local_time(rows: Rows) -> np.ndarray:
    """Seconds since 1970 by the clocks of China: int64 [n]."""
    return rows.integers("time_stamp") + _UTC_OFFSET


def _ad(rows: Rows) -> dict[str, Column]:
    return _optional(rows, _AD) | {"price": Column(rows.numbers("price", 0, 1e12))}


def _profile(rows: Rows) -> dict[str, Column]:
    return _optional(rows, _PROFILE)


def _optional(rows: Rows, names: tuple[str, ...]) -> dict[str, Column]:
    missing = {name: rows.missing(name, "NULL") for name in names}
    return {name: Column(rows.integers(name), missing=missing[name]) for name in names}
