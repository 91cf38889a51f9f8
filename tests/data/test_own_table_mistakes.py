"""Mistakes of a newcomer with a table of their own: one paragraph that says where, and what to do."""

import pyarrow as pa
import pytest
from support import tables
from support.commands import assert_refused, inside

from recjax.data.datasets.own_table import Table, open_raw
from recjax.errors import RecjaxError

pytestmark = [pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

GOOD = {"user": ["a", "b", "a", "b"], "price": [1.0, 2.0, 3.0, 4.0], "day": [1, 2, 3, 4], "clicked": [0, 1, 1, 0]}


def prepare(tmp_path, *options, form="parquet", label="label=clicked", **columns):
    path = tables.write(pa.table(GOOD | columns), tmp_path / f"t.{form}")
    return inside("data", "prepare", "table", "--from", path, "--out", tmp_path / "out", label, *options)


def test_what_is_left_out_of_a_table_without_features(tmp_path):
    """One `inf` among prices, each of which is another, so that none would be an id."""
    rows = [f"{i / 4},{i % 2},x" for i in range(400)]
    (tmp_path / "t.csv").write_text("\n".join(["price,clicked,kind", *rows, "inf,1,x"]) + "\n")
    done = inside("data", "prepare", "table", "--from", tmp_path / "t.csv", "--out", tmp_path / "out", "label=clicked")
    assert_refused(
        done,
        2,
        r"is left as a feature. Name some: columns=user:id,price:dense. columns=auto leaves out price \(401 values: "
        r"nearly every row has one of its own\), kind \(one value\). price is text, although 400 of its 401 values",
        r"the first that cannot be read as one is 'inf' \(.*t.csv row 401\). So the column is left out. Correct such",
        "columns=auto,price:dense makes it a number",
    )


USUAL = "columns=user:id,price:dense"


@pytest.mark.parametrize(
    ("options", "columns", "status", "patterns"),
    [
        (["label=click"], {}, 2, ["label: .*has no column 'click'. Did you mean 'clicked'", "'user', 'price'"]),
        (["label="], {}, 2, ["needs label=COLUMN", "'clicked'"]),
        (["columns=usr:id"], {}, 2, ["columns: .*no column 'usr'. Did you mean 'user'"]),
        (["columns=user"], {}, 2, ["'user' is not COLUMN:ROLE"]),
        (["columns=clicked:id"], {}, 2, ["'clicked' is the label"]),
        (["columns=price:skip"], {}, 2, ["no column of .* is left as a feature"]),
        (
            ["label=price"],
            {},
            3,
            [
                "t.parquet row 2: the label 'price' is 2.0, not 0 or 1; its values are 1.0, 2.0",
                "threshold=X",
                "label=price:number",
            ],
        ),
        (["label=price"], {"price": [10.0, 9.0, 1.0, 0.0]}, 3, ["its values are 0.0, 1.0, 9.0, 10.0"]),
        ([], {"clicked": ["no", "yes", "no", "no"]}, 3, ["row 1: the label 'clicked' is 'no'", "positive=VALUE"]),
        ([], {"clicked": [0, 1, None, 1]}, 3, ["row 3: the label 'clicked' is missing", "'where=clicked!=', or fill"]),
        ([], {"clicked": [0, 1, float("nan"), 1]}, 3, ["row 3: the label 'clicked' is missing"]),
        ([], {"clicked": [1, 1, 1, 1]}, 3, [r"the label, clicked, is 1 in all 4 rows .the values of 'clicked' are 1."]),
        (["threshold=9"], {}, 3, ["the label, clicked >= 9, is 0 in all 4 rows"]),
        (
            ["positive=yess"],
            {"clicked": ["no", "yes", "no", "no"]},
            3,
            ["the label, clicked is yess, is 0 in all 4 rows .*'no', 'yes'", "Did you mean positive=yes[?]"],
        ),
        ([], {"clicked": [[0], [1], [1], [0]]}, 3, ["the label 'clicked' holds lists"]),
        (
            [USUAL],
            {"price": ["1", "cheap", "2", "3"]},
            3,
            ["row 2: column 'price' is 'cheap', not a finite number", "price:skip"],
        ),
        ([USUAL], {"price": [1.0, 2.0, float("inf"), 4.0]}, 3, ["row 3: column 'price' is inf, not a finite number"]),
        ([USUAL], {"price": [1, 2.0, 1e39, 4.0]}, 3, [r"row 3: column 'price' is 1e\+39, not a number of float32"]),
        ([USUAL], {"price": pa.nulls(4)}, 3, ["column 'price' has no value in any of 4 rows"]),
        (["columns=price:id"], {"price": [1.0, 2.5, 3.0, 4.0]}, 3, ["column 'price' holds numbers with fractions"]),
        (["columns=user:id,day:weight"], {"day": [1, -2, 1, 1]}, 3, ["row 2: column 'day' is -2, not a weight"]),
        (["columns=user:id,day:weight"], {"day": [1, 2, None, 1]}, 3, ["row 3: column 'day' is null, not a weight"]),
        ([USUAL], {"user": ["a", "b\0", "a", "b"]}, 3, ["row 2: column 'user' is .*no text .UTF-8 without NUL"]),
        ([USUAL], {"user": ["a", "b" * 2000, "a", "b"]}, 3, ["row 2: column 'user' is .*at most 1,024 bytes"]),
        ([USUAL, "split=time"], {}, 2, ["split=time needs time=COLUMN"]),
        ([USUAL, "split=last", "time=day"], {}, 2, ["split=last needs group=COLUMN"]),
        ([USUAL, "split=time", "time=user"], {}, 3, ["row 1: column 'user' is 'a', not a number or a time"]),
        ([USUAL, "split=time", "time=day"], {"day": [1, None, 2, 3]}, 3, ["row 2: column 'day' is null"]),
        ([USUAL, "split=last", "group=day"], {"day": [1, None, 2, 3]}, 3, ["row 2: column 'day' is null, so the row"]),
        (
            [USUAL, "split=column", "split_column=user"],
            {},
            3,
            ["row 1: column 'user' is 'a', which names no split", "train, validation, test"],
        ),
        ([USUAL, "split=random:0.5,0.5"], {}, 2, ["which are 1 together"]),
        ([USUAL, "threshold=1", "positive=1"], {}, 2, ["Give one of them"]),
        ([USUAL, "--beam=x"], {}, 2, ["leave out --beam"]),
    ],
)
def test_wrong_options_and_values(tmp_path, options, columns, status, patterns):
    refused = assert_refused(prepare(tmp_path, *options, **columns), status, *patterns)
    assert len(refused) < 700
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "status", "patterns"),
    [
        ("", 3, ["t.csv is empty"]),
        ("user,clicked\n", 3, ["t.csv has no rows"]),
        ("user,clicked\na,1\nb\n", 3, [r"t.csv:3: the line has 1 field"]),
        ("user,clicked\na,1\nb,\n", 3, ["t.csv row 2: the label 'clicked' is missing"]),
        ("user,clicked\na,1\nb,2\n", 3, ["t.csv row 2: the label 'clicked' is '2'"]),
        ("user,clicked,clicked\na,1,1\n", 3, ["two columns 'clicked'"]),
        (
            b"user,clicked\na,1\n\xff,0\n",
            3,
            [r"t.csv row 2: column 'user' is b'\\xff', no text .UTF-8.*encoding=cp1252"],
        ),
    ],
)
def test_wrong_csv(tmp_path, content, status, patterns):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = ("label=clicked", "columns=user:id", "split=random:1,0,0")
    done = inside("data", "prepare", "table", "--from", path, "--out", tmp_path / "out", *settings)
    assert_refused(done, status, *patterns)


def test_files_that_do_not_fit_together(tmp_path):
    tables.write(pa.table(GOOD), tmp_path / "a.parquet")
    for other, message in (
        ({k: v for k, v in GOOD.items() if k != "price"}, r"b.parquet has no column 'price', but .*a.parquet has"),
        (GOOD | {"more": [1, 2, 3, 4]}, r"b.parquet has a column 'more', but .*a.parquet has none"),
        (GOOD | {"user": [[1]] * 4}, "column 'user' holds"),
        (GOOD | {"price": ["x"] * 4}, r"'price' holds numbers in .*a.parquet, but text in .*b.parquet"),
        (GOOD | {"day": ["x"] * 4}, r"'day' holds integers in .*a.parquet, but text in .*b.parquet.*day:skip"),
        (GOOD | {"user": [["x"]] * 4}, r"'user' holds text in .*a.parquet, but lists of text in .*b.parquet"),
    ):
        tables.write(pa.table(other), tmp_path / "b.parquet")
        with pytest.raises(RecjaxError, match=message):
            open_raw(Table(label="clicked", columns=("auto", "user:id", "price:dense")), tmp_path)


def test_without_a_file(tmp_path):
    assert_refused(
        inside("data", "prepare", "table", "--out", tmp_path / "out", "label=x"), 2, "Give its file with --from"
    )
    absent = tmp_path / "absent.parquet"
    done = inside("data", "prepare", "table", "--from", absent, "--out", tmp_path / "out", "label=x")
    assert_refused(done, 3, "absent.parquet does not exist")


@pytest.mark.full
def test_training_on_a_table_that_is_not_there(tmp_path):
    assert_refused(inside("train", "table", "--out", tmp_path / "run"), 3, "data.from=FILE data.label=COLUMN")
    done = inside("train", "table", "data.from=absent.csv", "data.label=x", "--out", tmp_path / "run")
    assert_refused(done, 3, "absent.csv does not exist")
