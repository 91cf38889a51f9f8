"""What several tests share: meshes of any size, a sharded run of k steps, and the same run by the dense oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource
from recjax.embedding import reference
from recjax.embedding.bind import bind
from recjax.embedding.collection import initial_rows
from recjax.embedding.plan import PLACEMENTS, Plan, make_plan
from recjax.embedding.pooling import Sequence
from recjax.embedding.routing import capacity
from recjax.embedding.routing import host as route
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.parallel.mesh import AXES
from recjax.train import state as states
from recjax.train.setup import dims, specs
from recjax.train.step import StepOptions, make_predict, make_train_step
from recjax.train.step_inputs import place

# Those that differ on a mesh of one host, where a table-row-wise table or one in a grid is bound as a row-wise one.
ON_ONE_HOST = tuple(p for p in PLACEMENTS if p not in ("table_row_wise", "grid"))


def mesh_of(devices: int, hosts: int = 1, replicas: int = 1) -> Mesh:
    """The first `devices` of the host's eight, in `replicas` groups, each of which plays `hosts` hosts."""
    kinds, shape = (AxisType.Auto,) * 3, (replicas, hosts, devices // hosts // replicas)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:devices])


@dataclasses.dataclass
class Problem:
    """What to train: batches, specs and a model."""

    batches: list[Batch]
    batch_size: int
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    model: Any  # config with .build
    dense: int
    tx: optax.GradientTransformation
    seed: int = 0
    options: StepOptions = StepOptions()

    def build(self, dtype: Any) -> nnx.Module:
        return self.model.build(self.dense, dims(self.tables, self.features), dtype=jnp.dtype(dtype), seed=self.seed)


def problem(source: BlockSource, model: Any, optimizer: Any, dim: int, *, steps: int, batch_size: int,
            pooling: Any = "sum", tx: Any = None) -> Problem:  # fmt: skip
    """`steps` shuffled batches of a source, with the tables that a run of the model would have."""
    stream = batches(source, "train", batch_size, seed=1, shuffle=True, workers=0)
    config = RunConfig(model=model, embedding=EmbeddingConfig(dim, pooling, optimizer))
    tables, features = specs(config, source.schema)
    return Problem(
        list(itertools.islice(stream, steps)),
        batch_size,
        tables,
        features,
        model,
        len(source.schema.dense),
        tx or optax.sgd(0.05),
    )


@dataclasses.dataclass
class Result:
    """Losses of all steps, and tables in *row* order: name -> {"rows": [V, D], slot: [V]}; dense parameters by path.

    The oracle also tells the norm of all gradients in each step, before clipping.
    """

    losses: list[float]
    tables: dict[str, dict[str, np.ndarray]]
    dense: dict[str, np.ndarray]
    norms: list[float] = dataclasses.field(default_factory=list)


def run_sharded(
    problem: Problem,
    devices: int,
    plan: str | Plan,
    dtype: Any,
    start: Any = None,
    dedup: bool = True,
    hosts: int = 1,
    replicas: int = 1,
) -> Result:
    """Trains with the product's own step on a mesh of `devices`, from new weights or from those of a checkpoint.

    `hosts` are those of each of the `replicas` groups.
    """
    mesh = mesh_of(devices, hosts, replicas)
    plan = make_plan(plan, problem.tables) if isinstance(plan, str) else plan
    bound = bind(plan, problem.tables, problem.features, devices // replicas, dedup, hosts, replicas)
    model = problem.build(dtype)
    if start is None:
        state = states.create(model, bound, mesh, problem.tx, problem.seed, dtype)
    else:
        state = states.from_host(start, 0, model, bound, mesh, problem.tx, dtype)
    step = make_train_step(nnx.graphdef(model), bound, mesh, problem.tx, problem.options)
    parts = problem.options.accumulate
    counted = [route.count(b, bound, problem.batch_size, parts) for b in problem.batches]
    capacities: dict[str, int] = {}
    for c in counted:  # all known beforehand, so the step compiles once
        capacities = capacity.grow(capacities, c.needs)
    losses = []
    for c in counted:
        routing = route.pad(c, bound, capacities, dtype)
        state, metrics = step(state, place(c.batch, routing, c.local, mesh, dtype))
        assert bool(metrics["ok"])
        losses.append(float(metrics["loss"]))
    host = states.to_host(state, bound)
    tables = {}
    for group in bound.groups:
        for table in group.tables:
            order = table.order.position(np.arange(table.spec.rows))
            tables[table.spec.name] = {k: v[order] for k, v in host["tables"][table.spec.name].items()}
    return Result(losses, tables, host["dense"])


def run_oracle(problem: Problem, dtype: Any) -> Result:
    """Trains on one device with whole tables, dense gradients and the oracle's optimizers."""
    model = problem.build(dtype)
    graphdef, dense = nnx.split(model)
    dense = jax.tree.map(lambda x: jnp.asarray(x, dtype), dense)
    opt = problem.tx.init(dense)
    tables = {
        t.name: np.asarray(initial_rows(problem.seed, t.name, jnp.arange(t.rows), t.dim, t.scale)).astype(dtype)
        for t in problem.tables
    }
    slots = {
        t.name: {n: np.full((t.rows, *s.shape), s.initial, dtype) for n, s in t.optimizer.slots(t.dim).items()}
        for t in problem.tables
    }

    @jax.jit
    def loss_and_grads(dense: Any, tables: Any, matrices: Any, x: Any, y: Any, w: Any) -> Any:
        def loss(dense: Any, tables: Any) -> Any:
            pooled = {}
            for f in problem.features:
                matrix, mask = matrices[f.name]
                looked_up = matrix @ tables[f.table]
                pooled[f.name] = Sequence(looked_up, mask) if f.pooling == "none" else looked_up
            logits = nnx.merge(graphdef, dense)(x, pooled)
            each = jnp.maximum(logits, 0) - logits * y + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return jnp.sum(w * each) / jnp.sum(w)

        return jax.value_and_grad(loss, argnums=(0, 1))(dense, tables)

    losses, norms = [], []
    by_name = {t.name: t for t in problem.tables}
    for step, batch in enumerate(problem.batches):
        matrices: dict[str, Any] = {}
        touched = {t.name: np.zeros(t.rows, bool) for t in problem.tables}
        for f in problem.features:
            rows, bags = by_name[f.table].rows, batch.bags[f.reads]
            if f.pooling == "none":
                matrices[f.name] = reference.sequence_matrices(bags, batch.size, rows, dtype)
            else:
                matrices[f.name] = reference.bag_matrix(bags, batch.size, rows, f.pooling, dtype), None
            touched[f.table] |= reference.touched_rows(bags, rows)
        x, y, w = (np.asarray(a, dtype) for a in (batch.dense, batch.labels, batch.weights))
        loss, (dense_grads, table_grads) = loss_and_grads(dense, tables, matrices, x, y, w)
        losses.append(float(loss))
        leaves, structure = jax.tree.flatten((dense_grads, table_grads))
        norms.append(float(np.sqrt(sum(np.square(g).sum() for g in leaves))))
        clipped = reference.clip([np.asarray(g) for g in leaves], problem.options.clip_norm)
        dense_grads, table_grads = jax.tree.unflatten(structure, clipped)
        rate = float(problem.options.schedule(jnp.int32(step)))
        updates, opt = problem.tx.update(dense_grads, opt, dense)
        dense = optax.apply_updates(dense, jax.tree.map(lambda u, rate=rate: u * rate, updates))
        for t in problem.tables:
            tables[t.name], slots[t.name] = reference.update(
                t.optimizer, tables[t.name], slots[t.name], table_grads[t.name], touched[t.name], step, rate
            )
    named = {t.name: {"rows": tables[t.name], **slots[t.name]} for t in problem.tables}
    return Result(losses, named, states._named_leaves(dense), norms)


def compare(result: Result, truth: Result, *, loss_rtol: float, atol: float | None) -> None:
    """Losses within a relative tolerance; with `atol`, tables, slots and dense parameters within it too."""
    np.testing.assert_allclose(result.losses, truth.losses, rtol=loss_rtol, atol=0)
    if atol is None:
        return
    assert result.tables.keys() == truth.tables.keys()
    for name, arrays in truth.tables.items():
        assert result.tables[name].keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_allclose(result.tables[name][key], array, rtol=0, atol=atol, err_msg=f"{name} {key}")
    for name, array in truth.dense.items():
        np.testing.assert_allclose(result.dense[name], array, rtol=0, atol=atol, err_msg=name)


def evaluate_logits(problem: Problem, devices: int, plan: str, dtype: Any) -> np.ndarray:
    """Logits of the first batch before any training."""
    mesh = mesh_of(devices)
    bound = bind(make_plan(plan, problem.tables), problem.tables, problem.features, devices)
    model = problem.build(dtype)
    state = states.create(model, bound, mesh, problem.tx, problem.seed, dtype)
    counted = route.count(problem.batches[0], bound, problem.batch_size)
    routing = route.pad(counted, bound, capacity.grow({}, counted.needs), dtype)
    inputs = place(counted.batch, routing, counted.local, mesh, dtype)
    return np.asarray(make_predict(nnx.graphdef(model), bound, mesh)(state, inputs))[: counted.batch.size]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, also those of functions with a gradient of their own."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)
