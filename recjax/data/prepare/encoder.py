"""From raw rows to the rows of a batch, with the vocabularies and statistics of one preparation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import Bags, Batch, ElementGroup, Feature, Label, Schema
from recjax.data.prepare.chunk import Chunk, Coded, RawFeature, check_chunk
from recjax.data.prepare.coding import CodedChunk, code_chunk
from recjax.data.prepare.dense_columns import DenseEncoder, DenseStats
from recjax.data.prepare.ids import Frequency, Hash, IdMap, IdOptions, Modulo, VocabularyMap, load_maps
from recjax.data.storage.blocks import open_prepared
from recjax.errors import DataError

VOCABULARY = "vocabulary"  # folder in the prepared data: a folder for each feature, by its number


class Encoder:
    """Encodes raw rows. `open_encoder` makes one for prepared data.

    Attributes:
      name: of the dataset.
      features: the categorical columns of the raw rows.
      dense: names of their dense columns.
      maps: how the values of each feature become rows.
      by: how dense values become those of a batch.
      schema: the columns of the batches that it makes.
    """

    def __init__(
        self,
        name: str,
        features: Sequence[RawFeature],
        dense: Sequence[str],
        maps: Sequence[IdMap],
        by: DenseEncoder,
        labels: tuple[Label, ...] = (),
        label_group: str = "",
    ) -> None:
        """An encoder for raw rows of the dataset `name` with these columns; one map for each feature.

        Of several `labels` chunks have labels and weights [n, T]; of the elements of `label_group` [L, T].
        """
        self.name, self.features, self.dense, self.maps, self.by = name, features, dense, maps, by
        self.schema = Schema(
            dense=by.names(dense),
            features=tuple(
                Feature(feature.name, map_.table_rows, None if feature.jagged else 1)
                for feature, map_ in zip(features, maps, strict=True)
            ),
            labels=labels,
            groups=element_groups(features, label_group),
            label_group=label_group,
        )

    def encode(self, chunk: Chunk) -> Batch:
        """The rows of a chunk as a batch, in their order; which split they are of does not matter.

        Values that the vocabulary does not hold get row 0, and missing ones the row that `missing_row` names.

        Raises:
          DataError: a column is missing, or of another shape or type than the prepared data's.
        """
        check_chunk(chunk, self, [f.name for f in self.features if self.missing_row(f.name) is not None])
        return self.encode_coded(code_chunk(chunk))

    def missing_row(self, name: str) -> int | None:
        """The table row of a missing value of a feature: that of unknown values where training missed none.

        None if there is neither: ids that are computed, of a feature that is not optional.
        """
        feature, map_ = next((f, m) for f, m in zip(self.features, self.maps, strict=True) if f.name == name)
        if feature.optional:
            return map_.missing_row
        return 0 if isinstance(map_, VocabularyMap) else None

    def encode_coded(self, chunk: CodedChunk, rows: Mapping[str, np.ndarray] | None = None) -> Batch:
        """The same for a coded chunk; `rows` are what `rows_of_values` gives for its values, if that is known."""
        known = {} if rows is None else rows
        bags = {f.name: self.bags(f.name, chunk.columns[f.name], known.get(f.name)) for f in self.features}
        labels, lengths = chunk.labels, chunk.label_lengths
        if self.schema.label_group and lengths is None:  # of rows that are only to be scored
            lengths = bags[self.schema.labelled_features[0]].lengths
            labels = np.zeros(0 if lengths is None else int(lengths.sum()), np.float32)
        if self.schema.labels and labels.ndim == 1:  # likewise
            labels = np.zeros((len(labels), len(self.schema.labels)), np.float32)
        weights = np.ones_like(labels) if chunk.weights is None else chunk.weights
        return Batch(self.encode_dense(chunk.dense), bags, labels, weights, label_lengths=lengths)

    def rows_of_values(self, chunk: CodedChunk) -> dict[str, np.ndarray]:
        """Feature -> the table rows of its distinct values in a chunk, and last of a missing one: int32 [D + 1]."""
        return {
            feature.name: _rows(chunk.columns[feature.name], map_, self.missing_row(feature.name))
            for feature, map_ in zip(self.features, self.maps, strict=True)
        }

    def bags(self, name: str, column: Coded, rows: np.ndarray | None = None) -> Bags:
        """The ids of one feature, [n, 1], or [L] if it is jagged; `rows` as `rows_of_values` gives them."""
        feature, map_ = next((f, m) for f, m in zip(self.features, self.maps, strict=True) if f.name == name)
        if rows is None:
            rows = _rows(column, map_, self.missing_row(name), 2 * len(column.codes) < len(column.values))
        ids = np.take(rows, column.codes)
        return Bags(ids, column.lengths) if feature.jagged else Bags(ids[:, None])

    @property
    def dense_stats(self) -> DenseStats:
        """Statistics of the raw dense columns over the training split."""
        return self.by.stats

    def encode_dense(self, dense: np.ndarray) -> np.ndarray:
        """The dense columns of a batch, float32, from raw ones in the order of `dense`, [n, K], NaN where missing."""
        return self.by.encode(dense)


def element_groups(features: Sequence[RawFeature], label_group: str = "") -> tuple[ElementGroup, ...]:
    """The groups of aligned features, in the order of their first ones, `like` those of rows and of that group."""
    names = dict.fromkeys(feature.group for feature in features if feature.group)
    alone = {feature.name for feature in features if feature.group in ("", label_group)}
    return tuple(
        ElementGroup(
            name,
            tuple(f.name for f in features if f.group == name),
            tuple(f.like if f.like in alone and name != label_group else "" for f in features if f.group == name),
        )
        for name in names
    )


def _rows(column: Coded, map_: IdMap, missing: int | None, used_alone: bool = False) -> np.ndarray:
    """The table rows of distinct values, and last that of a missing one: int32 [D + 1].

    Of a small split, whose values are those of the whole chunk, it may be those that its entries have, and any others.
    """
    values = column.values
    rows = np.zeros(len(values) + 1, np.int32)
    if used_alone:
        used = np.zeros(len(rows), bool)
        used[column.codes] = True
        at = np.flatnonzero(used[:-1])
        rows[at] = map_.rows_of(values[at])
    else:
        rows[:-1] = map_.rows_of(values)
    rows[-1] = 0 if missing is None else missing  # the code of missing values, which there are none of then
    return rows


def describe(features: Sequence[RawFeature], dense: Sequence[str], ids: IdOptions, by: DenseEncoder) -> dict[str, Any]:
    """Returns everything that `open_encoder` needs besides the vocabularies, as JSON values."""
    options = {"kind": ids.kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in vars(ids).items()}}
    return {
        "features": describe_features(features),
        "dense": list(dense),
        "ids": options,
        **by.to_json(),
    }


def describe_features(features: Sequence[RawFeature]) -> list[dict[str, Any]]:
    """The raw columns, as JSON values; whose vocabulary they share only where they do."""
    return [
        {"name": f.name, "jagged": f.jagged, "optional": f.optional, "values": f.values}
        | ({"like": f.like} if f.like else {})
        | ({"group": f.group} if f.group else {})
        for f in features
    ]


def open_encoder(path: str | os.PathLike[str]) -> Encoder:
    """The encoder of prepared data: what turns raw rows into ids of the tables that were trained on these data.

    Args:
      path: a folder that `recjax data prepare` wrote.

    Raises:
      DataError: nothing intact there, or data that were not prepared from raw rows by vocabulary.
    """
    source = open_prepared(path)
    raw: Mapping[str, Any] | None = source.about.get("encoder")
    if raw is None:
        raise DataError(
            f"the data at {path} ({source.name}) do not say how raw rows become ids. Prepare them with a dataset that "
            "does (recjax data prepare), or encode the rows yourself."
        )
    try:
        return _opened(path, source.name, raw, source.schema)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"the data at {path} are damaged: what they say of their encoding makes no sense ({type(error).__name__}). "
            f"Prepare them again: recjax data prepare {source.name} --from PATH --out {path} --overwrite"
        ) from None


def _opened(path: str | os.PathLike[str], name: str, raw: Mapping[str, Any], schema: Schema) -> Encoder:
    if any("values" not in feature for feature in raw["features"]):
        raise DataError(
            f"the data at {path} were prepared by an older recjax, which did not keep how raw rows are encoded. "
            f"Prepare them again: recjax data prepare {name} --from PATH --out {path} --overwrite"
        )
    features = [RawFeature(**feature) for feature in raw["features"]]
    ids = options_of_ids(raw["ids"])
    folder = Path(path) / VOCABULARY
    try:
        maps = load_maps(folder, ids, features)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the vocabularies in {folder} cannot be read ({' '.join(str(error).split())[:200]}). Prepare the data "
            f"again: recjax data prepare {name} --from PATH --out {path} --overwrite"
        ) from None
    return Encoder(name, features, raw["dense"], maps, DenseEncoder.from_json(raw), schema.labels, schema.label_group)


def options_of_ids(raw: Mapping[str, Any]) -> IdOptions:
    """The options of ids, from what `describe` says of them; KeyError or TypeError where that makes no sense."""
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items() if key != "kind"}
    kinds: dict[str, Callable[..., IdOptions]] = {kind.kind: kind for kind in (Frequency, Hash, Modulo)}
    return kinds[raw["kind"]](**fields)
