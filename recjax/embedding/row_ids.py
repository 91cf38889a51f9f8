"""Files that name rows of a table: what a plan's row set may be kept in."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from recjax.errors import ConfigError
from recjax.utils import npy


def read_ids(name: str, folder: Path, place: str) -> tuple[list[int], str]:
    """Reads the ids in a file: text with one id a line, or a .npy file of integers [K].

    A plan may come from somebody else, and so may name any file: only one inside the plan's folder is read, and no
    message repeats what is in it.

    Args:
      name: the file's path, relative to `folder`.
      folder: that of the plan file.
      place: what names the file, for messages.

    Returns:
      The ids in the order of the file, and the SHA-256 of its bytes, in hex.

    Raises:
      ConfigError: the path leads out of the folder, there is no such file, or something else is in it.
    """
    remedy = "Give a text file with one id a line, or a .npy file of integers, in the folder of the plan file or below."
    if not _stays_inside(name, folder):
        raise ConfigError(
            f"{place}: the ids in {name!r} are not read: that does not stay inside the plan file's folder. {remedy}"
        )
    path = folder / name
    try:
        if path.exists() and not path.is_file():  # a pipe, say, over which it would wait forever
            raise _NoIds("it is no regular file")
        content = path.read_bytes()
        ids = _from_npy(content) if path.suffix == ".npy" else _from_text(content)
    except (OSError, _NoIds) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{place}: the ids in {path} cannot be read: {why}. {remedy}") from error
    return ids, hashlib.sha256(content).hexdigest()


def _stays_inside(name: str, folder: Path) -> bool:
    """Returns whether a relative path leads to something in a folder or below, also by way of links."""
    if "\0" in name or name.startswith(("/", "~")) or ".." in Path(name).parts:
        return False
    try:
        real, around = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return around in (real, *real.parents)


class _NoIds(ValueError):
    """Says why a file holds no ids, without a word of what is in it."""


def _from_npy(content: bytes) -> list[int]:
    if not content.startswith(np.lib.format.MAGIC_PREFIX):  # NumPy would advise to load it as a pickle
        raise _NoIds("it is a file of another kind")
    try:
        with npy.without_warnings():
            array = np.load(io.BytesIO(content), allow_pickle=False)
    except (*npy.UNREADABLE, OverflowError, TypeError):
        raise _NoIds("NumPy cannot read it as an array of numbers") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _NoIds("it holds no one-dimensional array of integers")
    return array.tolist()


def _from_text(content: bytes) -> list[int]:
    lines = [line.strip(" \t") for line in content.decode("ascii", "replace").splitlines()]
    for number, line in enumerate(lines, 1):
        if not line.isdigit() or len(line) > 30:  # which int() would not take, or for too long
            raise _NoIds(f"line {number} is no id")
    return [int(line) for line in lines]
