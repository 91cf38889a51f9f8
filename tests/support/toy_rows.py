"""Rows for the engine that prepares data, given in memory: text, integers and jagged bags, read in small chunks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.ids import Frequency
from recjax.data.prepare.prepare import prepare_data

Row = tuple[int, int | None, str | None, list[int], int]  # label, dense or None, word or None, tags (a bag), split

_EVERY_VALUE = Frequency()


@dataclasses.dataclass
class Toy:
    """A reader of rows that are given; `stop_at` is the chunk at which it fails once."""

    rows: Sequence[Row]
    chunk_rows: int = 3
    error: BaseException | None = None
    stop_at: int | None = None

    name = "toy"
    label = "yes"
    splits = "as given"
    dense = ("age",)
    features = (RawFeature("word", optional=True, values="text"), RawFeature("tags", jagged=True))

    def __post_init__(self) -> None:
        self.asked: list[int] = []

    def files(self) -> dict[str, str]:
        """The checksum of the rows."""
        return {"rows": hashlib.sha256(repr(self.rows).encode()).hexdigest()}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunks from number `start` on; `asked` is their numbers."""
        count = -(-len(self.rows) // self.chunk_rows)
        for index in range(start, count):
            if index == self.stop_at:
                assert self.error is not None
                raise self.error
            self.asked.append(index)
            yield chunk(self.rows[index * self.chunk_rows : (index + 1) * self.chunk_rows])


def chunk(rows: Sequence[Row]) -> Chunk:
    """The raw columns of these rows."""
    labels, ages, words, tags, splits = zip(*rows, strict=True)
    return Chunk(
        np.array(labels, np.float32),
        np.array([np.nan if age is None else age for age in ages], np.float64)[:, None],
        {
            "word": Column(
                np.array([(w or "").encode() for w in words], "S"), None, np.array([w is None for w in words])
            ),
            "tags": Column(np.array([t for bag in tags for t in bag], np.int64), np.array([*map(len, tags)], np.int32)),
        },
        np.array(splits, np.uint8),
    )


def prepare(
    reader: Any, out: Path, ids: Any = _EVERY_VALUE, dense: Any = "none", indicators: bool = False, **more: Any
) -> Any:
    """Prepared data of a reader's rows; the options that name them are those given here, and `options`."""
    options = {"ids": ids.kind, "dense": dense, "missing_indicators": indicators, **more.pop("options", {})}
    return prepare_data(reader, out, ids=ids, dense=dense, missing_indicators=indicators, options=options, **more)


def rows_of(count: int, seed: int = 0) -> list[Row]:
    """Random rows, eight of ten for training, the others for validation."""
    rng = np.random.default_rng(seed)
    return [
        (
            int(rng.integers(2)),
            int(rng.integers(9)),
            "abcd"[rng.integers(4)],
            rng.integers(0, 5, 2).tolist(),
            int(i % 10 > 7),
        )
        for i in range(count)
    ]
