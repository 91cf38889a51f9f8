"""Parts that readers of raw files (`recjax.data.prepare.chunk.Reader`) share: checksums, chunks of rows in memory."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recjax.data.prepare.chunk import Chunk
from recjax.data.text.source_files import sha256

_CHUNK_ROWS = 2**17


class RawFiles:
    """Base of readers of some files, `_raw`."""

    _raw: Sequence[Path]

    def files(self) -> Mapping[str, str]:
        """File name -> sha256 of every raw file."""
        return {file.name: sha256(file) for file in self._raw}


class HeldRows(RawFiles, abc.ABC):
    """Base of readers that hold all rows, `_count` of them; `_skipped` were left out while they were read."""

    _count: int
    _skipped: Mapping[str, int]

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        for first in range(start * _CHUNK_ROWS, self._count, _CHUNK_ROWS):
            last = min(first + _CHUNK_ROWS, self._count)
            skipped = self._skipped if first == 0 else {}
            yield dataclasses.replace(self._chunk(slice(first, last)), skipped=skipped, done=last / self._count)

    @abc.abstractmethod
    def _chunk(self, part: slice) -> Chunk:
        """Some of the rows."""
