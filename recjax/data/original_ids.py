"""The ids of the raw data and the rows of a feature's table that stand for them, in both directions."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from recjax.data.arrow import roles
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.encoder import open_encoder
from recjax.data.prepare.ids import IdMap, VocabularyMap, first_row, stable_hash
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError, NoSuchName
from recjax.utils.text import near

_COMPARED = 20_000  # ids at most that a text is compared with for a hint


class OriginalIds:
    """The ids of one feature.

    Attributes:
      shared: why no id has a row to itself; "" if ids have.
      first: the row of the first id.
      count: ids that have a row to themselves: rows first .. first + count - 1.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        raw: RawFeature | None = None,
        map_: IdMap | None = None,
        spec: ColumnSpec | None = None,
    ) -> None:
        """The ids of feature `name`, whose table has `rows` rows; without a map these are the rows' numbers.

        `spec` tells what became of the column's values before the map, in a table of one's own.
        """
        self.name, self._raw, self._map = name, raw, map_
        self._hashed, self._edges = (spec.hashed, spec.edges) if spec else (0, None)
        self._boolean = spec is not None and spec.kind == "boolean"
        self._text = spec.kind == "text" if spec else raw is not None and raw.values == "text"
        self.shared, self.first, self.count = "", 0, rows
        if map_ is not None and raw is not None:
            self.first = first_row(raw)
            self.count = map_.table_rows - self.first
            if not isinstance(map_, VocabularyMap) or map_.modulo or self._hashed:
                self.shared = f"the ids of {name!r} were hashed or reduced, so that several share a row"

    def values(self) -> np.ndarray:
        """The ids in the order of their rows, [count]: integers, or text (dtype U); hexadecimal ones as text.

        Those of a column in buckets are texts such as "[0.5, 2.0)", a bucket's least number and the next one's.

        Raises:
          ConfigError: ids share rows.
        """
        if self.shared:
            raise ConfigError(f"{self.shared}, and the data do not list them. Ask for the rows of ids that you know.")
        if not isinstance(self._map, VocabularyMap) or self._raw is None:
            return np.arange(self.count)
        values = self._map.vocabulary.values
        if self._edges is not None:
            return np.array([_bucket(self._edges, bucket) for bucket in values.tolist()], "U")
        if self._raw.values == "hex":
            return np.array([f"{value:08x}" for value in values.tolist()], "U8")
        return np.strings.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values

    def rows_of(self, ids: Iterable[Any]) -> np.ndarray:
        """The rows of ids, int64 [n]. None and NaN stand for a missing value, where the table has a row for those.

        Raises:
          ConfigError: `ids` is one id instead of several, or one is of another type than the data's.
          NoSuchName: the data have no such id, with those that come near.
        """
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise ConfigError(f"ids of {self.name!r}: give a list, such as [{ids!r}], not one id.")
        listed = next((getattr(ids, to)() for to in ("to_pylist", "tolist") if hasattr(ids, to)), None)
        listed = list(ids) if listed is None else listed
        rows = np.zeros(len(listed), np.int64)
        given = [at for at, value in enumerate(listed) if not (value is None or value != value)]
        if len(given) < len(listed):
            rows[:] = self._missing()
        keys = [self._key(listed[at]) for at in given]
        found = self._rows(keys)
        if (unknown := np.flatnonzero(found < 0)).size:
            raise self._unknown(listed[given[int(unknown[0])]], keys[int(unknown[0])])
        rows[given] = found
        return rows

    def _missing(self) -> int:
        if self._raw is None or self._map is None or not self._raw.optional:
            raise NoSuchName(f"the table of {self.name!r} has no row for missing values. Leave them out.")
        return self._map.missing_row

    def _key(self, value: Any) -> Any:
        """An id as vocabularies hold it: bytes or an integer. Of a column in buckets the bucket's number."""
        if self._edges is not None:
            return self._bucket_of(value, self._edges)
        if self._boolean and isinstance(value, bool):
            return int(value)
        if self._text and isinstance(value, (str, bytes)):
            return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if self._raw is not None and self._raw.values == "hex" and isinstance(value, str):
            try:
                return int(value, 16)
            except ValueError:
                raise NoSuchName(f"{self.name!r} has no id {_short(value)}: ids there are hexadecimal.") from None
        if not self._text and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return int(value)
        kind = "text" if self._text else "integers"
        raise ConfigError(
            f"{self.name!r} has no id {_short(value)}, which is of type {type(value).__name__}: ids there are {kind}."
        )

    def _bucket_of(self, value: Any, edges: Sequence[float]) -> int:
        if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
            return int(np.searchsorted(edges, float(value), "right"))
        names = [_bucket(edges, bucket) for bucket in range(len(edges) + 1)]
        if value not in names:
            raise NoSuchName(
                f"{self.name!r} has no bucket {_short(value)}. Give a number, or one of {', '.join(names[:10])}."
            )
        return names.index(value)

    def _rows(self, keys: Sequence[Any]) -> np.ndarray:
        """The row of every key, int64 [n]; -1 of those that the data do not have."""
        if self._map is None:
            return np.array([key if 0 <= key < self.count else -1 for key in keys], np.int64)
        if self._hashed:
            held = np.array(keys, "S") if self._text else np.array([key % 2**64 for key in keys], np.uint64)
            rows = self._map.rows_of((stable_hash(held) % np.uint64(self._hashed)).astype(np.int64)).astype(np.int64)
        elif self._text:
            rows = self._map.rows_of(np.array(keys, "S")).astype(np.int64)
        else:
            wide = keys and max(keys) > np.iinfo(np.int64).max and min(keys) >= 0
            dtype = np.dtype(np.uint64 if wide else np.int64)
            if isinstance(self._map, VocabularyMap) and not self._map.modulo:
                dtype = self._map.vocabulary.dtype
            limits = np.iinfo(dtype)
            fits = np.array([limits.min <= key <= limits.max for key in keys], bool)
            held = np.array([key if fit else 0 for key, fit in zip(keys, fits, strict=True)], dtype)
            rows = np.where(fits, self._map.rows_of(held).astype(np.int64), -1)
        if isinstance(self._map, VocabularyMap):
            rows[rows < self.first] = -1
        return rows

    def _unknown(self, value: Any, key: Any) -> NoSuchName:
        similar = self._near(key)
        hint = f" Near it are {', '.join(map(repr, similar))}." if similar else ""
        count = f"one of {self.count:,}" if self.count else "one, as there are none"
        return NoSuchName(f"the table of {self.name!r} has no row for the id {_short(value)}.{hint} Give {count}.")

    def _near(self, key: Any) -> list[Any]:
        """At most three ids that resemble one."""
        if self.shared or not self.count:
            return []
        values = self.values()
        if isinstance(key, int) and values.dtype.kind in "iu":
            order = sorted(values.tolist(), key=lambda value: (abs(value - key), value))
            return order[:3]
        if self._edges is not None:
            return values[:3].tolist()
        text = key.decode("utf-8", "replace") if isinstance(key, bytes) else f"{key:08x}"
        if len(values) > _COMPARED:  # those that begin alike
            values = np.sort(values)
            at = int(np.searchsorted(values, text))
            values = values[max(at - 50, 0) : at + 50]
        return near(text, values.tolist())


def original_ids(source: PreparedSource | None, name: str, rows: int) -> OriginalIds:
    """The ids of the rows of a feature's table.

    Args:
      source: what a run kept of its data; without it, or where it does not say how ids came about, the ids are the
        rows' numbers, which are then all that the data have.
      name: of the feature.
      rows: V, of its table.

    Raises:
      DataError: the vocabularies cannot be read.
    """
    if source is None or "encoder" not in source.about:
        return OriginalIds(name, rows)
    encoder = open_encoder(source.path)
    described = source.about.get("table")
    specs = {spec.name: spec for spec in roles.from_json(described)} if described else {}
    for raw, map_ in zip(encoder.features, encoder.maps, strict=True):
        if raw.name == name:
            return OriginalIds(name, rows, raw, map_, specs.get(name))
    return OriginalIds(name, rows)


def _bucket(edges: Sequence[float], bucket: int) -> str:
    low, high = (-math.inf, *edges)[bucket], (*edges, math.inf)[bucket]
    return f"[{low}, {high})"


def _short(value: Any) -> str:
    return reprlib.repr(value)
