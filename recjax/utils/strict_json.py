"""JSON from files that anybody may have written: what is wrong with it is said in one way, and nothing is guessed.

Python's reader takes a key twice and half of a surrogate pair, and raises one of several errors at long integers and
deep nesting. NaN, which it takes too, is left to the reader's check of the value.

Time is linear in the text. Memory is at most 40 times the text (a list of empty objects takes 30 times), unless the
reader says how many values there may be: these are counted before any is made.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from recjax.utils.text import first_repeated

_DEEPEST = 64  # lists and objects inside each other; recjax writes a dozen at most
_STRING = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)  # or without its end


class JsonError(ValueError):
    """Text that is no strict JSON; the message says what is wrong with it.

    Attributes:
      line: where, counted from 1; None if that is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        """An error at `line`."""
        super().__init__(message)
        self.line = line

    def at(self, source: object) -> str:
        """`source`, with the line where that is known: what an error message begins with."""
        return f"{source}" if self.line is None else f"{source}:{self.line}"


def parse(text: str | bytes, most: int | None = None) -> Any:
    """The value that a JSON text (bytes: UTF-8) stands for.

    Args:
      text: what to parse.
      most: that it may hold of lists, objects and commas, which stand between values; None: any number.

    Raises:
      JsonError: not JSON, a key twice in one object, half of a surrogate pair, a number too long to be meant, nested
        deeper than anything that recjax reads, or more values than `most`.
    """
    try:
        plain = text.removeprefix(codecs.BOM_UTF8).decode() if isinstance(text, bytes) else text
        if most is not None and (marks := count_above(plain, ",[{", most)):
            raise JsonError(f"its {marks:,} lists, objects and commas are more than the {most:,} that are read")
        value = json.loads(plain, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise JsonError(f"not valid JSON ({error.msg})", error.lineno) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise JsonError(f"not UTF-8 text ({error.reason})", line) from None
    except RecursionError:
        raise JsonError(_too_deep()) from None
    except JsonError:
        raise
    except ValueError:  # of int(), which refuses thousands of digits
        raise JsonError("not valid JSON: a number has too many digits") from None
    if plain.count("[") + plain.count("{") > _DEEPEST and nested_too_deep(value):
        raise JsonError(_too_deep())
    if "\\u" in plain:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            near = ascii(error.object[max(0, error.start - 40) : error.start + 20])
            raise JsonError(f"half of a surrogate pair, which is no character, in {near}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = first_repeated(name for name, _ in pairs)
        raise JsonError(f"the key {str(twice)[:80]!r} stands twice in one object")
    return made


def count_above(text: str, marks: str, most: int) -> int:
    """Counts these characters in a JSON text outside of its strings; returns 0 if they are at most `most`."""
    if sum(map(text.count, marks)) <= most:
        return 0
    plain = _STRING.sub("", text)
    count = sum(map(plain.count, marks))
    return count if count > most else 0


def nested_too_deep(value: Any) -> bool:
    """Returns whether lists and objects are nested deeper than recjax reads."""
    level = _holders([value])
    for _ in range(_DEEPEST):
        level = [inner for holder in level for inner in _holders(holder)]
        if not level:
            return False
    return True


def _holders(holder: Any) -> list[Any]:
    """Returns the lists and objects in one."""
    values = holder.values() if isinstance(holder, dict) else holder
    return [value for value in values if isinstance(value, (dict, list))]


def _too_deep() -> str:
    return f"lists and objects are nested more than {_DEEPEST} deep"
