"""Reading text files strictly: what cannot be read is refused with file, line and column, never skipped."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from recjax.errors import DataError


def find(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, or its gzipped copy `name.gz`; DataError if there is neither."""
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    state = f"has neither {name} nor {name}.gz" if folder.is_dir() else "is not a folder"
    raise DataError(f"{folder} {state}. Give the folder that holds the dataset's files with --from.")


@contextlib.contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if its name ends in .gz, as an open stream.

    Raises:
      DataError: missing, unreadable, or truncated, also while the stream is read; the message says what to do.
    """
    try:
        opened: Any = gzip.open(file) if file.suffix == ".gz" else file.open("rb")
        with opened as stream:
            yield stream
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Give the folder that holds the dataset's files with --from.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is no complete gzip file ({error}). Download or copy it again.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}). Check its permissions and the disk.") from None


def read_lines(file: Path) -> list[str]:
    r"""The lines of a UTF-8 text file, gzipped if its name ends in .gz.

    A byte order mark, Windows line ends and a missing last line end make no difference. Only "\n" ends a line:
    other characters that Unicode calls line ends may be part of a title.

    Raises:
      DataError: missing, unreadable, truncated, empty, or not UTF-8; the message says where and what to do.
    """
    with open_bytes(file) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{file}:{line}: byte {column} of the line (0x{data[error.start]:02x}) is not UTF-8 text. "
            "Convert the file to UTF-8, for example with iconv, or download it again."
        ) from None
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if lines == [""]:
        raise DataError(f"{file} is empty. Download or copy it again.")
    return lines
