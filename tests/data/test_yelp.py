"""Yelp: small files by hand, what was known before a review, and every fault that the three files can have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import damage
from support.yelp import BUSINESSES, NAMES, REVIEWS, USERS, lines, many, review, write

from recjax.data.datasets.yelp import Yelp, open_raw
from recjax.data.prepare.chunk import check_chunk
from recjax.errors import ConfigError, DataError

pytestmark = pytest.mark.light_compile


def read(folder, start=0, skip=False, **options):
    reader = open_raw(Yelp(on_error="skip" if skip else "stop", **options), folder)
    chunks = list(reader.chunks(start))
    for chunk in chunks:
        check_chunk(chunk, reader)
    return chunks


def values(chunk, name):
    column = chunk.columns[name]
    missing = np.zeros(len(column.keys), bool) if column.missing is None else column.missing
    return [None if gone else key.decode() for key, gone in zip(column.keys.tolist(), missing.tolist(), strict=True)]


NAN = np.nan


def test_small_files_by_hand(tmp_path):
    [chunk] = read(write(tmp_path / "raw"), validation_fraction=0.25, test_fraction=0.2)
    assert values(chunk, "user") == ["u1", "u2", "u1", "u3", "u2"]
    assert values(chunk, "business") == ["b2", "b1", "b1", "b9", "b1"]
    assert chunk.labels.tolist() == [0, 0, 1, 1, 1]  # 4 is not above 4
    assert chunk.split.tolist() == [0, 0, 0, 1, 2]
    assert values(chunk, "city") == [None, "Reno", "Reno", None, "Reno"]
    assert values(chunk, "state") == ["NV", "NV", "NV", None, "NV"]
    assert chunk.columns["categories"].lengths.tolist() == [0, 2, 2, 0, 2]
    assert values(chunk, "categories") == ["Restaurants", "Coffee & Tea"] * 3
    # user_reviews, user_stars, business_reviews, business_stars, user_days (2010-01-01 to 2018-07-07: 3109)
    np.testing.assert_allclose(
        chunk.dense,
        [[0, NAN, 0, NAN, 3109], [0, NAN, 0, NAN, 1], [1, 1, 1, 4, 3112.5], [0, NAN, 0, NAN, NAN], [1, 4, 2, 4.5, 3]],
    )
    assert chunk.done == 1


def test_rows_of_a_split_grouped_by_business(tmp_path):
    reviews = [review("u1", f"b{i % 3}", 3, f"2018-07-{i + 1:02}") for i in range(20)]
    [plain] = read(write(tmp_path / "raw", reviews), validation_fraction=0.5, test_fraction=0.1)
    [grouped] = read(tmp_path / "raw", validation_fraction=0.5, test_fraction=0.1, order="business")
    assert grouped.split.tolist() == plain.split.tolist() == [0] * 9 + [1] * 9 + [2] * 2
    assert values(grouped, "business")[:9] == ["b0"] * 3 + ["b1"] * 3 + ["b2"] * 3
    for split in range(3):  # the same rows, in another order
        rows = [sorted(map(str, chunk.dense[chunk.split == split].tolist())) for chunk in (plain, grouped)]
        assert rows[0] == rows[1]
    days = grouped.dense[:9, 4]
    assert (np.diff(days.reshape(3, 3)) > 0).all()


STARS, WHO, WHEN = st.integers(1, 5), st.integers(0, 3), st.integers(1, 9)


@given(st.lists(st.tuples(WHO, WHO, STARS, WHEN), min_size=1))
def test_only_strictly_older_reviews_are_history(tmp_path_factory, drawn):
    raw = [review(f"u{user}", f"b{shop}", stars, f"2018-07-0{day}") for user, shop, stars, day in drawn]
    [chunk] = read(write(tmp_path_factory.mktemp("any"), raw))
    in_time = sorted(drawn, key=lambda each: each[3])  # stable, as the reader's order
    for row, (user, shop, _, day) in zip(chunk.dense, in_time, strict=True):
        for key, at, known in ((user, 0, row[:2]), (shop, 1, row[2:4])):
            older = [each[2] for each in drawn if each[at] == key and each[3] < day]
            np.testing.assert_allclose(known, [len(older), np.mean(older) if older else NAN], rtol=1e-12)


def changed(objects, at, **more):
    made = [dict(each) for each in objects]
    made[at] |= more
    return made


DEEP = '{"text": ' + "[" * 100_000 + "\n"


@pytest.mark.parametrize(
    ("files", "message", "kind"),
    [
        ({"reviews": changed(REVIEWS, 1, stars=6)}, "review.json:2: 'stars' is 6.0, not a number", "stars"),
        ({"reviews": changed(REVIEWS, 1, stars="5")}, "review.json:2: 'stars' is no number", "JSON"),
        ({"reviews": changed(REVIEWS, 1, stars=None)}, "review.json:2: 'stars' is null", "stars"),
        ({"reviews": changed(REVIEWS, 1, stars=10**400)}, "review.json:2: 'stars' is Infinity", "stars"),
        ({"reviews": changed(REVIEWS, 1, date="2018-02-30 00:00:00")}, "review.json:2: 'date' is .* time", "date"),
        ({"reviews": changed(REVIEWS, 1, date="2018-7-1")}, "review.json:2: 'date' is .* not a time", "date"),
        ({"reviews": changed(REVIEWS, 1, date="2018-07-01 00:00:00 x")}, "review.json:2: 'date'", "date"),
        ({"reviews": changed(REVIEWS, 1, user_id="")}, "review.json:2: 'user_id' is .*, missing or empty", "user_id"),
        ({"reviews": changed(REVIEWS, 1, user_id="a\0")}, "review.json:2: 'user_id' .* NUL", "user_id"),
        ({"reviews": lines(REVIEWS) + '{"stars": 5'}, r"review.json:6: not valid JSON", "JSON"),
        ({"reviews": "null\n" + lines(REVIEWS)}, "review.json:1: 'null' is no JSON object", "JSON"),
        ({"reviews": "\n" + lines(REVIEWS)}, "review.json:1: not valid JSON", "JSON"),
        ({"reviews": lines(REVIEWS) + lines(REVIEWS[:2]).replace("\n", "", 1)}, "review.json:6: not valid", "JSON"),
        ({"reviews": lines(REVIEWS) + DEEP}, "review.json:6: the object is nested too deeply", "JSON"),
        ({"reviews": lines(REVIEWS) + '{"stars":5,"stars":5}\n'}, "review.json:6: the key 'stars' stands", "JSON"),
        ({"reviews": lines(REVIEWS) + '{"user_id":"\\ud800"}\n'}, "review.json:6: 'user_id' is no text", "JSON"),
        ({"users": changed(USERS, 1, user_id="u1")}, "user.json:2: 'user_id' .* an earlier line has", "user_id"),
        ({"users": changed(USERS, 1, yelping_since=None)}, "user.json:2: 'yelping_since' is null", "yelping_since"),
        ({"businesses": changed(BUSINESSES, 1, categories=["a"])}, "business.json:2: 'categories' is no text", "JSON"),
    ],
)
def test_malformed_lines_are_named_or_counted(tmp_path, files, message, kind):
    raw = write(tmp_path / "raw", **files)
    with pytest.raises(DataError, match=message):
        read(raw)
    [chunk] = read(raw, skip=True)
    assert chunk.skipped == {kind: 1}


def test_text_that_is_not_utf8(tmp_path):
    file = write(tmp_path / "raw") / NAMES[2]
    file.write_bytes(file.read_bytes().replace(b'"u3"', b'"\xff"'))
    with pytest.raises(DataError, match="review.json:4: not valid JSON"):
        read(tmp_path / "raw")


@pytest.mark.full
def test_the_verbs(tmp_path):
    damage.assert_prepares_or_refuses("yelp", many, NAMES[1], 80, tmp_path)


def test_businesses_by_hand(tmp_path):
    """b1 has reviews of u1, u2 and u2 again; b3 of one whom the file of users lacks; b2 one of u1, b4 none."""
    users = [
        {
            "user_id": "u1",
            "yelping_since": "2018-07-01",
            "review_count": 9,
            "average_stars": 4.5,
            "fans": 3,
            "useful": 1,
        },
        {"user_id": "u2", "yelping_since": "2018-07-05", "review_count": 3, "average_stars": 3.0, "fans": None},
    ]
    businesses = [
        *BUSINESSES,
        {"business_id": "b3", "stars": 4.0, "categories": "Bars"},
        {"business_id": "b4", "stars": 5},
    ]
    reviews = [
        review("u1", "b1", 5, "2018-07-11"),
        review("u2", "b1", 4, "2018-07-06"),
        review("u2", "b1", 2, "2018-07-07"),
        review("u1", "b2", 1, "2018-07-02"),
        review("u9", "b3", 5, "2018-07-02"),
        review("u1", "b9", 5, "2018-07-02"),
    ]
    folder = write(tmp_path / "raw", reviews, businesses, users)
    [chunk] = read(folder, per="business", validation_fraction=0, test_fraction=0.4)
    assert sorted(chunk.split.tolist()) == [0, 0, 2]  # the draw puts them in another order than the file
    order = np.argsort(-chunk.dense[:, 0], kind="stable")
    names = values(chunk, "city")
    assert sorted(names, key=str) == [None, None, "Reno"] and names[order[0]] == "Reno"
    assert chunk.labels[order[0]] == 1 and chunk.labels.sum() == 1  # 4.5 is above 4; 1.5 and 4 are not
    # reviews, user_review_count, user_average_stars, user_useful, user_funny, user_cool, user_fans, user_days
    truth = {
        "b1": [3, (9 + 3 + 3) / 3, (4.5 + 3 + 3) / 3, 1, NAN, NAN, 3, (10 + 1 + 2) / 3],
        "b2": [1, 9, 4.5, 1, NAN, NAN, 3, 1],
        "b3": [1, NAN, NAN, NAN, NAN, NAN, NAN, NAN],
    }
    bars = [
        i for i, (n, state) in enumerate(zip(names, values(chunk, "state"), strict=True)) if n is None and not state
    ]
    rest = next(i for i in range(3) if i != order[0] and i not in bars)
    np.testing.assert_allclose(chunk.dense[[order[0], rest, bars[0]]], list(truth.values()))
    assert chunk.columns["categories"].lengths[[order[0], rest, bars[0]]].tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="'stars' is null, not a number from 1 to 5"):
        read(write(tmp_path / "bad", reviews, [{"business_id": "b1", "stars": None}], users), per="business")
    with pytest.raises(DataError, match="has no review of a business that"):
        read(write(tmp_path / "none", reviews, businesses[3:], users), per="business")
    with pytest.raises(ConfigError, match="per=business makes a row of each business"):
        Yelp(per="business", order="business")
