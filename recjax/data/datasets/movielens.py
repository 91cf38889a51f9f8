"""MovieLens: the ratings of ml-100k, ml-1m and the CSV releases (ml-latest, ml-latest-small, ml-20m and later).

Source: Harper, Konstan, "The MovieLens Datasets: History and Context", ACM Transactions on Interactive Intelligent
Systems 5(4), 2015. Their terms allow research and forbid most redistribution, so no rating ships with recjax: get a
release from grouplens.org and unpack it. The label is rating >= threshold.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from recjax.data.datasets.options import open_as
from recjax.data.datasets.ratings import RatingsReader, Scale, Tags, read_movies, read_ratings, split_genres
from recjax.data.prepare.chunk import Column
from recjax.data.text.fields import Faults, Rows
from recjax.data.text.side_tables import read_keyed
from recjax.data.text.source_files import find_file, require_source
from recjax.data.text.table import Form, read_rows
from recjax.errors import ConfigError, DataError
from recjax.settings.values import check_ranges

Variant = Literal["100k", "1m", "latest"]

_RATINGS = ("user", "movie", "rating", "timestamp")
_MOVIES = ("movie", "title", "genres")
_GENRES = tuple(
    """
    unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical
    Mystery Romance Sci-Fi Thriller War Western
    """.split()
)


@dataclasses.dataclass(frozen=True)
class _Release:
    """The files of a release: name and form."""

    ratings: tuple[str, Form]
    scale: Scale
    movies: tuple[str, Form]
    users: tuple[str, Form] | None = None
    tags: tuple[str, Form] | None = None


_RELEASES: dict[Variant, _Release] = {
    "100k": _Release(
        ratings=("u.data", Form(_RATINGS, "\t")),
        scale=Scale(1, 5, 1),
        movies=("u.item", Form(("movie", "title", "released", "video", "url", *_GENRES), "|", encoding="latin-1")),
        users=("u.user", Form(("user", "age", "gender", "occupation", "zip"), "|", encoding="latin-1")),
    ),
    "1m": _Release(
        ratings=("ratings.dat", Form(_RATINGS, "::")),
        scale=Scale(1, 5, 1),
        movies=("movies.dat", Form(_MOVIES, "::", encoding="latin-1")),
        users=("users.dat", Form(("user", "gender", "age", "occupation", "zip"), "::", encoding="latin-1")),
    ),
    "latest": _Release(
        ratings=("ratings.csv", Form(_RATINGS, header=("userId", "movieId", "rating", "timestamp"))),
        scale=Scale(0.5, 5, 0.5),
        movies=("movies.csv", Form(_MOVIES, header=("movieId", "title", "genres"), quotes=True)),
        tags=(
            "tags.csv",
            Form(("user", "movie", "tag", "timestamp"), header=("userId", "movieId", "tag", "timestamp"), quotes=True),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class MovieLens:
    """Config of the MovieLens data."""

    kind: ClassVar[str] = "movielens"

    path: str = ""  # folder of prepared data
    variant: Literal["auto", "100k", "1m", "latest"] = "auto"  # release; auto: as its files say
    threshold: float = 4.0  # the label is rating >= threshold (0.5 to 5)
    validation_fraction: float = 0.02  # share of the ratings before the test split that validate (the latest of them)
    tags: int = 0  # number of latest tags of a movie before a rating that make the feature "tags"; 0: none
    min_user_count: int = 2  # users with fewer training ratings share row 0 with the unseen ones
    min_movie_count: int = 1  # the same for movies
    min_year_count: int = 20  # the same for years of release
    min_genre_count: int = 50  # the same for genres
    min_tag_count: int = 20  # the same for tags
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        check_ranges(
            self,
            threshold=(0.5, 5),
            validation_fraction=(0, 0.9),
            tags=(0, 1000),
            min_user_count=(1, 2**31),
            min_movie_count=(1, 2**31),
            min_year_count=(1, 2**31),
            min_genre_count=(1, 2**31),
            min_tag_count=(1, 2**31),
        )

    open = open_as


def detect(folder: Path) -> Variant:
    """The release that the files of a folder are.

    Raises:
      DataError: none, or more than one.
    """
    found: list[Variant] = [
        variant
        for variant, release in _RELEASES.items()
        if any((folder / f"{release.ratings[0]}{end}").exists() for end in ("", ".gz"))
    ]
    if len(found) == 1:
        return found[0]
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give the unpacked MovieLens release with --from.")
    names = ", ".join(f"{release.ratings[0]} ({variant})" for variant, release in _RELEASES.items())
    state = f"holds the files of {' and '.join(found)}" if found else "holds no MovieLens release"
    raise DataError(
        f"{folder} {state}. Give with --from the folder that holds one of {names}"
        f"{', or choose one with variant=' + found[0] if found else ''}."
    )


def open_raw(config: MovieLens, source: str | os.PathLike[str] | None) -> RatingsReader:
    """Reads a release.

    Args:
      config: the options.
      source: the folder of the unpacked release; its files may be gzipped.

    Raises:
      DataError: a file is missing or at fault (with file, line and field).
      ConfigError: tags are asked for, but the release has none.
    """
    folder = require_source(config.kind, source)
    variant = detect(folder) if config.variant == "auto" else config.variant
    release, faults = _RELEASES[variant], Faults(config.on_error == "skip")
    if config.tags and release.tags is None:
        raise ConfigError(f"tags={config.tags}, but MovieLens {variant} has no tags. Set tags=0.")
    parts = {"ratings": release.ratings, "movies": release.movies, "users": release.users}
    parts["tags"] = release.tags if config.tags else None
    files = {part: find_file(folder, of[0]) for part, of in parts.items() if of is not None}
    genres_of = _flagged_genres if variant == "100k" else split_genres
    movies = read_movies(files["movies"], release.movies[1], genres_of, faults)
    users = tags = None
    if release.users is not None:
        users = read_keyed(files["users"], release.users[1], "user", _profile, faults)
    if config.tags and release.tags is not None:
        tags = (_read_tags(files["tags"], release.tags[1], faults), config.tags)
    ratings = read_ratings(files["ratings"], release.ratings[1], release.scale, movies, users, faults)
    return RatingsReader(config, tuple(files.values()), ratings, movies, users, tags, skipped=faults.drain())


def _flagged_genres(rows: Rows) -> list[list[bytes]]:
    """The genres of ml-100k: a column of 0 and 1 for each."""
    flags = np.stack([rows.integers(genre, 0, 1) for genre in _GENRES[1:]], axis=1)
    names = [genre.encode() for genre in _GENRES[1:]]
    return [[names[at] for at in np.flatnonzero(row)] for row in flags]


def _profile(rows: Rows) -> dict[str, Column]:
    """Facts about users in ml-100k and ml-1m; the age of ml-1m is the lower end of a range."""
    texts = {name: Column(rows.text(name)) for name in ("gender", "occupation", "zip")}
    return {"age": Column(rows.integers("age", 0, 150))} | texts


def _read_tags(file: Path, form: Form, faults: Faults) -> Tags:
    pieces = []
    for rows in read_rows(file, form, faults):
        rows.integers("user")
        columns = [rows.integers("movie"), rows.integers("timestamp"), np.char.lower(rows.text("tag"))]
        pieces.append([column[rows.ok] for column in columns])
    if not pieces:
        raise DataError(f"{file} holds no tag. Download or copy it again, or set tags=0.")
    movies, times, texts = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.lexsort((times, movies))
    return Tags(movies[order], times[order], texts[order])
