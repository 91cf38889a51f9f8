"""Checks blocks from a user's own code, and makes of each the `Batch` that a schema asks for.

Input with only one meaning is taken: a list for an array, ids [n] of a one-hot feature, no weights. All else is
refused with the split, the block and the column.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np

from recjax.data.batch import Bags, Batch, ElementGroup, Feature, Label, LabelKind, Schema, wrong_groups
from recjax.data.batch_checks import validate
from recjax.data.source import SPLITS, split_called
from recjax.errors import DataError
from recjax.utils.text import first_repeated

_MOST_EXACT = 2.0**53  # beyond it floats leave integers out


def check_schema(schema: Any) -> Schema:
    """Checks a schema, and returns it with tuples for lists.

    Raises:
      DataError: it is no `Schema`, or a column of it makes no sense.
    """
    if not isinstance(schema, Schema):
        raise DataError(f"the schema is {_a(schema)}, not a recjax.data.batch.Schema. See docs/guides/own_data.md.")
    for name, example in (("dense", '("age",)'), ("features", '(Feature("item", rows=1000),)')):
        if isinstance(getattr(schema, name), (str, Feature)):
            raise DataError(
                f"the schema's {name} is {_a(getattr(schema, name))}, not a tuple. Write {name}={example}, with its "
                "comma."
            )
    for feature in schema.features:
        if not isinstance(feature, Feature) or not isinstance(feature.name, str):
            raise DataError(f'the schema has {_a(feature)} among its features. Write Feature("item", rows=1000).')
        for field, value in (("rows", feature.rows), ("bag", 1 if feature.bag is None else feature.bag)):
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise DataError(
                    f"feature {feature.name!r} of the schema has {field}={value!r:.80}. Give an integer of at least 1"
                    + (
                        ", or None for bags that differ in size."
                        if field == "bag"
                        else ": one more than the largest id."
                    )
                )
    names = [feature.name for feature in schema.features]
    wrong: list[Any] = [name for name in (*schema.dense, *names) if not isinstance(name, str)]
    if not wrong:
        wrong = [twice for twice in (first_repeated(schema.dense), first_repeated(names)) if twice is not None]
    if wrong:
        raise DataError(f"the schema names {wrong[0]!r:.80} twice, or not as text. Give each column a name of its own.")
    features = (
        dataclasses.replace(f, rows=int(f.rows), bag=None if f.bag is None else int(f.bag)) for f in schema.features
    )
    groups = schema.groups
    if not isinstance(groups, tuple) or not all(
        isinstance(g, ElementGroup) and isinstance(g.name, str) for g in groups
    ):
        raise DataError(
            f'the schema\'s groups are {_a(groups)}. Write groups=(ElementGroup("history", ("item", "action")),).'
        )
    if why := wrong_groups(schema):
        raise DataError(f"the schema's groups: {why}. Name jagged features (bag=None), each in one group.")
    return Schema(tuple(schema.dense), tuple(features), tuple(map(_label, _labels(schema))), groups, schema.label_group)


def _labels(schema: Schema) -> tuple[Any, ...]:
    labels = schema.labels
    if isinstance(labels, (str, Label)):
        raise DataError(
            f'the schema\'s labels are {_a(labels)}, not a tuple. Write labels=(Label("clicked"),), with its comma.'
        )
    names = (label.name for label in labels if isinstance(label, Label) and isinstance(label.name, str))
    if (twice := first_repeated(names)) is not None:
        raise DataError(f"the schema has two labels {twice!r:.80}. Give each a name of its own.")
    return tuple(labels)


def _label(label: Any) -> Label:
    if not isinstance(label, Label) or not isinstance(label.name, str) or not label.name:
        raise DataError(f'the schema has {_a(label)} among its labels. Write Label("rating", kind="number").')
    kinds = get_args(LabelKind)
    if label.kind not in kinds:
        raise DataError(f"label {label.name!r} has kind={label.kind!r:.80}. The kinds are {', '.join(kinds)}.")
    most = 2**24  # classes that float32 tells apart
    if label.kind == "class" and not (isinstance(label.classes, (int, np.integer)) and 2 <= label.classes < most):
        raise DataError(
            f"label {label.name!r} is a class, and has classes={label.classes!r:.80}. Give their number: "
            f'Label({label.name!r}, kind="class", classes=5).'
        )
    if label.kind != "class" and label.classes:
        raise DataError(f"label {label.name!r} is {label.kind} and has classes={label.classes!r:.80}. Leave that out.")
    return dataclasses.replace(label, classes=int(label.classes))


def check_about(about: Any) -> dict[str, Any]:
    """Returns a copy of the description of the data, as JSON reads it back; DataError if JSON cannot hold it."""
    try:
        return dict(json.loads(json.dumps(dict(about))))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"`about` must be a dict of JSON values, such as {{}} or {{'label': 'clicked'}}: {str(error)[:200]}."
        ) from None


def named_splits(splits: Any) -> dict[str, Iterable[Any]]:
    """Returns split -> its blocks, under recjax's names of the splits; a single Batch becomes a list of one.

    Raises:
      DataError: no mapping, a name of no split, two names of the same split, or no blocks.
    """
    if not isinstance(splits, Mapping) or _is_table(splits):
        raise DataError(f'the splits are {_a(splits)}, not a dict. Write {{"train": blocks, "test": blocks}}.')
    found: dict[str, Iterable[Any]] = {}
    for name, blocks in splits.items():
        split = split_called(name) if isinstance(name, str) else None
        if split is None:
            raise DataError(
                f"there is no split {name!r:.80}. The splits are {', '.join(SPLITS)} (valid, val and dev are "
                "validation). Rename it, or leave it out."
            )
        if split in found:
            raise DataError(f"{', '.join(map(repr, splits))}: two of these mean {split}. Give each split once.")
        if isinstance(blocks, Batch):
            blocks = [blocks]
        if isinstance(blocks, (str, Mapping)) or not hasattr(blocks, "__iter__") or _is_table(blocks):
            raise DataError(
                f"split {name!r} is {_a(blocks)}, not a list (or generator) of recjax.data.batch.Batch. "
                "See docs/guides/own_data.md."
            )
        found[split] = (block for block in blocks if not (isinstance(block, Batch) and _is_empty(block)))
    return found


def _is_table(thing: Any) -> bool:
    return hasattr(thing, "columns") and hasattr(thing, "shape")


def _is_empty(block: Batch) -> bool:
    if block.label_lengths is not None:
        return len(block.label_lengths) == 0
    return hasattr(block.labels, "__len__") and len(block.labels) == 0


def fitted(block: Any, schema: Schema, split: str, number: int, position: int) -> Batch:
    """Makes of a block a batch that fits the schema.

    Args:
      block: a `Batch` as the user's code made it.
      schema: the schema.
      split: name of the split.
      number: of the block in the split, from 0.
      position: the row of the split that is the block's first.

    Raises:
      DataError: the block does not fit; with split, block and column.
    """
    place = f"split {split!r}, block {number}"
    batch = dataclasses.replace(_batch(block, schema, place), position=position)
    try:
        validate(batch, schema)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    return batch


def _batch(block: Any, schema: Schema, place: str) -> Batch:
    if not isinstance(block, Batch):
        raise DataError(f"{place} is {_a(block)}, not a recjax.data.batch.Batch. See docs/guides/own_data.md.")
    if block.labels is None:
        raise DataError(
            f"{place}: labels is None. Give 0 or 1 for each sample; rows that are only to be scored may all have "
            "0, for `recjax predict` does not look at labels."
        )
    labels = _labels_of(_floats(block.labels, f"{place}: labels"), schema, place)
    label_lengths = None
    if schema.label_group:
        label_lengths = None if block.label_lengths is None else _integers(block.label_lengths, f"{place}: lengths")
        if label_lengths is None:
            raise DataError(
                f"{place}: the elements of group {schema.label_group!r} have labels, so label_lengths must say how "
                "many of each sample. Give it: Batch(dense, bags, labels, weights, label_lengths=lengths)."
            )
    n, K = len(labels if label_lengths is None else label_lengths), len(schema.dense)
    dense: Any = np.zeros((n, 0), np.float32)
    if block.dense is not None or K:
        dense = _floats(block.dense, f"{place}: dense", schema.dense)
    if dense.shape == (n,) and K == 1:
        dense = dense[:, None]
    if dense.shape != (n, K):
        raise DataError(
            f"{place}: dense has shape {dense.shape}, but {n} labels and the schema's dense columns "
            f"({', '.join(schema.dense) or 'none'}) ask for {(n, K)}. Give one row for each sample."
        )
    count = len(labels)
    weights = np.ones(count, np.float32) if block.weights is None else _floats(block.weights, f"{place}: weights")
    if schema.labels and weights.shape == (count,):
        weights = np.repeat(weights[:, None], len(schema.labels), axis=1)
    if not isinstance(block.bags, Mapping):
        raise DataError(f"{place}: bags is {_a(block.bags)}, not a dict. Write {{feature name: Bags(ids)}}.")
    names = [feature.name for feature in schema.features]
    if strange := [name for name in block.bags if name not in names]:
        raise DataError(
            f"{place} has a feature {strange[0]!r:.80} that the schema does not name; it names "
            f"{', '.join(names) or 'none'}. Add it to the schema, or leave it out of the block."
        )
    if absent := [name for name in names if name not in block.bags]:
        raise DataError(f"{place} has no feature {absent[0]!r}; it has {', '.join(block.bags) or 'none'}. Add it.")
    bags = {f.name: _bags(block.bags[f.name], f, n, f"{place}, feature {f.name!r}") for f in schema.features}
    return Batch(dense, bags, labels, weights, label_lengths=label_lengths)


def _labels_of(labels: np.ndarray, schema: Schema, place: str) -> np.ndarray:
    if not schema.labels:
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if labels.ndim != 1:
            raise DataError(
                f"{place}: labels have shape {labels.shape}. Give one number, 0 or 1, for each sample: [n]; or name "
                'several in the schema: labels=(Label("clicked"), Label("rating", kind="number")).'
            )
        return labels
    T = len(schema.labels)
    labels = labels[:, None] if labels.ndim == 1 and T == 1 else labels
    if labels.ndim != 2 or labels.shape[1] != T:
        raise DataError(
            f"{place}: labels have shape {labels.shape}, but the schema names {T}: "
            f"{', '.join(label.name for label in schema.labels)}. Give one column for each: [n, {T}]."
        )
    return labels


def _bags(given: Any, feature: Feature, n: int, place: str) -> Bags:
    if not isinstance(given, Bags):
        if feature.bag is None:
            return _jagged(given, n, place)
        given = Bags(given)
    ids: Any = _integers(given.ids, f"{place}: ids")
    lengths = None if given.lengths is None else _integers(given.lengths, f"{place}: lengths")
    weights = None if given.weights is None else _floats(given.weights, f"{place}: id weights")
    if feature.bag == 1 and lengths is None and ids.shape == (n,):
        ids = ids[:, None]
        weights = weights[:, None] if weights is not None and weights.shape == (n,) else weights
    if feature.bag is not None and lengths is None and ids.shape != (n, feature.bag):
        raise DataError(
            f"{place}: ids have shape {ids.shape}, but {n} samples of {feature.bag} id(s) each ask for "
            f"{(n, feature.bag)}. Give them so, or declare the feature jagged (bag=None) and give lengths."
        )
    if feature.bag is not None and lengths is not None:
        raise DataError(
            f"{place}: lengths are given, but the schema says {feature.bag} id(s) for every sample. Leave them out, "
            "or declare the feature jagged: bag=None."
        )
    if feature.bag is None and lengths is None:
        if ids.ndim != 2 or len(ids) != n:
            raise DataError(
                f"{place}: the feature is jagged, so Bags needs all ids end to end and lengths, the number of ids of "
                f"each of {n} samples: Bags(ids, lengths=lengths). A list of {n} lists of ids will do, too."
            )
        ids, lengths = ids.ravel(), np.full(n, ids.shape[1], np.int64)
        weights = None if weights is None else weights.ravel()
    if ids is given.ids and lengths is given.lengths and weights is given.weights:
        return given
    return Bags(ids, lengths, weights)


def _jagged(given: Any, n: int, place: str) -> Bags:
    """Makes bags from a list of lists of ids, or from an array [n, H]."""
    rows = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else []
    if len(rows) != n or any(isinstance(row, (str, Mapping)) or not hasattr(row, "__len__") for row in rows):
        raise DataError(
            f"{place}: {_a(given)} does not say which ids belong to which of {n} samples. Give a list of {n} lists of "
            "ids, or Bags(ids, lengths=lengths): all ids end to end, and how many each sample has."
        )
    parts = [_integers(row, f"{place}: ids of row {number}") for number, row in enumerate(rows)]
    if any(part.ndim != 1 for part in parts):
        raise DataError(f"{place}: a bag is a flat list of ids. Give a list of {n} lists of ids.")
    lengths = np.array([len(part) for part in parts], np.int64)
    return Bags(np.concatenate(parts) if parts else np.zeros(0, np.int64), lengths)


def _floats(given: Any, what: str, columns: tuple[str, ...] = ()) -> np.ndarray:
    """Returns an array of floats: float32, unless `given` has floats already. DataError if it holds no numbers."""
    array = _array(given, what)
    if array.dtype.kind == "f":
        return array
    try:
        if array.dtype.kind not in "biuO":
            raise ValueError
        return array.astype(np.float32)
    except (TypeError, ValueError):
        pass
    where = next((where for where in np.ndindex(array.shape) if not _is_number(array[where])), ())
    column = f" of {columns[where[1]]!r}" if len(where) == 2 and where[1] < len(columns) else ""
    raise DataError(
        f"{what} must be numbers, but{f' row {where[0]}' if where else ''}{column} is {array[where]!r:.80} "
        f"({array.dtype}). Turn text into numbers, or into ids of a feature, and fill in what is missing."
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, (str, bytes))


def _integers(given: Any, what: str) -> np.ndarray:
    """Returns an array of integers: int64, unless `given` has integers already. DataError if a number is not whole."""
    array = _array(given, what)
    if array.dtype.kind in "iu":
        return array
    if array.size == 0 or array.dtype.kind == "b":
        return array.astype(np.int64)
    try:
        if array.dtype.kind not in "fO":
            raise ValueError
        floats = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        floats = np.full(array.shape, np.nan)
    wrong = ~(np.abs(floats) < _MOST_EXACT) | (floats != np.floor(floats))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        value = array[where]
        raise DataError(
            f"{what} must be integers, but {f'row {where[0]}' if where else 'it'} is {value!r:.80} ({array.dtype}). "
            "Map the values to ids 0 to rows - 1 first, with one of these for what is missing."
        )
    return floats.astype(np.int64)


def _array(given: Any, what: str) -> np.ndarray:
    if given is None or isinstance(given, (str, Mapping)):
        raise DataError(f"{what} must be an array, but is {_a(given)}.")
    try:
        return np.asarray(given)
    except ValueError:  # rows of different lengths
        raise DataError(f"{what} must be an array, but is {_a(given)} whose rows differ in length.") from None


def _a(thing: object) -> str:
    """Describes an object in a few words, a table by its shape."""
    shape = getattr(thing, "shape", None)
    name = type(thing).__name__
    if isinstance(shape, tuple):
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name} of shape {shape}"
    return (
        repr(thing) if thing is None or isinstance(thing, (str, int, float)) and len(repr(thing)) < 80 else f"a {name}"
    )
