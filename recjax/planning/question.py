"""A question to the planner, and its answer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from recjax.config.run import PlannerConfig
from recjax.embedding.plan import Plan
from recjax.planning.assign import Assignment, Demand
from recjax.planning.machine import Machine
from recjax.planning.predict import HostWork, Prediction
from recjax.planning.step_sizes import DenseSizes, StepSizes


@dataclasses.dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
      demand: of the tables.
      dense: sizes of the dense part.
      machine: to plan for.
      host: work of the host, without what depends on the plan.
      settings: budgets.
      open_bucket, open_routing: whether the config leaves buckets and routing open.
      cache_bytes: of a device, for rows that are spread over devices; 0: all of them are there.
      resident_bytes: of all training rows, where they may lie on every device; 0: the host reads them.
      resident_always: whether they lie there whether or not they fit.
    """

    demand: Demand
    dense: DenseSizes
    machine: Machine
    host: HostWork
    settings: PlannerConfig
    open_bucket: bool = True
    open_routing: bool = True
    cache_bytes: int = 0
    resident_bytes: float = 0.0
    resident_always: bool = False

    @property
    def budget_bytes(self) -> float:
        """Bytes that a device may use."""
        work = self.demand.work
        return budget(self.machine, work.devices * work.replicas, self.settings.memory_gib)

    def memory(self, sizes: StepSizes) -> dict[str, float]:
        """Bytes of a device: see `needed`; and those of the training "rows", if all lie there."""
        memory = needed(sizes, self.dense, self.cache_bytes)
        rows_bytes = self.resident_bytes if self.host.in_rows and not (sizes.host_routes or sizes.vectors) else 0.0
        total = memory["total"] + rows_bytes
        fits = (
            rows_fit(rows_bytes, self.budget_bytes, memory["tables"] + memory["dense"]) and total <= self.budget_bytes
        )
        return (
            memory | {"rows": rows_bytes, "total": total} if rows_bytes and (fits or self.resident_always) else memory
        )


@dataclasses.dataclass(frozen=True)
class TierChoice:
    """Rows of which a device holds those that batches name, since not all of them fit.

    Attributes:
      device_bytes: of each device for them, as `tier.device_bytes` says it.
      tables: those of which not all rows are on the devices.
      hit_rate: share of the rows that batches name which are there, the mean over the run.
      misses: of a step, the mean.
      host_bytes: of rows in the host's memory at the end, with their optimizer's state.
      disk_bytes: the same on its disk.
      whole_ms: of a step with all rows on the devices, predicted.
      slowdown: times that a step takes of that, predicted.
    """

    device_bytes: int
    tables: tuple[str, ...]
    hit_rate: float
    misses: float
    host_bytes: float
    disk_bytes: float
    whole_ms: float
    slowdown: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """A chosen plan.

    Attributes:
      plan: where each table lives.
      ways: of each table.
      prediction: of a step under it, from sizes alone.
      plain: the same under the plain rule.
      memory: bytes of a device: see `Question.memory`.
      bucket_mib: of dense gradients.
      routing: who routes, "host", "device" or, if nothing is known of the host, "auto".
      choices: decisions that concern all tables, each with the next best: JSON values, see `explained`.
      tables: table -> reason: "way", "step_ms" of the whole step, "next" best way with its "next_step_ms".
      kept_plain: whether the plain rule's plan was within the band.
      tier: the rows that are on the host, if not all fit.
    """

    plan: Plan
    ways: Assignment
    prediction: Prediction
    plain: Prediction
    memory: dict[str, float]
    bucket_mib: float
    routing: str
    choices: list[dict[str, Any]]
    tables: dict[str, dict[str, Any]]
    kept_plain: bool
    tier: TierChoice | None = None


GIB = 2**30
USABLE = 0.92  # of a device's memory; the rest is the runtime's
_ALIVE = 3.0  # times that fetched rows are there at once: as they came, put in order, and as gradients
_ACTIVATIONS = 3.0  # the same of activations: forward, backward and the input of a product


def needed(sizes: StepSizes, dense: DenseSizes, cache_bytes: int = 0) -> dict[str, float]:
    """Returns bytes of one device by what they are.

    "tables" with their optimizer's slots, as large as in the fullest device, but of rows that are spread no more than
    `cache_bytes`, unless that is 0; "dense" parameters, their optimizer's
    state and gradients; "batch", with routing; "temporaries", an estimate: of `recjax plan --compile` the compiler
    says how large they are; "total".
    """
    b, item = sizes.samples, sizes.item_bytes
    share = sizes.all_devices if dense.sharded else 1
    widths = dense.columns + sum(n for _, n in dense.layers) + (dense.pairs[0] ** 2 if dense.pairs else 0)
    found = {
        "tables": sizes.copied_bytes + min(sizes.spread_bytes, cache_bytes or math.inf),
        "dense": item * dense.values * ((1 + dense.slots) / share + 1),
        "batch": 4.0 * (sum(sizes.lists) + 2 * sizes.ids) + item * b * 32,
        "temporaries": _ALIVE * sizes.fetched_bytes + _ACTIVATIONS * item * b / dense.accumulate * widths,
    }
    return found | {"total": sum(found.values())}


def rows_fit(rows_bytes: float, device_bytes: float, state_bytes: float) -> bool:
    """Returns whether all training rows take at most half of what the state leaves: the rest is for temporaries."""
    return rows_bytes <= (device_bytes - state_bytes) / 2


def budget(machine: Machine, devices: int, memory_gib: float) -> float:
    """Returns the bytes that a device may use: those that the user gives, or of the machine's memory what is usable."""
    if memory_gib:
        return memory_gib * GIB
    whole = machine.rate("memory_size")
    return USABLE * (whole / devices if machine.shared else whole)
