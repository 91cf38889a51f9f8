"""Files of raw rows to predict on, read in their own order, with or without labels.

Two formats: the text of the dataset itself where that is one file of rows (Criteo, Avazu), and JSON Lines for every
dataset but Avazu that was prepared from raw rows: an object a line that holds each raw column by name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recjax import strict_json
from recjax.data.avazu import Avazu, read_unlabelled
from recjax.data.chunk import Chunk, Column, RawFeature
from recjax.data.criteo import Criteo1TB, CriteoKaggle
from recjax.data.criteo_text import CATEGORIES, FIELDS, fault, parse
from recjax.data.encoder import Encoder
from recjax.data.textfile import open_bytes
from recjax.errors import ConfigError, DataError

_PIECE_BYTES = 1 << 21  # of text read at once
_JSON_ROWS = 8192  # lines in a chunk
_HEX = re.compile("[0-9a-fA-F]{1,8}")


def read(file: Path, dataset: str, encoder: Encoder) -> Iterator[Chunk]:
    """The rows of a file in its order.

    Args:
      file: JSON Lines if its name ends in .jsonl, else the dataset's own text; gzipped if it ends in .gz behind that.
      dataset: the dataset's name.
      encoder: of the data that the model was trained on.

    Raises:
      ConfigError: the dataset has no text format that could be told row by row.
      DataError: the file cannot be read, or a row is malformed: with file, line, and column or key.
    """
    lines_of_json = Path(file.name.removesuffix(".gz")).suffix == ".jsonl"
    if dataset == Avazu.kind:  # whose hour becomes other columns, so there is one way to write it
        if lines_of_json:
            raise ConfigError(
                f"{file}: rows of {dataset} are read as its own CSV text only, with the header of Kaggle's files; the "
                "column click may be missing. Give them so, in a file whose name does not end in .jsonl."
            )
        return read_unlabelled(file)
    if lines_of_json:
        return json_lines(file, encoder)
    if dataset in (CriteoKaggle.kind, Criteo1TB.kind):
        return criteo(file)
    keys = dict.fromkeys((*(feature.name for feature in encoder.features), *encoder.dense))
    raise ConfigError(
        f"{file}: rows of {dataset} are read as JSON Lines only, from a file whose name ends in .jsonl (or .jsonl.gz): "
        f"an object a line with the keys {', '.join(keys)}."
    )


def criteo(file: Path) -> Iterator[Chunk]:
    """Lines of the Criteo logs; a file whose first line has 39 fields is one without labels."""
    bare = None
    for first_line, text in _pieces(file):
        if bare is None:
            bare = text[: text.index(b"\n")].count(b"\t") == FIELDS - 2
        whole = b"0\t" + text[:-1].replace(b"\n", b"\n0\t") + b"\n" if bare else text
        rows = parse(whole)
        if rows is None:
            _refuse_criteo(file, first_line, whole, bare)
        else:
            columns = {
                name: Column(keys, None, missing)
                for name, keys, missing in zip(CATEGORIES, rows.keys, rows.missing, strict=True)
            }
            yield Chunk(rows.labels, rows.dense, columns, np.zeros(len(rows.labels), np.uint8))


def _refuse_criteo(file: Path, first_line: int, text: bytes, bare: bool) -> None:
    number, wrong = next(
        (first_line + i, wrong) for i, line in enumerate(text.split(b"\n")[:-1]) if (wrong := fault(line))
    )
    what = wrong.text
    if wrong.kind == "field count":
        fields = text.split(b"\n")[number - first_line].count(b"\t") + 1 - bare
        what = f"the line has {fields} field(s) instead of {FIELDS - bare}, as line 1 has them"
    elif bare:  # the columns of the user's file have one less in front of them
        what = re.sub(r"\(column (\d+)\)", lambda match: f"(column {int(match[1]) - 1})", what)
    raise DataError(f"{file}:{number}: {what}. Mend the line, for every row gets a score.")


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    r"""(number of the first line, from 1; whole lines, each ended by "\n"), some MB at a time."""
    line, rest = 1, b""
    with open_bytes(file) as stream:
        for number in itertools.count():
            block = stream.read(_PIECE_BYTES)
            text = rest + (block.removeprefix(b"\xef\xbb\xbf") if number == 0 else block)
            cut = text.rfind(b"\n") + 1 if block else len(text)
            text, rest = text[:cut], text[cut:]
            text = text.replace(b"\r\n", b"\n")
            if text:
                text = text if text.endswith(b"\n") else text + b"\n"
                yield line, text
                line += text.count(b"\n")
            if not block:
                break
    if line == 1:
        raise DataError(f"{file} is empty. It must hold a row a line.")


def json_lines(file: Path, encoder: Encoder) -> Iterator[Chunk]:
    """Objects with the raw columns: a value, null where it is missing; a list of values for a feature with bags."""
    lines = ((first + i, line) for first, text in _pieces(file) for i, line in enumerate(text.split(b"\n")[:-1]))
    while batch := list(itertools.islice(lines, _JSON_ROWS)):
        rows = [(line, _object(file, line, text)) for line, text in batch]
        columns = {feature.name: _column(file, rows, feature) for feature in encoder.features}
        dense = np.array([[_number(file, *row, name) for name in encoder.dense] for row in rows], np.float64)
        n = len(rows)
        yield Chunk(np.zeros(n, np.float32), dense.reshape(n, -1), columns, np.zeros(n, np.uint8))


def _object(file: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse(text)
    except strict_json.JsonError as error:
        raise DataError(f"{file}:{line}: {error}. Give one object a line.") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{file}:{line}: {text[:80].decode('utf-8', 'replace')!r} is no JSON object. Give one object a line."
        )
    return value


def _value(file: Path, line: int, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise DataError(f"{file}:{line}: the key {name!r} is missing. Add it, with null where there is no value.")
    return row[name]


def _number(file: Path, line: int, row: dict[str, Any], name: str) -> float:
    value = _value(file, line, row, name)
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise DataError(f"{file}:{line}: {name!r} is {json.dumps(value)[:80]}, not a number. Correct the value.")
    return float(value)


_FORMS = {
    "integer": "an integer of 64 bits",
    "hex": "text of 1 to 8 hexadecimal digits",
    "text": "text (Unicode without NUL)",
}  # what the values of a feature are -> how they are written


def _fitting(item: Any, values: str) -> int | bytes | None:
    """The key of a value; None if it is not of the feature's kind."""
    if values == "integer":
        return item if type(item) is int and -(2**63) <= item < 2**63 else None
    if type(item) is not str:
        return None
    if values == "hex":
        return int(item, 16) if _HEX.fullmatch(item) else None
    return None if "\0" in item else item.encode()


def _column(file: Path, rows: Sequence[tuple[int, dict[str, Any]]], feature: RawFeature) -> Column:
    empty: int | bytes = b"" if feature.values == "text" else 0
    keys: list[int | bytes] = []
    missing: list[bool] = []
    lengths = []
    for line, row in rows:
        value = _value(file, line, row, feature.name)
        bag = value if feature.jagged else [value]
        if not isinstance(bag, list):
            raise DataError(f"{file}:{line}: {feature.name!r} is {json.dumps(value)[:80]}, not a list of values.")
        for item in bag:
            absent = item is None and feature.optional
            key = empty if absent else _fitting(item, feature.values)
            if key is None:
                raise DataError(
                    f"{file}:{line}: {feature.name!r} is {json.dumps(item)[:80]}, not {_FORMS[feature.values]}. "
                    "Correct the value" + (", or give null where it is missing." if feature.optional else ".")
                )
            keys.append(key)
            missing.append(absent)
        lengths.append(len(bag))
    return Column(
        np.array(keys, np.bytes_ if feature.values == "text" else np.int64),
        np.array(lengths, np.int32) if feature.jagged else None,
        np.array(missing, bool) if any(missing) else None,
    )
