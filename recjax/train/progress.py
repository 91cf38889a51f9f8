"""The progress of a training beside its weights, and what a checkpoint says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from recjax.data.datasets.own_table import Table
from recjax.embedding import row_order
from recjax.errors import ConfigError, DataError, TrainingError
from recjax.train.checkpoint.checkpoints import Restored
from recjax.train.inputs import InputStream
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer

MOST_SOURCES = 100_000  # of a run, one after the other
_CHOICE = ("best_step", "best_value", "misses", "stopped")


@dataclasses.dataclass
class TrainProgress:
    """The part of a run, beside arrays, that a checkpoint carries so that it can go on.

    Attributes:
      step: steps done.
      position: global sample index of the next sample; this and the next three are the `InputStream.state_dict`.
      capacities: sizes of the routing arrays, for one layout of the tables; see `capacity.py`.
      peaks: what the batches of this period required of these at most.
      stages: states of the ordered stages, for one layout of the tables too.
      best_step: step with the best validation metric so far, None before the first evaluation.
      best_value: that metric.
      misses: evaluations since then.
      stopped: whether the run stopped early.
      unevaluated: whether the evaluation due at this step was broken off, as the run was asked to stop.
      source: the number of the data that are trained on: 0 those that the run began with, then further ones.
      source_end: of further data, the step at which they end; None of the first.
      end: None, or what the last step of a run did for being the last: "lines", the splits whose lines in
        metrics.jsonl are due to that, and the four attributes above as they would be without its evaluation.
    """

    step: int = 0
    position: int = 0
    capacities: dict[str, int] = dataclasses.field(default_factory=dict)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    stages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_step: int | None = None
    best_value: float | None = None
    misses: int = 0
    stopped: bool = False
    unevaluated: bool = False
    source: int = 0
    source_end: int | None = None
    end: dict[str, Any] | None = None

    def advance(self, stream: InputStream) -> None:
        """Takes in steps on the batches that the stream gave last."""
        self.step += len(stream.taken)
        self.refresh(stream)

    def refresh(self, stream: InputStream) -> None:
        """Takes in what the stream has learned of these since."""
        for name, value in stream.state_dict().items():
            setattr(self, name, value)

    def inputs(self) -> dict[str, Any]:
        """The `InputStream.state_dict` of the next step."""
        return {name: getattr(self, name) for name in ("position", "capacities", "peaks", "stages")}

    def choice(self) -> dict[str, Any]:
        """Returns what validation has chosen so far, and whether it has stopped the run."""
        return {name: getattr(self, name) for name in _CHOICE}

    def choose(self, value: float, better: bool, patience: int) -> None:
        """Takes in a validation metric, and whether it is the best; so many that are not stop the run (0: none)."""
        if better:
            self.best_step, self.best_value, self.misses = self.step, value, 0
        else:
            self.misses += 1
            self.stopped = 0 < patience <= self.misses

    def extend(self) -> list[str]:
        """Lets a run that had ended here go on as if it had not: gives the splits whose lines of this step go."""
        if self.end is None:
            return []
        for name in _CHOICE:
            setattr(self, name, self.end[name])
        lines, self.end = self.end["lines"], None
        return list(lines)


def source_number(meta: Mapping[str, Any]) -> int:
    """Returns the number of the data that a checkpoint was trained on last, from what it says of itself."""
    cursor = meta.get("cursor")
    number = cursor.get("source", 0) if isinstance(cursor, Mapping) else 0
    return number if type(number) is int and 0 <= number < MOST_SOURCES else 0


def describe(trainer: Trainer, progress: TrainProgress) -> dict[str, Any]:
    """Returns what a checkpoint says of itself beside its arrays: JSON values."""
    bound, groups = trainer.bound, trainer.bound.groups
    layout = {"devices": bound.devices, "groups": {g.name: g.table_names for g in groups}}
    if bound.hosts > 1:
        layout["hosts"] = bound.hosts
    if bound.replicas > 1:
        layout["replicas"] = bound.replicas
    return {
        "cursor": dataclasses.asdict(progress),
        "config_hash": trainer.config_hash,
        "row_order": row_order.NAME,
        "layout": layout,
        "tables": {
            segment.spec.name: {
                "rows": segment.spec.rows,
                "dim": segment.spec.dim,
                "optimizer": segment.spec.optimizer.kind,
                "slots": sorted(group.slots()),
            }
            for group in groups
            for segment in group.segments
        },
        "data": trainer.source.fingerprint,
    }


def resume(trainer: Trainer, restored: Restored) -> tuple[TrainState, TrainProgress]:
    """Returns the state and progress that a checkpoint holds, on the present mesh and plan.

    Raises:
      ConfigError: the checkpoint was written by a run of another config.
      DataError: the data have changed since.
      TrainingError: it stores rows in an order that this version does not know.
    """
    progress = _progress(trainer, restored.meta, f"checkpoint {restored.step}")
    return trainer.restore(restored.arrays, restored.step, restored.chain), progress


def _data_key(trainer: Trainer) -> str:
    """The setting that says where the data are."""
    data = trainer.config.data
    return "data.from" if isinstance(data, Table) and data.from_ and not data.path else "data.path"


def _progress(trainer: Trainer, meta: Mapping[str, Any], place: str) -> TrainProgress:
    now = describe(trainer, TrainProgress())
    if meta["data"] != now["data"]:
        raise DataError(
            f"{place} was trained on data with fingerprint {meta['data'][:12]}, but the data now have "
            f"{now['data'][:12]}. Point {_data_key(trainer)} at the data it was trained on, or start again in another "
            "--out."
        )
    if meta["config_hash"] != now["config_hash"]:
        raise ConfigError(
            f"{place} was written by a run of config {meta['config_hash']}, but this is {now['config_hash']}. "
            "Use the config.json beside it, or start again in another --out."
        )
    if meta["row_order"] != row_order.NAME:
        raise TrainingError(
            f"{place} stores rows in the order {meta['row_order']!r}, but this version of recjax knows "
            f"{row_order.NAME!r}. Resume it with the version that wrote it."
        )
    progress = TrainProgress(**meta["cursor"])
    if meta.get("layout") != now["layout"]:
        # Those of fewer devices or other groups would pad every exchange; and rows have other owners.
        progress.capacities, progress.peaks, progress.stages = {}, {}, []
    return progress
