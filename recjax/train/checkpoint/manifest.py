"""The manifest of a checkpoint folder: lists its files with their checksums, and finds what has changed since.

    manifest.json     the caller's content, and size and sha256 of every other file
    manifest.sha256   sha256 of manifest.json, in the form that `sha256sum -c manifest.sha256` checks

Storage and file formats may hand back a flipped bit in silence, so that nothing is trusted that
does not match.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from recjax.errors import TrainingError
from recjax.utils import strict_json
from recjax.utils.files import flush_folder, sha256, write_whole

# Formats: a new one when an older recjax could no longer read what is written.
_WHOLE, _IN_PARTS, _INCREMENT = _FORMATS = 1, 2, 3
_MANIFEST, _CHECKSUM = "manifest.json", "manifest.sha256"


class CorruptCheckpointError(Exception):
    """A folder differs from what was written; the message names the file and the difference."""


Files = dict[str, dict[str, Any]]  # path -> size and checksum


def flush(folder: Path, known: Files | None = None) -> Files:
    """Flushes every file in `folder` to the disk, and returns size and checksum of each.

    Args:
      folder: the folder.
      known: files that have been flushed already, which are not read again.

    Raises:
      OSError: the disk is full or refuses.
    """
    files = dict(known or {})
    for name in _files_in(folder):
        if name in files:
            continue
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            files[name] = {
                "bytes": os.fstat(file.fileno()).st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    for parent, _, _ in os.walk(folder, onerror=_raise):
        flush_folder(Path(parent))
    return files


def seal(folder: Path, content: dict[str, Any], known: Files | None = None) -> str:
    """Flushes every file in `folder` to the disk and writes the manifest beside them.

    Returns:
      sha256 of manifest.json.

    Args:
      folder: holds the files, and no manifest yet.
      content: JSON values to keep in the manifest; `format` and `files` are added.
      known: files that others have flushed.

    Raises:
      OSError, TrainingError: the disk is full or refuses.
    """
    files = flush(folder, known)
    form = _INCREMENT if "chain" in content else _IN_PARTS if "parts" in content else _WHOLE
    text = json.dumps({"format": form, **content, "files": files}, indent=1).encode() + b"\n"
    write_whole(folder / _MANIFEST, text)
    write_whole(folder / _CHECKSUM, _checksum_line(text))
    flush_folder(folder)
    return hashlib.sha256(text).hexdigest()


def sha256_of(folder: Path) -> str:
    """Returns sha256 of manifest.json; "" if it cannot be read."""
    with contextlib.suppress(OSError, CorruptCheckpointError):
        return hashlib.sha256(_read(folder / _MANIFEST)).hexdigest()
    return ""


def verify(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Reads every byte in `folder`, and returns the manifest's content if all is as it was written.

    Args:
      folder: the folder.
      share: (i, n) reads the i-th of every n files only, and of the others looks at the size; see `checkpoints.py`.

    Raises:
      CorruptCheckpointError: the manifest is missing or altered; or a file is missing, altered, or not in the manifest.
      PermissionError: something cannot be read by this user, which is no damage.
      TrainingError: it is of another format, which is no damage either.
    """
    files = _files_in(folder)
    for name in (_MANIFEST, _CHECKSUM):
        if name not in files:
            raise CorruptCheckpointError(f"{name} is missing")
    text = _read(folder / _MANIFEST)
    if _read(folder / _CHECKSUM) != _checksum_line(text):
        raise CorruptCheckpointError(f"{_MANIFEST} does not match the checksum in {_CHECKSUM}")
    content = _parsed(text)
    if content["format"] not in _FORMATS:
        raise TrainingError(
            f"checkpoint {folder} has format {content['format']}, but this version of recjax reads {_FORMATS[0]} to "
            f"{_FORMATS[-1]}. Use the version that wrote it, or start again with another --out."
        )
    expected: Files = content.pop("files")
    found = set(files) - {_MANIFEST, _CHECKSUM}
    problems = [f"{name} is missing" for name in sorted(set(expected) - found)]
    problems += [f"{name} is not in the manifest" for name in sorted(found - set(expected))]
    for name in sorted(found & set(expected)):
        size, right_size = _size(folder / name), expected[name]["bytes"]
        if size < right_size:
            problems.append(f"{name} is truncated: it has {size:,} of {right_size:,} bytes")
        elif size > right_size:
            problems.append(f"{name} has {size:,} bytes instead of {right_size:,}")
    if not problems:  # only now read what may be hundreds of gigabytes
        for name in sorted(found)[share[0] :: share[1]]:
            with _reading(folder / name):
                same = sha256(folder / name) == expected[name]["sha256"]
            if not same:
                problems.append(f"{name} is altered: its sha256 differs from the manifest's")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CorruptCheckpointError("; ".join(problems[:3]) + more)
    return content


def _parsed(text: bytes) -> dict[str, Any]:
    """Parses a manifest and checks the types of all that is used here; `CorruptCheckpointError` if one is wrong."""
    try:
        content = strict_json.parse(text)
    except strict_json.JsonError as error:
        raise CorruptCheckpointError(f"{error.at(_MANIFEST)}: {error}") from None
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CorruptCheckpointError(f"{_MANIFEST} is no manifest of a checkpoint")
    files = content.get("files")
    if content["format"] not in _FORMATS:
        return content
    if not isinstance(files, dict):
        raise CorruptCheckpointError(f"{_MANIFEST} lists no files")
    kinds = {"bytes": int, "sha256": str}
    for name, what in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CorruptCheckpointError(f"{_MANIFEST} lists {name!r}, which lies outside the checkpoint")
        if not isinstance(what, dict) or any(type(what.get(key)) is not kind for key, kind in kinds.items()):
            raise CorruptCheckpointError(f"{_MANIFEST} does not say the size and checksum of {name!r}")
    return content


def _size(path: Path) -> int:
    """Returns the bytes of a regular file; a pipe may wait forever, a link lead off (`CorruptCheckpointError`)."""
    with _reading(path):
        found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{path.name} is no regular file")
    return found.st_size


def peek(folder: Path) -> dict[str, Any]:
    """Reads the manifest's content without verifying it; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, CorruptCheckpointError):
        content = strict_json.parse(_read(folder / _MANIFEST))
        return content if isinstance(content, dict) else {}
    return {}


def _files_in(folder: Path) -> list[str]:
    """Lists the paths of all files below `folder`, relative to it, sorted."""
    paths = (Path(parent) / name for parent, _, names in os.walk(folder, onerror=_raise) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _checksum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {_MANIFEST}\n".encode()


def _read(path: Path) -> bytes:
    _size(path)
    with _reading(path):
        return path.read_bytes()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise
    except OSError as error:  # such as a bad sector
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def _raise(error: OSError) -> None:
    raise error
