"""MovieLens: the same ratings written as each release, against a table by hand, and every fault that files can have."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import damage

from recjax.data.datasets import movielens
from recjax.data.datasets.movielens import MovieLens
from recjax.data.prepare.chunk import check_chunk
from recjax.data.prepare.dense_columns import DenseEncoder, DenseStats
from recjax.errors import ConfigError, DataError

pytestmark = pytest.mark.light_compile

# user, movie, rating, time; two ratings at 4000, which keep their order of lines
RATINGS = [
    (5, 10, 4, 8000),
    (1, 10, 4, 1000),
    (2, 20, 3, 2000),
    (1, 30, 5, 3000),
    (3, 10, 1, 4000),
    (2, 10, 5, 4000),
    (1, 20, 4, 5000),
    (3, 40, 2, 6000),
    (1, 40, 4, 7000),
    (2, 40, 5, 9000),
]
IN_TIME = sorted(RATINGS, key=lambda rating: rating[3])
MOVIES = {
    30: ("Wanted, Dead or Alive", []),
    10: ("Die Stille (1990)", ["Drama", "Comedy"]),
    20: ("Misérables, Les (1995)", ["Drama"]),
    40: ('"Great" Escape, The (2013) ', ["War", "Film-Noir"]),
}
YEARS = {10: 1990, 20: 1995, 30: 0, 40: 2013}
USERS = {
    1: (24, "M", "technician", "85711"),
    2: (53, "F", "other", "T8H1N"),
    3: (1, "M", "other", "0"),
    5: (1, "F", "x", "0"),
}
TAGS = [
    (1, 10, "Dark", 500),
    (2, 10, "slow, very", 2500),
    (2, 10, "dark", 4000),
    (1, 40, "war", 6500),
    (3, 40, "war", 9001),
]
FLAGS = movielens._GENRES


def lines(delimiter, rows):
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows)


def quoted(text):
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def write(folder, variant, ratings=RATINGS):
    """The ratings as a release writes them."""
    folder.mkdir(exist_ok=True)
    if variant == "100k":
        items = [
            (movie, title.strip(), "01-Jan-1995", "", "http://x/?" + title, *(int(flag in genres) for flag in FLAGS))
            for movie, (title, genres) in MOVIES.items()
        ]
        users = [(user, age, gender, job, code) for user, (age, gender, job, code) in USERS.items()]
        files = {"u.data": lines("\t", ratings), "u.item": lines("|", items), "u.user": lines("|", users)}
    elif variant == "1m":
        movies = [(movie, title, "|".join(genres)) for movie, (title, genres) in MOVIES.items()]
        users = [(user, gender, age, job, code) for user, (age, gender, job, code) in USERS.items()]
        files = {
            "ratings.dat": lines("::", ratings),
            "movies.dat": lines("::", movies),
            "users.dat": lines("::", users),
        }
    else:
        movies = [
            (movie, quoted(title), "|".join(genres) or "(no genres listed)")
            for movie, (title, genres) in MOVIES.items()
        ]
        tags = [(user, movie, quoted(tag), time) for user, movie, tag, time in TAGS]
        files = {
            "ratings.csv": "userId,movieId,rating,timestamp\n"
            + lines(",", [(u, m, float(r), t) for u, m, r, t in ratings]),
            "movies.csv": "movieId,title,genres\n" + lines(",", movies),
            "tags.csv": "userId,movieId,tag,timestamp\n" + lines(",", tags),
            "links.csv": "movieId,imdbId,tmdbId\n",
        }
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8" if variant == "latest" else "latin-1")
    return folder


def read(folder, variant="auto", threshold=4.0, fraction=0.25, tags=0, skip=False):
    options = {"variant": variant, "threshold": threshold, "validation_fraction": fraction, "tags": tags}
    reader = movielens.open_raw(MovieLens(**options, on_error="skip" if skip else "stop"), folder)
    [chunk] = reader.chunks(0)
    check_chunk(chunk, reader)
    return reader, chunk


def bags(column):
    ends = np.cumsum(column.lengths)
    return [part.tolist() for part in np.split(column.keys, ends[:-1])]


VARIANTS = ("100k", "1m", "latest")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_release_gives_the_same_rows(tmp_path, variant, given):
    reader, chunk = read(write(tmp_path / "raw", variant), variant if given else "auto")
    columns = chunk.columns
    assert columns["user"].keys.tolist() == [row[0] for row in IN_TIME]
    assert columns["movie"].keys.tolist() == [row[1] for row in IN_TIME]
    assert chunk.labels.tolist() == [row[2] >= 4 for row in IN_TIME]
    assert chunk.split.tolist() == [0] * 6 + [1] * 2 + [2] * 2  # a quarter of the eight before the last fifth
    assert columns["year"].keys.tolist() == [YEARS[row[1]] for row in IN_TIME]
    truth = [[genre.encode() for genre in MOVIES[row[1]][1]] for row in IN_TIME]
    assert [sorted(bag) for bag in bags(columns["genres"])] == [sorted(bag) for bag in truth]
    assert chunk.dense.tolist() == [[row[3], YEARS[row[1]]] for row in IN_TIME]
    dense = DenseEncoder(reader.lines, False, DenseStats.of(chunk.dense)).encode(chunk.dense)
    np.testing.assert_allclose(dense[:6, 0], [-1, -0.75, -0.5, -0.25, -0.25, 0])
    assert (dense[6:, 0] == 0).all()  # after the last training rating
    assert reader.label == "rating >= 4" and len(reader.files()) == (2 if variant == "latest" else 3)
    if variant == "latest":
        assert list(columns) == ["user", "movie", "genres", "year"]
    else:
        assert columns["age"].keys.tolist() == [USERS[row[0]][0] for row in IN_TIME]
        for number, name in enumerate(("gender", "occupation", "zip"), 1):
            assert columns[name].keys.tolist() == [USERS[row[0]][number].encode() for row in IN_TIME]


def test_half_stars_and_other_thresholds(tmp_path):
    ratings = [(1, 10, 0.5 * stars, 1000 + stars) for stars in range(1, 11)]
    raw = write(tmp_path / "raw", "latest", ratings)
    assert read(raw, threshold=3.5)[1].labels.tolist() == [0] * 6 + [1] * 4
    assert read(raw, threshold=0.5)[1].labels.tolist() == [1] * 10


def test_tags_are_those_given_before_the_rating(tmp_path):
    raw = write(tmp_path / "raw", "latest")
    by_rating = {
        (1, 1000): [b"dark"],
        (3, 4000): [b"dark", b"slow, very"],
        (2, 4000): [b"dark", b"slow, very"],
        (1, 7000): [b"war"],
        (5, 8000): [b"dark", b"slow, very", b"dark"],
        (2, 9000): [b"war"],
    }
    for most in (1, 2, 9):
        found = bags(read(raw, tags=most)[1].columns["tags"])
        assert found == [by_rating.get((user, time), [])[-most:] for user, _, _, time in IN_TIME]
    with pytest.raises(ConfigError, match="tags=3, but MovieLens 1m has no tags"):
        read(write(tmp_path / "1m", "1m"), tags=3)


def test_which_release_a_folder_holds(tmp_path):
    with pytest.raises(DataError, match="none is not a folder. Give the unpacked"):
        read(tmp_path / "none")
    write(tmp_path / "raw", "1m")
    write(tmp_path / "raw", "latest")
    with pytest.raises(DataError, match="holds the files of 1m and latest.*variant=1m"):
        read(tmp_path / "raw")
    assert read(tmp_path / "raw", "1m")[1].rows == 10
    with pytest.raises(DataError, match="has neither u.data"):
        read(tmp_path / "raw", "100k")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"holds no MovieLens release. .*u.data \(100k\), ratings.dat \(1m\), ratings.csv"
    ):
        read(tmp_path / "empty")


FILES = {
    "100k": ("u.data", "u.item", "u.user"),
    "1m": ("ratings.dat", "movies.dat", "users.dat"),
    "latest": ("ratings.csv", "movies.csv", "tags.csv"),
}


BAD_LINES = [
    ("100k", "u.data", "1\t10\t6\t1", r"rating \(field 3\) is '6', not a number from 1 to 5", "rating"),
    ("100k", "u.data", "1\t10\t4.5\t1", r"rating \(field 3\) is '4.5', not a multiple of 1", "rating"),
    ("100k", "u.data", "1\t10\t4\t1e9", r"timestamp \(field 4\) is '1e9', not a whole number", "timestamp"),
    ("100k", "u.data", "9\t10\t4\t1", r"user \(field 1\) is '9', which the file of users does not have", "user"),
    ("100k", "u.item", "7|T (1990)|||" + "|2" * 19, r"Action \(field 7\) is '2', not a whole number from 0", "Action"),
    ("100k", "u.item", "7|T (1990)|||" + "|0" * 18, r"the line has 23 field\(s\) instead of 24", "number of fields"),
    ("100k", "u.user", "7|x|M|other|0", r"age \(field 2\) is 'x'", "age"),
    ("1m", "ratings.dat", "1::10::4", r"the line has 3 field\(s\) instead of 4: ", "number of fields"),
    ("1m", "ratings.dat", "1::99::4::1", r"movie \(field 2\) is '99', which the file of movies does not", "movie"),
    ("1m", "ratings.dat", "x::10::4::1", r"user \(field 1\) is 'x', not a whole number", "user"),
    ("1m", "movies.dat", "10::Again (2000)::War", r"movie \(field 1\) is '10', which an earlier line has", "movie"),
    ("1m", "users.dat", "1::M::1::1::1", r"user \(field 1\) is '1', which an earlier line has already", "user"),
    ("latest", "ratings.csv", "1,10,0.0,1", r"rating \(field 3\) is '0.0', not a number from 0.5 to 5", "rating"),
    ("latest", "ratings.csv", "1,10,3.7,1", r"rating \(field 3\) is '3.7', not a multiple of 0.5", "rating"),
    ("latest", "ratings.csv", "1,10,nan,1", r"rating \(field 3\) is 'nan'", "rating"),
    ("latest", "ratings.csv", "1,99,4.0,1", r"movie \(field 2\) is '99', which the file of movies", "movie"),
    ("latest", "movies.csv", "x,T (1990),War", r"movie \(field 1\) is 'x'", "movie"),
    (
        "latest",
        "movies.csv",
        "7,Wanted, Dead (1990),War",
        r"the line has 4 field\(s\) instead of 3",
        "number of fields",
    ),
    ("latest", "tags.csv", "1,10,x,then", r"timestamp \(field 4\) is 'then'", "timestamp"),
]


@pytest.mark.parametrize(("variant", "name", "bad", "message", "kind"), BAD_LINES)
def test_malformed_lines_are_named_or_counted(tmp_path, variant, name, bad, message, kind):
    tags = 3 if variant == "latest" else 0
    _, plain = read(write(tmp_path / "plain", variant), tags=tags)
    file = write(tmp_path / "raw", variant) / name
    file.write_bytes(file.read_bytes() + bad.encode() + b"\n")
    number = file.read_bytes().count(b"\n")
    with pytest.raises(DataError, match=rf"{name}:{number}: {message}"):
        read(tmp_path / "raw", tags=tags)
    _, found = read(tmp_path / "raw", tags=tags, skip=True)
    assert found.skipped == {kind: 1}
    assert all(found.columns[key].keys.tolist() == column.keys.tolist() for key, column in plain.columns.items())


def test_latest_is_utf8(tmp_path):
    file = write(tmp_path / "raw", "latest") / "movies.csv"
    file.write_bytes(file.read_text("utf-8").encode("latin-1"))
    with pytest.raises(DataError, match=r"movies.csv:4: title \(field 2\) is 'Mis\\\\xe9rables.*not UTF-8"):
        read(tmp_path / "raw")


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_without_rows(tmp_path, variant):
    for name in FILES[variant]:
        file = write(tmp_path / "raw", variant) / name
        if variant == "latest":
            file.write_text(file.read_text("utf-8").partition("\n")[0])
            message = f"{name} (has|holds) no|which the file of movies does not have"
        else:
            file.write_bytes(b"")
            message = f"{name} is empty"
        with pytest.raises(DataError, match=message):
            read(tmp_path / "raw", variant, tags=3 if variant == "latest" else 0)


ANY_RATING = st.tuples(
    st.sampled_from(sorted(USERS)), st.sampled_from(sorted(MOVIES)), st.integers(1, 5), st.integers(0, 9)
)


@given(st.lists(ANY_RATING, min_size=1, max_size=30), st.sampled_from(VARIANTS), st.floats(0, 0.9))
def test_any_ratings_are_split_by_time(tmp_path_factory, ratings, variant, fraction):
    _, chunk = read(write(tmp_path_factory.mktemp("any"), variant, ratings), fraction=fraction)
    order = sorted(range(len(ratings)), key=lambda i: (ratings[i][3], i))
    assert chunk.columns["user"].keys.tolist() == [ratings[i][0] for i in order]
    assert chunk.columns["movie"].keys.tolist() == [ratings[i][1] for i in order]
    assert chunk.labels.tolist() == [ratings[i][2] >= 4 for i in order]
    counts = np.bincount(chunk.split, minlength=3)
    assert (np.diff(chunk.split.astype(int)) >= 0).all() and counts[2] == len(ratings) // 5
    assert counts[1] == int((len(ratings) - counts[2]) * fraction) and counts[0] >= 1


@pytest.mark.full
def test_the_verbs(tmp_path):
    ratings = [(1 + i % 3, 10 * (1 + i % 4), 1 + i % 5, 1000 + i) for i in range(80)]
    write_latest = functools.partial(write, variant="latest", ratings=ratings)
    damage.assert_prepares_or_refuses("movielens", write_latest, "movies.csv", 80, tmp_path, "variant=latest")
