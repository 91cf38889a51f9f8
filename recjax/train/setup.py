"""From a config to what the loop needs: mesh, bound tables, model, and the compiled steps."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recjax.config.run import FeatureConfig, RunConfig, TableConfig
from recjax.data.batch import Batch, Schema
from recjax.data.pipeline import batches
from recjax.data.source import BlockSource, between, require_rows
from recjax.embedding import replica_groups
from recjax.embedding.bind import bind
from recjax.embedding.layout import BoundPlan
from recjax.embedding.plan import EXACT, Plan, make_plan
from recjax.embedding.routing import host
from recjax.embedding.routing.capacity import grow
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.models.layers import LINEAR
from recjax.parallel import watchdog
from recjax.parallel.mesh import AXES, make_mesh, whole
from recjax.settings.values import either
from recjax.train import routers
from recjax.train import state as states
from recjax.train.agreement import AskedToStop, agreed, never
from recjax.train.checkpoint.checkpoints import Restored
from recjax.train.dense import Dense, make_dense
from recjax.train.module import built
from recjax.train.step import StepOptions, make_predict, make_train_step
from recjax.train.step_inputs import StepInputs


def specs(config: RunConfig, schema: Schema) -> tuple[tuple[TableSpec, ...], tuple[FeatureSpec, ...]]:
    """One lookup for each categorical feature of the data, in their order, and one table unless it shares another's.

    A model with first-order weights has behind these a table and lookup `f.linear` of D=1 for each feature f,
    which start at 0 and look up the same ids; its config says what updates them (None: what updates the others).
    Features that share a table share these too. They are always pooled: by sum where the feature itself is not.

    Raises:
      ConfigError: settings of a table or feature that does not exist, a table that cannot be shared, or a feature that
        is not pooled although the model takes no sequences.
    """
    embedding = config.embedding
    table_of = _shares(embedding.features, schema)
    narrow: Any = {"dtype": embedding.dtype, "rounding": embedding.rounding}
    tables = [
        TableSpec(f.name, f.rows, embedding.dim, embedding.optimizer, embedding.init_scale, **narrow)
        for f in schema.features
        if table_of[f.name] == f.name
    ]
    features = []
    for f in schema.features:
        pooling = embedding.features.get(f.name, FeatureConfig()).pooling or embedding.pooling
        features.append(FeatureSpec(f.name, table_of[f.name], f.bag, pooling, f.weighted))
    unpooled = [f.name for f in features if f.pooling == "none"]
    if unpooled and not getattr(config.model, "sequences", False):
        raise ConfigError(
            f"pooling is none for {', '.join(unpooled)}, but model={config.model.kind} takes one vector for each "
            f"feature. Set embedding.features.{unpooled[0]}.pooling=mean (or sum), or use a model of your own that "
            "takes sequences: see `Your own model` in the README."
        )
    if getattr(config.model, "first_order", False):
        optimizer = getattr(config.model, "linear", None) or embedding.optimizer
        tables += [TableSpec(t.name + LINEAR, t.rows, 1, optimizer, init_scale=0, **narrow) for t in tables]
        for spec in tuple(features):
            first = dataclasses.replace(spec, name=spec.name + LINEAR, table=spec.table + LINEAR, source=spec.name)
            features.append(dataclasses.replace(first, pooling="sum") if spec.pooling == "none" else first)
    names = [t.name for t in tables]
    for name, own in embedding.tables.items():
        if name not in names:
            where = f": that feature uses the table of {table_of[name]}" if table_of.get(name, name) != name else ""
            raise ConfigError(f"embedding.tables.{name}: there is no table {name!r}{where}. {_nearest(name, names)}")
        if name.removesuffix(LINEAR) in names[: names.index(name)] and own.dim not in (None, 1):
            raise ConfigError(f"embedding.tables.{name}.dim is {own.dim}; first-order weights are one number a row.")
    return tuple(_with_own(table, embedding.tables) for table in tables), tuple(features)


def _shares(settings: Mapping[str, FeatureConfig], schema: Schema) -> dict[str, str]:
    """Feature name -> name of the feature whose table it uses, mostly its own; ConfigError if that cannot be."""
    names = [f.name for f in schema.features]
    for name in settings:
        if name not in names:
            raise ConfigError(f"embedding.features.{name}: the data have no feature {name!r}. {_nearest(name, names)}")
    shares = {name: settings.get(name, FeatureConfig()).share or name for name in names}
    for name, other in shares.items():
        key = f"embedding.features.{name}.share={other}"
        if other not in names:
            raise ConfigError(f"{key}: the data have no feature {other!r}. {_nearest(other, names)}")
        if shares[other] != other:
            raise ConfigError(f"{key}: {other} itself uses the table of {shares[other]}. Name that one.")
        rows, other_rows = schema.feature(name).rows, schema.feature(other).rows
        if rows != other_rows:
            raise ConfigError(
                f"{key}: {name} has {rows:,} rows and {other} has {other_rows:,}; to share a table, equal ids must "
                "mean the same in both. Prepare the data with one vocabulary for both features."
            )
    return shares


def _with_own(table: TableSpec, settings: Mapping[str, TableConfig]) -> TableSpec:
    """The table with what is set for it alone; the two classes' fields have equal names."""
    own = settings.get(table.name, TableConfig())
    values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    return dataclasses.replace(table, **{name: value for name, value in values.items() if value is not None})


def _nearest(name: str, names: Sequence[str]) -> str:
    """The end of an error message: the names that are most similar, or else the first ones."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"Did you mean {either(close)}?" if close else f"There are {', '.join(names[:10])}{more}."


def dims(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> dict[str, int]:
    """D of every lookup, by its name and in their order: what a model is built for."""
    by_table = {t.name: t.dim for t in tables}
    return {f.name: by_table[f.table] for f in features}


@dataclasses.dataclass(frozen=True)
class Setup:
    """The fixed parts of a run.

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

    def new_state(self) -> states.TrainState:
        """The state before the first step."""
        return states.create(self.model, self.bound, self.mesh, self.tx, self.config.seed, self.dtype, self.dense)

    def saved_state(self, saved: Restored) -> states.TrainState:
        """The state that a checkpoint holds."""
        return states.from_host(
            saved.arrays, saved.step, self.model, self.bound, self.mesh, self.tx, self.dtype, self.dense
        )

    @functools.cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """See `make_train_step`."""
        train = self.config.train
        options = StepOptions(train.clip_norm, train.accumulate, train.schedule.factor, self.config.seed)
        return make_train_step(nnx.graphdef(self.model), self.bound, self.mesh, self.tx, options, self.dense)

    @property
    def averages(self) -> bool:
        """Whether independent replica groups take the mean of their tables, every `train.average_every` steps."""
        return self.bound.independent and self.config.train.replica_sync == "average"

    def averaged(self, state: states.TrainState) -> states.TrainState:
        """The state with the means of all replica groups' tables and slots; it takes the place of the given one."""
        tables, slots = self._average(state.tables, state.slots, state.ok)
        return dataclasses.replace(state, tables=tables, slots=slots)

    @functools.cached_property
    def _average(self) -> Any:
        return replica_groups.make_average(self.bound, self.mesh)

    @functools.cached_property
    def predict(self) -> jax.stages.Wrapped:
        """See `make_predict`."""
        return make_predict(nnx.graphdef(self.model), self.bound, self.mesh, self.dense)

    @functools.cached_property
    def router(self) -> routers.Router:
        """Who routes, as `train.routing` says."""
        choice = self.config.train.routing
        if choice == "auto":
            ids = self.config.train.batch_size * sum(f.bag or 1 for f in self.bound.features)
            accelerated = self.mesh.devices.flat[0].platform != "cpu"
            choice = "device" if accelerated and ids >= routers.MANY_IDS else "host"
        make = routers.DeviceRouter if choice == "device" else routers.HostRouter
        return make(self.bound, self.mesh, self.dtype)

    def counted(
        self,
        split: str,
        batch_size: int,
        parts: int = 1,
        whole: bool = False,
        stop: Callable[[], int] = never,
        save: Callable[[], int] = never,
        **options: Any,
    ) -> Iterator[host.Counted]:
        """Batches of a split, checked and counted by worker threads ahead of time.

        Args:
          split: which.
          batch_size: B.
          parts: as for `route.count`.
          whole: each of several processes reads all of each batch, instead of only its own samples.
          stop: asked before each batch, as for `agreed`.
          save: likewise.
          **options: further arguments of `batches`.
        """
        share = self.router.share
        mine = host.samples_of(share, batch_size, parts)

        def count(batch: Batch) -> host.Counted:
            with jax.profiler.TraceAnnotation("count"):
                if not whole or share.count == share.total:
                    return self.router.count(batch, batch_size, parts)
                own = between(batch, *(min(edge, batch.size) for edge in mine))
                return dataclasses.replace(self.router.count(own, batch_size, parts), whole=batch)

        part = None if whole or share.count == share.total else mine
        workers = self.config.train.workers
        stream = batches(self.source, split, batch_size, transform=count, workers=workers, part=part, **options)
        return agreed(stream, self.mesh, stop, save)

    def place(self, counted: host.Counted, capacities: dict[str, int]) -> StepInputs:
        """Lays one counted batch out on the mesh, with these capacities or, where it needs more, grown ones."""
        begun = self.router.begin(counted, grow(capacities, counted.needs))
        return self.router.finish(begun, grow(capacities, begun.needs))

    def predictions(
        self, state: states.TrainState, split: str, stop: Callable[[], int] = never
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        """The samples of a split, batch by batch in the order of the prepared data, and their logits: float64 [B].

        Raises:
          AskedToStop: `stop` of any process has said so.
        """
        size = min(self.config.train.eval_batch_size, max(1, int(self.source.row_counts(split).sum())))
        return self.logits(state, self.counted(split, size, whole=True, epochs=1, stop=stop))

    def logits(self, state: states.TrainState, stream: Iterable[host.Counted]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Each counted batch of a stream, whole, and its logits: float64 [B]."""
        sizes: dict[str, int] = {}
        before: tuple[Batch, jax.Array] | None = None  # a prediction under way while the next one is prepared
        for begun in routers.ahead(self.router, iter(stream), lambda needs: functools.reduce(grow, needs, sizes)):
            if begun.counted.stop:
                raise AskedToStop(begun.counted.stop)
            sizes.update(grow(sizes, begun.needs))
            watchdog.phase("dispatch")
            counted, prediction = begun.counted, self.predict(state, self.router.finish(begun, sizes))
            watchdog.phase("wait")
            if before:
                yield _rows(*before)
            before = counted.whole or counted.batch, prediction
        if before:
            yield _rows(*before)
        watchdog.phase("report")  # what is made of them is each process's own work


def _rows(batch: Batch, logits: jax.Array) -> tuple[Batch, np.ndarray]:
    return batch, whole(logits).astype(np.float64)[: batch.size]


def _refuse_reduced(plan: Plan, tables: Sequence[TableSpec]) -> None:
    """Refuses what would round in a float64 run, which is there to be exact (ConfigError)."""
    for table in tables:
        if table.dtype != "float32":
            raise ConfigError(
                f"compute_dtype is float64, but table {table.name!r} is to hold {table.dtype}. Leave embedding.dtype "
                "(and embedding.tables.*.dtype) at float32, which stands for float64 in such a run."
            )
    for name, segments in plan.tables.items():
        if any(segment.exchange != EXACT for segment in segments):
            raise ConfigError(
                f"compute_dtype is float64, but the rows or gradients of table {name!r} are to travel in a reduced "
                "precision. Leave embedding.exchange and the plan's exchange at float32, which sends float64 as it is."
            )


def make_setup(
    config: RunConfig, source: BlockSource | None = None, splits: Sequence[str] = (), weights: bool = True
) -> Setup:
    """Builds everything that a run needs. Starts the JAX back end.

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
    plan = make_plan(config.plan, tables, config.embedding.exchange)
    mesh = make_mesh(config.mesh)
    if config.compute_dtype == "float64":
        _refuse_reduced(plan, tables)
        jax.config.update("jax_enable_x64", True)
    dtype = jnp.float64 if config.compute_dtype == "float64" else jnp.float32
    build = functools.partial(
        config.model.build,
        len(source.schema.dense),
        dims(tables, features),
        dtype=jnp.dtype(config.compute_dtype),
        seed=config.seed,
    )
    model = built(config.model, build if weights else functools.partial(nnx.eval_shape, build))
    groups, hosts, each = (mesh.shape[axis] for axis in AXES)
    independent = config.train.replica_sync != "exact"
    bound = bind(plan, tables, features, hosts * each, config.embedding.dedup, hosts, groups, independent)
    tx = config.train.optimizer.build()
    dense = make_dense(config.train.dense, config.train.bucket_mib, model, tx, dtype, mesh.devices.size)
    return Setup(config, source, mesh, plan, bound, model, tx, dtype, dense)
