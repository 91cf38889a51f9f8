"""Paths as users write them, here or in object storage, and folders whose names other libraries cannot take."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from pathlib import Path, PurePosixPath
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.utils.text import holds_secret, masked

_BELOW_BYTES = 256  # of the longest name below a run folder: an array's file in an unfinished checkpoint, with room


def expanded(path: str | os.PathLike[str]) -> Path:
    """A user's path with its `~`: relative if it was, and safe to be expanded once more, or passed on to a command.

    Raises:
      ConfigError: a `~name` of nobody, a NUL character, or bytes that are no UTF-8.
    """
    text = os.fspath(path)
    _check(text)
    if not text.startswith("~"):
        plain = Path(text)  # which takes ./~ for ~
        return plain if not str(plain).startswith(("~", "-")) else _working_folder(plain) / plain
    home = os.path.expanduser(text)
    if home.startswith("~"):
        raise ConfigError(
            f"{text}: there is no home folder of {text.partition('/')[0]}. Write ./{text} for a folder of that name "
            "here, or give the whole path."
        )
    return Path(home)


def out_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a user names to be written, existing or new: as `expanded` gives it.

    Raises:
      ConfigError: as for `expanded`, or it is a file, or would be below one.
    """
    found = expanded(path)
    if file := next((part for part in (found, *found.parents) if part.is_file()), None):
        raise ConfigError(f"--out {found}: {file} is a file. Name a folder, existing or new.")
    return found


def located(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a user's, without links and `..`, as the system resolves them now.

    It stays what it is when the process goes to another folder, or somebody lets a link point elsewhere.

    Raises:
      ConfigError: as for `expanded`, or the working folder is gone.
    """
    found = expanded(path)
    real = os.path.realpath(found if found.is_absolute() else _working_folder(found) / found)
    _check(real)
    return Path(real)


def _working_folder(wanted: Path) -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError(f"{wanted}: the working folder is gone. Go to one that exists.") from error


def _check(path: str) -> None:
    """Refuses what no file has as its name, and what no JSON, no message and few libraries can hold."""
    if "\0" in path:
        raise ConfigError(f"the path {path!r} holds a NUL character, which no system takes. Leave it out.")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the path {ascii(path)} is no UTF-8: see its character {error.start + 1}. Rename that file or folder, or "
            "choose another."
        ) from None


def run_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a run to train, which is located and leaves room for the names below it.

    Raises:
      ConfigError: as for `located`, or the path is too long.
    """
    found = located(path)
    most = os.pathconf("/", "PC_PATH_MAX") - _BELOW_BYTES
    if len(os.fsencode(found)) > most:
        raise ConfigError(
            f"--out {str(found)[:80]}... is a path of {len(os.fsencode(found)):,} bytes; a run folder's may have "
            f"{most:,}, so that the system takes the names of the files below. Choose a shorter one."
        )
    return found


class Plain(contextlib.AbstractContextManager["Plain"]):
    """A folder under a name without special characters, as long as this object lives: /proc/self/fd/7.

    Orbax globs the folder that it writes to, and loses all arrays where a name in its path has brackets; TensorStore
    refuses `..`, and both refuse names that are no UTF-8.

    Attributes:
      path: that name; of a system without /proc, the folder's own.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder that exists.

        Raises:
          OSError: it does not, or may not be searched.
        """
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._close = weakref.finalize(self, os.close, handle)
        self.path = Path(f"/proc/self/fd/{handle}")
        if not self.path.is_dir():
            self.path = located(folder)

    def __exit__(self, *_: object) -> None:
        """Closes the folder, whose name is another's from here on."""
        self._close()


SCHEMES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}  # and the package that reads them
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL."""
    return _URL.match(os.fspath(path)) is not None


def place(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, located; a URL as an `epath.Path`, which is used in the same way.

    Raises:
      ConfigError: a URL of another kind, or one that holds a credential; or as for `located`.
    """
    text = os.fspath(path)
    found = _URL.match(text)
    if found is None:
        return located(path)
    if holds_secret(text):
        raise ConfigError(
            f"{masked(text)} holds a credential, which would end in logs and run folders. Give the path alone, and the "
            "credential as the storage's own tools expect it (an environment variable, a file in your home folder)."
        )
    if found[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{text} is not a place that recjax can read. Give a folder, or one of {known}.")
    from etils import epath  # not needed for the files of this machine

    made: Any = epath.Path(text)
    return made


def unreachable(path: object, error: BaseException) -> DataError:
    """The error for a place of object storage that cannot be read or written."""
    scheme = str(path).partition("://")[0]
    if isinstance(error, ImportError):
        package = SCHEMES.get(scheme, "fsspec")
        advice = f"Install what reads {scheme}://: pip install -c constraints.txt -e '.[remote]', or {package} alone."
    else:
        advice = "Check the name, the network and your credentials (not in the path: in the environment)."
    reason = masked(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return DataError(f"{masked(str(path))} cannot be reached ({reason}). {advice}")


def escapes(name: str) -> bool:
    """Returns whether `name`, of a file in an archive or a manifest, would lie outside of the folder meant for it."""
    path = PurePosixPath(name)
    return not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or "://" in name
