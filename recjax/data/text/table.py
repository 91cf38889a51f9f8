"""Delimited text files, cut into fields by Arrow, some megabytes at a time; see fields.py for what the fields mean.

A line ends with LF, CRLF or CR. pyarrow is imported inside the functions, for it is slow to load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.text.fields import Encoding, Faults, Rows, open_quote, shown
from recjax.data.text.source_files import damaged_gzip, read_bytes, unreadable
from recjax.errors import DataError
from recjax.utils.paths import is_remote

_PIECE_BYTES = 2**23  # of a file, cut at a time
_UNIT = "\x1f"  # ASCII "unit separator": stands in for "::", as Arrow knows only delimiters of one character


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of the lines of a file.

    Attributes:
      columns: names of the fields, in their order.
      delimiter: one character, or "::".
      header: if the first line names the fields, the names there of `columns`: they may stand in any order, and
        others beside them. Empty if there is no such line.
      quotes: whether a field in "double quotes" may hold the delimiter ("" inside is one quote).
      encoding: of the text.
    """

    columns: tuple[str, ...]
    delimiter: str = ","
    header: tuple[str, ...] = ()
    quotes: bool = False
    encoding: Encoding = "utf-8"


def read_rows(file: Path, form: Form, faults: Faults, only: tuple[str, ...] = ()) -> Iterator[Rows]:
    """The rows of a delimited text file, gzipped if its name ends in .gz.

    A byte order mark, Windows line ends and a missing last line end make no difference. Lines with a wrong number of
    fields go to `faults`. Only files with a header may be larger than memory.

    Args:
      file: the file.
      form: how it is written.
      faults: takes malformed lines.
      only: the columns to read; all of `form` by default.

    Yields:
      Rows, some thousand at a time: the same cuts for the same content.

    Raises:
      DataError: missing, unreadable, truncated or empty, a header without a needed column, a quote that its line does
        not close, or what `faults` raises.
    """
    names = names_of(file, form)
    # A quote left open in a column that nobody reads would swallow lines unseen.
    wanted = names if form.quotes else list(only or form.columns)
    fields = {name: number for number, name in enumerate(names, 1) if name in wanted}
    malformed: list[Any] = []
    line = 2 if form.header else 1
    pieces = _pieces(file, form, names, list(fields), malformed)
    while True:
        try:
            piece = next(pieces, None)
        except DataError:
            _report(malformed, file, form, len(names), faults)  # which has a line, and may well be the cause
            raise
        if piece is None:
            _report(malformed, file, form, len(names), faults)
            return
        # Arrow reads ahead: what is malformed may stand behind this piece.
        lines = _lines(line, piece.num_rows, [row.number for row in malformed])
        line = int(lines[-1]) + 1 if len(lines) else line
        before = [row for row in malformed if row.number < line]
        _report(before, file, form, len(names), faults)
        del malformed[: len(before)]
        rows = Rows(
            file, lines, {name: (number, piece[name]) for name, number in fields.items()}, form.encoding, faults
        )
        if form.quotes:
            rows.refuse_open_quotes()
        yield rows


def _pieces(file: Path, form: Form, names: list[str], wanted: list[str], malformed: list[Any]) -> Iterator[Any]:
    """Arrow record batches of the columns `wanted`. Lines of another width are appended to `malformed`."""
    import pyarrow as pa
    import pyarrow.csv as csv

    def set_aside(row: Any) -> str:
        malformed.append(row)
        return "skip"

    read = csv.ReadOptions(
        use_threads=False,  # or malformed lines would carry no number
        block_size=_PIECE_BYTES,
        skip_rows=1 if form.header else 0,
        column_names=names,
        # Arrow cannot hand on a malformed line that is not UTF-8. Any byte is latin-1; see `fields.original`.
        encoding="latin-1",
    )
    parse = csv.ParseOptions(
        delimiter=_UNIT if form.delimiter == "::" else form.delimiter,
        quote_char='"' if form.quotes else False,
        ignore_empty_lines=False,  # or lines could not be counted
        invalid_row_handler=set_aside,
    )
    convert = csv.ConvertOptions(
        check_utf8=False,  # Arrow would not say where
        column_types=dict.fromkeys(names, pa.binary()),
        include_columns=wanted,
    )
    try:
        with _opened(file, form) as stream:
            yield from csv.open_csv(stream, read, parse, convert)
    except pa.ArrowInvalid as error:
        if not re.search("Empty CSV file|Could not skip initial 1 rows", str(error)):  # a header without rows
            raise DataError(
                f"{file} cannot be cut into fields ({' '.join(str(error).split())[:200]}). Look for a double quote "
                "that is not closed, or a line of more than 8 MiB."
            ) from None
    except OSError as error:
        raise (damaged_gzip if file.suffix == ".gz" else unreadable)(file, error) from None


@contextlib.contextmanager
def _opened(file: Path, form: Form) -> Iterator[Any]:
    """The file as an Arrow stream of what Arrow can cut."""
    import pyarrow as pa

    if not form.header:  # such files are small enough to be held as a whole
        data = read_bytes(file)
        if form.delimiter == "::":
            if _UNIT.encode() in data:
                line = data.count(b"\n", 0, data.index(_UNIT.encode())) + 1
                raise DataError(f"{file}:{line}: the control character 0x1f stands in the line. Remove it.")
            data = data.replace(b"::", _UNIT.encode())
        yield pa.BufferReader(data)
        return
    with contextlib.ExitStack() as stack:
        try:
            if is_remote(file):
                stream = stack.enter_context(pa.PythonFile(stack.enter_context(file.open("rb")), "r"))
            else:
                stream = stack.enter_context(pa.OSFile(str(file)))
        except OSError as error:
            raise unreadable(file, error) from None
        if file.suffix == ".gz":
            stream = stack.enter_context(pa.CompressedInputStream(stream, "gzip"))
        yield stream


def names_of(file: Path, form: Form) -> list[str]:
    """Names for the fields of a file: those of `form`, and "(NUMBER) NAME" for others that its first line announces.

    Raises:
      DataError: it cannot be read, or its first line lacks a name of `form`.
    """
    if not form.header:
        return list(form.columns)
    first = read_bytes(file, first_line=True)
    found = first.decode(form.encoding, "replace").strip("\r\n").split(form.delimiter)
    found = [name.strip().strip('"') for name in found]
    if wrong := [name for name in form.header if found.count(name) != 1]:
        raise DataError(
            f"{file}:1: the first line must name {', '.join(form.header)}, each once; for {', '.join(wrong)} that is "
            f"not so in {', '.join(found)[:200]!r}. Take the original file, or mend the line."
        )
    ours = dict(zip(form.header, form.columns, strict=True))
    return [ours.get(name, f"({number}) {name}") for number, name in enumerate(found, 1)]


def _report(malformed: list[Any], file: Path, form: Form, width: int, faults: Faults) -> None:
    """Tells `faults` of lines of another width than they should have."""
    for row in malformed:
        if "\n" in row.text:
            raise open_quote(file, row.number)
        what = (
            f"the line has {row.actual_columns} field(s) instead of {width}: {shown(row.text.encode(), form.encoding)}."
        )
        faults.report(file, row.number, "number of fields", what)


def _lines(first: int, rows: int, skipped: list[int]) -> np.ndarray:
    """The lines of the next `rows` rows if `skipped` lines (ascending, from `first` on) are no rows: int64 [rows]."""
    gaps = np.array(skipped, np.int64) - first - np.arange(len(skipped))  # rows before each skipped line
    at = np.arange(rows)
    return first + at + np.searchsorted(gaps, at, "right")
