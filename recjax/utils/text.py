"""Tables as plain text, phrases of messages, and texts without what grants access.

Credentials stay out of configs, run folders and messages. Access to object storage comes from where its own tools keep
it (application default credentials, ~/.aws, environment variables), never from a path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeVar


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A line for each row, two spaces between columns: those in `left` are aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in cells).rstrip())
    return lines


def near(name: str, names: Iterable[str], count: int = 3, least: float = 0.5) -> list[str]:
    """Returns those of the names that a misspelt one may stand for, the nearest first.

    Args:
      name: as it was written.
      names: that there are.
      count: of those that are returned, at most.
      least: similarity, from 0 to 1 (`difflib`).
    """
    return difflib.get_close_matches(name, list(names), n=count, cutoff=least)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the one of the names that a misspelt one may stand for; None where none is near."""
    return next(iter(near(name, names, 1, 0.6)), None)


def did_you_mean(name: str, names: Iterable[str], quoted: bool = False) -> str:
    """Returns " Did you mean WORD?" with the nearest of the names, in quotes if asked; "" where none is near."""
    near = nearest(name, names)
    return "" if near is None else f" Did you mean {repr(near) if quoted else near}?"


_USER = re.compile(r"(?<=:/)(/?)[^/\s@'\"]*@")  # a path may have lost a slash
_NAME_CHAR = r"[^=&;#\s'\"]"
_CREDENTIAL = "token|key|secret|password|passwd|pwd|signature|sig|credential|auth"
# A parameter whose name speaks of a credential, and its value; else a name alone, within which no other is looked for.
_QUERY = re.compile(
    rf"(?P<name>[?&;](?={_NAME_CHAR}*?(?:{_CREDENTIAL})){_NAME_CHAR}*+=)[^&;#\s'\",)]+|[?&;]{_NAME_CHAR}*+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """`text` without what in its URLs grants access: `https://user:secret@host/x?token=abc` has *** for both."""
    return _QUERY.sub(lambda match: f"{match['name']}***" if match["name"] else match[0], _USER.sub(r"\1***@", text))


def holds_secret(text: str) -> bool:
    """Returns whether `text` has a URL with user information, or a parameter whose name speaks of a credential."""
    return "://" in text and masked(text) != text


_Name = TypeVar("_Name", bound=Hashable)


def first_repeated(names: Iterable[_Name]) -> _Name | None:
    """Returns the first of the names that equals one before it; None where all differ."""
    seen: set[_Name] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
