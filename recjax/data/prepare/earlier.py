"""Vocabularies and statistics of data that were prepared before, such as yesterday's, for data that go on from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import roles
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.dense_columns import DenseStats
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.prepare.ids import IdMap, VocabularyMap
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import MANIFEST, prepare_again
from recjax.data.storage.run_snapshot import newest_snapshot
from recjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class EarlierData:
    """Data that were prepared before, as far as others can go on from them.

    Attributes:
      source: the data, or what a run kept of them.
      encoder: how their raw rows became ids and dense values.
      specs: their columns; of other data than tables of one's own ().
    """

    source: PreparedSource
    encoder: Encoder
    specs: tuple[ColumnSpec, ...]

    @property
    def table(self) -> dict[str, Any]:
        """Facts that they tell of themselves as a table of one's own."""
        described: dict[str, Any] = self.source.about.get("table", {})
        return described

    @property
    def sha256(self) -> str:
        """Hash of all that data which go on from these depend on."""
        about = {key: self.source.about.get(key) for key in ("encoder", "vocabularies", "table")}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def adopted(self, specs: Sequence[ColumnSpec]) -> list[ColumnSpec]:
        """Columns with the edges of buckets that they had, and a row of missing values where they had one."""
        then = {spec.name: spec for spec in self.specs}
        return [
            dataclasses.replace(spec, optional=then[spec.name].optional, edges=then[spec.name].edges)
            if spec.name in then and then[spec.name].role == spec.role
            else spec
            for spec in specs
        ]

    def stats(self, names: Sequence[str], new: DenseStats) -> DenseStats:
        """Statistics of dense columns: those of then, and `new` ones of columns that were not there."""
        at = {name: number for number, name in enumerate(self.encoder.dense)}
        then, fields = self.encoder.dense_stats, {}
        for field in dataclasses.fields(DenseStats):
            values = getattr(new, field.name).copy()
            for number, name in enumerate(names):
                if name in at:
                    values[number] = getattr(then, field.name)[at[name]]
            fields[field.name] = values
        return DenseStats(**fields)

    def grown(self, features: Sequence[RawFeature], maps: Sequence[IdMap], numbers: Sequence[int], out: Path) -> None:
        """Writes vocabularies in which each value of then has the row that it had, and new ones follow.

        Args:
          features: of the new data.
          maps: from their values to rows, as they were counted in the new data alone.
          numbers: for each feature the number of the one whose vocabulary it has.
          out: folder to write, a folder for each vocabulary by its number, as `ids.load_maps` reads it.

        Raises:
          DataError: a feature had values of another kind.
        """
        then = {f.name: map_ for f, map_ in zip(self.encoder.features, self.encoder.maps, strict=True)}
        shutil.rmtree(out, ignore_errors=True)
        for number in dict.fromkeys(numbers):
            name, map_ = features[number].name, maps[number]
            assert isinstance(map_, VocabularyMap)
            vocabulary, before = map_.vocabulary, then.get(name)
            if isinstance(before, VocabularyMap):
                kinds = [np.dtype(dtype).kind for dtype in (before.vocabulary.dtype, vocabulary.dtype)]
                if len(vocabulary.values) and len(before.vocabulary.values) and (kinds[0] == "S") != (kinds[1] == "S"):
                    there, here = ("text" if kind == "S" else "integers" for kind in kinds)
                    raise DataError(
                        f"column {name!r} holds {here}, but those of the data before it {there}: no value is the same. "
                        "Write the column as then."
                    )
                vocabulary = before.vocabulary.grown(vocabulary.values)
            vocabulary.save(out / str(number))


def open_earlier(path: str | os.PathLike[str], title: str) -> EarlierData:
    """Opens data to go on from.

    Args:
      path: a run folder, whose data count, or a folder of prepared data.
      title: of the setting, for messages.

    Raises:
      DataError: there are none, they are damaged, or do not say how raw rows become ids.
    """
    folder = Path(path)
    snapshot = newest_snapshot(folder)
    if not (folder / MANIFEST).exists() and not (snapshot / MANIFEST).exists():
        raise DataError(
            f"{title}={path} is neither a run folder that keeps what its data mean nor a folder of prepared data. Name "
            "a run on a table of your own, or what `recjax data prepare` wrote."
        )
    source = open_prepared(folder if (folder / MANIFEST).exists() else snapshot).verify()
    try:
        specs = tuple(roles.from_json(source.about["table"])) if "table" in source.about else ()
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(
            f"the data at {source.path} are damaged: what they say of their columns makes no sense. Prepare them "
            f"again: {prepare_again(source.path, source.name)} --overwrite"
        ) from None
    return EarlierData(source, open_encoder(source.path), specs)
