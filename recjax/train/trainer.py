"""The fixed parts of a training, from a config or put together by hand: mesh, tables, model, and the compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recjax import settings
from recjax.config.run import FREE_ON_RESUME, RunConfig
from recjax.config.train import DenseRule
from recjax.data.batch import Batch
from recjax.data.source import BlockSource
from recjax.embedding import replica_groups
from recjax.embedding.bind import in_lines
from recjax.embedding.dynamic.tables import DYNAMIC, DynamicTables, dynamic_tables, require_possible
from recjax.embedding.layout import BoundPlan
from recjax.embedding.optim import Frozen
from recjax.embedding.plan import Plan
from recjax.embedding.routing import device
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.models.dense import PRECISIONS, Precision, Products, compiler_options
from recjax.models.layers import products_in
from recjax.parallel import watchdog
from recjax.parallel.malloc import return_memory
from recjax.parallel.mesh import AXES, own, put, replicated
from recjax.planning.question import Answer
from recjax.planning.resolve import bound_as
from recjax.tiers.caches import with_caches
from recjax.tiers.host_rows import HostRows, folder_of
from recjax.tiers.tables import export_cached, hot_rows, import_cached
from recjax.tiers.tier import Tier
from recjax.tiers.written import WRITTEN, export_written, import_written
from recjax.train import state as states
from recjax.train.agreement import StopRequested
from recjax.train.checkpoint.chain import Chain
from recjax.train.dense import Dense, make_dense
from recjax.train.inputs import InputStream, InputStreams
from recjax.train.known_pairs import Known, known_of
from recjax.train.module import ModuleDef, asks_for_samples, built
from recjax.train.products import set_products
from recjax.train.routers import InFlight, PackedBatches, ResidentRows, StepInputs, find_labelled, unpadded
from recjax.train.state import EMPTY, HostState, TrainState
from recjax.train.step import Metrics, StepOptions, make_predict, make_train_step, rated
from recjax.train.table_specs import dims, refuse_reduced
from recjax.train.tasks import Tasks, choice_of, outputs_for, tasks_of
from recjax.train.two_sided import all_item_rows, refuse_places, refuse_what_does_not_go, sides_of
from recjax.utils.lazy_arrays import load


@dataclasses.dataclass(frozen=True)
class Trainer(InputStreams):
    """Trains and predicts: programs and what they are made of. Nothing in it changes; what does is the `TrainState`.

    Where the host has a part of the state (`HostState`), a stream of inputs gets it as `host`, and `admit` comes before
    each step.

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
      tasks: what it learns of several labels, or of one otherwise than by log loss; (): the one binary label.
      chosen: what a planner has chosen for it, if one has; see `recjax.train.planned`.
      products: who computes those of dense layers, if `train.products` chooses.
      resident: training rows that lie on the devices; None: the host reads them.
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
    tasks: Tasks = ()
    chosen: Answer | None = None
    products: Products | None = None
    resident: ResidentRows | None = None

    def bind(self, plan: Plan, mesh: Mesh) -> BoundPlan:
        """Binds a plan of the same tables to a mesh of the same shape, like the trainer's own but for caches."""
        specs = {segment.spec.name: segment.spec for group in self.bound.groups for segment in group.segments}
        tables = tuple(specs[name] for name in self.plan.tables)  # in the order of the model
        return _bind(self.config, plan, tables, self.bound.features, mesh, bool(self.bound.cached))

    def init_state(self, host: HostState | None = None) -> TrainState:
        """Returns the state before the first step.

        Args:
          host: that of an earlier state, which this one takes over; None: a new one.
        """
        state = states.create(
            self.model,
            self.bound,
            self.mesh,
            self.tx,
            self.config.seed,
            self.dtype,
            held=self.dense,
            apart=self.config.train.replica_init == "own",
            late=self.options.late,
        )
        return dataclasses.replace(state, host=self._cleared(host), rates=self._placed_rates())

    @functools.cached_property
    def learning_rates(self) -> np.ndarray:
        """The learning rates of the dense part and of the groups of tables, as `TrainState.rates` has them."""
        rule = self.config.train.optimizer
        rates = [getattr(rule, "learning_rate", 0), *(group.optimizer.learning_rate for group in rated(self.bound))]
        return np.array(rates, self.dtype)

    def _placed_rates(self) -> jax.Array:
        return put(self.learning_rates, replicated(self.mesh))

    def restore(
        self, arrays: dict[str, Any], step: int, chain: Chain = (), host: HostState | None = None
    ) -> TrainState:
        """Returns the state that a checkpoint of any mesh and plan holds: see `state.from_host`.

        Args:
          arrays: of the checkpoint.
          step: steps done.
          chain: that of the checkpoint: where the host takes rows from it as they are, increments may come after it.
          host: as for `init_state`.
        """
        state = states.from_host(
            arrays,
            step,
            self.model,
            self.bound,
            self.mesh,
            self.tx,
            self.dtype,
            held=self.dense,
            late=self.options.late,
        )
        now = self._cleared(host)
        try:
            self._fill(now, arrays, chain)
        except BaseException:
            if host is None:
                now.close()
            raise
        return dataclasses.replace(state, host=now, rates=self._placed_rates())

    def _cleared(self, host: HostState | None) -> HostState:
        """A new part of a state on the host, or `host` without what it held."""
        if host is not None:
            self.require_host(host).clear()
            return host
        tier, places = None, self.config.tier
        if self.bound.cached:
            rows = HostRows(
                self.bound,
                self.mesh,
                self.config.seed,
                self.dtype,
                dram_bytes=places.bytes_of("dram_bytes"),
                disk=places.disk,
                track=self.makes_increments,
            )
            tier = Tier(rows)
        ids = DynamicTables(self.bound, self.mesh, self.config.seed, self.dtype) if self.gives_rows else None
        return HostState(tier, ids) if tier or ids else EMPTY

    def _fill(self, host: HostState, arrays: dict[str, Any], chain: Chain) -> None:
        if host.tier is not None:
            rows = host.tier.rows
            if not import_written(rows, self.config.seed, arrays.get(WRITTEN, {})):
                import_cached(rows, states.one_version(arrays)["tables"])
            elif rows.changes is not None:
                rows.changes.complete(chain)
        if host.ids is not None:
            host.ids.load(load(arrays.get(DYNAMIC, {})))

    @property
    def makes_increments(self) -> bool:
        """True if checkpoints may be increments: there are rows on the host, all of them in this process."""
        return bool(self.bound.cached) and self.config.train.checkpoint_increments > 0 and jax.process_count() == 1

    def export(self, state: TrainState) -> dict[str, Any]:
        """Returns a state's arrays, independent of mesh and plan: see `state.export`."""
        arrays, tier = self._exported(state), self.require_host(state.host).tier
        if tier is None:
            return arrays
        tier.flush(state)
        hot = hot_rows(self.bound, state.tables, state.slots)
        return {**arrays, "tables": {**arrays["tables"], **export_cached(tier.rows, hot)}}

    def checkpoint(self, state: TrainState, increment: bool = False) -> dict[str, Any]:
        """Returns the same for a checkpoint: of tables with rows on the host what was ever written, see `WRITTEN`.

        With `increment` what has changed since the checkpoint that `Tier.rows.changes` names: see `Increments`.
        """
        arrays, tier = self._exported(state), self.require_host(state.host).tier
        if tier is None:
            return arrays
        tier.begin_checkpoint(state)
        arrays = {key: value for key, value in arrays.items() if value or key != "tables"}
        hot = hot_rows(self.bound, state.tables, state.slots)
        return {**arrays, WRITTEN: export_written(tier.rows, self.config.seed, hot, increment)}

    def _exported(self, state: TrainState) -> dict[str, Any]:
        """All but the tables with rows on the host."""
        ids = self.require_host(state.host).ids
        maps = {} if ids is None else {DYNAMIC: ids.state()}
        return {**states.export(state, self.bound, self.dense), **maps}

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of the settings in which a resumed run must be like the one before: every checkpoint holds it."""
        return settings.config_hash(self.config, FREE_ON_RESUME)

    @functools.cached_property
    def step_program(self) -> jax.stages.Wrapped:
        """The jitted training step: see `make_train_step`."""
        keys, options = self.item_keys, self.options
        if keys is not None:
            options = dataclasses.replace(options, all_rows=all_item_rows(self.config, keys, self.bound))
        return make_train_step(
            ModuleDef.of(self.model),
            self.bound,
            self.mesh,
            self.tx,
            options,
            dense=self.dense,
            tasks=self.tasks,
            compiler_options=compiler_options(self.products),
        )

    @functools.cached_property
    def predict_program(self) -> jax.stages.Wrapped:
        """The jitted forward pass: see `make_predict`."""
        return self._make_predict(vectors=False)

    @functools.cached_property
    def vectors_program(self) -> jax.stages.Wrapped:
        """The same for the vectors of a model of two sides."""
        return self._make_predict(vectors=True)

    def _make_predict(self, vectors: bool) -> jax.stages.Wrapped:
        bound = self.reading.bound if self.bound.cached else self.bound
        return make_predict(
            ModuleDef.of(self.model),
            bound,
            self.mesh,
            dense=self.dense,
            tasks=self.tasks,
            late=self.options.late,
            compiler_options=compiler_options(self.products),
            vectors=vectors,
        )

    @property
    def ranks(self) -> bool:
        """True if the model is of two sides: it finds items for users, and its ranking of them is measured."""
        return bool(getattr(self.config.model, "two_sided", False))

    @functools.cached_property
    def known(self) -> Known:
        """The users and items that such a model knows; ConfigError of another model."""
        return known_of(self.config, self.source)

    def train_step(self, state: TrainState, inputs: StepInputs | PackedBatches) -> tuple[TrainState, Metrics]:
        """Dispatches the training step of each batch, which take the place of `state`; nothing is awaited.

        In a profile it is called dispatch.

        Returns:
          The new state, and the metrics of the steps: see `make_train_step`.
        """
        host = self.require_host(state.host)
        if host.tier is not None:
            host.tier.require_admitted()
        with jax.profiler.TraceAnnotation("dispatch"):
            after, metrics = self.step_program(state, inputs)
        return after if host is EMPTY else dataclasses.replace(after, host=host), metrics

    @functools.cached_property
    def counting(self) -> Trainer:
        """The same training, whose steps count what is not finite by name: for one that was not, taken again."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, counts=True))

    def admit(self, state: TrainState, batch: InFlight) -> TrainState:
        """Brings the rows of a batch to the devices, where not all are, and draws those that were given to keys.

        Then its step can be dispatched.

        In a profile it is called admit.

        Args:
          state: is used up if rows come.
          batch: which the stream of the training gave last.
        """
        if state.host is EMPTY:
            return state
        with jax.profiler.TraceAnnotation("admit"):
            moved: TrainState = state.host.admit(state, batch.routed.admission)
            return moved

    @property
    def averages(self) -> bool:
        """True if replica groups train by themselves, and take the means of their tables every few steps."""
        return self.bound.independent and self.config.train.replica_sync == "average"

    def averages_after(self, step: int) -> bool:
        """Returns whether such means are due after `step` steps: every `train.average_every`."""
        return self.averages and step % self.config.train.average_every == 0

    def averaged(self, state: TrainState, step: int) -> TrainState:
        """Returns the state with the means of all replica groups' tables and slots, if they are due after `step` steps.

        Then the result takes the place of `state`. Else it is `state`.
        """
        if not self.averages_after(step):
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
        before: _Predicted | None = None
        if (tier := self.require_host(state.host).tier) is not None:
            tier.flush(state)
        with contextlib.closing(stream):
            while (inputs := stream.take_if_any()) is not None:
                if stream.latest.stop:
                    raise StopRequested(stream.latest.stop)
                prediction = self._predicted(state, stream.latest, inputs)
                watchdog.phase("wait")
                if before:
                    yield self._on_host(before, state, stream)
                before = prediction
            if before:
                yield self._on_host(before, state, stream)
        watchdog.phase("report")  # what is made of them is each process's own work

    def _predicted(self, state: TrainState, batch: InFlight, inputs: PackedBatches) -> _Predicted:
        """Dispatches one forward pass. Rows of the host that it needs are held as long as it lasts."""
        if state.host.tier is not None:
            state = state.host.tier.view(state, batch.routed.admission)
        logits, needs = self.predict_program(state, inputs)
        return _Predicted(batch, inputs, logits, needs)

    def _on_host(self, done: _Predicted, state: TrainState, stream: InputStream) -> tuple[Batch, np.ndarray]:
        """Waits for a batch's logits; where the devices routed it in arrays that do not hold it, they do it again."""
        while done.needs:
            sizes = stream.take_in({name: int(size) for name, size in done.needs.items()})
            held = device.named_sizes(self.bound, done.inputs.sizes or ())
            if all(int(size) <= held[name] for name, size in done.needs.items()):
                break
            done = self._predicted(state, done.batch, dataclasses.replace(done.inputs, sizes=sizes))
        return done.batch.batch, unpadded(done.batch.routed, own(done.logits).astype(np.float64))


@dataclasses.dataclass(frozen=True)
class _Predicted:
    """A forward pass under way: of which batch, on which arrays, its logits, and the sizes that it needs."""

    batch: InFlight
    inputs: PackedBatches
    logits: jax.Array
    needs: dict[str, jax.Array]


def _refuse_pairs_alone(config: RunConfig, source: BlockSource) -> None:
    """Refuses rows without a label, pairs of a user and an item, for a model that tells labels apart (ConfigError)."""
    options = getattr(source, "about", {}).get("options", {})
    if options.get("item") and not options.get("label"):
        raise ConfigError(
            f"each row is a {options['user']} and a {options['item']} that belong together, with no label, and "
            f"model={config.model.kind} learns to tell labels apart. Give data.label=COLUMN, or model=two_tower, which "
            "learns from pairs alone."
        )


def _bind(
    config: RunConfig,
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    mesh: Mesh,
    cached: bool,
) -> BoundPlan:
    """A plan as it is bound to the devices of a mesh; `cached`: whether some of its rows are to lie on the host."""
    platform = mesh.devices.flat[0].platform
    one_gpu = mesh.devices.size == 1 and platform == "gpu" and not cached
    bound = bound_as(config, plan, tables, features, tuple(mesh.shape[axis] for axis in AXES), one_gpu)
    return in_lines(bound) if platform == "tpu" else bound


def assemble_trainer(
    config: RunConfig,
    source: BlockSource,
    mesh: Mesh,
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    *,
    chosen: Answer | None = None,
    weights: bool = True,
) -> Trainer:
    """Puts a training together whose tables have their places: `recjax.train.build.build_trainer` without its planning.

    Args:
      config: the run's config, as it is for so many training samples.
      source: its data.
      mesh: its devices.
      plan: where each table lives.
      tables: that the features read.
      features: of the data.
      chosen: what a planner has chosen beside the plan, if one has.
      weights: False leaves the model without its initial weights, in shapes alone: to compile, not to run.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    if config.compute_dtype == "float64":
        refuse_reduced(config, plan, tables)
        jax.config.update("jax_enable_x64", True)
    dtype = jnp.float64 if config.compute_dtype == "float64" else jnp.float32
    tasks = tasks_of(config, source.schema)
    two_sided = getattr(config.model, "two_sided", False)
    choice_of(config.train.choose_by, tasks, ranks=two_sided)
    sides: dict[str, Any] = {}  # what a model asks of the data beside sizes
    if two_sided:
        refuse_what_does_not_go(config, source.schema)
        sides["sides"] = sides_of(config, source.schema)
    else:
        _refuse_pairs_alone(config, source)
    if getattr(config.model, "grouped", False):
        sides["groups"] = source.schema.groups
        sides |= {"label_group": source.schema.label_group} if source.schema.label_group else {}
    build = functools.partial(
        config.model.build,
        len(source.schema.dense),
        dims(tables, features),
        dtype=jnp.dtype(config.dense_dtype),
        seed=config.seed,
        **outputs_for(config.model, tasks),
        **sides,
    )
    with products_in(PRECISIONS.get(config.compute_dtype, Precision.HIGHEST)):
        model = built(config.model, build if weights else functools.partial(nnx.eval_shape, build))
    products = set_products(model, config, mesh)
    platform = mesh.devices.flat[0].platform
    if config.embedding.ragged and platform == "cpu":
        raise ConfigError(
            "embedding.ragged=true, but the mesh is of CPU devices, for which XLA has no ragged all-to-all. Leave it "
            "false there: nothing but the bytes of padding depends on it."
        )
    chosen_bytes = chosen.tier.device_bytes if chosen and chosen.tier else 0
    budget = config.tier.bytes_of("device_bytes") or chosen_bytes
    bound = _bind(config, plan, tables, features, mesh, cached=bool(budget))
    if budget:
        bound = with_caches(bound, budget, np.dtype(dtype).itemsize)
        if bound.cached:
            return_memory()
            if config.tier.disk:
                folder_of(config.tier.disk)  # refuses one that cannot be made before anything is trained
    require_possible(bound)
    if two_sided:
        refuse_places(config, source.schema, bound)
    if dynamic_tables(bound) and config.embedding.hot.rows:
        raise ConfigError(
            f"embedding.tables.{dynamic_tables(bound)[0]}.ids=dynamic does not go with embedding.hot.rows, which are "
            "chosen by their numbers in the data. Leave that out, or ids=dynamic."
        )
    still = [table.name for table in tables if isinstance(table.optimizer, Frozen)]
    if still and (config.embedding.hot.rows or any(group.frozen for group in bound.hot)):
        where = (
            f"embedding.hot.rows={config.embedding.hot.rows}" if config.embedding.hot.rows else "the plan's hot rows"
        )
        raise ConfigError(
            f"train.freeze has the table {still[0]!r}, which does not go with {where}: hot rows are copied to every "
            "device to be updated there. Leave hot rows out, or the table."
        )
    tx = optax.set_to_zero() if config.train.freezes_dense else config.train.optimizer.build()
    bucket_mib = chosen.bucket_mib if chosen else config.train.bucket_mib
    dense = make_dense(config.train.dense, bucket_mib, model, tx, dtype, mesh.devices.size, platform)
    train = config.train
    per_sample = asks_for_samples(model, train.accumulate)
    if find_labelled(source.schema, features) and (per_sample or two_sided):
        raise ConfigError(
            f"the elements of group {source.schema.label_group!r} have labels, which does not go with "
            + ("a model of two sides." if two_sided else "BatchNorm and Dropout, which tell samples apart.")
            + " Leave that out."
        )
    options = StepOptions(
        train.clip_norm,
        train.accumulate,
        train.schedule.factor,
        config.seed,
        per_sample=per_sample,
        late=train.dense_delay > 0,
        frozen=train.freezes_dense,
        batch_loss=getattr(config.model, "loss", None) if two_sided else None,
        # Where rows move between two steps, the state that a step began with is gone before it is known to have failed.
        counts=bool(bound.cached or dynamic_tables(bound) or config.embedding.hot.refresh),
        tx_of=None if train.freezes_dense or not isinstance(train.optimizer, DenseRule) else train.optimizer.build,
    )
    return Trainer(
        config=config,
        source=source,
        mesh=mesh,
        plan=plan,
        bound=bound,
        model=model,
        tx=tx,
        dtype=dtype,
        dense=dense,
        options=options,
        tasks=tasks,
        chosen=chosen,
        products=products,
    )
