"""A config's own training step, compiled for devices that hold nothing: shapes go in, and no array is made.

What XLA compiles is one program for all devices, so that neither the number of devices nor the size of the tables
asks for memory here. On CPU the devices are host devices, as many as the mesh has (see `mesh.make_mesh`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recjax.embedding.layout import ACROSS, SUMMED, Group
from recjax.embedding.lines import buffer_shape
from recjax.embedding.low_precision import storage_dtype
from recjax.embedding.pooled.layout import PooledExchange
from recjax.embedding.pooled.routing import PooledRouting
from recjax.embedding.routing.host import local_samples
from recjax.embedding.routing.routed import FeatureRouting, GroupRouting, Routing
from recjax.embedding.spec import FeatureSpec
from recjax.parallel.mesh import BATCH_AXES
from recjax.parallel.packed import PackedForm
from recjax.train.late import like
from recjax.train.module import kept_dtype, kept_state, parameters
from recjax.train.routers import WORDS, HostRouter, PackedBatches, StepInputs
from recjax.train.state import TrainState
from recjax.train.step import state_specs
from recjax.train.trainer import Trainer


def abstract_state(trainer: Trainer) -> TrainState:
    """The shapes, dtypes and shardings of `Trainer.init_state()`. `trainer.model` may itself be shapes alone."""
    dense = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, trainer.dtype), parameters(trainer.model))
    tables: Any = {}
    slots: Any = {}
    for group in trainer.bound.groups:
        own = group.value_group
        shape = buffer_shape(own, (own.width,), own.versions * own.parts)
        tables[group.name] = jax.ShapeDtypeStruct(shape, storage_dtype(group, trainer.dtype))
        own = group.slot_group
        slots[group.name] = {
            name: jax.ShapeDtypeStruct(buffer_shape(own, slot.shape, own.versions * own.parts), trainer.dtype)
            for name, slot in group.slots().items()
        }
    step, ok = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    whole = dense
    dense, opt = jax.eval_shape(trainer.dense.hold, dense, jax.eval_shape(trainer.tx.init, dense))
    kept = kept_state(trainer.model)
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kept_dtype(x, trainer.dtype)), kept)
    late = trainer.options.late
    sums: Any = like(whole, trainer.mesh) if late else {}
    state = TrainState(step, ok, dense, opt, tables, slots, module=kept, late=sums)
    return _placed(trainer, state, state_specs(trainer.bound, trainer.dense, late))


def abstract_inputs(trainer: Trainer, capacities: dict[str, int]) -> StepInputs:
    """The shapes, dtypes and shardings of what `Trainer.place` makes of a training batch.

    Args:
      trainer: of the run.
      capacities: as `pack_words` takes them.
    """
    train, devices = trainer.config.train, trainer.bound.all_devices
    parts = devices * train.accumulate
    samples = local_samples(train.batch_size, devices, train.accumulate) // train.accumulate  # of one part
    groups = {g.name: _group(g, capacities) for g in trainer.bound.fetching}
    pooled = {e.name: _pooled(trainer, e, samples * train.accumulate, capacities) for e in trainer.bound.pooled}
    features: dict[str, FeatureRouting] = {}
    for lookup in trainer.bound.lookups:
        features[lookup.name] = _feature(trainer, lookup.spec, parts, samples, capacities)
    dense_BxK = jax.ShapeDtypeStruct((parts * samples, len(trainer.source.schema.dense)), trainer.dtype)
    T = len(trainer.source.schema.labels)
    each_B = jax.ShapeDtypeStruct((parts * samples, T) if T else (parts * samples,), trainer.dtype)
    items = {}
    if trainer.item_keys is not None:
        shapes = trainer.item_keys.shapes(parts * samples, trainer.dtype)
        items = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}
    inputs = StepInputs(dense_BxK, each_B, each_B, Routing(groups, features, pooled), items)
    return _placed(trainer, inputs, P(BATCH_AXES))


def abstract_batches(trainer: Trainer, capacities: dict[str, int], steps: int = 1) -> PackedBatches:
    """The shape of what the trainer's router makes of so many training batches; arguments as for `abstract_inputs`."""
    inputs, devices = abstract_inputs(trainer, capacities), trainer.bound.all_devices
    routes = isinstance(trainer.router, HostRouter)
    if not routes:
        inputs = dataclasses.replace(inputs, routing=dataclasses.replace(inputs.routing, groups={}))
    form = PackedForm.of(inputs, devices)
    shape = (steps, devices, sum(form.words))
    words = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(trainer.mesh, WORDS))
    return PackedBatches(words, form, trainer.router.sizes(capacities))


def _group(group: Group, capacities: dict[str, int]) -> GroupRouting:
    if not group.listed:
        touched = jax.ShapeDtypeStruct((group.all_devices, group.rows), np.bool_)
        return GroupRouting(None, None, touched_NxR=touched)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((group.all_devices, *shape), np.int32)

    C, summed = capacities[group.name], capacities.get(group.name + SUMMED, 0)
    if not group.two_step:
        return GroupRouting(ints(group.owners, C), ints(group.owners), summed=summed)
    across, E = capacities[group.name + ACROSS], group.per_host
    return GroupRouting(ints(group.num_peers, across), ints(group.num_peers), ints(E, C), ints(E), summed)


def _pooled(trainer: Trainer, exchange: PooledExchange, b: int, capacities: dict[str, int]) -> PooledRouting:
    devices = trainer.bound.all_devices
    lists = (devices, exchange.devices, capacities[exchange.name])
    ids = jax.ShapeDtypeStruct(lists, np.int32)
    divided = any(g.divides_row_means and own for g, own in zip(exchange.groups, exchange.streams, strict=True))
    return PooledRouting(
        ids,
        jax.ShapeDtypeStruct(lists[:2], np.int32),
        jax.ShapeDtypeStruct(lists, trainer.dtype) if exchange.weighted else None,
        {f.name: jax.ShapeDtypeStruct((devices * b,), trainer.dtype) for f in exchange.features if f.pooling == "mean"},
        ids if divided else None,
        exchange.sizes(capacities),
    )


def _feature(
    trainer: Trainer, feature: FeatureSpec, parts: int, samples: int, capacities: dict[str, int]
) -> FeatureRouting:
    shape: tuple[int, ...]
    if feature.bag is not None:
        shape = (parts * samples, feature.bag)
    elif feature.pooling == "none":
        shape = (parts * samples, capacities[feature.name])
    else:
        shape = (parts * capacities[feature.name],)
    weighted = feature.weighted or feature.pooling == "mean"
    ids = jax.ShapeDtypeStruct(shape, np.int32)
    return FeatureRouting(
        ids, jax.ShapeDtypeStruct(shape, trainer.dtype) if weighted else None, ids if len(shape) == 1 else None
    )


def _placed(trainer: Trainer, tree: Any, specs: Any) -> Any:
    """The shapes with the shardings of `specs`, a tree that may end before `tree` does."""

    def place(spec: Any, part: Any) -> Any:
        sharding = NamedSharding(trainer.mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def compile_step(trainer: Trainer, capacities: dict[str, int], kernels: bool = False) -> jax.stages.Compiled:
    """The compiled training step of a trainer, to be read and not to be run.

    On CPU machine code is made in the cheapest way that this version of XLA has, since nobody runs it.

    Args:
      trainer: of the run.
      capacities: as `pack_words` takes them.
      kernels: whether the text has to be that of the step as it runs, kernel by kernel. Otherwise operations may be
        fused in another way, which is faster on CPU with JAX 0.10 (of model A for 128 devices 8 s and not 34 s, where
        code to be run takes 65): collectives are the same, and temporaries were within 0.01% in every program compared.
    """
    lowered = trainer.step_program.lower(abstract_state(trainer), abstract_batches(trainer, capacities))
    if trainer.mesh.devices.flat[0].platform != "cpu":
        return lowered.compile()
    plain: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if kernels:
        return lowered.compile(plain)
    try:
        return lowered.compile(plain | {"xla_cpu_use_fusion_emitters": False})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):  # JAX 0.12 has lost it
            raise
        return lowered.compile(plain)
