"""The two Criteo click logs: Kaggle (7 days in one file) and 1TB (24 days, a file a day), in the format of criteo_text.

Their terms forbid redistribution; recjax ships no row of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from recjax.data import counter_rng
from recjax.data.datasets.options import open_as
from recjax.data.datasets.readers import RawFiles
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.source import SPLITS
from recjax.data.text import source_files
from recjax.data.text.chunks import TextFile, pieces, scan
from recjax.data.text.criteo_lines import CATEGORIES, DENSE, Rows, fault, parse
from recjax.data.thread_map import ahead
from recjax.errors import ConfigError, DataError

_PIECE_BYTES = 28 << 20  # of text in a chunk, about 120,000 rows; glibc gets more than 32 MiB anew every time
_PARSE_BYTES = 1 << 19  # parsed at once; the intermediate arrays are three times as large
_TASK_PIECES = 8  # read by one worker: each task reads one piece more than it needs
_THREADS = 2
_SPLIT, _SUBSAMPLE = 21, 22  # purposes of draws

Convention = Literal["dlrm", "torchrec", "random"]
Integers = Literal["dense", "categories"]
MISSING = "integers_missing"  # the dense column beside integers as categories
_HALVES = {"dlrm": ("test", "validation"), "torchrec": ("validation", "test")}  # of the last day
_RANDOM = (0.8, 0.9)  # ends of train and validation, the shares of Criteo_x4 in FuxiCTR


@dataclasses.dataclass(frozen=True)
class CriteoKaggle:
    """Config of the Criteo Kaggle data (Display Advertising Challenge): train.txt, 45.8 million rows of 7 days."""

    kind: ClassVar[str] = "criteo_kaggle"

    path: str = ""  # folder of prepared data
    # Use of the last seventh of the file: dlrm: half test, half validation; torchrec: the reverse
    split: Convention = "dlrm"
    split_seed: int = 0  # seed of split=random, which takes 80, 10 and 10% of all rows at random
    ids: Frequency | Hash | Modulo = Frequency(min_count=10)  # mapping of categories to rows of tables
    dense: DenseTransform = "log1p"  # transform of the integers; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # 13 more dense columns, I1_missing ..: 1 where the integer is missing
    # categories: I1 .. in buckets are features, too, and one dense column counts the missing integers
    integers: Integers = "dense"
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    open = open_as


@dataclasses.dataclass(frozen=True)
class Criteo1TB:
    """Config of the Criteo 1TB click logs: day_0 to day_23, 4.37 billion rows."""

    kind: ClassVar[str] = "criteo_1tb"

    path: str = ""  # folder of prepared data
    days: tuple[int, ...] = tuple(range(24))  # the files to use, ascending; the last is split, those before it train
    split: Convention = "dlrm"  # use of the halves of the last day: dlrm: test, then validation; torchrec: the reverse
    split_seed: int = 0  # seed of split=random, which takes 80, 10 and 10% of all rows at random
    subsample_negatives: float = 0.0  # share of the rows of label 0 to leave out, of all splits (dlrm's recipe: 0.875)
    ids: Frequency | Hash | Modulo = Frequency(min_count=10)  # mapping of categories to rows of tables
    dense: DenseTransform = "log1p"  # transform of the integers; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # 13 more dense columns, I1_missing ..: 1 where the integer is missing
    on_error: Literal["stop", "skip"] = "stop"  # action at a malformed line: stop, or leave it out and count it
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        if not self.days or list(self.days) != sorted(set(self.days)) or not 0 <= self.days[0] <= self.days[-1] <= 23:
            raise ConfigError(f"days is {self.days}; it must be numbers from 0 to 23, ascending, for example 0,1,23.")
        if len(self.days) == 1 and self.split != "random":
            raise ConfigError(
                f"days={self.days[0]} leaves nothing to train on, for split={self.split} gives the last day to "
                "validation and test. Name more days, or choose split=random."
            )
        if not 0 <= self.subsample_negatives < 1:
            raise ConfigError(f"subsample_negatives is {self.subsample_negatives}; it must be 0 or more, less than 1.")

    open = open_as


def open_raw(config: CriteoKaggle | Criteo1TB, source: str | os.PathLike[str] | None) -> CriteoReader:
    """The reader of the raw files; opens nothing yet.

    Args:
      config: the options.
      source: the folder of train.txt, or of day_0 .. day_23, each plain or with .gz after its name; for Kaggle the
        file itself will do.

    Raises:
      DataError: a file is missing.
    """
    place = source_files.require_source(config.kind, source)
    if isinstance(config, Criteo1TB):
        files = [source_files.find_file(place, f"day_{day}") for day in config.days]
        return CriteoReader(config, files, lambda lines: lines, f"day {config.days[-1]}", config.subsample_negatives)
    file = place if place.is_file() else source_files.find_file(place, "train.txt")
    return CriteoReader(config, [file], lambda lines: lines // 7, "the last seventh of the file (day 7)", 0.0)


class CriteoReader(RawFiles):
    """Reads files of this format (a `recjax.data.prepare.chunk.Reader`)."""

    label = "the ad was clicked"
    dense = DENSE
    features = tuple(RawFeature(name, optional=True, values="hex") for name in CATEGORIES)

    def __init__(
        self,
        config: CriteoKaggle | Criteo1TB,
        files: Sequence[Path],
        held_out: Callable[[int], int],
        held_out_name: str,
        subsample_negatives: float,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """A reader; opens nothing yet.

        Args:
          config: its split convention and on_error.
          files: in the order of time.
          held_out: lines of the last file -> how many of its last lines are not for training.
          held_out_name: those, in words.
          subsample_negatives: share of the negative rows to leave out.
          piece_bytes: text in a chunk.
        """
        self.name = config.kind
        self._bucketed = isinstance(config, CriteoKaggle) and config.integers == "categories"
        if self._bucketed:
            self.dense = (MISSING,)
            self.features = (*(RawFeature(name, optional=True) for name in DENSE), *self.features)
        self._convention, self._seed, self._skip = config.split, config.split_seed, config.on_error == "skip"
        self._raw, self._held_out, self._subsample = files, held_out, subsample_negatives
        self._piece_bytes = piece_bytes
        if config.split == "random":
            self.splits = f"random: 80, 10 and 10% of the rows, seed {config.split_seed}"
        else:
            first, second = _HALVES[config.split]
            self.splits = (
                f"{config.split}: first half of {held_out_name} {first}, second half {second}; all before, train"
            )
        if subsample_negatives:
            self.splits += f"; {subsample_negatives:g} of the negative rows left out at random"

    @functools.cached_property
    def _files(self) -> list[TextFile]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(ahead(pool, _THREADS, lambda path: scan(path, self._piece_bytes), self._raw))

    @property
    def paths(self) -> Sequence[Path]:
        """The raw files, in the order of time."""
        return self._raw

    def scan(self, path: Path) -> TextFile:
        """Looks at one of the files, from end to end."""
        return scan(path, self._piece_bytes)

    def scanned(self, files: Sequence[TextFile]) -> None:
        """Takes what `scan` gave for all files, where that was done elsewhere."""
        self.__dict__["_files"] = list(files)

    def tasks(self) -> list[tuple[int, int, int]]:
        """Units that may be read apart, as (file, first piece, pieces): a gzipped file whole, others in parts."""
        made = []
        for number, file in enumerate(self._files):
            count = len(file.first_lines)
            step = count if file.path.suffix == ".gz" else _TASK_PIECES
            made += [(number, first, min(step, count - first)) for first in range(0, count, step)]
        return made

    def chunks_of(self, task: tuple[int, int, int]) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a task, with their numbers in `chunks`."""
        number, first, count = task
        before = sum(len(file.first_lines) for file in self._files[:number])
        total = sum(len(file.first_lines) for file in self._files)
        file = self._files[number]
        for piece, text in zip(range(first, first + count), pieces(file, first), strict=False):
            at = before + piece
            yield at, self._chunk(at, file, file.first_lines[piece], text, (at + 1) / total)

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones: one for each piece of each file, in order."""
        total = sum(len(file.first_lines) for file in self._files)

        def numbered() -> Iterator[tuple[int, TextFile, int, bytes]]:
            number = 0
            for file in self._files:
                first = max(0, start - number)
                if first < len(file.first_lines):
                    for piece, text in enumerate(pieces(file, first), first):
                        yield number + piece, file, piece, text
                number += len(file.first_lines)

        def make(item: tuple[int, TextFile, int, bytes]) -> Chunk:
            number, file, piece, text = item
            return self._chunk(number, file, file.first_lines[piece], text, (number + 1) / total)

        with ThreadPoolExecutor(_THREADS) as pool:
            yield from ahead(pool, _THREADS, make, numbered())

    def _chunk(self, number: int, file: TextFile, first_line: int, text: bytes, done: float) -> Chunk:
        """Chunk `number`: the lines `text` of a file, of which the first has the number `first_line`, from 0."""
        lines = text.count(b"\n")
        kept = np.ones(lines, bool)
        skipped: dict[str, int] = {}
        parts = []
        at = begin = 0
        while begin < len(text):
            end = text.rfind(b"\n", begin, begin + _PARSE_BYTES) + 1 or text.find(b"\n", begin) + 1
            part = text[begin:end]
            rows = parse(part)
            if rows is None:
                rows = self._mended(part, file, first_line + at, kept[at:], skipped)
            at += part.count(b"\n")
            parts.append(rows)
            begin = end
        parts = parts or [_nothing()]
        labels, dense = (_joined([getattr(p, name) for p in parts]) for name in ("labels", "dense"))
        keys, missing = (_joined([getattr(p, name) for p in parts], axis=1) for name in ("keys", "missing"))
        split = self._split(number, file, first_line + np.arange(lines))[kept]
        columns = {
            name: Column(keys[i], None, missing[i] if missing[i].any() else None) for i, name in enumerate(CATEGORIES)
        }
        if self._bucketed:
            dense, columns = as_categories(dense, columns)
        chunk = Chunk(labels, dense, columns, split, None, skipped, done)
        if not self._subsample:
            return chunk
        stays = (counter_rng.uniform(lines, self._seed, _SUBSAMPLE, number)[kept] >= self._subsample) | (labels == 1)
        columns = {
            name: Column(c.keys[stays], None, None if c.missing is None else c.missing[stays])
            for name, c in columns.items()
        }
        return dataclasses.replace(chunk, labels=labels[stays], dense=dense[stays], columns=columns, split=split[stays])

    def _mended(self, text: bytes, file: TextFile, first_line: int, kept: np.ndarray, skipped: dict[str, int]) -> Rows:
        """The rows of the good lines; marks the others in `kept` and counts them in `skipped`."""
        good = []
        for i, line in enumerate(text.split(b"\n")[:-1]):
            wrong = fault(line)
            if wrong is None:
                good.append(line)
            elif not self._skip:
                raise DataError(
                    f"{file.path}:{first_line + i + 1}: {wrong.text}. Mend or remove the line, or leave out malformed "
                    "lines with on_error=skip, which counts them."
                )
            else:
                kept[i] = False
                skipped[wrong.kind] = skipped.get(wrong.kind, 0) + 1
        rows = parse(b"".join(line + b"\n" for line in good))
        assert rows is not None, f"{file.path}:{first_line + 1}: lines that seem good cannot be parsed"
        return rows

    def _split(self, chunk: int, file: TextFile, lines: np.ndarray) -> np.ndarray:
        """The split of lines of a file, by their numbers from 0: uint8."""
        if self._convention == "random":
            drawn = counter_rng.uniform(len(lines), self._seed, _SPLIT, chunk)
            return np.searchsorted(_RANDOM, drawn, side="right").astype(np.uint8)
        train, (first, second) = SPLITS.index("train"), (SPLITS.index(name) for name in _HALVES[self._convention])
        if file.path != self._files[-1].path:
            return np.full(len(lines), train, np.uint8)
        held_out = self._held_out(file.lines)
        begin = file.lines - held_out
        middle = begin + (held_out + 1) // 2  # an odd row goes to the first half, as numpy.array_split gives it
        return np.select([lines < begin, lines < middle], [train, first], second).astype(np.uint8)


def as_categories(dense: np.ndarray, columns: Mapping[str, Column]) -> tuple[np.ndarray, dict[str, Column]]:
    """Rows with their integers as categories: those up to 2 stay as they are, above it is 2 + floor(log(x)^2).

    That is the usual way with this log, from the winners of its competition ("3 Idiots", floor(log(x)^2) above 2); 2 is
    added so that no bucket is that of another integer.

    Args:
      dense: floating [n, 13], NaN where missing.
      columns: the other categories.

    Returns:
      how many integers of each row are missing, [n, 1]; and all categories.
    """
    missing = np.isnan(dense)
    present = np.where(missing, 0.0, dense).astype(np.float64)
    large = 2 + np.floor(np.log(np.maximum(present, 3.0)) ** 2)
    keys = np.where(present > 2, large, present).astype(np.int64)
    found = {
        name: Column(keys[:, i], None, missing[:, i] if missing[:, i].any() else None) for i, name in enumerate(DENSE)
    }
    return missing.sum(axis=1, keepdims=True).astype(dense.dtype), found | dict(columns)


def _nothing() -> Rows:
    rows = parse(b"")
    assert rows is not None
    return rows


def _joined(parts: list[np.ndarray], axis: int = 0) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
