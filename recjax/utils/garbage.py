"""Pauses of Python's garbage collector, kept short while requests are answered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Leaves out of the garbage collector's passes, while the context is open, all objects that are there before it.

    A program, its modules and what it serves are hundreds of thousands of objects. A full pass over them takes 0.1 s
    and more, in which no thread runs any Python, and finds nothing.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
