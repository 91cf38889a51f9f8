"""Turns overrides as Python has them, dicts and keywords, into the texts "dotted.key=value" of the command line.

texts("seed=1", {"train": {"epochs": 2}}, mesh={"devices": 4})   # seed=1, train.epochs=2, mesh.devices=4
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from recjax.errors import ConfigError
from recjax.settings import items
from recjax.settings.tree import key_of

_FORMS = '"train.epochs=2", {"train.epochs": 2}, {"train": {"epochs": 2}}, or lists of these'
PRESET_OR_DATA = (
    'A preset says what is trained: recjax.prepare(table, label="clicked", out=FOLDER), then recjax.load("table", '
    '{"data.path": FOLDER}), trains on a table of your own; see docs/guides/own_data.md.'
)


def texts(*overrides: Any, **settings: Any) -> list[str]:
    """Returns overrides as texts, in their order.

    Args:
      *overrides: texts "dotted.key=value"; mappings from dotted keys, or from parts of them to further mappings; or
        iterables of these.
      **settings: one more such mapping.

    Raises:
      ConfigError: something else, or a value that no setting can have.
    """
    found: list[str] = []
    for given in (*overrides, settings):
        if isinstance(given, str):
            found.append(given)
        elif isinstance(given, Mapping) and not hasattr(given, "shape"):
            for key, value in given.items():
                found += _assignments(key, value)
        elif isinstance(given, Iterable) and not hasattr(given, "shape"):
            found += texts(*given)
        else:
            raise ConfigError(f"{short(given)} is no override. Give {_FORMS}.")
    return found


def _assignments(key: Any, value: Any) -> Iterator[str]:
    if not isinstance(key, str) or not key:
        raise ConfigError(f"{short(key)} is no key of a setting. Give {_FORMS}.")
    if isinstance(value, Mapping) and not hasattr(value, "shape"):
        kind = {name: text for name, text in value.items() if name == "kind"}  # as `recjax show --json` has it
        for text in kind.values():
            yield f"{key}={_written(text, key)}"
        for name, inner in value.items():
            if name not in kind:
                yield from _assignments(f"{key}.{name}" if isinstance(name, str) else name, inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {key_of(field.name): getattr(value, field.name) for field in dataclasses.fields(value)}
        yield from _assignments(key, {"kind": getattr(value, "kind", None), **fields} if _kind(value) else fields)
    else:
        yield f"{key}={_written(value, key)}"


def _kind(config: Any) -> bool:
    return isinstance(getattr(type(config), "kind", None), str)


def _written(value: Any, key: str) -> str:
    """Returns the text that a setting reads back to the same value: floats with as many digits as that needs."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy or JAX scalar
        value = value.item()
    if hasattr(value, "tolist") and len(getattr(value, "shape", ())) == 1:
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, range)):
        parts = [_written(item, key) for item in value]
        if "" not in parts and all(items.split(part, ",") == [part] for part in parts):
            return ",".join(parts)
    own_data = ""
    if key.split(".")[0] == "data":
        own_data = (
            " A table of one's own is written once, by recjax.prepare(table, label=..., out=FOLDER), and named by its "
            "folder: data=table data.path=FOLDER; see docs/guides/own_data.md."
        )
    raise ConfigError(
        f"{key} is {short(value)}, which no setting can be: give a number, text, true or false, None, or a list of "
        f"these.{own_data}"
    )


def short(thing: object) -> str:
    """Describes an object in an error message: by its text if that is short, else by its type and shape."""
    text = " ".join(repr(thing).split()) if isinstance(thing, (str, int, float, bool, list, tuple, type(None))) else ""
    if 0 < len(text) <= 80:
        return text
    name, shape = type(thing).__name__, getattr(thing, "shape", None)
    return f"a {name}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) else "")


def require_config(config: object, cls: type, what: str) -> None:
    """Checks that the function called `what` was given a config of this class; ConfigError if not."""
    if not isinstance(config, cls):
        raise ConfigError(
            f"{what} needs a config, not {short(config)}. Make one with recjax.load(PRESET, ...). {PRESET_OR_DATA}"
        )


_EXPLAINED: set[type] = set()


def explain_frozen(config: Any) -> None:
    """Makes an assignment to a field of this config, or of one inside it, raise an error that says how to change it."""
    if isinstance(config, Mapping):
        for inner in config.values():
            explain_frozen(inner)
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return
    if type(config) not in _EXPLAINED:
        _EXPLAINED.add(type(config))
        type(config).__setattr__ = _refuse  # type: ignore[method-assign]  # of a frozen dataclass, which refuses too
    for field in dataclasses.fields(config):
        explain_frozen(getattr(config, field.name))


def _refuse(config: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(
        f"cannot assign to {name!r}: a config is never changed, a changed copy is made of it: config = "
        'recjax.override(config, {"train.epochs": 2}), or recjax.load(PRESET, {"train.epochs": 2}) from the start.'
    )
