"""Measures of one way to hold the tables: bytes, held and sent, balance, and CPU time by turns."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recjax.config.run import RunConfig
from recjax.data.batch import Batch
from recjax.data.presence import Presence
from recjax.embedding.plan import Plan
from recjax.embedding.routing import host
from recjax.embedding.segment import COPIED, HOT_PLACEMENTS, RowIds
from recjax.planning.compiled_collectives import wire_bytes
from recjax.train.build import build_trainer
from recjax.train.compile_only import abstract_batches, abstract_state
from recjax.train.routers import InFlight, PackedBatches, place_all
from recjax.train.trainer import Trainer

EXCHANGED = ("id_exchange", "row_exchange", "grad_exchange", "pooled_exchange", "pooled_grad_exchange")
HOT_PHASES = ("row_exchange", "grad_exchange")  # in which rows that devices have at hand are gathered and reduced


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to hold the tables.

    Attributes:
      label: for people.
      overrides: of the config.
      rows: hot rows that are asked for.
    """

    label: str
    overrides: tuple[str, ...]
    rows: int = 0


class Contestant:
    """An arm on some devices, ready to take turns."""

    def __init__(self, arm: Arm, config: RunConfig, batches: int) -> None:
        """Builds and compiles; `batches` are routed and placed."""
        self.arm, self.trainer = arm, build_trainer(config, weights=True)
        train = config.train
        routed = list(itertools.islice(self.trainer.routed_batches(), batches))
        self.read: list[Batch] = [batch.batch for batch in routed]
        _, self.capacities = place_all(self.trainer.router, routed)
        self.routing = host.pack(routed[0].routed, self.trainer.bound, self.capacities, self.trainer.dtype)
        self.size, self.parts = train.batch_size, train.accumulate
        state, inputs = abstract_state(self.trainer), abstract_batches(self.trainer, self.capacities)
        self.step = self.trainer.step_program.lower(state, inputs).compile()
        self.state: Any = None  # made by the first step: what is counted needs no tables

    def bytes(self) -> dict[str, float]:
        """Bytes that a device sends for the tables in a step: "padded", "useful" of these, and each phase padded.

        The all-reduce of small replicated tables may be joined with that of the dense part, so that it is calculated.
        """
        lines, item_bytes = self._lines(), np.dtype(self.trainer.dtype).itemsize
        N = self.trainer.bound.devices
        for group in self.trainer.bound.listing:
            if not group.spread:
                size = 2 * (N - 1) / N * group.rows * (group.dim + 1) * item_bytes
                both = {"padded_bytes": size, "useful_bytes": size}
                lines.append({"phase": "grad_exchange", "kind": "all-reduce", **both})
        found = {kind: float(sum(line[f"{kind}_bytes"] for line in lines)) for kind in ("padded", "useful")}
        for line in lines:
            name = f"{line['phase']} {line['kind']}"
            found[name] = found.get(name, 0.0) + line["padded_bytes"]
        return found

    def copies_bytes(self) -> dict[str, float]:
        """Bytes of hot rows, of a device: "held" between steps; "sent" in a step, and of that "across" hosts.

        Also "all_sent" and "all_across", with the lists of all other rows; those of tables that are replicated without
        being hot are left out. Padding counts.
        """
        tables = abstract_state(self.trainer).tables
        blocks = [tables[group.name] for group in self.trainer.bound.hot]
        held = sum(math.prod(block.sharding.shard_shape(block.shape)) * block.dtype.itemsize for block in blocks)
        lines = self._lines()
        own = [
            line for line in lines if line["kind"] in ("all-gather", "reduce-scatter") and line["phase"] in HOT_PHASES
        ]
        found = {"held": float(held)}
        for name, those in (("", own), ("all_", lines)):
            found[f"{name}sent"] = float(sum(line["padded_bytes"] for line in those))
            found[f"{name}across"] = float(sum(line["across_padded_bytes"] for line in those))
        return found

    def _lines(self) -> list[dict[str, Any]]:
        """Lines of `wire_bytes` of exchanges of rows that devices list, or have at hand."""
        bound = self.trainer.bound
        b = host.local_samples(self.size, bound.all_devices, self.parts)
        item_bytes = np.dtype(self.trainer.dtype).itemsize
        lines = wire_bytes(self.step.as_text() or "", bound, self.routing, item_bytes, samples=b)
        return [line for line in lines if line["phase"] in EXCHANGED and line["kind"] != "all-reduce"]

    def imbalance(self) -> float:
        """Rows that the owner asked for most is asked for, over the mean, in the first batch; 1 if no row travels."""
        asked_N = np.zeros(self.trainer.bound.devices)
        for group in self.trainer.bound.listing:
            if group.spread and group.owners == len(asked_N) and not group.two_step:
                asked_N += np.asarray(self.routing.groups[group.name].counts_NxO).sum(axis=0)
        return float(asked_N.max() / asked_N.mean()) if asked_N.any() else 1.0

    def covered(self) -> float:
        """The share of the first batch's ids that name hot rows."""
        ids = hot = 0
        for feature in self.trainer.bound.features:
            sets = [s.rows for s in self.trainer.plan.tables[feature.table] if s.placement in HOT_PLACEMENTS]
            found = self.read[0].bags[feature.reads].ids
            ids += found.size
            for rows in sets:
                hot += found.size if not isinstance(rows, RowIds) else int(np.isin(found, rows.ids).sum())
        return hot / max(1, ids)

    def turn(self, first: int, steps: int) -> tuple[float, float, float]:
        """Trains some steps as a run does: a batch is routed, packed and placed while the devices do the one before.

        Args:
          first: number of the first batch; those that were read take turns.
          steps: how many.

        Returns:
          CPU time of routing, packing and placing a batch; CPU time of all threads for a step; and wall time of a
          step: ms.
        """
        if self.state is None:
            self.state = self.trainer.init_state()
        inputs, host_s = self._inputs(first), 0.0
        jax.block_until_ready((self.state, inputs))
        began, cpu = time.monotonic(), time.process_time()
        for n in range(first, first + steps):
            self.state, metrics = self.step(self.state, inputs)
            routing = time.thread_time()
            inputs = self._inputs(n + 1)
            host_s += time.thread_time() - routing
            jax.block_until_ready(metrics)
        cpu_s, wall_s = time.process_time() - cpu, time.monotonic() - began
        return host_s * 1e3 / steps, cpu_s * 1e3 / steps, wall_s * 1e3 / steps

    def _inputs(self, nth: int) -> PackedBatches:
        """A batch, routed and on the devices."""
        batch, router = self.read[nth % len(self.read)], self.trainer.router
        return router.put([InFlight(batch, router.route(batch, self.size, self.parts))], self.capacities)


def turns(contestants: Sequence[Contestant], rounds: int, steps: int) -> np.ndarray:
    """Measures all, one after the other in every round, forwards and backwards in turn, the first round unmeasured.

    Returns:
      `Contestant.turn` of each: float64 [rounds, contestants, 3].
    """
    times_RxAx3 = np.zeros((rounds + 1, len(contestants), 3))
    for turn in range(rounds + 1):
        order = range(len(contestants)) if turn % 2 else reversed(range(len(contestants)))
        for n in order:
            times_RxAx3[turn, n] = contestants[n].turn(turn * steps, steps)
    return times_RxAx3[1:]


def by_turns(contestants: Sequence[Contestant], rounds: int, steps: int) -> list[dict[str, float]]:
    """Measures all by turns: see `turns`.

    Returns:
      for each "route_cpu_ms", "cpu_ms" and "step_ms", medians over rounds of what `Contestant.turn` gives,
      "step_cpu_ms", the second without the first, and "noise", half the range of the middle half of the second over
      its median.
    """
    results = []
    for times_Rx3 in np.moveaxis(turns(contestants, rounds, steps), 1, 0):
        route, cpu, wall = np.median(times_Rx3, axis=0)
        low, high = np.quantile(times_Rx3[:, 1], [0.25, 0.75])
        apart = float(np.median(times_Rx3[:, 1] - times_Rx3[:, 0]))
        results.append(
            {
                "route_cpu_ms": float(route),
                "step_cpu_ms": apart,
                "step_ms": float(wall),
                "cpu_ms": float(cpu),
                "noise": float((high - low) / 2 / cpu),
            }
        )
    return results


def contiguous_imbalance(presence: Presence, plan: Plan, devices: int, rows: dict[str, int], dedup: bool) -> float:
    """The same as `Contestant.imbalance` if owners had contiguous ranges of ids, which logs order by frequency.

    Args:
      presence: of items in the shares of batches.
      plan: which says what rows are hot; tables that all devices have copies of are left out.
      devices: N.
      rows: of each table.
      dedup: whether a device asks for a row once for all its ids.
    """
    asked_N = np.zeros(devices)
    for name, segments in plan.tables.items():
        rest = [s for s in segments if s.placement not in COPIED]
        if not rest:
            continue
        sets = [s.rows.ids for s in segments if s.placement in HOT_PLACEMENTS and isinstance(s.rows, RowIds)]
        items = presence.tables[name]
        cold_U = ~np.isin(items.ids_U, [id for ids in sets for id in ids])
        asked_U = items.present_U if dedup else items.found_U
        asked_N += np.bincount(items.ids_U[cold_U] * devices // rows[name], asked_U[cold_U], devices)
    return float(asked_N.max() / asked_N.mean()) if asked_N.any() else 1.0


def trainer_presence(trainer: Trainer) -> Presence:
    """Presence of the items of a run's first batches in its devices' shares."""
    from recjax.planning.hot import first_batches

    specs = {s.spec.name: s.spec for group in trainer.bound.groups for s in group.segments}
    found = tuple(specs[name] for name in trainer.plan.tables)
    return first_batches(trainer.config, trainer.source, found, trainer.bound.features, trainer.bound.all_devices)
