"""Columns of well-formed objects, read each at once: ten times as fast as row by row, for the same result."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.data.arrow.convert import MOST_BYTES
from recjax.data.prepare.chunk import Coded, Column, RawFeature
from recjax.data.prepare.dense_columns import fits_float32

_HEX = frozenset("0123456789abcdefABCDEF")

Read = tuple[Mapping[str, Column | Coded], dict[str, np.ndarray]]


def whole_columns(
    objects: Sequence[Mapping[str, Any]], features: Sequence[RawFeature], dense: Sequence[str]
) -> Read | None:
    """Returns what `rows.RowReader` makes of objects: columns of features, and float64 [n] of dense ones.

    Returns:
      None if any of the values is missing, of another type than most are, or at fault: then row by row it must be.
    """
    try:
        columns: dict[str, Column | Coded] = {f.name: _column([row[f.name] for row in objects], f) for f in features}
        numbers = {name: _numbers([row[name] for row in objects]) for name in dense}
    except (KeyError, _RareError):
        return None
    return columns, numbers


class _RareError(Exception):
    pass


def _column(values: list[Any], feature: RawFeature) -> Column:
    lengths = None
    if feature.jagged:
        _require(set(map(type, values)) <= {list})
        lengths = np.fromiter(map(len, values), np.int32, len(values))
        values = list(itertools.chain.from_iterable(values))
    if feature.values == "integer":
        _require(set(map(type, values)) <= {int})
        try:
            return Column(np.array(values, np.int64), lengths)
        except OverflowError:
            raise _RareError from None
    _require(set(map(type, values)) <= {str})
    joined = "".join(values)
    if feature.values == "hex":
        _require(
            _HEX.issuperset(joined) and 0 < min(map(len, values), default=1) and max(map(len, values), default=1) < 9
        )
        return Column(np.array([int(value, 16) for value in values], np.int64), lengths)
    _require("\0" not in joined and not (feature.optional and "" in values))
    keys = [value.encode() for value in values]
    _require(max(map(len, keys), default=0) <= MOST_BYTES)
    return Column(np.array(keys, np.bytes_), lengths)


def _numbers(values: list[Any]) -> np.ndarray:
    _require(set(map(type, values)) <= {int, float})
    try:
        found = np.array(values, np.float64)
    except OverflowError:
        raise _RareError from None
    _require(bool(fits_float32(found).all()))
    return found


def _require(well: bool) -> None:
    if not well:
        raise _RareError
