"""Readers of tables: one that looks at the columns first, one that knows them from data that were prepared before."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from recjax.data import batch
from recjax.data.arrow import chunk_columns, convert, footer, labels, pieces, roles, row_filter, scan, splits
from recjax.data.arrow.column_profile import ColumnProfile, ValueType
from recjax.data.arrow.element_labels import ElementLabels, element_of, take_labels
from recjax.data.arrow.label import Label, LabelProfile
from recjax.data.arrow.labels import Labels, LabelsProfile, describe
from recjax.data.arrow.pieces import Piece
from recjax.data.arrow.proposals import explain_no_features, propose
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.arrow.scan import TableFile
from recjax.data.arrow.shared_vocabularies import check_like, share_vocabularies
from recjax.data.arrow.splitter import Choices, Splitter
from recjax.data.arrow.wording import Wording
from recjax.data.prepare.chunk import Chunk
from recjax.data.prepare.progress import PrepareProgress
from recjax.data.source import SPLITS
from recjax.data.storage.blocks import PreparedSource
from recjax.data.text.source_files import sha256
from recjax.data.thread_map import ahead
from recjax.errors import ConfigError, DataError
from recjax.settings import items
from recjax.utils.text import did_you_mean, first_repeated

_THREADS = 2  # that convert rows; Arrow and NumPy let go of the interpreter for most of it
_CHUNK_ROWS = 2**17  # coded together: the more, the fewer values are sorted and searched again
_ENCODED_ROWS = 2**16  # that are encoded together
_SAMPLE_ROWS = 2**20  # that quantiles are taken of


class TableReader:
    """Hands the rows of tables to the preparation (a `recjax.data.prepare.chunk.Reader`).

    Attributes:
      name: of the dataset.
      specs: the columns, in the order of the schema.
      conditions: those of `where`.
      labels: several of them; empty: one binary label.
      label_group: the group whose elements have the labels; "": rows have them.
      proposals: those of `columns=auto` for each column that it was to judge.
      left_out: rows that the conditions of `where` leave out.
    """

    name = "table"

    def __init__(self, files: Mapping[str, Sequence[TableFile]], choices: Choices) -> None:
        """Opens the files and passes over their rows once.

        Args:
          files: split -> its files; those of "train" are split by `choices.split`, the others are that split.
          choices: what is asked of them.

        Raises:
          ConfigError: a column that is not there, or two uses of one that exclude each other.
          DataError: the files or their values are at fault: with file, row and column.
        """
        self._files = [(file, SPLITS.index(split)) for split, group in files.items() for file in group]
        if (doubled := first_repeated(file.path for file, _ in self._files)) is not None:
            raise ConfigError(
                f"{doubled} is to be read for two splits, so what is tested would be known from training. Give each "
                "split files of its own."
            )
        auto, asked = roles.parse(choices.columns)
        names = scan.schema(self._files[0][0]).names
        choices, asked, self._elements = take_labels(choices, roles.by_names(asked, names), names)
        self._choices = choices
        self.conditions = choices.where
        self._labels: Labels | None = None
        self.label = str(choices.label)
        self.label_group = self._elements.group if self._elements else ""
        self.labels: tuple[batch.Label, ...] = ()
        apart = [split for split in files if split != "train"]
        self.splits = splits.in_words(
            choices.split, choices.seed, choices.time, choices.group, choices.split_column, apart
        )
        judged = self._check_names(auto, asked)
        check_like(asked, self.names)
        profiles = self._look(asked, judged)
        self.proposals = {name: propose(name, profiles[name]) for name in judged}
        lists = {name: profiles[name].as_lists for name, one in self.proposals.items() if one.separator}
        profiles |= {name: profile for name, profile in lists.items() if profile is not None}
        wanted = {name: one.request for name, one in self.proposals.items()} | asked
        crosses = [name for name, each in asked.items() if each.role == "cross"]
        plain = [name for name in asked if name not in crosses]
        order = [
            name for name in (self.names if auto else plain) if wanted.get(name, roles.Asked("skip")).role != "skip"
        ]
        self.specs = [spec for name in order for spec in _specs_of(name, wanted[name], profiles[name])]
        self.specs = share_vocabularies(self.specs, [name for name in order if profiles[name].kind == "none"])
        by_name = {spec.name: spec for spec in self.specs}
        self.specs += [roles.cross_of(name, asked[name], by_name) for name in crosses]
        if twice := [spec.name for spec in self.specs if spec.role == "part" and spec.name in self.names]:
            raise ConfigError(f"columns: {twice[0]!r} is a part of a time and a column. Rename the column.")
        if not self.specs or all(spec.role == "weight" for spec in self.specs):
            raise ConfigError(
                f"no column of {self._files[0][0]} is left as a feature. Name some: "
                f"{choices.wording.option('columns', 'user:id,price:dense')}."
                f"{explain_no_features(self.proposals, choices.wording)}"
            )
        self.use_specs(self._with_edges({name: wanted[name].buckets for name in order if wanted[name].buckets}))

    def use_specs(self, specs: Sequence[ColumnSpec]) -> None:
        """Reads the columns by these descriptions of them."""
        self.specs = list(specs)
        self.features = [spec.feature for spec in self.specs if spec.is_feature]
        self.dense = tuple(chunk_columns.each(self.specs))

    def files(self) -> dict[str, str]:
        """File name -> sha256 of every file."""
        paths = [str(file.path) for file, _ in self._files]
        common = os.path.commonpath([os.path.dirname(path) for path in paths]) if "://" not in paths[0] else ""
        names = [
            file.title or (os.path.relpath(path, common) if common else path)
            for (file, _), path in zip(self._files, paths, strict=True)
        ]
        return {name: sha256(file.path) for name, (file, _) in zip(names, self._files, strict=True)}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones."""
        columns = [name for spec in self.specs for name in spec.columns]
        needed = list(dict.fromkeys([*columns, *self._needed_always]))
        numbered = enumerate(pieces.regular(self._pieces(needed), _CHUNK_ROWS))
        rest = ((held, number * _CHUNK_ROWS) for number, held in numbered if number >= start)
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from ahead(pool, _THREADS, self._chunk, rest)

    def _chunk(self, numbered: tuple[Sequence[Piece], int]) -> Chunk:
        held, row = numbered
        arrays, count = pieces.joined(held), sum(piece.rows for piece in held)
        found = chunk_columns.raw_columns(arrays, self.specs, count)
        faults, weights = found.faults, found.weights
        flat, lengths = _flat(self._elements, arrays, found, pieces.where(held))
        wrong_labels = list[chunk_columns.Fault]()
        if weights is not None and lengths is not None:
            weights = np.repeat(weights, lengths)
        if self._labels is not None:
            labels, of_labels, wrong_labels = self._labels.of(flat)
            weights = of_labels if weights is None else of_labels * weights[:, None]
        else:
            labels, wrong = self._choices.label.of(convert.plain(flat[self._choices.label.column]))
            if wrong is not None:
                wrong_labels.append(chunk_columns.Fault(self._choices.label.column, wrong, "not a label of 0 or 1"))
        faults += _of_rows(wrong_labels, lengths)
        if first := chunk_columns.first(faults, arrays):
            at, fault, what = first
            value = convert.plain(arrays[fault.column])[at]
            hint = chunk_columns.encoding_hint(value, held[0].file.form, self._choices.wording.option)
            raise DataError(
                f"{pieces.where(held)(at)}: {what}.{hint} Correct the value, or give the column another role "
                f"({roles.in_shell(fault.column, 'skip')} leaves it out)."
            )
        return Chunk(
            labels,
            found.dense,
            found.columns,
            self._split[row : row + count],
            weights,
            done=(row + count) / len(self._split),
            label_lengths=lengths,
        )

    @property
    def label_column(self) -> str:
        """Name of the column of the label, or of the first of several."""
        return self._choices.label.column

    @property
    def described_labels(self) -> list[dict[str, Any]]:
        """Facts about several labels beside the schema, such as the values of classes: JSON values."""
        return describe(self._labels.each) if self._labels is not None else []

    @property
    def _needed_always(self) -> tuple[str, ...]:
        labels = self._choices.labels
        return (self._choices.label.column,) if labels is None else labels.columns

    def _check_names(self, auto: bool, asked: Mapping[str, roles.Asked]) -> list[str]:
        """Checks that all columns that are named are there; returns those that are to be judged."""
        choices = self._choices
        option = choices.wording.option
        first = self._files[0][0]
        schema = scan.schema(first)
        self.names = schema.names
        named = {
            "label": choices.label.column,
            "time": choices.time if choices.split.way in ("time", "last") else "",
            "group": choices.group if choices.split.way == "last" else "",
            "split_column": choices.split_column if choices.split.way == "column" else "",
        }
        need = {"time": ["time"], "last": ["group"], "column": ["split_column"]}.get(choices.split.way, [])
        for key in need:
            if not named[key]:
                way, column = option("split", choices.split.way), option(key, "COLUMN")
                raise ConfigError(f"{way} needs {column}. The columns are {self._listed()}.")
        if not named["label"]:
            raise ConfigError(
                f"a table needs {option('label', 'COLUMN')}, the column that holds 0 and 1 (or with "
                f"{option('threshold', 'X')} any numbers). The columns of {first} are {self._listed()}."
            )
        of_labels = [("label", name) for name in self._needed_always[1:]]
        of_filter = [("where", condition.column) for condition in choices.where]
        of_columns = [("columns", name) for name, each in asked.items() if each.role != "cross"]
        for key, name in [*named.items(), *of_labels, *of_columns, *of_filter]:
            if name and name not in self.names:
                hint = items.comma_hint(name, self.names) or did_you_mean(name, self.names, quoted=True)
                raise ConfigError(f"{key}: {first} has no column {name!r}.{hint} Its columns are {self._listed()}.")
        for name in () if choices.label.everywhere else self._needed_always:
            if name in asked and asked[name].role != "skip":
                which = "the label" if choices.labels is None else "a label, or its weight"
                raise ConfigError(f"columns: {name!r} is {which}, so it cannot be a feature. Leave it out.")
        used = [name for name in [*named.values(), *self._needed_always[1:]] if name]
        for name, each in asked.items():
            if each.role == "cross" and name in self.names:
                raise ConfigError(f"columns: {name!r} is a column, so no cross can be called so. Rename the column.")
        judged = [name for name in self.names if name not in asked and name not in used] if auto else []
        if auto and named["group"] and named["group"] not in asked:
            judged.append(named["group"])  # a group is known before its rows, as a user is
        self._used = used
        everything = [*judged, *(name for _, name in of_columns), *used, *(name for _, name in of_filter)]
        features = {name: asked[name].role if name in asked else "" for name in [*judged, *(n for _, n in of_columns)]}
        for file, _ in self._files[1:]:
            there = scan.schema(file)
            names = there.names
            if absent := [name for name in everything if name not in names]:
                raise DataError(
                    f"{file} has no column {absent[0]!r}, but {first} has. All files need the same columns."
                )
            if auto and (more := [name for name in names if name not in self.names]):
                raise DataError(
                    f"{file} has a column {more[0]!r}, but {first} has none. Give all files the same columns, or name "
                    f"those that are to be used: {option('columns', 'user:id,price:dense')}."
                )
            for name, role in features.items():
                types = [ValueType.of_field(each.field(name)) for each in (schema, there)]
                if role != "skip" and not types[0].joins(types[1], role == "jagged"):
                    raise DataError(
                        f"column {name!r} holds {types[0]} in {first}, but {types[1]} in {file}, which cannot be one "
                        "feature. Write the column alike in all files, or leave it out: "
                        f"{roles.in_shell(name, 'skip')}."
                    )
        return [name for name in self.names if name in judged]

    def _listed(self) -> str:
        return (", ".join(map(repr, self.names[:30])) or "none") + (", ..." if len(self.names) > 30 else "")

    def _look(self, asked: Mapping[str, roles.Asked], judged: Sequence[str]) -> dict[str, ColumnProfile]:
        """Passes over all rows: profiles of the columns; and `_split`, the split of each row."""
        csv = self._files[0][0].form == "csv" or self._files[0][0].untyped
        wanted = [*judged, *(name for name, each in asked.items() if each.role not in ("skip", "cross"))]
        plain = {name: each for name, each in asked.items() if name in wanted}
        known = {} if self._choices.where else footer.profiles([file for file, _ in self._files], plain)
        wanted = [name for name in wanted if name not in known]
        profiles = {
            name: ColumnProfile(asked[name].separator if name in asked and asked[name].role == "jagged" else "", csv)
            for name in wanted
        }
        label, splitter = LabelProfile(self._choices.label, self._choices.wording), Splitter(self._choices)
        several = None if self._choices.labels is None else LabelsProfile(self._choices.labels)
        progress, row, pairs = PrepareProgress(), 0, self._choices.label.everywhere
        progress.stage("looking")
        numbers = dict(self._files)
        self.left_out = 0
        names = list(dict.fromkeys([*wanted, *self._used, *self._choices.sides]))
        for piece, left_out in pieces.read(numbers, names, self._choices.where):
            self.left_out += left_out
            if not piece.rows:
                continue
            for name in self._choices.sides:
                piece.refuse_missing(name, "the row is no pair of a user and an item", self._choices.wording)
            arrays = {name: convert.plain(piece.batch[name]) for name in piece.batch.schema.names}
            for name, profile in profiles.items():
                profile.add(arrays[name], name in judged, piece.where)
            flat, where = arrays, cast(Callable[[int], str], piece.where)
            if self._elements is not None:
                flat, lengths = self._elements.flat(arrays, where)
                where = element_of(lengths, where)
            if several is not None:
                several.add(flat, where)
            elif not pairs:
                label.add(flat[self._choices.label.column], where)
            splitter.add(arrays, numbers[piece.file], row, piece.where)
            row += piece.rows
            progress.update(row, None)
        progress.close()
        if self._choices.where:
            texts = ",".join(condition.text for condition in self._choices.where)
            condition = self._choices.wording.option("where", texts)
            progress.note(f"{condition} leaves out {self.left_out:,} of {self.left_out + row:,} rows")
        if not row and self.left_out:
            raise DataError(f"no row of {self._files[0][0]} keeps to {condition}. Choose other conditions.")
        if not row:
            raise DataError(f"{self._files[0][0]} has no rows. Give a table with rows.")
        if several is not None:
            self._labels = several.found()
            self.label, self.labels = str(self._labels), self._labels.schema
        elif not pairs:
            label.check()
        profiles |= known
        if splitter.out_of_order():
            progress.note(
                f"the rows are not in the order of {self._choices.time!r}. A batch mixes rows that stand near each "
                "other alone, so a table that was sorted by it first may train better"
            )
        self._split = splitter.splits()
        if not (self._split == 0).any():
            raise DataError(f"none of {row:,} rows is left to train on ({self.splits}). Choose another split.")
        return profiles

    def _with_edges(self, buckets: Mapping[str, int]) -> list[ColumnSpec]:
        """The columns; those in `buckets` (name -> how many) with edges at quantiles of the training rows.

        Of more than 2^20 training rows every second, third, ... is looked at.
        """
        if not buckets:
            return self.specs
        step = -(-int((self._split == 0).sum()) // _SAMPLE_ROWS)
        specs = {spec.name: spec for spec in self.specs}
        found: dict[str, list[np.ndarray]] = {name: [] for name in buckets}
        row = seen = 0
        for piece in self._pieces(list(buckets)):
            train = np.flatnonzero(self._split[row : row + piece.rows] == 0)
            chosen = train[-seen % step :: step]
            row, seen = row + piece.rows, seen + len(train)
            for name, parts in found.items():
                array, rows = convert.plain(piece.batch[name]), chosen
                if specs[name].role == "jagged":
                    array, lengths = convert.bags(array, specs[name].separator)
                    rows = np.flatnonzero(np.isin(np.repeat(np.arange(len(lengths)), lengths), chosen))
                numbers, _ = convert.numbers(array, cast(convert.Kind, specs[name].kind))
                parts.append(numbers[rows])
        cut = []
        for spec in self.specs:
            if spec.name in found:
                numbers = np.concatenate(found[spec.name])
                numbers = numbers[~np.isnan(numbers)]
                shares = np.arange(1, buckets[spec.name]) / buckets[spec.name]
                edges = np.unique(np.quantile(numbers, shares)) if len(numbers) else np.zeros(0)
                spec = dataclasses.replace(spec, edges=tuple(edges.tolist()))
            cut.append(spec)
        return cut

    def _pieces(self, names: list[str]) -> Iterator[Piece]:
        """All rows of all files that are used, with these columns."""
        for piece, _ in pieces.read((file for file, _ in self._files), names, self._choices.where):
            if piece.rows:
                yield piece


def _flat(
    elements: ElementLabels | None, arrays: Mapping[str, Any], columns: chunk_columns.RawColumns, where: Any
) -> tuple[Mapping[str, Any], np.ndarray | None]:
    """Columns in which those of labels have an entry a label; and how many labels each row has, if elements have them.

    A row with other numbers of labels than of elements goes to the faults of `columns`.
    """
    if elements is None:
        return arrays, None
    flat, lengths_n = elements.flat(arrays, where)
    name = columns.first_of[elements.group]
    expected_n = columns.columns[name].lengths
    assert expected_n is not None
    columns.faults.append(elements.unequal(lengths_n, (name, expected_n)))
    return flat, lengths_n


def _of_rows(faults: list[chunk_columns.Fault], lengths: np.ndarray | None) -> list[chunk_columns.Fault]:
    """Faults of labels as those of rows, where these have so many labels."""
    if lengths is None:
        return faults
    marks = ((fault, convert.of_rows(fault.rows, lengths)) for fault in faults)
    return [
        dataclasses.replace(fault, rows=rows, what=f"a list with an entry that is {fault.what}")
        for fault, rows in marks
        if rows is not None
    ]


def _specs_of(name: str, asked: roles.Asked, profile: ColumnProfile) -> list[ColumnSpec]:
    return roles.parts_of(name, asked, profile) if asked.role == "time" else [roles.spec_of(name, asked, profile)]


class LabelledReader:
    """Hands labelled rows to an encoder, or to a preparation (a `recjax.data.prepare.chunk.Reader`), all as training.

    Attributes:
      specs: the columns, as the earlier data have them.
    """

    name = "table"
    splits = "all rows train"

    def __init__(self, files: Sequence[TableFile], trained: PreparedSource) -> None:
        """Checks that the files have the columns.

        Args:
          files: with the rows.
          trained: the data that were prepared before, or what a run kept of them.

        Raises:
          DataError: a column is missing.
        """
        described: Mapping[str, Any] = trained.about["table"]
        self._files, self._meanings = files, _labels(trained)
        self.specs = roles.from_json(described)
        self._conditions = row_filter.parse(described.get("where", {}).get("conditions", ()))
        self._needed = list(dict.fromkeys([*(n for spec in self.specs for n in spec.columns), *self._meanings.columns]))
        self.label: str = trained.about.get("label", "")
        self.labels: tuple[batch.Label, ...] = trained.schema.labels
        self.label_group = trained.schema.label_group
        self._elements = ElementLabels.of(self.label_group, self._meanings)
        self.features = [spec.feature for spec in self.specs if spec.is_feature]
        self.dense = tuple(chunk_columns.each(self.specs))
        for file in files:
            names = scan.schema(file).names
            for name in [*self._needed, *(condition.column for condition in self._conditions)]:
                if name not in names:
                    raise DataError(
                        f"{file} has no column {name!r}. It has {', '.join(map(repr, names))[:300]}. These rows need "
                        "all columns that trained, and the label."
                    )

    def files(self) -> dict[str, str]:
        """File name -> sha256 of every file."""
        return {file.title or str(file.path): sha256(file.path) for file in self._files}

    def chunks(self, start: int) -> Iterator[Chunk]:
        """Chunk number `start` and all later ones.

        Raises:
          DataError: a value is at fault, or a label is missing: with file, row and column.
        """
        read = (piece for piece, _ in pieces.read(self._files, self._needed, self._conditions) if piece.rows)
        for number, together in enumerate(pieces.regular(read, _ENCODED_ROWS)):
            if number >= start:
                yield self._chunk(together)

    def _chunk(self, together: list[Piece]) -> Chunk:
        arrays, rows = pieces.joined(together), sum(piece.rows for piece in together)
        columns = chunk_columns.raw_columns(arrays, self.specs, rows)
        flat, lengths = _flat(self._elements, arrays, columns, pieces.where(together))
        labels_nxT, weights_nxT, wrong = self._meanings.of(flat)
        if first := chunk_columns.first([*columns.faults, *_of_rows(wrong, lengths)], arrays):
            at, fault, what = first
            value = convert.plain(arrays[fault.column])[at]
            hint = chunk_columns.encoding_hint(value, together[0].file.form, Wording.CONFIG.option)
            raise DataError(f"{pieces.where(together)(at)}: {what}.{hint} Correct the value.")
        if columns.weights is not None:
            of_rows = columns.weights if lengths is None else np.repeat(columns.weights, lengths)
            weights_nxT = weights_nxT * of_rows[:, None]
        if not self.labels:
            labels_nxT, weights_nxT = labels_nxT[:, 0], weights_nxT[:, 0]
        split = np.zeros(rows, np.uint8)
        return Chunk(labels_nxT, columns.dense, columns.columns, split, weights_nxT, label_lengths=lengths)


def _labels(source: PreparedSource) -> labels.Labels:
    """The labels as the data were prepared with them."""
    described = source.about["table"].get("labels")
    if described is None:
        options = source.about["options"]
        if not options["label"]:
            return labels.Labels((labels.Column(Label(options["item"], everywhere=True)),))
        column = source.about["table"].get("label_column", options["label"])
        return labels.Labels((labels.Column(Label(column, options["threshold"], options["positive"])),))
    each = [
        dict(one) | {"meaning": Label(**one["meaning"]), "classes": tuple(one.get("classes", ()))} for one in described
    ]
    return labels.Labels(tuple(labels.Column(**one) for one in each))
