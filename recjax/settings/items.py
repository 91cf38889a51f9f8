"""Lists as text: the one grammar of settings and options that name columns, features or tables.

    user:id,"a, b":jagged:split=";",hist:list(item,age)

Marks such as `,` and `:` separate, but not what stands in double quotes or between parentheses. A double quote opens
where a name or value begins (elsewhere it stands for itself), and closes at the next one; inside, a quote is written
twice. Parentheses nest, and one without a partner stands for itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from recjax.errors import ConfigError

_MARKS = ",:=|*<>!([{"  # after these, or at the start, a name or value begins
_HIDDEN = "\0"
_PLAIN = re.compile(r"(?![\s'])[^,:=|*<>!()\[\]{}\"]+(?<!\s)")


def mask(text: str) -> str:
    """The text with what is quoted or between parentheses replaced, so that a mark in it is one that separates.

    It has the length of the text: what is found in it lies at the same place in the text.

    Raises:
      ConfigError: a double quote is not closed.
    """
    masked = list(text)
    for start, end in _quoted(text):
        masked[start:end] = _HIDDEN * (end - start)
    hidden = "".join(masked)
    partner, opened = {}, []
    for match in re.finditer(r"[()]", hidden):
        if match[0] == "(":
            opened.append(match.start())
        elif opened:
            partner[opened.pop()] = match.start()
    end = 0
    for start in sorted(partner):
        if start >= end:  # else it lies within another pair
            end = partner[start]
            masked[start + 1 : end] = _HIDDEN * (end - start - 1)
    return "".join(masked)


def split(text: str, separator: str) -> list[str]:
    """The parts between separators (single characters), as they are written; one part if there is no separator.

    Raises:
      ConfigError: a double quote is not closed.
    """
    cuts = [-1, *(at for at, char in enumerate(mask(text)) if char == separator), len(text)]
    return [text[start + 1 : end] for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def names(text: str) -> list[str]:
    """The names in a list with commas between them, such as the value of `--columns`; those that are empty left out.

    Raises:
      ConfigError: a double quote is not closed.
    """
    return [unquote(part) for part in split(text, ",") if part]


def unquote(text: str) -> str:
    """The name or value that a part of a text writes.

    Raises:
      ConfigError: a double quote is not closed.
    """
    parts, done = [], 0
    for start, end in _quoted(text):
        parts += [text[done:start], text[start + 1 : end - 1].replace('""', '"')]
        done = end
    return "".join([*parts, text[done:]])


def quote(name: str) -> str:
    """The part of a text that writes a name or value: in double quotes where it needs them."""
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def comma_hint(missing: str, names: Iterable[str]) -> str:
    """A sentence, after a space, if one of `names` holds a comma and `missing` is a part of it; else ""."""
    whole = next((name for name in names if "," in name and missing.strip() in map(str.strip, name.split(","))), None)
    return "" if whole is None else f" A name with a comma stands in double quotes: {shlex.quote(quote(whole))}."


def is_quoted(text: str) -> bool:
    """Returns whether a text is one stretch in double quotes."""
    return len(text) > 1 and text[0] == '"' and _closing(text, 0) == len(text) - 1


def _quoted(text: str) -> Iterator[tuple[int, int]]:
    """Yields where each quoted stretch begins and ends, its quotes included."""
    end, last = 0, ","
    for at, char in enumerate(text):
        if at < end:
            continue
        if char == '"' and last in _MARKS:
            end = _closing(text, at) + 1
            if not end:
                raise ConfigError(
                    f"in {text[:200]!r} a double quote opens before {text[at + 1 : at + 21]!r} and is not closed. "
                    "Close it; one that belongs to the name is written twice, within quotes around the whole name."
                )
            yield at, end
        if not char.isspace():
            last = char


def _closing(text: str, start: int) -> int:
    """Place of the quote that closes the one at `start`; -1 if there is none."""
    at = text.find('"', start + 1)
    while at >= 0 and text[at + 1 : at + 2] == '"':
        at = text.find('"', at + 2)
    return at
