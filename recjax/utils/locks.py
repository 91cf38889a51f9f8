"""Locks between processes and threads, on files and folders; each ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[str]:
    """Opens a lock file, made in place of a symbolic link, which would lead elsewhere, or of a pipe, which waits."""
    if path.is_symlink() or path.is_fifo():
        path.unlink()
    return path.open("w")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until nobody else holds the lock `path`, a file that is made."""
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # The empty file stays: removing it could let two processes hold "the" lock.


def try_lock(file: IO[str]) -> bool:
    """Locks an open file until it is closed; returns False where somebody else holds its lock.

    Raises:
      OSError: its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock `path`, as far as can be seen; nothing is made or written."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[Callable[[], bool]]:
    """Waits until nobody else holds the folder `path`, which is made; gives a function: is it still at that name?

    The lock is on the folder itself, which may be renamed or removed under it.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # removed meanwhile
            continue

        def in_place(handle: int = handle) -> bool:
            try:
                return os.path.samestat(os.fstat(handle), path.stat())
            except FileNotFoundError:
                return False

        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if in_place():
                yield in_place
                return
        finally:
            os.close(handle)
