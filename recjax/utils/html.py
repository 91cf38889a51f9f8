"""Plain HTML: tables, which notebooks show in place of a value's text, and pages that load nothing.

No scripts; every text is escaped.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 400  # characters of one cell
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}caption{font-weight:600;text-align:left;padding:.2em 0}"
    "td,th{padding:.2em .7em;text-align:right;vertical-align:top;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child,.left td,.left th{text-align:left}img{max-width:100%}"
)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """A table with a caption, the heads of its columns, and rows of values; kind "left": a page aligns texts left."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows)
    opening = f'<table class="{html.escape(kind)}">' if kind else "<table>"
    return f"{opening}<caption>{_text(title)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def heading(text: str, level: int = 2) -> str:
    """A heading; level 1 is the page's."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(text)}</p>"


def items(texts: Iterable[str]) -> str:
    """A list with a mark before every text."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def picture(png: bytes, text: str) -> str:
    """A PNG in the page itself, with the text for who cannot see it."""
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page with its style in it.

    Args:
      title: text.
      parts: HTML, as the other functions make it.
    """
    body = "\n".join([heading(title, 1), *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}\n</body></html>\n"
    )


class Shown(dict[str, Any]):
    """A dict that a notebook shows as a table: dicts within it by keys with dots, numbers with six digits."""

    def _repr_html_(self) -> str:
        return table("", ("", "value"), flat(self))


def flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """The values of nested dicts, each with its keys and dots between them."""
    found = []
    for key, value in values.items():
        inner = flat(value, f"{path}{key}.") if isinstance(value, Mapping) else [(f"{path}{key}", value)]
        found += inner
    return found


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return html.escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
