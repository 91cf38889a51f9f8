"""Good files of a reader made larger in every place where they can grow: more lines, a longer line, list or object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Grow = Callable[[int], None]  # makes the files have about so many bytes

_MOST = 10**6  # bytes of a file that is looked at


def ways(folder: Path) -> Iterator[tuple[str, Grow]]:
    """(name, what grows it) for the good files of a folder, one file at a time."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if "\0" in text or len(data) > _MOST:
            continue
        name = str(file.relative_to(folder))
        match file.suffix:
            case ".json":
                yield from _json_ways(file, name, text, "")
            case ".jsonl":
                yield f"{name}, lines", _lines(file, text, 0)
                first, _, rest = text.partition("\n")
                yield from _json_ways(file, name, first, "\n" + rest)
            case ".toml":
                yield f"{name}, a list", lambda size, file=file, text=text: _toml_list(file, text, size)
                yield f"{name}, keys", lambda size, file=file, text=text: _toml_keys(file, text, size)
                yield f"{name}, a line", _line(file, text)
            case _:
                yield f"{name}, lines", _lines(file, text, 1)
                yield f"{name}, a line", _line(file, text)


def _lines(file: Path, text: str, head: int) -> Grow:
    """Repeats all lines but the first ones."""

    def grow(size: int) -> None:
        lines = text.splitlines(keepends=True)
        body = "".join(lines[head:]) or "x\n"
        file.write_text("".join(lines[:head]) + body * (size // len(body) + 1))

    return grow


def _line(file: Path, text: str) -> Grow:
    """Repeats the text of the second line within it, or of the only one."""

    def grow(size: int) -> None:
        lines = text.splitlines(keepends=True) or ["x"]
        number = min(1, len(lines) - 1)
        line = lines[number].rstrip("\n") or "x"
        lines[number] = line * (size // len(line) + 1) + "\n"
        file.write_text("".join(lines))

    return grow


def _toml_list(file: Path, text: str, size: int) -> None:
    numbers = ", ".join(map(str, range(size // 7)))
    file.write_text(re.sub(r"\[[0-9][^\]]*\]", f"[{numbers}]", text, count=1))


def _toml_keys(file: Path, text: str, size: int) -> None:
    file.write_text(text + "".join(f'"a.k{number}" = [1]\n' for number in range(size // 16)))


def _json_ways(file: Path, name: str, text: str, rest: str) -> Iterator[tuple[str, Grow]]:
    """Every list and object of a JSON value grows, of those in like places one, and every kind of text."""
    seen: set[str] = set()
    for path in _paths(json.loads(text), ()):
        shape = "/".join("*" if isinstance(step, int) else step for step in path)
        if shape not in seen:
            seen.add(shape)
            yield f"{name}, {shape or 'all'}", _json(file, text, rest, path)


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (dict, list)):
        yield path
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*path, key))


def _json(file: Path, text: str, rest: str, path: tuple[Any, ...]) -> Grow:
    def grow(size: int) -> None:
        root = json.loads(text)
        place = root
        for step in path:
            place = place[step]
        one = len(json.dumps(place)) + 8
        if isinstance(place, list):
            place.extend((place or [1]) * (size // one + 1))
        else:
            items = list(place.items()) or [("x", 1)]
            place.update({f"{key}{number}": value for number in range(size // one + 1) for key, value in items})
        file.write_text(json.dumps(root) + rest)

    return grow
