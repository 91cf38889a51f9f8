"""Roles of columns: what a column is by what it holds, what is proposed for it, and what may be asked of it."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recjax.data.arrow import roles
from recjax.data.arrow.column_profile import ColumnProfile
from recjax.data.arrow.proposals import Proposal, propose, to_text
from recjax.data.arrow.roles import Asked
from recjax.errors import ConfigError, DataError

N = 1000
DAY = datetime.datetime(2026, 1, 1)


def profile(*arrays, csv=False, separator=""):
    found = ColumnProfile(separator, csv)
    for array in arrays:
        found.add(array if isinstance(array, pa.Array) else pa.array(array), count=True)
    return found


def words(*values):
    """A column of CSV."""
    return profile(pa.array([v.encode() for v in values], pa.binary()), csv=True)


@pytest.mark.parametrize(
    ("column", "kind", "optional"),
    [
        (words("1", "-20", "0"), "integer", False),
        (words("1", "", "3"), "integer", True),
        (words("1", "NA", "3"), "integer", True),
        (words("1", "007"), "text", False),  # of an integer 007 would not come back
        (words("1.0", "2.0"), "float", False),
        (words("1", "1e5"), "float", False),
        (words("18446744073709551615", "1"), "unsigned", False),
        (words("9223372036854775807", "1"), "integer", False),
        (words("18446744073709551616", "1"), "text", False),
        (words("-1", "9223372036854775808"), "text", False),
        (words("true", "False"), "boolean", False),
        (words("true", "", "False"), "boolean", True),
        (words("2026-01-01", "2026-12-31"), "time", False),
        (words("2026-01-01 10:00:00", "soon"), "text", False),
        (words("NA", "x"), "text", False),  # Namibia
        (words("", "x"), "text", True),
        (words("1", "x"), "text", False),
        (words("true", "1"), "text", False),
        (words("", ""), "none", True),
        (words("NA", ""), "none", True),
        (words("é", "\0"), "text", False),
        (profile([1, 2]), "integer", False),
        (profile([1], [None]), "integer", True),
        (profile(pa.array([], pa.int64()), [None]), "integer", True),
        (profile([1], [0.5]), "float", False),
        (profile([1.5, float("nan")]), "float", True),
        (profile(pa.array([2**63], pa.uint64())), "unsigned", False),
        (profile(pa.array([5], pa.uint64())), "integer", False),
        (profile(pa.array([2**63], pa.uint64()), [-1]), "text", False),
        (profile([True], [1]), "integer", False),
        (profile(["a"], [1]), "other", False),
        (profile(["a", ""]), "text", True),
        (profile([None, None]), "none", True),
        (profile([DAY]), "time", False),
        (profile([{"x": 1}]), "other", False),
        (profile([[1, 2], []]), "integer", False),
        (profile([[1, None], None]), "integer", True),
        (profile(["a|b", ""], separator="|"), "text", False),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_a_column_is(column, kind, optional):
    assert (column.kind, column.optional) == (kind, optional)


@settings(max_examples=40)
@example([0, -0.0], 0)  # one number, in two ways to write it
@given(st.lists(st.none() | st.integers(-3, 3) | st.floats(-2, 2), max_size=8), st.integers(0, 8))
def test_figures_as_plain_python(values, cut):
    values = [None if v is None else float(v) for v in values]
    found = profile(*(pa.array(part, pa.float64()) for part in (values[:cut], values[cut:])))
    there = [v for v in values if v is not None]
    assert (found.rows, found.missing, found.distinct) == (len(values), len(values) - len(there), len(set(there)))
    assert found.whole == all(v.is_integer() for v in there)
    if there:
        assert (found.least, found.most) == (min(there), max(there))


RNG = np.random.default_rng(0)
WORD = [f"w{i % 50}" for i in range(N)]


@pytest.mark.parametrize(
    ("name", "values", "role", "why"),
    [
        ("city", WORD, "id", "text, 50 values"),
        ("comment", [f"text {i}" for i in range(N)], "skip", "nearly every row has one of its own"),
        ("paid", [i % 2 == 0 for i in range(N)], "id", "true and false"),
        ("price", RNG.normal(size=N), "dense", "numbers"),
        ("price", np.arange(N) % 7 + 0.5, "dense", "numbers"),
        ("stars", np.arange(N) % 5, "id", "integers, 5 values"),
        ("stars", [None if i % 9 == 0 else float(i % 5) for i in range(N)], "id", "integers, 5 values"),  # of pandas
        ("age", 18 + np.arange(N) % 60, "dense", "integers from 18 to 77"),
        ("count", (RNG.pareto(1, N) * 10).astype(int), "dense", "integers from 0 to"),
        ("user", np.arange(N) % 700, "id", "integers nearly without gaps, 700 values"),
        ("user_id", 10**10 + np.arange(N) % 60 * 999, "id", "named like one"),
        ("userId", np.arange(N) % 60 * 999, "id", "named like one"),
        ("width", np.arange(N) % 60 * 999, "dense", "integers from 0"),
        ("token", RNG.integers(0, 2**63, 50)[np.arange(N) % 50], "id", "large integers, 50 values"),
        ("id", np.arange(N), "skip", "nearly every row has one of its own"),
        ("row", np.arange(N), "skip", "nearly every row has one of its own"),
        ("ts", 1_600_000_000 + 100 * np.arange(N), "skip", "seconds or milliseconds since 1970"),
        ("ts", 1_600_000_000_000 + 100 * np.arange(N), "skip", "seconds or milliseconds since 1970"),
        ("when", [DAY + datetime.timedelta(i) for i in range(N)], "skip", "times; split=time"),
        ("one", ["x"] * N, "skip", "one value"),
        ("one", ["x"] * 5 + [None] * 5, "id", "text, 1 values"),
        ("none", [None] * N, "skip", "has no value"),
        ("", np.arange(N) % 50, "skip", "has no name"),
        ("tags", [[i % 3, i % 5] for i in range(N)], "jagged", "lists, 5 values"),
        ("vector", [[0.5, i / 3] for i in range(N)], "vector", "2 numbers each"),
        ("uneven", [[0.5] * (i % 3) for i in range(N)], "skip", "lists of unequal length"),
        ("nested", [{"x": 1}] * N, "skip", "structures"),
    ],
)
def test_what_is_proposed(name, values, role, why):
    found = propose(name, profile(values))
    assert found.role == role and why in found.why


@pytest.mark.parametrize("csv", [True, False])
@pytest.mark.parametrize(
    ("values", "date"),
    [
        (["01.01.2025", "31.12.2024", None], "01.01.2025"),
        (["1/31/2025", "", "12/1/2025 10:30"], "1/31/2025"),
        (["2025/01/31", "2025/02/01"], "2025/01/31"),
        (["01-02-25", "03-04-25"], "01-02-25"),
        (["01.01.2025", "unknown"], ""),
        (["unknown", "01.01.2025"], ""),
        (["1.2.10", "1.2.11"], ""),  # versions
        (["192.168.10.12", "10.0.0.1"], ""),
        (["01.13.2025", "32.01.2025"], ""),
        (["a", "b"], ""),
        (["", ""], ""),
    ],
)
def test_text_that_looks_like_dates(values, date, csv):
    """Also where they come in parts; and one other value says that it is something else."""
    if csv:
        values = [None if v is None else v.encode() for v in values]
    cuts = [profile(pa.array(values), csv=csv), profile(pa.array(values[:1]), pa.array(values[1:]), csv=csv)]
    for found in cuts:
        assert bool(found.date) == bool(date)
        assert not date or found.date in [v.decode() if csv else v for v in values if v]
        made = propose("day", found)
        assert (f" that looks like dates ({found.date}), " in made.why) == bool(date)
        assert made.date == found.date and (made.role == "id" or not date)
    assert cuts[0].date == date


NUMBERS = [f"{i}.25" for i in range(60)]


@pytest.mark.parametrize("csv", [True, False])
@pytest.mark.parametrize(
    ("values", "like", "first"),
    [
        (["", "NA", *NUMBERS, "inf", *NUMBERS, "inf"], 61, ("inf", "row 62")),
        ([*NUMBERS, *NUMBERS, "-"], 60, ("-", "row 120")),
        (["soon", *NUMBERS], 60, ("soon", "row 0")),
        ([*NUMBERS, "1e999"], 60, ("1e999", "row 60")),
        ([text.replace(".", ",") for text in NUMBERS], 60, ("0,25", "row 0")),
        (["1.234,50", "12", "1,234.5"] * 3, 3, ("1.234,50", "row 0")),
        ([f"w{i}" for i in range(60)], 0, None),
        ([*NUMBERS[:18], "inf", "soon"], 0, None),  # a tenth of the values: words that have numbers among them
        ([f"0{i}" for i in range(10, 70)], 0, None),  # codes
        ([f"10.0.0.{i}" for i in range(60)], 0, None),
        ([f"2026-01-{i:02}" for i in range(1, 30)], 0, None),
    ],
)
def test_text_that_was_meant_as_numbers(values, like, first, csv):
    """Also where it comes in parts: the row is that of the part."""
    texts = pa.array(values, pa.string())
    made = propose("price", profile(texts.cast(pa.binary()) if csv else texts, csv=csv))
    distinct = len({v for v in values if v})  # NA is one, and stands for a number
    if not like:
        assert made.numbers == ""
        return
    if not csv and "," not in first[0]:  # there no number is read from text: the first is one too
        first = next((v, f"row {i}") for i, v in enumerate(values) if v not in ("", "NA"))
    assert f"{like} of its {distinct} values look like numbers; the first" in made.numbers
    assert f"is {first[0]!r} ({first[1]})" in made.numbers
    cut = values.index(first[0])
    parts = profile(*(pa.array(part, pa.string()) for part in (values[:cut], values[cut:]) if part), csv=csv)
    assert propose("price", parts).numbers == made.numbers.replace(first[1], "row 0")
    assert propose("price_id", parts).numbers == ""
    text = to_text({"price": made})
    assert "warning: price is text, although" in text and "columns=auto,price:dense" in text
    few = len(values) < 10 or csv and first[0] != "0,25"
    assert ("or leave their rows out ('where=price!=VALUE')" in text) == few, "of all values that would be no help"


def test_integers_and_flags_are_numbers_where_a_file_has_them_as_text():
    assert propose("item", profile([str(i % 60) for i in range(N)])).numbers == ""
    assert propose("item", profile([b"%d" % (i % 60) for i in range(N)], csv=True)).numbers == ""


def test_bytes_that_are_no_text_are_values():
    """That a column holds one value is said of those alone that do."""
    for values in (
        [b"K\xf6ln", b"M\xfcnchen", b"D\xfcren"] * 9,
        [b"a\0", b"b\0", b"c\0"] * 9,
        ["a" * 2000, "b" * 2000, "c"] * 9,
    ):
        found = propose("city", profile(values))
        assert (found.role, found.why) == ("id", "text, 3 values")
    assert propose("city", profile([b"\xff"] * 9)).why == "one value"


def test_few_rows_are_no_reason_to_leave_ids_out():
    assert propose("user", profile([f"u{i}" for i in range(99)])).role == "id"
    assert propose("user", profile([f"u{i}" for i in range(100)])).role == "skip"


def test_proposals_as_text_that_gives_the_same():
    text = to_text(
        {
            "user": Proposal("id", "text, 2 values"),
            "note": Proposal("skip", "one value"),
            "price": Proposal("dense", "numbers"),
        }
    )
    assert text.splitlines() == [
        "columns=auto takes the columns so:",
        "  user   id        text, 2 values",
        "  note   left out  one value",
        "  price  dense     numbers",
        "to have it otherwise, start from columns=user:id,price:dense",
    ]


def test_proposals_as_text_beside_roles_of_ones_own():
    given = ("auto", "tags:jagged:min_count=2", "note:skip")
    text = to_text({"user": Proposal("id", "text, 2 values"), "x": Proposal("skip", "one value")}, given)
    assert text.splitlines()[-1] == "to have it otherwise, start from columns=user:id,tags:jagged:min_count=2"
    assert roles.parse(("user:id", "tags:jagged:min_count=2"))[1].keys() == {"user", "tags"}


def test_the_grammar():
    auto, asked = roles.parse(("user:id", "a:b:id", "tags:jagged:split=;:min_count=2", "price:dense:log1p", "w:weight"))
    assert not auto and asked == {
        "user": Asked("id"),
        "a:b": Asked("id"),
        "tags": Asked("jagged", separator=";", min_count=2),
        "price": Asked("dense", "log1p"),
        "w": Asked("weight"),
    }
    assert roles.parse(("age:id:bucket=10", "tags:jagged:hash=1000:min_count=3"))[1] == {
        "age": Asked("id", buckets=10),
        "tags": Asked("jagged", hashed=1000, min_count=3),
    }
    assert roles.parse(("auto", "zip:id", "note:skip")) == (True, {"zip": Asked("id"), "note": Asked("skip")})
    assert roles.parse(("id:id",)) == (False, {"id": Asked("id")})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("user",), "'user' is not COLUMN:ROLE with a role of id, jagged, dense, vector, weight, time, cross, skip"),
        (("user:ids",), "Did you mean user:id?"),
        ((":id",), "is not COLUMN:ROLE"),
        (("a:id", "a:dense"), "'a:dense' is not COLUMN:ROLE .* each column once"),
        (("a:id:log1p",), "'a:id:log1p' has no option 'log1p'. Those of id are min_count=N"),
        (("a:dense:min_count=3",), "has no option 'min_count=3'. Those of dense are log1p"),
        (("a:id:min_count=0",), "has no option 'min_count=0'"),
        (("a:id:hash=x",), "has no option 'hash=x'"),
        (("a:id:bucket=1",), "has no option 'bucket=1'"),
        (("a:jagged:zone=UTC",), "has no option 'zone=UTC'. Those of jagged are min_count=N, hash=N, bucket=N, split="),
        (("h:list(a,a)",), r"'h:list\(a,a\)' needs columns of lists, or the fields of structures in lists, each once"),
        (("h:list()",), "each once: hist:list"),
        (("h:list(a:skip)",), r"'h:list\(a:skip\)' has no option 'skip'. Those of jagged"),
        (("a:id:bucket=9:hash=5",), "Leave hash out"),
        (("a:jagged:split=",), "has no option 'split='"),
        (("a:weight", "b:weight"), "several of role weight"),
    ],
)
def test_what_the_grammar_refuses(columns, message):
    with pytest.raises(ConfigError, match=message):
        roles.parse(columns)


@pytest.mark.parametrize(
    ("role", "values", "message"),
    [
        ("id", [0.5, 1.0], "fractions or beyond 2.53, which are no ids.*x:dense"),
        ("id", [2.0**53], "beyond 2.53"),
        ("id", [[1]], "holds lists, so it cannot be id. Give it as x:jagged"),
        ("id", [DAY], "holds times, which cannot be id"),
        ("id", [{"x": 1}], "holds structures.*x:skip"),
        ("id", [None, None], "no value in any of 2 rows"),
        ("dense", [None, None], "no value in any of 2 rows"),
        ("dense", [[1]], "holds lists"),
        ("jagged", ["a"], "holds text, not lists, so it cannot be jagged. Give it as x:id"),
        ("jagged", [[0.5]], "fractions"),
        ("vector", [1.0], "holds numbers, not lists, so it cannot be vector. Give it as x:dense"),
        ("vector", [[1.0], [1.0, 2.0]], "lists of 1 to 2 numbers; those of a vector are equally long"),
        ("vector", [["a"]], "lists of text"),
        ("weight", [None], "no value"),
    ],
)
def test_roles_that_a_column_cannot_have(role, values, message):
    with pytest.raises(DataError, match=message):
        roles.spec_of("x", Asked(role), profile(values))


def test_what_has_no_buckets():
    for values, message in (
        (["a"], "holds text, which has no buckets"),
        ([[1]], "holds lists"),
        ([{"x": 1}], "structures"),
    ):
        with pytest.raises(DataError, match=message):
            roles.spec_of("x", Asked("id", buckets=4), profile(values))
    assert roles.spec_of("x", Asked("id", buckets=4), profile([0.5, DAY.year])).kind == "float"
    assert roles.spec_of("x", Asked("id", buckets=4), profile([DAY])).kind == "time"


def test_a_column_as_it_will_be_prepared():
    spec = roles.spec_of("x", Asked("id"), profile([1.0, None, 3.0]))
    assert (spec.kind, spec.optional, spec.feature.values, spec.feature.optional) == ("integer", True, "integer", True)
    spec = roles.spec_of("x", Asked("jagged", min_count=3), profile([["a"], []]))
    assert spec.feature.jagged and spec.feature.values == "text" and spec.feature.min_count == 3
    assert roles.spec_of("x", Asked("vector"), profile([[1, 2], None])).dense_names == ("x[0]", "x[1]")
    assert roles.spec_of("x", Asked("dense"), profile([DAY])).kind == "time"
    assert roles.spec_of("x", Asked("id"), words("true", "false")).kind == "boolean"
    assert roles.spec_of("x", Asked("jagged"), profile([[], None])).kind == "integer"
