"""Written rows of a chain of checkpoints as one of them, which holds all, would have them: of each row the newest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.tiers.written import INITIAL, POSITIONS, TABLE, Written
from recjax.utils.lazy_arrays import LazyArray, as_lazy, chosen_rows, joined


def overlaid(chain: Sequence[Written]) -> Written:
    """Lays written rows over those before them.

    Args:
      chain: of a checkpoint that holds all rows and of the increments after it, the oldest first.

    Returns:
      The tables of the last one, in the form of `recjax.tiers.written`; of each the rows that nobody has later come
      first. The memory that it takes is 12 bytes for each row, and while a table is looked at 1 for each of its rows.

    Raises:
      ValueError: they are not of the same tables.
    """
    return {table: _overlaid(table, [written.get(table, {}) for written in chain]) for table in chain[-1]}


def _overlaid(table: str, links: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    newest = {name: as_lazy(array) for name, array in links[-1].items()}
    for link in links:
        alike = link.keys() == newest.keys() and all(
            (link[name].dtype, link[name].shape[1:]) == (array.dtype, array.shape[1:]) for name, array in newest.items()
        )
        if not alike or any(_bits(link[name]) != _bits(newest[name]) for name in (TABLE, INITIAL)):
            raise ValueError(f"the rows of table {table!r} are not those of the same table everywhere in its chain")
    positions = [as_lazy(link[POSITIONS]).load() for link in links]
    rows = int(newest[TABLE].load()[0])
    if any(len(found) and not 0 <= found.min() <= found.max() < rows for found in positions):
        raise ValueError(f"there are rows of table {table!r} beyond its {rows:,}")
    later = np.zeros(rows, bool)
    kept: list[np.ndarray] = []
    for found in reversed(positions):
        kept.insert(0, np.flatnonzero(~later[found]).astype(np.int32))
        later[found] = True
    count = sum(map(len, kept))

    def array(name: str, like: LazyArray) -> LazyArray:
        pieces, start = [], 0
        for link, kept_K in zip(links, kept, strict=True):
            of = as_lazy(link[name])
            if len(kept_K):
                rows_of = of if len(kept_K) == of.shape[0] else chosen_rows(of, kept_K)
                pieces.append(((start, *(0 for _ in of.shape[1:])), rows_of))
            start += len(kept_K)
        return joined((count, *like.shape[1:]), like.dtype, pieces)

    return {
        POSITIONS: np.concatenate([found[kept_K] for found, kept_K in zip(positions, kept, strict=True)]),
        **{name: newest[name] for name in (TABLE, INITIAL)},
        **{name: array(name, of) for name, of in newest.items() if name not in (POSITIONS, TABLE, INITIAL)},
    }


def _bits(array: Any) -> bytes:
    return as_lazy(array).load().tobytes()
