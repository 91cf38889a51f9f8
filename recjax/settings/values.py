"""The values that a config field can hold: checking them, reading them from text, describing them.

A field's annotation is bool, int, float, str, Literal, `tuple[X, ...]` of those, or a union of these with None;
nested configs are the business of `overrides.py`. Nothing is evaluated: the annotation decides how text is read.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from recjax.errors import ConfigError
from recjax.settings import items

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


# type -> (what is expected, a text that is one).
_LEAVES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("an integer", "1000"),
    float: ("a finite number", "0.01"),
    str: ("text", "name"),
    types.NoneType: ("none", "none"),
}


class WrongTypeError(ValueError):
    """A value does not fit its annotation. It carries no message: only the caller knows the key."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def kind(cls: Any) -> str | None:
    """The tag by which `cls` is chosen if it is a dataclass that has one: a ClassVar, not a field, called `kind`."""
    if not dataclasses.is_dataclass(cls):
        return None
    is_field = any(field.name == "kind" for field in dataclasses.fields(cls))
    return None if is_field else getattr(cls, "kind", None)


def fit(value: Any, annotation: Any) -> Any:
    """The value as a field of this annotation stores it.

    Types must be the annotated ones exactly (True is no integer); only an integer in a float field is converted.
    Negative zero becomes zero, so that equal values are also written equally.

    Raises:
      WrongTypeError: the value does not fit.
    """
    for member in members(annotation):
        try:
            return _fit_one(value, member)
        except WrongTypeError:
            continue
    raise WrongTypeError


def parse(text: str, annotation: Any) -> Any:
    """The value that `text` stands for in a field of this annotation.

    What Python would write is understood too, where it can mean nothing else: True, None, [32, 1] or (32, 1), a word in
    quotes (which a field of any text keeps), one of several words in another case. The items of a list are separated
    as `items.split` has it, and items of text stay as they are written.

    Raises:
      ConfigError: a double quote in a list is not closed.
      WrongTypeError: it stands for none.
    """
    # `str` takes every text, so in a union it is asked last.
    for member in sorted(members(annotation), key=lambda member: member is str):
        try:
            return _parse_one(text if member is str else _unquoted(text), member)
        except WrongTypeError:
            continue
    raise WrongTypeError


def same_word(text: str, word: str) -> bool:
    """Returns whether `text` means `word`, one of several choices: case, quotes, `-` and `_` do not count."""
    return _folded(_unquoted(text)) == _folded(word)


def expected(annotation: Any) -> str:
    """Describes the values that fit, for an error message."""
    words = []
    for member in members(annotation):
        if typing.get_origin(member) is Literal:
            words += [str(option) for option in typing.get_args(member)]
        elif typing.get_origin(member) is tuple:
            words.append(f"a list, each item {expected(typing.get_args(member)[0])}")
        elif dataclasses.is_dataclass(member):
            words.append(kind(member) or "a group of settings")
        elif entry_class(member) is not None:
            words.append("settings by name")
        else:
            words.append(_LEAVES[member][0])
    return either(list(dict.fromkeys(words)))  # where "none" is also one of a Literal's texts, it comes twice


def example(annotation: Any) -> str | None:
    """A text that `parse` takes, or the kind of a nested config; None for a nested config without one, or a Named."""
    member = members(annotation)[0]
    if typing.get_origin(member) is Literal:
        return str(typing.get_args(member)[0])
    if typing.get_origin(member) is tuple:
        item = typing.get_args(member)[0]
        words = typing.get_args(item)[:2] if typing.get_origin(item) is Literal else [example(item)] * 2
        return "512-256-64" if item is int else ",".join(map(str, words))
    return _LEAVES[member][1] if member in _LEAVES else kind(member)


def written(value: Any) -> str:
    """The text of an override that gives this value: what `parse` reads back to it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(written(item) for item in value)
    return "none" if value is None else str(value)


def check_ranges(config: object, **ranges: tuple[float, float | None]) -> None:
    """Refuses fields of a config whose values are out of range; of a tuple each value counts, and None is never wrong.

    Args:
      config: the config.
      ranges: field -> (least, most) that it may be; a most of None sets no bound.

    Raises:
      ConfigError: naming the field, the value and the range.
    """
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not least <= each <= (math.inf if most is None else most):
                wanted = f"at least {least}" if most is None else f"{least} to {most}"
                raise ConfigError(f"{name} is {each}; it must be {wanted}.")


def either(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)


def _fit_one(value: Any, member: Any) -> Any:
    """`fit` for one member of a union."""
    if typing.get_origin(member) is Literal:
        if any(type(value) is type(option) and value == option for option in typing.get_args(member)):
            return value
    elif typing.get_origin(member) is tuple:
        if type(value) is tuple:
            return tuple(fit(item, typing.get_args(member)[0]) for item in value)
    elif member not in _LEAVES and not dataclasses.is_dataclass(member) and entry_class(member) is None:
        raise TypeError(f"a config field cannot be of type {member}")
    elif member is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            raise WrongTypeError from None
        if math.isfinite(number) and number == value:
            return number or 0.0
    elif type(value) is member:
        return value
    raise WrongTypeError


def _parse_one(text: str, member: Any) -> Any:
    """`parse` for one member of a union."""
    if typing.get_origin(member) is Literal:
        for option in typing.get_args(member):
            if same_word(text, str(option)):
                return option
    elif typing.get_origin(member) is tuple:
        item = typing.get_args(member)[0]
        if text[:1] + text[-1:] in ("[]", "()"):
            parts = items.split(text[1:-1].strip().removesuffix(","), ",")
            return tuple(parse(_unquoted(part.strip()), item) for part in parts) if parts != [""] else ()
        parts = re.split(r"(?<=\d)-", text) if item is int and "," not in text else items.split(text, ",")
        return tuple(parse(part, item) for part in parts) if text else ()
    elif member is bool and text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    elif member is types.NoneType and text in ("none", "None"):
        return None
    elif member is int:
        return _parse_int(text)
    elif member is float:
        try:
            return fit(float(text), float)
        except ValueError:
            raise WrongTypeError from None
    elif member is str:
        return text
    raise WrongTypeError


def _unquoted(text: str) -> str:
    """The text within a pair of quotes, or the text."""
    if items.is_quoted(text):
        return items.unquote(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text


def _folded(word: str) -> str:
    return word.casefold().replace("-", "").replace("_", "")


def _parse_int(text: str) -> int:
    """The integer that `text` writes exactly, as in 12, 1_000 or 1e6."""
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise WrongTypeError from None
    # The bound keeps 1e999999999 from becoming a number of a billion digits; 64-bit seeds still fit.
    if not number.is_finite() or number.adjusted() > 20 or number != number.to_integral_value():
        raise WrongTypeError
    return int(number)
