"""The work folder of a preparation: parsed chunks and vocabularies, so that an interrupted one can go on.

    .NAME.work/key.json               what the folder is the work of: the reader's files, checksums and options
    .NAME.work/journal.jsonl          a line for each finished part
    .NAME.work/part-000000.part       one chunk, dictionary coded
    .NAME.work/vocabulary/KEY/C1/     a finished vocabulary, for the id options that KEY stands for

A part counts once its line is in the journal, a vocabulary once its folder has its final name: both are complete then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.prepare import part_file
from recjax.data.prepare.coding import CodedChunk
from recjax.data.prepare.counting import Run
from recjax.data.prepare.dense_columns import DenseStats
from recjax.data.source import SPLITS
from recjax.errors import DataError
from recjax.utils import strict_json
from recjax.utils.locks import locked_folder
from recjax.utils.paths import escapes

_KEY, _JOURNAL = "key.json", "journal.jsonl"


Line = bytes  # of the journal; `Part` has a field called bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """One chunk on disk.

    Attributes:
      file: its name in the folder.
      bytes: its size.
      rows: rows of each split, in the order of SPLITS.
      skipped: kind of fault -> lines left out.
      dense: statistics of the training rows.
      done: the chunk's `done`.
    """

    file: str
    bytes: int
    rows: list[int]
    skipped: dict[str, int]
    dense: DenseStats
    done: float | None

    def to_line(self) -> str:
        """Returns it as a line of the journal."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(values | {"dense": self.dense.to_json()}) + "\n"

    @classmethod
    def from_line(cls, line: Line) -> Part:
        """The inverse of `to_line`."""
        values = strict_json.parse(line)
        return cls(**values | {"dense": DenseStats.from_json(values["dense"])})


class WorkFolder:
    """See above. Make one with `work_folder`."""

    def __init__(self, path: Path) -> None:
        """The work at `path`, an existing folder that no other process works in."""
        self.path = path
        self.parts: list[Part] = []

    @property
    def claimed(self) -> bool:
        """Returns whether the work that is there says what it is the work of; without that it is of no use."""
        return (self.path / _KEY).is_file()

    def claim(self, key: Mapping[str, Any]) -> None:
        """Says what the work is of; JSON values."""
        (self.path / _KEY).write_bytes(_as_text(key))

    def resume(self, key: Mapping[str, Any]) -> None:
        """Takes up the work that is there if it has this key (JSON values), else removes it and starts again."""
        if self.claimed and (self.path / _KEY).read_bytes() == _as_text(key):
            self.parts = self._journal()
            return
        self.clear()
        self.claim(key)

    def clear(self) -> None:
        """Removes what is there."""
        for old in self.path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def _journal(self) -> list[Part]:
        """The parts that were finished, up to the first that is not whole; forgets what follows them."""
        journal = self.path / _JOURNAL
        lines = journal.read_bytes().splitlines(keepends=True) if journal.is_file() else []
        parts = list(itertools.takewhile(lambda part: part is not None, map(self._whole, lines)))
        if len(parts) < len(lines):
            journal.write_bytes(b"".join(lines[: len(parts)]))
        return [part for part in parts if part is not None]

    def _whole(self, line: bytes) -> Part | None:
        """The part of a line of the journal; None if the line is cut short or the file is not what it says."""
        try:
            part = Part.from_line(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not isinstance(part.file, str) or escapes(part.file):
            return None
        file = self.path / part.file
        try:
            whole = file.is_file() and file.stat().st_size == part.bytes
        except OSError:  # a name that no file can have
            return None
        return part if whole and line.endswith(b"\n") else None

    def write(self, index: int, chunk: CodedChunk, skipped: Mapping[str, int], done: float | None) -> Part:
        """Writes a chunk; it counts once it is given to `finish`. Safe to call from several threads."""
        file = self.path / f"part-{index:06}{part_file.SUFFIX}"
        with file.open("wb") as stream:
            dense = part_file.save(stream, chunk)
        rows = np.bincount(chunk.split, minlength=len(SPLITS)).tolist()
        return Part(file.name, file.stat().st_size, rows, dict(skipped), dense, done)

    def finish(self, part: Part) -> None:
        """Enters a written part into the journal; call it in the order of the chunks."""
        with (self.path / part.file).open("rb") as written:  # here, so that no thread that computes waits for the disk
            os.fsync(written.fileno())
        with (self.path / _JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(part.to_line())
            journal.flush()
            os.fsync(journal.fileno())
        self.parts.append(part)

    def read(self, part: Part, split: int, features: Sequence[str]) -> CodedChunk:
        """The rows of a part that are of a split, which has some; `features` are the names of its columns."""
        with self._open(part) as arrays:
            return part_file.rows(arrays, split, features)

    def forget(self, part: Part, split: int) -> None:
        """Lets the system take the memory of the rows of a split, once nothing reads them any more."""
        part_file.forget(self.path / part.file, split)

    def train_counts(self, part: Part, feature: int) -> Run:
        """The distinct values of feature number `feature` in a part, and how often its training rows hold them."""
        with self._open(part) as arrays:
            return part_file.train_counts(arrays, feature)

    @contextlib.contextmanager
    def _open(self, part: Part) -> Iterator[Mapping[str, np.ndarray]]:
        path = self.path / part.file
        try:
            with part_file.opened(path) as arrays:
                yield arrays
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is damaged ({' '.join(str(error).split())[:200]}): an unfinished preparation wrote it. Remove "
                f"the folder {self.path} and prepare again."
            ) from None

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _as_text(key: Mapping[str, Any]) -> bytes:
    return json.dumps(key, sort_keys=True).encode()


@contextlib.contextmanager
def work_folder(out: Path) -> Iterator[WorkFolder]:
    """The work folder of a preparation of `out`, beside it; waits for any other process that works there."""
    path = out.with_name(f".{out.name}.work")
    with locked_folder(path):
        yield WorkFolder(path)
