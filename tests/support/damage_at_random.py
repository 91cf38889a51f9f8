"""One change to a file as an accident, or an attacker, might make it: to its bytes, its JSON, or the file itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

_BYTES = (
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x8d\xb0", b'"', b"\\", b"\n", b"\r", b"\r\n", b"\t", b",", b"::", b"|",
    b"\x1f", b"\x1f\x8b", b"\xef\xbb\xbf", b"-", b"NaN", b"Infinity", b"1e999", b"null", b"{}", b"[]", b"}", b"{", b"]",
    b"=", b"9" * 30, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"[" * 100_000, b"x" * 70_000, b"../../x",
    b"/etc/passwd", b"true", b"\\ud800", b"\\u0000", b"0x10", b"1_000", "\u0661".encode(), b" ", b"",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"), "", "x", "../x", "/etc/x", "\ud800",
    "\0", "NaN", "9" * 5000, "x" * 10_000, [], {}, [[]], {"a": 1}, [None], [1, "x"], "auto", [2**62, 2**62],
    [[4096, 2**40]], [[1, 1]] * 3,
)  # fmt: skip


def replace(file: Path, rng: Random, pipes: bool) -> None:
    """Puts something else in the place of a file."""
    file.unlink()
    match rng.randrange(6):
        case 0:
            file.mkdir()
        case 1:
            file.symlink_to(file.name)
        case 2:
            file.symlink_to("/proc/nowhere")  # where nobody can make a file, by writing through the link
        case 3:
            file.symlink_to(file.parent)
        case 4 if pipes:
            os.mkfifo(file)


def changed(data: bytes, rng: Random) -> bytes:
    """The bytes with one change."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 5, 50, 1000)))
    match rng.randrange(7):
        case 0 if data:  # a bit
            flipped = bytearray(data)
            flipped[at - 1] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 1:  # cut short
            return data[:at]
        case 2:  # something left out
            return data[:at] + data[end:]
        case 3:  # twice
            return data[:end] + data[at:]
        case 4:  # some bytes of another place
            other = rng.randrange(len(data) + 1)
            return data[:at] + data[other : other + end - at] + data[end:]
        case 5:  # in the place of something
            return data[:at] + rng.choice(_BYTES) + data[end:]
    return data[:at] + rng.choice(_BYTES) + data[at:]


def change_json(file: Path, rng: Random) -> None:
    """Changes a value, a key, or the nesting somewhere in JSON."""
    lines = file.read_text("utf-8", "replace").splitlines(keepends=True)
    number = rng.randrange(len(lines)) if file.suffix == ".jsonl" and lines else None
    try:
        root = json.loads("".join(lines) if number is None else lines[number])
    except (ValueError, RecursionError):
        return
    holders: list[tuple[Any, Any]] = [([root], 0)]
    for holder, key in holders:
        inner = holder[key]
        if isinstance(inner, (dict, list)):
            holders += [(inner, each) for each in (inner if isinstance(inner, dict) else range(len(inner)))]
    holder, key = rng.choice(holders)
    value: Any = rng.choice(VALUES)
    if isinstance(value, (list, dict)) and rng.random() < 0.2:
        for _ in range(rng.choice((50, 90, 400))):
            value = [value]
    match rng.randrange(5):
        case 0 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "kind", "../x", "\ud800", "files", "rows"))] = holder.pop(key)
        case 1 if isinstance(holder, dict):
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.insert(key, value)
        case _:
            holder[key] = value
            if not isinstance(holder, dict) and len(holder) == 1 and holders[0][0] is holder:
                root = value
    made = json.dumps(root)
    file.write_text(made if number is None else "".join([*lines[:number], made + "\n", *lines[number + 1 :]]))
