"""Messages about a person's own table say its options as that person gave them: command, config or Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.commands import assert_refused, inside

import recjax
from recjax.errors import ConfigError, DataError

ROWS = {
    "stars": ["1", "2", "3", "4", "5", "1"] * 20,
    "seen": ["1", "0", "", "1", "0", "1"] * 20,
    "user": ["anna", "bert", "anna", "carl", "bert", "carl"] * 20,
    "day": [f"{1 + n // 10:02}.01.2025" for n in range(120)],
}
WAYS = ("command", "config", "Python", "Python with a path")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    lines = [",".join(ROWS), *(",".join(row) for row in zip(*ROWS.values(), strict=True))]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "rows.csv"


def said(way: str, table: Path, status: int, **options: Any) -> str:
    """The message that refuses options which are given in one of the ways."""
    given = [f"{key}={value}" for key, value in options.items()]
    out = table.parent / "out"
    if way == "command":
        return assert_refused(inside("data", "prepare", "table", "--from", table, "--out", out, *given), status)
    if way == "config":
        done = inside("train", "table", f"data.from={table}", *(f"data.{text}" for text in given), "--out", out)
        return assert_refused(done, status)
    data = pa.table(ROWS) if way == "Python" else table
    with pytest.raises({2: ConfigError, 3: DataError}[status]) as error:
        recjax.prepare(data, options.pop("label"), out, **options)
    return str(error.value)


def in_words(way: str, key: str, value: str) -> str:
    """An option as it is given in one of the ways, by hand."""
    if way == "config":
        return f"data.{key}={value}"
    return f"{key}={value}" if way == "command" or key == "threshold" else f'{key}="{value}"'


@pytest.mark.parametrize("way", WAYS)
def test_each_option_is_said_as_it_was_given(table: Path, way: str) -> None:
    cases = [
        ({"label": "stars"}, 3, [("label", "stars:number"), ("threshold", "X"), ("positive", "VALUE")]),
        ({"label": "seen", "columns": "user:id"}, 3, [("where", "seen!=")]),
        ({"label": "user", "positive": "ana"}, 3, [("positive", "anna")]),  # did you mean
        ({"label": "stars", "threshold": "3", "split": "time"}, 2, [("split", "time"), ("time", "COLUMN")]),
        ({"label": "stars", "threshold": "3", "columns": "user:skip"}, 2, [("columns", "user:id,price:dense")]),
        ({"label": "stars", "threshold": "3", "where": "user=z"}, 3, [("where", "user=z")]),
    ]
    for options, status, expected in cases:
        message = said(way, table, status, **options)
        for key, value in expected:
            assert in_words(way, key, value) in message, message
        words = re.findall(r"(?<![\w.=\"])[\w.]+=\S", message)  # nothing is said in the words of another way
        dotted = {word.startswith("data.") for word in words}
        assert dotted == {way == "config"}, message
        quoted = {word.endswith('"') for word in words if "threshold" not in word}
        assert quoted == {way.startswith("Python")}, message


def test_a_label_is_asked_for_in_the_same_words(table: Path) -> None:
    assert "needs label=COLUMN" in said("command", table, 2)
    assert "needs data.label=COLUMN" in said("config", table, 2)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_grammar_of_labels_refuses_is_said_alike_in_all_ways(table: Path, way: str) -> None:
    assert "label=" not in said(way, table, 2, label="stars:class,stars")


def test_proposals_are_settings_to_copy(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = inside("data", "prepare", "table", "--from", table, "--out", table.parent / "a", "label=stars:number")
    assert "start from columns=seen:id,user:id,day:id" in done.err
    done = inside("data", "info", "table", f"from={table}", "label=stars:number")
    assert "start from columns=seen:id,user:id,day:id" in done.err
    table.write_text(table.read_text() + "1,1,anna,01.01.2025\n")  # else it is prepared already
    recjax.load("table", [f"data.from={table}", "data.label=stars:number"]).data.open()
    assert "start from data.columns=seen:id,user:id,day:id" in capsys.readouterr().err
    recjax.prepare(pa.table(ROWS), "stars:number", table.parent / "b")
    assert 'start from columns="seen:id,user:id,day:id"' in capsys.readouterr().err


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_dates_that_become_ids_are_warned_of_with_a_remedy_that_helps(table: Path, form: str) -> None:
    """One line; and what it says works: dates by ISO 8601 give a weekday, a number, or nothing."""
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(pa.table(ROWS), table.with_suffix(".parquet"))
    command = ["data", "prepare", "table", "--from", table.with_suffix(f".{form}"), "label=stars:number"]
    done = inside(*command, "--out", table.parent / "a", "--json")
    assert done.result["dataset"] == "table"
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning:")]
    assert "day is text that looks like dates (01.01.2025)" in warning and "(ISO 8601)" in warning
    remedies = re.findall(r"columns=(\S+?) ", warning.replace(";", " ;") + " ")
    assert remedies == ["auto,day:time:weekday", "auto,day:dense", "auto,day:skip"]
    iso = table.with_name("iso.csv")
    iso.write_text(re.sub(r"(\d\d)\.(\d\d)\.(\d{4})", r"\3-\2-\1", table.read_text()))
    found = []
    for number, columns in enumerate(remedies):
        out = table.parent / f"remedy{number}"
        done = inside(
            "data", "prepare", "table", "--from", iso, "label=stars:number", f"columns={columns}", "--out", out
        )
        assert done.status == 0 and "warning:" not in done.err
        schema = json.loads((out / "recjax.json").read_text())["schema"]
        found.append((schema["dense"], [feature["name"] for feature in schema["features"]]))
    assert found == [([], ["seen", "user", "day.weekday"]), (["day"], ["seen", "user"]), ([], ["seen", "user"])]
