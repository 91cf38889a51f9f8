"""The code of classes that were defined in the cells of a notebook, which lies in no file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import linecache
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from recjax.config.code_identity import Source
from recjax.settings.values import members

FILE = "notebook.py"  # as which it is kept


def cell_source(cls: type) -> Source | None:
    """The code of a config's class of `__main__`, of the classes that it may hold, and of what they refer to there.

    Returns:
      One file with the definitions, in the order in which they are found, and the values and imports that they name;
      None if the text of a definition with code of its own cannot be had (as after `python -c`).
    """
    main = vars(sys.modules["__main__"])
    found: dict[str, str] = {}  # name -> what defines it
    wanted: list[tuple[str, Any]] = [(each.__qualname__, each) for each in _configs(cls)]
    while wanted:
        name, value = wanted.pop(0)
        if name in found:
            continue
        if not _is_own(value):
            found[name] = _written(name, value)
            continue
        codes = [*_codes(value)]
        definition = next((text for code in codes if (text := _definition(value, code)) is not None), None)
        if definition is None and codes:
            return None
        found[name] = definition or ""  # without code of its own it is fields, which are compared as a config
        names = dict.fromkeys(n.id for n in ast.walk(ast.parse(found[name])) if isinstance(n, ast.Name))
        wanted += [(each, main[each]) for each in names if each in main]
    text = "\n".join(definition for definition in found.values() if definition)
    return Source(FILE, {FILE: (text + "\n").encode("utf-8", "surrogatepass")}) if text else None


def _configs(cls: type) -> list[type]:
    """A config's class and those of its fields, of `__main__`."""
    classes = [cls]
    for each in classes:
        for hint in typing.get_type_hints(each).values():
            inner = [m for m in members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m) and _is_own(m)]
            classes += [m for m in inner if m not in classes]
    return classes


def _is_own(value: object) -> bool:
    return isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"


def _written(name: str, value: object) -> str:
    """A line that says what a name stands for; nothing of values that have no text of their own."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"from {value.__module__} import {value.__qualname__} as {name}"
    return f"{name} = {value!r}" if _is_plain(value) else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, or of the functions of a class that somebody wrote."""
    parts = [value]
    if isinstance(value, type):
        parts = []
        for each in vars(value).values():
            if isinstance(each, property):
                parts += [each.fget, each.fset, each.fdel]
            else:
                parts.append(getattr(each, "__func__", each))
    for part in parts:
        code = getattr(inspect.unwrap(part) if callable(part) else part, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_filename != "<string>":  # of which dataclasses make theirs
            yield code


def _definition(value: Any, code: types.CodeType) -> str | None:
    """The text of the class or function `value` in the cell that holds `code`."""
    text = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == value.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            if first <= code.co_firstlineno <= node.end_lineno:
                return textwrap.dedent("\n".join(text.split("\n")[first - 1 : node.end_lineno]))
    return None
