"""Damage to raw files for tests: what must make no difference to a reader, and what it must refuse."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

# Changes to a text file after which it must read the same.
HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "BOM": lambda data: b"\xef\xbb\xbf" + data,
    "no last line end": lambda data: data.removesuffix(b"\n"),
    "all": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n").removesuffix(b"\r\n"),
}


def zipped(file: Path) -> Path:
    """Replaces a file by its gzipped copy."""
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    return packed


def empty(file: Path) -> str:
    """Leaves nothing of the file. Each of these returns what the error must match."""
    file.write_bytes(b"")
    return f"{file.name} is empty"


def cut_gzip(file: Path) -> str:
    """Gzips the file, and cuts the end off."""
    packed = zipped(file)
    packed.write_bytes(packed.read_bytes()[:-7])
    return f"{packed.name} is no complete gzip file"


def no_gzip(file: Path) -> str:
    """Gives the plain file a name in .gz."""
    file.rename(file.with_name(f"{file.name}.gz"))
    return f"{file.name}.gz is no complete gzip file"


def folder(file: Path) -> str:
    """Puts a folder in its place."""
    file.unlink()
    file.mkdir()
    return f"{file.name} is a folder where a file should be"


def missing(file: Path) -> str:
    """Removes it."""
    file.unlink()
    return f"has neither {file.name}"


def extra_field(file: Path) -> str:
    """Adds a comma, a tab, a bar and two colons to the last line: one of them begins a field too many."""
    file.write_bytes(file.read_bytes().removesuffix(b"\n") + b",\t|::\n")
    return rf"{file.name}:{file.read_bytes().count(bytes([10]))}: "


def blank_line(file: Path) -> str:
    """Adds an empty line."""
    file.write_bytes(file.read_bytes() + b"\n")
    return rf"{file.name}:{file.read_bytes().count(bytes([10]))}: "


FATAL = (empty, cut_gzip, no_gzip, folder, missing, extra_field, blank_line)
