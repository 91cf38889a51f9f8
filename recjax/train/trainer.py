"""The fixed parts of a training, from a config or put together by hand: mesh, tables, model, and the compiled steps."""

from __future__ import annotations

import contextlib
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

from recjax import settings
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.data.bag_sizes import mean_ids
from recjax.data.batch import Batch
from recjax.data.source import BlockSource, require_rows
from recjax.embedding import replica_groups
from recjax.embedding.address import Maps
from recjax.embedding.dynamic.tables import DYNAMIC, DynamicTables, dynamic_tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.lines import in_lines
from recjax.embedding.plan import Plan
from recjax.errors import ConfigError
from recjax.models.dense import Precision
from recjax.models.layers import products_in
from recjax.models.products import Products, compiler_options
from recjax.parallel import watchdog
from recjax.parallel.malloc import return_memory
from recjax.parallel.mesh import AXES, make_mesh, own
from recjax.planning.predict import Prediction
from recjax.planning.question import Answer
from recjax.planning.tier_run import bound_as
from recjax.tiers.caches import with_caches
from recjax.tiers.host_rows import HostRows
from recjax.tiers.tables import export_cached, hot_rows, import_cached
from recjax.tiers.tier import Tier
from recjax.tiers.written import WRITTEN, export_written, import_written
from recjax.train import state as states
from recjax.train.agreement import StopRequested
from recjax.train.checkpoint.chain import Chain
from recjax.train.dense import Dense, make_dense
from recjax.train.input_streams import InputStreams
from recjax.train.inputs import InputStream
from recjax.train.module import ModuleDef, asks_for_samples, built
from recjax.train.planned import plan_of
from recjax.train.products import set_products
from recjax.train.routers import InFlight
from recjax.train.state import TrainState
from recjax.train.step import Metrics, StepOptions, make_predict, make_train_step
from recjax.train.step_inputs import StepInputs
from recjax.train.table_specs import check_shared_values, dims, refuse_reduced, specs
from recjax.train.tasks import Tasks, choice_of, outputs_for, tasks_of
from recjax.utils.lazy_arrays import load


@dataclasses.dataclass(frozen=True)
class Trainer(InputStreams):
    """Trains and predicts: programs and what they are made of. Nothing in it changes; what does is the `TrainState`.

    Attributes:
      config: the run's config, as it is for so many training samples.
      source: its data.
      mesh: its devices.
      plan: where each table lives.
      bound: the plan bound to the mesh.
      model: the dense module, with its initial weights.
      tx: optimizer of the dense part.
      dtype: of parameters and tables.
      dense: how the dense part is held.
      options: of the training step.
      maps: where the rows of mapped groups lie; None: each in the slot of its home (see `recjax.embedding.address`).
      tasks: what it learns of several labels, or of one otherwise than by log loss; (): the one binary label.
      chosen: what a planner has chosen for it, if one has; see `recjax.train.planned`.
      tier: the rows that are not on the devices, if not all are. It does change, with the newest state.
      ids: which keys have which rows, if some tables give rows to keys. It changes likewise.
      products: who computes those of dense layers, if `train.products` chooses.
    """

    config: RunConfig
    source: BlockSource
    mesh: Mesh
    plan: Plan
    bound: BoundPlan
    model: nnx.Module
    tx: optax.GradientTransformation
    dtype: Any
    dense: Dense
    options: StepOptions
    maps: Maps | None = None
    tasks: Tasks = ()
    chosen: Answer | None = None
    tier: Tier | None = None
    ids: DynamicTables | None = None
    products: Products | None = None

    def init_state(self) -> TrainState:
        """Returns the state before the first step."""
        if self.tier is not None:
            self.tier.clear()
        if self.ids is not None:
            self.ids.clear()
        of = (self.model, self.bound, self.mesh, self.tx, self.config.seed, self.dtype, self.dense, self.maps)
        return states.create(*of, self.config.train.replica_init == "own", self.options.late)

    def restore(self, arrays: dict[str, Any], step: int, chain: Chain = ()) -> TrainState:
        """Returns the state that a checkpoint of any mesh and plan holds: see `state.from_host`.

        With the checkpoint's `chain`, where the host takes rows from it as they are, increments may be made after it.
        """
        of = (self.model, self.bound, self.mesh, self.tx, self.dtype, self.dense, self.maps)
        state = states.from_host(arrays, step, *of, self.options.late)
        if self.tier is not None:
            self.tier.clear()
            if not import_written(self.bound, self.tier.rows, self.config.seed, arrays.get(WRITTEN, {})):
                import_cached(self.bound, self.tier.rows, states.one_version(arrays)["tables"])
            elif self.tier.rows.changes is not None:
                self.tier.rows.changes.complete(chain)
        if self.ids is not None:
            self.ids.load(load(arrays.get(DYNAMIC, {})))
        return state

    def export(self, state: TrainState) -> dict[str, Any]:
        """Returns a state's arrays, independent of mesh and plan: see `state.export`."""
        arrays = self._exported(state)
        if self.tier is None:
            return arrays
        self.tier.flush(state)
        hot = hot_rows(self.bound, state.tables, state.slots)
        return {**arrays, "tables": {**arrays["tables"], **export_cached(self.bound, self.tier.rows, hot)}}

    def checkpoint(self, state: TrainState, increment: bool = False) -> dict[str, Any]:
        """Returns the same for a checkpoint: of tables with rows on the host what was ever written, see `WRITTEN`.

        With `increment` what has changed since the checkpoint that `Tier.rows.changes` names: see `Increments`.
        """
        arrays = self._exported(state)
        if self.tier is None:
            return arrays
        self.tier.begin_checkpoint(state)
        arrays = {key: value for key, value in arrays.items() if value or key != "tables"}
        hot = hot_rows(self.bound, state.tables, state.slots)
        return {**arrays, WRITTEN: export_written(self.bound, self.tier.rows, self.config.seed, hot, increment)}

    def _exported(self, state: TrainState) -> dict[str, Any]:
        """All but the tables with rows on the host."""
        maps = {} if self.ids is None else {DYNAMIC: self.ids.state()}
        return {**states.export(state, self.bound, self.dense), **maps}

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of the settings in which a resumed run must be like the one before: every checkpoint holds it."""
        return settings.config_hash(self.config, FREE_ON_RESUME)

    @functools.cached_property
    def step_program(self) -> jax.stages.Wrapped:
        """The jitted training step: see `make_train_step`."""
        how = (self.options, self.dense, self.tasks, compiler_options(self.products))
        return make_train_step(ModuleDef.of(self.model), self.bound, self.mesh, self.tx, *how)

    @functools.cached_property
    def predict_program(self) -> jax.stages.Wrapped:
        """The jitted forward pass: see `make_predict`."""
        bound = self.reading.bound if self.tier else self.bound
        how = (self.dense, self.tasks, self.options.late, compiler_options(self.products))
        return make_predict(ModuleDef.of(self.model), bound, self.mesh, *how)

    def train_step(self, state: TrainState, inputs: StepInputs) -> tuple[TrainState, Metrics]:
        """Dispatches one training step, which takes the place of `state`; nothing is awaited.

        In a profile it is called dispatch.

        Returns:
          The new state, and the metrics of the step: see `make_train_step`.
        """
        if self.tier is not None:
            self.tier.require_admitted()
        with jax.profiler.TraceAnnotation("dispatch"):
            return self.step_program(state, inputs)

    def admit(self, state: TrainState, batch: InFlight) -> TrainState:
        """Brings the rows of a batch to the devices, where not all are, and draws those that were given to keys.

        Then its step can be dispatched.

        In a profile it is called admit.

        Args:
          state: is used up if rows come.
          batch: which the stream of the training gave last.
        """
        keeper = self.tier or self.ids
        if keeper is None:
            return state
        with jax.profiler.TraceAnnotation("admit"):
            moved: TrainState = keeper.admit(state, batch.routed.admission)
            return moved

    def averaged(self, state: TrainState, step: int) -> TrainState:
        """Returns the state with the means of all replica groups' tables and slots, if they are due after `step` steps.

        They are every `train.average_every` steps where `train.replica_sync` is average; then the result takes the
        place of `state`. Else it is `state`.
        """
        averages = self.bound.independent and self.config.train.replica_sync == "average"
        if not averages or step % self.config.train.average_every:
            return state
        tables, slots = self._average(state.tables, state.slots, state.ok)
        return dataclasses.replace(state, tables=tables, slots=slots)

    @functools.cached_property
    def _average(self) -> Any:
        return replica_groups.make_average(self.bound, self.mesh, self.config.train.average_precision)

    def predict(self, state: TrainState, stream: InputStream) -> Iterator[tuple[Batch, np.ndarray]]:
        """Predicts all batches of a stream, each while the next one is prepared, and closes it.

        Yields:
          What this process reads of each batch, and its logits: float64 [n]; of tasks the outputs of all, [n, O].

        Raises:
          StopRequested: the stream's `stop` of any process has said so.
        """
        before: tuple[Batch, jax.Array] | None = None
        if self.tier is not None:
            self.tier.flush(state)
        with contextlib.closing(stream):
            for inputs in stream:
                if stream.latest.stop:
                    raise StopRequested(stream.latest.stop)
                prediction = stream.latest.batch, self._logits(state, stream.latest, inputs)
                watchdog.phase("wait")
                if before:
                    yield _rows(*before)
                before = prediction
        if before:
            yield _rows(*before)
        watchdog.phase("report")  # what is made of them is each process's own work

    def _logits(self, state: TrainState, batch: InFlight, inputs: StepInputs) -> jax.Array:
        """Dispatches one forward pass. Rows of the host that it needs are held as long as it lasts."""
        if self.tier is not None:
            state = self.tier.view(state, batch.routed.admission)
        logits: jax.Array = self.predict_program(state, inputs)
        return logits


def _rows(batch: Batch, logits: jax.Array) -> tuple[Batch, np.ndarray]:
    return batch, own(logits).astype(np.float64)[: batch.size]


def _judge(config: RunConfig, source: BlockSource, mesh: Mesh) -> Callable[[Plan], Prediction] | None:
    if not config.planner.compile:
        return None
    from recjax.train.step_prediction import judge  # which builds trainers itself

    return judge(config, source, mesh)


def build_trainer(
    config: RunConfig,
    source: BlockSource | None = None,
    splits: Sequence[str] = (),
    weights: bool = True,
    plan: Plan | None = None,
) -> Trainer:
    """Builds all that a training needs. Starts the JAX back end.

    Args:
      config: the run's config.
      source: its data; None opens `config.data`.
      splits: those that must have rows, so that a run does not find out at its end.
      weights: False leaves the model without its initial weights, in shapes alone: to compile, not to run.
      plan: where tables live; None: as the config says.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    source = config.data.open() if source is None else source
    for split in splits:
        require_rows(source, split)
    config = config.for_rows(int(source.row_counts("train").sum()))
    if "train" in splits:  # what a run has learned otherwise stays usable
        check_shared_values(config, source)
    evaluates = splits and "train" not in splits  # by processes that read each block once
    tables, features = specs(config, source.schema, {} if evaluates else mean_ids(source))
    chosen, given = None, plan
    if given is None:
        plan, chosen, _ = plan_of(config, source, tables, features, config.mesh.shape)  # before devices start
    mesh = make_mesh(config.mesh)
    shape = tuple(mesh.shape[axis] for axis in AXES)
    judge = None if given else _judge(config, source, mesh)
    if given is None and (judge or shape != config.mesh.shape):  # of all the devices that there are
        plan, chosen, _ = plan_of(config, source, tables, features, shape, judge)
    assert plan is not None
    if config.compute_dtype == "float64":
        refuse_reduced(config, plan, tables)
        jax.config.update("jax_enable_x64", True)
    dtype = jnp.float64 if config.compute_dtype == "float64" else jnp.float32
    tasks = tasks_of(config, source.schema)
    choice_of(config.train.choose_by, tasks)
    build = functools.partial(
        config.model.build,
        len(source.schema.dense),
        dims(tables, features),
        dtype=jnp.dtype(config.dense_dtype),
        seed=config.seed,
        **outputs_for(config.model, tasks),
    )
    tensorfloat32 = config.compute_dtype == "tensorfloat32"
    with products_in(Precision.HIGH if tensorfloat32 else Precision.HIGHEST):
        model = built(config.model, build if weights else functools.partial(nnx.eval_shape, build))
    products = set_products(model, config, mesh)
    if config.embedding.ragged and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError(
            "embedding.ragged=true, but the mesh is of CPU devices, for which XLA has no ragged all-to-all. Leave it "
            "false there: nothing but the bytes of padding depends on it."
        )
    bound = bound_as(config, plan, tables, features, shape)
    if mesh.devices.flat[0].platform == "tpu":
        bound = in_lines(bound)
    tier = None
    chosen_bytes = chosen.tier.device_bytes if chosen and chosen.tier else 0
    if budget := config.tier.bytes_of("device_bytes") or chosen_bytes:
        bound = with_caches(bound, budget, np.dtype(dtype).itemsize)
        if bound.cached:
            return_memory()
            track = config.train.checkpoint_increments > 0 and jax.process_count() == 1
            host = (config.tier.bytes_of("dram_bytes"), config.tier.disk, track)
            tier = Tier(HostRows(bound, mesh, config.seed, dtype, *host))
    ids = DynamicTables(bound, mesh, config.seed, dtype) if dynamic_tables(bound) else None
    if ids is not None and config.embedding.hot.rows:
        raise ConfigError(
            f"embedding.tables.{dynamic_tables(bound)[0]}.ids=dynamic does not go with embedding.hot.rows, which are "
            "chosen by their numbers in the data. Leave that out, or ids=dynamic."
        )
    tx = config.train.optimizer.build()
    bucket_mib = chosen.bucket_mib if chosen else config.train.bucket_mib
    dense = make_dense(config.train.dense, bucket_mib, model, tx, dtype, mesh.devices.size)
    train = config.train
    per_sample = asks_for_samples(model, train.accumulate)
    late = train.dense_delay > 0
    options = StepOptions(train.clip_norm, train.accumulate, train.schedule.factor, config.seed, per_sample, late)
    made = (config, source, mesh, plan, bound, model, tx, dtype, dense, options)
    return Trainer(*made, tasks=tasks, chosen=chosen, tier=tier, ids=ids, products=products)
