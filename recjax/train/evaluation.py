"""Measures of a state on a split: streamed, so that a split may be larger than memory.

Up to `exact_rows` samples all measures are exact. Beyond, the AUC comes from a histogram of the logits and carries the
two values between which the true one lies; the other measures are sums, and stay exact.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from recjax.data import counter_rng
from recjax.data.arrow.roles import in_shell
from recjax.data.batch import Bags, Batch, Feature, Schema
from recjax.data.pipeline import batches
from recjax.data.row_values import meaning
from recjax.data.source import BlockSource, between, concatenate, one_label_a_row, take
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import ConfigError
from recjax.parallel import watchdog
from recjax.settings import items
from recjax.settings.values import check_ranges
from recjax.train.agreement import gather
from recjax.train.inputs import never
from recjax.train.metrics import calibration, drift
from recjax.train.metrics.binned import BINS, SLICE_BINS, Binned, Exact
from recjax.train.metrics.by_task import ByTask
from recjax.train.metrics.samples import Gather
from recjax.train.metrics.slices import Groups, Measures, Slices, find_feature
from recjax.train.ranked import measure_ranking
from recjax.train.state import TrainState
from recjax.train.tasks import Task, Tasks, choice_of
from recjax.train.trainer import Trainer
from recjax.utils import log, plots
from recjax.utils.files import write_whole
from recjax.utils.text import aligned

EXACT_ROWS = 10_000_000  # samples that are kept for an exact AUC: about 1.2 GB of memory at the end
_PART_ROWS = 10_000_000  # samples of a part that groups are worked on in
_MOST_PARTS = 256  # each is an open file
_MIXING = 41  # purpose of random numbers
_ROWS_TOGETHER = 2**20  # among so many rows, whole blocks, values are mixed: they are in memory together
RANKED_LISTS = (10, 20, 50)  # lengths of lists of items that are measured unless others are named
_MOST_DRAWN = 40  # bars of a picture


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
    # Of a model of two sides, lengths of the lists of items that are ranked for each user; empty: 10, 20 and 50
    topk: tuple[int, ...] = ()
    # Splits whose pairs are left out of these lists; none: those before the split that is measured
    exclude: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, top=(1, None), calibration_bins=(1, None), permutations=(1, 1000))
        object.__setattr__(self, "topk", (self.topk,) if isinstance(self.topk, int) else tuple(self.topk))
        if self.exclude is not None:
            names = (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)
            object.__setattr__(self, "exclude", names)
        check_ranges(self, exact_rows=(0, None), topk=(1, 10_000))

    def refuse_beside_ranking(self) -> None:
        """Refuses details of predictions where items are ranked, which has none (ConfigError)."""
        plain = Details(topk=self.topk, exclude=self.exclude)
        if other := next(
            (f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(plain, f.name)), ""
        ):
            raise ConfigError(
                f"--{other.replace('_', '-')} (in Python {other}) is about predictions beside labels, and items that "
                "are ranked for users have none. Leave it out."
            )


class _Part(Protocol):
    """Part that is measured besides the whole."""

    def add(self, batch: Batch, logits_B: np.ndarray) -> None: ...

    def join(self, gather: Gather) -> None: ...


def measure(trainer: Trainer, state: TrainState, split: str, stop: Callable[[], int] = never) -> dict[str, float]:
    """The measures of a split: `metrics.evaluate`, with `auc_low` and `auc_high` if it is large (`binned.Binned`).

    Of a model of two sides those of `measure_ranking`.

    Raises:
      StopRequested: `stop` of any process has said so.
    """
    if trainer.ranks:
        return measure_ranking(trainer, state, split, stop=stop)
    return _measured(trainer, state, split, _is_exact(trainer, split, EXACT_ROWS), (), stop).result()


def as_line(step: int, split: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `measure` gives as a line of metrics.jsonl."""
    return {"step": step, "split": split, "loss": result.get("loss", result.get("logloss")), **result}


def in_short(result: Mapping[str, float], tasks: Tasks) -> str:
    """Puts what `measure` gives in half a line: of tasks the loss, and of each the first measure after its loss."""
    if "recall@20" in result:
        return f"recall@20 {result['recall@20']:.4f}, ndcg@20 {result['ndcg@20']:.4f}"
    if not tasks:
        return f"AUC {result['auc']:.4f}, log loss {result['logloss']:.4f}"
    firsts = {"binary": "auc", "number": "mae", "class": "accuracy"}
    names = [f"{task.name}.{firsts[task.label.kind]}" for task in tasks]
    return ", ".join([f"loss {result['loss']:.4f}", *(f"{name} {result[name]:.4f}" for name in names)])


def curves(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns what `calibration.draw` takes of the `report` of each split: of tasks, the binary ones."""
    drawn: dict[str, Mapping[str, Any]] = {}
    for split, of_split in reports.items():
        if "users" in of_split:  # items were ranked, and nothing predicted
            continue
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
      `ablation`: see `ablate`; only if asked for.
      Of tasks what `ByTask.result` gives takes the place of the plain measures, and "tasks" (binary task -> its
      `positive_share`, `ece`, `calibration_curve`, `predictions`, `samples`) that of these.

    Raises:
      ConfigError: no such feature, one that does not group samples, or a `group` where no task is binary.
      DataError, TrainingError: as for `metrics.evaluate`.

    Of a model of two sides, or with `details.topk`, it is what `measure_ranking` gives.
    """
    if trainer.ranks or details.topk:
        details.refuse_beside_ranking()
        return measure_ranking(trainer, state, split, details.topk or RANKED_LISTS, details.exclude)
    binary: list[Task | None] = [task for task in trainer.tasks if task.label.kind == "binary"]
    if trainer.tasks and details.group and not binary:
        raise ConfigError(
            "the AUC within groups (--group) is of binary labels, and these data have none: "
            f"{', '.join(task.name for task in trainer.tasks)}. Leave it out; --by has the measures of each task."
        )
    schema, exact = trainer.source.schema, _is_exact(trainer, split, details.exact_rows)
    _refuse_unread(trainer.source, [*details.by, details.group])
    grouped = _of_label(schema, find_feature(schema, details.group)) if details.group else None
    by = [_of_label(schema, find_feature(schema, name)) for name in details.by]
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
        stream = (
            one_label_a_row(batch, schema, [feature.name])
            for batch in batches(trainer.source, split, size, workers=workers, **where)
        )
        name = meaning(trainer.source, feature).name
        measures = functools.partial(_measures, trainer.tasks, exact, SLICE_BINS)
        slices[feature.name] = Slices(feature, stream, details.top, measures, name, together)
    names = [*details.by, *([details.group] if details.group else [])]
    whole = _measured(trainer, state, split, exact, (*slices.values(), *groups), names=names)
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
        result["ablation"] = ablate(trainer, state, split, make_measures, details.permutations)
    return result


def _of_label(schema: Schema, feature: Feature) -> Feature:
    """A feature as each label has it, `one_label_a_row`: of the elements that have labels, one id."""
    return dataclasses.replace(feature, bag=1) if feature.name in schema.labelled_features else feature


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
    names: Sequence[str] = (),
) -> Exact | Binned | ByTask:
    """Measures a split, and its `parts`, which look at features of these names."""
    whole = _measures(trainer.tasks, exact)
    for batch, logits in trainer.predict(state, trainer.eval_inputs(split, stop, state.host)):
        if not batch.size:
            continue
        whole.add(batch.labels, logits, batch.weights, batch.position)
        apart = one_label_a_row(batch, trainer.source.schema, names) if parts else batch
        for part in parts:
            part.add(apart, logits)
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


class MixedColumn:
    """A `BlockSource` in which the values of one column are dealt to the rows of a split again."""

    def __init__(self, source: BlockSource, column: str, seed: int) -> None:
        """Takes the values from the rows of `source`, by a permutation that (seed, column, place) decide."""
        self.name, self.schema, self.fingerprint = source.name, source.schema, source.fingerprint
        self._source, self._column, self._seed = source, column, seed
        self._number = [*source.schema.dense, *(feature.name for feature in source.schema.features)].index(column)
        self._together: tuple[tuple[str, int], Batch] | None = None

    def row_counts(self, split: str) -> np.ndarray:
        """See `BlockSource`."""
        return self._source.row_counts(split)

    def read(self, split: str, index: int) -> Batch:
        """See `BlockSource`."""
        counts = self._source.row_counts(split)
        part = (np.cumsum(counts) - counts) // _ROWS_TOGETHER  # of each block
        mixed = self._read_together(split, int(part[index]), np.flatnonzero(part == part[index]))
        block = self._source.read(split, index)
        start = int(counts[:index][part[:index] == part[index]].sum())
        other = between(mixed, start, start + block.size)
        if self._column in block.bags:
            return dataclasses.replace(block, bags={**block.bags, self._column: other.bags[self._column]})
        dense = block.dense.copy()
        dense[:, self._number] = other.dense[:, self._number]
        return dataclasses.replace(block, dense=dense)

    def _read_together(self, split: str, part: int, blocks: np.ndarray) -> Batch:
        together = self._together
        if together is None or together[0] != (split, part):
            whole = concatenate([self._source.read(split, int(index)) for index in blocks])
            if any(self._column in group.features for group in self.schema.groups):  # among all elements, as they lie
                bags = whole.bags[self._column]
                order = counter_rng.permutation(len(bags.ids), self._seed, _MIXING, self._number, part)
                weights = None if bags.weights is None else bags.weights[order]
                mixed = whole.with_bags({**whole.bags, self._column: Bags(bags.ids[order], bags.lengths, weights)})
            else:
                mixed = take(whole, counter_rng.permutation(whole.size, self._seed, _MIXING, self._number, part))
            self._together = together = (split, part), mixed
        return together[1]


def ablate(
    trainer: Trainer, state: TrainState, split: str, make_measures: Callable[[], Measures], permutations: int
) -> dict[str, Any]:
    """Measures what each column is worth to a trained model: a split with its values mixed among the rows, in turn.

    A column that the model makes no use of changes nothing; one that it needs costs much. Breiman, "Random forests",
    Machine Learning 45 (2001), section 10. Columns that say the same stand in for each other, so that each may seem
    worth little.

    Args:
      trainer: of the run; in one process.
      state: to measure.
      split: its rows.
      make_measures: makes an accumulator without samples.
      permutations: seeds of each column: 0, 1, ...

    Returns:
      "measure", which is that of `train.choose_by`; "value", with no column mixed; and "columns", those that matter
      most first: each one's "column", "values" (by seed), their "mean" and "std" (None of a single one), and "losses",
      by how much each is worse than "value", and their mean, "loss".

    Raises:
      ConfigError: there are several processes.
    """
    if jax.process_count() > 1:
        raise ConfigError("--ablate (in Python ablate=True) is for one process, and there are several. Start one.")
    choice, source = choice_of(trainer.config.train.choose_by, trainer.tasks), trainer.source
    names = [*source.schema.dense, *(feature.name for feature in source.schema.features)]

    def value_of(rows: BlockSource) -> float:
        size = min(trainer.config.train.eval_batch_size, int(rows.row_counts(split).sum()))
        accumulator = make_measures()
        stream = batches(rows, split, size, epochs=1, workers=trainer.config.train.workers)
        for batch, logits in trainer.predict(state, trainer.inputs_of(stream, size, state.host)):
            accumulator.add(batch.labels, logits, batch.weights, batch.position)
        return choice.value(accumulator.result())

    plain, columns = value_of(source), list[dict[str, Any]]()
    for number, column in enumerate(names, 1):
        log.info(f"[{number} of {len(names)}] {split} with {column} mixed")
        values = [value_of(MixedColumn(source, column, seed)) for seed in range(permutations)]
        mean = statistics.fmean(values)
        std = statistics.stdev(values) if len(values) > 1 else None
        losses = [plain - value if choice.higher else value - plain for value in values]
        figures = {"mean": mean, "std": std, "losses": losses, "loss": statistics.fmean(losses)}
        columns.append({"column": column, "values": values, **figures})
    columns.sort(key=lambda row: -row["loss"])
    return {"measure": trainer.config.train.choose_by, "value": plain, "columns": columns}


def _ablation_text(split: str, result: Mapping[str, Any]) -> str:
    """Formats what `ablate` gives, a line a column."""
    n, measure = len(result["columns"][0]["values"]) if result["columns"] else 0, result["measure"]
    cells = [["column", measure, "std", "n", "loss"]]
    for row in result["columns"]:
        std = "-" if row["std"] is None else f"{row['std']:.4f}"
        cells.append([row["column"], f"{row['mean']:.4f}", std, str(n), f"{row['loss']:+.4f}"])
    head = f"{split}, each column mixed among the rows; {measure} is {result['value']:.4f} without:"
    return "\n".join([head, *aligned(cells)])


@plots.literal()
def draw_ablation(results: Mapping[str, Mapping[str, Any]], out_png: Path, title: str) -> None:
    """Draws by how much each column, mixed, makes the measure worse: a bar a column, a dot a seed.

    Args:
      results: split -> what `ablate` gives.
      out_png: the picture to write.
      title: over the picture.

    Raises:
      TrainingError: the picture cannot be written.
    """
    most = max(min(len(result["columns"]), _MOST_DRAWN) for result in results.values())
    figure = plots.figure(6.4 * len(results), 1.4 + 0.28 * most)
    figure.suptitle(title)
    for panel, (split, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        plots.plain(panel, "x")
        shown: Sequence[Mapping[str, Any]] = result["columns"][:_MOST_DRAWN]
        places = range(len(shown))
        panel.barh(places, [row["loss"] for row in shown], color=plots.BLUE)
        for place, row in zip(places, shown, strict=True):
            panel.plot(row["losses"], [place] * len(row["losses"]), "o", color=plots.ORANGE, markersize=3)
        panel.set_yticks(places, [row["column"][:40] for row in shown], fontsize=8)
        panel.invert_yaxis()
        left_out = len(result["columns"]) - len(shown)
        more = f"; {left_out} columns that matter less left out" if left_out else ""
        panel.set_xlabel(f"loss of {result['measure']}, {split} ({result['value']:.4f} without{more})")
    write_whole(out_png, plots.png(figure))


def to_text(result: Mapping[str, Any]) -> str:
    """Formats what `main.evaluate` returns: measures line by line, one column a split, then the details."""
    splits = result.get("splits") or {result["split"]: result}
    plain: Sequence[str] = ("auc", "logloss", "ne", "calibration", "ece", "positive_share", "samples")
    if any("tasks" in part or "users" in part for part in splits.values()):
        plain = [name for name, value in next(iter(splits.values())).items() if isinstance(value, (int, float))]
        plain = [name for name in plain if name != "step" and not name.endswith(("auc_low", "auc_high"))]
    table = [["step", *(str(result["step"]) for _ in splits)], ["split", *splits]]
    table += [[name, *(_number(part[name]) for part in splits.values())] for name in plain]
    blocks = ["\n".join(aligned(table))]
    for split, part in splits.items():
        if part.get("auc_method") == "binned" and "tasks" not in part:
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
            blocks.append(_ablation_text(split, part["ablation"]))
        for feature, rows in part.get("by", {}).items():
            names: Sequence[str] = ("value", "samples", "positive_share", "auc", "logloss", "ne", "calibration")
            if "tasks" in part:
                of_task = (".auc", ".mae", ".accuracy")
                names = ("value", "samples", "loss", *(name for name in rows[0] if name.endswith(of_task)))
            lines = [[str(row[name]) if name == "value" else _number(row[name]) for name in names] for row in rows]
            blocks.append(f"{split} by {feature}:\n" + "\n".join(aligned([names, *lines])))
    if "drift" in result:
        blocks.append(drift.to_text(result["drift"]))
    return "\n\n".join(blocks)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}"
