"""Maps from raw values to table rows: options, and the map of one feature that they give.

Missing values have a row of their own in every case, if the feature is optional.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.errors import ConfigError
from recjax.settings.values import check_ranges

_MOST = 2**31 - 3  # two rows more, for unknown and missing values, and ids are still int32


@dataclasses.dataclass(frozen=True)
class Frequency:
    """A row for each frequent value. Row 0: out of vocabulary; row 1: missing, in optional features; then values."""

    kind: ClassVar[str] = "frequency"

    min_count: int = 1  # values that the training split holds fewer times share row 0 with those it never holds
    modulo: int = 0  # divisor by which values are reduced first (dlrm's --max-ind-range; at most so many rows); 0: none

    def __post_init__(self) -> None:
        check_ranges(self, min_count=(1, _MOST), modulo=(0, _MOST))


@dataclasses.dataclass(frozen=True)
class _Computed:
    # Rows of the table, without that of missing values; one for all or one a feature
    rows: tuple[int, ...] = (1_000_000,)

    def __post_init__(self) -> None:
        check_ranges(self, rows=(1, _MOST))


@dataclasses.dataclass(frozen=True)
class Hash(_Computed):
    """Row `stable_hash(value) % rows`; in optional features one more row, the last, for missing values."""

    kind: ClassVar[str] = "hash"


@dataclasses.dataclass(frozen=True)
class Modulo(_Computed):
    """Row `value % rows`, for integers; in optional features one more row, the last, for missing values."""

    kind: ClassVar[str] = "modulo"


IdOptions = Frequency | Hash | Modulo


class VocabularyMap:
    """Rows by frequency (see `Frequency`).

    Attributes:
      table_rows: V.
      missing_row: the row of missing values.
      vocabulary: the values; reduced ones if `modulo` is not 0.
      modulo: see `Frequency`.
    """

    def __init__(self, vocabulary: Vocabulary, options: Frequency) -> None:
        """A map with the vocabulary `vocabulary`, whose first row is `first_row(feature)`."""
        self.vocabulary, self.modulo = vocabulary, options.modulo
        self.table_rows, self.missing_row = vocabulary.rows, 1

    def rows_of(self, values: np.ndarray) -> np.ndarray:
        """The rows of values (none of them missing): int32 of the same shape."""
        return self.vocabulary.encode(reduced(values, self.modulo))


class ComputedMap:
    """Rows by a function of the value (see `Hash` and `Modulo`).

    Attributes:
      table_rows: V.
      missing_row: the row of missing values.
      rule: the function, in words.
    """

    def __init__(self, rows: int, hashed: bool, optional: bool) -> None:
        """A map onto rows 0 to rows - 1."""
        self.rule = f"{'hashed' if hashed else 'modulo'} to {rows} rows"
        self._rows, self._hashed = rows, hashed
        self.table_rows, self.missing_row = rows + optional, rows

    def rows_of(self, values: np.ndarray) -> np.ndarray:
        """The rows of values (none of them missing): int32 of the same shape."""
        if self._hashed:
            return (stable_hash(values) % np.uint64(self._rows)).astype(np.int32)
        return reduced(values, self._rows).astype(np.int32)


IdMap = VocabularyMap | ComputedMap


def first_row(feature: RawFeature) -> int:
    """The row of the most frequent value in a vocabulary: after "out of vocabulary" and, if optional, "missing"."""
    return 2 if feature.optional else 1


def computed_map(options: Hash | Modulo, feature: RawFeature, index: int, count: int) -> ComputedMap:
    """The map of feature number `index` of `count`.

    Raises:
      ConfigError: rows for another number of features.
    """
    if len(options.rows) not in (1, count):
        raise ConfigError(
            f"ids.rows has {len(options.rows)} values, but there are {count} features: give one for each, in their "
            "order, or a single one for all."
        )
    return ComputedMap(options.rows[index % len(options.rows)], isinstance(options, Hash), feature.optional)


def vocabulary_numbers(features: Sequence[RawFeature]) -> list[int]:
    """For each feature the number of the one whose vocabulary it has: mostly its own."""
    numbers = {feature.name: number for number, feature in enumerate(features)}
    return [numbers[feature.like or feature.name] for feature in features]


def load_maps(folder: Path, options: IdOptions, features: Sequence[RawFeature]) -> list[IdMap]:
    """The map of every feature of prepared data, whose vocabularies are in `folder`, by the number of the feature.

    Raises:
      OSError, ValueError: a vocabulary cannot be read.
    """
    if not isinstance(options, Frequency):
        return [computed_map(options, feature, i, len(features)) for i, feature in enumerate(features)]
    numbers = vocabulary_numbers(features)
    loaded = {i: Vocabulary.load(folder / str(i), first_row(features[i])) for i in dict.fromkeys(numbers)}
    return [VocabularyMap(loaded[i], options) for i in numbers]


def reduced(values: np.ndarray, modulo: int) -> np.ndarray:
    """`values % modulo` (never negative) in their own type; as they are if modulo is 0.

    Raises:
      ConfigError: the values are text.
    """
    if not modulo:
        return values
    if values.dtype.kind not in "iu":
        raise ConfigError("text cannot be taken modulo a number. Choose ids=frequency without modulo, or ids=hash.")
    if modulo > np.iinfo(values.dtype).max:  # narrow types, whose values are less unless negative
        return values.astype(np.int64) % modulo
    return values % values.dtype.type(modulo)


def stable_hash(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash that never changes: between machines, versions or integer types of equal values.

    mix(x) is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014): x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27; x *= 0x94d049bb133111eb; x ^= x >> 31, modulo
    2^64. An integer v has mix(v mod 2^64 + 0x9e3779b97f4a7c15). Text of n bytes is cut into words of 8 bytes, little
    endian, the last filled with zeros: h = mix(n + 0x9e3779b97f4a7c15), then h = mix(h ^ word) for every word.

    Args:
      values: integers, or bytes of fixed width (dtype S), of any shape.

    Returns:
      uint64 of the same shape.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    if values.dtype.kind != "S":
        return _mix(values.astype(np.uint64) + golden)
    words = -(-values.dtype.itemsize // 8)
    padded = np.ascontiguousarray(values.ravel().astype(f"S{8 * words}")).view("<u8").reshape(-1, words)
    lengths = np.strings.str_len(values.ravel()).astype(np.uint64)
    hashed = _mix(lengths + golden)
    for i in range(words):
        hashed = np.where(lengths > np.uint64(8 * i), _mix(hashed ^ padded[:, i]), hashed)
    return hashed.reshape(values.shape)


def _mix(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
