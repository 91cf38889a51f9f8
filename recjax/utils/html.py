"""Plain HTML tables, which notebooks show in place of a value's text. No scripts, no styles; every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 400  # characters of one cell


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a caption, the heads of its columns, and rows of values."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><caption>{_text(title)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


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
