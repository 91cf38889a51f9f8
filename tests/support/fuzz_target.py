"""A reader to be fuzzed, and how its good files are written."""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from recjax.errors import RecjaxError

Random = random.Random


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of reader.

    Attributes:
      write: puts good files into an empty folder.
      read: reads them all.
      touch: brings checksums up to date after the damage, so that it reaches what lies behind them.
      zipped: whether files may also come gzipped.
      pipes: whether a pipe must be refused; else one may be given on purpose, and is waited for.
      refusals: classes of the errors by which it refuses.
      grow: gives the files of a folder about so many bytes of good rows, where repeating a part of them does not.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    touch: Callable[[Path, Random], object] = lambda folder, rng: None
    zipped: bool = False
    pipes: bool = True
    refusals: tuple[type[Exception], ...] = (RecjaxError,)
    grow: Callable[[Path, int], object] | None = None


def texts(files: dict[str, str]) -> Callable[[Path], None]:
    """Writes these files."""

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")

    return write


_good: dict[str, Path] = {}  # folders that take long to make, made once


def good(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Copies a folder that `make` makes once."""

    def write(folder: Path) -> None:
        if name not in _good:
            _good[name] = Path(tempfile.mkdtemp(prefix="recjax-fuzz-")) / name
            _good[name].mkdir()
            make(_good[name])
        shutil.copytree(_good[name], folder, dirs_exist_ok=True)

    return write
