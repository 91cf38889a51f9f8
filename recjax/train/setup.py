"""From a config to what the loop needs: mesh, bound tables, model, and the compiled steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recjax.data.batch import Schema
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, require_rows
from recjax.embedding import route
from recjax.embedding.plan import BoundPlan, Plan, bind, make_plan
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.mesh import make_mesh
from recjax.presets import RunConfig
from recjax.train import state as states
from recjax.train.checkpoint import Restored
from recjax.train.step import Inputs, make_predict, make_train_step, place


def specs(config: RunConfig, schema: Schema) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...]]:
    """One table for each categorical feature of the data."""
    embedding = config.embedding
    tables = tuple(TableSpec(f.name, f.rows, embedding.dim, embedding.optimizer) for f in schema.features)
    features = tuple(FeatureSpec(f.name, f.name, f.bag, embedding.pooling, f.weighted) for f in schema.features)
    return tables, features


@dataclasses.dataclass(frozen=True)
class Setup:
    """The fixed parts of a run.

    Attributes:
      config: the run's config.
      source: its data.
      mesh: its devices.
      plan: where each table lives.
      bound: the plan bound to the mesh.
      model: the dense module, with its initial weights.
      tx: optimizer of the dense part.
      dtype: of parameters and tables.
    """

    config: RunConfig
    source: BlockSource
    mesh: Mesh
    plan: Plan
    bound: BoundPlan
    model: nnx.Module
    tx: optax.GradientTransformation
    dtype: Any

    def new_state(self) -> states.TrainState:
        """The state before the first step."""
        return states.create(self.model, self.bound, self.mesh, self.tx, self.config.seed, self.dtype)

    def saved_state(self, saved: Restored) -> states.TrainState:
        """The state that a checkpoint holds."""
        return states.from_host(saved.arrays, saved.step, self.model, self.bound, self.mesh, self.tx, self.dtype)

    @functools.cached_property
    def train_step(self) -> Callable[..., Any]:
        """See `make_train_step`."""
        return make_train_step(nnx.graphdef(self.model), self.bound, self.mesh, self.tx)

    @functools.cached_property
    def predict(self) -> Callable[..., Any]:
        """See `make_predict`."""
        return make_predict(nnx.graphdef(self.model), self.bound, self.mesh)

    def counted(self, split: str, batch_size: int, **options: Any) -> Iterator[route.Counted]:
        """Batches of a split, checked and counted by worker threads ahead of time."""
        count = functools.partial(route.count, bound=self.bound, batch_size=batch_size)
        workers = self.config.train.workers
        return batches(self.source, split, batch_size, transform=count, workers=workers, **options)

    def place(self, counted: route.Counted, capacities: dict[str, int]) -> Inputs:
        """Lays a counted batch out on the mesh."""
        with jax.profiler.TraceAnnotation("route"):
            routing = route.pad(counted, self.bound, capacities, self.dtype)
        return place(counted.batch, routing, counted.local, self.mesh, self.dtype)

    def scores(self, state: states.TrainState, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels, logits and weights of a whole split, [n] each, in the order of the prepared data."""
        capacities: dict[str, int] = {}
        size = min(self.config.train.eval_batch_size, max(1, int(self.source.row_counts(split).sum())))
        ahead: tuple[jax.Array, int] | None = None  # a prediction under way while the next one is prepared
        labels, logits, weights = [], [], []
        for counted in self.counted(split, size, epochs=1):
            capacities = route.grow(capacities, counted.needs)
            prediction = self.predict(state, self.place(counted, capacities))
            if ahead:
                logits.append(_rows(*ahead))
            ahead = prediction, counted.batch.size
            labels.append(counted.batch.labels)
            weights.append(counted.batch.weights)
        if ahead:
            logits.append(_rows(*ahead))
        return np.concatenate(labels), np.concatenate(logits), np.concatenate(weights)


def _rows(logits: jax.Array, count: int) -> np.ndarray:
    return np.asarray(logits, np.float64)[:count]


def make_setup(config: RunConfig, source: BlockSource | None = None, splits: Sequence[str] = ()) -> Setup:
    """Builds everything that a run needs. Starts the JAX back end.

    Args:
      config: the run's config.
      source: its data; None opens `config.data`.
      splits: those that must have rows, so that a run does not find out at its end.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    source = config.data.open() if source is None else source
    for split in splits:
        require_rows(source, split)
    samples = int(source.row_counts("train").sum())
    if "train" in splits and config.train.batch_size > samples:
        raise ConfigError(
            f"train.batch_size is {config.train.batch_size:,}, but the training split has {samples:,} samples. Set it "
            "to that at most."
        )
    tables, features = specs(config, source.schema)
    plan = make_plan(config.plan, tables)
    mesh = make_mesh(config.mesh)
    if config.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    dtype = jnp.float64 if config.compute_dtype == "float64" else jnp.float32
    model = config.model.build(
        len(source.schema.dense),
        tuple(f.name for f in features),
        config.embedding.dim,
        dtype=jnp.dtype(config.compute_dtype),
        seed=config.seed,
    )
    bound = bind(plan, tables, features, mesh.devices.size)
    return Setup(config, source, mesh, plan, bound, model, config.train.optimizer.build(), dtype)
