"""Places of data: a folder of this machine, or one of object storage (gs://, s3://, az://, hf://).

Object storage is read and written through etils.epath, which leaves it to fsspec and its gcsfs, s3fs, adlfs or
huggingface_hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from recjax.errors import ConfigError, DataError
from recjax.utils.paths import located
from recjax.utils.redact import holds_secret, masked

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
