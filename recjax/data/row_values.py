"""Meaning of the rows of a feature's table: to name them, and to compare features, or weights with data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from recjax.data.arrow import roles
from recjax.data.batch import Feature
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.prepare.ids import ComputedMap, IdMap, VocabularyMap, first_row
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.data.storage.manifest import prepare_again
from recjax.errors import DataError

_SHOWN = 3  # values that are listed where two features differ


@dataclasses.dataclass(frozen=True)
class RowValues:
    """Meaning of the rows of one feature: which raw values they stand for.

    Attributes:
      name: of the feature.
      rule: how a raw value becomes what stands in `values`, or a row where there are none.
      first: the row of the first value.
      values: one for each row from `first` on, in their order: integers, or text (dtype S); empty of computed rows.
    """

    name: str
    rule: str
    first: int
    values: np.ndarray

    def sha256(self) -> str:
        """A hash, equal where the same raw values have the same rows, whatever the width in which they are stored."""
        values = self.values
        width = int(np.strings.str_len(values).max(initial=1)) if values.dtype.kind == "S" else 0
        beyond = bool(len(values)) and values.dtype.kind == "u" and int(values.max()) >= 2**63
        digest = hashlib.sha256(f"{self.rule}\n{self.first}\n{len(values)} {width} {beyond}\n".encode())
        digest.update(values.astype(f"S{width}" if width else "<u8" if beyond else "<i8").tobytes())
        return digest.hexdigest()

    @property
    def computed(self) -> bool:
        """True if rows are computed, so that no value has one for itself."""
        return self.first == 0

    def row_of(self, value: Any) -> str:
        """Says in words which row of the feature a value has."""
        at = np.flatnonzero(self.values == value)
        return f"{f'row {self.first + int(at[0]):,}' if len(at) else 'no row'} of {self.name!r}"

    def differing(self, other: RowValues) -> list[Any]:
        """The first values, by their rows, that do not have the same row among those of `other`."""
        start = max(self.first, other.first)
        end = max(start, min(self.first + len(self.values), other.first + len(other.values)))
        same = np.zeros(len(self.values), bool)
        beside = other.values[start - other.first : end - other.first]
        same[start - self.first : end - self.first] = self.values[start - self.first : end - self.first] == beside
        return self.values[np.flatnonzero(~same)[:_SHOWN]].tolist()


def row_values(source: BlockSource, names: Collection[str]) -> dict[str, RowValues]:
    """Meaning of the rows of these features; without those whose data do not tell, as where ids are row numbers.

    Raises:
      DataError: the vocabularies cannot be read, or the description of the columns.
    """
    if not isinstance(source, PreparedSource) or "encoder" not in source.about:
        return {}
    encoder = open_encoder(source.path)
    described = source.about.get("table")
    try:
        specs = {spec.name: spec for spec in roles.from_json(described)} if described else {}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(
            f"the data at {source.path} are damaged: what they say of their columns makes no sense. Prepare them "
            f"again: {prepare_again(source.path, source.name)} --overwrite"
        ) from None
    maps = {feature.name: map_ for feature, map_ in zip(encoder.features, encoder.maps, strict=True)}
    return {name: _values(name, maps[name], encoder, specs.get(name)) for name in names if name in maps}


def _values(name: str, map_: IdMap, encoder: Encoder, spec: roles.ColumnSpec | None) -> RowValues:
    feature = next(feature for feature in encoder.features if feature.name == name)
    rule: str = feature.values
    if spec is not None and spec.hashed:
        rule += f", hashed to {spec.hashed} rows"
    if spec is not None and spec.edges is not None:
        rule += f", in buckets from {', '.join(map(repr, spec.edges))}"
    if isinstance(map_, ComputedMap):
        rule += f", {map_.rule}{' or missing' if feature.optional else ''}"
        return RowValues(name, rule, 0, np.zeros(0, np.int64))
    if map_.modulo:
        rule += f", modulo {map_.modulo}"
    return RowValues(name, rule, first_row(feature), map_.vocabulary.values)


def describe_difference(first: str, second: str, values: Mapping[str, RowValues]) -> str:
    """Says where the rows of two features stand for different values; "" where nothing is known of that.

    Rows that the same function computes of values of the same type, as a hash does, are the same.

    Args:
      first: name of a feature.
      second: name of another.
      values: of the two, where the data tell.
    """
    if first not in values or second not in values:
        return ""
    a, b = values[first], values[second]
    if a.sha256() == b.sha256():
        return ""
    if a.rule != b.rule:
        return f"those of {first!r} stand for {a.rule} and those of {second!r} for {b.rule}"
    differing = [*a.differing(b), *b.differing(a)][:_SHOWN]
    return "; ".join(f"{_in_words(value)} is {a.row_of(value)} and {b.row_of(value)}" for value in differing)


def _in_words(value: Any) -> str:
    return repr(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)[:80]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Labels of the rows of one feature.

    Attributes:
      shared: the rows that stand for no single value: unknown values, missing ones.
      name: row -> the value as the raw data write it, "unknown" or "missing"; the row's number where the data do not
        tell.
    """

    shared: frozenset[int]
    name: Callable[[int], str]


def meaning(source: BlockSource, feature: Feature) -> Meaning:
    """Returns the labels of the rows of `feature`; DataError if the vocabularies cannot be read."""
    about = source.about if isinstance(source, PreparedSource) else {}
    if not isinstance(source, PreparedSource) or "encoder" not in about:
        known = feature.name in about.get("vocabularies", {})
        return _labelled({0: "unknown"} if known else {}, str)
    encoder = open_encoder(source.path)
    index = next(i for i, raw in enumerate(encoder.features) if raw.name == feature.name)
    raw, map_ = encoder.features[index], encoder.maps[index]
    special = {map_.missing_row: "missing"} if raw.optional else {}
    if not isinstance(map_, VocabularyMap):
        return _labelled(special, str)
    values, first = map_.vocabulary.values, first_row(raw)

    def value(row: int) -> str:
        found = values[row - first]
        if raw.values == "hex" and not map_.modulo:  # a reduced one is in no raw row
            return f"{found:08x}"
        return found.decode() if isinstance(found, bytes) else str(found)

    return _labelled({0: "unknown", **special}, value)


def _labelled(special: dict[int, str], value: Callable[[int], str]) -> Meaning:
    return Meaning(frozenset(special), lambda row: special[row] if row in special else value(row))
