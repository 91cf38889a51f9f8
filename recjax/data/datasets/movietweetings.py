"""MovieTweetings: 100,000 movie ratings tweeted in 2013. They ship with recjax, under their MIT licence.

Source: Dooms, De Pessemier, Martens, "MovieTweetings: a movie rating dataset collected from Twitter", CrowdRec at
RecSys 2013. ratings.dat holds a line `user::movie::rating::timestamp` for each rating (0 to 10; seconds since 1970,
UTC), movies.dat a line `movie::title (year)::genre|genre|...` for each movie. The label is rating >= threshold.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import ClassVar

from recjax.data.datasets.options import cache_key, cached, open_as, prepare_as
from recjax.data.datasets.ratings import RatingsReader, Scale, read_movies, read_ratings, split_genres
from recjax.data.storage.blocks import PreparedSource
from recjax.data.storage.remote import cache_folder
from recjax.data.text.fields import Faults
from recjax.data.text.source_files import find_file
from recjax.data.text.table import Form
from recjax.settings.values import check_ranges
from recjax.utils.paths import place

_VERSION = 3  # raise it when the same files and options start to give other data
_SHIPPED = Path(__file__).parent.parent / "files" / "movietweetings"
_FILES = ("ratings.dat", "movies.dat")
_RATINGS = Form(("user", "movie", "rating", "timestamp"), "::")
_MOVIES = Form(("movie", "title", "genres"), "::")


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
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(
            self,
            threshold=(0, 10),
            validation_fraction=(0, 0.9),
            min_user_count=(1, 2**31),
            min_movie_count=(1, 2**31),
            min_year_count=(1, 2**31),
            min_genre_count=(1, 2**31),
        )

    def open(self) -> PreparedSource:
        """The prepared data; the shipped ratings are prepared first if need be (about two seconds).

        Raises:
          DataError: `path` holds no intact data of this dataset and these options.
          TrainingError: the cache folder cannot be written.
        """
        if self.path:
            return open_as(self)
        folder = cache_folder() / f"{self.kind}-{_cache_key(self)}"
        return cached(folder, self.kind) or prepare_as(self, open_raw(self, None), folder, overwrite=True)


def open_raw(config: MovieTweetings, source: str | os.PathLike[str] | None) -> RatingsReader:
    """Reads the ratings.

    Args:
      config: the options.
      source: folder of ratings.dat and movies.dat (or .gz of them); None for the files that ship with recjax.

    Raises:
      DataError: the raw files cannot be read (with file, line and field).
    """
    folder = _SHIPPED if source is None else place(source)
    ratings_file, movies_file = (find_file(folder, name) for name in _FILES)
    faults = Faults()
    movies = read_movies(movies_file, _MOVIES, split_genres, faults)
    ratings = read_ratings(ratings_file, _RATINGS, Scale(0, 10, 1), movies, None, faults)
    return RatingsReader(config, (ratings_file, movies_file), ratings, movies, skipped=faults.drain())


def _cache_key(config: MovieTweetings) -> str:
    """Changes with the options, the shipped files, the preparation and the format, so that none are ever mixed."""
    return cache_key(config, _VERSION, (find_file(_SHIPPED, name).read_bytes() for name in _FILES))
