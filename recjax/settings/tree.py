"""A config dataclass taken apart into a tree, so that all its values change before any of them is checked."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import typing
from typing import Any

from recjax.errors import ConfigError
from recjax.settings.values import Named, WrongTypeError, entry_class, expected, fit, members
from recjax.utils.text import holds_secret, masked


@dataclasses.dataclass
class Node:
    """A config taken apart, so that all changes are made before the checks of any `__post_init__` run.

    Attributes:
      cls: the dataclass to build again, or Named[X].
      values: key of a field -> leaf value, or Node for a nested config.
    """

    cls: Any
    values: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """Key of a field (of a Named: name of an entry) -> annotation."""
        entry = entry_class(self.cls)
        return annotations_of(self.cls) if entry is None else dict.fromkeys(self.values, entry)


def key_of(field: str) -> str:
    """The key of a field: its name; `from` for `from_`, which Python could not write as a name."""
    return field[:-1] if field.endswith("_") and keyword.iskeyword(field[:-1]) else field


def field_of(key: str) -> str:
    """The inverse of `key_of`."""
    return f"{key}_" if keyword.iskeyword(key) else key


@functools.cache
def annotations_of(cls: Any) -> dict[str, Any]:
    """Key of a field -> resolved annotation, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    return {key_of(field.name): hints[field.name] for field in dataclasses.fields(cls) if field.init}


def defaults_of(cls: Any) -> dict[str, Any]:
    """Key of a field -> its default, a leaf value or Node; fields that have none are left out."""
    values = {}
    for field in dataclasses.fields(cls):
        if field.init and field.default is not dataclasses.MISSING:
            values[key_of(field.name)] = field.default
        elif field.init and field.default_factory is not dataclasses.MISSING:
            values[key_of(field.name)] = field.default_factory()
    annotations = annotations_of(cls)
    return {name: _opened(value, annotations[name], name) for name, value in values.items()}


def classes_of(annotation: Any) -> list[type]:
    """The config classes that the annotation allows."""
    return [member for member in members(annotation) if isinstance(member, type) and dataclasses.is_dataclass(member)]


def take_apart(config: object, key: str = "") -> Node:
    """Takes a config apart; ConfigError if a value does not fit its annotation."""
    node = Node(type(config), {})
    for name, annotation in annotations_of(node.cls).items():
        node.values[name] = _opened(getattr(config, field_of(name)), annotation, join(key, name))
    return node


def _opened(value: Any, annotation: Any, path: str) -> Any:
    """The value of one field as a Node keeps it."""
    if type(value) in classes_of(annotation):
        return take_apart(value, path)
    if type(value) is Named and (entry := entry_class(annotation)) is not None:
        return Node(annotation, {name: _opened(each, entry, join(path, name)) for name, each in value.items()})
    return checked(value, annotation, path, repr(value))


def checked(value: Any, annotation: Any, path: str, written: str) -> Any:
    """`fit`, with a ConfigError that names the key; `written` is the value as its source writes it."""
    if isinstance(value, str) and holds_secret(value):
        raise ConfigError(
            f"{path} is {masked(value)}, which holds a credential: settings are printed and kept in run folders. Give "
            "the path alone, and the credential as the storage's own tools expect it (an environment variable, a file)."
        )
    try:
        return fit(value, annotation)
    except WrongTypeError:
        raise ConfigError(f"{path} is {written}; expected {expected(annotation)}. Correct the value.") from None


def build(node: Node, key: str = "") -> object:
    """Builds the config, innermost first, so that a failing check is reported with the config's own path."""
    values = {name: build(v, join(key, name)) if isinstance(v, Node) else v for name, v in node.values.items()}
    try:
        if entry_class(node.cls) is not None:
            return Named(values)
        return node.cls(**{field_of(name): value for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def join(key: str, name: str) -> str:
    """The dotted key of `name` inside `key`."""
    return f"{key}.{name}" if key else name
