"""Ratings of movies, whichever files they come from: reading, the order of time, splits, features.

A dataset gives the `Form` of its files (see movietweetings.py, movielens.py); everything else is common. All ratings
are held in memory, for they are sorted by time: some 50 bytes each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recjax.data.baselines import mean_baselines
from recjax.data.datasets.options import PathConfig
from recjax.data.datasets.readers import HeldRows
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import Line
from recjax.data.text.fields import Faults, Rows
from recjax.data.text.side_tables import KeyedTable, refuse_repeated
from recjax.data.text.table import Form, read_rows
from recjax.errors import DataError

DENSE = ("time", "year")  # of the rating, in seconds since 1970 (UTC); of the movie's release, 0 where unknown
UNKNOWN = {"year": 0}  # raw column -> what it holds where its value is not known
SPLITS = (
    "ordered by time (ties by line): the last 20% are test; of the rest, the last validation_fraction are validation "
    "and the others train; vocabularies come from train only"
)
_YEAR = re.compile(rb"\(([0-9]{4})\)\s*$")


class RatingsConfig(PathConfig, Protocol):
    """The config of ratings; for a feature such as genres it may have min_genre_count, see `RawFeature.min_count`."""

    @property
    def threshold(self) -> float:
        """The label is rating >= threshold."""
        ...

    @property
    def validation_fraction(self) -> float:
        """Share of the ratings before the test split that validate."""
        ...


@dataclasses.dataclass(frozen=True)
class Scale:
    """The ratings that can be given: `least`, least + `step`, ..., `most`; multiples of the step."""

    least: float
    most: float
    step: float


@dataclasses.dataclass(frozen=True)
class Movies:
    """Facts about m movies.

    Attributes:
      ids: ascending, int64 [m].
      years: of release, int64 [m]; 0 where unknown.
      genres: of all movies, end to end: bytes [L].
      counts: genres of each movie, int64 [m], with sum L.
    """

    ids: np.ndarray
    years: np.ndarray
    genres: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Tags:
    """n tags that users gave to movies.

    Attributes:
      movies: ascending, int64 [n].
      times: seconds since 1970, ascending for each movie, int64 [n].
      texts: in lower case, bytes [n].
    """

    movies: np.ndarray
    times: np.ndarray
    texts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Ratings:
    """n ratings in the order of time (ties by line).

    Attributes:
      users: int64 [n].
      movies: int64 [n].
      ratings: float64 [n].
      times: seconds since 1970 (UTC), int64 [n].
    """

    users: np.ndarray
    movies: np.ndarray
    ratings: np.ndarray
    times: np.ndarray


def read_ratings(
    file: Path, form: Form, scale: Scale, movies: Movies, users: KeyedTable | None, faults: Faults
) -> Ratings:
    """Reads ratings; `form` names the columns user, movie, rating and timestamp.

    Args:
      file: the file.
      form: how it is written.
      scale: which ratings there are.
      movies: those that may be rated.
      users: those that may rate; None for any.
      faults: takes malformed lines.

    Raises:
      DataError: see `read_rows`; or no rating at all.
    """
    pieces = []
    for rows in read_rows(file, form, faults):
        user, movie = rows.integers("user"), rows.integers("movie")
        rating, time = rows.numbers("rating", scale.least, scale.most), rows.integers("timestamp")
        rows.refuse(rating % scale.step != 0, "rating", f"not a multiple of {scale.step:g}")
        rows.refuse(~np.isin(movie, movies.ids), "movie", "which the file of movies does not have")
        if users is not None:
            rows.refuse(~np.isin(user, users.ids), "user", "which the file of users does not have")
        pieces.append([column[rows.ok] for column in (user, movie, rating, time)])
    if not any(len(piece[0]) for piece in pieces):
        raise DataError(f"{file} holds no rating. Download or copy it again.")
    users_n, movies_n, ratings_n, times_n = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(times_n, kind="stable")
    return Ratings(users=users_n[order], movies=movies_n[order], ratings=ratings_n[order], times=times_n[order])


def read_movies(file: Path, form: Form, genres_of: Callable[[Rows], list[list[bytes]]], faults: Faults) -> Movies:
    """Reads movies; `form` names the columns movie and title, and `genres_of` gives the genres of each row.

    The year of release is what stands in parentheses at the end of the title.

    Raises:
      DataError: see `read_rows`.
    """
    found: dict[int, tuple[int, list[bytes]]] = {}
    seen: set[int] = set()
    for rows in read_rows(file, form, faults):
        ids, titles, genres = rows.integers("movie"), rows.text("title"), genres_of(rows)
        refuse_repeated(rows, "movie", ids, seen)
        for row in np.flatnonzero(rows.ok).tolist():
            year = _YEAR.search(titles[row])
            found[int(ids[row])] = (int(year.group(1)) if year else 0, genres[row])
    order = sorted(found)
    return Movies(
        np.array(order, np.int64),
        np.array([found[movie][0] for movie in order], np.int64),
        np.array([genre for movie in order for genre in found[movie][1]], np.bytes_),
        np.array([len(found[movie][1]) for movie in order], np.int64),
    )


def split_genres(rows: Rows) -> list[list[bytes]]:
    """The genres of rows whose field "genres" reads like Comedy|Drama."""
    none = b"(no genres listed)"
    return [[genre for genre in text.split(b"|") if genre not in (b"", none)] for text in rows.text("genres").tolist()]


class RatingsReader(HeldRows):
    """Hands ratings to the preparation, in the order of time (a `recjax.data.prepare.chunk.Reader`)."""

    dense = DENSE
    splits = SPLITS

    def __init__(
        self,
        config: RatingsConfig,
        files: Sequence[Path],
        ratings: Ratings,
        movies: Movies,
        users: KeyedTable | None = None,
        tags: tuple[Tags, int] | None = None,
        *,
        skipped: Mapping[str, int],
    ) -> None:
        """A reader over what was read.

        Args:
          config: the options of the dataset.
          files: what it was read from.
          ratings: n >= 1 ratings.
          movies: all that were rated.
          users: all that rated, if anything is known of them.
          tags: the tags, and how many of a movie's latest ones (before the rating) become the feature "tags".
          skipped: kind of fault -> lines that were left out.
        """
        self.name, self._raw = config.kind, files
        self._ratings, self._movies, self._users, self._tags = ratings, movies, users, tags
        self._skipped = skipped
        self.label = f"rating >= {config.threshold:g}"
        self._labels = (ratings.ratings >= config.threshold).astype(np.float32)
        self._count = rows = len(ratings.times)
        self._known = rows - rows // 5
        self._train = self._known - int(self._known * config.validation_fraction)
        self._genre_starts = np.cumsum(movies.counts) - movies.counts
        names = ["user", "movie", "genres", "year", *(() if users is None else users.columns), *(["tags"] * bool(tags))]
        text = {"genres", "tags"}
        if users is not None:
            text |= {name for name, column in users.columns.items() if column.keys.dtype.kind == "S"}
        self.features = [
            RawFeature(
                feature,
                jagged=feature in ("genres", "tags"),
                values="text" if feature in text else "integer",
                min_count=getattr(config, f"min_{feature.removesuffix('s')}_count", 1),
            )
            for feature in names
        ]
        self.lines = dense_lines(int(ratings.times[0]), int(ratings.times[self._train - 1]))

    @property
    def about(self) -> dict[str, Any]:
        """The `mean_baselines`."""
        return {"baselines": mean_baselines(self._ratings.users, self._ratings.movies, self._labels, self._known)}

    def _chunk(self, part: slice) -> Chunk:
        ratings, movies = self._ratings, self._movies
        users, times = ratings.users[part], ratings.times[part]
        movie_at = np.searchsorted(movies.ids, ratings.movies[part])
        years, counts = movies.years[movie_at], movies.counts[movie_at]
        columns = {
            "user": Column(users),
            "movie": Column(ratings.movies[part]),
            "genres": Column(movies.genres[ranges(self._genre_starts[movie_at], counts)], counts.astype(np.int32)),
            "year": Column(years),
        }
        if self._users is not None:
            columns |= self._users.of(users)
        if self._tags is not None:
            tags, most = self._tags
            columns["tags"] = _tags_before(tags, most, ratings.movies[part], times)
        rows = np.arange(part.start, part.stop)
        return Chunk(
            labels=self._labels[part],
            dense=np.stack([times, years], axis=1).astype(np.float64),
            columns=columns,
            split=(rows >= self._train).astype(np.uint8) + (rows >= self._known).astype(np.uint8),
        )


def dense_lines(first: int, last: int) -> tuple[Line, Line]:
    """The transforms of the dense columns `DENSE` of ratings.

    The hour of the day and the day of the week are left out: on the ratings that ship with recjax they say nothing
    about the label beyond user and movie, and a DLRM validates worse with them.

    Args:
      first: time of the first training rating.
      last: time of the last training rating.

    Returns:
      Of the time: from -1 at `first` to 0 at `last`, and 0 after it, for a model has seen nothing later; of the year
      (year - 2006) / 12, which is about standardised, or 0 where the year is unknown.
    """
    return Line(zero=last, unit=max(1, last - first), most=last), Line(zero=2006, unit=12, least=1)


def _tags_before(tags: Tags, most: int, movies: np.ndarray, times: np.ndarray) -> Column:
    """The `most` latest tags that each movie had got before each time (strictly): nothing of the future leaks."""
    # Tags are sorted by (movie, time). The tags of a movie before a time end where that pair would stand.
    starts = np.searchsorted(tags.movies, movies, "left")
    order = np.lexsort(
        (np.r_[np.ones(len(tags.times)), np.zeros(len(times))], np.r_[tags.times, times], np.r_[tags.movies, movies])
    )
    is_tag = order < len(tags.times)
    before = np.empty(len(times), np.int64)
    before[order[~is_tag] - len(tags.times)] = np.cumsum(is_tag)[~is_tag]
    starts = np.maximum(starts, before - most)
    counts = before - starts
    return Column(tags.texts[ranges(starts, counts)], counts.astype(np.int32))


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then the same for the others: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
