"""Files that are either whole or not there, and what to say when the disk refuses them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recjax.errors import TrainingError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON; a reader sees the old file or the whole new one, never a part.

    Args:
      path: the file, in a folder that exists.
      value: dicts with string keys, lists, tuples, strings, numbers (NumPy and JAX scalars too),
        booleans and None. A number that is not finite is written as null, for JSON has no other way.

    Raises:
      TrainingError: the disk is full or refuses; the old file, if any, is untouched.
    """
    write_whole(path, (json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replaces `path` by `data` in one instant: written beside it, flushed to the disk, then renamed.

    See `replacing` on symbolic links.

    Raises:
      TrainingError: the disk is full or refuses; the old file, if any, is untouched.
    """
    try:
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(path.parent)
    except OSError as error:
        raise disk_error(path, error, len(data)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` to write a file to; it takes the place of `path` at the end, and goes at an error.

    A symbolic link is itself replaced: whoever made the folder may have pointed it at any file of this user. Pass a
    file that the user names through `paths.located`; then a link of his stays, and what it points to is replaced.
    """
    # This thread's number, which is the process's in the main thread: two threads may write the same file.
    unfinished = path.with_name(f".{path.name}.unfinished-{threading.get_native_id()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """The size ("bytes") and "sha256" of every file below a folder, by its path relative to that, sorted."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {f.relative_to(folder).as_posix(): {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}


def flush_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut; a file's own fsync does not cover its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def jsonable(value: object) -> object:
    """`value` with array scalars as Python numbers, tuples as lists, and non-finite numbers as None."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if callable(item := getattr(value, "item", None)):
        value = item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def disk_error(path: Path, error: OSError, needed_bytes: int, *, resumes: bool = False) -> TrainingError:
    """The paragraph for a user whose disk refused to write `path`, with a remedy for the common causes.

    Args:
      path: of the file or folder.
      error: what the system said.
      needed_bytes: that were to be written.
      resumes: whether a training writes it, which goes on from its newest checkpoint.
    """
    reason = error.strerror or str(error)
    if error.errno in _NO_PERMISSION:
        return TrainingError(
            f"cannot write {path}: {reason}. Make the folder writable for this user (uid {os.geteuid()}), or choose "
            "another one with --out."
        )
    sizes = f"it needs {needed_bytes:,} bytes"
    with contextlib.suppress(OSError):
        existing = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
        sizes += f", and {shutil.disk_usage(existing).free:,} are free there"
    if error.errno in _NO_SPACE:
        remedy = "Free some space (or raise the quota or `ulimit -f`), or write to a larger disk"
    else:
        remedy = "Check the disk and its mount"
    more = ": a run resumes from its newest complete checkpoint" if resumes else ""
    return TrainingError(f"cannot write {path}: {reason}; {sizes}. {remedy}, and start the same command again{more}.")
