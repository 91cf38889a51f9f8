"""`recjax plan PRESET --tiers`: where rows go under the budgets of `tier`, what that costs a step, and what it saves.

Hits and misses are those of `planning.tier_run`.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

import numpy as np

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.source import BlockSource, mean_ids
from recjax.embedding.layout import BoundPlan
from recjax.errors import ConfigError
from recjax.lab.predict.nodes import Need, Node, Table, compared
from recjax.planning.machine import Machine, Quantity
from recjax.planning.planner import Planner, exact_sizes
from recjax.planning.predict import Prediction
from recjax.planning.question import Answer
from recjax.planning.resolve import bound_as
from recjax.planning.tier_replay import COUNTS
from recjax.planning.tier_run import Run, costs, modelled, rates, with_moves
from recjax.tiers.caches import cached_groups, with_caches
from recjax.tiers.host_rows import folder_of
from recjax.train import planned
from recjax.train.table_specs import specs


def _planned(config: RunConfig, source: BlockSource) -> tuple[RunConfig, BoundPlan, Answer | None]:
    """A config as it is for so many rows; its plan, bound to its devices with all rows there; the planner's answer."""
    config = config.for_rows(int(source.row_counts("train").sum()))
    tables, features = specs(config, source.schema, mean_ids(source))
    plan, chosen, _ = planned.plan_of(config, source, tables, features, config.mesh.shape)
    return config, bound_as(config, plan, tables, features, config.mesh.shape), chosen


def with_share(config: RunConfig, source: BlockSource, share: float) -> RunConfig:
    """The config with caches for a share, below 1, of the rows that devices have parts of."""
    _, bound, _ = _planned(config, source)
    each = sum(group.rows * group.row_bytes(config.item_bytes) for group in bound.groups if group.spread)
    return presets.override(config, [f"tier.device_bytes={max(1, int(share * each))}"])


def host_bytes(config: RunConfig, source: BlockSource) -> int:
    """Bytes of the records of all rows of tables with caches."""
    _, bound, _ = _planned(config, source)
    bound = with_caches(bound, config.tier.bytes_of("device_bytes"), config.item_bytes)
    dtype = np.dtype(f"float{8 * config.item_bytes}")
    return sum(cached.all_bytes for cached in cached_groups(bound, dtype).values())


def run_of(config: RunConfig, processes: int = 1) -> Run:
    """Binds the plan of a config, with caches; ConfigError where these cannot do what it asks for."""
    if math.prod(config.mesh.shape) % processes:
        raise ConfigError(
            f"--processes {processes}: {math.prod(config.mesh.shape)} devices cannot be shared evenly by so many."
        )
    source = config.data.open()
    config, bound, chosen = _planned(config, source)
    budget = config.tier.bytes_of("device_bytes") or (chosen.tier.device_bytes if chosen and chosen.tier else 0)
    if not budget:
        raise ConfigError(
            "--tiers is about rows that are not on the devices, but tier.device_bytes is 0: set it, for example "
            "tier.device_bytes=1GiB."
        )
    config = dataclasses.replace(config, tier=dataclasses.replace(config.tier, device_bytes=budget))
    return Run(config, source, with_caches(bound, budget, config.item_bytes), processes)


def tier_plan(
    config: RunConfig,
    machine: Machine | None = None,
    step_ms: float | None = None,
    samples_per_s: float | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Places, hits, traffic, slowdown and nodes of a run with `tier.device_bytes`.

    Args:
      config: of the run.
      machine: whose rates count, and on which the step is predicted; None: stated defaults, and the disk of
        `tier.disk`, which is measured.
      step_ms: of a step with all rows on the devices; None: as predicted on the machine, if there is one.
      samples_per_s: that the training has to reach, for the nodes; None: those of the step.
      processes: that train together, each with `tier.dram_bytes` of its own. Their disk counts as one.

    Returns:
      JSON values: "cached", False if all rows fit; "tables", "caches"; "steps" of the run, "replayed" of them; "hits",
      "misses", "hit_rate" of the run, "steady_hit_rate" of the model, and "belady_hit_rate", its own with all batches
      in sight; "step", what one does on average over the later half of the replay, or by the model; "memory_too_small",
      True if rows that left take more than `tier.dram_bytes` and there is no disk, so that the run would stop; "costs";
      "directory_bytes", by which each process finds the rows of its devices; and "nodes".

    Raises:
      ConfigError, TrainingError, DataError: as a training would; or the disk cannot be measured.
    """
    run = run_of(config, processes)
    whole = _whole(run)
    if not run.bound.cached:
        return {"cached": False, "tables": whole}
    found = run.replayed()
    model = modelled(run)
    result = {"cached": True, "steps": run.steps, "replayed": len(found.counts) if found else 0, **model}
    if found is None:
        step = model["model_step"]
    else:
        later = found.counts[len(found.counts) // 2 :].mean(axis=0)
        step = dict(zip(COUNTS, later.tolist(), strict=True))
        rest = run.steps - len(found.counts)
        result["hits"] = found.total("hits") + rest * model["steady_hits"]
        result["misses"] = found.total("misses") + rest * model["steady_misses"]
        for name, part in found.parts.items():
            model["parts"][name] = dataclasses.asdict(part)
    result["hit_rate"] = result["hits"] / (result["hits"] + result["misses"])
    result["tables"] = [*whole, *_behind(run, model["parts"])]
    del result["parts"], result["model_step"]
    known = rates(run, machine)
    whole_step = None if machine is None else _predicted(run, machine)
    if step_ms is None and whole_step is not None:
        step_ms = whole_step.step_us / 1e3
    behind = sum(of["dram"] * of["row_bytes"] for of in result["tables"])
    limit = min(run.memory_bytes.values())
    result["memory_too_small"] = bool(limit and not config.tier.disk and behind > limit)
    result |= {"step": step, "costs": costs(run, step, known, step_ms)}
    if whole_step is not None:
        moving = with_moves(whole_step, run, step).step_us / whole_step.step_us
        result["costs"] |= {"moving": moving, "slowdown": max(moving, result["costs"]["slowdown"])}
    result["directory_bytes"] = run.directory_bytes()
    result["nodes"] = _nodes(run, known, step_ms, samples_per_s)
    return result


def _whole(run: Run) -> list[dict[str, Any]]:
    """Tables of which all rows are on the devices, and hot rows of others."""
    found = []
    for group in run.bound.groups:
        if group.cached:
            continue
        size = group.row_bytes(run.config.item_bytes)
        copies = group.devices // group.value_group.parts
        found += [
            {
                "table": segment.title,
                "rows": segment.band.members,
                "row_bytes": size,
                "copies": copies,
                "device": segment.band.members,
                "dram": 0,
                "disk": 0,
                "untouched": 0,
            }
            for segment in group.segments
        ]
    return found


def _behind(run: Run, parts: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    row_bytes = run.row_bytes
    return [
        {
            "table": segment.title,
            "rows": segment.band.members,
            "row_bytes": row_bytes[group.name],
            "copies": 1,
            **parts[segment.title],
        }
        for group in run.bound.cached
        for segment in group.segments
    ]


def _predicted(run: Run, machine: Machine) -> Prediction:
    """A step with all rows on the devices, from sizes alone."""
    asked = planned.question(run.config, run.source, machine)
    tables, features = specs(run.config, run.source.schema, mean_ids(run.source))
    plan, _, _ = planned.plan_of(run.config, run.source, tables, features, run.config.mesh.shape)
    return Planner(asked).predicted(exact_sizes(asked.demand, plan))


def _nodes(
    run: Run,
    rates: dict[str, Quantity],
    step_ms: float | None,
    samples_per_s: float | None,
) -> dict[str, Any]:
    """Hosts like this one with all rows in their devices' budgets, and with tiers."""
    config, tier = run.config, run.config.tier
    devices = run.bound.devices
    if samples_per_s is None:
        samples_per_s = 1e3 * config.train.batch_size / step_ms if step_ms else 0.0
    features: dict[str, float] = {}
    for group in run.bound.cached:
        for source in run.bound.sources_of(group):
            name = source.segments[0].title
            features[name] = features.get(name, 0.0) + config.train.batch_size * source.feature.ids
    row_bytes = run.row_bytes
    tables = [
        Table(own, row_bytes[group.name], features[name])
        for group in run.bound.cached
        for name, own in run.classes[group.name].items()
    ]
    whole = sum(t.classes.rows * t.row_bytes for t in tables)
    disk = float(shutil.disk_usage(folder_of(tier.disk)).free) if tier.disk else 0.0
    node = Node(
        "a host with these budgets",
        float(devices * tier.bytes_of("device_bytes")),
        devices * rates["memory"].value,
        devices * rates["host_link"].value,
        float(run.processes * tier.bytes_of("dram_bytes") or whole),
        disk,
        rates["disk_reads"].value,
        min(rates["disk_write"].value, 4096 * rates["disk_writes"].value),
    )
    need = Need(config.data.kind, tables, samples_per_s / config.train.batch_size, float(tier.look_ahead))
    found = compared(need, node)
    return found | {"samples_per_s": samples_per_s}
