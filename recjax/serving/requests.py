"""Requests of a server: raw rows as JSON, which become what an exported model takes.

    {"user": {"user": 15, "age": 3}, "candidates": [{"movie": 111161}, {"movie": 68646}]}

What stands under "user" (which may be left out) all candidates have in common. Together a candidate and the user are a
raw row, as `recjax predict` takes it from JSON Lines, and what is wrong with one is said in the same words. Where a
model scores the elements of a group, these are the candidates: a request is one row then.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import chunk_columns
from recjax.data.arrow.convert import MOST_BYTES
from recjax.data.arrow.struct_lists import JOINT
from recjax.data.batch import Bags
from recjax.data.datasets.avazu import Avazu
from recjax.data.prepare.chunk import Coded
from recjax.data.prepare.coding import code
from recjax.data.prepare.dense_columns import FLOAT32, fits_float32
from recjax.data.prepare.encoder import Encoder, open_encoder
from recjax.data.storage import run_snapshot
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError
from recjax.serving import table_rows
from recjax.serving.faults import missing_key
from recjax.serving.loader import count_pairs
from recjax.serving.outputs import describe_large_value
from recjax.serving.rows import UNKNOWN, RowReader, WrongRowError
from recjax.serving.whole_columns import whole_columns
from recjax.utils import strict_json
from recjax.utils.text import did_you_mean

Object = Mapping[str, Any]


class BadRequestError(ValueError):
    """A request that cannot be scored: one paragraph that says what is wrong, where, and what to do."""


@dataclasses.dataclass(frozen=True)
class Scorable:
    """A request of n candidates, as a model takes it.

    Attributes:
      dense: float32 [n, K].
      bags: feature -> its ids; those of the model's features of users have `users` bags, all others n.
      users: 1 if all that the model takes of users stands under "user", else n.
      scored: None, or n where candidates are elements of one row: `dense` and `bags` are then of that.
    """

    dense: np.ndarray
    bags: Mapping[str, Bags]
    users: int
    scored: int | None = None

    @property
    def size(self) -> int:
        """n, the number of candidates."""
        return len(self.dense) if self.scored is None else self.scored


class Columns(abc.ABC):
    """Reads raw columns of objects.

    Attributes:
      of_features: feature -> the raw columns that it comes from.
      names: all raw columns.
      others: further columns of the data, on which no score depends, such as labels.
    """

    of_features: Mapping[str, Sequence[str]]
    names: Sequence[str]
    others: frozenset[str] = frozenset()

    @abc.abstractmethod
    def read(self, objects: Sequence[Object], names: Sequence[str]) -> tuple[dict[str, Bags], dict[str, np.ndarray]]:
        """Ids by feature, and raw numbers by dense column, [n] (or [n, width] of a vector), of some columns.

        Of features that come from several columns, those all of whose columns are among `names`.

        Raises:
          _Fault: in one of the objects.
        """

    def with_fields(self, row: Object) -> Object:
        """A row with its raw columns by their names: as it is, by default; ValueError if it cannot be."""
        return row

    def refused(self, objects: Sequence[Object]) -> tuple[int, str] | None:
        """Returns the first object that is no row of these data, and why; None if all are, as by default."""
        return None

    @abc.abstractmethod
    def dense(self, raw: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """Dense columns of the model, float32 [rows, K], of all raw ones."""


class _Fault(Exception):
    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at = at


class RequestReader:
    """Reads requests to a model.

    Attributes:
      columns: names of the raw columns that a candidate and the user have together.
      user: those of them that the model takes once for all candidates, if they stand under "user".
    """

    def __init__(self, columns: Columns, inputs: Mapping[str, Any], most: int) -> None:
        """For a model with these "inputs" of its signature, and at most so many candidates a request."""
        self._columns, self._most, self._dense = columns, most, inputs["dense"]["columns"]
        self._features = [feature["name"] for feature in inputs["features"]]
        self._sides = {f["name"] for f in inputs["features"] if f["side"] == "user"}
        self.columns = list(columns.names)
        of_users = {column for feature in self._sides for column in columns.of_features[feature]}
        self.user = [column for column in columns.names if column in of_users]
        self._known = columns.others.union(columns.names)
        self._pairs = inputs if "pairs" in inputs else None
        # Column of scored elements -> what a candidate calls it: the last part of GROUP.FIELD.
        scored = [column for name in inputs.get("scored", ()) for column in columns.of_features[name]]
        self.fields = {column: column.rpartition(JOINT)[2] for column in scored}

    def read(self, body: bytes) -> Scorable:
        """Reads the text of a request.

        Raises:
          BadRequestError: it is no JSON, or not of the form above, or has a key that is no column, or a row is at
            fault.
        """
        user, candidates = self._parts(body)
        scored = len(candidates) if self.fields else None
        if self.fields:
            user, candidates = self._as_row(user, candidates), [{}]
        try:
            user = self._columns.with_fields(user)
            candidates = [self._columns.with_fields(candidate) for candidate in candidates]
        except ValueError as error:
            raise BadRequestError(f"a row of the request is at fault: {error}") from None
        self._refuse_unknown(user, candidates)
        if len(body) * MOST_BYTES > 4 * _MOST_TEXT:  # a text is 4 bytes of a list at least
            self._refuse_wide([user, *candidates])
        shared = [name for name in self._columns.names if name in user]
        own = [name for name in self._columns.names if name not in user]
        n = len(candidates)
        for at, candidate in enumerate(candidates):
            if twice := next((name for name in shared if name in candidate), None):
                raise BadRequestError(
                    f"candidates[{at}] has {twice!r}, which stands under user too. Leave it out there."
                )
        try:
            bags, raw = self._columns.read([user], shared) if shared else ({}, {})
        except _Fault as fault:
            raise BadRequestError(f"user: {fault}") from None
        if needed := self._across(shared, own):
            own += needed
            candidates = [{**{name: user[name] for name in needed}, **candidate} for candidate in candidates]
        try:
            more, numbers = self._columns.read(candidates, own)
        except _Fault as fault:
            raise BadRequestError(f"candidates[{fault.at}]: {fault}") from None
        if refused := self._columns.refused([{**user, **candidate} for candidate in candidates]):
            raise BadRequestError(f"candidates[{refused[0]}]: {refused[1]}")
        once = bool(self._sides) and self._sides <= bags.keys()
        spread = {name: bag.ids.size for name, bag in bags.items() if not (once and name in self._sides)}
        if (total := sum(spread.values())) * n > max(_MOST_SPREAD, len(spread) * n):
            name = max(spread, key=spread.__getitem__)
            raise BadRequestError(
                f"user: {name!r} has {spread[name]:,} values, and all features have {total:,}, looked up for each of "
                f"{n:,} candidates: {_MOST_SPREAD:,} together are the most. Send fewer, or serve with --user {name}."
            )
        found = more | {name: of if once and name in self._sides else _repeated(of, n) for name, of in bags.items()}
        raw = {name: np.repeat(values, n, axis=0) for name, values in raw.items()}
        with np.errstate(over="ignore"):
            dense = self._columns.dense(raw | numbers, n)
        if not np.isfinite(dense).all():
            at, column = np.argwhere(~np.isfinite(dense))[0].tolist()
            what = describe_large_value(self._dense[column], dense[at, column])
            raise BadRequestError(f"candidates[{at}]: {what}. Correct the value.")
        if (
            self._pairs
            and (pairs := count_pairs(self._pairs, {k: bag.lengths for k, bag in found.items()})) > _MOST_SPREAD
        ):
            raise BadRequestError(
                f"each of {scored:,} candidates meets all elements beside it, {pairs:,} pairs: {_MOST_SPREAD:,} are "
                "the most. Send fewer candidates at once."
            )
        return Scorable(dense, {name: found[name] for name in self._features}, 1 if once else n, scored)

    def _as_row(self, user: Object, candidates: Sequence[Object]) -> Object:
        """The one row of a request whose candidates are elements of it."""
        taken, known = set(self.fields.values()), {name.rpartition(JOINT)[2] for name in self._known}
        for at, candidate in enumerate(candidates):
            if lacking := sorted(taken - candidate.keys()):
                raise BadRequestError(f"candidates[{at}]: {missing_key(lacking[0], candidate)}")
            if strange := [name for name in candidate if name not in taken | known]:
                raise BadRequestError(
                    f"candidates[{at}] has the key {strange[0][:80]!r}; those of a candidate are "
                    f"{', '.join(sorted(taken))[:300]}. Leave others out, or give them under user."
                )
        return {**user, **{column: [each[field] for each in candidates] for column, field in self.fields.items()}}

    def _refuse_unknown(self, user: Object, candidates: Sequence[Object]) -> None:
        if user.keys() <= self._known and all(candidate.keys() <= self._known for candidate in candidates):
            return
        rows = [("user", user), *((f"candidates[{at}]", candidate) for at, candidate in enumerate(candidates))]
        where, name = next((where, name) for where, row in rows for name in row if name not in self._known)
        raise BadRequestError(
            f"{where} has the key {name[:80]!r}, which is no column that the model takes, or that the data say "
            "they had."
            f"{did_you_mean(name[:80], self.columns, quoted=True)} The model takes {', '.join(self.columns)[:300]}. "
            "Leave others out."
        )

    def _refuse_wide(self, objects: Sequence[Object]) -> None:
        """Refuses texts that take far more memory than in the request: in it all are as wide as their longest."""
        total = 0
        for name in self._columns.names:
            values = (row[name] for row in objects if name in row)
            lists = (value if isinstance(value, list) else [value] for value in values)
            lengths = [len(text.encode()) for texts in lists for text in texts if isinstance(text, str)]
            total += len(lengths) * min(max(lengths, default=0), MOST_BYTES)
            if total > _MOST_TEXT:
                raise BadRequestError(
                    f"{name!r} has {len(lengths):,} texts in this request, the longest of {max(lengths):,} bytes; in "
                    f"memory all are as wide, more than {_MOST_TEXT:,} bytes. Send fewer candidates or values at once."
                )

    def _across(self, shared: Sequence[str], own: Sequence[str]) -> list[str]:
        """Columns under "user" that features need which also need columns of candidates."""
        both = [set(names) for names in self._columns.of_features.values() if not set(names).isdisjoint(own)]
        return [name for name in shared if any(name in names for names in both)]

    def _parts(self, body: bytes) -> tuple[Object, list[Object]]:
        # The request's object, the user's and one for each candidate; a value is none.
        if objects := strict_json.count_above(body.decode(errors="replace"), "{", self._most + 2):
            raise BadRequestError(
                f"the request has {objects:,} objects, and at most {self._most:,} candidates are scored. Split it."
            )
        try:
            given = strict_json.parse(body)
        except strict_json.JsonError as error:
            raise BadRequestError(f"the request is {error}. {_FORM}") from None
        if not isinstance(given, dict) or set(given) - {"user", "candidates"} or "candidates" not in given:
            has = (
                f"has the keys {', '.join(map(repr, given))[:200] or 'none'}"
                if isinstance(given, dict)
                else "is no object"
            )
            raise BadRequestError(f"the request {has}. {_FORM}")
        user, candidates = given.get("user", {}), given["candidates"]
        if not isinstance(user, dict) or not isinstance(candidates, list):
            raise BadRequestError(f"user must be an object and candidates a list. {_FORM}")
        if not candidates:
            raise BadRequestError(f"candidates is empty. Give 1 to {self._most:,}.")
        if len(candidates) > self._most:
            raise BadRequestError(
                f"the request has {len(candidates):,} candidates, and {self._most:,} are the most. Split it."
            )
        for at, candidate in enumerate(candidates):
            if not isinstance(candidate, dict):
                raise BadRequestError(f"candidates[{at}] is no object. {_FORM}")
        return user, candidates


_MOST_SPREAD = 2 << 20  # ids of "user" for all candidates: as many as a request of 4 MiB could list
_MOST_TEXT = 2**25  # bytes of the texts of a request, each as wide as the longest of its column
_FORM = 'Send {"user": {COLUMN: VALUE, ...}, "candidates": [{COLUMN: VALUE, ...}, ...]}; user may be left out.'


def _repeated(bags: Bags, n: int) -> Bags:
    """One bag n times."""
    if bags.lengths is None:
        weights = None if bags.weights is None else np.repeat(bags.weights, n, axis=0)
        return Bags(np.repeat(bags.ids, n, axis=0), None, weights)
    weights = None if bags.weights is None else np.tile(bags.weights, n)
    return Bags(np.tile(bags.ids, n), np.repeat(bags.lengths, n), weights)


class EncodedColumns(Columns):
    """Columns of a dataset with an encoder, read as `rows.json_lines` reads them."""

    def __init__(self, encoder: Encoder, unknown: Mapping[str, int], others: Iterable[str] = ()) -> None:
        """For `unknown` see `rows.json_lines`, for `others` `Columns`."""
        self._encoder, self._unknown = encoder, unknown
        self.of_features: Mapping[str, Sequence[str]] = {feature.name: (feature.name,) for feature in encoder.features}
        self.names: Sequence[str] = list(dict.fromkeys((*self.of_features, *encoder.dense)))
        self.others = frozenset(others)

    def read(self, objects: Sequence[Object], names: Sequence[str]) -> tuple[dict[str, Bags], dict[str, np.ndarray]]:
        """See `Columns`."""
        features = [feature for feature in self._encoder.features if feature.name in names]
        dense = [name for name in self._encoder.dense if name in names]
        found = whole_columns(objects, features, dense)
        if found is None:  # a value is missing, or at fault, or of a form that is rare
            reader, values = RowReader(self._encoder, self._unknown, names), []
            for at, row in enumerate(objects):
                try:
                    values.append(reader.values(row))
                except WrongRowError as wrong:
                    raise _Fault(at, str(wrong)) from None
            chunk = reader.chunk(values)
            found = chunk.columns, {name: chunk.dense[:, place] for place, name in enumerate(dense)}
        columns, numbers = found
        return {name: self._encoder.bags(name, _coded(column)) for name, column in columns.items()}, numbers

    def dense(self, raw: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """See `Columns`."""
        return self._encoder.encode_dense(_stacked(raw, self._encoder.dense, rows))


def _coded(column: Any) -> Coded:
    return column if isinstance(column, Coded) else code(column)


class TableColumns(Columns):
    """Columns of a table of one's own, read as `rows.json_lines_of_table` reads them."""

    def __init__(self, encoder: Encoder, described: Object, others: Iterable[str] = ()) -> None:
        """`described` is what the prepared data say of their columns; for `others` see `Columns`."""
        self._encoder = encoder
        self._specs = {spec.name: spec for spec in table_rows.features(described)}
        self._conditions = table_rows.conditions_of(described)
        self.names: Sequence[str] = table_rows.columns_of(list(self._specs.values()))
        self.others = frozenset(others).union(condition.column for condition in self._conditions)
        self.of_features: Mapping[str, Sequence[str]] = {f.name: self._columns_of(f.name) for f in encoder.features}

    def _columns_of(self, feature: str) -> tuple[str, ...]:
        spec = self._specs[feature]
        return spec.columns + tuple(name for source in spec.sources for name in self._columns_of(source))

    def read(self, objects: Sequence[Object], names: Sequence[str]) -> tuple[dict[str, Bags], dict[str, np.ndarray]]:
        """See `Columns`."""
        specs = [spec for name, spec in self._specs.items() if set(self._columns_of(name)) <= set(names)]
        for at, row in enumerate(objects):
            if what := table_rows.fault_of(row, specs):
                raise _Fault(at, what)
        arrays = table_rows.arrays_of(objects, specs)
        found = chunk_columns.raw_columns(arrays, specs, len(objects))
        if first := chunk_columns.first(found.faults, arrays):
            at, _, what = first
            raise _Fault(at, f"{what}. Correct the value.")
        bags = {name: self._encoder.bags(name, column) for name, column in found.columns.items()}
        return bags, dict(zip(chunk_columns.each(specs), found.dense.T, strict=True))

    def with_fields(self, row: Object) -> Object:
        """See `Columns`."""
        return table_rows.with_fields(row, list(self._specs.values()))

    def refused(self, objects: Sequence[Object]) -> tuple[int, str] | None:
        """See `Columns`."""
        arrays = table_rows.plain_arrays_of(objects, self._conditions)
        for condition in self._conditions:
            if condition.column in arrays and not (holds := condition.holds(arrays[condition.column])[0]).all():
                at = int(np.argmin(holds))
                value = chunk_columns.shown(arrays[condition.column][at])
                return at, (
                    f"column {condition.column!r} is {value}, and only rows with {condition.text} trained (where), so "
                    "it has no score. Leave it out."
                )
        return None

    def dense(self, raw: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """See `Columns`."""
        return self._encoder.encode_dense(_stacked(raw, self._encoder.dense, rows))


class IdColumns(Columns):
    """Columns of data that know no raw values: ids are rows of tables, dense values what the model takes."""

    def __init__(self, inputs: Object, others: Iterable[str] = ()) -> None:
        """`inputs` are those of the model's signature; for `others` see `Columns`."""
        self._inputs = {feature["name"]: feature for feature in inputs["features"]}
        self._dense = list(inputs["dense"]["columns"])
        self.names: Sequence[str] = list(dict.fromkeys((*self._inputs, *self._dense)))
        self.others = frozenset(others)
        self.of_features: Mapping[str, Sequence[str]] = {name: (name,) for name in self._inputs}

    def read(self, objects: Sequence[Object], names: Sequence[str]) -> tuple[dict[str, Bags], dict[str, np.ndarray]]:
        """See `Columns`."""
        bags = {name: self._bags(objects, name) for name in names if name in self._inputs}
        return bags, {name: _numbers(objects, name) for name in names if name in self._dense}

    def _bags(self, objects: Sequence[Object], name: str) -> Bags:
        about = self._inputs[name]
        size, weighted = about["ids_per_bag"], about["weighted"]
        ids: list[int] = []
        weights: list[float] = []
        lengths = []
        for at, row in enumerate(objects):
            bag = _present(at, row, name)
            bag = [bag] if size == 1 and not isinstance(bag, list) else bag
            if not isinstance(bag, list) or (size is not None and len(bag) != size):
                what = f"{size} ids" if size else "ids"
                raise _Fault(at, f"{name!r} is {str(bag)[:80]}, not a list of {what}. Write it as one.")
            lengths.append(len(bag))
            for entry in bag:
                id_, weight = entry if weighted and isinstance(entry, list) and len(entry) == 2 else (entry, 1.0)
                if type(id_) is not int or not 0 <= id_ < about["rows"]:
                    pair = ", each as [id, weight]" if weighted else ""
                    raise _Fault(
                        at,
                        f"{name!r} holds {str(id_)[:80]}, no id of its table: those are the integers 0 to "
                        f"{about['rows'] - 1}{pair}. Correct it.",
                    )
                ids.append(id_)
                weights.append(_number(at, weight, f"the weight of {name!r}"))
        shape = (-1,) if size is None else (len(objects), size)
        held = np.array(weights, np.float32).reshape(shape) if weighted else None
        return Bags(np.array(ids, np.int32).reshape(shape), np.array(lengths, np.int32) if size is None else None, held)

    def dense(self, raw: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """See `Columns`."""
        return _stacked(raw, self._dense, rows).astype(np.float32)


def _stacked(raw: Mapping[str, np.ndarray], names: Sequence[str], rows: int) -> np.ndarray:
    """Columns by their names, side by side, [rows, K]."""
    return np.stack([raw[name] for name in names], axis=1) if names else np.zeros((rows, 0))


def _numbers(objects: Sequence[Object], name: str) -> np.ndarray:
    return np.array([_number(at, _present(at, row, name), repr(name)) for at, row in enumerate(objects)], np.float64)


def _present(at: int, row: Object, name: str) -> Any:
    if name not in row:
        raise _Fault(at, f"the key {name!r} is missing; the row has {', '.join(row)[:200] or 'none'}. Add it.")
    return row[name]


def _number(at: int, value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_float32(value):
        raise _Fault(at, f"{what} is {str(value)[:80]}, not {FLOAT32}. Correct the value.")
    return float(value)


def columns_of(folder: Path, inputs: Object) -> tuple[Columns, PreparedSource | None]:
    """Returns the reader of the columns of an export's data, and these, where the export has any.

    Args:
      folder: the export.
      inputs: of its signature.

    Raises:
      ConfigError: raw rows of these data cannot be given as objects.
      DataError: what the export holds of its data is damaged.
    """
    source = run_snapshot.open_snapshot(folder / "data")
    others = table_rows.other_columns(source.about) if source is not None else []
    if source is None or "encoder" not in source.about:
        return IdColumns(inputs, others), source
    if source.name == Avazu.kind:
        raise ConfigError(
            f"{folder} was trained on {source.name}, whose rows are CSV text of which one field becomes several "
            "columns; recjax serve takes no such rows. Use the export's loader.py, or recjax predict."
        )
    encoder = open_encoder(source.path)
    if (described := source.about.get("table")) is not None:
        return TableColumns(encoder, described, others), source
    return EncodedColumns(encoder, UNKNOWN.get(source.name, {}), others), source
