"""Display of configs, plans and results in notebooks: tables of escaped text; and metrics.jsonl as a table."""

import html.parser
import json

import pytest

import recjax
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.errors import ConfigError, TrainingError
from recjax.train.run.curves import read_lines, table_of
from recjax.utils.html import Shown


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells by row, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.caption, self._inside = [], set(), "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.tags.add(tag)
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside == "caption":
            self.caption += data


PLAIN = {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_a_config_shows_the_settings_of_its_text():
    config = recjax.load("movietweetings", {"data.path": "<script>alert(1)</script>&", "train.steps": 7})
    shown = Cells(config._repr_html_())
    assert shown.tags == PLAIN and shown.caption.startswith("RunConfig")
    found = dict(shown.rows[1:])
    assert found["train.steps"] == "7" and found["data.path"] == "<script>alert(1)</script>&"
    text = "".join(repr(config).split())
    assert all("".join(f"{key}={value}".split()) in text for key, value in found.items())


def test_results_show_nested_numbers_and_stay_dicts():
    values = {"steps": 12, "eval": {"auc": 0.71234567, "clicked": {"auc": None}}, "why": "<b>", "long": "x" * 999}
    shown = Shown(values)
    assert shown == values and json.loads(json.dumps(shown)) == values and repr(shown) == repr(values)
    cells = Cells(shown._repr_html_())
    assert cells.tags == PLAIN
    assert cells.rows[1:5] == [["steps", "12"], ["eval.auc", "0.712346"], ["eval.clicked.auc", ""], ["why", "<b>"]]
    assert len(cells.rows[5][1]) == 403


def test_a_plan_shows_a_row_for_each_segment():
    hot = Segment("data_parallel", RowIds((3, 17)), why="<hot>")
    rest = Segment("table_wise", "rest", (0, 32), 0, exchange=Exchange("int8", "bfloat16"))
    cells = Cells(Plan({"item": (hot, rest), "user": (Segment("row_wise"),)})._repr_html_())
    assert cells.tags == PLAIN
    assert cells.rows[1] == [
        "item",
        "data_parallel",
        "2 ids",
        "all",
        "all",
        "device",
        "float32 / float32, rows",
        "<hot>",
    ]
    assert cells.rows[2][1:7] == ["table_wise", "rest", "(0, 32)", "0", "device", "int8 / bfloat16, rows"]
    assert [row[0] for row in cells.rows] == ["table", "item", "item", "user"]


def test_metrics_of_several_splits_and_labels(tmp_path):
    lines = [
        {"step": 1, "split": "train", "loss": 1, "warm": True},
        {"step": 1, "split": "validation", "loss": 0.5, "clicked.auc": 0.75, "stars.mse": None, "shape": [1, 2]},
        {"step": 2, "split": "train", "loss": 0.25, "stars.mse": 3, "note": "é"},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "spl')
    table = table_of(read_lines(file))
    assert table.column_names == ["step", "split", "loss", "warm", "clicked.auc", "stars.mse", "shape", "note"]
    assert [str(table.schema.field(name).type) for name in ("step", "loss", "warm", "stars.mse", "shape")] == [
        "int64",
        "double",
        "bool",
        "int64",
        "string",
    ]
    assert table.to_pydict() == {
        "step": [1, 1, 2],
        "split": ["train", "validation", "train"],
        "loss": [1.0, 0.5, 0.25],
        "warm": [True, None, None],
        "clicked.auc": [None, 0.75, None],
        "stars.mse": [None, None, 3],
        "shape": [None, "[1, 2]", None],
        "note": [None, None, "é"],
    }
    file.write_text('{"step": 1}\nno json\n')
    with pytest.raises(TrainingError, match=r"metrics.jsonl, line 2: .*\. Delete that line"):
        read_lines(file)
    file.write_text("3\n")
    with pytest.raises(TrainingError, match="line 1 is no JSON object"):
        read_lines(file)
    with pytest.raises(ConfigError, match="has not trained yet"):
        read_lines(tmp_path / "none")
    file.write_text("")
    assert table_of(read_lines(file)).num_rows == 0
