"""Large text files in pieces of whole lines, at places that depend on nothing but the file's (unzipped) content.

Piece i of a file holds the lines that begin at bytes i * size to (i + 1) * size - 1. So any piece can be read again
alone, and a file gives the same pieces plain and gzipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recjax.data.text.source_files import open_bytes
from recjax.errors import DataError

_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class TextFile:
    """Findings of one look at a whole file.

    Attributes:
      path: the file.
      size: bytes of a piece.
      lines: of the whole file; a last line without an end counts.
      first_lines: number of the first line of every piece, counted from 0.
    """

    path: Path
    size: int
    lines: int
    first_lines: tuple[int, ...]


def scan(path: Path, size: int) -> TextFile:
    """Reads a file from end to end.

    Raises:
      DataError: missing, unreadable, empty, a truncated gzip file, or one that is gzipped against its name.
    """
    first_lines: list[int] = []
    lines, last = 0, b""
    with open_bytes(path) as stream:
        for block in _blocks(stream, 0, size):
            if not first_lines and block.startswith(b"\x1f\x8b"):
                raise DataError(f"{path} is gzipped, but its name does not end in .gz. Rename or unzip it.")
            first_lines.append(lines)
            lines += block.count(b"\n") + (len(first_lines) == 1)  # every line begins after an end, but the first
            last = block[-1:]
    if not first_lines:
        raise DataError(f"{path} is empty. Download or copy it again.")
    return TextFile(path, size, lines - (last == b"\n"), tuple(first_lines))


def pieces(file: TextFile, start: int) -> Iterator[bytes]:
    r"""Piece number `start` and all later ones, as whole lines that end in "\n" (none at all gives b"").

    A byte order mark, Windows line ends and a missing last line end make no difference.

    Raises:
      DataError: the file cannot be read to its end, or a line is longer than a piece.
    """
    with open_bytes(file.path) as stream:
        lines = None
        for index, block in enumerate(_blocks(stream, start, file.size), start):
            if index == 0:
                lines = block.removeprefix(_BOM)
                continue
            cut = block.find(b"\n") + 1
            if cut == 0 and len(block) == file.size:
                raise DataError(
                    f"{file.path}:{file.first_lines[index]}: the line is longer than {file.size} bytes. This is "
                    "no text file of this dataset: check where it comes from."
                )
            if lines is not None:
                yield _normal(lines + block[: cut or len(block)])
            lines = block[cut:] if cut else b""
        if lines is not None:
            yield _normal(lines)


def _blocks(stream: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """Bytes i * size - 1 to (i + 1) * size - 2 for i from `start`: line ends in there begin the lines of piece i."""
    if start:
        stream.seek(start * size - 1)
    block = stream.read(size if start else size - 1)
    while block:
        yield block
        block = stream.read(size)


def _normal(lines: bytes) -> bytes:
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    return lines if not lines or lines.endswith(b"\n") else lines + b"\n"
