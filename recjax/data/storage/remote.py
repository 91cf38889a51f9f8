"""Prepared data on object storage, read through a folder of this machine.

ArrayRecord wants files that it can map. So a file of blocks (some hundred megabytes) is copied to the cache folder when
its first block is asked for, whole, and kept only if it has the checksum of the manifest; what a process does not read
is never copied. Vocabularies and the description are copied when the data are opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recjax.data.storage.manifest import MANIFEST
from recjax.errors import DataError, TrainingError
from recjax.utils.files import replacing
from recjax.utils.locks import locked
from recjax.utils.paths import located, unreachable

_BLOCK_FILE = ".array_record-"
_COPY_BYTES = 1 << 22


def cache_folder() -> Path:
    """The folder for what recjax can make again: $RECJAX_CACHE, else $XDG_CACHE_HOME/recjax, else ~/.cache/recjax.

    Raises:
      TrainingError: there is no home folder.
    """
    if chosen := os.environ.get("RECJAX_CACHE"):
        return located(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recjax"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise TrainingError(
            "there is no home folder to keep prepared data in. Set RECJAX_CACHE to a folder where you may write."
        ) from error


def block_files(files: Mapping[str, Any], split: str) -> list[str]:
    """The manifest's `files` that hold the blocks of a split, in their order."""
    return sorted(name for name in files if f"-{split}{_BLOCK_FILE}" in name)


@dataclasses.dataclass(frozen=True)
class Cached:
    """Copies of the files of prepared data that lie elsewhere.

    Attributes:
      remote: the folder there.
      local: the folder here; its manifest lists what is copied in any case.
      files: name -> `bytes` and `sha256` of every file there.
    """

    remote: Path
    local: Path
    files: Mapping[str, Mapping[str, Any]]
    _whole: set[str] = dataclasses.field(default_factory=set)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def fetch(self, name: str) -> Path:
        """The copy of a file, made if need be; safe to call from several threads and processes.

        Raises:
          DataError: the file cannot be reached, or is not what the manifest says.
          TrainingError: the cache folder cannot be written.
        """
        copy = self.local / name
        if name in self._whole and copy.is_file():  # another process may have dropped it
            return copy
        with self._lock:
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                with locked(copy.with_name(f".{copy.name}.lock")):
                    if not (copy.is_file() and copy.stat().st_size == self.files[name]["bytes"]):
                        self._copy(name, copy)
            except OSError as error:
                raise TrainingError(
                    f"cannot write {copy}: {error.strerror or error}. Make space, or name another cache with "
                    "data.cache=DIR."
                ) from error
            self._whole.add(name)
        return copy

    def drop(self, name: str) -> None:
        """Removes the copy of a file; whoever asks for the file again has another made."""
        self._whole.discard(name)
        (self.local / name).unlink(missing_ok=True)

    def _copy(self, name: str, copy: Path) -> None:
        digest = hashlib.sha256()
        source = self.remote / name
        with replacing(copy) as unfinished, unfinished.open("wb") as to:
            for part in _parts(source):
                digest.update(part)
                to.write(part)
            if digest.hexdigest() != self.files[name]["sha256"]:
                raise DataError(
                    f"prepared data are damaged: {source} is not what {MANIFEST} says. Copy it there again, or prepare "
                    "the data again."
                )


def into_cache(remote: Path, manifest: dict[str, Any], cache: str) -> Cached:
    """Copies what describes prepared data.

    Args:
      remote: their folder on object storage.
      manifest: of that folder, checked.
      cache: a folder of this machine; empty for the usual one.

    Raises:
      DataError, TrainingError: see `Cached.fetch`.
    """
    local = (located(cache) if cache else cache_folder() / "remote") / manifest["fingerprint"][:16]
    cached = Cached(remote, local.absolute(), manifest["files"])
    described = {name: entry for name, entry in manifest["files"].items() if _BLOCK_FILE not in name}
    # The same blocks may have been prepared with other vocabularies or options: their descriptions must not be mixed.
    about = hashlib.sha256(json.dumps([manifest["about"], described], sort_keys=True).encode()).hexdigest()[:8]
    cached = dataclasses.replace(cached, local=cached.local.with_name(f"{cached.local.name}-{about}"))
    for name in described:
        cached.fetch(name)
    try:
        text = json.dumps(manifest | {"files": described}, indent=1)
        file = cached.local / MANIFEST
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            unfinished.write_text(text, "utf-8")
    except OSError as error:
        raise TrainingError(
            f"cannot write {cached.local}: {error.strerror}. Make space, or name another cache with data.cache=DIR."
        ) from error
    return cached


def _parts(source: Path) -> Any:
    """The bytes of a remote file, some megabytes at a time; DataError if it cannot be reached."""
    try:
        with source.open("rb") as stream:
            while part := stream.read(_COPY_BYTES):
                yield part
    except Exception as error:  # object storage raises many kinds
        raise unreachable(source, error) from None


def put_folder(folder: Path, remote: Path, last: str) -> None:
    """Copies the files below `folder` to object storage, `last` (a file there) when all others are.

    Raises:
      DataError: the place cannot be reached.
    """
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    try:
        for name in [*(name for name in names if name != last), last]:
            target = remote / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("rb") as source, target.open("wb") as to:
                shutil.copyfileobj(source, to, _COPY_BYTES)
    except Exception as error:  # object storage raises many kinds
        raise unreachable(remote, error) from None
