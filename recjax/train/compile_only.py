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

from recjax.data.batch import Bags, Batch
from recjax.embedding.routing import device, host
from recjax.embedding.spec import FeatureSpec
from recjax.parallel.mesh import BATCH_AXES, Share
from recjax.parallel.packed import PackedForm
from recjax.train.late import like
from recjax.train.module import kept_dtype, kept_state, parameters
from recjax.train.routers import WORDS, DeviceRouter, HostRouter, PackedBatches, RowForm, StepInputs, pad
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
        shape = own.shape((own.width,))
        tables[group.name] = jax.ShapeDtypeStruct(shape, group.storage_dtype(trainer.dtype))
        own = group.slot_group
        slots[group.name] = {
            name: jax.ShapeDtypeStruct(own.shape(slot.shape), trainer.dtype) for name, slot in group.slots().items()
        }
    step, ok = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    whole = dense
    dense, opt = jax.eval_shape(trainer.dense.hold, dense, jax.eval_shape(trainer.tx.init, dense))
    kept = kept_state(trainer.model)
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, kept_dtype(x, trainer.dtype)), kept)
    late = trainer.options.late
    sums: Any = like(whole, trainer.mesh) if late else {}
    rates = jax.ShapeDtypeStruct(trainer.learning_rates.shape, trainer.learning_rates.dtype)
    state = TrainState(step, ok, dense, opt, tables, slots, module=kept, late=sums, rates=rates)
    return _placed(trainer, state, state_specs(trainer.bound, trainer.dense, late))


def abstract_inputs(trainer: Trainer, capacities: dict[str, int]) -> StepInputs:
    """The shapes, dtypes and shardings of what `Trainer.place` makes of a training batch.

    Args:
      trainer: of the run.
      capacities: as `pack_words` takes them.
    """
    return _placed(trainer, _without_samples(trainer, capacities, on_host=True), P(BATCH_AXES))


def abstract_batches(trainer: Trainer, capacities: dict[str, int], steps: int = 1) -> PackedBatches:
    """The shape of what the trainer's router makes of so many training batches; arguments as for `abstract_inputs`."""
    train, devices, router = trainer.config.train, trainer.bound.all_devices, trainer.router
    form: PackedForm | RowForm | None = router.row_form(train.batch_size, train.accumulate, trains=True)
    if form is None:
        form = PackedForm.of(_without_samples(trainer, capacities, isinstance(router, HostRouter)), devices)
    shape = (steps, devices, sum(form.words))
    words = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(trainer.mesh, WORDS))
    rows_RxW = router.resident.shape if isinstance(router, DeviceRouter) and router.resident else None
    return PackedBatches(words, form, router.sizes(capacities), rows_RxW)


def _without_samples(trainer: Trainer, capacities: dict[str, int], on_host: bool) -> StepInputs:
    """The shapes and dtypes of a batch, by laying out one without samples for a few of the devices.

    Args:
      trainer: of the run.
      capacities: as `pack_words` takes them.
      on_host: whether the host routes, or leaves that to the devices.
    """
    bound, schema, train = trainer.bound, trainer.source.schema, trainer.config.train
    few = bound.devices // bound.hosts if bound.hosts > 1 else 1  # those of a host are routed together
    share = Share(bound.all_devices, 0, few)
    bags = {feature.reads: _no_bags(feature) for feature in bound.features}
    labels = np.zeros((0, len(schema.labels)) if schema.labels else (0,), np.float32)
    lengths = np.zeros(0, np.int32) if schema.label_group else None
    batch = Batch(np.zeros((0, len(schema.dense)), np.float32), bags, labels, labels, label_lengths=lengths)
    if on_host:
        routed = host.route_on_host(batch, bound, train.batch_size, train.accumulate, share)
        slots = {group.name: np.empty(0, np.int32) for group in bound.groups if group.cached}
        routing = host.pack(dataclasses.replace(routed, slots=slots), bound, capacities, trainer.dtype)
        laid_out = pad(routed, routing, trainer.router)
    else:
        routed = device.count_ids(batch, bound, train.batch_size, train.accumulate, share)
        laid_out = trainer.router.lay_out(routed, capacities)

    def of_all(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(x) // few * bound.all_devices, *x.shape[1:]), x.dtype)

    shapes: StepInputs = jax.tree.map(of_all, laid_out)
    return shapes


def _no_bags(feature: FeatureSpec) -> Bags:
    """The bags of no sample."""
    jagged = feature.bag is None
    ids = np.zeros(0 if jagged else (0, feature.bag or 0), np.int32)
    weights = np.zeros(ids.shape, np.float32) if feature.weighted else None
    return Bags(ids, np.zeros(0, np.int32) if jagged else None, weights)


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
