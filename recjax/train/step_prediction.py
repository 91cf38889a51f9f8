"""A training step predicted on a machine from its compiled program; and plans that a planner compares in that way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from recjax.config.run import HotConfig, RunConfig
from recjax.data.source import BlockSource, mean_ids
from recjax.embedding.plan import Plan
from recjax.embedding.routing import device
from recjax.planning.graph import Graph, joined, read_graph
from recjax.planning.machine import Machine
from recjax.planning.machine_file import open_machine
from recjax.planning.predict import HostWork, Prediction, predict
from recjax.planning.routed import routed
from recjax.train.compile_only import abstract_inputs, abstract_state
from recjax.train.first_batch import Sample, sample
from recjax.train.planned import by_machine
from recjax.train.routers import HostRouter
from recjax.train.table_specs import specs
from recjax.train.trainer import Trainer, assemble_trainer
from recjax.utils import log


def of_trainer(
    trainer: Trainer, found: Sample, machine: Machine, parts: Callable[[str], Mapping[str, str]] = lambda text: {}
) -> Prediction:
    """The step of a trainer, which is compiled for it.

    Args:
      trainer: of the run; shapes suffice.
      found: sizes of its first batch.
      machine: to predict it on.
      parts: from the text of the compiled step to the part of the step of each instruction, where its phase is not all
        that is to be said of it.
    """
    state, inputs = abstract_state(trainer), abstract_inputs(trainer, found.capacities)
    text = trainer.step_program.lower(state, inputs).compile().as_text() or ""
    devices, hosts = trainer.bound.all_devices, trainer.config.mesh.hosts
    step = read_graph(text, devices, parts(text), hosts)
    host = _host(trainer, found, state, inputs, machine)
    if host.routes:
        return predict(step, machine, host)
    programs = device.programs(trainer.bound, trainer.mesh, inputs.routing.features, found.capacities)
    routing = [read_graph(of.as_text() or "", devices, hosts=hosts) for of in programs]
    routing = [Graph(tuple(dataclasses.replace(n, part="route") for n in of.nodes), of.unknown) for of in routing]
    arguments = tuple(len(jax.tree.leaves(of.in_avals)) for of in programs)
    return predict(joined([*routing, step]), machine, dataclasses.replace(host, route_arguments=arguments))


def _host(trainer: Trainer, found: Sample, state: Any, inputs: Any, machine: Machine) -> HostWork:
    train, placed = trainer.config.train, jax.tree.leaves(inputs)
    shares = train.batch_size / max(1, found.samples)
    of_ways = routed(trainer.bound, lambda feature: shares * found.ids_of[feature.reads])
    return HostWork(
        samples=train.batch_size,
        ids=math.ceil(shares * found.ids),
        features=len(trainer.bound.features),
        placed_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in placed),
        placed_arrays=len(placed),
        arguments=len(jax.tree.leaves(state)) + len(placed),
        devices=trainer.bound.all_devices,
        workers=train.workers,
        routes=isinstance(trainer.router, HostRouter),
        source=trainer.config.data.kind,
        ordered=not train.shuffle,
        hosts=1 if machine.shared else trainer.config.mesh.hosts,
        routed=of_ways,
    )


def judge(config: RunConfig, source: BlockSource, mesh: Mesh) -> Callable[[Plan], Prediction] | None:
    """A prediction of the compiled step for each plan that a planner asks about; None if sizes alone are to decide.

    Args:
      config: of the run, as it is for so many rows.
      source: its data.
      mesh: whose devices it compiles for. Where they are of another platform than the machine that it plans for, their
        program says too little of that; and rows on the host have one place there, not one for each plan.
    """
    if not (by_machine(config) and config.planner.compile):
        return None
    machine, platform = open_machine(config.planner.machine), mesh.devices.flat[0].platform
    why = f"{machine.name} is a {machine.platform}, this is a {platform}" if machine.platform != platform else ""
    if config.tier.bytes_of("device_bytes"):
        why = "tier.device_bytes is set"
    if why:
        log.info(f"planner.compile: {why}: sizes alone decide")
        return None
    tables, features = specs(config, source.schema, mean_ids(source))
    cold = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, hot=HotConfig()))

    def predicted(plan: Plan) -> Prediction:
        log.info(f"compiling a plan for {mesh.devices.size} device(s), to compare it")
        trainer = assemble_trainer(cold, source, mesh, plan, tables, features, weights=False)
        return of_trainer(trainer, sample(trainer), machine)

    return predicted
