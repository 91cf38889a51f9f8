"""Checks of a host batch: what the device would get silently wrong is refused."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from recjax.data.batch import ANY_ID, Bags, Batch, Feature, RowBatch, RowLayout, Schema, require_shapes
from recjax.data.prepare.dense_columns import fits_float32
from recjax.errors import DataError


@functools.lru_cache(16)
def _plain_limits(layout: RowLayout, schema: Schema) -> tuple[np.ndarray, Schema]:
    """Rows of the table of each of the first words of a row, uint32; and the schema without these features."""
    names = {feature.name for feature in layout.plain}
    rows = [np.uint32(schema.feature(feature.name).rows) for feature in layout.plain]
    others = tuple(feature for feature in schema.features if feature.name not in names)
    return np.repeat(rows, [feature.bag or 0 for feature in layout.plain]), dataclasses.replace(schema, features=others)


def validate(batch: Batch, schema: Schema) -> None:
    """Refuses a batch that the device would get silently wrong.

    Ids are checked in their own integer type, before anything narrows them to int32.

    Raises:
      DataError: an id out of range, a non-finite dense value or weight, a label that is not of its kind, or arrays
        whose shapes do not fit the schema; the message names feature (or column), row and value.
    """
    if isinstance(batch, RowBatch) and (layout := batch.rows.layout).plain:  # one pass for all of their ids
        limits, others = _plain_limits(layout, schema)
        schema = others if (batch.rows_BxW[:, : len(limits)].view(np.uint32) < limits).all() else schema
    require_shapes(batch, schema)
    for name in ("dense", "labels", "weights"):
        array = getattr(batch, name)
        if not (fine := fits_float32(array)).all():
            where = tuple(int(i) for i in np.argwhere(~fine)[0])
            column = f"dense feature {schema.dense[where[1]]!r}" if name == "dense" else name
            row = where[0] if name == "dense" else int(batch.label_samples[where[0]])
            raise DataError(
                f"{column} is {array[where]} in sample {batch.position + row} (row {row} of the batch). "
                "Every dense value, label and weight must be finite as float32: clean the source file (recjax has no "
                "way to know what a missing value means) and prepare the data again."
            )
    _validate_labels(batch, schema)
    if (batch.weights < 0).any():
        at = tuple(int(i) for i in np.argwhere(batch.weights < 0)[0])
        of = f" of label {schema.labels[at[1]].name!r}" if schema.labels else ""
        raise DataError(
            f"the weight{of} of {_place_of_label(batch, at[0])} is {batch.weights[at]}; weights must not be negative. "
            "Correct the column that the weights come from."
        )
    for feature in schema.features:
        _validate_bags(batch.bags[feature.name], feature, batch)
    for group in schema.groups:
        lengths_FxB = np.array([batch.bags[name].lengths for name in group.features])
        if (apart_B := (lengths_FxB != lengths_FxB[0]).any(axis=0)).any():
            row = int(np.argmax(apart_B))
            sizes = ", ".join(
                f"{name} {n}" for name, n in zip(group.features, lengths_FxB[:, row].tolist(), strict=True)
            )
            raise DataError(
                f"the features of group {group.name!r} have unequal numbers of ids in sample {batch.position + row} "
                f"(row {row} of the batch): {sizes}. One of each belongs to one element: correct the data."
            )


def _place_of_label(batch: Batch, number: int) -> str:
    """The sample of a label in words, and which of its elements has it."""
    if batch.label_lengths is None:
        return f"sample {batch.position + number}"
    row = int(batch.label_samples[number])
    return f"element {number - int(batch.label_lengths[:row].sum())} of sample {batch.position + row}"


def _validate_labels(batch: Batch, schema: Schema) -> None:
    if not schema.labels:
        wrong = (batch.labels != 0) & (batch.labels != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                f"the label of {_place_of_label(batch, row)} is {batch.labels[row]}; labels must be 0 or 1. Prepare "
                "the data again with labels that say only whether it happened."
            )
        return
    for column, label in enumerate(schema.labels):
        if label.kind == "number":
            continue
        labels_B = batch.labels[:, column]
        most = 1 if label.kind == "binary" else label.classes - 1
        wrong = (labels_B != np.floor(labels_B)) | (labels_B < 0) | (labels_B > most)
        if wrong.any():
            row = int(np.argmax(wrong))
            kinds = "0 or 1" if label.kind == "binary" else f"a class from 0 to {most}"
            raise DataError(
                f"label {label.name!r} of {_place_of_label(batch, row)} is {labels_B[row]}; it must be {kinds}, also "
                "where it weighs 0. Prepare the data again with such labels, or as another kind."
            )


def _validate_bags(bags: Bags, feature: Feature, batch: Batch) -> None:
    if bags.weights is not None and not np.isfinite(bags.weights).all():
        place = f"feature {feature.name!r}, batch at sample {batch.position}"
        raise DataError(f"{place}: id weights must be finite.")
    if feature.rows == ANY_ID:
        return
    unsigned = bags.ids.view(bags.ids.dtype.str.replace("i", "u"))  # negative ones are large there: one pass for both
    if unsigned.size and int(unsigned.max()) >= feature.rows:
        bad = (bags.ids < 0) | (bags.ids >= feature.rows)
        flat = int(np.argmax(bad.ravel()))
        if bags.lengths is None:
            row = flat // (feature.bag or 1)
        else:
            row = int(np.searchsorted(np.cumsum(bags.lengths), flat, side="right"))
        raise DataError(
            f"id {int(bags.ids.ravel()[flat])} of feature {feature.name!r} in sample {batch.position + row} (row {row} "
            f"of the batch) is out of range: the table has {feature.rows} rows, ids 0 to {feature.rows - 1}. Prepare "
            "the data again with a vocabulary that covers it, or hash the ids when preparing."
        )
