"""Outputs of a model as columns of the scores: of one binary label, or of several tasks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recjax.config.tasks import LOSSES
from recjax.data.batch import Label
from recjax.data.source import BlockSource
from recjax.data.storage.blocks import PreparedSource
from recjax.errors import DataError, TrainingError
from recjax.train.metrics import measures
from recjax.train.metrics.by_task import predictions
from recjax.train.tasks import Task, Tasks
from recjax.train.trainer import Trainer

_LARGEST = 1e9  # of a dense value that a model takes: a larger one, and not the model, is to blame for an overflow

Columns = dict[str, list[Any]]


def names(tasks: Tasks) -> tuple[str, ...]:
    """The columns, in their order; those of a task begin with its name and a dot.

    Of a binary label the logit and the probability of 1, of a number what is predicted, and of a class the likeliest
    one with its probability.
    """
    if not tasks:
        return ("logit", "probability")
    kinds = {"binary": ("logit", "probability"), "number": ("prediction",), "class": ("class", "probability")}
    return tuple(f"{task.name}.{column}" for task in tasks for column in kinds[task.label.kind])


def columns(tasks: Tasks, outputs: np.ndarray, classes: Mapping[str, Sequence[str]]) -> Columns:
    """The columns for some rows; of several tasks `outputs` is [n, O], and else logits, [n].

    Args:
      tasks: of the run.
      outputs: of its model, float64.
      classes: task -> its classes as text, where they are known; else their numbers stand.
    """
    if not tasks:
        return {"logit": outputs.tolist(), "probability": measures.probabilities(outputs).tolist()}
    found: Columns = {}
    for task in tasks:
        own = task.of(outputs)
        predicted = predictions(task, own)
        if task.label.kind == "binary":
            found[f"{task.name}.logit"] = own.tolist()
            found[f"{task.name}.probability"] = predicted.tolist()
        elif task.label.kind == "number":
            found[f"{task.name}.prediction"] = predicted.tolist()
        else:
            words = classes.get(task.name) or [str(number) for number in range(task.outputs)]
            shares = np.exp(own - own.max(axis=1, keepdims=True))
            found[f"{task.name}.class"] = [words[int(number)] for number in predicted]
            found[f"{task.name}.probability"] = (shares.max(axis=1) / shares.sum(axis=1)).tolist()
    return found


def in_rows(columns: Columns, lengths: np.ndarray) -> Columns:
    """Columns of the elements of rows as columns of lists, one for each row; `lengths` are those of the rows."""
    ends = [0, *np.cumsum(lengths).tolist()]
    return {name: [x[start:end] for start, end in itertools.pairwise(ends)] for name, x in columns.items()}


def means(tasks: Tasks, outputs: np.ndarray) -> dict[str, float]:
    """Sums of what is predicted over rows, by task; of a class there is none."""
    if not tasks:
        return {"": float(measures.probabilities(outputs).sum())}
    return {t.name: float(predictions(t, t.of(outputs)).sum()) for t in tasks if t.label.kind != "class"}


def classes_of(source: BlockSource) -> dict[str, list[str]]:
    """Label -> its classes as text, as far as the data tell."""
    about = source.about if isinstance(source, PreparedSource) else {}
    described = about.get("table", {}).get("labels", [])
    return {each["meaning"]["column"]: list(each["classes"]) for each in described if each["classes"]}


def described(trainer: Trainer) -> dict[str, Any]:
    """Returns all that `columns` needs beside outputs, as JSON values."""
    tasks = [
        {"name": t.name, "kind": t.label.kind, "loss": t.loss.kind, "first": t.first, "outputs": t.outputs}
        for t in trainer.tasks
    ]
    return {"tasks": tasks, "classes": classes_of(trainer.source)}


def tasks_from(described: Mapping[str, Any]) -> Tasks:
    """The tasks of what `described` gave; DataError of a loss that is not known here."""
    if strange := [task["loss"] for task in described["tasks"] if task["loss"] not in LOSSES]:
        raise DataError(
            f"the export names the loss {strange[0][:80]!r}; known are {', '.join(LOSSES)}. Export it again."
        )
    return tuple(
        Task(
            Label(task["name"], task["kind"], task["outputs"] if task["kind"] == "class" else 0),
            LOSSES[task["loss"]](),
            1.0,
            column,
            task["first"],
        )
        for column, task in enumerate(described["tasks"])
    )


def describe_large_value(column: str, value: float) -> str:
    """Says of a dense column what its transform makes of a value, where that is too much."""
    return f"dense column {column!r} becomes {value:g} as the model takes it, far from all that trained"


def find_overflows(outputs: np.ndarray, dense: np.ndarray, columns: Sequence[str], row_n: np.ndarray) -> dict[int, str]:
    """Returns the rows that have an output that is not finite for the size of a dense value, each with what is wrong.

    Args:
      outputs: of the model, [n] or [n, O].
      dense: what it took, float32 [rows, K].
      columns: names of the K dense columns.
      row_n: the row that each output is of, integers.
    """
    overflows = {}
    for row in np.unique(row_n[~_finite_rows(outputs)]).tolist():
        column = int(np.argmax(np.abs(dense[row]))) if columns else 0
        if columns and abs(dense[row, column]) > _LARGEST:
            overflows[row] = (
                f"{describe_large_value(columns[column], dense[row, column])}, and the model has no finite score for it"
            )
    return overflows


def _finite_rows(outputs: np.ndarray) -> np.ndarray:
    finite: np.ndarray = np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)
    return finite


def check(outputs: np.ndarray, numbers: np.ndarray) -> None:
    """Refuses outputs that are not finite; `numbers` are those of the rows (TrainingError)."""
    wrong = ~_finite_rows(outputs)
    if wrong.any():
        raise TrainingError(
            f"the logit of row {numbers[int(np.argmax(wrong))]} is not finite: the model has diverged. Choose an "
            "earlier checkpoint with --step."
        )
