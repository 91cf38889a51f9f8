"""Finds the first of several names that stands twice among them, in one pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

_Name = TypeVar("_Name", bound=Hashable)


def first_repeated(names: Iterable[_Name]) -> _Name | None:
    """Returns the first of the names that equals one before it; None where all differ."""
    seen: set[_Name] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
