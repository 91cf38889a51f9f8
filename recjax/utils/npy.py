"""NumPy's files, read by several threads at a time.

NumPy parses the header of an array with `ast`, whose conversion to Python objects keeps one depth of recursion for all
threads (CPython 3.11 and 3.12): of two that parse at the same time one may get a SystemError. So headers are parsed one
at a time here. Data are read side by side.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO

import numpy as np

_PARSING = threading.Lock()


def map_array(file: str | os.PathLike[str]) -> np.ndarray:
    """The array of an .npy file, mapped into memory and not writable; raises what `numpy.load` raises."""
    with _PARSING:
        mapped: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    return mapped


@contextlib.contextmanager
def open_arrays(file: str | os.PathLike[str] | IO[bytes]) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of an .npz file by name, each read when it is asked for; not writable.

    Raises:
      zipfile.BadZipFile, OSError, ValueError, EOFError, KeyError: now or on reading: the file is damaged, holds Python
        objects, or has no array of this name.
    """
    with zipfile.ZipFile(file) as opened:
        yield _Arrays(opened)


class _Arrays(Mapping[str, np.ndarray]):
    def __init__(self, opened: zipfile.ZipFile) -> None:
        self._zip = opened

    def __getitem__(self, name: str) -> np.ndarray:
        with self._zip.open(f"{name}.npy") as stream:
            return _read(stream)

    def __iter__(self) -> Iterator[str]:
        return (name.removesuffix(".npy") for name in self._zip.namelist())

    def __len__(self) -> int:
        return len(self._zip.namelist())


def _read(stream: IO[bytes]) -> np.ndarray:
    with _PARSING:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, by_columns, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"arrays of version {version} of the format are not read")
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    content = stream.read()  # whole: the last read of a member is what compares its checksum
    if len(content) != (needed := math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{len(content):,} bytes of an array are there instead of {needed:,}")
    return np.ndarray(shape, dtype, content, order="F" if by_columns else "C")
