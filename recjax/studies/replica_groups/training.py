"""One training of the study: how accurate it is and how far its groups are apart, against the iteration."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.embedding.buffers import Tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.replica_groups import make_distance
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.parallel.mesh import ACROSS_GROUPS
from recjax.studies.replica_groups.arranged import Arranged, Parts
from recjax.train.metrics import measures
from recjax.train.state import TrainState
from recjax.train.trainer import Trainer, build_trainer


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is trained.

    Attributes:
      groups: replica groups.
      sync: `train.replica_sync`.
      every: `train.average_every`.
      parts: how samples come to the groups; see `Arranged`.
    """

    groups: int
    sync: str = "exact"
    every: int = 1
    parts: Parts = "random"

    @property
    def label(self) -> str:
        """What figures call it."""
        if self.groups == 1:
            return "1 group"
        how = {"exact": "exact", "average": f"averaged every {self.every}", "never": "own tables"}[self.sync]
        return f"{self.groups} groups, {how}"


def configured(config: RunConfig, arm: Arm, devices: int, batch_size: int) -> RunConfig:
    """The config of an arm, of `devices` devices and `batch_size` samples for each group."""
    mesh = dataclasses.replace(config.mesh, devices=devices * arm.groups, hosts=1, replicas=arm.groups)
    train: Any = {"shuffle": False, "accumulate": 1, "replica_sync": arm.sync, "average_every": arm.every}
    return dataclasses.replace(
        config,
        mesh=mesh,
        train=dataclasses.replace(config.train, batch_size=batch_size * arm.groups, **train),
        small=dataclasses.replace(config.small, below_rows=0),
    )


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
      means of the groups' if these are independent; then also "own_accuracy", "own_auc" and "own_logloss", the means
      over the models that each group has by itself, and "distance" of all tables together, see `make_distance`.
    """
    independent = trainer.bound.independent
    distance = make_distance(trainer.bound, trainer.mesh) if independent else None
    given = _make_given(trainer.bound, trainer.mesh) if independent else None
    found: dict[str, list[float]] = {}
    state, done = trainer.init_state(), 0

    def measure(state: TrainState) -> None:
        values = {"iteration": float(done), **_measures(trainer, state)}
        if distance and given:
            apart = distance(state.tables)
            values["distance"] = math.sqrt(sum(float(x) ** 2 for x in apart.values()))
            own = []
            for group in range(trainer.bound.replicas):
                tables = given(state.tables, jnp.int32(group))
                own.append(_measures(trainer, dataclasses.replace(state, tables=tables)))
            values |= {f"own_{name}": float(np.mean([of[name] for of in own])) for name in own[0]}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        tell(f"  iteration {done}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "iteration"))

    measure(state)
    for done, inputs in enumerate(itertools.islice(trainer.train_inputs(), iterations), 1):
        state, metrics = trainer.train_step(state, inputs)
        state = trainer.averaged(state, done)
        if done % 8 == 0:
            jax.block_until_ready(metrics)  # few steps under way: evaluations would come on top of them
        if done % every == 0 or done == iterations:
            measure(state)
    return found


def _measures(trainer: Trainer, state: TrainState) -> dict[str, float]:
    labels, logits, weights = [], [], []
    for batch, logits_B in trainer.predict(state, trainer.eval_inputs("test")):
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
