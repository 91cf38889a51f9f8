"""Read this first: a whole run, from config to results, in the order in which it happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.baselines import references
from recjax.data.source import split_to_measure
from recjax.data.storage.run_snapshot import refuse_other_values
from recjax.errors import ConfigError, TrainingError
from recjax.parallel import distributed, waiting, watchdog
from recjax.parallel.mesh import left_aside
from recjax.parallel.stopping import asked_to_stop
from recjax.serving.labelled_rows import with_rows
from recjax.serving.table_rows import take_encoding
from recjax.settings import assignments
from recjax.settings.from_python import require_config
from recjax.tiers.report import in_short
from recjax.train import evaluation, planned, preflight
from recjax.train.agreement import StopRequested
from recjax.train.build import build_trainer, remarks
from recjax.train.callbacks import Evaluate, SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.loop import Outcome, fit
from recjax.train.metrics import calibration
from recjax.train.progress import TrainProgress, resume
from recjax.train.run.curves import draw_curves
from recjax.train.run.folder import DATA_SNAPSHOT, ReadOnlyRunFolder, RunFolder
from recjax.train.run.open_run import open_run
from recjax.train.run.summary import figures, summarise
from recjax.train.run.trackers import require
from recjax.train.run.writers import MetricsFile, NoMetrics
from recjax.train.state import TrainState
from recjax.train.step_log import StepLog
from recjax.train.trainer import Trainer
from recjax.utils import html, paths
from recjax.utils.files import write_json
from recjax.utils.host_memory import peak_bytes


def train(config: RunConfig, out: Path | str | None = None) -> dict[str, Any]:
    """Trains, or resumes what an earlier call with the same config left in `out`.

    Arguments and result are those of `recjax.fit`; see `RunFolder` for what `out` will hold.
    """
    began = time.monotonic()
    if distributed.place() is not None and not distributed.joined():
        raise ConfigError(
            "the environment says that this is one of several processes (RECJAX_PROCESSES, RECJAX_CLUSTER), but it has "
            "not joined the others. Call join(place()) of recjax.parallel.distributed first, or use the command line."
        )
    require_config(config, RunConfig, "fit")
    for tracker in config.train.all_trackers:
        require(tracker)
    planned.require_asked(config)
    if (note := left_aside(config.mesh)) is not None:
        distributed.note(note)
    with watchdog.from_python():
        return _train(config, paths.run_folder(out or presets.default_out(config)), began)


def _train(config: RunConfig, path: Path, began: float) -> dict[str, Any]:
    main = distributed.is_main()
    with RunFolder(path, config) if main else ReadOnlyRunFolder(path) as folder, asked_to_stop() as stop:
        with Checkpoints(folder.path / "checkpoints", keep=config.train.keep_checkpoints) as checkpoints:
            stop.steps = checkpoints.steps
            used = folder.resolve(config, distributed.note)
            trainer = build_trainer(used, splits=("train",))
            preflight.require_alike(trainer, path)
            for remark in remarks(used, trainer):
                distributed.note(remark)
            with waiting.saying("making the tables, or reading them from a checkpoint"):
                state, progress, undone = _start(trainer, checkpoints, folder.path)
            host = state.host
            for line in host.tier.rows.about() if host.tier else ():
                distributed.note(line)
            trains = not progress.stopped and progress.step < trainer.total_steps
            folder.record(trainer, distributed.note, trains=trains)
            with _metrics(folder.path, config, progress, undone) if main else NoMetrics() as file:
                log = StepLog(trainer, file, stop)
                callbacks = (Evaluate(trainer, log, stop), SaveCheckpoint(trainer, checkpoints, log))
                outcome = fit(trainer, state, progress, log, callbacks, stop)
                tiers = host.tier.figures() if host.tier else {}
                ids = host.ids.figures() if host.ids else {}
                try:
                    if outcome.stop:
                        raise StopRequested(outcome.stop)
                    chosen, step = _chosen(trainer, checkpoints, outcome)
                    split = split_to_measure(trainer.source)
                    result = evaluation.measure(trainer, chosen, split, stop) if split else {}
                except StopRequested as asked:
                    raise stop.stopped(asked.number, outcome.progress.step) from None
                if split == "test":
                    file.write(evaluation.as_line(step, split, result))
        of_means = references(trainer.source) if split == "test" else {}
        summary = summarise(trainer, outcome, step, result, of_means, time.monotonic() - began)
        if log.first_at is not None:
            summary["first_step_s"] = round(log.first_at - began, 1)
        if log.without_weight:
            summary["steps_without_weight"] = log.without_weight
        if host.tier:
            summary["tier"] = {**tiers, "peak_bytes": peak_bytes()}
            if outcome.steps:
                distributed.note(in_short(tiers, outcome.steps, peak_bytes()))
        if host.ids:
            summary["ids"] = ids
        if main:
            if not outcome.steps:  # nothing was left to train: the figures of the training stay
                summary |= figures(folder.path / "summary.json")
            write_json(folder.path / "summary.json", summary)
            title = f"{config.model.kind} on {config.data.kind}"
            draw_curves(folder.path / "metrics.jsonl", folder.path / "curves.png", title, summary["references"], step)
    return html.Shown(summary)


def _metrics(path: Path, config: RunConfig, progress: TrainProgress, undone: list[str]) -> MetricsFile:
    chosen = {key: value for key, _, value in (text.partition("=") for text in assignments(config))}
    return MetricsFile(path / "metrics.jsonl", progress.step, config.train.all_trackers, undone, chosen)


def _start(trainer: Trainer, checkpoints: Checkpoints, run: Path) -> tuple[TrainState, TrainProgress, list[str]]:
    """The state of the newest intact checkpoint, or that before the first step; and see `TrainProgress.extend`."""

    def use(restored: Restored) -> tuple[TrainState, TrainProgress]:
        saved, groups = len(restored.arrays.get("replicas", ())), trainer.bound.replicas
        if saved > 1 and not (trainer.bound.independent and groups == saved):
            distributed.note(
                f"{saved} replica groups wrote checkpoint {restored.step}, each with tables of its own; now there "
                f"{'is 1' if groups == 1 else f'are {groups}'} (mesh.replicas), so all go on with the means of these"
            )
        return resume(trainer, restored)

    resumed = checkpoints.newest(distributed.note, use)
    if resumed is None:
        return trainer.init_state(), TrainProgress(), []
    state, progress = resumed
    refuse_other_values(trainer.source, run / DATA_SNAPSHOT)
    if progress.step > trainer.total_steps:
        raise ConfigError(
            f"{run} has already trained {progress.step} steps, more than the {trainer.total_steps} asked for. Choose "
            "another --out to start again, or ask for more steps (train.steps or train.epochs)."
        )
    undone = progress.extend() if progress.step < trainer.total_steps else []
    if progress.unevaluated:
        undone.append("validation")  # whose line may be there already, if the run was killed before the next checkpoint
    if progress.stopped:
        distributed.note(f"{run} stopped early at step {progress.step} (train.patience): nothing is left to train")
    elif progress.step == trainer.total_steps:
        distributed.note(f"{run} has trained all its {progress.step} steps: nothing is left to train")
    else:
        distributed.note(f"resuming {run} at step {progress.step}")
    return state, progress, undone


def _chosen(trainer: Trainer, checkpoints: Checkpoints, outcome: Outcome) -> tuple[TrainState, int]:
    """The state that the validation split chose, which need not be the last one."""
    state, progress = outcome.state, outcome.progress

    def use(saved: Restored) -> TrainState:
        return trainer.restore(saved.arrays, saved.step, host=state.host)

    if progress.best_step is None or progress.best_step == progress.step:
        return state, progress.step
    jax.tree.map(lambda array: array.delete(), state)  # there may not be memory for two
    try:
        return checkpoints.restore(progress.best_step, use=use), progress.best_step
    except TrainingError as error:  # the run is finished all the same
        distributed.note(
            f"the best step by validation, {progress.best_step}, cannot be used: {error} The results are those of the "
            f"last step, {progress.step}; with that checkpoint restored, the same command gives those of the best one."
        )
        return checkpoints.restore(progress.step, use=use), progress.step


def evaluate(
    run: Path | str,
    overrides: Sequence[str] = (),
    splits: Sequence[str] = ("test",),
    step: int | Literal["newest"] | None = None,
    details: evaluation.Details | None = None,
    *,
    rows: Any = None,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run. Draws calibration.png, and ablation.png if asked for, in the run folder.

    The arguments are those of `recjax.evaluate`; overrides are texts, such as "mesh.devices=1", and `rows` its `input`.

    Returns:
      {"step", "split", and what `evaluation.report` gives}; of several splits {"step", "splits": {split: that}}.
    """
    folder = paths.located(run)
    if rows is not None and tuple(splits) != ("test",):
        raise ConfigError(f"rows of one's own are evaluated alone: leave out split={','.join(splits)}.")
    with contextlib.ExitStack() as stack:
        source = None
        if rows is not None:
            encoding, overrides = take_encoding(overrides)
            source = stack.enter_context(with_rows(folder / DATA_SNAPSHOT, rows, encoding))
        of_run = open_run(
            folder, overrides, splits, step, report=distributed.note, source=source, trust_code=trust_code
        )
        trainer, state, step = of_run
        details = details or evaluation.Details()
        reports = {split: evaluation.report(trainer, state, split, details) for split in splits}
    if rows is not None:  # the picture in the run folder is of the run's own data
        return html.Shown({"step": step, "split": "input", **reports[splits[0]]})
    if distributed.is_main():
        _draw_reports(reports, folder, step)
    if len(reports) == 1:
        return html.Shown({"step": step, "split": splits[0], **reports[splits[0]]})
    return html.Shown({"step": step, "splits": reports})


def _draw_reports(reports: Mapping[str, Mapping[str, Any]], folder: Path, step: int) -> None:
    """Draws the pictures of an evaluation in the run folder, as far as that can be written."""
    title, pictures = f"{folder.name}, step {step}", dict[str, Callable[[], None]]()
    if drawn := evaluation.curves(reports):
        file = folder / "calibration.png"
        pictures["the calibration"] = lambda: calibration.draw(drawn, file, f"calibration of {title}")
    if mixed := {split: part["ablation"] for split, part in reports.items() if "ablation" in part}:
        pictures["the ablation"] = lambda: evaluation.draw_ablation(
            mixed, folder / "ablation.png", f"{title}: each column mixed"
        )
    for name, draw in pictures.items():
        try:
            draw()
        except TrainingError as error:  # the numbers are worth more than the picture
            distributed.note(f"there is no picture of {name}: {error}")
