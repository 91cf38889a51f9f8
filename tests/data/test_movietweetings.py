"""MovieTweetings: the shipped ratings against known figures, small files by hand, and every fault a file can have."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from recjax.data.batch_checks import validate
from recjax.data.datasets.movietweetings import MovieTweetings, open_raw
from recjax.data.datasets.options import prepare_as
from recjax.data.datasets.ratings import DENSE
from recjax.data.source import SPLITS, concatenate
from recjax.data.storage.blocks import open_prepared
from recjax.data.storage.manifest import MANIFEST
from recjax.errors import ConfigError, DataError, TrainingError

MOVIES = """\
0000010::Ten (1990)::Drama|Comedy
0000020::Zwanzig: Ein Märchen (2010)::
0000030::Untitled::Drama
0000040::Forty (2013)::Comedy|War
"""
# Ten ratings in the order of time: eight before the test, of which (validation_fraction=0.25) two validate.
RATINGS = [
    (1, 10, 8, 1000),
    (2, 20, 7, 2000),
    (1, 30, 9, 3000),
    (3, 10, 3, 4000),
    (2, 10, 10, 4000),
    (1, 20, 8, 5000),
    (4, 40, 8, 6000),
    (1, 40, 0, 7000),
    (1, 10, 8, 8000),
    (5, 40, 2, 9000),
]
CONFIG = MovieTweetings(
    validation_fraction=0.25, min_user_count=2, min_movie_count=1, min_year_count=1, min_genre_count=1
)


def write_raw(folder, ratings=RATINGS, movies=MOVIES):
    folder.mkdir(exist_ok=True)
    text = ratings if isinstance(ratings, str) else "".join("::".join(map(str, row)) + "\n" for row in ratings)
    (folder / "ratings.dat").write_text(text, "utf-8")
    (folder / "movies.dat").write_text(movies, "utf-8")
    return folder


def prepare(config, raw, out):
    return prepare_as(config, open_raw(config, raw), out)


def whole(source, split):
    return concatenate([source.read(split, i) for i in range(len(source.row_counts(split)))])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    return prepare(MovieTweetings(), None, tmp_path_factory.mktemp("shipped") / "out")


def test_the_shipped_ratings(shipped):
    assert [int(shipped.row_counts(split).sum()) for split in SPLITS] == [79_104, 896, 20_000]
    labels = {split: whole(shipped, split).labels for split in SPLITS}
    known = np.concatenate([labels["train"], labels["validation"]])
    assert known.mean(dtype=float) == pytest.approx(0.5093875) and labels["test"].mean(dtype=float) == 0.48955
    assert sum(label.sum() for label in labels.values()) == 24145 + 14005 + 12392  # ratings of 8, 9 and 10
    for split in SPLITS:
        for index in range(len(shipped.row_counts(split))):
            validate(shipped.read(split, index), shipped.schema)
    genres = shipped.schema.feature("genres")
    assert (genres.bag, genres.rows) == (None, 24)  # 23 genres with 50 ratings or more
    assert set(np.unique(whole(shipped, "train").bags["genres"].lengths).tolist()) == set(range(8))


def test_the_baselines_of_the_shipped_ratings(shipped):
    """Figures of an independent script with scipy's ranks: 0.6948, 0.6753, 0.7614."""
    assert shipped.about["baselines"] == pytest.approx(
        {"per-movie mean": 0.69482, "per-user mean": 0.67534, "per-movie + per-user mean": 0.76140}, abs=1e-5
    )


def test_training_frequency_orders_the_rows(shipped):
    train = whole(shipped, "train")
    for name in ("user", "movie"):
        counts = np.bincount(train.bags[name].ids[:, 0], minlength=shipped.schema.feature(name).rows)
        assert (np.diff(counts[1:]) <= 0).all()
        assert counts[1:].min() >= {"user": 2, "movie": 1}[name]


def test_a_small_file_by_hand(tmp_path):
    rows = [RATINGS[i] for i in (9, 3, 0, 7, 4, 1, 8, 2, 6, 5)]  # any order; the tie at 4000 keeps its order of lines
    source = prepare(CONFIG, write_raw(tmp_path / "raw", rows), tmp_path / "out")
    train, validation, test = (whole(source, split) for split in SPLITS)
    assert train.labels.tolist() == [1, 0, 1, 0, 1, 1]
    assert validation.labels.tolist() == [1, 0] and test.labels.tolist() == [1, 0]
    # Training users: 1 three times, 2 twice, 3 once (too rare). Movies: 10 three times, 20 twice, 30 once.
    assert train.bags["user"].ids[:, 0].tolist() == [1, 2, 1, 0, 2, 1]
    assert train.bags["movie"].ids[:, 0].tolist() == [1, 2, 3, 1, 1, 2]
    assert validation.bags["user"].ids[:, 0].tolist() == [0, 1] and test.bags["user"].ids[:, 0].tolist() == [1, 0]
    assert validation.bags["movie"].ids[:, 0].tolist() == [0, 0] and test.bags["movie"].ids[:, 0].tolist() == [1, 0]
    # Genres: Drama four times (movies 10 and 30), Comedy three times; War is in no training row.
    assert train.bags["genres"].lengths.tolist() == [2, 0, 1, 2, 2, 0]
    assert train.bags["genres"].ids.tolist() == [1, 2, 1, 1, 2, 1, 2]
    assert validation.bags["genres"].ids.tolist() == [2, 0, 2, 0]
    # Years: 1990 three times, 2010 twice, unknown (30) once; 2013 never.
    assert train.bags["year"].ids[:, 0].tolist() == [1, 2, 3, 1, 1, 2]
    assert test.bags["year"].ids[:, 0].tolist() == [1, 0]
    time, year = (DENSE.index(name) for name in ("time", "year"))
    np.testing.assert_allclose(train.dense[:, time], [-1, -0.75, -0.5, -0.25, -0.25, 0])
    np.testing.assert_allclose(test.dense[:, time], [0, 0])  # after the last training rating
    np.testing.assert_allclose(train.dense[:, year], np.array([-16, 4, 0, -16, -16, 4]) / 12, rtol=1e-6)
    assert source.about["vocabularies"]["user"]["rows"] == 3


GOOD = "1::10::8::1000\n"


@pytest.mark.parametrize(
    ("ratings", "movies", "message"),
    [
        (GOOD + "1::10::8\n", MOVIES, r"ratings.dat:2: the line has 3 field\(s\) instead of 4"),
        (GOOD + "1::10::8::1000::9\n", MOVIES, r"ratings.dat:2: the line has 5 field\(s\)"),
        (GOOD + "\n" + GOOD, MOVIES, r"ratings.dat:2: user \(field 1\) is ''"),
        (GOOD + "x::10::8::1000\n", MOVIES, r"ratings.dat:2: user \(field 1\) is 'x', not a whole number"),
        (GOOD + "1::::8::1000\n", MOVIES, r"ratings.dat:2: movie \(field 2\) is ''"),
        (GOOD + "1::10::8.5::1000\n", MOVIES, r"ratings.dat:2: rating \(field 3\) is '8.5'"),
        (GOOD + "1::10::-1::1000\n", MOVIES, r"ratings.dat:2: rating \(field 3\) is '-1'"),
        (GOOD + "1::10::11::1000\n", MOVIES, r"ratings.dat:2: rating \(field 3\) is '11', not a number from 0 to 10"),
        (GOOD + "1::10::8::1_000\n", MOVIES, r"ratings.dat:2: timestamp \(field 4\) is '1_000'"),
        (GOOD + "1::10::8:: 1000\n", MOVIES, r"ratings.dat:2: timestamp \(field 4\)"),
        (GOOD + "1::10::٨::1000\n", MOVIES, r"ratings.dat:2: rating \(field 3\)"),
        (GOOD + "9999999999999999999::10::8::1000\n", MOVIES, r"ratings.dat:2: user \(field 1\)"),
        (GOOD + GOOD + "1::99::8::1\n" + GOOD, MOVIES, r"ratings.dat:3: movie \(field 2\) is '99', which the file of"),
        ("", MOVIES, "ratings.dat is empty"),
        (GOOD, "", "movies.dat is empty"),
        (GOOD, MOVIES + "50::Title\n", r"movies.dat:5: the line has 2 field\(s\) instead of 3"),
        (GOOD, MOVIES + "tt50::Title (2000)::War\n", r"movies.dat:5: movie \(field 1\) is 'tt50'"),
        (GOOD, MOVIES + "10::Again (2000)::War\n", r"movies.dat:5: movie \(field 1\) is '10', which an earlier"),
    ],
)
def test_every_fault_is_named_with_its_place(tmp_path, ratings, movies, message):
    with pytest.raises(DataError, match=message):
        prepare(CONFIG, write_raw(tmp_path / "raw", ratings, movies), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match="raw is not a folder.*--from"):
        prepare(CONFIG, tmp_path / "raw", tmp_path / "out")


def test_one_rating_can_be_prepared(tmp_path):
    source = prepare(CONFIG, write_raw(tmp_path / "raw", GOOD), tmp_path / "out")
    assert [int(source.row_counts(split).sum()) for split in SPLITS] == [1, 0, 0]
    assert source.about["baselines"] == {}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_opening_without_a_path_prepares_once_into_the_cache(cache):
    first = MovieTweetings().open()
    assert first.path.parent == cache
    written = (first.path / MANIFEST).stat().st_mtime_ns
    assert MovieTweetings().open().fingerprint == first.fingerprint
    assert (first.path / MANIFEST).stat().st_mtime_ns == written
    other = MovieTweetings(min_user_count=10).open()
    assert other.path != first.path and other.schema != first.schema


def test_a_damaged_cache_is_made_again(cache):
    first = MovieTweetings().open()
    file = next(first.path.glob("blocks/*/*-train.array_record*"))
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    assert MovieTweetings().open().fingerprint == first.fingerprint
    assert file.read_bytes() != bytes(content)


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("RECJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert MovieTweetings().open().path.parent == tmp_path / "xdg" / "recjax"


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(TrainingError, match=f"cannot prepare {tmp_path}/file/.*RECJAX_CACHE"):
        MovieTweetings().open()


def test_prepared_data_of_other_options_are_refused(tmp_path):
    prepare(CONFIG, write_raw(tmp_path / "raw"), tmp_path / "out")
    opened = MovieTweetings(str(tmp_path / "out"), 8, 0.25, 2, 1, 1, 1).open()
    assert opened.fingerprint == open_prepared(tmp_path / "out").fingerprint
    with pytest.raises(DataError, match=r"prepared with min_user_count=2, but the config says 7\. Set data\.min_user"):
        MovieTweetings(str(tmp_path / "out"), 8, 0.25, 7, 1, 1, 1).open()


def test_a_missing_path_names_the_command(tmp_path):
    with pytest.raises(DataError, match=f"recjax data prepare movietweetings --from PATH --out {tmp_path}/none"):
        MovieTweetings(path=str(tmp_path / "none")).open()


def test_options_are_checked():
    for name, value in (("threshold", 11), ("validation_fraction", 1.0), ("min_user_count", 0)):
        options: dict[str, float] = {name: value}
        with pytest.raises(ConfigError, match=name):
            MovieTweetings(**options)


def test_the_licence_ships_with_the_ratings_and_no_twitter_id_does():
    import recjax.data

    folder = Path(recjax.data.__path__[0]) / "files" / "movietweetings"
    assert "MIT License" in (folder / "LICENSE").read_text()
    assert sorted(file.name for file in folder.iterdir()) == ["LICENSE", "README.md", "movies.dat.gz", "ratings.dat.gz"]
    assert json.dumps(gzip.decompress((folder / "ratings.dat.gz").read_bytes())[:15].decode()) == '"1::1074638::7::"'
