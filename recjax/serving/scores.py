"""Files of scores: one line for each row, as CSV, JSON Lines or Parquet, written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from recjax.errors import ConfigError, DataError, TrainingError
from recjax.utils.files import replacing
from recjax.utils.paths import located
from recjax.utils.text import first_repeated

_OURS = {
    ".csv": re.compile(
        rb'row,(logit,probability[,\r\n]|rank,score[,\r\n]|[^\r\n]*\.(logit|prediction|class)"?[,\r\n])'
    ),
    ".jsonl": re.compile(
        rb'\{"row": [0-9]+, ("logit": \S+, "probability": |"rank": [0-9]+, "score": |'
        rb'"[^\r\n]*\.(logit|prediction|class)": )'
    ),
}  # suffix -> how a file of scores begins
SUFFIXES = (*_OURS, ".parquet")
_OF_SCORES = {"recjax": "scores"}  # metadata of a Parquet file of scores


def check(out: Path, carried: Sequence[str] | None, overwrite: bool) -> None:
    """Checks that scores may be written to a file, with the carried columns.

    An existing file of scores is replaced, so that a command can be repeated; any other file only with `overwrite`.

    Raises:
      ConfigError: the file or a column is refused; says what to give instead.
    """
    if out.suffix not in SUFFIXES or os.path.isdir(out):
        raise ConfigError(
            f"--out {out} names no file of scores. Give a file whose name ends in .csv, .jsonl or .parquet."
        )
    refuse_columns(carried or ())  # those of the model are known once the run is open
    if overwrite or not os.path.exists(out) or not out.stat().st_size:
        return
    try:
        with out.open("rb") as file:
            ours = _holds_scores(file) if out.suffix == ".parquet" else _OURS[out.suffix].match(file.read(200))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be read ({error.strerror}). Choose another file.") from None
    if not ours:
        raise ConfigError(
            f"--out {out} exists and is no file of scores, so it is not replaced unasked. Choose another name, or give "
            "--overwrite (in Python overwrite=True)."
        )


def _holds_scores(file: BinaryIO) -> bool:
    """Returns whether an open file is a Parquet file of scores."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(file).metadata or {}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):
        return False
    return bool(metadata.get(b"recjax") == b"scores")


def refuse_columns(names: Sequence[str], own: Sequence[str] = ()) -> None:
    """Checks that no two columns of the scores would have the same name; ConfigError if they would.

    Args:
      names: of the carried columns.
      own: those of the scores beside the row's number.
    """
    if (twice := first_repeated(["row", *dict.fromkeys(own), *names])) is not None:
        raise ConfigError(
            f"columns: {twice!r} would stand in the scores twice (they have {', '.join(('row', *own))} of their "
            "own). Name the columns that you want, each once, or rename that one in the input."
        )


class _TextScores:
    """Takes scores into a file of text, a line a row: CSV with a header, or JSON Lines."""

    def __init__(self, file: TextIO, csv: bool, digits: int) -> None:
        self._file, self._csv, self._digits, self._begun = file, csv, digits, False

    def write(
        self, numbers: Sequence[int], scored: Mapping[str, Sequence[Any]], carried: Mapping[str, Sequence[Any]]
    ) -> None:
        """See `ScoreFile`. In CSV None is empty, and a list its JSON text."""
        if self._csv and not self._begun:
            self._file.write(",".join(["row", *map(_cell, [*scored, *carried])]) + "\n")
        self._begun = True
        columns = [*scored.values(), *([plain_value(value) for value in values] for values in carried.values())]
        for number, *values in zip(numbers, *columns, strict=True):
            own, others = values[: len(scored)], values[len(scored) :]
            if self._csv:
                cells = (_cell(x if isinstance(x, str) else self._text(x)) for x in own)
                self._file.write(",".join([str(number), *cells, *map(_cell, others)]) + "\n")
                continue
            texts = list(map(self._text, own))
            named = zip([*scored, *carried], [*texts, *map(json.dumps, others)], strict=True)
            fields = (f", {json.dumps(name)}: {text}" for name, text in named)
            self._file.write("".join([f'{{"row": {number}', *fields, "}\n"]))

    def _text(self, score: Any) -> str:
        """A score, or the list of those of a row's elements, as JSON."""
        if isinstance(score, list):
            return f"[{', '.join(map(self._text, score))}]"
        return json.dumps(score) if isinstance(score, str) else f"{score:.{self._digits}g}"


class _ParquetScores:
    """Takes scores into a Parquet file, whose carried columns have the types that they have in the first rows."""

    def __init__(self, out: Path, open_writer: Callable[[Any], Any]) -> None:
        self._out, self._open = out, open_writer
        self._writer: Any = None

    def write(
        self, numbers: Sequence[int], scored: Mapping[str, Sequence[Any]], carried: Mapping[str, Sequence[Any]]
    ) -> None:
        """See `ScoreFile`. Times, numbers and lists stay what they are."""
        import pyarrow as pa

        kinds: dict[str, Any] = (
            {} if self._writer is None else {field.name: field.type for field in self._writer.schema}
        )
        arrays = {"row": pa.array(numbers, pa.int64()), **{name: pa.array(values) for name, values in scored.items()}}
        for name, values in carried.items():
            try:
                array = pa.array([plain_value(x) if isinstance(x, bytes) else x for x in values], kinds.get(name))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
                raise DataError(
                    f"--out {self._out}: column {name!r} has values of unlike types ({str(error)[:100]}), which "
                    "Parquet cannot hold. Write .jsonl or .csv, or leave it out of the columns."
                ) from None
            arrays[name] = array.cast(pa.string()) if array.type == pa.null() else array
        table = pa.table(arrays).replace_schema_metadata(_OF_SCORES)
        if self._writer is None:
            self._writer = self._open(table.schema)
        self._writer.write_table(table)


class ScoreFile(Protocol):
    """Takes scores into a file of any form."""

    def write(
        self, numbers: Sequence[int], scored: Mapping[str, Sequence[Any]], carried: Mapping[str, Sequence[Any]]
    ) -> None:
        """Writes rows: their numbers, the columns of the scores, and the carried columns with values as given."""


def plain_value(value: Any) -> Any:
    """A value of a table as JSON has it: times as ISO 8601."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timedelta, decimal.Decimal)):
        return str(value)
    if isinstance(value, list):
        return [plain_value(entry) for entry in value]
    if isinstance(value, dict):
        return {name: plain_value(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and value != value else value


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return '"' + text.replace('"', '""') + '"' if re.search(r'[",\r\n]|^\s|\s$', text) else text


@contextlib.contextmanager
def open_scores(out: Path, digits: int) -> Iterator[ScoreFile]:
    """Opens `out` for writing, under another name until all is written. A symbolic link stays one.

    Args:
      out: the file; its ending tells the form.
      digits: of numbers in text.

    Raises:
      TrainingError: the disk is full or refuses; then nothing is kept.
    """
    try:
        with contextlib.ExitStack() as stack:
            unfinished = stack.enter_context(replacing(located(out)))
            if out.suffix == ".parquet":
                import pyarrow.parquet

                def open_writer(schema: Any) -> Any:
                    return stack.enter_context(pyarrow.parquet.ParquetWriter(unfinished, schema))

                yield _ParquetScores(out, open_writer)
            else:
                file = stack.enter_context(unfinished.open("w", encoding="utf-8", newline=""))
                yield _TextScores(file, out.suffix == ".csv", digits)
    except OSError as error:
        raise TrainingError(
            f"cannot write {out}: {error.strerror or error}. Nothing of it was kept. Make space or mend the "
            "permissions there, or choose another place with --out."
        ) from error
