"""Routing of ids in tables with hot rows: one look-up for each id, and no sorting of those that name hot ones."""

from __future__ import annotations

import numpy as np

from recjax.data.batch import Batch
from recjax.embedding.bands import Source
from recjax.embedding.layout import Group

LISTED_ROWS = 2**26  # of a table with hot rows, for whose ids the host keeps a list: 256 MiB


class Devices:
    """The devices that the ids of a batch are of."""

    def __init__(self, batch: Batch, b: int, devices: int) -> None:
        """Begins with b samples for each device; nothing is found yet."""
        self.number, self._batch, self._b = devices, batch, b
        self._found: dict[tuple[int | str, int], np.ndarray] = {}

    def times(self, feature: str, stride: int) -> np.ndarray:
        """The device of each id of a feature, times `stride`: int64 [L], alike for all bags of one fixed size."""
        bags = self._batch.bags[feature]
        key = (feature if bags.lengths is not None else bags.ids.shape[1], stride)
        if key not in self._found:
            if bags.lengths is None:
                number_B = np.arange(len(bags.ids)) // self._b
                self._found[key] = np.repeat(number_B * stride, bags.ids.shape[1])
            else:
                self._found[key] = bags.samples() // self._b * stride
        return self._found[key]


def find_hot(
    group: Group, batch: Batch, devices: Devices, elsewhere: dict[tuple[str, str], np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Finds the ids of rows that every device has at hand, by one look-up for each id.

    Args:
      group: the group of these rows.
      batch: the samples.
      devices: of its ids.
      elsewhere: gets (feature of the data, table) -> which of its ids name other rows, ascending.

    Returns:
      which rows each device's samples have ids of, bool [N, R]; and for each source the row of every id, -1 where it is
      not hot, int32 [L].
    """
    stride = group.rows + 1  # the last column takes those that are not hot
    marks_M = np.zeros(devices.number * stride + 1, bool)
    found = {}
    for source in group.sources:
        feature = source.feature.reads
        row_L = codes(group, source, batch.bags[feature].ids.ravel().astype(np.int32, copy=False))
        if not source.whole:
            elsewhere[feature, source.segments[0].spec.name] = np.flatnonzero(row_L < 0)
        found[source.name] = row_L
        marks_M[devices.times(feature, stride) + row_L] = True  # -1 is the last column of the device before
    return marks_M[:-1].reshape(devices.number, stride)[:, :-1], found


def codes(group: Group, source: Source, ids_L: np.ndarray) -> np.ndarray:
    """Places of the rows of some ids.

    A table with hot rows has a list of these numbers, so that an id costs one look-up, however many rows are hot; but
    not where a cache holds some of the rest, for such a list is as long as the table.

    Args:
      group: a table group.
      source: one of its sources.
      ids_L: int32, in range.

    Returns:
      `Group.destination` * homes of a part + home of each id, -1 where it is not here: integers [L].
    """
    segments = source.segments
    divided = not group.cached and any(s.band.vacant or not group.listed for s in segments)
    if divided and segments[0].spec.rows <= LISTED_ROWS:
        key = (segments[0].spec.name, segments[0].first, tuple(s.number for s in segments))
        listed = group.listed_codes.get(key)
        if listed is None:
            fits = group.owners * group.home_rows < 2**31
            codes_V = _codes(group, source, np.arange(segments[0].spec.rows, dtype=np.int32))
            listed = group.listed_codes[key] = codes_V.astype(np.int32 if fits else np.int64)
        return listed.take(ids_L)
    return _codes(group, source, ids_L)


def _codes(group: Group, source: Source, ids_L: np.ndarray) -> np.ndarray:
    owner_L, code_L, here_L = source.locate(ids_L)
    if group.owners > 1:  # or all devices have every row
        code_L = group.destination(owner_L) * np.int64(group.home_rows) + code_L
    found_L: np.ndarray = code_L if here_L is None else np.where(here_L, code_L, -1)
    return found_L
