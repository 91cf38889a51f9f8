"""Layout of a sample (`Schema`) and content of a host batch (`Batch`).

These are the only types that data hands to the rest of recjax. A batch knows nothing of devices:
padding, routing and sharding happen later.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from recjax.data.prepare.dense_columns import fits_float32
from recjax.errors import DataError

LabelKind = Literal["binary", "number", "class"]
ANY_ID = 2**64  # rows of a feature whose ids are any 64-bit integers: for tables whose rows are given to keys
ONLY = "label"  # what the one binary label is called where it needs a name


@dataclasses.dataclass(frozen=True)
class Feature:
    """One categorical feature.

    Attributes:
      name: unique in the schema; error messages use it.
      rows: V, the number of distinct ids; valid ids are 0 <= id < rows. Or ANY_ID: all 64-bit integers, also those
        below 0, are valid.
      bag: ids per sample H when that is fixed (1 is one-hot), or None when bags are jagged.
      weighted: whether every id carries a float weight.
    """

    name: str
    rows: int
    bag: int | None = 1
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Label:
    """One of several labels.

    Attributes:
      name: unique in the schema; a task of this name learns it.
      kind: "binary", 0 or 1; "number", any finite number; or "class", an integer from 0 to below `classes`.
      classes: of a class, how many there are, at least 2; 0 of the other kinds.
      weight: column of the raw data that its weights come from; "": those of the samples. It only describes.
    """

    name: str
    kind: LabelKind = "binary"
    classes: int = 0
    weight: str = ""


@dataclasses.dataclass(frozen=True)
class ElementGroup:
    """Jagged features whose bags are aligned: the i-th ids of a sample's bags belong to one element, such as one event.

    Attributes:
      name: unique among the groups.
      features: names of the features. In each sample their bags are equally long.
      like: for each the feature of the row itself whose values mean the same, such as the item that is offered beside
        the items of a history, and have the same ids; "" where there is none.
    """

    name: str
    features: tuple[str, ...]
    like: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.like:
            object.__setattr__(self, "like", ("",) * len(self.features))


@dataclasses.dataclass(frozen=True)
class Schema:
    """Names and sizes of a dataset's columns: what a model is built from.

    Attributes:
      dense: names of the K dense features, in column order.
      features: the categorical features, in the order in which the model sees them.
      labels: the T labels, in column order; empty: one binary label, and arrays of labels without a second axis.
      groups: groups of aligned features; a feature is of one at most.
    """

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()
    groups: tuple[ElementGroup, ...] = ()

    def feature(self, name: str) -> Feature:
        """The feature called `name`; KeyError if there is none."""
        return next(f for f in self.features if f.name == name)


def wrong_groups(schema: Schema) -> str:
    """Says what is wrong with the groups of a schema; "" if nothing is."""
    jagged = {feature.name for feature in schema.features if feature.bag is None}
    taken: dict[str, str] = {}
    for number, group in enumerate(schema.groups):
        if not group.name or not group.features or group.name in (other.name for other in schema.groups[:number]):
            return f"group {group.name!r:.80} has no name of its own, or no features"
        for name in group.features:
            if name not in jagged:
                return f"group {group.name!r:.80} has {name!r:.80}, which is no jagged feature"
            named = {"", *(feature.name for feature in schema.features)}
            if len(group.like) != len(group.features) or not named.issuperset(group.like):
                return f"group {group.name!r:.80} is like {group.like}, which are not the names of as many features"
            if name in taken:
                return f"feature {name!r:.80} is in the groups {taken[name]!r:.80} and {group.name!r:.80}"
            taken[name] = group.name
    return ""


@dataclasses.dataclass(frozen=True)
class Bags:
    """The ids of one feature for B samples, on the host.

    Unsigned integers become int64: NumPy takes the difference of unsigned and signed 64-bit integers as floats, and
    that of two unsigned ones below 0 as a huge number.

    Attributes:
      ids: integers, [B, H] for a fixed bag or [L] (all bags end to end) for jagged ones.
      lengths: None for a fixed bag, else integers [B] with sum L; 0 is an empty bag.
      weights: None, or float32 of the shape of `ids`.
    """

    ids: np.ndarray
    lengths: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "lengths"):
            array = getattr(self, name)
            if isinstance(array, np.ndarray) and array.dtype.kind == "u":
                object.__setattr__(self, name, _signed(array))

    def samples(self) -> np.ndarray:
        """Returns the sample that each id belongs to, int [L], ascending; L is B * H for a fixed bag."""
        if self.lengths is None:
            return np.repeat(np.arange(self.ids.shape[0]), self.ids.shape[1])
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def _signed(array: np.ndarray) -> np.ndarray:
    """Unsigned integers as int64; as they are if one does not fit, which no table has a row for."""
    if array.dtype.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        return array
    return array.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """B samples on the host; the last batch of an epoch may hold fewer than the batch size.

    Attributes:
      dense: float32 [B, K].
      bags: feature name -> Bags, in the schema's order.
      labels: float32 [B], 0 or 1; or [B, T], where the schema names T labels.
      weights: float32 of the shape of `labels`, non-negative; the loss is sum(w * l) / sum(w), of each label apart. A
        label of weight 0 does not count.
      position: global sample index of the first row: epoch * rows_per_epoch + offset in the epoch.
    """

    dense: np.ndarray
    bags: dict[str, Bags]
    labels: np.ndarray
    weights: np.ndarray
    position: int = 0

    @property
    def size(self) -> int:
        """B, the number of samples."""
        return len(self.labels)


def validate(batch: Batch, schema: Schema) -> None:
    """Refuses a batch that the device would get silently wrong.

    Ids are checked in their own integer type, before anything narrows them to int32.

    Raises:
      DataError: an id out of range, a non-finite dense value or weight, a label that is not of its kind, or arrays
        whose shapes do not fit the schema; the message names feature (or column), row and value.
    """
    B, K = batch.size, len(schema.dense)
    each = (B, len(schema.labels)) if schema.labels else (B,)
    for name, array, shape in (
        ("dense", batch.dense, (B, K)),
        ("labels", batch.labels, each),
        ("weights", batch.weights, each),
    ):
        if array.shape != shape:
            raise DataError(
                f"batch at sample {batch.position}: {name} has shape {array.shape}, but the schema asks "
                f"for {shape}. Prepare the data again, or correct the code that builds the batch."
            )
        if not (fine := fits_float32(array)).all():
            where = tuple(int(i) for i in np.argwhere(~fine)[0])
            column = f"dense feature {schema.dense[where[1]]!r}" if name == "dense" else name
            raise DataError(
                f"{column} is {array[where]} in sample {batch.position + where[0]} (row {where[0]} of the batch). "
                "Every dense value, label and weight must be finite as float32: clean the source file (recjax has no "
                "way to know what a missing value means) and prepare the data again."
            )
    _validate_labels(batch, schema)
    if (batch.weights < 0).any():
        at = tuple(int(i) for i in np.argwhere(batch.weights < 0)[0])
        of = f" of label {schema.labels[at[1]].name!r}" if schema.labels else ""
        raise DataError(
            f"the weight{of} of sample {batch.position + at[0]} is {batch.weights[at]}; weights must not be negative. "
            "Correct the column that the weights come from."
        )
    for feature in schema.features:
        if feature.name not in batch.bags:
            raise DataError(
                f"batch at sample {batch.position} has no feature {feature.name!r}; it has "
                f"{', '.join(batch.bags)}. Prepare the data again with this schema."
            )
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


def _validate_labels(batch: Batch, schema: Schema) -> None:
    if not schema.labels:
        wrong = (batch.labels != 0) & (batch.labels != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                f"the label of sample {batch.position + row} is {batch.labels[row]}; labels must be 0 or 1. Prepare "
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
                f"label {label.name!r} of sample {batch.position + row} is {labels_B[row]}; it must be {kinds}, also "
                "where it weighs 0. Prepare the data again with such labels, or as another kind."
            )


def _validate_bags(bags: Bags, feature: Feature, batch: Batch) -> None:
    B, place = batch.size, f"feature {feature.name!r}, batch at sample {batch.position}"
    if bags.ids.dtype.kind not in "iu":
        raise DataError(f"{place}: ids are {bags.ids.dtype}, not integers. Map the values to ids 0..rows-1 first.")
    if feature.bag is not None:
        if bags.lengths is not None or bags.ids.shape != (B, feature.bag):
            raise DataError(
                f"{place}: ids have shape {bags.ids.shape}, but the schema declares {feature.bag} ids for each of "
                f"{B} samples. Declare the feature jagged (bag=None) if bags differ in size."
            )
    elif bags.lengths is None or bags.lengths.shape != (B,) or bags.lengths.dtype.kind not in "iu":
        raise DataError(f"{place}: jagged bags need integer lengths of shape ({B},), one for each sample.")
    elif (bags.lengths < 0).any() or int(bags.lengths.sum()) != bags.ids.shape[0] or bags.ids.ndim != 1:
        raise DataError(
            f"{place}: the lengths sum to {int(bags.lengths.sum())}, but ids have shape {bags.ids.shape}. "
            "Lengths must be non-negative and sum to the number of ids."
        )
    if feature.weighted != (bags.weights is not None):
        raise DataError(
            f"{place}: the schema says weighted={feature.weighted}, but the batch carries "
            f"{'no' if bags.weights is None else ''} id weights. Make the two agree."
        )
    if bags.weights is not None and (bags.weights.shape != bags.ids.shape or not np.isfinite(bags.weights).all()):
        raise DataError(f"{place}: id weights must be finite and shaped like the ids {bags.ids.shape}.")
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
