"""Further data of a run: which they are, whether the run may go on with them, and the state that it goes on from.

    RUN/sources/00001/   what describes the first further data, as RUN/data/ describes those that the run began with

The position of a run is (source, index): both are in every checkpoint. A source begins with a checkpoint at the step at
which the one before it ended, whose tables have a row for each new value; until that is complete, nothing has changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recjax.data.batch import ANY_ID, Batch, Schema
from recjax.data.datasets.own_table import further_files, prepare_further
from recjax.data.prepare.earlier import EarlierData, open_earlier
from recjax.data.row_values import row_values
from recjax.data.storage.blocks import PreparedSource, open_prepared
from recjax.data.storage.manifest import MANIFEST, read_manifest
from recjax.data.storage.run_snapshot import open_snapshot, snapshot_data, snapshot_of
from recjax.data.text.source_files import sha256
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.parallel import distributed
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.loop import Outcome
from recjax.train.progress import MOST_SOURCES, TrainProgress, resume, source_number
from recjax.train.run.curves import read_lines
from recjax.train.run.open_run import use_checkpoint
from recjax.train.run.summary import summarise
from recjax.train.start import carry, note_means
from recjax.train.start_dense import Earlier
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer
from recjax.utils.text import aligned

_FACTS = ("step", "source", "data", "new_values")  # in such a line, beside the measures
AHEAD = "ahead"  # split of the line of metrics.jsonl that measures a source before it is trained on


class _AsKnown(PreparedSource):
    """Further data as a run sees them that has not gone on with them: values that it does not know have row 0."""

    def __init__(self, further: PreparedSource, schema: Schema) -> None:
        """The data, and the schema of those before them, whose tables have fewer rows."""
        super().__init__(further.path, further.manifest)
        self._further, self._rows = further, {feature.name: feature.rows for feature in schema.features}

    def row_counts(self, split: str) -> np.ndarray:
        """See `PreparedSource`."""
        return self._further.row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `PreparedSource`."""
        block = self._further.read(split, index)
        bags = dict(block.bags)
        for name, rows in self._rows.items():
            if rows != ANY_ID:
                ids = bags[name].ids
                bags[name] = dataclasses.replace(bags[name], ids=np.where(ids < rows, ids, 0).astype(ids.dtype))
        return dataclasses.replace(block, bags=bags)

    def rows(self, split: str, pack: bool = False) -> None:
        """None: those on disk are not what `read` gives."""


@dataclasses.dataclass(frozen=True)
class Further:
    """Data that a run goes on with.

    Attributes:
      number: which further data of the run these are, from 1.
      name: of the data, as they were given.
      source: the data.
      ahead: the same, as the run sees them before it has rows for their new values.
      begun: steps of the checkpoints that there are of them, ascending; (): the run has not begun with them.
      new_values: rows that tables get for values that the run did not know.
      first_rows: training rows of the data that the run began with, which its settings are for.
    """

    number: int
    name: str
    source: PreparedSource
    ahead: PreparedSource
    begun: tuple[int, ...]
    new_values: int
    first_rows: int


def open_further(run: Path, data: str, checkpoints: Checkpoints) -> Further:
    """Opens data that a run is to go on with; raw rows are prepared first.

    Args:
      run: the run folder.
      data: a file of rows, a folder or pattern of such files, or a folder of prepared data.
      checkpoints: of the run.

    Raises:
      ConfigError: the run has not ended, kept nothing of its data, or cannot have these.
      DataError: the data are at fault, have other columns, or their ids stand for other values.
      TrainingError: the cache folder cannot be written.
    """
    metas = checkpoints.metas()
    if not metas:
        raise ConfigError(f"{run} has no checkpoint to go on from. Train it first: recjax train PRESET --out {run}")
    numbers = {step: source_number(meta) for step, meta in metas.items()}
    last = max(numbers.values())  # of a kill at the start of a source later steps of the one before may be left
    newest = max(step for step, number in numbers.items() if number == last)
    first = open_snapshot(snapshot_of(run, 0))
    if first is None or "encoder" not in first.about:
        raise ConfigError(
            f"{run} kept no vocabularies of its data, so nothing says which rows new values would have. A run goes on "
            "with --more if it was trained on prepared data or on a table of your own."
        )
    ended = _ended(run, newest, metas[newest].get("cursor"), last)
    content = _content(run, data, first)
    folders = {number: snapshot_of(run, number) for number in range(last + 1)}
    known = {number: _contents(folder) for number, folder in folders.items() if (folder / MANIFEST).is_file()}
    seen = next((number for number, contents in known.items() if contents == content), None)
    if seen is not None and (seen < last or seen == 0):
        which = "the data that it began with" if seen == 0 else f"source {seen}"
        raise ConfigError(
            f"{run} has trained on these rows already, as {which}: {data} would count twice. Give rows that it has not "
            "seen."
        )
    if not ended and seen != last:
        raise ConfigError(
            f"{run} is not at the end of "
            + (f"source {last}. Give these data again first, to finish with them." if last else "its training.")
            + (" Finish it first, by the command that began it." if not last else "")
        )
    number = last if seen == last and last else last + 1
    if number >= MOST_SOURCES:
        raise ConfigError(f"{run} has gone on with {last:,} sources, which is the limit. Start another from it.")
    earlier = open_earlier(snapshot_of(run, number - 1), "--more: what the run kept of its data, data")
    source = _opened(data, earlier)
    _refuse_other_rows(source, earlier, data)
    begun = tuple(step for step, of_step in numbers.items() if of_step == number)
    rows = [sum(feature.rows for feature in of.schema.features) for of in (earlier.source, source)]
    ahead = _AsKnown(source, earlier.source.schema)
    return Further(number, data, source, ahead, begun, rows[1] - rows[0], int(first.row_counts("train").sum()))


def _ended(run: Path, step: int, cursor: Any, source: int) -> bool:
    """True if a run is at the end of its training, or of its last source."""
    if not isinstance(cursor, Mapping):
        return False
    if source:
        return bool(cursor.get("source_end") == step)
    return bool(cursor.get("end") or cursor.get("stopped") or (step == 0 and (run / "summary.json").exists()))


def _contents(folder: Path) -> list[str]:
    """Checksums of the files that data were prepared from, or their fingerprint, as their manifest has them."""
    manifest = read_manifest(folder)
    files = manifest["about"].get("files")
    return sorted(map(str, files.values())) if isinstance(files, Mapping) and files else [manifest["fingerprint"]]


def _content(run: Path, data: str, first: PreparedSource) -> list[str]:
    path = Path(os.path.expanduser(data))
    if (path / MANIFEST).is_file():
        return _contents(path)
    if "table" not in first.about:
        raise ConfigError(
            f"--more {data}: {run} was trained on {first.name}, whose further rows are prepared first: recjax data "
            f"prepare {first.name} --from PATH --out DIR. Then give that folder."
        )
    earlier = open_earlier(run, "--more: what the run kept of its data, data")
    return sorted(sha256(file.path) for file in further_files(data, earlier))


def _opened(data: str, earlier: EarlierData) -> PreparedSource:
    path = Path(os.path.expanduser(data))
    if (path / MANIFEST).is_file():
        source = open_prepared(path, earlier.source.name)
        if not source.has_blocks:
            raise DataError(f"{data} is what a run kept of its data, and holds no rows. Name the data themselves.")
        return source
    return prepare_further(data, earlier)


def _refuse_other_rows(source: PreparedSource, earlier: EarlierData, data: str) -> None:
    """Refuses data whose columns are others, or where values that the run knows have other rows (DataError)."""
    again = "Prepare them with base=RUN base_values=keep, or give the raw rows."
    then, now = earlier.source, source
    names = [[*of.schema.dense, *(feature.name for feature in of.schema.features)] for of in (then, now)]
    if names[0] != names[1]:
        differing = [name for name in dict.fromkeys([*names[0], *names[1]]) if (name in names[0]) != (name in names[1])]
        raise DataError(
            f"{data} has other columns than those that the run was trained on "
            f"({', '.join(differing) or 'their order'}). With columns that came or went start another run: "
            "recjax train table train.init_from=RUN data.from=FILE."
        )
    values = [row_values(of, names[0]) for of in (then, now)]
    for name, before in values[0].items():
        after = values[1].get(name)
        if after is None or after.rule != before.rule or after.first != before.first:
            kinds = f"{before.rule} then, {'row numbers' if after is None else after.rule} now"
            raise DataError(f"the ids of {name!r} in {data} stand for other values ({kinds}). {again}")
        count = len(before.values)
        if len(after.values) < count or not np.array_equal(after.values[:count], before.values):
            raise DataError(f"known values of {name!r} have other rows in {data} than in the run. {again}")
    by = [of.about["encoder"] for of in (then, now)]
    if any(by[0].get(key) != by[1].get(key) for key in ("transform", "indicators", "stats")):
        raise DataError(f"dense columns of {data} were prepared with other statistics than those of the run. {again}")


def go_on_from(
    trainer: Trainer, further: Further, checkpoints: Checkpoints, run: Path, epochs: int
) -> tuple[Trainer, TrainState, TrainProgress, dict[str, Any]]:
    """The trainer, state and progress with which a run goes on; of new data what came from where, see `start.carry`.

    Args:
      trainer: built on the further data.
      further: these.
      checkpoints: of the run.
      run: its folder.
      epochs: passes over them.

    Raises:
      ConfigError, DataError, TrainingError: as for `progress.resume` and `start.carry`.
    """

    def use(restored: Restored) -> tuple[TrainState, TrainProgress, dict[str, Any]]:
        if source_number(restored.meta) == further.number:
            state, progress = resume(trainer, restored)
            return state, progress, {}
        snapshot = open_snapshot(snapshot_of(run, further.number - 1))
        earlier = Earlier.of(str(run), restored, snapshot, same_run=True)
        arrays, origins = carry(trainer, earlier, restored.arrays)
        if all(not entry["new"] and not entry["gone"] for entry in origins["tables"].values()):
            arrays = restored.arrays  # as they are, also those of groups that hold tables of their own
        else:
            note_means(restored)
        end = restored.step + epochs * trainer.steps_per_epoch
        progress = TrainProgress(step=restored.step, source=further.number, source_end=end)
        return trainer.restore(arrays, restored.step), progress, origins

    opened = None
    for step in reversed(further.begun):
        try:
            opened = checkpoints.restore(step, use)
            break
        except TrainingError as error:
            distributed.note(f"{error} The one before it is used.")
    opened = opened or use_checkpoint(checkpoints, None, distributed.note, use, "of ")
    assert opened is not None  # there are checkpoints
    state, progress, origins = opened
    assert progress.source_end is not None
    train = dataclasses.replace(trainer.config.train, steps=progress.source_end)
    config = dataclasses.replace(trainer.config, train=train)
    return dataclasses.replace(trainer, config=config), state, progress, origins


def record_source(run: Path, further: Further) -> None:
    """Writes what describes further data into a run folder, before a checkpoint says that it has begun with them."""
    snapshot_data(further.source, snapshot_of(run, further.number))


def about(further: Further) -> dict[str, Any]:
    """Facts about further data for their line of metrics.jsonl."""
    return {"source": further.number, "data": further.name, "new_values": further.new_values}


def summarise_sources(trainer: Trainer, outcome: Outcome, run: Path, seconds: float) -> dict[str, Any]:
    """The content of summary.json of a run that has gone on: the figures of its last source, and a row for each.

    Returns:
      What `summary.summarise` gives, of which "eval" is the measure of the last source before it was trained on; and
      "sources": for each further source "source", "data", "step" before it, "samples", the measures, and "new_values",
      rows that tables got for it.
    """
    rows = [
        {key: value for key, value in line.items() if key not in ("split", "loss")}
        for line in read_lines(run / "metrics.jsonl")
        if line.get("split") == AHEAD and isinstance(line.get("source"), int)
    ]
    last = rows[-1] if rows else {}
    measures = {key: value for key, value in last.items() if key not in _FACTS}
    summary = summarise(trainer, outcome, outcome.progress.step, measures, {}, seconds)
    return summary | {"eval_split": AHEAD, "eval_step": last.get("step", outcome.progress.step), "sources": rows}


def to_text(summary: Mapping[str, Any]) -> str:
    """The table of sources, and how fast the last one was trained."""
    titles = ["source", "data", "samples", "new values", "AUC ahead", "log loss", "NE", "calibration"]
    keys = ("auc", "logloss", "ne", "calibration")
    lines = [titles]
    for row in summary["sources"]:
        measures = ["-" if row.get(key) is None else f"{row[key]:.4f}" for key in keys]
        counts = ["-" if row.get(key) is None else f"{row[key]:,}" for key in ("samples", "new_values")]
        lines.append([str(row["source"]), Path(str(row.get("data", ""))).name, *counts, *measures])
    rate = summary["samples_per_s"]
    speed = [f"training: {rate:,.0f} samples/s, without compiling and saving"] if rate else []
    return "\n".join([*aligned(lines), *speed])
