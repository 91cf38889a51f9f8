"""Tasks: what a run learns of each label of its data, and how their losses become one.

The loss of a step is the sum over tasks of weight * (sum of w * l over sum of w), both sums over the whole batch. The
latter is known before the forward pass: so each sample's weights are divided by it, and all further sums are plain.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recjax.config.choice import RANKED, Choice, parse
from recjax.config.run import RunConfig
from recjax.config.tasks import DEFAULTS, LOSSES, Loss, TaskConfig
from recjax.data.batch import ONLY, Label, Schema
from recjax.errors import ConfigError
from recjax.parallel.mesh import BATCH_AXES
from recjax.settings.values import either
from recjax.train.table_specs import nearest_names
from recjax.utils.phases import Phase


@dataclasses.dataclass(frozen=True)
class Task:
    """One label and its loss.

    Attributes:
      label: of the data.
      loss: see `recjax.config.tasks`.
      weight: of the task.
      column: of the label among the labels, t.
      first: the first of its columns among the model's outputs.
    """

    label: Label
    loss: Loss
    weight: float
    column: int
    first: int

    @property
    def name(self) -> str:
        """Name of the label."""
        return self.label.name

    @property
    def outputs(self) -> int:
        """Numbers that the model gives for it: one for each class, else 1."""
        return self.label.classes or 1

    def of(self, outputs_BxO: Any) -> Any:
        """Its own outputs among those of all tasks: [B], or [B, C] of a class."""
        if self.label.kind == "class":
            return outputs_BxO[:, self.first : self.first + self.outputs]
        return outputs_BxO[:, self.first]


Tasks = tuple[Task, ...]


def tasks_of(config: RunConfig, schema: Schema) -> Tasks:
    """The tasks of a run, in the order of the labels; () for one unnamed binary label with the plain log loss.

    Raises:
      ConfigError: settings of a label that does not exist, a loss that does not fit a label's kind, or no task with a
        weight.
    """
    if not schema.labels and not config.tasks:
        return ()
    labels = schema.labels or (Label(ONLY),)
    names = [label.name for label in labels]
    for name in config.tasks:
        if name not in names:
            raise ConfigError(f"tasks.{name}: the data have no label {name!r}. {nearest_names(name, names)}")
    firsts = itertools.accumulate((label.classes or 1 for label in labels), initial=0)
    made = tuple(
        _task(label, config.tasks.get(label.name, TaskConfig()), column, first)
        for column, (label, first) in enumerate(zip(labels, firsts, strict=False))
    )
    if not any(task.weight for task in made):
        raise ConfigError(f"all tasks have weight 0 ({', '.join(names)}), so there is nothing to learn.")
    return made


def _task(label: Label, own: TaskConfig, column: int, first: int) -> Task:
    loss = DEFAULTS[label.kind] if own.loss is None else own.loss
    if loss.of != label.kind:
        fitting = [name for name, cls in LOSSES.items() if cls.of == label.kind]
        raise ConfigError(
            f"tasks.{label.name}.loss={loss.kind}, but label {label.name!r} is of the kind {label.kind}. Take "
            f"{either(fitting)}, or prepare the data with another kind."
        )
    return Task(label, loss, 1.0 if own.weight is None else own.weight, column, first)


def choice_of(text: str, tasks: Tasks, ranks: bool = False) -> Choice:
    """Returns what chooses a step (`train.choose_by`), once it is known what is measured.

    Args:
      text: the setting.
      tasks: of the run.
      ranks: whether the model finds items for users, whose ranking is measured; then auc stands for ndcg@20.

    Raises:
      ConfigError: that is not measured.
    """
    if text == "auc" and ranks:
        text = "ndcg@20"
    if text == "auc" and tasks and all(task.label.kind != "binary" for task in tasks):
        text = "loss"
    found = parse(text)
    of_binary = ("auc", "logloss", "ne")
    names = set(of_binary)
    if tasks:
        of_kind = {"binary": of_binary, "number": ("mse", "mae"), "class": ("accuracy",)}
        names = {f"{task.name}.{name}" for task in tasks for name in ("loss", *of_kind[task.label.kind])}
        names |= {"loss"} | ({"auc"} if any(task.label.kind == "binary" for task in tasks) else set())
    if ranks:
        names = {f"{name}@20" for name in RANKED}
    found.check(names)
    return found


def divided_weights(weights_bxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights of this device's samples over those of the whole batch: [b, T]; and these sums, [T].

    A task without any weight in the batch keeps weights of 0. Inside `jax.shard_map` over BATCH_AXES.
    """
    with jax.named_scope(Phase.LOSS):
        totals_T = jax.lax.psum(jnp.sum(weights_bxT, axis=0), BATCH_AXES)
        return weights_bxT / jnp.where(totals_T > 0, totals_T, 1)[None], totals_T


def loss_sums(tasks: Tasks, outputs_bxO: jax.Array, labels_bxT: jax.Array, weights_bxT: jax.Array) -> jax.Array:
    """Sum of w * l over these samples for each task, [T]."""
    sums = []
    for task in tasks:
        # What weighs nothing has the loss of an output of 0: a loss that overflows would enter as 0 times infinity.
        weights_b, outputs = weights_bxT[:, task.column], task.of(outputs_bxO)
        counted = weights_b > 0 if outputs.ndim == 1 else (weights_b > 0)[:, None]
        losses_b = task.loss.losses(jnp, labels_bxT[:, task.column], jnp.where(counted, outputs, 0))
        sums.append(jnp.sum(weights_b * losses_b))
    return jnp.stack(sums)


def total(tasks: Sequence[Task], means_T: Any) -> Any:
    """The loss of a step, or an evaluation, from the mean loss of each task."""
    return sum(task.weight * mean for task, mean in zip(tasks, means_T, strict=True))


def outputs_for(model: Any, tasks: Tasks) -> dict[str, Any]:
    """Further arguments of `build` of a model's config: {"outputs": {task: numbers that it needs}} if that takes tasks.

    Raises:
      ConfigError: there are several outputs, and the model gives one logit.
    """
    if getattr(model, "multi_task", False):
        return {"outputs": {task.name: task.outputs for task in tasks} or {ONLY: 1}}
    needed = sum(task.outputs for task in tasks)
    if needed > 1 and type(model).__module__.partition(".")[0] == "recjax":
        names = ", ".join(f"{task.name} ({task.label.kind})" for task in tasks)
        raise ConfigError(
            f"model={model.kind} gives one logit a sample, but the data's labels need {needed} outputs: {names}. Take "
            "model=shared_bottom, mmoe or ple, or name one binary or number label."
        )
    return {}
