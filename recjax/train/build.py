"""From a config to a training: data are opened, a plan is chosen, the parts are put together; and remarks on that.

A planner may have the steps of plans compiled and predicted, to compare them: then parts are put together for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recjax import settings
from recjax.config.run import HotConfig, RunConfig
from recjax.data.batch import RowLayout
from recjax.data.datasets.own_table import Table
from recjax.data.source import SPLITS, BlockSource, mean_ids, require_rows, rows_of, split_to_measure
from recjax.data.storage.blocks import PreparedSource
from recjax.embedding.plan import Plan
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig
from recjax.parallel.mesh import AXES, make_mesh
from recjax.planning.graph import read_graph
from recjax.planning.machine import Machine, open_machine
from recjax.planning.predict import HostWork, Prediction, predict
from recjax.planning.question import rows_fit
from recjax.planning.step_sizes import routed
from recjax.settings.values import written
from recjax.train.agreement import gather
from recjax.train.compile_only import abstract_batches, abstract_state
from recjax.train.first_batch import Sample, sample
from recjax.train.planned import by_machine, plan_of
from recjax.train.routers import HostRouter, PackedBatches, ResidentRows, RowForm
from recjax.train.step_log import steps_per_call
from recjax.train.table_specs import check_shared_values, specs
from recjax.train.trainer import Trainer, assemble_trainer
from recjax.train.two_sided import add_drawn, open_data
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
    state, inputs = abstract_state(trainer), abstract_batches(trainer, found.capacities)
    text = trainer.step_program.lower(state, inputs).compile().as_text() or ""
    step = read_graph(text, trainer.bound.all_devices, parts(text), trainer.config.mesh.hosts)
    return predict(step, machine, _host(trainer, found, state, inputs, machine))


def _host(trainer: Trainer, found: Sample, state: Any, inputs: PackedBatches, machine: Machine) -> HostWork:
    train, words = trainer.config.train, inputs.words_KxNxE
    shares, on_disk = train.batch_size / max(1, found.samples), isinstance(trainer.source, PreparedSource)
    of_ways = routed(trainer.bound, lambda feature: shares * found.ids_of[feature.reads])
    return HostWork(
        samples=train.batch_size,
        ids=math.ceil(shares * found.ids),
        features=len(trainer.bound.features),
        placed_bytes=words.size * words.dtype.itemsize,
        placed_arrays=len(inputs.form.words),
        arguments=len(jax.tree.leaves(state)) + 1,
        devices=trainer.bound.all_devices,
        workers=train.workers,
        routes=isinstance(trainer.router, HostRouter),
        source="resident" if trainer.resident else "packed" if on_disk else trainer.config.data.kind,
        ordered=not train.shuffle,
        hosts=1 if machine.shared else trainer.config.mesh.hosts,
        routed=of_ways,
        steps=steps_per_call(trainer),
        in_rows=isinstance(inputs.form, RowForm),
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
    if getattr(config.model, "two_sided", False):
        features = add_drawn(config, source.schema, features)
    cold = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, hot=HotConfig()))

    def predicted(plan: Plan) -> Prediction:
        log.info(f"compiling a plan for {mesh.devices.size} device(s), to compare it")
        trainer = assemble_trainer(cold, source, mesh, plan, tables, features, weights=False)
        return of_trainer(trainer, sample(trainer), machine)

    return predicted


def build_trainer(
    config: RunConfig,
    source: BlockSource | None = None,
    splits: Sequence[str] = (),
    weights: bool = True,
    rows: int | None = None,
) -> Trainer:
    """Builds all that a training needs. Starts the JAX back end.

    Args:
      config: the run's config.
      source: its data; None opens `config.data`.
      splits: those that must have rows, so that a run does not find out at its end.
      weights: False leaves the model without its initial weights, in shapes alone: to compile, not to run.
      rows: training samples that the settings are for; None: as many as the data have.

    Raises:
      ConfigError, DataError, DeviceError: what config, data or devices lack.
    """
    two_sided = getattr(config.model, "two_sided", False)
    if source is None:
        source = open_data(config) if two_sided else config.data.open()
    for split in splits:
        require_rows(source, split)
    config = config.for_rows(int(source.row_counts("train").sum()) if rows is None else rows)
    if "train" in splits:  # what a run has learned otherwise stays usable
        check_shared_values(config, source)
    evaluates = splits and "train" not in splits  # by processes that read each block once
    tables, features = specs(config, source.schema, {} if evaluates else mean_ids(source))
    if two_sided:
        features = add_drawn(config, source.schema, features)
    plan, chosen, _ = plan_of(config, source, tables, features, config.mesh.shape)  # before devices start
    mesh = make_mesh(config.mesh)
    shape = tuple(mesh.shape[axis] for axis in AXES)
    predicted = judge(config, source, mesh)
    if predicted or shape != config.mesh.shape:  # of all the devices that there are
        plan, chosen, _ = plan_of(config, source, tables, features, shape, predicted)
    trainer = assemble_trainer(config, source, mesh, plan, tables, features, chosen=chosen, weights=weights)
    return dataclasses.replace(trainer, resident=resident_rows(trainer)) if "train" in splits else trainer


def resident_rows(trainer: Trainer) -> ResidentRows | None:
    """Returns the training rows that are to lie on every device, as `train.resident` says; None if the host has them.

    "auto" has them there on accelerators, where they take at most half of the memory that the state leaves free: the
    other half is for a step's temporaries. It does not on CPUs, whose devices have no memory of their own: the rows
    would be there twice, and a program takes longer to take a batch of them than the host, which does it ahead.

    Raises:
      ConfigError: they are to lie there, and cannot.
    """
    choice, count = trainer.config.train.resident, int(trainer.source.row_counts("train").sum())
    first = trainer.mesh.local_devices[0]
    limit = (first.memory_stats() or {}).get("bytes_limit", 0) if choice == "auto" and first.platform != "cpu" else 0
    if choice == "never" or (choice == "auto" and not limit):
        return None
    train, why, rows = trainer.config.train, "", None
    if trainer.router.row_form(train.batch_size, train.accumulate, trains=True) is None:
        why = "the host routes batches, or bags differ in size. Set train.routing=device if all bags are of one size"
    else:
        leaves = jax.tree.leaves(abstract_state(trainer))
        state_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
        needed = 4 * count * RowLayout(trainer.source.schema).words
        if count >= 2**31 or (limit and not rows_fit(needed, limit, state_bytes)):
            why = f"they take {needed / 1e9:,.1f} GB"
        elif (rows := rows_of(trainer.source, "train", pack=True)) is None:
            why = "the data are not prepared on disk, or could not be packed there. Prepare them, `recjax data prepare`"
    if jax.process_count() > 1:
        everywhere = gather(trainer.mesh, np.array([not why]))
        why = why or ("" if all(possible[0] for possible in everywhere) else "another process cannot")
    if why and choice == "always":
        raise ConfigError(f"train.resident=always, but {why}; or leave train.resident at auto.")
    return None if why or rows is None else ResidentRows(rows, count, trainer.source.schema, trainer.mesh)


def remarks(config: RunConfig, trainer: Trainer) -> list[str]:
    """A paragraph for each way in which the data make a training go otherwise than its config reads.

    Args:
      config: as it was asked for.
      trainer: of the run; its config is that for so many training samples.
    """
    data = [*_unread(config), *_smaller(config, trainer), *_unvalidated(trainer), *_untested(trainer)]
    return [*data, *_without_bottom(trainer), *_always_whole(trainer)]


def _unread(config: RunConfig) -> list[str]:
    """Returns a note where prepared data are read, and not the files that are named beside them."""
    data = config.data
    if not isinstance(data, Table) or not (data.path and data.from_):
        return []
    return [
        f"data.path={data.path} is read, and not data.from={data.from_}: leave data.path out to train on the files, or "
        "data.from to leave no doubt"
    ]


def _smaller(config: RunConfig, trainer: Trainer) -> list[str]:
    """Returns a note where settings give way to those for few samples."""
    if trainer.config == config:
        return []
    samples = int(trainer.source.row_counts("train").sum())
    if samples >= config.small.below_rows:
        return [
            f"train.batch_size is {config.train.batch_size:,}, but the training split has {samples:,} samples: each "
            "step takes all of them"
        ]
    why = config.small.reasons()
    instead = []
    for key, _, new in settings.diff(config, trainer.config):
        if new is not None:
            reason = next((text for name, text in why.items() if settings.matches(key, [name])), "")
            instead.append(f"{key}={written(new)}" + f" ({reason})" * bool(reason))
    return [
        f"the training split has {samples:,} samples, fewer than small.below_rows={config.small.below_rows:,}, so "
        f"small.* holds instead of the recipe: {', '.join(instead)}. Settings that an override gives are kept; those "
        "of a config from Python or a config.json give way. Set small.* to change them; small.below_rows=0 keeps the "
        "recipe."
    ]


def _unvalidated(trainer: Trainer) -> list[str]:
    """Returns a note where there is no split that could choose a step."""
    source, patience = trainer.source, trainer.config.train.patience
    if source.row_counts("validation").sum() > 0:
        return []
    there = ", ".join(split for split in SPLITS if source.row_counts(split).sum() > 0)
    early = f", and train.patience={patience} stops nothing" if patience else ""
    return [
        f"{source.name} has no validation split (it has {there}): the result is that of the last step, for nothing "
        f"chooses an earlier one{early}"
    ]


def _untested(trainer: Trainer) -> list[str]:
    """Returns a note where there is no test split."""
    split = split_to_measure(trainer.source)
    if split == "test":
        return []
    instead = "nothing is measured"
    if split:
        instead = "the results are those of the validation split, which has chosen the step and so flatters them"
    return [f"{trainer.source.name} has no test split, so there is no test line: {instead}"]


def _without_bottom(trainer: Trainer) -> list[str]:
    """Returns a note where the data leave a bottom MLP nothing to see."""
    model = trainer.config.model
    if trainer.source.schema.dense or not isinstance(model, DLRMConfig | DCNv2Config) or not model.bottom:
        return []
    return [
        f"the data have no dense features, so the model has no bottom MLP: model.bottom={written(model.bottom)} is not "
        "used, and the embeddings interact alone"
    ]


def _always_whole(trainer: Trainer) -> list[str]:
    """A remark where increments are asked for and each checkpoint is whole all the same."""
    most = trainer.config.train.checkpoint_increments
    if not most or trainer.makes_increments:
        return []
    why = "there are several processes" if trainer.bound.cached else "all rows are on the devices"
    return [f"train.checkpoint_increments={most} changes nothing, each checkpoint is whole: {why}"]
