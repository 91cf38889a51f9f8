"""Files of scores: one line for each row, as CSV or JSON Lines, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from recjax.errors import ConfigError, TrainingError
from recjax.utils.files import replacing
from recjax.utils.paths import located
from recjax.utils.text import first_repeated

_OURS = {
    ".csv": re.compile(rb'row,(logit,probability[,\r\n]|[^\r\n]*\.(logit|prediction|class)"?[,\r\n])'),
    ".jsonl": re.compile(rb'\{"row": [0-9]+, ("logit": \S+, "probability": |"[^\r\n]*\.(logit|prediction|class)": )'),
}  # suffix -> how a file of scores begins
SUFFIXES = tuple(_OURS)


def check(out: Path, carried: Sequence[str] | None, overwrite: bool) -> None:
    """Checks that scores may be written to a file, with the carried columns.

    An existing file of scores is replaced, so that a command can be repeated; any other file only with `overwrite`.

    Raises:
      ConfigError: the file or a column is refused; says what to give instead.
    """
    if out.suffix not in _OURS or os.path.isdir(out):
        raise ConfigError(f"--out {out} names no file of scores. Give a file whose name ends in .csv or .jsonl.")
    refuse_columns(carried or ())  # those of the model are known once the run is open
    if overwrite or not os.path.exists(out) or not out.stat().st_size:
        return
    try:
        with out.open("rb") as file:
            ours = _OURS[out.suffix].match(file.read(200))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be read ({error.strerror}). Choose another file.") from None
    if not ours:
        raise ConfigError(
            f"--out {out} exists and is no file of scores, so it is not replaced unasked. Choose another name, or give "
            "--overwrite (in Python overwrite=True)."
        )


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


def header(suffix: str, columns: Sequence[str]) -> str:
    """Returns the text before the first row's line: the names of the columns in CSV, nothing in JSON Lines."""
    return ",".join(["row", *map(_cell, columns)]) + "\n" if suffix == ".csv" else ""


def line(suffix: str, row: int, scored: Mapping[str, float | str], digits: int, carried: Mapping[str, Any]) -> str:
    """Returns the line of a row, with carried values as given. In CSV None is empty, and a list its JSON text."""
    if suffix == ".csv":
        numbers = (_cell(x) if isinstance(x, str) else f"{x:.{digits}g}" for x in scored.values())
        return ",".join([str(row), *numbers, *map(_cell, carried.values())]) + "\n"
    numbers = (json.dumps(x) if isinstance(x, str) else f"{x:.{digits}g}" for x in scored.values())
    texts = (*zip(scored, numbers, strict=True), *((name, json.dumps(value)) for name, value in carried.items()))
    return "".join([f'{{"row": {row}', *(f", {json.dumps(name)}: {text}" for name, text in texts), "}\n"])


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return '"' + text.replace('"', '""') + '"' if re.search(r'[",\r\n]|^\s|\s$', text) else text


@contextlib.contextmanager
def whole_file(out: Path) -> Iterator[TextIO]:
    """Opens `out` for writing, under another name until all is written. A symbolic link stays one.

    Raises:
      TrainingError: the disk is full or refuses; then nothing is kept.
    """
    try:
        with replacing(located(out)) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise TrainingError(
            f"cannot write {out}: {error.strerror or error}. Nothing of it was kept. Make space or mend the "
            "permissions there, or choose another place with --out."
        ) from error
