"""JSON from files that anybody may have written: what is wrong with it is said in one way, and nothing is guessed.

Python's reader takes a key twice and half of a surrogate pair, and raises one of several errors at long integers and
deep nesting. NaN, which it takes too, is left to the reader's check of the value.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

_DEEPEST = 64  # lists and objects inside each other; recjax writes a dozen at most


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


def parse(text: str | bytes) -> Any:
    """The value that a JSON text (bytes: UTF-8) stands for.

    Raises:
      JsonError: not JSON, a key twice in one object, half of a surrogate pair, a number too long to be meant, or nested
        deeper than anything that recjax reads.
    """
    try:
        plain = text.removeprefix(codecs.BOM_UTF8).decode() if isinstance(text, bytes) else text
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
    if plain.count("[") + plain.count("{") > _DEEPEST and _depth_exceeds(value):
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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the key {twice[:80]!r} stands twice in one object")
    return made


def _depth_exceeds(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
        level = [item for item in inside if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _too_deep() -> str:
    return f"lists and objects are nested more than {_DEEPEST} deep"
