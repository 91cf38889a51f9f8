"""The plan of a run: by a machine where the config names one, else as its `plan` says; and what a run folder has of it.

    RUN/plan.json      the plan that was chosen
    RUN/choice.json    for which mesh, what else was chosen, and why
    RUN/machine.json   the machine that it was chosen for

On the mesh that it was chosen for, a run goes on with its plan, whatever machine it is on now. On another one it is
planned again, for the machine of the run folder.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from recjax import settings
from recjax.config.run import HotConfig, RunConfig
from recjax.data.batch import RowLayout, Schema
from recjax.data.source import BlockSource, mean_ids
from recjax.data.storage.blocks import PreparedSource
from recjax.embedding.bind import with_owners
from recjax.embedding.layout import BoundPlan
from recjax.embedding.plan import Plan
from recjax.embedding.routing.host import devices_route
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.parallel.mesh import AXES
from recjax.planning.assign import Assignment, Demand, sizes
from recjax.planning.hot import Choice
from recjax.planning.machine import Machine, open_machine
from recjax.planning.machine import write as write_machine
from recjax.planning.planner import Planner, answer, by_thresholds, reason
from recjax.planning.predict import HostWork, Prediction
from recjax.planning.question import GIB, Answer, Question
from recjax.planning.resolve import add_hot_rows, resolve, workload
from recjax.planning.step_sizes import DenseSizes, total_ids
from recjax.planning.tier_choice import choose, room
from recjax.train.module import parameters
from recjax.train.routers import RowForm
from recjax.train.run import sources
from recjax.train.table_specs import dims, specs
from recjax.train.tasks import outputs_for, tasks_of
from recjax.utils import strict_json
from recjax.utils.files import write_json, write_whole

CHOICE, MACHINE = "choice.json", "machine.json"  # in a run folder, beside `sources.PLAN`
# Changes that may make a plan fit: those that change no number, then those that do.
_SAME_NUMBERS = ("train.dense=sharded", "train.accumulate=2", "train.accumulate=4", "train.accumulate=8")
_OTHER_NUMBERS = ("embedding.dtype=bfloat16", "embedding.optimizer=sgd", "train.batch_size={half}")
_SIZES = 4  # of caches that are tried beside these


def plan_of(
    config: RunConfig,
    source: BlockSource,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    shape: tuple[int, int, int],
    judge: Callable[[Plan], Prediction] | None = None,
) -> tuple[Plan, Answer | None, Choice | None]:
    """Returns the plan of a run on a mesh, the planner's answer if that chose it, and how hot rows were chosen, if any.

    The arguments are those of `resolve`, and `judge` of `answer`.

    Raises:
      ConfigError: as for `make_plan`; there is no such machine; or no plan fits its memory: the message names the
        cheapest change with which one would.
      DataError: the data cannot be read, or the machine's file is none.
    """
    if not by_machine(config):
        plan, hot = resolve(config, source, tables, features, shape)
        return plan, None, hot
    machine = open_machine(config.planner.machine)
    asked = question(config, source, machine, shape)
    plain = _plain(config, source, asked, shape)
    found = answer(asked, plain, judge=judge) or choose(asked, plain, config, source)
    if isinstance(found, str):
        raise ConfigError(does_not_fit(config, source, machine, asked, plain, found))
    left = asked.budget_bytes - found.memory["total"]
    plan, hot = add_hot_rows(found.plan, config, source, tables, features, shape, left)
    return plan, dataclasses.replace(found, plan=plan), hot


def _plain(config: RunConfig, source: BlockSource, asked: Question, shape: tuple[int, int, int]) -> Plan:
    """The plain rule's plan, without hot rows: these are added to the plan that is chosen."""
    without = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, hot=HotConfig()))
    return resolve(without, source, asked.demand.tables, asked.demand.features, shape)[0]


def by_machine(config: RunConfig) -> bool:
    """True if a planner chooses the plan."""
    return config.plan == "auto" and bool(config.planner.machine)


def require_asked(config: RunConfig) -> None:
    """Refuses a planner's machine in a config whose plan is not for a planner to choose (ConfigError)."""
    if config.planner.machine and config.plan != "auto":
        raise ConfigError(
            f"planner.machine={config.planner.machine} chooses where tables live, but plan={config.plan} has said so "
            "already. Set plan=auto, or leave planner.machine out."
        )


def question(
    config: RunConfig, source: BlockSource, machine: Machine, shape: tuple[int, int, int] | None = None
) -> Question:
    """Returns the question about a run.

    Args:
      config: of the run, as it is for so many rows.
      source: its data.
      machine: to plan for.
      shape: of the mesh; None takes that of the config.
    """
    shape = shape or config.mesh.shape
    tables, features = specs(config, source.schema, mean_ids(source))
    work, train = workload(config, source, tables, features, shape), config.train
    dense, ids = dense_sizes(config, source.schema, tables, features), total_ids(work, tables)
    on_device = devices_route(train.routing, machine.platform, not config.embedding.hot.refresh)
    layout, on_disk = RowLayout(source.schema), isinstance(source, PreparedSource)
    in_rows = on_device and not getattr(config.model, "two_sided", False) and RowForm.fits(layout, features)
    row_bytes = 4 * layout.words * int(source.row_counts("train").sum()) if on_disk and in_rows else 0
    if train.resident == "never" or (train.resident == "auto" and machine.shared):
        row_bytes = 0
    host = HostWork(
        samples=train.batch_size,
        ids=math.ceil(ids),
        features=len(features),
        placed_bytes=round(train.batch_size * (len(source.schema.dense) + 2) * work.item_bytes + 4 * ids),
        placed_arrays=3 + len(features),
        arguments=3 + len(features) + (1 + dense.slots) * dense.leaves,
        devices=math.prod(shape),
        workers=train.workers,
        routes=not on_device,
        source="packed" if on_disk else config.data.kind,
        ordered=not train.shuffle,
        hosts=1 if machine.shared else config.mesh.hosts,
        steps=train.wanted_steps(machine.platform, math.prod(shape)),
        in_rows=in_rows,
    )
    demand = Demand(tables, features, work, config.embedding.exchange, not on_device)
    return Question(
        demand,
        dense,
        machine,
        host,
        config.planner,
        config.planner.buckets and not train.bucket_mib,
        train.routing == "auto",
        config.tier.bytes_of("device_bytes"),
        row_bytes,
        train.resident == "always",
    )


def does_not_fit(
    config: RunConfig, source: BlockSource, machine: Machine, asked: Question, plain: Plan, tiers: str
) -> str:
    """The message that no plan fits: how much is needed, and the cheapest change with which one would.

    Args:
      config: of the run.
      source: its data.
      machine: that the plan is for.
      asked: the question that has no answer.
      plain: the plan of the plain rule.
      tiers: why rows on the host do not help.
    """
    least = min((smallest(asked, ways) for ways in by_thresholds(asked.demand)), key=lambda memory: memory["total"])
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in least.items() if name != "total")
    given = f"planner.memory_gib={config.planner.memory_gib:g}" if config.planner.memory_gib else f"{machine.name} has"
    text = (
        f"no plan fits a device: the smallest needs {least['total'] / GIB:.3g} GiB ({parts}), and {given}, of which "
        f"{asked.budget_bytes / GIB:.3g} GiB can be used; {tiers.rstrip('.')}. "
    )
    same, other = (_cheapest(config, source, machine, changes) for changes in _changes(config, asked, plain))
    if same is not None:
        text += f"The cheapest change with which it fits is {same.change}: it changes no number, and {same.text}."
    if other is not None:
        text += f" {'It fits also' if same else 'It fits'} with {other.change}, which changes numbers: {other.text}."
    if same is None and other is None:
        text += "None of the changes that were tried helps: take smaller tables (embedding.dim) or many more devices."
    return text


def smallest(asked: Question, ways: Assignment) -> dict[str, float]:
    """Bytes of a device under an assignment."""
    return asked.memory(sizes(asked.demand, ways))


def _changes(config: RunConfig, asked: Question, plain: Plan) -> tuple[list[str], list[str]]:
    """Changes that change no number, and others."""
    devices, batch = math.prod(config.mesh.shape), config.train.batch_size
    hosts = config.mesh.hosts
    more = [f"mesh.devices={devices * times}" for times in (2, 4, 8, 16)]
    if hosts > 1:
        more = [f"{text} mesh.hosts={hosts * times}" for text, times in zip(more, (2, 4, 8, 16), strict=True)]
    if asked.cache_bytes:
        left = {room(asked, sizes(asked.demand, ways)) for ways in by_thresholds(asked.demand)}
        for size in sorted(left, reverse=True)[:_SIZES]:  # the largest that fits, since a larger cache misses less
            if size and answer(dataclasses.replace(asked, cache_bytes=size), plain):
                more.append(f"tier.device_bytes={size}")
                break
    return [*_SAME_NUMBERS, *more], [text.format(half=batch // 2) for text in _OTHER_NUMBERS]


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change with which a plan fits.

    Attributes:
      change: the settings.
      ms: of a step.
      devices: how many there are then.
      bytes: that each of them needs.
    """

    change: str
    ms: float
    devices: int
    bytes: float

    @property
    def text(self) -> str:
        """The figures in words."""
        return (
            f"a device then needs {self.bytes / GIB:.3g} GiB, and {self.ms:.3g} ms a step are predicted on "
            f"{self.devices} device(s)"
        )


def _cheapest(config: RunConfig, source: BlockSource, machine: Machine, changes: list[str]) -> _Change | None:
    """The change, of those with which a plan fits, whose samples take least device time."""
    estimated: list[tuple[float, int, RunConfig, Question]] = []
    for number, change in enumerate(changes):
        try:
            changed = settings.override(config, change.split())
            asked = question(changed, source, machine)
        except ConfigError:  # not for this model
            continue
        us = min(map(Planner(asked).cost, by_thresholds(asked.demand)))
        if us < math.inf:
            estimated.append((us * math.prod(changed.mesh.shape) / changed.train.batch_size, number, changed, asked))
    for _, number, changed, asked in sorted(estimated, key=lambda one: one[:2]):
        shape = changed.mesh.shape
        if found := answer(asked, _plain(changed, source, asked, shape)):  # an estimate may be too small
            ms = found.prediction.step_us / 1e3
            return _Change(changes[number], ms, math.prod(shape), found.memory["total"])
    return None


def record_plan(run: Path, config: RunConfig, chosen: Answer, bound: BoundPlan, mesh: Mesh) -> None:
    """Writes what was chosen into a run folder: the plan with the owners that it has on this mesh.

    Raises:
      TrainingError: no permission, no space.
    """
    write_machine(open_machine(config.planner.machine), run / MACHINE)
    write_whole(run / sources.PLAN, with_owners(chosen.plan, bound).to_json().encode())
    write_json(run / CHOICE, {"mesh": [mesh.shape[axis] for axis in AXES]} | figures(chosen))


def with_recorded_plan(config: RunConfig, run: Path) -> RunConfig:
    """A config with the plan that a run folder has, if it was chosen for this mesh; else with the folder's machine.

    Raises:
      ConfigError: what the run folder says is damaged.
    """
    begun = any((run / "checkpoints").glob("[0-9]*"))  # else it may have been chosen for another config
    if not by_machine(config) or not begun or not (run / CHOICE).is_file():
        return config
    try:
        choice = strict_json.parse((run / CHOICE).read_bytes())
        mesh, bucket, routing = choice["mesh"], float(choice["bucket_mib"]), choice["routing"]
        cache_bytes = int((choice.get("tier") or {}).get("device_bytes", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run / CHOICE} is damaged ({error}). Delete it: the run is then planned again, by planner.machine."
        ) from error
    if mesh == list(config.mesh.shape) and config.mesh.devices and (run / sources.PLAN).is_file():
        train = config.train
        if config.planner.buckets and not train.bucket_mib:
            train = dataclasses.replace(train, bucket_mib=bucket)
        if train.routing == "auto":
            train = dataclasses.replace(train, routing=routing)
        tier = config.tier
        if cache_bytes and not tier.bytes_of("device_bytes"):
            tier = dataclasses.replace(tier, device_bytes=cache_bytes)
        hot = dataclasses.replace(config.embedding.hot, rows=0)  # the plan has them
        embedding = dataclasses.replace(config.embedding, hot=hot)
        return dataclasses.replace(config, plan=str(run / sources.PLAN), train=train, tier=tier, embedding=embedding)
    if (run / MACHINE).is_file():
        planner = dataclasses.replace(config.planner, machine=str(run / MACHINE))
        return dataclasses.replace(config, planner=planner)
    return config


def figures(chosen: Answer) -> dict[str, Any]:
    """The answer as JSON values.

    Returns:
      "machine", "measured_machine"; "step_ms", "samples_per_s", "exposed_ms" of collectives and "bound_by", predicted;
      "plain_step_ms" of the plain rule's plan; "memory_bytes" of a device by what they are; "bucket_mib", "routing";
      "choices" that concern all tables and "tables", each with the next best; "kept_plain"; "tier", as `TierChoice`
      has it, None if all rows are on the devices.
    """
    prediction = chosen.prediction
    return {
        "machine": prediction.machine.name,
        "measured_machine": prediction.machine.measured,
        "step_ms": prediction.step_us / 1e3,
        "samples_per_s": prediction.samples_per_s,
        "exposed_ms": prediction.exposed_us / 1e3,
        "bound_by": prediction.bound_by,
        "plain_step_ms": chosen.plain.step_us / 1e3,
        "memory_bytes": chosen.memory,
        "bucket_mib": chosen.bucket_mib,
        "routing": chosen.routing,
        "choices": chosen.choices,
        "tables": {name: {**of, "why": reason(of)} for name, of in chosen.tables.items()},
        "kept_plain": chosen.kept_plain,
        "tier": dataclasses.asdict(chosen.tier) if chosen.tier else None,
    }


def to_text(found: dict[str, Any]) -> str:
    """The figures for people: what was chosen, and what the next best would cost."""
    kind = "" if found["measured_machine"] else " (NOT measured: from data sheets and assumptions)"
    lines = [
        f"chosen for {found['machine']}{kind}: {found['step_ms']:.3g} ms a step predicted, "
        f"{found['samples_per_s']:,.0f} samples/s, bound by {found['bound_by']}; the plain rule's plan "
        f"{found['plain_step_ms']:.3g} ms"
    ]
    for choice in found["choices"]:
        after = ""
        if choice["next"] is not None:
            after = (
                f"; next best {choice['next']:.4g}" if choice["what"] == "bucket" else f"; next best {choice['next']}"
            )
            after += f", {choice['next_step_ms']:.3g} ms"
        value = f"{choice['chosen']:.4g}" if choice["what"] == "bucket" else choice["chosen"]
        lines.append(f"{choice['what']}: {value} ({choice['why']}){after}")
    memory = ", ".join(f"{name} {size / GIB:.3g}" for name, size in found["memory_bytes"].items())
    lines.append(f"memory of a device, GiB: {memory}")
    return "\n".join(lines)


_DTYPES = {"tensorfloat32": "tf32", "tensorfloat32x3": "tf32x3", "bfloat16": "bf16", "float64": "f64"}


def dense_sizes(
    config: RunConfig, schema: Schema, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...]
) -> DenseSizes:
    """Returns the sizes of the dense part of a run.

    Every array of two dimensions counts as a layer that all samples pass, and of three as several.

    Raises:
      ConfigError: as the model's `build`.
    """
    columns = dims(tables, features)
    outputs = outputs_for(config.model, tasks_of(config, schema))
    build = functools.partial(
        config.model.build, len(schema.dense), columns, dtype=jnp.dtype(config.dense_dtype), seed=0, **outputs
    )
    params = parameters(nnx.eval_shape(build))
    leaves = jax.tree.leaves(params)
    values = sum(x.size for x in leaves)
    state = jax.tree.leaves(jax.eval_shape(config.train.optimizer.build().init, params))
    layers = tuple((int(x.shape[-2]), int(x.shape[-1])) for x in leaves if x.ndim > 1 for _ in range(_times(x.shape)))
    dot = getattr(config.model, "interaction", "") == "dot"
    pairs = (len(columns) + bool(schema.dense), max(columns.values())) if dot else None
    return DenseSizes(
        layers,
        values,
        round(sum(x.size for x in state) / max(1, values)),
        len(leaves),
        pairs,
        sum(columns.values()),
        _DTYPES.get(config.compute_dtype, "f32"),
        config.train.bucket_mib * 2**20,
        config.train.dense == "sharded",
        config.train.accumulate,
    )


def _times(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-2])
