"""A state that starts with what another run has learnt: rows of tables by original value, the dense part by path.

Which row of a table a value has depends on the data that it was counted in. So rows are matched by what they stand for,
as the vocabularies of both runs say it; a value that the other run did not know starts as it would have. Nothing of the
other run is executed: it is read as arrays, vocabularies and JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from recjax.data.prepare.encoder import open_encoder
from recjax.data.row_values import RowValues, row_values
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.data.storage.run_snapshot import open_snapshot
from recjax.embedding.buffers import initial_rows
from recjax.embedding.collection import Saved
from recjax.embedding.dynamic.tables import DYNAMIC
from recjax.embedding.optim import Adam
from recjax.embedding.row_order import RowOrder
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError, TrainingError
from recjax.models.layers import LINEAR
from recjax.parallel import distributed
from recjax.train import state as states
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.run.folder import data_snapshot, require_run
from recjax.train.run.open_run import use_checkpoint
from recjax.train.start_dense import Earlier, carry_dense
from recjax.train.state import TrainState
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import Index, LazyArray, as_lazy, block_of
from recjax.utils.locks import is_locked
from recjax.utils.paths import located
from recjax.utils.text import aligned

_CHUNK = 1 << 16  # rows that are drawn at a time
_LEAST = 256  # rows that are drawn at once: fewer are filled up, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class RowMatch:
    """From the rows of a table to those of an earlier one that stand for the same.

    Attributes:
      source_V: int32, for each row that of the earlier table; -1 where its value is new.
      rows: of the earlier table.
    """

    source_V: np.ndarray
    rows: int

    @property
    def same(self) -> bool:
        """True if all rows stand for what they stood for."""
        V = len(self.source_V)
        return self.rows == V and bool((self.source_V == np.arange(V, dtype=np.int32)).all())

    def counts(self) -> dict[str, int]:
        """The numbers of rows: "rows", "reused" and "new" ones of them, and "gone" ones of the earlier table."""
        V, reused = len(self.source_V), int((self.source_V >= 0).sum())
        return {"rows": V, "reused": reused, "new": V - reused, "gone": self.rows - reused}


def match_rows(name: str, then: RowValues | None, then_rows: int, now: RowValues | None, now_rows: int) -> RowMatch:
    """Matches the rows of a feature's table with those of an earlier run.

    Args:
      name: of the feature.
      then: meaning of the earlier rows; None: a row is its id.
      then_rows: how many there were.
      now: likewise of the present ones.
      now_rows: likewise.

    Raises:
      ConfigError: the two stand for values of different kinds.
    """
    if (then is None) != (now is None):
        numbered, counted = ("there", "here") if then is None else ("here", "there")
        raise ConfigError(
            f"the rows of feature {name!r} are plain numbers {numbered}, and stand for values of a vocabulary "
            f"{counted}: nothing says which are the same. Give data that were prepared as those of the other run."
        )
    source_V = np.full(now_rows, -1, np.int32)
    if then is None or now is None:
        shared = min(then_rows, now_rows)
        source_V[:shared] = np.arange(shared, dtype=np.int32)
        return RowMatch(source_V, then_rows)
    if then.rule != now.rule:
        raise ConfigError(
            f"the rows of feature {name!r} stood for other values: for {then.rule} there, for {now.rule} here. Store "
            "and prepare the column as there (data.columns, data.ids), or give it another name, to start with new rows."
        )
    if then.first + len(then.values) > then_rows:
        raise ConfigError(
            f"the other run's table of feature {name!r} has {then_rows:,} rows, fewer than its vocabulary has values: "
            "the two do not belong together. Restore that run folder from a copy."
        )
    shared = now_rows if now.computed else min(then.first, now.first)  # rows of unknown values, and of missing ones
    source_V[:shared] = np.arange(shared, dtype=np.int32)
    if not now.computed:
        at = _places(then.values, now.values)
        source_V[now.first : now.first + len(at)] = np.where(at >= 0, at + then.first, -1)
    return RowMatch(source_V, then_rows)


def _places(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Places of wanted values among `values`, which are distinct: int64, -1 of a value that is not there."""
    places = np.full(len(wanted), -1, np.int64)
    if not len(values) or not len(wanted):
        return places
    if values.dtype.kind != wanted.dtype.kind:  # signed and unsigned, of which NumPy would make floats
        most = np.iinfo(np.int64).max
        some, sought = (np.flatnonzero((of >= 0) & (of <= most)) for of in (values, wanted))
        at = _places(values[some].astype(np.int64), wanted[sought].astype(np.int64))
        places[sought] = np.where(at >= 0, some[at] if len(some) else -1, -1)
        return places
    order = np.argsort(values)
    at = np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    return np.where(values[order[at]] == wanted, order[at], -1)


def carry(trainer: Trainer, earlier: Earlier, arrays: dict[str, Any], slots: bool = True) -> tuple[dict[str, Any], Any]:
    """The arrays of a checkpoint that a run starts with, made of those of an earlier one.

    Args:
      trainer: of the run that starts.
      earlier: about the checkpoint.
      arrays: of it, nested and lazy as `Checkpoints` restores them.
      slots: whether the state of optimizers is carried too.

    Returns:
      What `Trainer.restore` takes, tables as lazy arrays; and what came from where: "from", "step"; "tables": name ->
      `RowMatch.counts` and "slots", whether these came too; "left": names of tables that have no place here; and
      "dense", see `carry_dense`.

    Raises:
      ConfigError: what the run learns, a table or the dense part does not fit.
    """
    schema, saved = trainer.source.schema, states.one_version(arrays)
    tables, _ = specs(trainer.config, schema)
    _refuse_other_labels(trainer.source, earlier)
    if not earlier.same_run and (dynamic := next((spec.name for spec in tables if spec.ids), None)):
        raise ConfigError(
            f"train.init_from: embedding.tables.{dynamic}.ids=dynamic, and rows that are given to keys cannot be taken "
            "from another run yet. Prepare the data with a vocabulary, or leave train.init_from out."
        )
    before: Saved = {name: of for name, of in saved.get("tables", {}).items() if len(of["rows"].shape) == 2}
    if not any(spec.name in before for spec in tables):
        raise ConfigError(
            f"{earlier.name} has none of the tables of this run ({', '.join(spec.name for spec in tables[:5])}); it "
            f"has {', '.join(list(before)[:5]) or 'none'}. Start from a run on data with the same columns."
        )
    names = {spec.name.removesuffix(LINEAR) for spec in tables} | {spec.name for spec in tables}
    now = row_values(trainer.source, names)
    then = {} if earlier.source is None else row_values(earlier.source, names)
    loaded = _Loaded()
    carried: dict[str, Any] = {}
    origins: dict[str, Any] = {}
    for spec in tables:
        if spec.name not in before:
            carried[spec.name] = _new(trainer, spec)
            origins[spec.name] = {"rows": spec.rows, "reused": 0, "new": spec.rows, "gone": 0, "slots": False}
            continue
        rows, dim = before[spec.name]["rows"].shape
        if dim != spec.dim:
            raise ConfigError(
                f"the vectors of table {spec.name!r} have {dim} values in {earlier.name}, and {spec.dim} here. Set "
                f"embedding.dim={dim} (or embedding.tables.{spec.name}.dim)."
            )
        feature = spec.name if spec.name in now or spec.name in then else spec.name.removesuffix(LINEAR)
        match = match_rows(feature, then.get(feature), rows, now.get(feature), spec.rows)
        kind = earlier.tables.get(spec.name, {}).get("optimizer")
        # Adam counts the run's steps: state of many of them would be taken for that of the first.
        fits = spec.optimizer.kind == kind and (earlier.same_run or not isinstance(spec.optimizer, Adam))
        taken = before[spec.name] if slots and fits else {"rows": before[spec.name]["rows"]}
        carried[spec.name] = _carried(trainer, spec, match, taken, loaded)
        has_slots = len(taken) > 1 and set(spec.optimizer.slots(spec.dim)) <= set(taken)
        origins[spec.name] = {**match.counts(), "slots": has_slots}
    dense, of_dense = carry_dense(trainer, earlier, saved, slots)
    passed = {DYNAMIC: arrays[DYNAMIC]} if DYNAMIC in arrays else {}
    left = [name for name in before if name not in carried]
    about = {"from": earlier.name, "step": earlier.step, "tables": origins, "left": left, "dense": of_dense}
    return {"tables": carried, **dense, **passed}, about


class _Loaded:
    """The array of an earlier table that was read last, whole and in memory: parts of it are wanted in any order."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._key: tuple[str, str] | None = None
        self._array = np.zeros(0)

    def read(self, table: str, name: str, array: Any) -> np.ndarray:
        """An array of a table."""
        if self._key != (table, name):
            self._key, self._array = None, np.zeros(0)  # before the next one takes memory
            self._array, self._key = as_lazy(array).load(), (table, name)
        return self._array


def _new(trainer: Trainer, spec: TableSpec) -> dict[str, LazyArray]:
    """A table of new rows."""
    return _carried(trainer, spec, RowMatch(np.full(spec.rows, -1, np.int32), 0), {}, _Loaded())


def _carried(
    trainer: Trainer, spec: TableSpec, match: RowMatch, before: Mapping[str, Any], loaded: _Loaded
) -> dict[str, LazyArray]:
    """A table and its slots, in the order in which rows are stored: earlier rows where there are any, else new ones.

    Args:
      trainer: of the run.
      spec: of the table.
      match: which earlier row each row takes.
      before: the earlier arrays; of what is missing all rows are new.
      loaded: holds them.
    """
    dtype = np.dtype(jnp.bfloat16 if spec.dtype == "bfloat16" else trainer.dtype)
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {"rows": ((spec.dim,), dtype)}
    shapes |= {name: (slot.shape, np.dtype(trainer.dtype)) for name, slot in spec.optimizer.slots(spec.dim).items()}
    order, order_before, same = RowOrder(spec.rows), RowOrder(max(1, match.rows)), match.same

    def lazy(name: str, tail: tuple[int, ...], dtype: np.dtype[Any]) -> LazyArray:
        shape, array = (spec.rows, *tail), before.get(name)
        if array is not None and array.shape != (match.rows, *tail):
            raise ConfigError(
                f"{name!r} of table {spec.name!r} has shape {array.shape} in the other run, but here it needs "
                f"{(match.rows, *tail)}. Leave the state of optimizers out with train.init_slots=false."
            )
        if array is not None and same and array.dtype == dtype:
            return as_lazy(array)

        def read(part: Index) -> np.ndarray:
            rows = order.row(np.arange(part[0].start, part[0].stop, dtype=np.int64))
            source = match.source_V[rows] if array is not None else np.full(len(rows), -1, np.int32)
            out, there = np.empty((len(rows), *tail), dtype), source >= 0
            if array is not None and there.any():
                whole = loaded.read(spec.name, name, array)
                out[there] = whole[order_before.position(source[there].astype(np.int64))].astype(dtype)
            if not there.all():
                out[~there] = _initial(trainer.config.seed, spec, name, rows[~there], tail).astype(dtype)
            return out[(slice(None), *part[1:])]

        return LazyArray(shape, dtype, read, block_of(shape, dtype))

    return {name: lazy(name, tail, dtype) for name, (tail, dtype) in shapes.items()}


def _initial(seed: int, spec: TableSpec, name: str, rows: np.ndarray, tail: tuple[int, ...]) -> np.ndarray:
    """Initial values of some rows of a table, or of a slot of theirs."""
    if name != "rows":
        return np.full((len(rows), *tail), spec.optimizer.slots(spec.dim)[name].initial)
    out = np.empty((len(rows), spec.dim), np.float32)
    for first in range(0, len(rows), _CHUNK):
        some = rows[first : first + _CHUNK]
        ids = np.zeros(max(_LEAST, 1 << (len(some) - 1).bit_length()), np.int32)
        ids[: len(some)] = some
        drawn = initial_rows(seed, spec.name, jnp.asarray(ids), spec.dim, spec.scale)
        out[first : first + len(some)] = np.asarray(drawn)[: len(some)]
    return out


def _refuse_other_labels(source: BlockSource, earlier: Earlier) -> None:
    """Refuses to go on with what was learnt of other labels (ConfigError)."""
    if earlier.source is None:
        return
    labels = [_labels(of) for of in (earlier.source, source)]
    if labels[0] != labels[1] and None not in labels:
        raise ConfigError(
            f"{earlier.name} has learnt another label: {labels[0]} there, {labels[1]} here. Give data with the same "
            "label (data.label, data.threshold, data.positive), or start without that run."
        )


def _labels(source: BlockSource) -> str | None:
    """The labels of data in words; None where they do not tell."""
    if source.schema.labels:
        classes = (f" of {label.classes}" if label.classes else "" for label in source.schema.labels)
        named = zip(source.schema.labels, classes, strict=True)
        return ", ".join(f"{label.name} ({label.kind}{more})" for label, more in named)
    return source.about.get("label") if isinstance(source, PreparedSource) else None


def to_text(about: Mapping[str, Any]) -> str:
    """Formats what `carry` tells as a table for a person."""
    lines = [["table", "rows", "reused", "new", "gone", "optimizer state"]]
    for name, entry in about["tables"].items():
        numbers = [f"{entry[key]:,}" for key in ("rows", "reused", "new", "gone")]
        lines.append([name, *numbers, "carried" if entry["slots"] else "fresh"])
    dense = about["dense"]
    text = [f"starting from {about['from']}, step {about['step']}:", *aligned(lines)]
    if about["left"]:
        text.append(f"tables that have no place here: {', '.join(about['left'])}")
    columns = [f"{word} {', '.join(dense[word])}" for word in ("new", "gone") if dense[word]]
    inputs = f"; inputs that are {'; '.join(columns)}" if columns else ""
    state = "carried" if dense["optimizer"] else "fresh"
    text.append(f"dense part: {dense['carried']} of {dense['arrays']} arrays{inputs}; optimizer state {state}")
    return "\n".join(text)


def note_means(restored: Restored) -> None:
    """Prints a note where replica groups wrote a checkpoint, each with tables of its own, whose means are carried."""
    if groups := len(restored.arrays.get("replicas", ())):
        distributed.note(
            f"{groups} replica groups wrote checkpoint {restored.step}, each with tables of its own: all go on with "
            "the means of these"
        )


def _other_statistics(then: BlockSource | None, now: BlockSource) -> list[str]:
    """Names of dense columns that both data have, scaled by different statistics."""
    if not (isinstance(then, PreparedSource) and isinstance(now, PreparedSource)):
        return []
    if not all("encoder" in of.about for of in (then, now)):
        return []
    scales = []
    for of in (then, now):
        encoder = open_encoder(of.path)
        stats = encoder.dense_stats
        columns = zip(stats.mean, stats.squares / np.maximum(stats.count, 1), stats.least, strict=True)
        scales.append(dict(zip(encoder.dense, columns, strict=True)) if encoder.by.transform != "none" else {})
    return [name for name, scale in scales[0].items() if name in scales[1] and scales[1][name] != scale]


def start_from(trainer: Trainer, folder: Path) -> tuple[TrainState, dict[str, Any]]:
    """The state before the first step of a run that starts from another one, as `train.init_from` says.

    Args:
      trainer: of the run.
      folder: its own.

    Returns:
      The state, and what came from where: see `carry`.

    Raises:
      ConfigError: that is no run folder, has no checkpoint, or does not fit.
      TrainingError: none of its checkpoints is intact, or it is still training.
    """
    train = trainer.config.train
    run = located(train.init_from)
    setting = f"train.init_from={train.init_from}"
    require_run(run)
    if run.resolve() == folder.resolve():
        raise ConfigError(f"{setting} is the run folder itself. Name another run, or another --out.")
    step = None if train.init_step == "chosen" else train.init_step
    if not isinstance(step, int) and is_locked(run / ".lock"):
        raise TrainingError(
            f"{setting}: another process is training in {run}, so which step is its best is not known yet. Wait for "
            "it, or choose a step that it has saved: train.init_step=N."
        )

    def use(restored: Restored) -> tuple[TrainState, dict[str, Any]]:
        note_means(restored)
        earlier = Earlier.of(str(run), restored, open_snapshot(data_snapshot(run, restored.step)))
        arrays, about = carry(trainer, earlier, restored.arrays, train.init_slots)
        return trainer.restore(arrays, 0), about

    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        started = use_checkpoint(checkpoints, step, distributed.note, use, "train.init_step=")
    if started is None:
        raise ConfigError(f"{setting}: {run} has no checkpoint yet. Train it first, or name another run.")
    distributed.note(to_text(started[1]))
    if columns := _other_statistics(open_snapshot(data_snapshot(run, step)), trainer.source):
        distributed.note(
            f"dense columns were prepared with other statistics than those of {run} ({', '.join(columns[:5])}), so "
            f"equal values look different to the model. Prepare the data with base={run} to keep the run's."
        )
    return started
