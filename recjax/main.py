"""Read this first: a whole run, from config to results, in the order in which it happens."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from recjax import settings
from recjax.config import presets
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.data.baselines import references
from recjax.data.source import split_to_measure
from recjax.data.storage.blocks import PreparedSource
from recjax.data.storage.run_snapshot import refuse_other_values
from recjax.errors import ConfigError, TrainingError
from recjax.parallel import distributed, waiting, watchdog
from recjax.parallel.mesh import left_aside
from recjax.parallel.stopping import asked_to_stop
from recjax.serving.labelled_rows import WithRows, with_rows
from recjax.serving.table_rows import take_encoding
from recjax.settings.from_python import require_config
from recjax.train import evaluation, planned, preflight
from recjax.train.agreement import StopRequested
from recjax.train.build import build_trainer, remarks
from recjax.train.callbacks import Evaluate, SaveCheckpoint
from recjax.train.checkpoint.checkpoints import Checkpoints, Restored
from recjax.train.loop import Outcome, fit
from recjax.train.metrics import calibration, drift
from recjax.train.progress import TrainProgress, describe, resume, source_number
from recjax.train.ranked import popularity
from recjax.train.run import more
from recjax.train.run.curves import draw_curves
from recjax.train.run.folder import (
    DATA_SNAPSHOT,
    ReadOnlyRunFolder,
    RunFolder,
    data_snapshot,
    read_config,
    resolve_recorded,
)
from recjax.train.run.open_run import open_run
from recjax.train.run.summary import figures, in_short, summarise
from recjax.train.run.trackers import require
from recjax.train.run.writers import MetricsFile, NoMetrics
from recjax.train.start import start_from
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
                state, progress, undone, origins = _start(trainer, checkpoints, folder.path)
            host = state.host
            for rows in host.tier.rows.groups.values() if host.tier else ():
                distributed.note(rows.about())
            trains = not progress.stopped and progress.step < trainer.total_steps
            folder.record(trainer, distributed.note, trains=trains)
            if origins:  # from here on the other run is not needed
                folder.record_origins(origins)
                checkpoints.save(0, trainer.checkpoint(state), describe(trainer, progress))
                checkpoints.wait()
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
        of_means = references(trainer.source) if split == "test" and not trainer.ranks else {}
        summary = summarise(trainer, outcome, step, result, of_means, time.monotonic() - began)
        if trainer.ranks and split:
            summary["popularity"] = popularity(trainer, split)
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
            if isinstance(trainer.source, PreparedSource):  # data that are drawn do not drift
                drift.record_profile(folder.path, trainer.source)
            if not outcome.steps:  # nothing was left to train: the figures of the training stay
                summary |= figures(folder.path / "summary.json")
            write_json(folder.path / "summary.json", summary)
            title = f"{config.model.kind} on {config.data.kind}"
            bars = (
                {"popularity": summary["popularity"]["ndcg@20"]} if "popularity" in summary else summary["references"]
            )
            draw_curves(folder.path / "metrics.jsonl", folder.path / "curves.png", title, bars, step)
    return html.Shown(summary)


def train_further(
    run: Path | str, data: str, overrides: Sequence[str] = (), *, trust_code: bool = False
) -> dict[str, Any]:
    """Goes on with a run on further data: measures them first, then trains on them.

    Arguments and result are those of `recjax.go_on`; overrides are texts.
    """
    began, path = time.monotonic(), paths.run_folder(run)
    trained = read_config(path, trust_code=trust_code, report=distributed.note)
    config = settings.override(trained, overrides)
    free = [key for key in FREE_ON_RESUME if key not in _NOT_FREE]
    if other := [key for key, _, _ in settings.diff(trained, config) if not settings.matches(key, free)]:
        raise ConfigError(
            f"{path} goes on as it was trained, so {other[0]} cannot be set. Only these may change: {', '.join(free)}."
        )
    passes = any(text.startswith("train.epochs=") for text in overrides)
    epochs = config.train.epochs if passes else 1
    main = distributed.is_main()
    with watchdog.from_python(), contextlib.ExitStack() as stack:
        stack.enter_context(RunFolder(path, trained) if main else ReadOnlyRunFolder(path))
        stop = stack.enter_context(asked_to_stop())
        checkpoints = stack.enter_context(Checkpoints(path / "checkpoints", keep=config.train.keep_checkpoints))
        stop.steps = checkpoints.steps
        further = more.open_further(path, data, checkpoints)
        used = resolve_recorded(config, path, distributed.note, needs_data=False)
        trainer = build_trainer(used, further.source, ("train",), rows=further.first_rows)
        preflight.require_alike(trainer, path)
        trainer, state, progress, origins = more.go_on_from(trainer, further, checkpoints, path, epochs)
        if origins:
            if main:
                more.record_source(path, further)
            checkpoints.save(progress.step, trainer.checkpoint(state), describe(trainer, progress))
            checkpoints.wait()
        first = progress.position == 0
        without = [more.AHEAD] if first else []
        with _metrics(path, config, progress, without, tested=True) if main else NoMetrics() as file:
            log = StepLog(trainer, file, stop)
            try:
                if first:
                    unseen = dataclasses.replace(trainer, source=further.ahead)
                    result = evaluation.measure(unseen, state, "train", stop)
                    line = evaluation.as_line(progress.step, more.AHEAD, result)
                    file.write({**line, **more.about(further)})
                outcome = fit(trainer, state, progress, log, (SaveCheckpoint(trainer, checkpoints, log),), stop)
                if outcome.stop:
                    raise StopRequested(outcome.stop)
            except StopRequested as asked:
                raise stop.stopped(asked.number, progress.step) from None
        if not main:
            return {}
        summary = more.summarise_sources(trainer, outcome, path, time.monotonic() - began)
        drift.record_profile(path, further.source)
        write_json(path / "summary.json", summary)
    return html.Shown(summary)


# Settings that a resumed run may change, but that say how long, and on what, it trains before it goes on
_NOT_FREE = ("data.path", "data.from", "data.base", "train.steps", "small.epochs")


def _metrics(
    path: Path, config: RunConfig, progress: TrainProgress, undone: list[str], tested: bool = False
) -> MetricsFile:
    chosen = {key: value for key, _, value in (text.partition("=") for text in settings.assignments(config))}
    return MetricsFile(path / "metrics.jsonl", progress.step, config.train.all_trackers, undone, chosen, tested)


def _start(
    trainer: Trainer, checkpoints: Checkpoints, run: Path
) -> tuple[TrainState, TrainProgress, list[str], dict[str, Any]]:
    """The state of the newest intact checkpoint, or that before the first step.

    Also what `TrainProgress.extend` gives, and where a state came from that another run has learnt, see `start.carry`.
    """

    def use(restored: Restored) -> tuple[TrainState, TrainProgress]:
        if number := source_number(restored.meta):
            raise ConfigError(
                f"{run} has gone on with further data, of which it has trained on number {number} last. Go on with "
                f"`recjax train {run} --more DATA`, or choose another --out to start again."
            )
        saved, groups = len(restored.arrays.get("replicas", ())), trainer.bound.replicas
        if saved > 1 and not (trainer.bound.independent and groups == saved):
            distributed.note(
                f"{saved} replica groups wrote checkpoint {restored.step}, each with tables of its own; now there "
                f"{'is 1' if groups == 1 else f'are {groups}'} (mesh.replicas), so all go on with the means of these"
            )
        return resume(trainer, restored)

    resumed = checkpoints.newest(distributed.note, use)
    if resumed is None and trainer.config.train.init_from:
        state, origins = start_from(trainer, run)
        return state, TrainProgress(), [], origins
    if resumed is None:
        return trainer.init_state(), TrainProgress(), [], {}
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
    return state, progress, undone, {}


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
            source = stack.enter_context(with_rows(data_snapshot(folder, step), rows, encoding))
        of_run = open_run(
            folder, overrides, splits, step, report=distributed.note, source=source, trust_code=trust_code
        )
        trainer, state, step = of_run
        details = details or evaluation.Details()
        reports = {split: evaluation.report(trainer, state, split, details) for split in splits}
    if isinstance(source, WithRows):  # the picture in the run folder is of the run's own data
        result = reports[splits[0]]
        then = drift.calibration_of(folder / "summary.json")
        features = drift.measure_drift(drift.read_profile(folder), source, splits[0], source.missing)
        moved = {"features": features, "calibration": result.get("calibration"), "calibration_then": then}
        return html.Shown({"step": step, "split": "input", **result, "drift": moved})
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
