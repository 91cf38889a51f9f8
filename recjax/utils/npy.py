"""NumPy's files, read by several threads at a time.

NumPy parses the header of an array with `ast`, whose conversion to Python objects keeps one depth of recursion for all
threads (CPython 3.11 and 3.12): of two that parse at the same time one may get a SystemError. So headers are parsed one
at a time here. Data are read side by side.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import tokenize
import warnings
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

_PARSING = threading.Lock()
_HEADER_BYTES = 2**14  # NumPy takes 10,000
# what NumPy raises at damaged files, and the system at missing ones
UNREADABLE = (EOFError, KeyError, MemoryError, OSError, SyntaxError, ValueError, struct.error, tokenize.TokenError)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Makes a ValueError of what NumPy would warn of in its block, such as a header that it repairs before it reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield
        except Warning as warning:
            raise ValueError(str(warning)) from warning


def map_array(file: str | os.PathLike[str]) -> np.ndarray:
    """The array of an .npy file, mapped into memory and not writable; raises what `numpy.load` raises."""
    with _PARSING:
        mapped: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    return mapped


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an .npy file, of which nothing more is read; raises what `numpy.load` raises."""
    start = io.BytesIO(stream.read(_HEADER_BYTES))
    version = np.lib.format.read_magic(start)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with _PARSING:
        shape, _, dtype = read(start)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    return shape, dtype
