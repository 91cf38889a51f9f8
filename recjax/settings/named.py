"""Settings by name: a config field of type `Named[X]` maps names to configs of class X.

    tables: Named[TableConfig] = Named()        the field
    tables=Named({"C3": TableConfig(dim=64)})   in Python
    embedding.tables.C3.dim=64                  as an override: the first one for a name makes its entry

Every field of X defaults to None, which means "not set here". So an entry that sets nothing is the same as none, and
what is not set is neither shown nor compared.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from recjax.errors import ConfigError

T = TypeVar("T")


class Named(Mapping[str, T]):
    """Configs by name: immutable, hashable, sorted by name, without entries that set nothing.

    A name has no "=" and no empty part between its dots. In `tables.C3.linear.optimizer.eps` it ends before the first
    part, after its own first, that is a field of X; so its further parts must not be called like one.
    """

    def __init__(self, entries: Mapping[str, T] | None = None) -> None:
        """Takes what a dict holds.

        Raises:
          ConfigError: a name that no override could write.
        """
        self._entries = {name: entry for name, entry in sorted((entries or {}).items()) if entry != type(entry)()}
        for name, entry in self._entries.items():
            first, *further = name.split(".")
            fields = {field.name for field in dataclasses.fields(typing.cast(Any, entry))}
            if "=" in name or not all((first, *further)) or fields & {*further}:
                raise ConfigError(
                    f"{name!r} cannot be a name here: it needs text without '=', with no empty part between dots, and "
                    f"with none of {', '.join(sorted(fields))} after a dot. Rename it in the data."
                )

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __repr__(self) -> str:
        return f"Named({self._entries!r})"


def entry_class(annotation: Any) -> Any:
    """X if the annotation is Named[X], else None."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Named else None


def split_name(parts: Sequence[str], entry: type) -> tuple[str, list[str]]:
    """The name at the start of the parts (two or more) of a dotted key, and the parts after it: at least one."""
    fields = {field.name for field in dataclasses.fields(typing.cast(Any, entry))}
    end = next((i for i in range(1, len(parts)) if parts[i] in fields), len(parts) - 1)
    return ".".join(parts[:end]), list(parts[end:])
