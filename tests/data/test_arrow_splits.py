"""Splits of rows, against plain Python."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.data.arrow import splits
from recjax.data.arrow.splits import Split
from recjax.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "apart", "way", "amounts"),
    [
        ("", (), "random", (0.8, 0.1, 0.1)),
        ("", ("test",), "random", (0.9, 0.1, 0)),
        ("", ("validation",), "random", (1, 0, 0)),
        ("", ("validation", "test"), "random", (1, 0, 0)),
        ("random", ("test",), "random", (0.8, 0.1, 0.1)),
        ("random:0.5,0.25,0.25", (), "random", (0.5, 0.25, 0.25)),
        ("time", (), "time", (0.8, 0.1, 0.1)),
        ("time:1,0,0", (), "time", (1, 0, 0)),
        ("last", (), "last", (1, 1)),
        ("last:0,2", (), "last", (0, 2)),
        ("column", (), "column", ()),
    ],
)
def test_what_the_setting_means(text, apart, way, amounts):
    assert splits.parse(text, apart) == Split(way, amounts)


def test_a_column_that_is_named_chooses_the_way():
    for named, way in (
        (["time"], "time"),
        (["group"], "last"),
        (["group", "time"], "last"),
        (["split_column"], "column"),
    ):
        assert splits.parse("", (), named).way == way
    assert splits.parse("", ("test",), ["time"]) == Split("time", (0.9, 0.1, 0))
    for text, named in (("random", ["time"]), ("time", ["time", "group"]), ("", ["time", "split_column"])):
        with pytest.raises(ConfigError, match="names a column, which split=.* does not use"):
            splits.parse(text, (), named)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnd", "It is random:0.8,0.1,0.1"),
        ("random:0.8,0.1", "shares of training, validation and test, which are 1 together"),
        ("random:0.8,0.1,0.2", "which are 1 together"),
        ("time:0,0.5,0.5", "the first above 0"),
        ("random:1.1,-0.1,0", "It is random"),
        ("random:nan,0,0", "It is random"),
        ("random:a,b,c", "It is random"),
        ("last:0.5,1", "validation and the test rows of each group"),
        ("last:1", "validation and the test rows of each group"),
        ("column:fold", "split=column split_column=fold"),
    ],
)
def test_what_no_split_is(text, message):
    with pytest.raises(ConfigError, match=message):
        splits.parse(text)


def test_a_rows_split_is_a_function_of_seed_and_row():
    split = Split("random", (0.7, 0.2, 0.1))
    rows = 3 * splits.ROWS + 17
    whole = splits.at_random(split, 5, 0, rows)
    for start, count in ((0, 1), (1, 5), (splits.ROWS - 2, 4), (splits.ROWS, splits.ROWS), (2 * splits.ROWS + 9, 99)):
        np.testing.assert_array_equal(splits.at_random(split, 5, start, count), whole[start : start + count])
    # The standard deviation of a share is below 0.0011.
    np.testing.assert_allclose(np.bincount(whole) / rows, split.amounts, atol=0.006)
    other = splits.at_random(split, 6, 0, rows)
    assert 0.4 < (whole == other).mean() < 0.68  # by chance 0.54
    assert whole[:12].tolist() == splits.at_random(split, 5, 0, 12).tolist()


def test_no_share_no_row():
    for amounts in ((1, 0, 0), (0.9, 0.1, 0), (0.3, 0, 0.7)):
        found = np.bincount(splits.at_random(Split("random", amounts), 0, 0, splits.ROWS), minlength=3)
        assert [n > 0 for n in found] == [a > 0 for a in amounts]


def test_the_seed_means_the_same_rows_for_good():
    """So that data prepared by a later version are the same."""
    found = splits.at_random(Split("random", (0.5, 0.25, 0.25)), 0, 0, 24)
    assert "".join(map(str, found)) == "021112000110010012210010"


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30), st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0, 0.5), (1, 0, 0)])
)
def test_by_time_as_plain_python(times, amounts):
    """A row validates (is the test) if its time is at least that of the row at the split's begin, in order of time."""
    split = Split("time", amounts)
    ordered = sorted(times)
    begin = [round(share * len(times)) for share in (amounts[0], amounts[0] + amounts[1])]
    edges = [ordered[at] if at < len(times) else 99 for at in begin]
    truth = [sum(time >= edge for edge in edges) for time in times]
    if 0 not in truth:
        with pytest.raises(DataError, match="leaves no row to train on"):
            splits.by_time(split, np.array(times, float))
    else:
        assert splits.by_time(split, np.array(times, float)).tolist() == truth


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=25),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)
def test_last_of_each_group_as_plain_python(rows, validation, test, timed):
    groups = collections.defaultdict(list)
    for row, (group, time) in enumerate(rows):
        groups[group].append((time if timed else 0, row))
    truth = [0] * len(rows)
    for members in groups.values():
        if len(members) > validation + test:
            ordered = [row for _, row in sorted(members)][::-1]
            for row in ordered[:test]:
                truth[row] = 2
            for row in ordered[test : test + validation]:
                truth[row] = 1
    group, time = np.array([g for g, _ in rows], np.uint64), np.array([t for _, t in rows], float)
    found = splits.last_of_group(Split("last", (validation, test)), group, time if timed else None)
    assert found.tolist() == truth and found.dtype == np.uint8
