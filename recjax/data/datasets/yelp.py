"""The Yelp open dataset: three files of JSON lines, of businesses, users and reviews. Is a review above 4 stars?

Get it from Yelp (business.yelp.com/data/resources/open-dataset); its terms do not let recjax ship a row. A review is
joined with its business and its user. Stars of a business or a user, and counts of their reviews, stand in the files as
of the day of the download: they were computed from the very reviews that are to be predicted, and from later ones. So
are `is_open`, `useful`, `funny`, `cool`, `fans` and `elite`. None of them is read for a review. What was known when a
review was written is computed instead, from the reviews before it: how many its user and its business had, and their
mean stars.

With `per=business` a row is a business, and all of that is read: see `BusinessReader`.

Held in memory are ids, time and stars of all reviews, never their text.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from recjax.data import counter_rng
from recjax.data.datasets.options import open_as
from recjax.data.datasets.ratings import ranges
from recjax.data.datasets.readers import HeldRows
from recjax.data.datasets.yelp_files import (
    COLUMNS,
    Businesses,
    Reviews,
    find,
    read_businesses,
    read_reviews,
    read_users,
)
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.ids import Frequency, Hash
from recjax.data.text.fields import Faults
from recjax.data.text.source_files import find_file, require_source
from recjax.errors import ConfigError, DataError
from recjax.settings.values import check_ranges

_DAY = 86400
_PURPOSE = 4  # keeps the draw of splits apart from those of `recjax.data.pipeline`
_ATTRIBUTES = ("review_count", "average_stars", "useful", "funny", "cool", "fans")  # of users, for businesses
_HISTORY = ("user_reviews", "user_stars", "business_reviews", "business_stars")


@dataclasses.dataclass(frozen=True)
class Yelp:
    """Config of the Yelp data."""

    kind: ClassVar[str] = "yelp"

    path: str = ""  # folder of prepared data
    # A row is a review, with what was known before it; or a business, with attributes of its users that are known only
    # after all its reviews, as UW-Madison's study of distributed DLRM has it
    per: Literal["review", "business"] = "review"
    above: float = 4.0  # the label is stars > above (1 to 4.5)
    validation_fraction: float = 0.1  # share of the reviews before the test split that validate (the latest of them)
    test_fraction: float = 0.1  # share of all reviews that are test: the latest (both of businesses: drawn)
    # Order of the rows of a split; business: grouped, by time in each group
    order: Literal["time", "business"] = "time"
    ids: Frequency | Hash = Frequency(min_count=2)  # mapping of values to rows of tables
    dense: DenseTransform = "log1p"  # transform of counts, stars and days; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # for each dense column one more: 1 where the value is missing
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(self, above=(1, 4.5), validation_fraction=(0, 0.9), test_fraction=(0, 0.9))
        if self.per == "business" and self.order == "business":
            raise ConfigError(
                "per=business makes a row of each business, so order=business has no rows to group. Leave data.order "
                "at time, or set data.per=review."
            )

    open = open_as


def open_raw(config: Yelp, source: str | os.PathLike[str] | None) -> ReviewReader | BusinessReader:
    """Reads the three files.

    Args:
      config: the options.
      source: the folder of yelp_academic_dataset_business.json, .._user.json and .._review.json (or business.json,
        user.json and review.json), each plain or with .gz after its name.

    Raises:
      DataError: a file is missing or at fault (with file, line and key).
    """
    folder = require_source(config.kind, source)
    files = {name: find_file(folder, f"yelp_academic_dataset_{name}.json", f"{name}.json") for name in COLUMNS}
    made = BusinessReader if config.per == "business" else ReviewReader
    return made(config, files, Faults(config.on_error == "skip"))


class ReviewReader(HeldRows):
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
          faults: takes malformed lines.

        Raises:
          DataError: see `open_raw`.
        """
        self._raw = tuple(files.values())
        self.label = f"stars > {config.above:g}"
        self._shops = read_businesses(files["business"], faults)
        user_ids, since, _ = read_users(files["user"], faults)
        self._reviews = reviews = read_reviews(files["review"], faults)
        self._skipped = faults.drain()
        self._shop_of = find(reviews.business_ids, self._shops.ids)  # -1: not in the file
        at = find(reviews.user_ids, user_ids)
        self._since = np.where(at >= 0, since[at], -1)
        self._labels = (reviews.stars > config.above).astype(np.float32)
        self._history = [_before(keys, reviews) for keys in (reviews.users, reviews.businesses)]
        self._count = rows = len(reviews.times)
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

    def _chunk(self, part: slice) -> Chunk:
        reviews, rows = self._reviews, self._order[part]
        users, businesses = reviews.users[rows], reviews.businesses[rows]
        columns = {"user": Column(reviews.user_ids[users]), "business": Column(reviews.business_ids[businesses])}
        since = self._since[users]
        days = np.where(since >= 0, np.maximum(reviews.times[rows] - since, 0) / _DAY, np.nan)
        history = [column[rows] for pair in self._history for column in pair]
        return Chunk(
            labels=self._labels[rows],
            dense=np.stack([*history, days], axis=1),
            columns=columns | _facts(self._shops, self._shop_of[businesses]),
            split=self._split[rows],
        )


class BusinessReader(HeldRows):
    """Hands businesses to the preparation: is one above 4 stars?

    So does the UW-Madison study of distributed DLRM: reviews are joined with their users and grouped by business, and
    the users' attributes aggregated, here to their means over the reviews. All of these are of the day of the download:
    a user's mean stars hold the very reviews that make the label. What a model learns of that is no forecast.

    The splits are drawn at random: a business has no time of its own. Businesses without a review are left out.
    """

    name = Yelp.kind
    dense = ("reviews", *(f"user_{name}" for name in _ATTRIBUTES), "user_days")
    features = (
        RawFeature("city", optional=True, values="text"),
        RawFeature("state", optional=True, values="text"),
        RawFeature("categories", jagged=True, values="text"),
    )

    def __init__(self, config: Yelp, files: Mapping[str, Path], faults: Faults) -> None:
        """Reads all files; the arguments are as for `ReviewReader`."""
        self._raw = tuple(files.values())
        self.label = f"a business's stars > {config.above:g}"
        self._shops = shops = read_businesses(files["business"], faults, stars=True)
        user_ids, since, attributes = read_users(files["user"], faults, _ATTRIBUTES)
        reviews = read_reviews(files["review"], faults)
        self._skipped = faults.drain()
        shop = find(reviews.business_ids, shops.ids)[reviews.businesses]
        at = find(reviews.user_ids, user_ids)[reviews.users]
        known = shop >= 0
        days = np.maximum(reviews.times - since[at], 0) / _DAY
        joined = np.where(at[:, None] >= 0, np.column_stack([attributes[at], days]), np.nan)[known]
        shop, m = shop[known], len(shops.counts)
        counts = np.bincount(shop, minlength=m)
        self._dense = np.column_stack([counts, *(_mean_by(shop, column, m) for column in joined.T)])
        rows = np.flatnonzero(counts)
        self._count = len(rows)
        if not len(rows):
            raise DataError(
                f"{files['review']} has no review of a business that {files['business']} has. Download both again."
            )
        self._order = rows[counter_rng.permutation(len(rows), 0, _PURPOSE)]
        tests = int(len(rows) * config.test_fraction)
        validations = int((len(rows) - tests) * config.validation_fraction)
        self._split = np.repeat(np.arange(3, dtype=np.uint8), [len(rows) - tests - validations, validations, tests])
        self._labels = (np.asarray(shops.stars) > config.above).astype(np.float32)
        self.splits = (
            f"businesses with a review in random order: the last {config.test_fraction:g} are test; of the rest, the "
            f"last {config.validation_fraction:g} validation and the others train; vocabularies come from train only"
        )

    def _chunk(self, part: slice) -> Chunk:
        rows = self._order[part]
        return Chunk(self._labels[rows], self._dense[rows], _facts(self._shops, rows), self._split[part])


def _facts(shops: Businesses, at: np.ndarray) -> dict[str, Column]:
    """City, state and categories of the businesses number `at`, int [n]; none of -1."""
    counts = np.where(at >= 0, shops.counts[at], 0)
    starts = (np.cumsum(shops.counts) - shops.counts)[at]
    city, state = (np.where(at >= 0, texts[at], b"") for texts in (shops.city, shops.state))
    return {
        "city": Column(city, missing=city == b""),
        "state": Column(state, missing=state == b""),
        "categories": Column(shops.categories[ranges(starts, counts)], counts.astype(np.int32)),
    }


def _mean_by(keys: np.ndarray, values: np.ndarray, m: int) -> np.ndarray:
    """Means of the values (float64 [n]) that are there, by key (int [n], below m): [m], NaN where none is."""
    there = ~np.isnan(values)
    counts = np.bincount(keys[there], minlength=m)
    sums = np.bincount(keys[there], values[there], minlength=m)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _before(keys: np.ndarray, reviews: Reviews) -> tuple[np.ndarray, np.ndarray]:
    """Number and mean stars of the reviews with the same key (int [n]) that are strictly older.

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
