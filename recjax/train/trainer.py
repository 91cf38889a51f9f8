"""The fixed parts of a training, from a config or put together by hand: mesh, tables, model, and the compiled steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recjax.config.run import RunConfig
from recjax.data import thread_map
from recjax.data.batch import Batch
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, between, require_rows
from recjax.embedding import replica_groups
from recjax.embedding.address import Maps
from recjax.embedding.bind import bind
from recjax.embedding.dynamic.tables import DYNAMIC, DynamicTables, dynamic_tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.lines import in_lines
from recjax.embedding.plan import Plan
from recjax.embedding.routing import capacity, host
from recjax.embedding.routing.ordered import OrderedStage, SlotLookup
from recjax.errors import ConfigError
from recjax.models.dense import Precision
from recjax.models.layers import products_in
from recjax.models.products import Products, compiler_options
from recjax.parallel import watchdog
from recjax.parallel.malloc import return_memory
from recjax.parallel.mesh import AXES, make_mesh, own
from recjax.planning.question import Answer
from recjax.tiers.caches import read_through, with_caches
from recjax.tiers.host_rows import HostRows
from recjax.tiers.stage import CacheStage, ReadStage
from recjax.tiers.tables import export_cached, hot_rows, import_cached
from recjax.tiers.tier import Tier
from recjax.tiers.written import WRITTEN, export_written, import_written
from recjax.train import routers
from recjax.train import state as states
from recjax.train.agreement import StopRequested, never, synchronize_batches
from recjax.train.checkpoint.chain import Chain
from recjax.train.dense import Dense, make_dense
from recjax.train.eval_shares import eval_shares, share_size
from recjax.train.inputs import InputStream
from recjax.train.module import ModuleDef, asks_for_samples, built
from recjax.train.named_rows import gather_named, list_named
from recjax.train.planned import plan_of
from recjax.train.products import set_products
from recjax.train.routers import InFlight
from recjax.train.state import TrainState
from recjax.train.step import Metrics, StepOptions, make_predict, make_train_step
from recjax.train.step_inputs import StepInputs
from recjax.train.table_specs import dims, refuse_reduced, specs
from recjax.train.tasks import Tasks, choice_of, outputs_for, tasks_of
from recjax.utils.lazy_arrays import load


@dataclasses.dataclass(frozen=True)
class Trainer:
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

    def train_inputs(self, stop: Callable[[], int] = never, save: Callable[[], int] = never) -> InputStream:
        """The inputs of a training, without end; `load_state_dict` starts them elsewhere.

        Args:
          stop: asked before each batch; what any process's says, `latest.stop` says in all.
          save: likewise for `latest.save`.
        """
        size, read = self.config.train.batch_size, self.train_reader(stop, save)
        return InputStream(read, self.router, size, self.samples_per_epoch, capacity.PERIOD, self.stages())

    def train_reader(
        self, stop: Callable[[], int] = never, save: Callable[[], int] = never
    ) -> Callable[[int], Iterator[InFlight]]:
        """Returns the function that gives the batches of a training from a position on, as `routed_batches`."""
        return functools.partial(self.routed_batches, stop=stop, save=save)

    def first_inputs(self, capacities: Mapping[str, int]) -> StepInputs:
        """Returns the first batch of a training, in arrays of these sizes or, where it needs more, larger ones."""
        with contextlib.closing(self.train_inputs()) as stream:
            stream.load_state_dict({"position": 0, "capacities": capacities, "peaks": {}})
            return next(stream)

    def eval_inputs(self, split: str, stop: Callable[[], int] = never) -> InputStream:
        """The inputs of one pass over a split; `stop` as for `train_inputs`.

        Each process reads a part of the split of its own, `eval_rows`, in the order of the prepared data.

        Raises:
          DataError: the split has no rows.
        """
        require_rows(self.source, split)
        samples = int(self.source.row_counts(split).sum())
        size = min(self.config.train.eval_batch_size, samples)
        parts = [(rows, share_size(size, share)) for rows, share in eval_shares(self.source, split, self.mesh)]
        steps = max(-(-len(rows) // each) for rows, each in parts)
        mine, each = parts[jax.process_index()]

        def read(position: int) -> Iterator[InFlight]:
            before = position // size
            route = functools.partial(self._route, batch_size=size, parts=1)
            where: dict[str, Any] = {"position": mine.start + before * each, "end": mine.stop, "epochs": 1}
            workers = self.config.train.workers
            stream = batches(self.source, split, each, transform=route, workers=workers, **where)
            return self._together(self._lengthened(stream, split, steps - before, size), stop)

        return InputStream(read, self.reading, size, samples, None, self.reading_stages())

    def eval_rows(self, split: str) -> range:
        """Rows of a split that this process evaluates."""
        return eval_shares(self.source, split, self.mesh)[jax.process_index()][0]

    def _lengthened(self, stream: Iterator[InFlight], split: str, steps: int, size: int) -> Iterator[InFlight]:
        """A process's batches, and empty ones after them, so that all take as many steps."""
        batch = None
        for _ in range(steps):
            read = next(stream, None)
            if read is None:
                read = self._route(between(batch or self.source.read(split, 0), 0, 0), size, 1)
            batch = read.batch
            yield read

    def inputs_of(self, given: Iterable[Batch], batch_size: int) -> InputStream:
        """The inputs of batches that all processes give alike, of up to `batch_size` samples; they must be valid.

        They are read once: this stream cannot go on elsewhere.
        """
        route = functools.partial(self.route, batch_size=batch_size)
        workers = self.config.train.workers

        def read(position: int) -> Iterator[InFlight]:
            with ThreadPoolExecutor(max(1, workers)) as pool:
                yield from self._together(thread_map.ahead(pool, workers, route, given))

        return InputStream(read, self.reading, batch_size, batch_size, None, self.reading_stages())

    def routed_batches(
        self, position: int = 0, stop: Callable[[], int] = never, save: Callable[[], int] = never
    ) -> Iterator[InFlight]:
        """The batches of a training from a sample on, checked and routed ahead by worker threads, but not placed."""
        train, share = self.config.train, self.router.share
        mine = host.samples_of(share, train.batch_size, train.accumulate)
        route = functools.partial(self._route, batch_size=train.batch_size, parts=train.accumulate, trains=True)
        stream = batches(
            self.source,
            "train",
            train.batch_size,
            seed=self.config.seed,
            shuffle=train.shuffle,
            shuffle_blocks=train.shuffle_blocks,
            position=position,
            workers=train.workers,
            transform=route if self.ids is None else None,
            part=None if share.count == share.total else mine,
        )
        routed = stream if self.ids is None else map(route, stream)  # rows are given in the order of the batches
        return self._together(routed, stop, save)

    def _together(
        self, routed: Iterator[InFlight], stop: Callable[[], int] = never, save: Callable[[], int] = never
    ) -> Iterator[InFlight]:
        """Gives this process's batches what all processes know of them."""
        stream = synchronize_batches(routed, self.mesh, stop, save)
        tier = self.tier
        return stream if tier is None else gather_named(stream, self.bound, self.mesh, lambda: tier.decided)

    def route(self, batch: Batch, batch_size: int, parts: int = 1) -> InFlight:
        """Routes this process's samples of a batch, which are what `batch` of the result holds.

        Args:
          batch: whole; all processes give the same.
          batch_size: B, the most samples that a batch may have.
          parts: as for `route_on_host`.
        """
        share = self.router.share
        if share.count == share.total:
            return self._route(batch, batch_size, parts)
        mine = host.samples_of(share, batch_size, parts)
        return self._route(between(batch, *(min(edge, batch.size) for edge in mine)), batch_size, parts)

    def _route(self, batch: Batch, batch_size: int, parts: int, trains: bool = False) -> InFlight:
        """Routes samples; with `trains`, where rows are given to keys, they are the next ones of the training."""
        with jax.profiler.TraceAnnotation("count"):
            if self.ids is None:
                found = self.router.route(batch, batch_size, parts)
                return InFlight(batch, found if self.tier is None else list_named(self.bound, found))
            rows, admission = self.ids.advance(batch) if trains else (self.ids.find(batch), None)
            routed = self.router.route(rows, batch_size, parts)
            return InFlight(batch, dataclasses.replace(routed, admission=admission))

    def stages(self) -> tuple[OrderedStage, ...]:
        """Returns new ordered stages for an input stream."""
        if self.tier is not None:
            return (CacheStage(self.bound, self.tier, self.config.tier.look_ahead),)
        mapped = any(group.mapped for group in self.bound.groups)
        return (SlotLookup(self.bound, self.maps),) if mapped else ()

    def reading_stages(self) -> tuple[OrderedStage, ...]:
        """The same for a stream of predictions."""
        return (ReadStage(self.reading.bound),) if self.tier is not None else self.stages()

    @functools.cached_property
    def reading(self) -> routers.Router:
        """Router for predictions: as `router`, but rows on the host have no cache."""
        return self.router if self.tier is None else self._router_of(read_through(self.bound))

    @functools.cached_property
    def router(self) -> routers.Router:
        """Router, as `train.routing` says."""
        return self._router_of(self.bound)

    def _router_of(self, bound: BoundPlan) -> routers.Router:
        planned = self.chosen.routing if self.chosen else "auto"
        return routers.choose(self.config, bound, self.mesh, self.dtype, planned, bool(self.tier or self.ids))

    @functools.cached_property
    def samples_per_epoch(self) -> int:
        """Samples of the training split."""
        return int(self.source.row_counts("train").sum())

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch takes; the last may be of fewer samples."""
        return -(-self.samples_per_epoch // self.config.train.batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of a whole run: `train.steps`, or as many as `train.epochs` hold."""
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch


def _rows(batch: Batch, logits: jax.Array) -> tuple[Batch, np.ndarray]:
    return batch, own(logits).astype(np.float64)[: batch.size]


def build_trainer(
    config: RunConfig, source: BlockSource | None = None, splits: Sequence[str] = (), weights: bool = True
) -> Trainer:
    """Builds all that a training needs. Starts the JAX back end.

    Args:
      config: the run's config.
      source: its data; None opens `config.data`.
      splits: those that must have rows, so that a run does not find out at its end.
      weights: False leaves the model without its initial weights, in shapes alone: to compile, not to run.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    source = config.data.open() if source is None else source
    for split in splits:
        require_rows(source, split)
    config = config.for_rows(int(source.row_counts("train").sum()))
    tables, features = specs(config, source.schema)
    plan, chosen, _ = plan_of(config, source, tables, features, config.mesh.shape)  # before devices start
    mesh = make_mesh(config.mesh)
    groups, hosts, each = shape = tuple(mesh.shape[axis] for axis in AXES)
    if shape != config.mesh.shape:  # of all the devices that there are
        plan, chosen, _ = plan_of(config, source, tables, features, shape)
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
    independent = config.train.replica_sync != "exact"
    held = config.embedding
    if held.ragged and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError(
            "embedding.ragged=true, but the mesh is of CPU devices, for which XLA has no ragged all-to-all. Leave it "
            "false there: nothing but the bytes of padding depends on it."
        )
    how: dict[str, Any] = {"atomics": held.atomics, "ragged": held.ragged, "row_pieces": held.exchange.pieces}
    bound = bind(plan, tables, features, hosts * each, held.dedup, hosts, groups, independent, **how)
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
    if ids is not None and held.hot.rows:
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
