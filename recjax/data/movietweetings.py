"""MovieTweetings: 100,000 movie ratings tweeted in 2013. They ship with recjax, under their MIT licence.

Source: Dooms, De Pessemier, Martens, "MovieTweetings: a movie rating dataset collected from Twitter", CrowdRec at
RecSys 2013. ratings.dat holds a line `user::movie::rating::timestamp` for each rating (0 to 10; seconds since 1970,
UTC), movies.dat a line `movie::title (year)::genre|genre|...` for each movie. The label is rating >= threshold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from recjax.data.baselines import mean_baselines
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.blocks import FORMAT, PreparedSource, open_prepared, verify, write_prepared
from recjax.data.source import BLOCK_ROWS, between
from recjax.data.textfile import find, read_lines
from recjax.data.vocabulary import Vocabulary
from recjax.errors import ConfigError, DataError, TrainingError

_VERSION = 1  # raise it when the same files and options start to give other data
_SHIPPED = Path(__file__).parent / "files" / "movietweetings"
_FILES = ("ratings.dat", "movies.dat")
_SPLITS = (
    "ordered by time (ties by line): the last 20% are test; of the rest, the last validation_fraction are validation "
    "and the others train; vocabularies come from train only"
)


@dataclasses.dataclass(frozen=True)
class MovieTweetings:
    """Config of the MovieTweetings data."""

    kind: ClassVar[str] = "movietweetings"

    path: str = ""  # folder of prepared data; empty: the shipped ratings, prepared once into the cache folder
    threshold: int = 8  # the label is rating >= threshold (0 to 10)
    validation_fraction: float = 0.0112  # share of the ratings before the test split that validate (the latest of them)
    min_user_count: int = 2  # users with fewer training ratings share row 0 with the unseen ones
    min_movie_count: int = 1  # the same for movies
    min_year_count: int = 20  # the same for years of release
    min_genre_count: int = 50  # the same for genres

    def __post_init__(self) -> None:
        for name, least, most in (
            ("threshold", 0, 10),
            ("validation_fraction", 0, 0.9),
            ("min_user_count", 1, 2**31),
            ("min_movie_count", 1, 2**31),
            ("min_year_count", 1, 2**31),
            ("min_genre_count", 1, 2**31),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be {least} to {most}.")

    def open(self) -> PreparedSource:
        """The prepared data; the shipped ratings are prepared first if need be (about two seconds).

        Raises:
          DataError: `path` holds no intact data of this dataset and these options.
          TrainingError: the cache folder cannot be written.
        """
        if self.path:
            source = open_prepared(self.path, self.kind)
            _check_options(self, source)
            return source
        folder = _cache_folder() / f"{self.kind}-{_cache_key(self)}"
        try:
            verify(folder)
            return open_prepared(folder, self.kind)
        except DataError:  # not there yet, or damaged: the cache can always be made again
            return prepare(self, None, folder, overwrite=True)


def prepare(
    config: MovieTweetings,
    source: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> PreparedSource:
    """Raw files to prepared blocks.

    Args:
      config: the options; `path` does not matter here.
      source: folder of ratings.dat and movies.dat (or .gz of them); None for the files that ship with recjax.
      out: the folder to make.
      overwrite: replace prepared data of other content in `out`.

    Raises:
      DataError: the raw files cannot be read (with file, line and field), or `out` holds something else.
      TrainingError: `out` cannot be written.
    """
    folder = _SHIPPED if source is None else Path(source)
    ratings_file, movies_file = (find(folder, name) for name in _FILES)
    users, movies, ratings, times = _read_ratings(ratings_file)
    details = _read_movies(movies_file)
    unknown = next((line for line, movie in enumerate(movies.tolist(), 1) if movie not in details), None)
    if unknown is not None:
        raise DataError(
            f"{ratings_file}:{unknown}: movie {movies[unknown - 1]} has no line in {movies_file}. "
            "Add it there, remove the rating, or take both files from the same download."
        )
    order = np.argsort(times, kind="stable")
    users, movies, ratings, times = (column[order] for column in (users, movies, ratings, times))
    rows = len(order)
    known = rows - rows // 5
    train = known - int(known * config.validation_fraction)
    labels = (ratings >= config.threshold).astype(np.float32)

    movie_list, movie_at = np.unique(movies, return_inverse=True)  # details are looked up once a movie
    years = np.array([details[movie][0] for movie in movie_list.tolist()])[movie_at]
    genre_lists = [details[movie][1] for movie in movie_list.tolist()]
    lengths = np.array([len(genres) for genres in genre_lists], np.int32)[movie_at]
    genres = np.array([genre for at in movie_at.tolist() for genre in genre_lists[at]], dtype=np.str_)

    vocabularies = {
        "user": Vocabulary.of(users[:train], config.min_user_count),
        "movie": Vocabulary.of(movies[:train], config.min_movie_count),
        "genres": Vocabulary.of(genres[: int(lengths[:train].sum())], config.min_genre_count),
        "year": Vocabulary.of(years[:train], config.min_year_count),
    }
    whole = Batch(
        dense=encode_dense(times, years, int(times[0]), int(times[train - 1])),
        bags={
            "user": Bags(vocabularies["user"].encode(users)[:, None]),
            "movie": Bags(vocabularies["movie"].encode(movies)[:, None]),
            "genres": Bags(vocabularies["genres"].encode(genres), lengths),
            "year": Bags(vocabularies["year"].encode(years)[:, None]),
        },
        labels=labels,
        weights=np.ones(rows, np.float32),
    )
    about = {
        "label": f"rating >= {config.threshold}",
        "splits": _SPLITS,
        "options": _options(config),
        "vocabularies": {name: {"rows": v.rows, "sha256": v.sha256()} for name, v in vocabularies.items()},
        "baselines": mean_baselines(users, movies, labels, known),
    }
    schema = Schema(
        dense=DENSE,
        features=tuple(Feature(name, v.rows, None if name == "genres" else 1) for name, v in vocabularies.items()),
    )
    ends = {"train": (0, train), "validation": (train, known), "test": (known, rows)}
    splits = {split: _blocks(between(whole, *range_)) for split, range_ in ends.items()}
    return write_prepared(out, config.kind, schema, splits, about, overwrite=overwrite)


DENSE = ("time", "year")


def encode_dense(times: np.ndarray, years: np.ndarray, first: int, last: int) -> np.ndarray:
    """The dense features `DENSE` of ratings.

    The hour of the day and the day of the week are left out: on the shipped ratings they say nothing about the label
    beyond user and movie, and a DLRM validates worse with them.

    Args:
      times: of the rating, seconds since 1970 (UTC), [n].
      years: of the movie's release, [n]; 0 where unknown.
      first: time of the first training rating.
      last: time of the last training rating.

    Returns:
      float32 [n, 2]: time from -1 at `first` to 0 at `last`, and 0 after it, for a model has seen nothing later;
      (year - 2006) / 12, which is about standardised, or 0 where the year is unknown.
    """
    time = np.minimum((times - last) / max(1, last - first), 0.0)
    year = np.where(years > 0, (years - 2006) / 12, 0.0)
    return np.stack([time, year], axis=1).astype(np.float32)


def _blocks(rows: Batch) -> Iterator[Batch]:
    rows = dataclasses.replace(rows, position=0)
    for start in range(0, rows.size, BLOCK_ROWS):
        yield between(rows, start, min(start + BLOCK_ROWS, rows.size))


def _read_ratings(file: Path) -> tuple[np.ndarray, ...]:
    """Users, movies, ratings and times: each int64 [n], in the order of the file."""
    names = ("user", "movie", "rating", "timestamp")
    values = []
    for line, text in enumerate(read_lines(file), 1):
        fields = _fields(file, line, text, names)
        for number, field in enumerate(fields):
            values.append(_whole_number(file, line, f"{names[number]} (field {number + 1})", field))
    table = np.array(values, np.int64).reshape(-1, len(names))
    bad = table[:, 2] > 10
    if bad.any():
        line = int(np.argmax(bad)) + 1
        raise DataError(
            f"{file}:{line}: the rating (field 3) is {table[line - 1, 2]}, but ratings go from 0 to 10. Mend the line "
            "or remove it."
        )
    return tuple(table.T)


def _read_movies(file: Path) -> dict[int, tuple[int, list[str]]]:
    """Movie -> (year of release or 0, genres)."""
    movies: dict[int, tuple[int, list[str]]] = {}
    for line, text in enumerate(read_lines(file), 1):
        movie_text, title, genres = _fields(file, line, text, ("movie", "title (year)", "genres"))
        movie = _whole_number(file, line, "movie (field 1)", movie_text)
        if movie in movies:
            raise DataError(f"{file}:{line}: movie {movie} has an earlier line already. Remove one of the two.")
        year = _YEAR.search(title)
        movies[movie] = (int(year.group(1)) if year else 0, [genre for genre in genres.split("|") if genre])
    return movies


_YEAR = re.compile(r"\(([0-9]{4})\)\s*$")


def _fields(file: Path, line: int, text: str, names: tuple[str, ...]) -> list[str]:
    fields = text.split("::")
    if len(fields) != len(names):
        raise DataError(
            f"{file}:{line}: the line has {len(fields)} field(s) instead of {len(names)}: {text[:80]!r}. It must read "
            f"{'::'.join(names)}: mend it or remove it."
        )
    return fields


def _whole_number(file: Path, line: int, name: str, text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return int(text)
    raise DataError(
        f"{file}:{line}: {name} is {text[:80]!r}, not a whole number from 0 to 999999999999999999. Mend the line or "
        "remove it."
    )


def _options(config: MovieTweetings) -> dict[str, float]:
    """What of a config shapes the prepared data."""
    options = dataclasses.asdict(config)
    del options["path"]
    return options


def _check_options(config: MovieTweetings, source: PreparedSource) -> None:
    """Refuses prepared data that were made with other options: they would silently win over the config."""
    made_with = source.about["options"]
    for name, value in _options(config).items():
        if made_with.get(name) != value:
            raise DataError(
                f"the data at {source.path} were prepared with {name}={made_with.get(name)}, but the config says "
                f"{value}. Set data.{name}={made_with.get(name)}, or prepare the data with the option of the config."
            )


def _cache_folder() -> Path:
    """Where recjax keeps what it can make again: $RECJAX_CACHE, else $XDG_CACHE_HOME/recjax, else ~/.cache/recjax."""
    if chosen := os.environ.get("RECJAX_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recjax"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise TrainingError(
            "there is no home folder to keep the prepared ratings in. Set RECJAX_CACHE to a folder where you may write."
        ) from error


def _cache_key(config: MovieTweetings) -> str:
    """Changes with the options, the shipped files, the preparation and the format, so that none are ever mixed."""
    digest = hashlib.sha256(json.dumps([_VERSION, FORMAT, _options(config)], sort_keys=True).encode())
    for name in _FILES:
        digest.update(find(_SHIPPED, name).read_bytes())
    return digest.hexdigest()[:16]
