"""Layout of a sample (`Schema`) and content of a host batch (`Batch`).

These are the only types that data hands to the rest of recjax. A batch knows nothing of devices:
padding, routing and sharding happen later. Its samples may also lie as rows of 32-bit words, all columns of a sample
together (`RowLayout`, `RowBatch`): then one copy takes a batch of any samples out of many, whatever columns they have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np

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
      like: for each the feature whose values mean the same, such as the item that is offered beside the items of a
        history, and have the same ids; "" where there is none. It is one of the row itself, or of the elements that
        have labels (`Schema.label_group`).
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
      label_group: name of the group whose elements have labels and weights, each its own; "": samples have them.
    """

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()
    groups: tuple[ElementGroup, ...] = ()
    label_group: str = ""

    @property
    def labelled_features(self) -> tuple[str, ...]:
        """The features whose ids lie beside labels, one label (or T) for each; () where samples have the labels."""
        return next((group.features for group in self.groups if group.name == self.label_group), ())

    def feature(self, name: str) -> Feature:
        """The feature called `name`; KeyError if there is none."""
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Feature]:
        return {feature.name: feature for feature in self.features}


def wrong_groups(schema: Schema) -> str:
    """Returns the first fault of the groups of a schema, in words; "" if there is none."""
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
    if schema.label_group and not schema.labelled_features:
        return f"labels are those of the group {schema.label_group!r:.80}, which is none of them"
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
      labels: float32 [B], 0 or 1; or [B, T], where the schema names T labels. Where elements have labels
        (`Schema.label_group`), those of all samples end to end: [sum of label_lengths], or with a second axis T.
      weights: float32 of the shape of `labels`, non-negative; the loss is sum(w * l) / sum(w), of each label apart. A
        label of weight 0 does not count.
      position: global sample index of the first row: epoch * rows_per_epoch + offset in the epoch.
      label_lengths: None, or integers [B]: how many elements of each sample have labels.
    """

    dense: np.ndarray
    bags: dict[str, Bags]
    labels: np.ndarray
    weights: np.ndarray
    position: int = 0
    # By a factory, so that the class has no attribute of this name, which would hide that of a `RowBatch`.
    label_lengths: np.ndarray | None = dataclasses.field(default_factory=lambda: None)

    @property
    def size(self) -> int:
        """B, the number of samples."""
        return len(self.dense)

    @property
    def label_samples(self) -> np.ndarray:
        """The sample that each label is of, ascending: integers [L], of samples with one label [B]."""
        return np.repeat(np.arange(self.size), 1 if self.label_lengths is None else self.label_lengths)

    def with_bags(self, bags: dict[str, Bags]) -> Batch:
        """The same samples with other bags."""
        return Batch(self.dense, bags, self.labels, self.weights, self.position, self.label_lengths)


class Rows(Protocol):
    """Samples of a split as rows of words, any of which can be taken; safe to use from several threads.

    Attributes:
      layout: of a row.
      bytes: of all rows.
    """

    @property
    def layout(self) -> RowLayout: ...  # noqa: D102 (described above)

    @property
    def bytes(self) -> int: ...  # noqa: D102 (described above)

    def take(self, numbers_B: np.ndarray, out_BxW: np.ndarray) -> None:
        """Copies the rows of these numbers in the split, int64, to `out_BxW`."""
        ...

    def columns(self, numbers_B: np.ndarray, rows_BxW: np.ndarray) -> Batch:
        """The arrays of rows that were taken."""
        ...


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The place of each column among the words of a row: those of B samples are int32 [B, W].

    First come the ids of "plain" features, one word each: of bags of one size, without weights, of a table below 2^31
    rows. Bags that differ in size lie elsewhere, end to end, and after a sample's bags the labels and weights of its
    elements: of these a row has the lengths, and where they begin.

    Attributes:
      schema: of the samples.
    """

    schema: Schema

    @functools.cached_property
    def plain(self) -> tuple[Feature, ...]:
        """Features whose ids are the first words of a row, in the schema's order."""
        return tuple(f for f in self.schema.features if f.bag is not None and not f.weighted and id_words(f) == 1)

    @functools.cached_property
    def jagged(self) -> tuple[Feature, ...]:
        """Features whose ids lie elsewhere."""
        return tuple(feature for feature in self.schema.features if feature.bag is None)

    @functools.cached_property
    def spans(self) -> dict[tuple[str, str], slice]:
        """The words of each column, by what it holds and of which feature."""
        return dict(self._spans())

    def _spans(self) -> Iterator[tuple[tuple[str, str], slice]]:
        end = 0

        def span(name: str, feature: str, words: int) -> tuple[tuple[str, str], slice]:
            nonlocal end
            end += words
            return (name, feature), slice(end - words, end)

        for feature in self.plain:
            yield span("ids", feature.name, feature.bag or 0)
        for feature in self.schema.features:
            if feature.bag is not None and feature not in self.plain:
                yield span("ids", feature.name, feature.bag * id_words(feature))
                yield span("id weights", feature.name, feature.bag * feature.weighted)
        if self.jagged:
            yield span("start", "", 2)
        for feature in self.jagged:
            yield span("lengths", feature.name, 1)
        yield span("dense", "", len(self.schema.dense))
        for name in ("labels", "weights"):
            yield span(name, "", 0 if self.schema.label_group else len(self.schema.labels) or 1)

    @functools.cached_property
    def words(self) -> int:
        """W, the words of a row."""
        return max(span.stop for span in self.spans.values())

    def pack(self, batch: Batch, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Lays samples out as rows; their ids must have been validated, or be of the types that they are stored in.

        Args:
          batch: the samples.
          start: how many words the bags before them take that differ in size.

        Returns:
          the rows, int32 [B, W]; and the words of these samples' bags that differ in size, int32.

        Raises:
          DataError: the arrays are not those of the schema (`require_shapes`).
        """
        require_shapes(batch, self.schema)
        rows_BxW = np.empty((batch.size, self.words), np.int32)

        def put(name: str, feature: str, column: np.ndarray, dtype: Any) -> None:
            if column.size:
                words = np.ascontiguousarray(column, dtype).reshape(batch.size, -1)
                rows_BxW[:, self.spans[name, feature]] = words.view(np.int32)

        for feature in self.schema.features:
            bags = batch.bags[feature.name]
            if feature.bag is not None:
                put("ids", feature.name, bags.ids, _id_type(feature))
                if bags.weights is not None:
                    put("id weights", feature.name, bags.weights, np.float32)
        for name in ("dense", *(() if self.schema.label_group else ("labels", "weights"))):
            put(name, "", getattr(batch, name), np.float32)
        if not self.jagged:
            return rows_BxW, np.zeros(0, np.int32)
        lengths = {f.name: np.asarray(batch.bags[f.name].lengths, np.int64) for f in self.jagged}
        words_B = sum(lengths[f.name] * (id_words(f) + f.weighted) for f in self.jagged)
        if batch.label_lengths is not None:
            words_B = words_B + 2 * self._label_words * batch.label_lengths.astype(np.int64)
        starts_B = np.cumsum(words_B) - words_B
        values = np.empty(int(np.sum(words_B)), np.int32)
        put("start", "", starts_B + start, np.int64)
        for feature in self.jagged:
            put("lengths", feature.name, lengths[feature.name], np.int32)
            bags = batch.bags[feature.name]
            columns = [(np.ascontiguousarray(bags.ids, _id_type(feature)), id_words(feature))]
            columns += [] if bags.weights is None else [(np.ascontiguousarray(bags.weights, np.float32), 1)]
            for column, words in columns:
                values[_word_numbers(starts_B, lengths[feature.name], words)] = column.view(np.int32)
                starts_B = starts_B + lengths[feature.name] * words
        if batch.label_lengths is not None:
            for column in (batch.labels, batch.weights):
                at = _word_numbers(starts_B, batch.label_lengths, self._label_words)
                values[at] = np.ascontiguousarray(column, np.float32).view(np.int32).ravel()
                starts_B = starts_B + batch.label_lengths.astype(np.int64) * self._label_words
        return rows_BxW, values

    @property
    def _label_words(self) -> int:
        return len(self.schema.labels) or 1

    def columns(self, rows_BxW: np.ndarray, values: np.ndarray) -> Batch:
        """The samples that `pack` laid out so: views of the rows, where these allow it."""

        def column(name: str, feature: str, dtype: Any) -> np.ndarray:
            words = rows_BxW[:, self.spans[name, feature]]
            return np.ascontiguousarray(words).view(dtype) if np.dtype(dtype).itemsize > 4 else words.view(dtype)

        bags = {}
        starts_B = column("start", "", np.int64)[:, 0] if self.jagged else np.zeros(0, np.int64)
        for feature in self.schema.features:
            if feature.bag is not None:
                weights = column("id weights", feature.name, np.float32) if feature.weighted else None
                bags[feature.name] = Bags(column("ids", feature.name, _id_type(feature)), None, weights)
        for feature in self.jagged:
            lengths_B = column("lengths", feature.name, np.int32)[:, 0]
            parts = []
            types = [_id_type(feature), np.dtype(np.float32)] if feature.weighted else [_id_type(feature)]
            for dtype in types:
                words = dtype.itemsize // 4
                parts.append(values[_word_numbers(starts_B, lengths_B, words)].view(dtype))
                starts_B = starts_B + lengths_B.astype(np.int64) * words
            bags[feature.name] = Bags(parts[0], lengths_B, parts[1] if feature.weighted else None)
        dense, labels, weights = (column(name, "", np.float32) for name in ("dense", "labels", "weights"))
        label_lengths = None
        if self.schema.label_group:
            label_lengths = bags[self.schema.labelled_features[0]].lengths
            assert label_lengths is not None
            parts = []
            for _ in range(2):
                words = values[_word_numbers(starts_B, label_lengths, self._label_words)].view(np.float32)
                parts.append(words.reshape(-1, self._label_words))
                starts_B = starts_B + label_lengths.astype(np.int64) * self._label_words
            labels, weights = parts
        if not self.schema.labels:
            labels, weights = labels[:, 0], weights[:, 0]
        ordered = {f.name: bags[f.name] for f in self.schema.features}
        return Batch(dense, ordered, labels, weights, label_lengths=label_lengths)


def id_words(feature: Feature) -> int:
    """Words that an id takes: 1 where the table has below 2^31 rows, else 2."""
    return 1 if feature.rows < 2**31 else 2


def _id_type(feature: Feature) -> np.dtype:
    return np.dtype(np.int32 if id_words(feature) == 1 else np.int64)


def _word_numbers(starts_B: np.ndarray, lengths_B: np.ndarray, words: int) -> np.ndarray:
    """Numbers of the words of bags that begin at these words and have so many entries of `words` words each."""
    words_B = lengths_B.astype(np.int64) * words
    return np.repeat(starts_B - (np.cumsum(words_B) - words_B), words_B) + np.arange(int(words_B.sum()))


_COLUMNS = frozenset(("dense", "bags", "labels", "weights", "label_lengths"))


class RowBatch(Batch):
    """A batch whose samples lie as rows of words; its arrays are made when one of them is first asked for.

    Attributes:
      rows: what it is taken from.
      numbers_B: int64, of its rows in the split.
      number: its own, among the batches of a stream.
    """

    def __init__(self, rows: Rows, numbers_B: np.ndarray, position: int, number: int) -> None:
        """Takes nothing yet."""
        for name, value in (("rows", rows), ("numbers_B", numbers_B), ("position", position), ("number", number)):
            object.__setattr__(self, name, value)

    rows: Rows
    numbers_B: np.ndarray
    number: int

    @property
    def size(self) -> int:
        """See `Batch`."""
        return len(self.numbers_B)

    def take(self, out_BxW: np.ndarray) -> None:
        """Takes its rows to `out_BxW`, which must then stay as it is."""
        self.rows.take(self.numbers_B, out_BxW)
        object.__setattr__(self, "rows_BxW", out_BxW)

    @functools.cached_property
    def rows_BxW(self) -> np.ndarray:
        """Its rows: int32 [B, W]."""
        out_BxW = np.empty((self.size, self.rows.layout.words), np.int32)
        self.rows.take(self.numbers_B, out_BxW)
        return out_BxW

    def __getattr__(self, name: str) -> Any:
        """Makes its arrays."""
        if name not in _COLUMNS:
            raise AttributeError(name)
        columns = self.rows.columns(self.numbers_B, self.rows_BxW)
        for column in _COLUMNS:
            object.__setattr__(self, column, getattr(columns, column))
        return getattr(self, name)


def require_shapes(batch: Batch, schema: Schema) -> None:
    """Refuses a batch whose arrays are not those of the schema (DataError); looks at no value but lengths of bags."""
    B, count = batch.size, _count_labels(batch, schema)
    each = (count, len(schema.labels)) if schema.labels else (count,)
    for name, shape in (("dense", (B, len(schema.dense))), ("labels", each), ("weights", each)):
        if (found_shape := getattr(batch, name).shape) != shape:
            raise DataError(
                f"batch at sample {batch.position}: {name} has shape {found_shape}, but the schema asks "
                f"for {shape}. Prepare the data again, or correct the code that builds the batch."
            )
    for feature in schema.features:
        if feature.name not in batch.bags:
            raise DataError(
                f"batch at sample {batch.position} has no feature {feature.name!r}; it has "
                f"{', '.join(batch.bags)}. Prepare the data again with this schema."
            )
        _require_bags(batch.bags[feature.name], feature, batch)


def _count_labels(batch: Batch, schema: Schema) -> int:
    """Counts the labels of each name that a batch has by its schema; DataError where its elements are not those."""
    lengths_B = batch.label_lengths
    if not schema.label_group:
        if lengths_B is not None:
            raise DataError(
                f"batch at sample {batch.position} has label_lengths, but the schema names no label_group. Leave them "
                "out, or name the group whose elements have labels."
            )
        return batch.size
    of_first = batch.bags[name].lengths if (name := schema.labelled_features[0]) in batch.bags else None
    if of_first is None or lengths_B is None or not np.array_equal(lengths_B, of_first):
        raise DataError(
            f"batch at sample {batch.position}: labels are those of the elements of group {schema.label_group!r}, so "
            f"label_lengths must be the lengths of its feature {name!r}, but they are not. Correct the code that "
            "builds the batch."
        )
    return int(lengths_B.sum())


def _require_bags(bags: Bags, feature: Feature, batch: Batch) -> None:
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
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise DataError(f"{place}: id weights must be shaped like the ids {bags.ids.shape}.")
