"""Times of training steps with rows on the host, beside those with all rows on the devices; and hits as published.

Meta's synthetic embedding look-ups (facebookresearch/dlrm_datasets, MIT) come with histograms of one batch: which share
of its distinct rows, and of its look-ups, is of rows that are looked up so many times. That is taken for a law: a row
of k of the batch's n look-ups is asked for with probability k/n. Rows that the batch does not name are in neither.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.lab.predict.tier_plan import host_bytes, with_share
from recjax.planning.tier_model import Classes, cache
from recjax.tiers.directory import CacheTooSmallError, Directory
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
        for rows in tier.rows.groups.values():
            rows.write_initial()
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


_EDGES = tuple(2**n for n in range(16))  # bins up to 1, 2, 4, ... 32,768 look-ups, and beyond


@dataclasses.dataclass(frozen=True)
class ReuseHistogram:
    """A published histogram of one batch.

    Attributes:
      tables: of the batch.
      samples: of the batch.
      lookups: ids of all tables.
      rows: distinct rows of all tables.
      of_rows_K: share of the rows in each bin, rounded to a thousandth.
      of_lookups_K: share of the look-ups.
    """

    tables: int
    samples: int
    lookups: int
    rows: int
    of_rows_K: tuple[float, ...]
    of_lookups_K: tuple[float, ...]

    def law(self, rows: int) -> Classes:
        """Returns so many rows in classes of rows alike; `q_K`: the probability that a look-up is of a class's row."""
        per_row = self.lookups / self.rows
        edges = np.array([0.5, *_EDGES, 2 * _EDGES[-1]], np.float64)
        middle_K = np.sqrt(edges[1:] * edges[:-1])
        middle_K[0] = 1.0
        of_rows_K, of_lookups_K = np.array(self.of_rows_K), np.array(self.of_lookups_K)
        # Where a thousandth is a coarse share of rows, the middle of the bin says how often each is looked up.
        fine_K = of_rows_K >= 0.01
        times_K = np.where(fine_K, per_row * of_lookups_K / np.where(fine_K, of_rows_K, 1.0), middle_K)
        share_K = per_row * of_lookups_K / times_K
        used_K = share_K > 0
        rows_K = rows * share_K[used_K] / share_K.sum()
        p_K = times_K[used_K] / (rows_K * times_K[used_K]).sum()
        return Classes(rows_K, p_K)


HISTOGRAMS = {
    "2021": ReuseHistogram(
        856,
        65_536,
        887_017_990,
        128_435_723,
        (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, 0, 0, 0, 0, 0, 0, 0),
        (
            0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048, 0.043, 0.031,
            0.023, 0.019,
        ),
    ),
    "2022": ReuseHistogram(
        788,
        131_072,
        1_405_163_864,
        110_259_238,
        (0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001, 0, 0, 0, 0, 0),
        (
            0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054, 0.040, 0.072, 0.064, 0.047, 0.021,
            0.017, 0.076,
        ),
    ),
}  # fmt: skip


def zipf(rows: int, exponent: float) -> Classes:
    """The law of as many rows by Zipf, row by row, in the form of `ReuseHistogram.law`."""
    weight_V = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return Classes(np.ones(rows), weight_V / weight_V.sum())


def hits(
    law: Classes, lookups: int, shares: tuple[float, ...], steps: int, ahead: dict[str, int]
) -> list[dict[str, Any]]:
    """Hit rates of caches of some sizes, counted by drawing batches by a law, and by the closed form.

    Args:
      law: probabilities of one look-up.
      lookups: of a batch.
      shares: of the rows that a cache holds.
      steps: batches that are counted, after as many that fill the cache.
      ahead: name of a rule -> batches in sight.

    Returns:
      for each share "share", "slots" and "rules": name -> "counted", None where two batches do not fit, and "model".
    """
    counts_K = np.maximum(1, np.rint(law.rows_K)).astype(np.int64)
    p_V = np.repeat(law.q_K, counts_K)
    rng = np.random.default_rng(0)
    ends_V = np.cumsum(p_V / p_V.sum())
    last = len(p_V) - 1
    batches = [
        np.unique(np.minimum(np.searchsorted(ends_V, rng.random(lookups)), last)).astype(np.int32)
        for _ in range(2 * steps)
    ]
    q_K = np.minimum(-np.expm1(lookups * np.log1p(-law.q_K)), 1 - 1e-12)
    named = Classes(counts_K.astype(np.float64), q_K)
    found = []
    for share in shares:
        slots = round(share * len(p_V))
        rules = {}
        for name, sight in ahead.items():
            held = cache(named, slots, math.inf if sight >= 2 * steps else sight)
            misses = held.misses_of(2 * steps) - held.misses_of(steps)
            rules[name] = {
                "counted": _counted(batches, len(p_V), slots, sight, steps),
                "model": 1 - misses / (steps * named.named),
            }
        found.append({"share": share, "slots": slots, "rules": rules})
    return found


def _counted(batches: list[np.ndarray], rows: int, slots: int, sight: int, steps: int) -> float | None:
    directory, waiting = Directory(rows, slots), collections.deque(batches)
    hits = named = 0
    for step in range(len(batches)):
        while waiting and directory.seen <= sight:
            directory.see(waiting.popleft())
        before, size = directory.hits, len(directory.oldest)
        try:
            directory.admit()
        except CacheTooSmallError:
            return None
        if step >= steps:
            hits, named = hits + directory.hits - before, named + size
    return hits / named
