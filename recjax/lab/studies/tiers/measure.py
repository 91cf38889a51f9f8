"""Times of training steps with rows on the host, beside those with all rows on the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.lab.predict.tier_plan import host_bytes, with_share
from recjax.tiers.stage import CacheStage
from recjax.train.build import build_trainer

_CHUNK = 1 << 15  # rows at a time


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to hold the tables.

    Attributes:
      label: for people.
      device: share of the rows that fit into the devices' caches; 1: all rows are there.
      dram: with a disk the share of the rows that the host's memory holds.
      disk: folder for the others; "": none.
    """

    label: str
    device: float
    dram: float = 0.0
    disk: str = ""


class Contestant:
    """An arm that trains, some steps at a time, with all that a step needs: reading, routing, moves of rows."""

    def __init__(self, arm: Arm, config: RunConfig, source: BlockSource) -> None:
        """Nothing is trained yet; `config` is of a training with all rows on the devices."""
        self.arm = arm
        if arm.device < 1:
            config = with_share(config, source, arm.device)
            if arm.disk:
                memory = int(arm.dram * host_bytes(config, source))
                config = presets.override(config, [f"tier.dram_bytes={memory}", f"tier.disk={arm.disk}"])
        self.trainer = build_trainer(config, source)
        self._state: Any = self.trainer.init_state()
        self._stream = self.trainer.train_inputs(host=self._state.host)
        if self.trainer.bound.cached:
            self._fill()

    def _fill(self) -> None:
        """Has every row written once, and any rows in the caches, so that both are as after a long training."""
        tier, (stage,) = self._state.host.tier, self._stream._stages
        assert tier is not None and isinstance(stage, CacheStage)
        for group in self.trainer.bound.cached:
            for owner in range(group.owners):
                for first in range(0, group.home_rows, _CHUNK):
                    homes_K = np.arange(first, min(first + _CHUNK, group.home_rows), dtype=np.int32)
                    tier.rows.put(group.name, owner, homes_K, tier.rows.initial(group.name, owner, homes_K))
        rng = np.random.default_rng(0)
        orders = {group.name: rng.permutation(group.home_rows).astype(np.int32) for group in self.trainer.bound.cached}
        for first in range(0, max(group.rows for group in self.trainer.bound.cached), _CHUNK):
            chosen = {
                group.name: np.sort(orders[group.name][first : min(first + _CHUNK, group.rows)])
                for group in self.trainer.bound.cached
            }
            self._state = tier.admit(self._state, stage.enter(chosen))

    def turn(self, steps: int) -> dict[str, float]:
        """Trains so many steps.

        Returns:
          Of a step "ms", "waited_ms" (for rows to be read) and "admit_ms" (in which the loop does nothing else than
          move rows, without that), "cpu_ms" of all threads, and counts "hits", "misses", "reads" (records from the
          disk), "writes".
        """
        waited = admit = 0.0
        before, cpu, began = self._counts(), time.process_time(), time.perf_counter()
        metrics = None
        for _ in range(steps):
            inputs = next(self._stream)
            latest = self._stream.latest
            start = time.perf_counter()
            if self.trainer.bound.cached:
                latest.routed.admission.records.exception()
            read = time.perf_counter()
            self._state = self.trainer.admit(self._state, latest)
            end = time.perf_counter()
            waited, admit = waited + read - start, admit + end - read
            last = metrics
            self._state, metrics = self.trainer.train_step(self._state, inputs)
            jax.block_until_ready(last)  # as the loop does, which reads the metrics of the step before
        jax.block_until_ready(metrics)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        times = {"ms": wall, "waited_ms": waited, "admit_ms": admit, "cpu_ms": cpu}
        counts = {name: (count - before[name]) / steps for name, count in self._counts().items()}
        return {name: 1e3 * s / steps for name, s in times.items()} | counts

    def _counts(self) -> dict[str, float]:
        if not self.trainer.bound.cached:
            return dict.fromkeys(("hits", "misses", "reads", "writes"), 0.0)
        found = self._state.host.tier.figures()
        return {
            "hits": found["hits"],
            "misses": found["misses"],
            "reads": found["records_read"],
            "writes": found["records_written"],
        }

    def close(self) -> None:
        """Gives memory and files back."""
        self._stream.close()
        self._state.host.close()


def by_turns(
    arms: Sequence[Arm], config: RunConfig, warm: int, rounds: int, steps: int
) -> list[list[dict[str, float]]]:
    """Trains all arms by turns.

    Args:
      arms: what to measure.
      config: of a training with all rows on the devices.
      warm: steps of each before any is measured.
      rounds: turns of each.
      steps: of a turn.

    Returns:
      For each arm what `Contestant.turn` gives in each round.
    """
    source = config.data.open()
    blocks = min(len(source.row_counts("train")), -(-(warm + rounds * steps + 16) * config.train.batch_size // 4096))
    for number in range(blocks):  # drawn before, not while others are timed
        source.read("train", number)
    with contextlib.ExitStack() as stack:
        contestants = [stack.enter_context(contextlib.closing(Contestant(arm, config, source))) for arm in arms]
        for one in contestants:
            one.turn(max(1, warm))
        found: list[list[dict[str, float]]] = [[] for _ in arms]
        for _ in range(rounds):
            for one, turns in zip(contestants, found, strict=True):
                turns.append(one.turn(steps))
    return found


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds of each figure."""
    return {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
