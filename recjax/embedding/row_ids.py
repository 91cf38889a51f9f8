"""Files that name rows of a table: what a plan's row set may be kept in."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from recjax.errors import ConfigError
from recjax.utils import npy
from recjax.utils.paths import expanded


def read_ids(name: str, folder: Path, place: str) -> tuple[list[int], str]:
    """Reads the ids in a file: text with one id a line, or a .npy file of integers [K].

    Args:
      name: the file's path, relative to `folder`.
      folder: that of the plan file.
      place: what names the file, for messages.

    Returns:
      The ids in the order of the file, and the SHA-256 of its bytes, in hex.

    Raises:
      ConfigError: no such file, or something else in it.
    """
    path = folder / expanded(name)
    try:
        if path.exists() and not path.is_file():  # a pipe, say, over which it would wait forever
            raise ValueError("it is no regular file")
        content = path.read_bytes()
        ids = _from_npy(content) if path.suffix == ".npy" else _from_text(content)
    except (*npy.UNREADABLE, OverflowError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{place}: the ids in {path} cannot be read: {why}. Give a text file with one id a line, or a .npy file "
            "of integers; its path is relative to the plan file."
        ) from error
    return ids, hashlib.sha256(content).hexdigest()


def _from_npy(content: bytes) -> list[int]:
    if not content.startswith(np.lib.format.MAGIC_PREFIX):  # NumPy would advise to load it as a pickle
        raise ValueError("it is a file of another kind")
    array = np.load(io.BytesIO(content), allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("it holds no one-dimensional array of integers")
    return array.tolist()


def _from_text(content: bytes) -> list[int]:
    lines = content.decode("ascii").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip().isdigit() or len(line) > 30:  # which int() would not take, or for too long
            raise ValueError(f"line {number} is {line[:30]!r}, no id")
    return [int(line) for line in lines]
