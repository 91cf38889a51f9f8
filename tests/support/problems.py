"""What several tests share: meshes of any size, a sharded run of k steps, and the same run by the dense oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from recjax.config.run import EmbeddingConfig, RunConfig, TierConfig
from recjax.config.train import DenseSharding, TrainConfig
from recjax.data.batch import Batch, Feature, Schema
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource
from recjax.embedding.bind import bind, in_lines
from recjax.embedding.buffers import initial_rows
from recjax.embedding.elements import Elements
from recjax.embedding.optim import Frozen
from recjax.embedding.plan import Plan, make_plan
from recjax.embedding.routing.routed import RoutedBatch
from recjax.embedding.segment import PLACEMENTS
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.models.stateful import number_dropouts
from recjax.parallel.mesh import AXES
from recjax.tiers.caches import with_caches
from recjax.train import state as states
from recjax.train.compile_only import abstract_state
from recjax.train.dense import make_dense
from recjax.train.module import asks_for_samples, kept_state
from recjax.train.routers import StepInputs, place_all
from recjax.train.state import TrainState
from recjax.train.step import StepOptions
from recjax.train.table_specs import dims, specs
from recjax.train.tasks import Tasks
from recjax.train.trainer import Trainer
from recjax.utils.lazy_arrays import load
from support import dense_reference as reference

# Those that differ on a mesh of one host, where a table-row-wise table or one in a grid is bound as a row-wise one.
ON_ONE_HOST = tuple(p for p in PLACEMENTS if p not in ("table_row_wise", "grid"))


def to_host(state, bound):
    """The arrays of a state as `state.export` gives them, in host memory."""
    return load(states.export(state, bound))


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
    source: BlockSource | None = None  # of the batches, if they are not made up
    tasks: Tasks = ()
    # For the oracle, if it is not the log loss of `model`: (parameters by path, other state by path, dense features,
    # lookups, labels, weights, step) -> the loss of the batch, and the other state after it with the loss of each task.
    truth: Callable[..., tuple[Any, tuple[Any, Any]]] | None = None

    def build(self, dtype: Any) -> nnx.Module:
        return self.model.build(self.dense, dims(self.tables, self.features), dtype=jnp.dtype(dtype), seed=self.seed)


def problem(
    source: BlockSource,
    model: Any,
    optimizer: Any,
    dim: int,
    *,
    steps: int,
    batch_size: int,
    pooling: Any = "sum",
    tx: Any = None,
) -> Problem:
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
        source=source,
    )


@dataclasses.dataclass
class Result:
    """Losses of all steps, and tables in *row* order: name -> {"rows": [V, D], slot: [V]}; dense parameters by path.

    The oracle also tells the norm of all gradients in each step, before clipping, and of tasks each one's loss.
    """

    losses: list[float]
    tables: dict[str, dict[str, np.ndarray]]
    dense: dict[str, np.ndarray]
    norms: list[float] = dataclasses.field(default_factory=list)
    of_tasks: list[list[float]] = dataclasses.field(default_factory=list)


def trainer_of(
    problem: Problem,
    devices: int,
    plan: str | Plan = "row_wise",
    dtype: Any = np.float32,
    *,
    dedup: bool = True,
    hosts: int = 1,
    replicas: int = 1,
    independent: bool = False,
    held: DenseSharding = "replicated",
    bucket_mib: float = 0.0,
    ragged: bool = False,
    pieces: int = 1,
    lines: bool = False,
    cache_bytes: int = 0,
    dram_bytes: int = 0,
    disk: str = "",
    increments: int = 0,
) -> Trainer:
    """A trainer put together by hand, on a mesh of `devices`; `hosts` are those of each of the `replicas` groups.

    With `cache_bytes` a device has so many for rows, and all others are on the host, in so much of its memory and on
    disk; `increments` are those after a whole checkpoint. With `lines` rows lie as on a TPU.
    """
    mesh, model = mesh_of(devices, hosts, replicas), problem.build(dtype)
    plan = make_plan(plan, problem.tables) if isinstance(plan, str) else plan
    bound = bind(
        plan,
        problem.tables,
        problem.features,
        devices // replicas,
        dedup,
        hosts,
        replicas,
        independent,
        ragged=ragged,
        row_pieces=pieces,
    )
    bound = in_lines(bound) if lines else bound
    if cache_bytes:
        bound = with_caches(bound, cache_bytes, np.dtype(dtype).itemsize)
    config = RunConfig(
        seed=problem.seed,
        model=problem.model,
        train=TrainConfig(
            batch_size=problem.batch_size,
            accumulate=problem.options.accumulate,
            workers=0,
            checkpoint_increments=increments,
        ),
        tier=TierConfig(cache_bytes, dram_bytes, disk),
    )
    dense = make_dense(held, bucket_mib, model, problem.tx, dtype, devices, mesh.devices.flat[0].platform)
    source: Any = problem.source or types.SimpleNamespace(schema=schema_of(problem))
    per_sample = asks_for_samples(model, problem.options.accumulate)
    options = dataclasses.replace(problem.options, per_sample=per_sample)
    number_dropouts(model)
    return Trainer(
        config=config,
        source=source,
        mesh=mesh,
        plan=plan,
        bound=bound,
        model=model,
        tx=problem.tx,
        dtype=dtype,
        dense=dense,
        options=options,
        tasks=problem.tasks,
    )


def schema_of(problem: Problem) -> Schema:
    """The columns of batches that are made up."""
    rows = {table.name: table.rows for table in problem.tables}
    features = {f.reads: Feature(f.reads, rows[f.table], f.bag, f.weighted) for f in problem.features}
    labels = tuple(task.label for task in problem.tasks)
    return Schema(tuple(f"dense_{k}" for k in range(problem.dense)), tuple(features.values()), labels)


@dataclasses.dataclass
class Placed:
    """A trainer, and a problem's batches on its mesh, all of the same sizes: the step compiles once."""

    problem: Problem
    trainer: Trainer
    routed: list[RoutedBatch]
    inputs: list[StepInputs]
    capacities: dict[str, int]

    @classmethod
    def of(cls, problem: Problem, trainer: Trainer) -> Self:
        size, parts = problem.batch_size, problem.options.accumulate
        batches = [trainer.route(batch, size, parts) for batch in problem.batches]
        for stage in trainer.stages():
            batches = [dataclasses.replace(batch, routed=stage.advance(batch.routed, ())) for batch in batches]
        return cls(problem, trainer, [batch.routed for batch in batches], *place_all(trainer.router, batches))

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.trainer.step_program.lower(abstract_state(self.trainer), self.inputs[0]).compile()

    def start(self) -> TrainState:
        """The state before the first step."""
        return self.trainer.restore(new_weights(self.problem, self.trainer.dtype), 0)

    def steps(self, state: TrainState, first: int = 0, last: int | None = None) -> TrainState:
        """The state after the batches from `first` to below `last`."""
        for inputs in self.inputs[first:last]:
            state, metrics = self.trainer.train_step(state, inputs)
            assert bool(metrics["ok"])
        return state

    def result(self, state: TrainState, first: int = 0) -> Result:
        """Losses of the batches from `first` on, and the weights that they leave."""
        losses = []
        for inputs in self.inputs[first:]:
            state, metrics = self.trainer.train_step(state, inputs)
            assert bool(metrics["ok"])
            losses.append(float(metrics["loss"]))
        return Result(losses, *by_row(self.trainer, state))


def new_weights(problem: Problem, dtype: Any) -> dict[str, Any]:
    """A checkpoint of new weights, made once on one device: to compile that for each mesh may take as long as its step.

    That they are the same on any mesh is shown in test_collection.py.
    """
    return _new_weights(problem.tables, problem.features, problem.model, problem.dense, problem.tx, problem.seed, dtype)


@functools.cache
def _new_weights(
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    model: Any,
    dense: int,
    tx: optax.GradientTransformation,
    seed: int,
    dtype: Any,
) -> dict[str, Any]:
    problem = Problem([], 1, tables, features, model, dense, tx, seed)
    bound = bind(make_plan("row_wise", tables), tables, features, 1)
    return to_host(states.create(problem.build(dtype), bound, mesh_of(1), tx, seed, dtype), bound)


def run_sharded(problem: Problem, devices: int, plan: str | Plan, dtype: Any, **how: Any) -> Result:
    """Trains with the product's own step on a mesh of `devices`; `how` is as for `trainer_of`."""
    placed = Placed.of(problem, trainer_of(problem, devices, plan, dtype, **how))
    return placed.result(placed.start())


def by_row(trainer: Trainer, state: TrainState) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Tables in *row* order, as a Result has them, and dense parameters by path."""
    host = load(trainer.export(state))
    tables = {}
    for group in trainer.bound.groups:
        for table in group.segments:
            order = table.order.position(np.arange(table.spec.rows))
            tables[table.spec.name] = {k: v[order] for k, v in host["tables"][table.spec.name].items()}
    return tables, host["dense"] | host.get("module", {})


def packed(rows_BxHxD: jax.Array, mask_BxH: jax.Array) -> Elements:
    """Rows in a rectangle, end to end."""
    b, H, D = rows_BxHxD.shape
    segments_L = jnp.where(mask_BxH, jnp.arange(b, dtype=jnp.int32)[:, None], b).ravel()
    order_L = jnp.argsort(segments_L, stable=True)
    return Elements(rows_BxHxD.reshape(b * H, D)[order_L], segments_L[order_L], b)


def run_oracle(problem: Problem, dtype: Any) -> Result:
    """Trains on one device with whole tables, dense gradients and the oracle's optimizers."""
    model = problem.build(dtype)
    graphdef, dense = nnx.graphdef(model), nnx.state(model, nnx.Param)
    kept = states._named_leaves(jax.tree.map(lambda x: jnp.asarray(x, dtype), kept_state(model)))
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
    def loss_and_grads(dense: Any, tables: Any, kept: Any, matrices: Any, x: Any, y: Any, w: Any, step: Any) -> Any:
        def loss(dense: Any, tables: Any) -> Any:
            pooled = {}
            for f in problem.features:
                matrix, mask = matrices[f.name]
                looked_up = matrix @ tables[f.table]
                pooled[f.name] = packed(looked_up, mask) if f.pooling == "none" else looked_up
            if problem.truth is not None:
                by_path = {states.path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(dense)}
                return problem.truth(by_path, kept, x, pooled, y, w, step)
            logits = nnx.merge(graphdef, dense)(x, pooled)
            each = jnp.maximum(logits, 0) - logits * y + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return jnp.sum(w * each) / jnp.sum(w), (kept, [])

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(dense, tables)

    losses, norms, of_tasks = [], [], []
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
        (loss, (kept, each)), grads = loss_and_grads(dense, tables, kept, matrices, x, y, w, step)
        losses.append(float(loss))
        of_tasks.append([float(x) for x in each])
        leaves, structure = jax.tree.flatten(grads)
        norms.append(float(np.sqrt(sum(np.square(g).sum() for g in leaves))))
        clipped = reference.clip([np.asarray(g) for g in leaves], problem.options.clip_norm)
        dense_grads, table_grads = jax.tree.unflatten(structure, clipped)
        rate = float(problem.options.schedule(jnp.int32(step)))
        updates, opt = problem.tx.update(dense_grads, opt, dense)
        dense = optax.apply_updates(dense, jax.tree.map(lambda u, rate=rate: u * rate, updates))
        for t in problem.tables:
            assert not isinstance(t.optimizer, Frozen)  # which the oracle has nothing to say of
            tables[t.name], slots[t.name] = reference.update(
                t.optimizer, tables[t.name], slots[t.name], table_grads[t.name], touched[t.name], step, rate
            )
    named = {t.name: {"rows": tables[t.name], **slots[t.name]} for t in problem.tables}
    dense_part = states._named_leaves(dense) | {name: np.asarray(x) for name, x in kept.items()}
    return Result(losses, named, dense_part, norms, of_tasks)


def compare(result: Result, truth: Result, *, loss_rtol: float, atol: float) -> None:
    """Losses within a relative tolerance; tables, slots and dense parameters within an absolute one."""
    np.testing.assert_allclose(result.losses, truth.losses, rtol=loss_rtol, atol=0)
    assert result.tables.keys() == truth.tables.keys()
    for name, arrays in truth.tables.items():
        assert result.tables[name].keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_allclose(result.tables[name][key], array, rtol=0, atol=atol, err_msg=f"{name} {key}")
    for name, array in truth.dense.items():
        np.testing.assert_allclose(result.dense[name], array, rtol=0, atol=atol, err_msg=name)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, also those of functions with a gradient of their own."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):  # with its constants, or alone
                yield from equations(getattr(inner, "jaxpr", inner))
