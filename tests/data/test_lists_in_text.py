"""Lists inside text, such as `Comedy|Drama`: which text is taken for lists, and that they are prepared as such."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import recjax
from recjax.data.arrow import roles
from recjax.data.arrow.column_profile import ColumnProfile
from recjax.data.arrow.proposals import propose, to_text
from recjax.data.storage.blocks import open_prepared

GENRES = ["Action", "Comedy", "Drama", "Film-Noir", "Sci-Fi", "War", "Western"]
RNG = np.random.default_rng(0)


def lists(separator, rows=300):
    """Texts of one to four genres; one in ten has a single one."""
    return [separator.join(RNG.choice(GENRES, size, replace=False)) for size in RNG.integers(1, 5, rows)]


def proposal(*arrays, csv):
    profile = ColumnProfile(csv=csv)
    for values in arrays:
        array = pa.array(values, pa.string())
        profile.add(array.cast(pa.binary()) if csv else array, count=True)
    return propose("genres", profile)


@pytest.mark.parametrize("csv", [True, False])
@pytest.mark.parametrize("separator", ["|", ";", ",", ", ", " | "])
def test_text_with_one_mark_between_repeated_entries_is_lists(separator, csv):
    found = proposal(lists(separator), csv=csv)
    assert (found.role, found.separator) == ("jagged", separator)
    assert f"text cut at {separator!r}, 7 values" in found.why and "1 to 4 a row" in found.why


def test_numbers_in_lists_are_counted_as_such():
    found = proposal(["1|2", "2|3|1", "3|1", "2|1|3", "1|3|2", ""], csv=True)
    assert (found.role, found.why) == ("jagged", "text cut at '|', 3 values, 0 to 3 a row")


@pytest.mark.parametrize(
    "values",
    [
        [f"{last}, {first}" for last in ("Doe", "Roe", "Poe") for first in ("Jane", "Ann", "Bo")],  # two parts each
        [f"{a}|{b}" for a in "abc" for b in "xyz"],
        [f"review {i}, which says that {i}, too, is well; or not" for i in range(50)],  # whose parts are its own
        [f"Toy Story {i} (1995)" for i in range(50)],
        ["a|b", "a", "b", "a|c", "c", "b|c", "d", "e"],  # half of them have no mark
        ["a||b", "b|a|", "c|a|b", "|a", "a|b|c", "b||"],  # empty entries: who knows what the marks mean
        [f"[{', '.join(map(repr, RNG.choice(GENRES, 1 + i % 4, replace=False).tolist()))}]" for i in range(50)],
        ["2025,5", "1,5", "1,25", "2,5", "1,5,5"][:4] * 3,
        ["x|y", "y|x|z"],  # too few to tell
    ],
)
def test_other_text_stays_what_it_was(values):
    assert proposal(values, csv=True).role in ("id", "skip")
    assert proposal(values, csv=False).role in ("id", "skip")


@pytest.mark.parametrize(
    ("separator", "option"), [("|", ""), (";", ":split=;"), (",", ':split=","'), (", ", ':split=", "')]
)
def test_the_setting_that_is_printed_gives_the_same(separator, option):
    found = proposal(lists(separator), csv=True)
    text = to_text({"genres": found}, ["auto"])
    assert f"genres:jagged{option}" in text and "auto,genres:id" in text
    _, requests = roles.parse((roles.column_text("genres", found.role_text),))
    assert requests["genres"].separator == separator


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_auto_prepares_what_the_role_would(tmp_path, form):
    """Also after a block of rows without a value, which says nothing."""
    genres = [None] * 1000 + lists("|", 1000)
    table = pa.table({"user": np.arange(2000) % 70, "genres": genres, "y": np.arange(2000) % 2})
    file = tmp_path / f"table.{form}"
    if form == "csv":
        pyarrow.csv.write_csv(table, file)
    else:
        pyarrow.parquet.write_table(table, file, row_group_size=500)
    made = {}
    for columns in ("auto", "user:id,genres:jagged", "auto,genres:id"):
        out = tmp_path / columns.replace(",", "-").replace(":", "-")
        recjax.prepare(str(file), "y", out, columns=columns)
        made[columns] = open_prepared(out)
    auto, named, ids = made.values()
    for split in ("train", "test"):
        ours, theirs = auto.read(split, 0).bags["genres"], named.read(split, 0).bags["genres"]
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    assert auto.schema.feature("genres").rows == named.schema.feature("genres").rows == 1 + len(GENRES)
    assert ids.schema.feature("genres").bag == 1 and ids.schema.feature("genres").rows > 100
