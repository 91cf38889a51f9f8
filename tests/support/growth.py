"""Good files of a reader made larger in every place where they can grow: more lines, a longer line, list or object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.fuzz_target import Target

Grow = Callable[[Path, int], object]  # makes the files of a folder have about so many bytes
_Change = Callable[[str, int], str]  # the text of a file, larger

_MOST = 10**6  # bytes of a file that is looked at
_OF_OTHERS = ("dataset_info.json", "features.json")  # which TFDS reads


def ways(target: Target, folder: Path) -> Iterator[tuple[str, Grow]]:
    """(name, what grows it) of a reader whose good files are in the folder; one file grows at a time."""
    if target.grow:
        yield "rows", target.grow
    seen: set[tuple[str, str]] = set()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if "\0" in text or len(data) > _MOST or file.name in _OF_OTHERS:
            continue
        name = str(file.relative_to(folder))
        for way, change in _changes(file.suffix, text):
            if (alike := (re.sub("[0-9]+", "", name), way)) not in seen:  # files of several ranks are alike
                seen.add(alike)
                yield f"{name}, {way}", _grow(name, change)


def _grow(name: str, change: _Change) -> Grow:
    return lambda folder, size: (folder / name).write_text(change((folder / name).read_text(), size))


def _changes(suffix: str, text: str) -> Iterator[tuple[str, _Change]]:
    match suffix:
        case ".json" if _is_json(text):
            yield "a key twice", _key_twice
            yield from _json_changes(text)
        case ".json" | ".jsonl":
            yield "lines", _more_lines(0)
            yield from _json_changes(text.partition("\n")[0])
        case ".toml":
            yield "list", _longer_list
            yield "keys", _more_keys
            yield "line", _longer_line
        case _:
            yield "lines", _more_lines(1)
            yield "line", _longer_line


def _more_lines(head: int) -> _Change:
    """Repeats all lines but the first ones."""

    def change(text: str, size: int) -> str:
        lines = text.splitlines(keepends=True)
        body = "".join(lines[head:]) or "x\n"
        return "".join(lines[:head]) + body * (size // len(body) + 1)

    return change


def _longer_line(text: str, size: int) -> str:
    """Repeats the text of the second line within it, or of the only one."""
    lines = text.splitlines(keepends=True) or ["x"]
    number = min(1, len(lines) - 1)
    line = lines[number].rstrip("\n") or "x"
    lines[number] = line * (size // len(line) + 1) + "\n"
    return "".join(lines)


def _longer_list(text: str, size: int) -> str:
    numbers = ", ".join(map(str, range(size // 7)))
    return re.sub(r"\[[0-9][^\]]*\]", f"[{numbers}]", text, count=1)


def _more_keys(text: str, size: int) -> str:
    return text + "".join(f'"a.k{number}" = [1]\n' for number in range(size // 16))


def _is_json(text: str) -> bool:
    """Whether the whole is a value, and no value a line."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _key_twice(text: str, size: int) -> str:
    """An object of ever more keys, the last of which stands there twice, in the place of the whole."""
    keys = "".join(f'"k{number}": 1, ' for number in range(size // 13))
    return f'{{{keys}"twice": 1, "twice": 1}}'


def _json_changes(text: str) -> Iterator[tuple[str, _Change]]:
    """Every list and object of a JSON value grows, of those that are alike one: same keys, or lists of one name."""
    seen: set[Any] = set()
    for path, place in _places(json.loads(text), ()):
        name = next((step for step in reversed(path) if isinstance(step, str)), "")
        if (alike := (*place,) if isinstance(place, dict) and place else (type(place), name)) not in seen:
            seen.add(alike)
            yield "/".join(map(str, path)) or "all of it", _larger_json(path)


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (dict, list)):
        yield path, value
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, key))


def _larger_json(path: tuple[Any, ...]) -> _Change:
    def change(text: str, size: int) -> str:
        try:
            root, rest = json.loads(text), ""
        except ValueError:  # one of several lines
            first, _, rest = text.partition("\n")
            root, rest = json.loads(first), f"\n{rest}"
        place = root
        for step in path:
            place = place[step]
        one = len(json.dumps(place)) + 8
        if isinstance(place, list):
            place.extend((place or [1]) * (size // one + 1))
        else:
            items = list(place.items()) or [("x", 1)]
            place.update({f"{key}{number}": value for number in range(size // one + 1) for key, value in items})
        return json.dumps(root) + rest

    return change
