"""Rows to score of a table of one's own: files as those that trained, or JSON Lines, by the columns as they trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.arrow import chunk_columns, convert, roles, row_filter, scan, struct_lists
from recjax.data.arrow.roles import ColumnSpec
from recjax.data.arrow.row_filter import Condition
from recjax.data.arrow.wording import Wording
from recjax.data.prepare.chunk import Chunk, Unlabelled
from recjax.errors import ConfigError, DataError
from recjax.serving.faults import RowFaults, missing_key
from recjax.settings import items
from recjax.utils.text import did_you_mean


def read(
    file: Path,
    described: Mapping[str, Any],
    faults: RowFaults,
    carry: Sequence[str] | None = (),
    encoding: str = scan.UTF_8,
) -> Iterator[Unlabelled]:
    """The rows of a Parquet, ORC, CSV or Arrow file, in its order.

    Args:
      file: the file.
      described: what the prepared data say of their columns.
      faults: takes values that a column may not hold, by the row's number from 1.
      carry: columns to hand on; None: all that there are.
      encoding: of CSV.

    Raises:
      ConfigError: a name of another format.
      DataError: the file cannot be read, lacks a column, or what `faults` raises.
    """
    form = scan.form_of(file)
    if form is None:
        raise ConfigError(
            f"{file}: rows of a table are read from Parquet (.parquet), CSV (.csv, .tsv, also .gz), Arrow (.feather, "
            ".arrow) or JSON Lines (.jsonl, also .gz), as the name's ending tells. Rename or convert it."
        )
    table = scan.TableFile(file, form, encoding=encoding)
    specs, conditions = features(described), conditions_of(described)
    there = scan.schema(table).names
    columns = columns_of(specs)
    for name in [*columns, *(carry or ())]:
        if name not in there:
            hint = items.comma_hint(name, there) or did_you_mean(name, there, quoted=True)
            raise DataError(
                f"{file} has no column {name!r}.{hint} It has {', '.join(map(repr, there))[:300]}. Rows to score need "
                "the columns that trained (the label may be missing)."
            )
    handed = [name for name in there if name] if carry is None else list(carry)
    asked = [condition.column for condition in conditions if condition.column in there]
    names = list(dict.fromkeys([*columns, *handed, *asked]))
    row = 0
    for batch in scan.batches(table, names):
        arrays = {name: convert.plain(batch[name]) for name in names}
        carried = {name: batch[name].to_pylist() for name in handed}
        numbers = np.arange(row + 1, row + batch.num_rows + 1)
        row += batch.num_rows
        yield from unlabelled(file, arrays, specs, numbers, carried, faults, conditions)


def take_encoding(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Takes `data.encoding=`, of rows that a run has not seen, apart from other overrides; "" if it is not there."""
    key = "data.encoding="
    named = [text.removeprefix(key) for text in overrides if text.startswith(key)]
    return (named or [""])[-1], [text for text in overrides if not text.startswith(key)]


def encoding_of(about: Mapping[str, Any], named: str) -> str:
    """The encoding of rows to score in CSV: the one that is named, else that of the files that trained.

    Args:
      about: what the prepared data say of themselves.
      named: as `take_encoding` gives it.

    Raises:
      ConfigError: there is no such encoding.
    """
    return scan.encoding_named(named or about.get("options", {}).get("encoding", scan.UTF_8))


def of_objects(
    file: Path,
    objects: Sequence[Mapping[str, Any]],
    numbers: np.ndarray,
    described: Mapping[str, Any],
    carried: Mapping[str, Sequence[Any]],
    faults: RowFaults,
) -> Iterator[Unlabelled]:
    """The same of rows as JSON has them: objects with each column by name."""
    specs, conditions = features(described), conditions_of(described)
    arrays = arrays_of(objects, specs) | plain_arrays_of(objects, conditions)
    return unlabelled(file, arrays, specs, numbers, carried, faults, conditions)


def with_fields(row: Mapping[str, Any], specs: Sequence[ColumnSpec]) -> dict[str, Any]:
    """A row whose lists of objects are a list for each of their fields: `history.item` in place of `history`.

    Raises:
      ValueError: such a list has an entry that is no object, or has not all fields; the text says which.
    """
    fields: dict[str, list[str]] = {}
    for spec in specs:
        group, joint, field = spec.name.partition(struct_lists.JOINT)
        if spec.group and joint and group == spec.group and group in row and spec.name not in row:
            fields.setdefault(group, []).append(field)
    flat = dict(row)
    for group, names in fields.items():
        entries = flat.pop(group) or []
        if not isinstance(entries, list):
            raise ValueError(f"{group!r} is {json.dumps(entries)[:80]}, not a list of objects. Write it as one.")
        for at, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise ValueError(f"{group}[{at}] is {json.dumps(entry)[:80]}, not an object. Write it as one.")
            if lacking := [name for name in names if name not in entry]:
                raise ValueError(f"{group}[{at}]: {missing_key(lacking[0], entry)}")
        flat |= {f"{group}{struct_lists.JOINT}{name}": [entry[name] for entry in entries] for name in names}
    return flat


def columns_of(specs: Sequence[ColumnSpec]) -> list[str]:
    """Returns the columns of the table that these are read from, each once."""
    return list(dict.fromkeys(name for spec in specs for name in spec.columns))


def arrays_of(objects: Sequence[Mapping[str, Any]], specs: Sequence[ColumnSpec]) -> dict[str, Any]:
    """Arrow arrays of these columns of objects without faults of `fault_of`: of text, as CSV would have it."""
    import pyarrow as pa

    arrays = {}
    for spec in specs:
        for name in spec.columns:
            lists = spec.role in ("jagged", "vector")
            kind = pa.list_(pa.string()) if lists else pa.string()
            values = [row[name] for row in objects]
            if lists and any(isinstance(value, str) for value in values):  # entries with a separator between them
                values = [value.split(spec.separator) if isinstance(value, str) else value for value in values]
            arrays[name] = pa.array([_texts(value) if lists else _text(value) for value in values], kind)
    return arrays


def plain_arrays_of(objects: Sequence[Mapping[str, Any]], conditions: Sequence[Condition]) -> dict[str, Any]:
    """Arrow arrays of text of the columns of conditions that all objects have, and that hold no lists."""
    import pyarrow as pa

    found = {}
    for name in dict.fromkeys(condition.column for condition in conditions):
        values = [row[name] for row in objects if name in row]
        if len(values) == len(objects) and not any(isinstance(value, (list, dict)) for value in values):
            found[name] = pa.array([_text(value) for value in values], pa.string())
    return found


def fault_of(row: Mapping[str, Any], specs: Sequence[ColumnSpec]) -> str | None:
    """Returns why an object is no row, a missing key or a value of the wrong shape; None if nothing does."""
    for spec, name in [(each, name) for each in specs for name in each.columns]:
        if name not in row:
            return missing_key(name, row)
        value = row[name]
        if spec.role in ("jagged", "vector"):
            entries = value if isinstance(value, list) else []
            if not (value is None or isinstance(value, (list, str))) or any(
                isinstance(e, (list, dict)) for e in entries
            ):
                return f"{name!r} is {json.dumps(value)[:80]}, not a list of values. Write it as one."
        elif isinstance(value, (list, dict)):
            return f"{name!r} is {json.dumps(value)[:80]}, not one value. Write it as one."
    return None


def other_columns(about: Mapping[str, Any]) -> list[str]:
    """Returns the columns that prepared data name in what they say of themselves, and that no score depends on.

    Those of labels and weights, and of a table of one's own all that its files had: data from before they were written
    down tell of those that were left out or that made the splits.
    """
    table, options = about.get("table", {}), about.get("options", {})
    labels = [items.unquote(options.get("label", "")) if table else about.get("label", "").partition(" >")[0]]
    for each in table.get("labels", []):
        labels += [each["meaning"]["column"], each["weight"]]
    weights = [each["name"] for each in table.get("columns", []) if each["role"] == "weight"]
    named = roles.parse(options.get("columns", []))[1] if table else {}
    splits = [options.get(key, "") for key in ("time", "group", "split_column")] if table else []
    return [
        name
        for name in (*labels, *weights, *splits, *named, *table.get("proposed", {}), *table.get("names", ()))
        if name
    ]


def features(described: Mapping[str, Any]) -> list[ColumnSpec]:
    """The columns that a score depends on."""
    return [spec for spec in roles.from_json(described) if spec.role != "weight"]


def conditions_of(described: Mapping[str, Any]) -> tuple[Condition, ...]:
    """The conditions that held in all rows of the data."""
    return row_filter.parse(described.get("where", {}).get("conditions", ()))


def unlabelled(
    file: Path,
    arrays: Mapping[str, Any],
    specs: Sequence[ColumnSpec],
    numbers: np.ndarray,
    carried: Mapping[str, Sequence[Any]],
    faults: RowFaults,
    conditions: Sequence[Condition] = (),
) -> Iterator[Unlabelled]:
    """The rows of these arrays without those that have a fault, or are left out; `faults` takes both.

    Of the conditions those count whose column is among the arrays: that of a label mostly is not.
    """
    if conditions:
        keep, bad = row_filter.kept(conditions, arrays, len(numbers))
        keep = keep if bad is None else keep | bad[1]  # which is a fault, if the value is of any use
        faults.left_out += int((~keep).sum())
        numbers, arrays, carried = _only(keep, numbers, arrays, carried)
    found = chunk_columns.raw_columns(arrays, specs, len(numbers))
    if found.faults:
        wrong = np.zeros(len(numbers), bool)
        for fault in found.faults:
            for row in np.flatnonzero(fault.rows & ~wrong).tolist():
                value = arrays[fault.column][row]
                what = f"row {numbers[row]:,}: column {fault.column!r} is {chunk_columns.shown(value)}, {fault.what}."
                hint = chunk_columns.encoding_hint(value, scan.form_of(file), Wording.CONFIG.option)
                faults.report(file, int(numbers[row]), "value", f"{what}{hint} Correct the value.")
            wrong |= fault.rows
        numbers, arrays, carried = _only(~wrong, numbers, arrays, carried)
        found = chunk_columns.raw_columns(arrays, specs, len(numbers))
    if n := len(numbers):
        chunk = Chunk(np.zeros(n, np.float32), found.dense, found.columns, np.zeros(n, np.uint8))
        yield Unlabelled(chunk, numbers, carried)


def _only(
    keep: np.ndarray, numbers: np.ndarray, arrays: Mapping[str, Any], carried: Mapping[str, Sequence[Any]]
) -> tuple[np.ndarray, Mapping[str, Any], Mapping[str, Sequence[Any]]]:
    """The rows where `keep`, bool [n], is true."""
    if keep.all():
        return numbers, arrays, carried
    held = {name: [v for v, good in zip(values, keep, strict=True) if good] for name, values in carried.items()}
    return numbers[keep], chunk_columns.sliced(arrays, keep), held


def _texts(value: Any) -> list[str | None] | None:
    return None if value is None else [_text(entry) for entry in value]


def _text(value: Any) -> str | None:
    """A JSON value as CSV would write it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else repr(value)
