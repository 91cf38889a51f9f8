"""Written rows of tables of which several processes each hold some, as pieces of one array for a checkpoint.

The rows of process 0 come first, then those of the others in their order, and hot rows last: these all processes hold,
so that process 0 gives them, and of their slots each what its devices have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.embedding.bands import BoundSegment
from recjax.parallel import distributed
from recjax.utils.lazy_arrays import LazyArray, Place, Spread, as_lazy

POSITIONS = "positions"


def of_processes(own: Mapping[str, Mapping[str, Any]], hot: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """The written rows of all processes, which must call it together.

    Args:
      own: as `recjax.tiers.written` has them, those of this process, without hot rows.
      hot: table -> its segments of hot rows, with their arrays.
    """
    counts = {table: int(arrays[POSITIONS].shape[0]) for table, arrays in own.items()}
    of_all = [json.loads(text) for text in distributed.gather("rows that were written", json.dumps(counts))]
    found: dict[str, dict[str, Any]] = {}
    for table, arrays in own.items():
        counts_P = [of[table] for of in of_all]
        first, start = sum(counts_P[: distributed.process()]), sum(counts_P)
        placed: list[tuple[int, Mapping[str, Any]]] = [(first, arrays)] if counts[table] else []
        for segment, of_segment in hot[table]:
            placed.append((start, _of_hot(segment, of_segment)))
            start += segment.band.members
        found[table] = {
            name: _spread(name, array, start, placed) if isinstance(array, LazyArray) else array
            for name, array in arrays.items()
        }
    return found


def _of_hot(segment: BoundSegment, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of hot rows by the names of those of written rows: of what all processes have, process 0 gives all."""
    positions = np.array(segment.band.used(0, segment.band.size), np.int64)
    whole = {POSITIONS: as_lazy(positions), **arrays}
    return {name: x for name, x in whole.items() if isinstance(x, Spread) or distributed.is_main()}


def _spread(name: str, of: LazyArray, rows: int, placed: Sequence[tuple[int, Mapping[str, Any]]]) -> Spread:
    """One array of so many rows, of which pieces begin at some."""
    pieces: list[tuple[Place, LazyArray]] = []
    for first, arrays in placed:
        array = arrays.get(name)
        if isinstance(array, Spread):
            # Rectangles: a segment of hot rows counts as a table of its own.
            pieces += [((first + at[0], *at[1:]), piece) for at, piece in array.pieces if isinstance(at, tuple)]
        elif array is not None:
            pieces.append(((first, *(0 for _ in array.shape[1:])), array))
    return Spread((rows, *of.shape[1:]), of.dtype, tuple(pieces))
