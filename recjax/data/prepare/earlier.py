"""Vocabularies and statistics of data that were prepared before, such as yesterday's, for data that go on from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import roles
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.prepare.chunk import RawFeature
from recjax.data.prepare.counting import Run, merge
from recjax.data.prepare.dense_columns import DenseStats
from recjax.data.prepare.encoder import VOCABULARY, Encoder, open_encoder
from recjax.data.prepare.ids import VocabularyMap, first_row, vocabulary_numbers
from recjax.data.prepare.vocabulary import Vocabulary
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import MANIFEST, prepare_again
from recjax.data.storage.run_snapshot import newest_snapshot
from recjax.errors import DataError
from recjax.utils.npy import map_array

_WAITING, _COUNTS = "waiting.npy", "waiting_counts.npy"  # beside a vocabulary


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

    def grow(self, feature: RawFeature, run: Run, least: int, out: Path) -> None:
        """Writes a vocabulary in which each value of then has the row that it had, and new ones follow.

        Args:
          feature: of the new data.
          run: the counts of its values in these.
          least: how often a value must have occurred to have a row. Values that have not yet, here and in the earlier
            data that went on from others themselves, are written beside it with their counts.
          out: folder to write, as `ids.load_maps` reads it.

        Raises:
          DataError: the feature had values of another kind, or what waits is damaged.
        """
        at = next((at for at, known in enumerate(self.encoder.features) if known.name == feature.name), None)
        before = None if at is None else self.encoder.maps[at]
        if at is None or not isinstance(before, VocabularyMap):
            values, counts = run
            vocabulary = Vocabulary.counted(values, counts, least, first_row(feature))
        else:
            self._refuse_other_kind(feature.name, before.vocabulary, run[0])
            values, counts = _unknown_to(before.vocabulary, run)
            values, counts = _added((values, counts), self._waiting(vocabulary_numbers(self.encoder.features)[at]))
            vocabulary = before.vocabulary.grown(Vocabulary.counted(values, counts, least).values)
        vocabulary.save(out)
        if (rare := counts < least).any():
            np.save(out / _WAITING, values[rare], allow_pickle=False)
            np.save(out / _COUNTS, counts[rare], allow_pickle=False)

    def _refuse_other_kind(self, name: str, before: Vocabulary, values: np.ndarray) -> None:
        kinds = [np.dtype(dtype).kind for dtype in (before.dtype, values.dtype)]
        if len(values) and len(before.values) and (kinds[0] == "S") != (kinds[1] == "S"):
            there, here = ("text" if kind == "S" else "integers" for kind in kinds)
            raise DataError(
                f"column {name!r} holds {here}, but those of the data before it {there}: no value is the same. Write "
                "the column as then."
            )

    def _waiting(self, number: int) -> Run:
        """Values of a vocabulary that were too rare for a row, and how often they occurred."""
        folder = self.source.path / VOCABULARY / str(number)
        if not (folder / _WAITING).exists():
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        try:
            values, counts = (np.array(map_array(folder / name)) for name in (_WAITING, _COUNTS))
            if values.dtype.kind not in "iuS" or counts.dtype != np.int64 or values.shape != counts.shape:
                raise ValueError("they do not fit each other")
        except (OSError, ValueError) as error:
            raise DataError(
                f"the values that wait for a row in {folder} cannot be read ({' '.join(str(error).split())[:200]}). "
                "Restore that folder from a copy."
            ) from None
        return values, counts


def _unknown_to(vocabulary: Vocabulary, run: Run) -> Run:
    """The counts of those values that have no row."""
    values, counts = run
    unknown = vocabulary.encode(values) == 0 if len(values) else np.zeros(0, bool)
    return values[unknown], counts[unknown]


def _added(run: Run, other: Run) -> Run:
    """Counts of two runs together."""
    values = [of[0] for of in (run, other) if len(of[0])]
    if {of.dtype.kind for of in values} == {"i", "u"}:  # of which NumPy would make floats
        wide = np.int64 if min(of.min() for of in values) < 0 else np.uint64
        run, other = ((of[0].astype(wide), of[1]) for of in (run, other))
    return merge([run, other])


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
