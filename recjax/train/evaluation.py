"""Measures of a state on a split: streamed, so that a split may be larger than memory.

Up to `exact_rows` samples all measures are exact. Beyond, the AUC comes from a histogram of the logits and carries the
two values between which the true one lies; the other measures are sums, and stay exact.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from recjax.data.arrow.roles import in_shell
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.row_labels import meaning
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.settings import items
from recjax.settings.values import check_ranges
from recjax.train import ablation
from recjax.train.agreement import gather, never
from recjax.train.metrics import calibration
from recjax.train.metrics.binned import BINS, SLICE_BINS, Binned, Exact
from recjax.train.metrics.by_task import ByTask
from recjax.train.metrics.samples import Gather
from recjax.train.metrics.slices import Groups, Slices, find_feature
from recjax.train.state import TrainState
from recjax.train.tasks import Task, Tasks
from recjax.train.trainer import Trainer
from recjax.utils.text import aligned

EXACT_ROWS = 10_000_000  # samples that are kept for an exact AUC: about 1.2 GB of memory at the end
_PART_ROWS = 10_000_000  # samples of a part that groups are worked on in
_MOST_PARTS = 256  # each is an open file


@dataclasses.dataclass(frozen=True)
class Details:
    """Details to measure of a split, beyond its plain measures."""

    by: tuple[str, ...] = ()  # categorical features; measures of the samples that hold each of their values
    top: int = 20  # most frequent values of a feature that stand alone; the others share one slice
    group: str = ""  # a feature with one value a sample, such as the user, for the AUC within its groups; empty: none
    calibration_bins: int = 20  # points of the calibration curve
    calibration_by: Literal["quantile", "width"] = "quantile"  # bins of equal weight, or of equal width
    ablate: bool = False  # the measure of `train.choose_by` with the values of each column mixed among the rows
    permutations: int = 3  # seeds by which each column is mixed
    exact_rows: int = EXACT_ROWS  # samples up to which the AUC is exact; beyond, it comes with bounds

    def __post_init__(self) -> None:
        check_ranges(self, top=(1, None), calibration_bins=(1, None), permutations=(1, 1000))
        check_ranges(self, exact_rows=(0, None))


class _Part(Protocol):
    """Part that is measured besides the whole."""

    def add(self, batch: Batch, logits_B: np.ndarray) -> None: ...

    def join(self, gather: Gather) -> None: ...


def measure(trainer: Trainer, state: TrainState, split: str, stop: Callable[[], int] = never) -> dict[str, float]:
    """The measures of a split: `metrics.evaluate`, with `auc_low` and `auc_high` if it is large (`binned.Binned`).

    Raises:
      StopRequested: `stop` of any process has said so.
    """
    return _measured(trainer, state, split, _is_exact(trainer, split, EXACT_ROWS), (), stop).result()


def as_line(step: int, split: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `measure` gives as a line of metrics.jsonl."""
    return {"step": step, "split": split, "loss": result.get("loss", result.get("logloss")), **result}


def in_short(result: Mapping[str, float], tasks: Tasks) -> str:
    """Puts what `measure` gives in half a line: of tasks the loss, and of each the first measure after its loss."""
    if not tasks:
        return f"AUC {result['auc']:.4f}, log loss {result['logloss']:.4f}"
    firsts = {"binary": "auc", "number": "mae", "class": "accuracy"}
    names = [f"{task.name}.{firsts[task.label.kind]}" for task in tasks]
    return ", ".join([f"loss {result['loss']:.4f}", *(f"{name} {result[name]:.4f}" for name in names)])


def curves(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns what `calibration.draw` takes of the `report` of each split: of tasks, the binary ones."""
    drawn: dict[str, Mapping[str, Any]] = {}
    for split, of_split in reports.items():
        if "tasks" in of_split:
            drawn |= {f"{split}, {name}": of_task for name, of_task in of_split["tasks"].items()}
        else:
            drawn[split] = of_split
    return drawn


def report(trainer: Trainer, state: TrainState, split: str, details: Details) -> dict[str, Any]:
    """The measures of a split and all `details` of it.

    Returns:
      What `measure` gives, and
      `auc_method`: "exact" or "binned";
      `positive_share`: share of the weight that is of positive samples;
      `ece`: expected calibration error over the bins of the curve;
      `calibration_curve`: see `calibration.Point`;
      `predictions`: see `calibration.predictions`;
      `by`: feature -> see `Slices.result`; only if asked for;
      `grouped`: see `Groups.result`, of tasks that of each binary one by name; only if asked for;
      `ablation`: see `ablation.ablate`; only if asked for.
      Of tasks what `ByTask.result` gives takes the place of the plain measures, and "tasks" (binary task -> its
      `positive_share`, `ece`, `calibration_curve`, `predictions`, `samples`) that of these.

    Raises:
      ConfigError: no such feature, one that does not group samples, or a `group` where no task is binary.
      DataError, TrainingError: as for `metrics.evaluate`.
    """
    binary: list[Task | None] = [task for task in trainer.tasks if task.label.kind == "binary"]
    if trainer.tasks and details.group and not binary:
        raise ConfigError(
            "the AUC within groups (--group) is of binary labels, and these data have none: "
            f"{', '.join(task.name for task in trainer.tasks)}. Leave it out; --by has the measures of each task."
        )
    schema, exact = trainer.source.schema, _is_exact(trainer, split, details.exact_rows)
    _refuse_unread(trainer.source, [*details.by, details.group])
    grouped = find_feature(schema, details.group) if details.group else None
    by = [find_feature(schema, name) for name in details.by]
    groups = []
    if grouped:
        parts = min(_MOST_PARTS, max(1, -(-_rows(trainer, split) // _PART_ROWS)))
        shared = meaning(trainer.source, grouped).shared
        groups = [Groups(grouped, parts, shared, task) for task in binary or [None]]
    slices, mine = {}, trainer.eval_rows(split)
    together = functools.partial(gather, trainer.mesh)
    for feature in by:
        where: dict[str, Any] = {"position": mine.start, "end": mine.stop, "epochs": 1}
        size, workers = trainer.config.train.eval_batch_size, trainer.config.train.workers
        stream = batches(trainer.source, split, size, workers=workers, **where)
        name = meaning(trainer.source, feature).name
        measures = functools.partial(_measures, trainer.tasks, exact, SLICE_BINS)
        slices[feature.name] = Slices(feature, stream, details.top, measures, name, together)
    whole = _measured(trainer, state, split, exact, (*slices.values(), *groups))
    result: dict[str, Any] = {**whole.result(), "auc_method": "exact" if exact else "binned"}
    if isinstance(whole, ByTask):
        of = {name: (kept, result[f"{name}.samples"]) for name, kept in whole.binary().items()}
        result["tasks"] = {name: _calibrated(kept, details) | {"samples": n} for name, (kept, n) in of.items()}
    else:
        result |= _calibrated(whole, details)
    if slices:
        result["by"] = {name: part.result() for name, part in slices.items()}
    if groups:
        each = [part.result() for part in groups]
        names = [task.name for task in binary if task is not None]
        result["grouped"] = dict(zip(names, each, strict=True)) if trainer.tasks else each[0]
    if details.ablate:
        make_measures = functools.partial(_measures, trainer.tasks, exact)
        result["ablation"] = ablation.ablate(trainer, state, split, make_measures, details.permutations)
    return result


def _refuse_unread(source: BlockSource, names: Sequence[str]) -> None:
    """Refuses columns of a table that are no categorical features of the model, with what else to do (ConfigError)."""
    about = source.about if isinstance(source, PreparedSource) else {}
    features = {feature.name for feature in source.schema.features}
    for name in names:
        if name not in features and name in about.get("table", {}).get("names", ()):
            raise ConfigError(
                f"{name!r} is a column of the table, but no categorical feature of the model, so the prepared data do "
                "not tell its values apart. Score the rows with it and the label (`recjax predict RUN --input FILE "
                f"--out scores.parquet --columns {shlex.quote(items.quote(name))},LABEL`) and group these scores, or "
                f"train with {in_shell(name, 'id')} in data.columns."
            )


def _calibrated(whole: Exact | Binned, details: Details) -> dict[str, Any]:
    """Predictions of one binary label beside the labels."""
    histogram = whole.histogram()
    points = calibration.curve(histogram, details.calibration_bins, details.calibration_by)
    return {
        "positive_share": whole.positives(),
        "ece": calibration.expected_error(points),
        "calibration_curve": points,
        "predictions": calibration.predictions(histogram),
    }


def _measured(
    trainer: Trainer,
    state: TrainState,
    split: str,
    exact: bool,
    parts: Sequence[_Part],
    stop: Callable[[], int] = never,
) -> Exact | Binned | ByTask:
    whole = _measures(trainer.tasks, exact)
    for batch, logits in trainer.predict(state, trainer.eval_inputs(split, stop, state.host)):
        if not batch.size:
            continue
        whole.add(batch.labels, logits, batch.weights, batch.position)
        for part in parts:
            part.add(batch, logits)
    if jax.process_count() > 1:
        watchdog.phase("wait")
        for joined in (whole, *parts):
            joined.join(functools.partial(gather, trainer.mesh))
        watchdog.phase("report")
    return whole


def _measures(tasks: Tasks, exact: bool, bins: int = BINS) -> Exact | Binned | ByTask:
    """Returns an accumulator: of all samples if `exact`, else of `bins` of a histogram."""

    def kept() -> Exact | Binned:
        return Exact() if exact else Binned(bins)

    return ByTask(tasks, kept) if tasks else kept()


def _is_exact(trainer: Trainer, split: str, exact_rows: int) -> bool:
    return _rows(trainer, split) <= exact_rows


def _rows(trainer: Trainer, split: str) -> int:
    return int(trainer.source.row_counts(split).sum())


def to_text(result: Mapping[str, Any]) -> str:
    """Formats what `main.evaluate` returns: measures line by line, one column a split, then the details."""
    splits = result.get("splits") or {result["split"]: result}
    plain: Sequence[str] = ("auc", "logloss", "ne", "calibration", "ece", "positive_share", "samples")
    if any("tasks" in part for part in splits.values()):
        plain = [name for name, value in next(iter(splits.values())).items() if isinstance(value, (int, float))]
        plain = [name for name in plain if name != "step" and not name.endswith(("auc_low", "auc_high"))]
    table = [["step", *(str(result["step"]) for _ in splits)], ["split", *splits]]
    table += [[name, *(_number(part[name]) for part in splits.values())] for name in plain]
    blocks = ["\n".join(aligned(table))]
    for split, part in splits.items():
        if part["auc_method"] == "binned" and "tasks" not in part:
            blocks.append(
                f"{split}: the AUC is binned, for {part['samples']:,} samples are many; the true one lies between "
                f"{part['auc_low']:.7f} and {part['auc_high']:.7f}"
            )
        grouped_by = part.get("grouped", {})
        for name, grouped in grouped_by.items() if "tasks" in part else [("", grouped_by)] if grouped_by else []:
            blocks.append(
                f"{split}{name and f', {name}'}: AUC within each {grouped['feature']}, weighted by impressions: "
                f"{_number(grouped['gauc'])}\n({grouped['groups']:,} groups with {grouped['share']:.1%} of the weight; "
                f"{grouped['one_class_groups']:,} groups of one class only do not count, nor do values unknown "
                f"or missing, {grouped['shared_share']:.1%})"
            )
        if "ablation" in part:
            blocks.append(ablation.to_text(split, part["ablation"]))
        for feature, rows in part.get("by", {}).items():
            names: Sequence[str] = ("value", "samples", "positive_share", "auc", "logloss", "ne", "calibration")
            if "tasks" in part:
                of_task = (".auc", ".mae", ".accuracy")
                names = ("value", "samples", "loss", *(name for name in rows[0] if name.endswith(of_task)))
            lines = [[str(row[name]) if name == "value" else _number(row[name]) for name in names] for row in rows]
            blocks.append(f"{split} by {feature}:\n" + "\n".join(aligned([names, *lines])))
    return "\n\n".join(blocks)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}"
