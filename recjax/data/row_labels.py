"""Values that the rows of a feature's table stand for, as far as the data tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from recjax.data.batch import Feature
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import VocabularyMap, first_row
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource


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
        return _named({0: "unknown"} if known else {}, str)
    encoder = open_encoder(source.path)
    index = next(i for i, raw in enumerate(encoder.features) if raw.name == feature.name)
    raw, map_ = encoder.features[index], encoder.maps[index]
    special = {map_.missing_row: "missing"} if raw.optional else {}
    if not isinstance(map_, VocabularyMap):
        return _named(special, str)
    values, first = map_.vocabulary.values, first_row(raw)

    def value(row: int) -> str:
        found = values[row - first]
        if raw.values == "hex" and not map_.modulo:  # a reduced one is in no raw row
            return f"{found:08x}"
        return found.decode() if isinstance(found, bytes) else str(found)

    return _named({0: "unknown", **special}, value)


def _named(special: dict[int, str], value: Callable[[int], str]) -> Meaning:
    return Meaning(frozenset(special), lambda row: special[row] if row in special else value(row))
