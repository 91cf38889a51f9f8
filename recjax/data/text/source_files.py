"""Opening the files of a dataset: what cannot be read is refused with its name and what to do about it."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from recjax.errors import DataError
from recjax.utils import files
from recjax.utils.paths import is_remote, place, unreachable


def require_source(kind: str, source: str | os.PathLike[str] | None) -> Path:
    """The place of the raw files of a dataset that does not ship with recjax.

    Raises:
      DataError: none is given.
    """
    if source is None:
        raise DataError(f"{kind} does not ship with recjax. Give the place of its files with --from PATH.")
    return place(source)


def find_file(folder: Path, *names: str) -> Path:
    """The first of the files `names` that `folder` has, each also looked for gzipped as `name.gz`.

    Raises:
      DataError: it has none of them.
    """
    wanted = [end for name in names for end in (name, f"{name}.gz")]
    for file in (folder / name for name in wanted):
        if file.is_dir():
            raise DataError(f"{file} is a folder where a file should be. Give the dataset's own folder with --from.")
        if file.exists():
            if not file.is_file():  # a pipe, say, over which a reader would wait for ever
                raise DataError(f"{file} is no regular file. Give the dataset's own folder with --from.")
            return file
    state = f"has neither {' nor '.join(wanted)}" if folder.is_dir() else "is not a folder"
    raise DataError(f"{folder} {state}. Give the folder that holds the dataset's files with --from.")


@contextlib.contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if its name ends in .gz, as an open stream.

    Raises:
      DataError: missing, unreadable, or truncated, also while the stream is read; the message says what to do.
    """
    try:
        with contextlib.ExitStack() as stack:
            stream: Any = stack.enter_context(file.open("rb"))
            if file.suffix == ".gz":
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged_gzip(file, error) from None
    except OSError as error:
        raise unreadable(file, error) from None


def read_bytes(file: Path, *, first_line: bool = False) -> bytes:
    """The content of a file without its UTF-8 byte order mark, unpacked if its name ends in .gz.

    Args:
      file: the file.
      first_line: only what stands before the first line end (at most 1 MiB of it).

    Raises:
      DataError: missing, unreadable, truncated or empty.
    """
    with open_bytes(file) as stream:
        data = stream.readline(2**20) if first_line else stream.read()
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip(b"\r\n"):
        raise DataError(f"{file} is empty. Download or copy it again.")
    return data


def whole_lines(file: Path, size: int, if_empty: str, longest: float = math.inf) -> Iterator[tuple[int, bytes]]:
    r"""Yields (number of the first line, from 1; whole lines, each ended by "\n"), some `size` bytes at a time.

    A byte order mark, Windows line ends and a missing last line end make no difference.

    Args:
      file: the file, unpacked if its name ends in .gz.
      size: bytes that are read at once.
      if_empty: what to do where the file is empty, a sentence.
      longest: bytes that a line may have.

    Raises:
      DataError: missing, unreadable, truncated or empty, or a line is longer.
    """
    line, rest, begun = 1, b"", False
    with open_bytes(file) as stream:
        while block := stream.read(size):
            if not begun:
                block, begun = block.removeprefix(b"\xef\xbb\xbf"), True
            text = rest + block
            cut = text.rfind(b"\n") + 1
            whole, rest = text[:cut], text[cut:]
            whole = whole.replace(b"\r\n", b"\n") if b"\r" in whole else whole
            if len(rest) > longest:
                at = line + whole.count(b"\n")
                raise DataError(
                    f"{file}:{at}: the line is longer than {longest} bytes. This is no file of "
                    "JSON lines: check where it comes from."
                )
            if whole:
                yield line, whole
                line += whole.count(b"\n")
    if rest:
        yield line, rest.removesuffix(b"\r") + b"\n"
    elif line == 1:
        raise DataError(f"{file} is empty. {if_empty}")


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal.

    Raises:
      DataError: it cannot be read.
    """
    try:
        return files.sha256(file)
    except OSError as error:
        raise unreadable(file, error) from None


def damaged_gzip(file: Path, error: Exception) -> DataError:
    """The error for a file that gzip cannot unpack."""
    return DataError(f"{file} is no complete gzip file ({error}). Download or copy it again.")


def unreadable(file: Path, error: OSError) -> DataError:
    """The error for a file that the system does not hand out."""
    if is_remote(file) and not isinstance(error, FileNotFoundError):
        return unreachable(file, error)
    if isinstance(error, FileNotFoundError):
        return DataError(f"{file} does not exist. Give the folder that holds the dataset's files with --from.")
    return DataError(f"{file} cannot be read ({error.strerror or error}). Check its permissions and the disk.")
