"""Values taken out of untrusted JSON: each of the type that it must have, or an error that says where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from recjax.errors import DataError
from recjax.lab.formats.files import load
from recjax.lab.formats.trace import MAX_RANKS
from recjax.utils import strict_json

_MISSING: Any = object()
_LARGEST = 2**63 - 1
MAX_MARKS = 2**26  # lists, objects and commas of a file, which take some 130 bytes of memory each at most


class Fields:
    """An object of a file, and where it stands there."""

    def __init__(self, values: Any, place: str) -> None:
        """Refuses what is no object (DataError)."""
        if not isinstance(values, Mapping):
            raise DataError(f"{place}: {shown(values)} should be an object. The file is damaged, or in another format.")
        self.values, self.place = values, place

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is _MISSING:
            raise DataError(f"{self.place}: there is no {key!r}. The file is damaged, or in another format.")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A text."""
        value = self._get(key, default)
        return value if isinstance(value, str) else self.refuse(key, value, "a text")

    def whole(self, key: str, default: Any = _MISSING) -> int:
        """A whole number from 0 to 2^63 - 1."""
        value = self._get(key, default)
        return value if is_whole(value) else self.refuse(key, value, "a whole number from 0 to 2^63 - 1")

    def maybe_whole(self, key: str) -> int | None:
        """A whole number from 0 on, or None where there is none."""
        return None if self.values.get(key) is None else self.whole(key)

    def wholes(self, key: str, default: Any = _MISSING) -> tuple[int, ...]:
        """A list of whole numbers from 0 on, no more than there may be ranks."""
        value = self._get(key, default)
        if not isinstance(value, (list, tuple)) or len(value) > MAX_RANKS or not all(map(is_whole, value)):
            return self.refuse(key, value, f"a list of at most {MAX_RANKS:,} whole numbers from 0 on")
        return tuple(value)

    def items(self, key: str, default: Any = _MISSING) -> list[Any]:
        """A list of anything."""
        value = self._get(key, default)
        return value if isinstance(value, list) else self.refuse(key, value, "a list")

    def fields(self, key: str) -> Fields:
        """An object within this one."""
        return Fields(self._get(key, _MISSING), f"{self.place}, {key}")

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        """Says what is wrong with a value (DataError)."""
        raise DataError(f"{self.place}: {key} is {shown(value)}, and should be {wanted}.")


def is_whole(value: Any) -> bool:
    """Returns whether it is a whole number from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value <= _LARGEST


def shown(value: Any) -> str:
    """A value in an error message, cut to a readable length."""
    text = repr(value) if not isinstance(value, (list, dict)) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."


def parse(data: bytes, place: str) -> Any:
    """The value that JSON text holds.

    Raises:
      DataError: it is no strict JSON.
    """
    try:
        return strict_json.parse(data, MAX_MARKS)
    except strict_json.JsonError as error:
        raise DataError(f"{error.at(place)}: {error}. The file is damaged, or no trace.") from error


def parse_file(path: Path) -> Any:
    """The value that a trace's file of JSON holds, gzipped or not; DataError if it cannot be read or is none."""
    return parse(load(path), str(path))
