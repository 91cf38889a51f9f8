"""One training of the study: how accurate it is and how far its groups are apart, against the iteration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.source import BlockSource, between
from recjax.embedding.buffers import Tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.quantize import Precision
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.lab.studies.replica_groups.alignment import distances
from recjax.lab.studies.replica_groups.arranged import Arranged, Parts
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import ACROSS_GROUPS
from recjax.train.build import build_trainer
from recjax.train.inputs import InputStream
from recjax.train.metrics import measures
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer

TRAINING_SAMPLES = 4096  # of which the accuracy in training is measured, over all groups together


@dataclasses.dataclass(frozen=True)
class Shape:
    """Columns of all tables, and the widths of the MLPs' layers: those of the bottom, and of the top before its logit.

    The top MLP has the same layers, for the source has one list of widths alone.
    """

    dim: int
    widths: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name that figures give it."""
        return f"D={self.dim}, {'-'.join(map(str, self.widths))}"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One training of the study.

    Attributes:
      groups: replica groups.
      sync: `train.replica_sync`.
      every: `train.average_every`.
      parts: how samples come to the groups; see `Arranged`.
      init: `train.replica_init`.
      precision: `train.average_precision`.
      delay: `train.dense_delay`.
      shape: of model and tables, instead of the preset's.
      interaction: of DLRM, instead of the preset's; "" for that.
    """

    groups: int
    sync: str = "exact"
    every: int = 1
    parts: Parts = "random"
    init: str = "same"
    precision: Precision = "float32"
    delay: int = 0
    shape: Shape | None = None
    interaction: Literal["", "dot", "cat"] = ""

    @property
    def label(self) -> str:
        """Name of it in figures."""
        sent = "" if self.precision == "float32" else f" in {self.precision}"
        how = {"exact": "exact", "average": f"averaged every {self.every}{sent}", "never": "own tables"}[self.sync]
        words = ["1 group"] if self.groups == 1 else [f"{self.groups} groups", how]
        words += ["seeds of their own"] if self.init == "own" else []
        words += ["late gradients"] if self.delay else []
        words += [f"{self.interaction} interaction"] if self.interaction else []
        return ", ".join([*words, *([self.shape.label] if self.shape else [])])

    @property
    def name(self) -> str:
        """Label and parts, which no other arm of the study shares."""
        return f"{self.label}, samples {self.parts}"


def configured(config: RunConfig, arm: Arm, devices: int, batch_size: int) -> RunConfig:
    """The config of an arm, of `devices` devices and `batch_size` samples for each group."""
    mesh = dataclasses.replace(config.mesh, devices=devices * arm.groups, hosts=1, replicas=arm.groups)
    how: Any = {
        "shuffle": False,
        "accumulate": 1,
        "replica_sync": arm.sync,
        "average_every": arm.every,
        "average_precision": arm.precision,
        "replica_init": arm.init,
        "dense_delay": arm.delay,
    }
    made = config if arm.shape is None else shaped(config, arm.shape)
    if arm.interaction and isinstance(made.model, DLRMConfig):
        model = dataclasses.replace(made.model, interaction=arm.interaction)
        made = dataclasses.replace(made, model=model.ending_in(made.embedding.dim))
    return dataclasses.replace(
        made,
        mesh=mesh,
        train=dataclasses.replace(config.train, batch_size=batch_size * arm.groups, **how),
        small=dataclasses.replace(config.small, below_rows=0),
    )


def shaped(config: RunConfig, shape: Shape) -> RunConfig:
    """With tables and MLPs of this shape; models without a bottom MLP get the tables' columns alone."""
    model: Any = config.model
    if hasattr(model, "bottom") and hasattr(model, "top"):
        model = dataclasses.replace(model, bottom=shape.widths, top=(*shape.widths, 1))
    return dataclasses.replace(config, model=model, embedding=dataclasses.replace(config.embedding, dim=shape.dim))


def arranged(config: RunConfig, source: BlockSource, arm: Arm, iterations: int, feature: str) -> Trainer:
    """The trainer of a training whose data come to the groups as the arm says, for so many iterations at least."""
    size = config.train.batch_size // arm.groups
    one = Arranged(source, arm.groups, size, arm.parts, feature, 1, config.seed)
    epochs = -(-iterations // (len(one.order) // config.train.batch_size))
    return build_trainer(config, dataclasses.replace(one, epochs=epochs), splits=("train", "test"))


def run(trainer: Trainer, iterations: int, every: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Trains, and measures on the test split every so many iterations.

    Returns:
      Lists with an entry for each measure. "iteration"; "accuracy", "auc", "logloss" of the model, whose tables are the
      means of the groups' if these are independent, on the test split; "train_accuracy" of the same on the first
      samples that each group has met in training. Of independent groups also "own_accuracy" and its like, the means
      over the models that each group has by itself (in training, on its own samples); "accuracy_0", "accuracy_1", ...
      of these models; and "distance" and "aligned" of all tables together: see `alignment.distances`.
    """
    independent = trainer.bound.independent
    given = _make_given(trainer.bound, trainer.mesh) if independent else None
    data, groups = trainer.source, trainer.bound.replicas
    assert isinstance(data, Arranged)
    met = [data.met_by(g, TRAINING_SAMPLES // groups) for g in range(groups)]
    found: dict[str, list[float]] = {}
    state, done = trainer.init_state(), 0

    def of_model(state: TrainState, met: list[Batch]) -> dict[str, float]:
        values = _measures(trainer, state, trainer.eval_inputs("test"))
        size = min(trainer.config.train.eval_batch_size, max(batch.size for batch in met))
        pieces = [between(batch, i, min(i + size, batch.size)) for batch in met for i in range(0, batch.size, size)]
        return {**values, "train_accuracy": _measures(trainer, state, trainer.inputs_of(pieces, size))["accuracy"]}

    def measure(state: TrainState) -> None:
        values = {"iteration": float(done), **of_model(state, met)}
        if given:
            values |= distances(list(trainer.export(state)["replicas"].values()))
            own = []
            for group in range(groups):
                tables = given(state.tables, jnp.int32(group))
                own.append(of_model(dataclasses.replace(state, tables=tables), [met[group]]))
            values |= {f"own_{name}": float(np.mean([of[name] for of in own])) for name in own[0]}
            values |= {f"accuracy_{group}": of["accuracy"] for group, of in enumerate(own)}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        shown = [name for name in ("accuracy", "auc", "train_accuracy", "distance") if name in values]
        tell(f"  iteration {done}: " + ", ".join(f"{name} {values[name]:.4f}" for name in shown))

    measure(state)
    for done, inputs in enumerate(itertools.islice(trainer.train_inputs(), iterations), 1):
        state, metrics = trainer.train_step(state, inputs)
        state = trainer.averaged(state, done)
        if done % 8 == 0:
            jax.block_until_ready(metrics)  # few steps under way: evaluations would come on top of them
        if done % every == 0 or done == iterations:
            measure(state)
    return found


def _measures(trainer: Trainer, state: TrainState, stream: InputStream) -> dict[str, float]:
    labels, logits, weights = [], [], []
    for batch, logits_B in trainer.predict(state, stream):
        labels.append(batch.labels)
        logits.append(logits_B)
        weights.append(batch.weights)
    y, x, w = (np.concatenate(part) for part in (labels, logits, weights))
    result = measures.evaluate(y, x, w)
    right = float(np.sum(w * ((x > 0) == (y == 1))) / np.sum(w))
    return {"accuracy": right, "auc": result["auc"], "logloss": result["logloss"]}


def _make_given(bound: BoundPlan, mesh: Mesh) -> Callable[[Tables, jax.Array], Tables]:
    """The jitted program (tables, group) -> tables, in which all groups have those of one; beside the given ones."""

    def body(tables: Tables, group: jax.Array) -> Tables:
        mine = jax.lax.axis_index(ACROSS_GROUPS) == group
        return jax.tree.map(lambda x: jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), ACROSS_GROUPS), tables)

    specs: Any = ShardedEmbeddings(bound).partition_specs()
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=specs))
