"""Any dataset that TFDS has prepared as ArrayRecord files, by name and with a mapping of its columns.

TFDS reads such files without TensorFlow. Only the columns of the mapping are decoded, about 10,000 rows/s on one core:
TFDS stores rows one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from recjax.data.datasets.options import open_as
from recjax.data.prepare.chunk import Chunk, Column, RawFeature
from recjax.data.prepare.dense_columns import DenseTransform
from recjax.data.prepare.ids import Frequency, Hash, Modulo
from recjax.data.source import SPLITS
from recjax.data.text.source_files import sha256
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.utils.paths import located

_CHUNK_ROWS = 2**14
_ROLES = ("id", "jagged", "dense")


@dataclasses.dataclass(frozen=True)
class Tfds:
    """Config of a TFDS dataset."""

    kind: ClassVar[str] = "tfds"

    path: str = ""  # folder of prepared data
    name: str = ""  # name of the dataset in TFDS: movielens/100k-ratings, mine:1.0.0
    columns: tuple[str, ...] = ()  # COLUMN:ROLE each; roles: id (one value), jagged (any number of them), dense
    label: str = ""  # column of the label
    threshold: float | None = None  # label 1 means that the column is at least this; none: the column holds 0 and 1
    train: str = "train[:80%]"  # TFDS split that trains
    validation: str = "train[80%:90%]"  # TFDS split that validates; empty: none
    test: str = "train[90%:]"  # TFDS split that is the test; empty: none
    download: bool = False  # let TFDS download and build the dataset if it is not there
    ids: Frequency | Hash | Modulo = Frequency()  # mapping of values to rows of tables
    dense: DenseTransform = "standard"  # transform of the dense columns; see recjax.data.prepare.dense_columns
    missing_indicators: bool = False  # as many dense columns more: 1 where the value is NaN
    cache: str = ""  # folder for copies of what a path on object storage holds; empty: the usual one

    def __post_init__(self) -> None:
        roles = parse_columns(self.columns)
        if self.label in roles:
            raise ConfigError(f"columns: {self.label!r} is the label, so it cannot be a feature. Leave it out.")

    open = open_as


def open_raw(config: Tfds, source: str | os.PathLike[str] | None) -> TfdsReader:
    """The reader of the dataset.

    Args:
      config: the options.
      source: TFDS's data folder, or the folder of one version of the dataset; None for TFDS's default.

    Raises:
      ConfigError: the config names no columns, label or training split, or splits that share rows.
    """
    for field in ("columns", "label", "train"):
        if not getattr(config, field):
            raise ConfigError(
                f"{config.kind} needs {field}. Write for example name=movielens/100k-ratings label=user_rating "
                "threshold=4 columns=user_id:id,movie_id:id,movie_genres:jagged,raw_user_age:dense."
            )
    return TfdsReader(config, None if source is None else located(source))


def parse_columns(columns: tuple[str, ...]) -> dict[str, str]:
    """Column -> role, from texts "column:role".

    Raises:
      ConfigError: another form, another role, or a column twice.
    """
    roles = {}
    for text in columns:
        *parts, role = items.split(text, ":")
        name = items.unquote(":".join(parts))
        if not name or role not in _ROLES or name in roles:
            raise ConfigError(
                f"columns: {text!r} is not COLUMN:ROLE with a role of {', '.join(_ROLES)}, each column once. Write for "
                "example columns=user_id:id,movie_genres:jagged,raw_user_age:dense."
            )
        roles[name] = role
    return roles


class TfdsReader:
    """Hands the rows of a TFDS dataset to the preparation (a `recjax.data.prepare.chunk.Reader`)."""

    name = Tfds.kind

    def __init__(self, config: Tfds, source: Path | None) -> None:
        """Opens the dataset.

        Args:
          config: the options; its name is without meaning if `source` is a version.
          source: TFDS's data folder, or that of one version of the dataset; None for TFDS's default.

        Raises:
          DataError: no such data, not stored as ArrayRecord, or other columns or splits than asked for.
        """
        label, threshold, roles = config.label, config.threshold, parse_columns(config.columns)
        splits = (config.train, config.validation, config.test)
        self._builder = _open(source, config.name, config.download)
        self._where = f"{self._builder.info.full_name} at {self._builder.data_path}"
        self._roles, self._label, self._threshold = roles, label, threshold
        self.label = label if threshold is None else f"{label} >= {threshold:g}"
        self.splits = "TFDS splits " + ", ".join(
            f"{ours}={its or '(none)'}" for ours, its in zip(SPLITS, splits, strict=True)
        )
        self.dense = tuple(name for name, role in roles.items() if role == "dense")
        self._check_columns()
        self.features = [
            RawFeature(
                name,
                jagged=role == "jagged",
                optional=self._kind(name) == "O",
                values="text" if self._kind(name) == "O" else "integer",
            )
            for name, role in roles.items()
            if role != "dense"
        ]
        self._sources = [self._open_split(split) for split in splits]
        self._check_overlap(splits)

    def files(self) -> dict[str, str]:
        """File name -> sha256 of every file of the dataset."""
        folder = Path(self._builder.data_path)
        return {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        import tensorflow_datasets as tfds

        features = self._builder.info.features
        needed = tfds.features.FeaturesDict({name: features[name] for name in (*self._roles, self._label)})
        number, read, total = 0, 0, sum(map(len, self._sources))
        for split, source in enumerate(self._sources):
            for first in range(0, len(source), _CHUNK_ROWS):
                places = range(first, min(first + _CHUNK_ROWS, len(source)))
                read += len(places)
                if number >= start:
                    try:
                        rows = [needed.deserialize_example_np(record) for record in source.__getitems__(places)]
                    except Exception as error:  # TFDS, protobuf and the file format raise many kinds
                        raise DataError(
                            f"{self._where}: rows {first} to {places[-1]} of {SPLITS[split]} cannot be read "
                            f"({_flat(error)}). Prepare the dataset with TFDS again."
                        ) from None
                    yield self._chunk(rows, split, first, read / total)
                number += 1

    def _chunk(self, rows: list[dict[str, Any]], split: int, first: int, done: float) -> Chunk:
        where = f"{self._where}: {SPLITS[split]}"
        labels = np.array([row[self._label] for row in rows], np.float64)
        if self._threshold is not None:
            wrong, labels = np.isnan(labels), (labels >= self._threshold).astype(np.float64)
        else:
            wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                f"{where} row {first + row}: {self._label} is {rows[row][self._label]}, not 0 or 1. Set threshold=X if "
                "values of X and more count as 1."
            )
        dense = np.array([[row[name] for name in self.dense] for row in rows], np.float64)
        columns = {}
        for feature in self.features:
            values = [row[feature.name] for row in rows]
            lengths = None
            if feature.jagged:
                lengths = np.array([len(bag) for bag in values], np.int32)
                values = [value for bag in values for value in bag]
            keys = np.array(values, np.bytes_ if feature.values == "text" else np.int64)
            if feature.optional and any(value.endswith(b"\0") for value in values):
                raise DataError(f"{where} rows from {first}: a value of {feature.name} ends in a NUL byte. Remove it.")
            missing = keys == b"" if feature.optional else None
            columns[feature.name] = Column(keys, lengths, missing)
        return Chunk(
            labels=labels.astype(np.float32),
            dense=dense.reshape(len(rows), len(self.dense)),
            columns=columns,
            split=np.full(len(rows), split, np.uint8),
            done=done,
        )

    def _kind(self, column: str) -> str:
        """The kind of a column's values, as numpy codes it; text is "O"."""
        return np.dtype(self._builder.info.features[column].np_dtype).kind

    def _check_columns(self) -> None:
        features = self._builder.info.features
        for name, role in (*self._roles.items(), (self._label, "label")):
            if name not in features:
                raise DataError(f"{self._where} has no column {name!r}. Its columns are {', '.join(features)}.")
            rank, kinds = (1, "iubO") if role == "jagged" else (0, "iubO" if role == "id" else "iubf")
            feature = features[name]
            if isinstance(feature, dict) or len(feature.shape) != rank or self._kind(name) not in kinds:
                raise DataError(
                    f"{self._where}: column {name!r} ({_flat(feature)}) cannot be {role}. An id is one integer or "
                    "text, jagged a list of them; dense and label are one number. Choose another role or column."
                )

    def _open_split(self, split: str) -> Any:
        """The raw records of a TFDS split, [] if the name is empty."""
        from tensorflow_datasets.core.decode import DeserializeMethod

        if not split:
            return []
        try:
            return self._builder.as_data_source(split, deserialize_method=DeserializeMethod.RAW_BYTES)
        except NotImplementedError:
            raise DataError(
                f"{self._where} is stored in a format that needs TensorFlow to read. Prepare it again with TFDS as "
                "ArrayRecord: tfds build --file_format=array_record."
            ) from None
        except (ValueError, KeyError) as error:
            raise DataError(
                f"{self._where} has no split {split!r} ({_flat(error)}). Write a split like train or train[:80%]."
            ) from None

    def _check_overlap(self, splits: tuple[str, str, str]) -> None:
        """Refuses splits that share rows."""
        taken = [
            (part.filename, part.skip, part.skip + part.take, number)
            for number, split in enumerate(splits)
            if split
            for part in self._builder.info.splits[split].file_instructions
        ]
        taken.sort()
        for (file, _, end, one), (next_file, begin, _, other) in itertools.pairwise(taken):
            if file == next_file and begin < end:
                raise ConfigError(
                    f"{SPLITS[one]} and {SPLITS[other]} share rows of {self._where}. Choose splits that do not "
                    "overlap, for example train=train[:80%] validation=train[80%:90%] test=train[90%:]."
                )


def _open(source: Path | None, dataset: str, download: bool) -> Any:
    """The TFDS builder of a dataset."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    try:
        if source is not None and (source / "dataset_info.json").is_file():
            return tfds.builder_from_directory(str(source))
        if download:
            builder = tfds.builder(dataset, data_dir=source, file_format="array_record")
            with contextlib.redirect_stdout(sys.stderr):
                builder.download_and_prepare()
            return builder
        return read_only_builder.builder_from_files(dataset, data_dir=source)
    except Exception as error:  # TFDS raises many kinds
        raise DataError(
            f"TFDS does not open {dataset!r} below {source or 'its default folder'} ({_flat(error)}). Give with "
            "--from the folder that TFDS wrote, or its data folder, or set download=true (most datasets then need "
            "TensorFlow)."
        ) from None


def _flat(thing: object) -> str:
    """A text of TFDS on one line, not too long."""
    return " ".join(str(thing).split())[:300].rstrip(".")
