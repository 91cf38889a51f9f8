"""The Yelp open dataset: three files of JSON lines, of businesses, users and reviews. Is a review above 4 stars?

Get it from Yelp (business.yelp.com/data/resources/open-dataset); its terms do not let recjax ship a row. A review is
joined with its business and its user. Stars of a business or a user, and counts of their reviews, stand in the files as
of the day of the download: they were computed from the very reviews that are to be predicted, and from later ones. So
are `is_open`, `useful`, `funny`, `cool`, `fans` and `elite`. None of them is read. What was known when a review was
written is computed instead, from the reviews before it: how many its user and its business had, and their mean stars.

Held in memory are ids, time and stars of all reviews, never their text.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from recjax.data.datasets.options import open_as
from recjax.data.datasets.ratings import ranges
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.ids import Frequency, Hash
from recjax.data.text.fields import Faults
from recjax.data.text.json_lines import Kind, Objects, read_objects
from recjax.data.text.source_files import find_file, require_source, sha256
from recjax.errors import DataError
from recjax.settings.values import check_ranges

_CHUNK_ROWS = 2**17
_DAY = 86400
_HISTORY = ("user_reviews", "user_stars", "business_reviews", "business_stars")


@dataclasses.dataclass(frozen=True)
class Yelp:
    """Config of the Yelp data."""

    kind: ClassVar[str] = "yelp"

    path: str = ""  # folder of prepared data
    above: float = 4.0  # the label is stars > above (1 to 4.5)
    validation_fraction: float = 0.1  # share of the reviews before the test split that validate (the latest of them)
    test_fraction: float = 0.1  # share of all reviews that are test: the latest
    order: Literal["time", "business"] = "time"  # of the rows of a split; business: grouped, by time in each group
    ids: Frequency | Hash = Frequency(min_count=2)  # how values become rows of tables
    dense: DenseTransform = "log1p"  # of counts, stars and days; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # for each dense column one more: 1 where the value is missing
    on_error: Literal["stop", "skip"] = "stop"  # at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(self, above=(1, 4.5), validation_fraction=(0, 0.9), test_fraction=(0, 0.9))

    open = open_as


@dataclasses.dataclass(frozen=True)
class Businesses:
    """What is known of m businesses.

    Attributes:
      ids: Arrow string array [m].
      city: bytes [m], empty where unknown.
      state: likewise.
      categories: of all businesses, end to end: bytes [L].
      counts: categories of each business, int64 [m], with sum L.
    """

    ids: Any
    city: np.ndarray
    state: np.ndarray
    categories: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Reviews:
    """n reviews, in the order of time (ties by line).

    Attributes:
      user_ids: of the users that wrote one, bytes [users].
      users: index into `user_ids`, int32 [n].
      business_ids: of the businesses that got one, bytes [businesses].
      businesses: index into `business_ids`, int32 [n].
      times: seconds since 1970, by the clock of the place, int64 [n].
      stars: float32 [n].
    """

    user_ids: np.ndarray
    users: np.ndarray
    business_ids: np.ndarray
    businesses: np.ndarray
    times: np.ndarray
    stars: np.ndarray


def open_raw(config: Yelp, source: str | os.PathLike[str] | None) -> YelpReader:
    """Reads the three files.

    Args:
      config: the options.
      source: the folder of yelp_academic_dataset_business.json, .._user.json and .._review.json (or business.json,
        user.json and review.json), each plain or with .gz behind its name.

    Raises:
      DataError: a file is missing or at fault (with file, line and key).
    """
    folder = require_source(config.kind, source)
    files = {name: find_file(folder, f"yelp_academic_dataset_{name}.json", f"{name}.json") for name in _COLUMNS}
    return YelpReader(config, files, Faults(config.on_error == "skip"))


class YelpReader:
    """Hands reviews to the preparation (a `recjax.data.prepare.chunk.Reader`)."""

    name = Yelp.kind
    dense = (*_HISTORY, "user_days")
    features = (
        RawFeature("user", values="text"),
        RawFeature("business", values="text"),
        RawFeature("city", optional=True, values="text"),
        RawFeature("state", optional=True, values="text"),
        RawFeature("categories", jagged=True, values="text"),
    )

    def __init__(self, config: Yelp, files: Mapping[str, Path], faults: Faults) -> None:
        """Reads all files.

        Args:
          config: the options.
          files: business, user and review.
          faults: told of malformed lines.

        Raises:
          DataError: see `open_raw`.
        """
        self._files = files
        self.label = f"stars > {config.above:g}"
        self._shops = _read_businesses(files["business"], faults)
        user_ids, since = _read_users(files["user"], faults)
        self._reviews = reviews = _read_reviews(files["review"], faults)
        self._skipped = faults.drain()
        self._shop_of = _find(reviews.business_ids, self._shops.ids)  # -1: not in the file
        at = _find(reviews.user_ids, user_ids)
        self._since = np.where(at >= 0, since[at], -1)
        self._labels = (reviews.stars > config.above).astype(np.float32)
        self._history = [_before(keys, reviews) for keys in (reviews.users, reviews.businesses)]
        rows = len(reviews.times)
        known = rows - int(rows * config.test_fraction)
        train = known - int(known * config.validation_fraction)
        self._split = np.repeat(np.arange(3, dtype=np.uint8), [train, known - train, rows - known])
        self._order = np.arange(rows)
        grouped = config.order == "business"
        if grouped:
            self._order = np.lexsort((reviews.times, reviews.businesses, self._split))
        self.splits = (
            f"ordered by time: the last {config.test_fraction:g} of the reviews are test; of the rest, the last "
            f"{config.validation_fraction:g} validation and the others train; vocabularies come from train only"
            + ("; rows of a split are grouped by business" if grouped else "")
        )

    def files(self) -> dict[str, str]:
        """File name -> sha256 of every raw file."""
        return {file.name: sha256(file) for file in self._files.values()}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        for first in range(start * _CHUNK_ROWS, len(self._order), _CHUNK_ROWS):
            chunk = self._chunk(self._order[first : first + _CHUNK_ROWS])
            done = min(1.0, (first + _CHUNK_ROWS) / len(self._order))
            yield dataclasses.replace(chunk, skipped=self._skipped if first == 0 else {}, done=done)

    def _chunk(self, rows: np.ndarray) -> Chunk:
        reviews, shops = self._reviews, self._shops
        users, businesses = reviews.users[rows], reviews.businesses[rows]
        shop, since = self._shop_of[businesses], self._since[users]
        counts = np.where(shop >= 0, shops.counts[shop], 0)
        starts = (np.cumsum(shops.counts) - shops.counts)[shop]
        city, state = (np.where(shop >= 0, texts[shop], b"") for texts in (shops.city, shops.state))
        columns = {
            "user": Column(reviews.user_ids[users]),
            "business": Column(reviews.business_ids[businesses]),
            "city": Column(city, missing=city == b""),
            "state": Column(state, missing=state == b""),
            "categories": Column(shops.categories[ranges(starts, counts)], counts.astype(np.int32)),
        }
        days = np.where(since >= 0, np.maximum(reviews.times[rows] - since, 0) / _DAY, np.nan)
        history = [column[rows] for pair in self._history for column in pair]
        return Chunk(
            labels=self._labels[rows],
            dense=np.stack([*history, days], axis=1),
            columns=columns,
            split=self._split[rows],
        )


def _before(keys: np.ndarray, reviews: Reviews) -> tuple[np.ndarray, np.ndarray]:
    """Of the reviews with the same key (int [n]) that are strictly older: how many, and their mean stars.

    Returns:
      Both float64 [n]; the mean is NaN where there are none.
    """
    order = np.lexsort((reviews.times, keys))
    sorted_keys, times = keys[order], reviews.times[order]
    new_key = np.r_[True, sorted_keys[1:] != sorted_keys[:-1]]
    new_time = new_key | np.r_[True, times[1:] != times[:-1]]
    at = np.arange(len(order))
    group = np.maximum.accumulate(np.where(new_key, at, 0))  # where the key's reviews begin
    now = np.maximum.accumulate(np.where(new_time, at, 0))  # where those of this very time begin
    sums = np.r_[0.0, np.cumsum(reviews.stars[order], dtype=np.float64)]
    counts = (now - group).astype(np.float64)
    count, mean = np.empty_like(counts), np.empty_like(counts)
    count[order] = counts
    mean[order] = np.where(counts > 0, (sums[now] - sums[group]) / np.maximum(counts, 1), np.nan)
    return count, mean


_COLUMNS: dict[str, dict[str, Kind]] = {
    "business": {"business_id": "text", "city": "text", "state": "text", "categories": "text"},
    "user": {"user_id": "text", "yelping_since": "text"},
    "review": {"user_id": "text", "business_id": "text", "stars": "number", "date": "text"},
}


def _read_businesses(file: Path, faults: Faults) -> Businesses:
    ids: list[str] = []
    city: list[str | None] = []
    state: list[str | None] = []
    categories: list[str | None] = []
    seen: set[str] = set()
    for rows in read_objects(file, _COLUMNS["business"], faults):
        found = _new_ids(rows, "business_id", seen)
        texts = [rows.text(name, optional=True) for name in ("city", "state", "categories")]
        keep = rows.ok
        ids += _kept(found, keep)
        for column, values in zip((city, state, categories), texts, strict=True):
            column += _kept(values, keep)
    split = [
        list(dict.fromkeys(name for each in (text or "").split(",") if (name := each.strip()))) for text in categories
    ]
    return Businesses(
        _arrow(file, ids),
        _bytes([text or "" for text in city]),
        _bytes([text or "" for text in state]),
        _bytes([name for names in split for name in names]),
        np.array([len(names) for names in split], np.int64),
    )


def _read_users(file: Path, faults: Faults) -> tuple[Any, np.ndarray]:
    """The ids of the users, an Arrow array [m], and when each began, in seconds since 1970: int64 [m]."""
    ids: list[str] = []
    since: list[np.ndarray] = []
    seen: set[str] = set()
    for rows in read_objects(file, _COLUMNS["user"], faults):
        found, times = _new_ids(rows, "user_id", seen), rows.seconds("yelping_since")
        ids += _kept(found, rows.ok)
        since.append(times[rows.ok])
    return _arrow(file, ids), np.concatenate(since)


def _read_reviews(file: Path, faults: Faults) -> Reviews:
    import pyarrow as pa

    users, businesses = [], []
    times: list[np.ndarray] = []
    stars: list[np.ndarray] = []
    for rows in read_objects(file, _COLUMNS["review"], faults):
        ids = [rows.text(name) for name in ("user_id", "business_id")]
        given_stars, time = rows.numbers("stars", 1, 5), rows.seconds("date")
        keep = pa.array(rows.ok)
        users.append(ids[0].filter(keep))
        businesses.append(ids[1].filter(keep))
        times.append(time[rows.ok])
        stars.append(given_stars[rows.ok].astype(np.float32))
    if not sum(map(len, times)):
        raise DataError(f"{file} has no review. Download or copy it again.")
    when = np.concatenate(times)
    order = np.argsort(when, kind="stable")
    user_ids, user_codes = _coded(users)
    business_ids, business_codes = _coded(businesses)
    return Reviews(
        user_ids, user_codes[order], business_ids, business_codes[order], when[order], np.concatenate(stars)[order]
    )


def _new_ids(rows: Objects, name: str, seen: set[str]) -> Any:
    """The ids of some rows, an Arrow array; those that an earlier row has are faults."""
    values = rows.text(name)
    repeated = np.zeros(len(rows), bool)
    for at, value in enumerate(values.to_pylist()):
        if rows.ok[at]:
            repeated[at] = value in seen
            seen.add(value)
    rows.refuse(repeated, name, "which an earlier line has already")
    return values


def _kept(values: Any, keep: np.ndarray) -> list[Any]:
    import pyarrow as pa

    return list(values.filter(pa.array(keep)).to_pylist())


def _arrow(file: Path, ids: list[str]) -> Any:
    import pyarrow as pa

    if not ids:
        raise DataError(f"{file} has no row. Download or copy it again.")
    return pa.array(ids, pa.string())


def _coded(pieces: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct texts (bytes [m], in the order of their first row) and the index of each row's (int32 [n])."""
    import pyarrow as pa

    coded = pa.chunked_array(pieces, pa.string()).dictionary_encode().combine_chunks()
    return _bytes(coded.dictionary.to_pylist()), np.asarray(coded.indices.to_numpy(), np.int32)


def _find(wanted: np.ndarray, ids: Any) -> np.ndarray:
    """Where each of the texts `wanted` (bytes [m]) stands in the Arrow array `ids`: int64 [m], -1 for nowhere."""
    import pyarrow as pa
    import pyarrow.compute as pc

    at = pc.index_in(pa.array([text.decode() for text in wanted.tolist()], pa.string()), value_set=ids)
    return np.asarray(pc.fill_null(at, -1).to_numpy(zero_copy_only=False), np.int64)


def _bytes(texts: list[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], np.bytes_)
