"""The report that all studies write, and the results that a stopped study keeps."""

import html.parser
import json

import pytest

from recjax.errors import ConfigError, DataError
from recjax.lab.studies.finished import RECORDS, SETUP, Finished
from recjax.lab.studies.report import (
    Picture,
    Report,
    Row,
    Section,
    Table,
    counted,
    provenance,
    to_markdown,
    to_text,
    write,
)

PNG = b"\x89PNG not a real one"
ROWS = [
    Row("figure 4", "norm <E0 - E1>", "rises | settles", "rises to 3.5", True, "repeat " * 12),
    Row("section 5", "time", "35 ms", "4 ms", False, "another machine"),
    Row("section 6", "averages", "not stated", "half the bytes", None),
]
REPORT = Report(
    "trial",
    "A trial",
    "Nobody et al.",
    {"command": "study", "commit": None},
    ROWS,
    ["a guess"],
    [
        Section(
            "More",
            ["a note"],
            [Table("sizes", [["name", "bytes"], ["a", "12"], ["b", "5"]])],
            [Picture("p.png", "a picture", PNG)],
        )
    ],
)


class Page(html.parser.HTMLParser):
    """Cells of a page's tables, and all that it would load."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.loaded, self._in_cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data


def test_a_report_is_a_page_a_text_and_json(tmp_path):
    names = write(REPORT, {"measured": [1, 2.5]}, tmp_path / "made")
    assert sorted(names) == sorted(path.name for path in (tmp_path / "made").iterdir())
    assert set(names) == {"trial.html", "trial.md", "trial.json", "p.png"}
    assert (tmp_path / "made" / "p.png").read_bytes() == PNG

    page = Page((tmp_path / "made" / "trial.html").read_text())
    assert all(cell in page.cells for row in ROWS for cell in (row.figure, row.quantity, row.source, row.ours, row.why))
    assert page.loaded and all(what.startswith("data:image/png;base64,") for what in page.loaded)
    assert [cell for cell in page.cells if cell in ("yes", "no", "-")] == ["yes", "no", "-"]

    kept = json.loads((tmp_path / "made" / "trial.json").read_text())
    assert kept["measured"] == [1, 2.5]
    assert [row["same"] for row in kept["report"]["rows"]] == [True, False, None]
    assert kept["report"]["assumptions"] == ["a guess"]


def test_a_report_as_text():
    assert counted(ROWS) == "1 of 2 values that the source states come out the same, 1 do not; of 1 it states none"
    text = to_text(REPORT)
    assert max(map(len, text.splitlines())) <= 170, "columns are wrapped"
    assert text.count("repeat") == 12
    markdown = to_markdown(REPORT)
    assert r"| rises \| settles |" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert table[1] == "|---|---|---|---|---|---|"
    assert "- a guess" in markdown and "| a | 12 |" in markdown and "commit: unknown" in markdown


def test_provenance_says_what_was_run(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/recjax", "study", "trial", "--out", "a folder"])
    about = provenance(0.0)
    assert about["command"] == "recjax study trial --out 'a folder'"
    assert about["machine"] and about["cores"] >= 1 and about["seconds"] > 0


def test_finished_parts_are_not_made_again(tmp_path):
    made = []

    def make(value):
        made.append(value)
        return {"value": (value, float("nan"))}

    first = Finished(tmp_path, {"seed": 1}, "trial")
    assert first.get("a", lambda: make(1)) == {"value": [1, None]}
    assert first.get("b", lambda: make(2)) == {"value": [2, None]}
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-3])  # killed while it wrote b
    again = Finished(tmp_path, {"seed": 1}, "trial")
    assert again.get("a", lambda: make(3)) == {"value": [1, None]}
    assert again.get("b", lambda: make(4)) == {"value": [4, None]}
    assert made == [1, 2, 4]
    assert len(path.read_text().splitlines()) == 2

    with pytest.raises(ConfigError, match="other settings .seed."):
        Finished(tmp_path, {"seed": 2}, "trial")
    path.write_text("{\n" + path.read_text())
    with pytest.raises(DataError, match=f"{RECORDS}:1"):
        Finished(tmp_path, {"seed": 1}, "trial")


def test_a_study_that_is_stopped_leaves_a_page_of_what_is_finished(tmp_path):
    """Also one that is killed: it is there after each part."""
    kept = Finished(tmp_path, {}, "trial")
    assert not (tmp_path / "trial.md").exists()
    kept.get("the first", lambda: {"hits": 0.5, "rows": {"held": 12}, "long": "x" * 999})
    kept.get("the second", lambda: 3.0)
    with pytest.raises(KeyboardInterrupt):
        kept.get("the third", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    page = (tmp_path / "trial.md").read_text()
    assert "Not finished: 2 part(s) so far" in page and "## the first" in page and "| rows.held | 12 |" in page
    assert "3.0" in page and "third" not in page and len(page) < 2000
    assert (tmp_path / "trial.html").read_text().count("<h2>") >= 2
    assert json.loads((tmp_path / "trial.json").read_text())["finished"]["the second"] == 3.0


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"seed": 1, "seed": 1}'])
def test_a_damaged_setup_is_named(tmp_path, content):
    (tmp_path / SETUP).write_bytes(content)
    with pytest.raises(DataError, match=f"{SETUP}.*restore it, or choose another --out"):
        Finished(tmp_path, {"seed": 1}, "trial")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"part": ["a"], "result": 1}', b"[1]", b'{"part": "a"}', b"\xff"])
def test_a_damaged_part_is_named_with_its_line(tmp_path, line):
    Finished(tmp_path, {"seed": 1}, "trial").get("a", lambda: 1)
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(line + b'\n{"part": "b", "result": 2}\n')
    with pytest.raises(DataError, match=f"{RECORDS}:2: .*Delete that line"):
        Finished(tmp_path, {"seed": 1}, "trial")
