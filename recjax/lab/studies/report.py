"""The report of a study: figure by figure what its source shows, what recjax gets, whether they agree, and why not.

A study makes a `Report`; `write` puts it into a folder as one page of HTML with all pictures in it (NAME.html, which
loads nothing), as plain text in Markdown (NAME.md) and, with all figures, as JSON (NAME.json).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recjax.utils import html
from recjax.utils.files import write_json, write_whole
from recjax.utils.processor import processor
from recjax.utils.text import aligned
from recjax.utils.version import __version__

_HEAD = ("figure", "quantity", "source", "recjax", "same", "why")
_LONGEST = 200  # characters of a value of a part
_WIDTHS = (14, 30, 22, 34, 4, 44)  # of the columns on a terminal, characters


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of the source beside ours.

    Attributes:
      figure: of the source, such as "figure 4", or the section that states it.
      quantity: what is compared, with its unit.
      source: value of the source; "not stated" where only its question is known.
      ours: value measured, counted or simulated here.
      same: whether both agree, by a rule that `why` or the study's page names; None: the source states no value.
      why: reason for the difference, or what the agreement rests on.
    """

    figure: str
    quantity: str
    source: str
    ours: str
    same: bool | None
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as texts, in the order of the table's columns."""
        same = "-" if self.same is None else "yes" if self.same else "no"
        return (self.figure, self.quantity, self.source, self.ours, same, self.why)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
      title: of the table.
      rows: the heads of the columns, then one entry a line.
      left: columns that are aligned to the left.
    """

    title: str
    rows: Sequence[Sequence[str]]
    left: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
      name: of its file in the report's folder, such as "norm.png".
      text: what it shows, a sentence.
      png: content of the file.
    """

    name: str
    text: str
    png: bytes


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report after the table of all figures.

    Attributes:
      title: of the part.
      notes: paragraphs.
      tables, pictures: that belong to it.
    """

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """A study for people.

    Attributes:
      name: of the study, and of its files.
      title: one line.
      source: the publication: authors, title, where and when.
      about: what the figures depend on, see `provenance`.
      rows: figure by figure.
      assumptions: what had to be chosen because the source does not say it.
      sections: all else.
    """

    name: str
    title: str
    source: str
    about: Mapping[str, Any]
    rows: Sequence[Row]
    assumptions: Sequence[str] = ()
    sections: Sequence[Section] = ()


def provenance(began: float) -> dict[str, Any]:
    """Returns the circumstances of a report's figures.

    Args:
      began: `time.monotonic()` at the study's start.

    Returns:
      "command", "recjax" (version), "commit" (None outside a checkout), "machine", "cores", "python" and "seconds".
    """
    command = shlex.join(["recjax", *sys.argv[1:]])
    return {
        "command": command,
        "recjax": __version__,
        "commit": _commit(),
        "machine": processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began, 1),
    }


def _commit() -> str | None:
    """Short hash of the checkout that runs, with "+" if files differ from it; None if it is installed."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write(report: Report, result: Mapping[str, Any], out: Path) -> list[str]:
    """Writes a report's page, text, JSON and pictures.

    Args:
      report: what people read.
      result: all figures of the study; "report" is added to the file: the rows, the assumptions and `about`.
      out: folder, made if need be.

    Returns:
      names of the files.

    Raises:
      TrainingError: one cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = [picture for section in report.sections for picture in section.pictures]
    for picture in pictures:
        write_whole(out / picture.name, picture.png)
    write_json(out / f"{report.name}.json", {**result, "report": to_json(report)})
    write_whole(out / f"{report.name}.md", to_markdown(report).encode())
    write_whole(out / f"{report.name}.html", to_html(report).encode())
    return [*(f"{report.name}.{kind}" for kind in ("html", "md", "json")), *(picture.name for picture in pictures)]


def to_json(report: Report) -> dict[str, Any]:
    """The comparison as plain data: "title", "source", "about", "rows" (of dicts as `Row`), "assumptions"."""
    rows = [dataclasses.asdict(row) for row in report.rows]
    return {
        "title": report.title,
        "source": report.source,
        "about": dict(report.about),
        "rows": rows,
        "assumptions": list(report.assumptions),
    }


def unfinished(name: str, results: Mapping[str, Any], about: Mapping[str, Any]) -> Report:
    """The report of a study before its end: the figures of its parts so far, as they were measured or counted.

    Args:
      name: of the study.
      results: part -> JSON values.
      about: as `provenance` gives it.
    """
    sections = []
    for part, result in results.items():
        values = result if isinstance(result, Mapping) else {"": result}
        lines = [(key, textwrap.shorten(str(value), _LONGEST, placeholder=" ...")) for key, value in html.flat(values)]
        sections.append(Section(part, (), [Table("", [("", "value"), *lines], (0, 1))]))
    source = f"Not finished: {len(results)} part(s) so far. The same command goes on from here, and writes the report."
    return Report(name, f"Study {name}", source, about, (), (), sections)


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a cell of a table; "-" for none."""
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def counted(rows: Sequence[Row]) -> str:
    """Says how many values come out the same, how many do not, and how many the source does not state."""
    if not rows:
        return "nothing is compared with the source yet"
    stated = [row for row in rows if row.same is not None]
    same = sum(bool(row.same) for row in stated)
    questions = len(rows) - len(stated)
    text = f"{same} of {len(stated)} values that the source states come out the same, {len(stated) - same} do not"
    return f"{text}; of {questions} it states none" if questions else text


def to_text(report: Report, sections: bool = True) -> str:
    """The report for a terminal: the comparison in wrapped columns, then the sections' tables."""
    lines = [report.title, report.source, "", *_wrapped([_HEAD, *(row.cells() for row in report.rows)]), ""]
    lines.append(counted(report.rows))
    for section in report.sections if sections else ():
        lines += ["", section.title, *section.notes]
        for table in section.tables:
            lines += ["", *([table.title] if table.title else []), *aligned(table.rows, table.left)]
    return "\n".join(lines)


def _wrapped(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of long texts as lines of columns, each text broken into as many lines as it needs."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        broken = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, _WIDTHS, strict=True)]
        lines += itertools.zip_longest(*broken, fillvalue="")
    return aligned(lines, left=range(len(_WIDTHS)))


def to_markdown(report: Report) -> str:
    """The report as Markdown, without pictures."""
    parts = [f"# {report.title}", report.source, _pipes([_HEAD, *(row.cells() for row in report.rows)])]
    parts.append(f"{counted(report.rows)}.")
    if report.assumptions:
        parts += ["## Assumptions", "\n".join(f"- {text}" for text in report.assumptions)]
    for section in report.sections:
        parts += [f"## {section.title}", *section.notes]
        for table in section.tables:
            parts += [*([f"**{table.title}**"] if table.title else []), _pipes(table.rows)]
    parts += ["## Made by", "\n".join(f"- {key}: {_value(value)}" for key, value in report.about.items())]
    return "\n\n".join(parts) + "\n"


def _pipes(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def to_html(report: Report) -> str:
    """The report as one page of HTML with its pictures in it; it loads nothing."""
    parts = [html.paragraph(report.source), html.table("", _HEAD, [row.cells() for row in report.rows], "left")]
    parts.append(html.paragraph(f"{counted(report.rows)}."))
    if report.assumptions:
        parts += [html.heading("Assumptions"), html.items(report.assumptions)]
    for section in report.sections:
        parts += [html.heading(section.title), *map(html.paragraph, section.notes)]
        for picture in section.pictures:
            parts += [html.picture(picture.png, picture.text), html.paragraph(picture.text)]
        parts += [html.table(table.title, table.rows[0], table.rows[1:]) for table in section.tables]
    parts += [html.heading("Made by"), html.table("", ("", "value"), list(html.flat(report.about)), "left")]
    return html.page(report.title, parts)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    return "unknown" if value is None else str(value)
