"""Summary of a finished run: summary.json, and the table that ends it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from recjax import kernels, settings
from recjax.config.run import FREE_ON_RESUME
from recjax.data.baselines import constants
from recjax.data.source import split_to_measure
from recjax.train.loop import Outcome
from recjax.train.products import in_words
from recjax.train.run.writers import OF_TASKS, TITLES, results_table
from recjax.train.tasks import choice_of
from recjax.train.trainer import Trainer
from recjax.utils import strict_json
from recjax.utils.units import size_text
from recjax.utils.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Of the training alone: a later call that trains no step keeps those of the one that did.
_FIGURES = (
    "first_step_s",
    "samples_per_s",
    "seconds",
    "compilations",
    "compile_s",
    "compiled_ahead",
    "compile_ahead_s",
)


def summarise(
    trainer: Trainer,
    outcome: Outcome,
    step: int,
    result: Mapping[str, float],
    compared: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
      trainer: the run's fixed parts.
      outcome: of the training.
      step: the step whose checkpoint was chosen.
      result: its metrics on the split of `split_to_measure`; empty if there is none.
      compared: name -> test AUC to compare with.
      seconds: that this process took.
    """
    config, best = trainer.config, outcome.progress.best_step
    if best != step:
        best = None  # or its checkpoint cannot be used
    return {
        "steps": outcome.progress.step,
        "samples": outcome.progress.position,
        "samples_per_s": outcome.samples_per_s,
        "eval": dict(result),
        "eval_split": split_to_measure(trainer.source),
        "eval_step": step,
        "chosen_by": "last step" if best is None else f"validation {_chosen_by(trainer)}",
        "stopped_early": outcome.progress.stopped,
        "references": dict(compared),
        **({"constants": found} if (found := constants(trainer.source)) else {}),
        "devices": trainer.mesh.devices.size,
        "seconds": round(seconds, 1),
        "compilations": outcome.compilations,
        "compile_s": round(outcome.compile_s, 1),
        "compiled_ahead": outcome.compiled_ahead,
        "compile_ahead_s": round(outcome.compile_ahead_s, 1),
        "config_hash": settings.config_hash(config, FREE_ON_RESUME),
        "versions": versions(),
        "products": in_words(trainer.products, trainer.mesh),
        "routing": trainer.router.name,
    }


def _chosen_by(trainer: Trainer) -> str:
    """Measure that chose the step, as the settings have it, or what stands for that."""
    text = trainer.config.train.choose_by
    terms = choice_of(text, trainer.tasks, trainer.ranks).terms
    return text if len(terms) > 1 else next(iter(terms))


def figures(path: Path) -> dict[str, Any]:
    """Speed of the training, from an earlier summary.json; nothing if there is none that can be read."""
    try:
        earlier = strict_json.parse(path.read_bytes())
        return {key: earlier[key] for key in _FIGURES if key in earlier}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def versions() -> dict[str, str]:
    """Versions of everything that the numbers of a run may depend on."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"recjax": __version__, "python": platform.python_version(), **packages, "kernels": kernels.variant()}


def results(summary: Mapping[str, Any]) -> str:
    """The table that ends a run, how fast it trained, and for how long it compiled."""
    title = f"recjax, {summary['eval_split']}, step {summary['eval_step']}"
    measured: Mapping[str, Any] = summary["eval"]
    if tasks := [name.removesuffix(".loss") for name in measured if name.endswith(".loss")]:
        each = {
            task: {k.removeprefix(f"{task}."): v for k, v in measured.items() if k.startswith(f"{task}.")}
            for task in tasks
        }
        simple: list[tuple[str, Mapping[str, float]]] = []
        simple += [(name, {"auc": auc}) for name, auc in summary["references"].items()]
        simple += [(f"{name}: best constant", errors) for name, errors in summary.get("constants", {}).items()]
        return results_table([(title, measured), *each.items(), *simple], {"loss": "loss", **TITLES, **OF_TASKS})
    rows = [(title, measured)]
    titles = TITLES
    if "recall@20" in measured:
        rows.append(("popularity", summary["popularity"]))
        titles = {name: name for name in measured if name.endswith("@20")}
    rows += [(name, {"auc": auc}) for name, auc in summary["references"].items()]
    programs = f"{summary['compilations']} training program{'s' * (summary['compilations'] != 1)}"
    if not measured:
        rows = [(f"recjax, step {summary['eval_step']}, on no split", {})]
    if summary["compile_ahead_s"]:
        programs += (
            f", {summary['compiled_ahead']} of them ahead ({summary['compile_ahead_s']:.0f} s beside the training)"
        )
    lines = [f"compiling: {summary['compile_s']:.0f} s, {programs}"]
    if "first_step_s" in summary:
        lines[0] += f"; the first step was done after {summary['first_step_s']:.0f} s"
    if rate := summary["samples_per_s"]:
        lines.insert(0, f"training: {rate:,.0f} samples/s, without compiling, evaluating and saving")
    return "\n".join((results_table(rows, titles), "", *lines))


def in_short(figures: Mapping[str, int], steps: int, peak_bytes: int) -> str:
    """A paragraph on rows, disk and memory.

    Args:
      figures: as `Tier.figures` gave them at the end of the training.
      steps: of the training.
      peak_bytes: the most memory that the process has held.
    """
    touched, rows_bytes, found_bytes = (figures[key] for key in ("written_rows", "row_bytes", "directory_bytes"))
    text = f"rows that are not all on the devices: {touched:,} were touched"
    if figures["disk_bytes"] and touched and steps:
        reads = figures["records_read"] - figures["records_read_aside"]
        text += (
            f", {figures['disk_rows'] / touched:.0%} of them have a record on the disk, whose files take "
            f"{size_text(figures['disk_bytes'])} ({figures['disk_bytes'] / figures['padded_bytes']:.2f} times all "
            f"padded records); a step read {reads / steps:,.0f} records there and wrote "
            f"{figures['records_written'] / steps:,.0f}"
        )
    rest_bytes = max(0, peak_bytes - rows_bytes - found_bytes)
    return (
        f"{text}. The process took {size_text(peak_bytes)} of memory at most: {size_text(rows_bytes)} for rows, "
        f"{size_text(found_bytes)} to find them, {size_text(rest_bytes)} for all else"
    )
