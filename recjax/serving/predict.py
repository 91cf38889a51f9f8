"""Scores for a file of rows, by a checkpoint of a run: streamed, in the order of the file.

A run folder is enough: it keeps the vocabularies of its data (see recjax.data.storage.run_snapshot).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from recjax.data.arrow.spool import folder_beside, spool
from recjax.data.batch import Batch, Schema
from recjax.data.batch_checks import validate
from recjax.data.pipeline import batches
from recjax.data.prepare.chunk import Unlabelled
from recjax.data.prepare.encoder import open_encoder
from recjax.data.row_values import meaning
from recjax.data.source import between, concatenate, require_rows
from recjax.data.storage import run_snapshot
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.thread_map import ahead
from recjax.errors import ConfigError, DataError
from recjax.serving import outputs, rows, scores, table_rows
from recjax.serving.faults import RowFaults
from recjax.settings import items
from recjax.train.run.folder import data_snapshot
from recjax.train.run.open_run import open_run
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils import log
from recjax.utils.paths import expanded, located

Opener = Callable[[Sequence[str]], tuple[Trainer, TrainState, int]]
_THREADS = 2  # that encode ahead
ALL = "all"  # every column


def predict(
    run: Path | str,
    input: Path | str,
    out: Path | str,
    overrides: Sequence[str] = (),
    split: str = "test",
    step: int | Literal["newest"] | None = None,
    columns: str | Sequence[str] = (),
    overwrite: bool = False,
    *,
    trust_code: bool = False,
    opened: Opener | None = None,
) -> dict[str, Any]:
    """Writes a score for every row.

    Arguments and results are those of `recjax.predict`, of a file or folder; overrides are texts, such as
    "on_error=skip". `opened` gives trainer, state and step for those that are of a run; None opens the run here.

    Raises:
      ConfigError: no run or checkpoint, a format or column that is not known, or a file that is not to be replaced.
      DataError: the rows are at fault: with file, line, and column or key.
      TrainingError: `out` cannot be written, no intact checkpoint, or a logit that is not finite.
    """
    run, input, out = located(run), expanded(input), expanded(out)
    carry = _carried(columns)
    faults, overrides = _on_error(overrides)
    encoding, overrides = table_rows.take_encoding(overrides)
    if out.suffix in scores.SUFFIXES and os.path.exists(out) and os.path.exists(input) and os.path.samefile(input, out):
        raise ConfigError(f"--out {out} is the input itself. Name another file.")
    scores.check(out, carry, overwrite)
    if not os.path.exists(input):
        raise DataError(f"{input} does not exist. Give a file of rows, or a folder of prepared data.")
    trainer, state, step = opened(overrides) if opened else open_to_predict(run, step, trust_code, overrides)
    size = trainer.config.train.eval_batch_size
    digits = 17 if trainer.dtype == jnp.float64 else 9  # which give every bit back
    done, scored_labels, sums = 0, 0, dict[str, float]()
    own, classes = outputs.names(trainer.tasks), outputs.classes_of(trainer.source)
    scores.refuse_columns(carry or (), own)
    about: collections.deque[_About] = collections.deque()  # of the batches that are under way
    stream_of_rows = _batches(trainer, input, split, size, carry, faults, encoding)
    with stream_of_rows as stream, scores.open_scores(out, digits) as file:
        for batch, logits in trainer.predict(state, trainer.inputs_of(_noted(stream, about), size, state.host)):
            of, row_n, lengths = about.popleft(), batch.label_samples, batch.label_lengths
            if large := outputs.find_overflows(logits, batch.dense, trainer.source.schema.dense, row_n):
                fine = _report(large, input, of, faults)
                logits, row_n, of = logits[fine[row_n]], (np.cumsum(fine) - 1)[row_n[fine[row_n]]], of.select(fine)
                lengths = None if lengths is None else lengths[fine]
                if not of.rows:
                    continue
            outputs.check(logits, of.numbers[row_n])
            scored = outputs.columns(trainer.tasks, logits, classes)
            if lengths is not None:
                scored = outputs.in_rows(scored, lengths)
            file.write(of.numbers.tolist(), scored, of.carried)
            done += of.rows
            scored_labels += len(logits)
            for name, sum in outputs.means(trainer.tasks, logits).items():
                sums[name] = sums.get(name, 0.0) + sum
        if faults.count:
            more = f"; and {faults.count - len(faults.first)} more" if faults.count > len(faults.first) else ""
            skipped = f"on_error=skip left out {faults.count} row(s) of {input}: {'; '.join(faults.first)}{more}"
            if done == 0:
                raise DataError(f"{skipped}. None is left to score.")
            log.info(skipped)
        if faults.left_out:
            kept = f"where={','.join(_conditions(trainer))}"
            log.info(f"{faults.left_out:,} row(s) of {input} have no score: {kept} left such rows out of training too")
            if done == 0:
                raise DataError(f"no row of {input} keeps to {kept}, as all rows did that trained. None is scored.")
        if done == 0:
            raise DataError(f"{input} has no row. Give a file with a row a line, below the header if it has one.")
    described = {"step": step, "input": str(input), "out": str(out), "rows": done, "skipped": faults.count}
    if trainer.source.schema.label_group:
        described["elements"] = scored_labels
    mean_of = max(1, scored_labels)
    if _conditions(trainer):
        described["left_out"] = faults.left_out
    if trainer.tasks:
        return described | {"mean_prediction": {name: total / mean_of for name, total in sums.items()}}
    return described | {"mean_probability": sums[""] / mean_of}


def open_to_predict(
    run: Path, step: int | Literal["newest"] | None, trust_code: bool, overrides: Sequence[str]
) -> tuple[Trainer, TrainState, int]:
    """Opens a run, with what it kept of its data; the arguments are those of `predict`."""
    source = run_snapshot.open_snapshot(data_snapshot(run, step))
    return open_run(run, overrides, (), step, log.info, source=source, trust_code=trust_code)


def predict_table(run: Path | str, table: Any, out: Path | str, **options: Any) -> dict[str, Any]:
    """`predict` for a table in Python; what it raises calls the table by the name of a file for the time being."""
    with folder_beside(expanded(out)) as folder:
        spool(table, folder / "rows.arrow", "the table")
        return predict(run, folder / "rows.arrow", out, **options) | {"input": "the table"}


def _carried(columns: str | Sequence[str]) -> list[str] | None:
    """The names in `columns`; None for all."""
    if columns == ALL:
        return None
    return items.names(columns) if isinstance(columns, str) else list(columns)


def _on_error(overrides: Sequence[str]) -> tuple[RowFaults, list[str]]:
    """Takes `on_error=` apart from the other overrides."""
    choice, rest = "stop", []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "on_error":
            rest.append(text)
        elif value in ("stop", "skip"):
            choice = value
        else:
            raise ConfigError(f"{text}: expected on_error=stop or on_error=skip.")
    return RowFaults(choice == "skip"), rest


@dataclasses.dataclass(frozen=True)
class _About:
    """Numbers of the rows of a batch in the input, from 1, and what is carried of them."""

    numbers: np.ndarray
    carried: Mapping[str, Sequence[Any]]

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def between(self, start: int, stop: int) -> _About:
        return _About(self.numbers[start:stop], {name: v[start:stop] for name, v in self.carried.items()})

    def select(self, fine: np.ndarray) -> _About:
        return _About(self.numbers[fine], {n: list(itertools.compress(v, fine)) for n, v in self.carried.items()})


_Part = tuple[Batch, _About]


def _noted(stream: Iterable[_Part], about: collections.deque[_About]) -> Iterator[Batch]:
    """The batches of a stream; what is known of their rows goes to `about`, in the same order."""
    for batch, of in stream:
        about.append(of)
        yield batch


@contextlib.contextmanager
def _batches(
    trainer: Trainer,
    input: Path,
    split: str,
    size: int,
    carry: list[str] | None,
    faults: RowFaults,
    encoding: str,
) -> Iterator[Iterable[_Part]]:
    """The rows of the input in batches of `size`, checked."""
    if input.is_dir():
        if faults.skip:
            raise ConfigError(f"on_error=skip is for files of raw rows; {input} is a folder of prepared data.")
        yield _prepared(trainer, input, split, size, carry)
        return
    if not isinstance(trainer.source, PreparedSource):
        raise ConfigError(
            f"the data of this run ({trainer.source.name}) do not come from files, so no file can hold rows of them. "
            "Give a folder of prepared data of the same columns."
        )
    if not _tells(trainer):
        raise DataError(
            f"{input}: the data of this run ({trainer.source.name}) do not say how raw rows become ids. {_ENCODE}"
        )
    encoder = open_encoder(trainer.source.path)
    about = trainer.source.about
    encoding = table_rows.encoding_of(about, encoding)
    found = rows.read(input, trainer.source.name, encoder, faults, carry, about.get("table"), encoding)

    def encode(part: Unlabelled) -> _Part:
        scores.refuse_columns(list(part.carried), outputs.names(trainer.tasks))
        with np.errstate(over="ignore"):  # see `_without_infinite`
            return encoder.encode(part.chunk), _About(part.numbers, part.carried)

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = _without_infinite(ahead(pool, _THREADS, encode, found), input, trainer.source.schema, faults)
        yield _rebatched(parts, size, trainer.source.schema)


def _without_infinite(parts: Iterable[_Part], input: Path, schema: Schema, faults: RowFaults) -> Iterator[_Part]:
    """Leaves out rows with a value so far from those that trained that float32 does not hold what becomes of it."""
    for batch, about in parts:
        rows, columns = np.nonzero(~np.isfinite(batch.dense))
        if len(rows):
            places = zip(rows.tolist(), columns.tolist(), strict=True)
            wrong = {
                row: outputs.describe_large_value(schema.dense[column], batch.dense[row, column])
                for row, column in places
            }
            fine = _report(wrong, input, about, faults)
            ends = [0, *(np.flatnonzero(np.diff(fine)) + 1).tolist(), batch.size]
            runs = [between(batch, start, end) for start, end in itertools.pairwise(ends) if fine[start]]
            if not runs:
                continue
            batch, about = concatenate(runs), about.select(fine)
        yield batch, about


def _report(wrong: Mapping[int, str], input: Path, about: _About, faults: RowFaults) -> np.ndarray:
    """Reports what is wrong with rows by their place; returns where nothing is, bool [n]."""
    fine = np.ones(about.rows, bool)
    for place, what in sorted(wrong.items()):
        number = int(about.numbers[place])
        faults.report(input, number, "value", f"row {number:,}: {what}. Correct the value.")
        fine[place] = False
    return fine


_ENCODE = (
    "Encode the rows as you encoded those of training, write them with recjax.data.storage.blocks.write_prepared and "
    "the same schema (as split test; labels that are not known may be 0), and give that folder as the input."
)


def _conditions(trainer: Trainer) -> Sequence[str]:
    """The conditions that held in the rows of a table that trained."""
    about = trainer.source.about if isinstance(trainer.source, PreparedSource) else {}
    found: Sequence[str] = about.get("table", {}).get("where", {}).get("conditions", ())
    return found


def _tells(trainer: Trainer) -> bool:
    """Returns whether the data that a run was trained on say how raw rows become ids."""
    return isinstance(trainer.source, PreparedSource) and "encoder" in trainer.source.about


def _prepared(trainer: Trainer, input: Path, split: str, size: int, carry: list[str] | None) -> Iterator[_Part]:
    """The rows of a folder of prepared data in batches of `size`, checked."""
    source = open_prepared(input)
    if what := run_snapshot.other_encoding(trainer.source, source):
        raw = "Give the raw rows as a file instead: they are then encoded as in training."
        raise DataError(
            f"the data at {input} {what}: their ids stand for other values. {raw if _tells(trainer) else _ENCODE}"
        )
    require_rows(source, split)
    dense, features = source.schema.dense, {feature.name: feature for feature in source.schema.features}
    names = [*features, *(name for name in dense if name not in features)]
    if strange := [name for name in carry or () if name not in names]:
        raise DataError(f"the data at {input} have no column {strange[0]!r} to carry. They have {', '.join(names)}.")
    names = names if carry is None else carry
    tells = "encoder" in source.about
    value = {name: meaning(source, features[name]).name if tells else int for name in names if name in features}

    def values(batch: Batch, name: str) -> list[Any]:
        if name not in features:
            column: list[Any] = batch.dense[:, dense.index(name)].tolist()
            return column
        bags = batch.bags[name]
        found = [value[name](row) for row in bags.ids.ravel().tolist()]
        if features[name].bag == 1:
            return found
        ends = np.cumsum(bags.lengths) if bags.lengths is not None else np.arange(1, batch.size + 1) * bags.ids.shape[1]
        return [found[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]

    for batch in batches(source, split, size, epochs=1, workers=trainer.config.train.workers):
        numbers = np.arange(batch.position + 1, batch.position + batch.size + 1)
        yield batch, _About(numbers, {name: values(batch, name) for name in names})


def _rebatched(parts: Iterable[_Part], size: int, schema: Schema) -> Iterator[_Part]:
    """The rows of `parts` in batches of `size`, checked; the last may hold fewer."""
    rest: list[_Part] = []
    position = 0
    for part in itertools.chain(parts, [None]):  # None: the end
        left = rest if part is None else [*rest, part]
        if not left:
            return
        whole = concatenate([batch for batch, _ in left])
        of = _About(
            np.concatenate([about.numbers for _, about in left]),
            {name: [value for _, about in left for value in about.carried[name]] for name in left[0][1].carried},
        )
        end = whole.size if part is None else whole.size - whole.size % size
        for start in range(0, end, size):
            stop = min(start + size, end)
            batch = dataclasses.replace(between(whole, start, stop), position=position)
            validate(batch, schema)
            yield batch, of.between(start, stop)
            position += batch.size
        rest = [(between(whole, end, whole.size), of.between(end, whole.size))] if end < whole.size else []
