"""Measures of several tasks: those of each by its name, and what they come to together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recjax.errors import DataError, TrainingError
from recjax.train.metrics.binned import Binned, Exact
from recjax.train.metrics.exact_sum import ExactSum
from recjax.train.metrics.samples import Gather
from recjax.train.tasks import Task, total


class ByTask:
    """Takes the place of `Exact` or `Binned` where there are tasks."""

    def __init__(self, tasks: Sequence[Task], kept: Callable[[], Exact | Binned]) -> None:
        """Without samples; `kept` makes what keeps those of a binary task, for its AUC."""
        self._of = {task.name: _OneTask(task, kept) for task in tasks}
        self._tasks = tuple(tasks)
        self._samples = 0

    def add(self, labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray, first: int = 0) -> None:
        """Takes samples in.

        Args:
          labels: [n, T], or [n] of the one label that has no name.
          outputs: of the model, [n, O].
          weights: of the shape of `labels`.
          first: number of the first sample, for messages.
        """
        labels_nxT, weights_nxT = labels.reshape(len(labels), -1), weights.reshape(len(labels), -1)
        self._samples += int((weights_nxT > 0).any(axis=1).sum())
        for task in self._tasks:
            column = task.column
            self._of[task.name].add(labels_nxT[:, column], task.of(outputs), weights_nxT[:, column], first)

    def join(self, gather: Gather) -> None:
        """Takes the samples of all processes; each calls it."""
        self._samples = int(np.sum(gather(np.array([self._samples]))))
        for task in self._tasks:
            self._of[task.name].join(gather)

    def result(self) -> dict[str, float]:
        """The measures of each task, as "task.measure", and of all together.

        Returns:
          `loss`, the sum of weight * loss of the tasks, of which those without any weight in the data add nothing;
          `auc`, the mean of the binary tasks', if there are any; `samples`, those with any weight; and of each task
          `loss` (its own, without its weight) and `samples`; of a binary one also what `metrics.evaluate` gives; of a
          number `mse` and `mae` of what is predicted; of a class `accuracy`.
        """
        each = {name: part.result() for name, part in self._of.items()}
        losses = [found["loss"] for found in each.values()]
        known = [0.0 if math.isnan(loss) else loss for loss in losses]
        aucs = [found["auc"] for found in each.values() if "auc" in found]
        return {
            "loss": float("nan") if all(map(math.isnan, losses)) else float(total(self._tasks, known)),
            **({"auc": float(np.mean(aucs))} if aucs else {}),
            "samples": self._samples,
            **{f"{name}.{measure}": value for name, found in each.items() for measure, value in found.items()},
        }

    def binary(self) -> dict[str, Exact | Binned]:
        """Samples that binary tasks have kept, by name."""
        return {name: part.kept for name, part in self._of.items() if part.kept is not None}


class _OneTask:
    """Sums over the samples of one task."""

    def __init__(self, task: Task, kept: Callable[[], Exact | Binned]) -> None:
        self._task = task
        self.kept = kept() if task.label.kind == "binary" else None
        self._sums = {name: ExactSum() for name in ("weight", "loss", *_SUMS[task.label.kind])}
        self._samples = 0

    def add(self, labels_n: np.ndarray, outputs: np.ndarray, weights_n: np.ndarray, first: int) -> None:
        task, at = self._task, np.flatnonzero(weights_n)
        labels_n, outputs, weights_n = (np.asarray(x[at], np.float64) for x in (labels_n, outputs, weights_n))
        if not np.isfinite(outputs).all():
            row = at[int(np.argwhere(~np.isfinite(outputs))[0][0])]
            raise TrainingError(
                f"evaluation: an output of task {task.name!r} for sample {first + row} is not finite. The model has "
                "diverged: go back to an earlier checkpoint and lower the learning rate."
            )
        if (weights_n < 0).any() or not (np.isfinite(weights_n).all() and np.isfinite(labels_n).all()):
            raise DataError(
                f"evaluation: a label or weight of {task.name!r} from sample {first} on is not finite, or a weight is "
                "negative. Correct the column and prepare the data again."
            )
        if task.loss.kind == "poisson" and (labels_n < 0).any():
            raise DataError(
                f"evaluation: label {task.name!r} of sample {first + at[int(np.argmax(labels_n < 0))]} is "
                f"{labels_n.min():g}, and tasks.{task.name}.loss=poisson is of counts, 0 or more. Take another loss."
            )
        if self.kept is not None:
            self.kept.add(labels_n, outputs, weights_n, first)
        self._samples += len(at)
        with np.errstate(over="ignore"):
            losses_n = task.loss.losses(np, labels_n, outputs)
        found = {"weight": np.ones(len(at)), "loss": losses_n, **_errors(task, labels_n, outputs)}
        for name, values_n in found.items():
            self._sums[name].add(weights_n * values_n)

    def join(self, gather: Gather) -> None:
        self._samples = int(np.sum(gather(np.array([self._samples]))))
        for part in (*self._sums.values(), *([self.kept] if self.kept is not None else [])):
            part.join(gather)

    def result(self) -> dict[str, float]:
        weight = float(self._sums["weight"])
        means = {name: float(value) / weight if weight else float("nan") for name, value in self._sums.items()}
        del means["weight"]
        return {**means, **(self.kept.result() if self.kept is not None else {}), "samples": self._samples}


_SUMS = {"binary": (), "number": ("mse", "mae"), "class": ("accuracy",)}


def _errors(task: Task, labels_n: np.ndarray, outputs: np.ndarray) -> dict[str, Any]:
    if task.label.kind == "number":
        apart_n = np.abs(predictions(task, outputs) - labels_n)
        return {"mse": np.square(apart_n), "mae": apart_n}
    return {"accuracy": predictions(task, outputs) == labels_n} if task.label.kind == "class" else {}


def predictions(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Predictions of a task, [n], from its outputs: the probability of label 1, a number, or the likeliest class."""
    if task.label.kind == "class":
        return np.asarray(np.argmax(outputs, axis=1), np.float64)
    if task.label.kind == "binary":
        return np.asarray(np.exp(-np.logaddexp(0.0, -outputs)))
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(outputs)) if task.loss.kind == "poisson" else outputs
