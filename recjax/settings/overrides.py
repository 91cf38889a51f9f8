"""Overrides, lossless JSON, difference and hash for any frozen config dataclass.

A config is a frozen dataclass whose fields are bool, int, float, str, Literal, `tuple[X, ...]` of those,
`X | None`, or another such dataclass. A field that is one choice among several is a union of dataclasses, each
with a `ClassVar[str]` called `kind`: `model: DLRMConfig | DCNv2Config` is chosen by `model=dcnv2`, and its own
fields are then set by `model.dim=16`. To choose the kind that stands there already changes nothing; another kind
comes with its class's defaults. A field that maps names to dataclasses is a `Named` (see `values.py`).

Nothing here knows which configs exist. Every mistake is a ConfigError that names the dotted key
(`train.batch_size`), the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from fnmatch import translate
from typing import Any, TypeVar

from recjax.errors import ConfigError
from recjax.settings.tree import Node, annotations_of, build, checked, classes_of, defaults_of, join, take_apart
from recjax.settings.values import (
    WrongTypeError,
    either,
    entry_class,
    example,
    expected,
    kind,
    parse,
    same_word,
    split_name,
    written,
)
from recjax.utils import strict_json

T = TypeVar("T")
_SHORT = {"lr": "learning_rate", "bs": "batch_size", "wd": "weight_decay"}  # what others write -> its name here
_TOLD = 4  # mistakes beside the first that one error tells


def override(config: T, assignments: Sequence[str]) -> T:
    """A copy of `config` with values replaced.

    The choice of a nested config acts before the settings inside it, wherever it stands; otherwise assignments act in
    order. The new config is checked once, after the last: two settings that must change together need no order.

    Args:
      config: a config dataclass.
      assignments: texts "dotted.key=value". Values are read by the field's type: `true` or `false`; integers also
        as 1e6 or 1_000_000; `none` where allowed; tuples as 512,256,64 (of integers also 512-256-64; nothing is
        the empty tuple); and as Python would write them (see `values.parse`). A nested config is replaced by the
        defaults of the class whose `kind` is given, unless it is of that class already: then it stays as it is.

    Raises:
      ConfigError: no "=", an unknown key, a value of the wrong type, or a check of the config that fails.
    """
    root = take_apart(config)
    errors: dict[str, ConfigError] = {}  # by key
    # A choice has fewer dots than the settings inside it; sorting is stable.
    for assignment in sorted(assignments, key=lambda assignment: assignment.partition("=")[0].count(".")):
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            lacks = "no '='" if not equals else "nothing before its '='"
            raise ConfigError(
                f"{assignment!r} is not an override: it has {lacks}. Write KEY=VALUE, without spaces around the '='."
            )
        try:
            _assign(root, key, text)
        except ConfigError as error:
            if not any(key.startswith(f"{wrong}.") for wrong in errors):  # which may be wrong for that alone
                errors[key] = error
    if errors:
        first, *others = errors.values()
        if others:
            more = f" And {len(others) - _TOLD} more." if len(others) > _TOLD else ""
            raise ConfigError(" ".join([f"{first} Also:", *map(str, others[:_TOLD])]) + more)
        raise first
    return typing.cast(T, build(root))


def to_json(config: object) -> str:
    """The config as indented JSON that `from_json` reads back to an equal config.

    A dataclass with a `kind` stores it beside its fields; floats are written so that they read back exactly.

    Raises:
      ConfigError: a value does not fit its annotation (Python itself does not check).
    """
    return json.dumps(_to_plain(take_apart(config)), indent=2, allow_nan=False) + "\n"


def from_json(cls: type[T], text: str, source: str = "config JSON") -> T:
    """The config of class `cls` that `to_json` wrote, now or before a field existed: a missing key takes its default.

    Args:
      cls: class of the outermost config.
      text: the JSON.
      source: where the text comes from, for error messages; usually the file's path.

    Raises:
      ConfigError: broken JSON, an unknown or repeated key, a missing one that has no default (a `kind` has none), a
        value of the wrong type, or a check of the config that fails.
    """
    try:
        return typing.cast(T, build(_from_plain(cls, strict_json.parse(text), "")))
    except strict_json.JsonError as error:
        raise ConfigError(
            f"{error.at(source)}: {error}. The file may be damaged or cut short: restore it, or write it again from "
            "the preset: `recjax show PRESET a.b=value --json`."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def flatten(config: object) -> dict[str, Any]:
    """All values by dotted key, in the order of the fields.

    A nested config with a `kind` gives that under its own key, before its fields: {"model": "dlrm", "model.dim":
    16}; these are the keys that `override` takes. The `kind` of the outermost config, which no override can
    change, stands under "kind".

    Raises:
      ConfigError: a value does not fit its annotation.
    """
    return dict(_walk(take_apart(config)))


def diff(a: object, b: object) -> list[tuple[str, object, object]]:
    """(dotted key, value in a, value in b) wherever the flattened configs differ; None where a key is absent.

    Raises:
      ConfigError: a value does not fit its annotation.
    """
    flat_a, flat_b = flatten(a), flatten(b)
    absent = object()
    return [
        (key, flat_a.get(key), flat_b.get(key))
        for key in dict.fromkeys((*flat_a, *flat_b))
        if flat_a.get(key, absent) != flat_b.get(key, absent)
    ]


def config_hash(config: object, ignore: Collection[str] = ()) -> str:
    """12 hexadecimal digits that are the same for equal configs, in every process and Python version.

    Only what differs from the defaults counts, so a field that is added later, with a default that changes nothing,
    leaves the hashes of old configs alone. A nested config counts by its differences from the one that stands there by
    default or, where it is of another class, by its `kind` and the differences from its class's own defaults.

    Args:
      config: a config dataclass.
      ignore: dotted keys that do not count, as for `matches`.

    Raises:
      ConfigError: a value does not fit its annotation.
    """
    node = take_apart(config)
    tag = kind(node.cls)
    changed = ({} if tag is None else {"kind": tag}) | _changed(node, defaults_of(node.cls), frozenset(ignore))
    canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


def assignments(config: object) -> list[str]:
    """The overrides "a.b=value" that make the default config of its class this one: what `config_hash` counts.

    Raises:
      ConfigError: a value does not fit its annotation.
    """

    def walk(changed: dict[str, Any], key: str) -> Iterator[str]:
        for name, value in changed.items():
            path = key if name == "kind" else join(key, name)
            if isinstance(value, dict):
                yield from walk(value, path)
            else:
                yield f"{path}={written(value)}"

    node = take_apart(config)
    return list(walk(_changed(node, defaults_of(node.cls), ()), ""))


def matches(key: str, names: Collection[str]) -> bool:
    """Returns whether `names` has the key or a group of it: "mesh" has "mesh.devices"; a "*" stands for any text."""
    return bool(names) and _pattern(frozenset(names)).match(key) is not None


@functools.lru_cache(maxsize=256)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    """One expression for all names: each key of a config is looked for among them with every hash."""
    return re.compile("|".join(translate(pattern) for name in sorted(names) for pattern in (name, name + ".*")))


def named_keys(config: object) -> list[str]:
    """The keys that can be set for any name, which stands as NAME in them: "tables.NAME.dim"."""
    return [key for key in _keys(take_apart(config)) if ".NAME." in key]


# Trees as keys, as differences and as JSON.


def _walk(node: Node, key: str = "", entry: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf value or kind); of an entry of a Named only what is set."""
    if (tag := kind(node.cls)) is not None:
        yield key or "kind", tag
    for name, value in node.values.items():
        if isinstance(value, Node):
            yield from _walk(value, join(key, name), entry_class(node.cls) is not None)
        elif value is not None or not entry:
            yield join(key, name), value


def _changed(node: Node, defaults: dict[str, Any], ignore: Collection[str], key: str = "") -> dict[str, Any]:
    """Values that differ from `defaults` (name -> leaf or Node), as nested dicts that JSON can store."""
    changed = {}
    if (entry := entry_class(node.cls)) is not None:
        defaults = dict.fromkeys(node.values, take_apart(entry()))
    for name, value in node.values.items():
        path, default = join(key, name), defaults.get(name, dataclasses.MISSING)
        if matches(path, ignore):
            continue
        if not isinstance(value, Node):
            # As JSON, because True == 1 == 1.0 in Python.
            if default is dataclasses.MISSING or isinstance(default, Node) or json.dumps(value) != json.dumps(default):
                changed[name] = value
        elif isinstance(default, Node) and default.cls is value.cls:
            if inner := _changed(value, default.values, ignore, path):
                changed[name] = inner
        else:
            tag = kind(value.cls)
            inner = _changed(value, defaults_of(value.cls), ignore, path)
            changed[name] = inner if tag is None else {"kind": tag} | inner
    return changed


def _to_plain(node: Node) -> dict[str, Any]:
    """The node as what JSON can store."""
    tag = kind(node.cls)
    values = {name: _to_plain(v) if isinstance(v, Node) else v for name, v in node.values.items()}
    return values if tag is None else {"kind": tag} | values


def _from_plain(cls: type, plain: Any, key: str) -> Node:
    """The inverse of `_to_plain`: `plain` must be a config of class `cls`."""
    place = key or "the outermost object"
    if not isinstance(plain, dict):
        raise ConfigError(f"{place} is {json.dumps(plain)}; expected an object with the keys of {cls.__name__}.")
    tag = kind(cls)
    names = [*annotations_of(cls)] if tag is None else ["kind", *annotations_of(cls)]
    defaults = defaults_of(cls)
    for problem, wrong in (
        ("has unknown keys", [name for name in plain if name not in names]),
        ("lacks the keys", [name for name in names if name not in plain and name not in defaults]),
    ):
        if wrong:
            raise ConfigError(
                f"{place} {problem} {', '.join(join(key, name) for name in wrong)}. The keys of {cls.__name__} are "
                f"{', '.join(names)}. The file was edited, or comes from another version of recjax: write it again "
                "from the preset."
            )
    if tag is not None and plain["kind"] != tag:
        raise ConfigError(f"{join(key, 'kind')} is {json.dumps(plain['kind'])}; expected {tag!r}.")
    node = Node(cls, {})
    for name, annotation in annotations_of(cls).items():
        if name not in plain:
            node.values[name] = defaults[name]
            continue
        value, path = plain[name], join(key, name)
        classes = classes_of(annotation)
        if isinstance(value, dict) and len(classes) > 1:
            classes = [choice for choice in classes if kind(choice) == value.get("kind")]
        if isinstance(value, dict) and (entry := entry_class(annotation)) is not None:
            entries = {each: _from_plain(entry, inner, join(path, each)) for each, inner in value.items()}
            node.values[name] = Node(annotation, entries)
        elif isinstance(value, dict) and classes:
            node.values[name] = _from_plain(classes[0], value, path)
        else:
            written = json.dumps(value)
            node.values[name] = checked(tuple(value) if isinstance(value, list) else value, annotation, path, written)
    return node


# Overrides.


def _assign(root: Node, key: str, text: str) -> None:
    """Sets one value inside `root`; ConfigError if the key is unknown or the text does not fit."""
    node: Any = root
    parts = key.split(".")
    while len(parts) > 1 and isinstance(node, Node):
        if (entry := entry_class(node.cls)) is None:
            node = node.values.get(parts.pop(0))
        else:
            name, parts = split_name(parts, entry)
            node = node.values.setdefault(name, take_apart(entry()))
    leaf = parts[0]
    annotation = node.fields().get(leaf, entry_class(node.cls)) if isinstance(node, Node) else None
    if annotation is None:
        raise ConfigError(_unknown_key(root, key))
    for choice in classes_of(annotation):
        if (tag := kind(choice)) is not None and same_word(text, tag):
            present = node.values.get(leaf)
            if not isinstance(present, Node) or present.cls is not choice:
                node.values[leaf] = take_apart(choice(), key)
            return
        # A field called `kind` is set by the name of its group, too: JSON does not tell it from what chooses a class.
        words = typing.get_args(annotations_of(choice).get("kind"))
        if any(same_word(text, word) for word in words if isinstance(word, str)):
            _assign(root, f"{key}.kind", text)
            return
    try:
        node.values[leaf] = parse(text, annotation)
    except WrongTypeError:
        if (sample := example(annotation)) is None:
            entry = entry_class(annotation)
            group, cls = (key, classes_of(annotation)[0]) if entry is None else (key + ".NAME", entry)
            inner = ", ".join(join(group, name) for name in annotations_of(cls))
            raise ConfigError(f"{key}={text}: {key} is a group of settings. Set one of them: {inner}.") from None
        present = node.values.get(leaf)  # a number of the right size, where there is one
        shown = written(present) if present and type(present) in (int, float) else sample
        raise ConfigError(
            f"{key}={text}: expected {expected(annotation)}, not {text!r}. Write for example {key}={shown}."
        ) from None


def _unknown_key(root: Node, key: str) -> str:
    """The message for a key that does not exist: where it would exist, or else the nearest keys that do."""
    if choices := [assignment for known, assignment in _by_kind(root) if known == key]:
        return f"unknown key {key!r}: it exists only with {either(choices)}. Give that too."
    if len(key) > 200:  # to compare it with all keys would take minutes
        return f"unknown key {key[:80]!r}... of {len(key):,} characters. `recjax show PRESET` prints all keys."
    leaf = key.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        pairs = ((key, candidate), (leaf, candidate.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    if leaf in _SHORT:
        close = [known for known in _keys(root) if known.rpartition(".")[2] == _SHORT[leaf] and "NAME" not in known][:3]
    else:
        close = sorted((known for known in _keys(root) if likeness(known) >= 0.6), key=likeness, reverse=True)[:3]
    nearest = f"Did you mean {either(close)}?" if close else f"At the top stand {', '.join(root.values)}."
    return f"unknown key {key!r}. {nearest} `recjax show PRESET` prints all keys."


def _keys(node: Node, key: str = "") -> Iterator[str]:
    """Yields every key that can be set: all leaves, and the nested configs that are chosen by kind."""
    for name, annotation in node.fields().items():
        path, value = join(key, name), node.values[name]
        if example(annotation) is not None:
            yield path
        if isinstance(value, Node):
            yield from _keys(value, path)
        if (entry := entry_class(annotation)) is not None:
            yield from _keys(take_apart(entry()), join(path, "NAME"))


def _by_kind(node: Node, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, assignment that makes it exist) for the fields of every kind that can be chosen."""
    for name, annotation in node.fields().items():
        path, value = join(key, name), node.values[name]
        for choice in classes_of(annotation):
            if kind(choice) is not None:
                yield from ((join(path, field), f"{path}={kind(choice)}") for field in annotations_of(choice))
        if isinstance(value, Node):
            yield from _by_kind(value, path)
