"""Scores for a file of rows, by a checkpoint of a run: streamed, in the order of the file.

A run folder is enough: it keeps the vocabularies of its data (see recjax.data.kept).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import jax.numpy as jnp
import numpy as np

from recjax.data import kept
from recjax.data.ahead import ahead
from recjax.data.batch import Batch, Schema, validate
from recjax.data.blocks import PreparedSource, open_prepared
from recjax.data.encoder import open_encoder
from recjax.data.pipeline import batches
from recjax.data.source import between, concatenate, require_rows
from recjax.embedding import route
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.serving import rows
from recjax.train import metrics
from recjax.train.saved import KEPT, open_run
from recjax.train.setup import Setup

_THREADS = 2  # that encode ahead


def predict(
    run: Path | str,
    input: Path | str,
    out: Path | str,
    overrides: Sequence[str] = (),
    split: str = "test",
    step: int | None = None,
) -> dict[str, Any]:
    """Writes a score for every row.

    Args:
      run: a run folder.
      input: a file of raw rows (see `rows.read`), or a folder of prepared data.
      out: the file to write, one line a row in the order of the input: the row's number from 1, the logit, and the
        probability of label 1; as CSV if its name ends in .csv, as JSON Lines if it ends in .jsonl. It is replaced
        as a whole, at the end.
      overrides: changes to the config that keep the model, for example "mesh.devices=1".
      split: of a folder.
      step: of the checkpoint; None takes the one that validation chose, or else the newest.

    Returns:
      {"step", "input", "out", "rows", "mean_probability"}.

    Raises:
      ConfigError: no run or checkpoint, or a format that is not known.
      DataError: the rows are at fault: with file, line, and column or key.
      TrainingError: `out` cannot be written, no intact checkpoint, or a logit that is not finite.
    """
    run, input, out = Path(run), Path(input), Path(out)
    if out.suffix not in _LINES or out.is_dir():
        raise ConfigError(f"--out {out} names no file of scores. Give a file whose name ends in .csv or .jsonl.")
    if not input.exists():
        raise DataError(f"{input} does not exist. Give a file of rows, or a folder of prepared data.")
    if out.exists() and os.path.samefile(input, out):
        raise ConfigError(f"--out {out} is the input itself. Name another file.")
    header, line = _LINES[out.suffix]
    source = kept.open_kept(run / KEPT)
    setup, state, step = open_run(run, overrides, (), step, _note, chosen=True, source=source)
    size = setup.config.train.eval_batch_size
    digits = 17 if setup.dtype == jnp.float64 else 9  # which give every bit back
    row, total = 0, 0.0
    with _batches(setup, input, split, size) as stream, _whole_file(out) as file:
        file.write(header)
        counted = (route.count(batch, setup.bound, size) for batch in stream)
        for _, logits in setup.logits(state, counted):
            if not np.isfinite(logits).all():
                raise TrainingError(
                    f"the logit of row {row + int(np.argmax(~np.isfinite(logits))) + 1} is not finite: the model has "
                    "diverged. Choose an earlier checkpoint with --step."
                )
            probabilities = metrics.probabilities(logits)
            pairs = zip(logits.tolist(), probabilities.tolist(), strict=True)
            file.writelines(line(n, x, p, digits) for n, (x, p) in enumerate(pairs, row + 1))
            row, total = row + len(logits), total + float(probabilities.sum())
        if row == 0:
            raise DataError(f"{input} has no row. Give a file with a row a line, behind the header if it has one.")
    return {"step": step, "input": str(input), "out": str(out), "rows": row, "mean_probability": total / row}


def _csv(row: int, logit: float, probability: float, digits: int) -> str:
    return f"{row},{logit:.{digits}g},{probability:.{digits}g}\n"


def _json(row: int, logit: float, probability: float, digits: int) -> str:
    return f'{{"row": {row}, "logit": {logit:.{digits}g}, "probability": {probability:.{digits}g}}}\n'


_LINES: dict[str, tuple[str, Callable[[int, float, float, int], str]]] = {
    ".csv": ("row,logit,probability\n", _csv),
    ".jsonl": ("", _json),
}  # suffix -> what stands before the first line, and the line of a row


@contextlib.contextmanager
def _batches(setup: Setup, input: Path, split: str, size: int) -> Iterator[Iterable[Batch]]:
    """The rows of the input in batches of `size`, checked."""
    if input.is_dir():
        source = open_prepared(input)
        if what := kept.other_encoding(setup.source, source):
            raise DataError(
                f"the data at {input} {what}: their ids stand for other values. Give the raw rows as a file instead: "
                "they are then encoded as in training."
            )
        require_rows(source, split)
        yield batches(source, split, size, epochs=1, workers=setup.config.train.workers)
        return
    if not isinstance(setup.source, PreparedSource):
        raise ConfigError(
            f"the data of this run ({setup.source.name}) do not come from files, so no file can hold rows of them. "
            "Give a folder of prepared data of the same columns."
        )
    encoder = open_encoder(setup.source.path)
    chunks = rows.read(input, setup.source.name, encoder)
    with ThreadPoolExecutor(_THREADS) as pool:
        yield _rebatched(ahead(pool, _THREADS, encoder.encode, chunks), size, setup.source.schema)


def _rebatched(parts: Iterable[Batch], size: int, schema: Schema) -> Iterator[Batch]:
    """The rows of `parts` in batches of `size`, checked; the last may hold fewer."""
    rest: list[Batch] = []
    position = 0
    for part in itertools.chain(parts, [None]):  # None: the end
        parts_left = rest if part is None else [*rest, part]
        if not parts_left:
            return
        whole = concatenate(parts_left)
        end = whole.size if part is None else whole.size - whole.size % size
        for start in range(0, end, size):
            batch = dataclasses.replace(between(whole, start, min(start + size, end)), position=position)
            validate(batch, schema)
            yield batch
            position += batch.size
        rest = [between(whole, end, whole.size)] if end < whole.size else []


@contextlib.contextmanager
def _whole_file(out: Path) -> Iterator[TextIO]:
    """`out` as a file to write, which takes its name when all is written."""
    unfinished = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    try:
        try:
            with unfinished.open("w", encoding="ascii") as file:
                yield file
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(
            f"cannot write {out}: {error.strerror or error}. Nothing of it was kept. Make space or mend the "
            "permissions there, or choose another place with --out."
        ) from error


def _note(text: str) -> None:
    print(text, file=sys.stderr)
