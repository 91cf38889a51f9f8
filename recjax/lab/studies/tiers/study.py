"""The study of tables larger than memory, after MTrainS: hits over the size of a cache, steps over it, nodes saved.

Its question: how few nodes train a model if device memory and host memory are caches over something larger, and does
looking ahead in the stream of batches hide what they miss? Hits are counted by sending batches through the directories
of a training; steps are measured by turns; nodes are calculated from named inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.source import mean_ids
from recjax.lab.predict.nodes import Need, Node, Table, compared
from recjax.lab.predict.tier_plan import run_of, with_share
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.tiers import measure
from recjax.lab.studies.tiers.measure import Arm, by_turns, medians
from recjax.planning.tier_model import Cache, cache, table_classes, together
from recjax.planning.tier_replay import Homes, replay
from recjax.planning.tier_run import Run
from recjax.tiers.directory import CacheTooSmallError
from recjax.train.planned import dense_sizes
from recjax.train.table_specs import specs

ALL = 1 << 30  # batches in sight: Belady's rule
RULES = {"LRU": 1, "4 batches in sight": 4, "16 batches in sight": 16, "Belady": ALL}
_USABLE = 0.8  # of memories, for rows
_FLOPS = 0.6 * 8 * 19.5e12  # of eight A100 in float32, at 60% of their peak
_HOME_BYTES, _SLOT_BYTES = 8.0, 28.0  # by which a host finds a row, and one in a cache: see `tiers.host_rows`
_ALL_GRADIENTS = 3  # products forward, and of both gradients

_DEVICES = Node("8 GPUs of 40 GB", _USABLE * 320e9, 8 * 1.555e12, 8 * 25e9, flops=_FLOPS)
_MEMORY = dataclasses.replace(_DEVICES, name="8 GPUs of 40 GB, 1.5 TB of memory", dram_bytes=_USABLE * 1.5e12)
NODES = (
    _DEVICES,
    _MEMORY,
    dataclasses.replace(
        _MEMORY,
        name="8 GPUs of 40 GB, 1.5 TB of memory, 4 NVMe disks of 4 TB",
        disk_bytes=_USABLE * 16e12,
        disk_reads=4e6,
        disk_rate=16e9,
    ),
)
# Model -> preset, settings, samples/s: of model A as published for 128 V100; the others are chosen.
MODELS = {
    "model A": ("bench_model_a", (), 1.2e6),
    "model F": ("bench_model_f", (), 1.0e6),
    "MLPerf DLRM-DCNv2": ("bench_mlperf_dcnv2", ("data.scale=1",), 5.0e6),
}
RATES = (0.1, 0.3, 1.0)  # of those samples/s
_REUSE_ROWS, _REUSE_SAMPLES = 200_000, 128  # of a drawn stream: a batch of the histogram, scaled down
REUSE_STEPS = 200
_ZIPF = 1.1
_HALF = 0.5  # of the bandwidth


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the study.

    Attributes:
      preset: what is trained on what for hits and steps, with its settings.
      shares: of the rows that the cache holds, for hits.
      steps: of which hits are counted, after as many that fill the cache.
      timed: shares of which steps are measured.
      warm, rounds, turn: steps before, turns, steps of a turn; rounds 0: nothing is measured.
      disk: folder for the measure with a disk; "": none.
    """

    preset: tuple[str, ...] = ("bench_kaggle16", "data.max_rows=50000", "train.batch_size=512")
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    steps: int = 150
    timed: tuple[float, ...] = (0.8, 0.4, 0.2, 0.1, 0.05)
    warm: int = 40
    rounds: int = 3
    turn: int = 8
    disk: str = ""


SMALL = Options()
TIMED = ("bench_kaggle16", "data.max_rows=200000", "train.batch_size=2048")
# As many blocks of 4,096 samples as batches: those of a trace that repeats itself after 64 come back all too soon.
FULL = Options(
    ("bench_kaggle16", "data.max_rows=400000", "data.distinct_blocks=600"),
    (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    300,
    (0.9, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05),
    120,
    7,
    16,
)


def study(out: Path, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Counts, measures and calculates what an earlier run in the same folder has not.

    Args:
      out: folder; goes on from what is there.
      options: how much.
      say: takes a line about what is done.

    Returns:
      JSON values: "options", "hits" (`hit_curve`), "times" (`step_times`; [] if nothing is measured), "nodes"
      (`nodes_saved`), "bandwidth" (model -> `bandwidth_need`), "reuse" (name of a law -> `reuse_curve`).

    Raises:
      ConfigError: the folder holds parts of a study with other settings.
    """
    setup = dataclasses.asdict(options)
    kept = Finished(out, setup, "tiers")
    found: dict[str, Any] = {"options": setup}
    config = presets.load(options.preset[0], list(options.preset[1:]))
    trace = Trace(config, options.steps)
    found["hits"] = []
    for share in options.shares:
        say(f"hits of a cache of {share:.0%} of the rows")
        found["hits"].append(kept.get(f"hits {share:g}", functools.partial(hit_curve, trace, share)))
    timed = config if options.preset != SMALL.preset else presets.load(TIMED[0], list(TIMED[1:]))
    found["times"] = []
    if options.rounds:
        say("steps, by turns")
        found["times"] = kept.get("times", lambda: step_times(timed, options))
    found["nodes"] = []
    for name in MODELS:
        say(f"nodes for {name}")
        found["nodes"] += kept.get(f"nodes {name}", functools.partial(nodes_saved, name))
    found["bandwidth"] = {
        name: kept.get(f"bandwidth {name}", functools.partial(bandwidth_need, name)) for name in MODELS
    }
    found["reuse"] = {}
    for name in (*measure.HISTOGRAMS, "Zipf"):
        say(f"hits by the look-ups of {name}")
        found["reuse"][name] = kept.get(f"reuse {name}", functools.partial(reuse_curve, name, options.shares))
    return found


class Trace:
    """Batches of a run whose hits are counted, by the rows that they name, which are the same for caches of any size.

    Attributes:
      steps: of which hits are counted, after as many that fill the cache.
    """

    def __init__(self, config: RunConfig, steps: int) -> None:
        """A trace of a run; nothing is read yet."""
        self.steps = steps
        self._config, self._source = config, config.data.open()
        self._homes: list[Homes] = []

    def run(self, share: float) -> Run:
        """The run with a cache for that share of the rows."""
        return run_of(with_share(self._config, self._source, share))

    def homes(self, run: Run) -> list[Homes]:
        """Homes that the batches of one of its runs name; read and sorted once for all."""
        if not self._homes:
            self._homes = list(itertools.islice(run.homes(), 2 * self.steps))
        return self._homes


def hit_curve(trace: Trace, share: float) -> dict[str, Any]:
    """Hit rates of one size of cache by each rule.

    Returns:
      "share", "slots", "rows"; "rules": of each its name -> "counted", None where two batches do not fit, and "model",
      the closed form of the same steps.
    """
    run, steps = trace.run(share), trace.steps
    homes = trace.homes(run)
    (group,) = run.bound.cached
    classes = together(list(run.classes[group.name].values()))
    slots = group.owners * group.rows
    rules: dict[str, dict[str, float | None]] = {}
    for name, ahead in RULES.items():
        try:
            counted: float | None = replay(run.bound, homes, 2 * steps, ahead).hit_rate(steps)
        except CacheTooSmallError:
            counted = None
        held = cache(classes, slots, math.inf if ahead == ALL else ahead)
        rules[name] = {"counted": counted, "model": _model_rate(held, steps)}
    return {"share": share, "slots": slots, "rows": group.owners * group.home_rows, "rules": rules}


def _model_rate(held: Cache, steps: int) -> float:
    """The rate of the second half of twice so many steps."""
    misses = held.misses_of(2 * steps) - held.misses_of(steps)
    return 1 - misses / (steps * held.classes.named)


def step_times(config: RunConfig, options: Options) -> list[dict[str, Any]]:
    """Times of steps by turns: all rows on the device first, then each share, then the middle one over a disk.

    Returns:
      for each "label", "share", "disk", the medians of `Contestant.turn`, and "ratio" to the first in the same round.
    """
    arms = [Arm("all", 1.0), *(Arm(f"{share:.0%}", share) for share in options.timed)]
    if options.disk:
        middle = options.timed[len(options.timed) // 2]
        arms.append(Arm(f"{middle:.0%}, half of the rows in memory", middle, 0.5, options.disk))
    turns = by_turns(arms, config, options.warm, options.rounds, options.turn)
    found = []
    for arm, own in zip(arms, turns, strict=True):
        ratios = sorted(one["ms"] / all_["ms"] for one, all_ in zip(own, turns[0], strict=True))
        found.append(
            {
                "label": arm.label,
                "share": arm.device,
                "disk": bool(arm.disk),
                **medians(own),
                "ratio": ratios[len(ratios) // 2],
            }
        )
    return found


def reuse_curve(name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Hits by one of `measure.HISTOGRAMS`, or by Zipf's law with as many look-ups, as `measure.hits` gives them."""
    first = next(iter(measure.HISTOGRAMS.values()))
    histogram = measure.HISTOGRAMS.get(name, first)
    lookups = round(_REUSE_ROWS * histogram.lookups / histogram.rows * _REUSE_SAMPLES / histogram.samples)
    law = histogram.law(_REUSE_ROWS) if name in measure.HISTOGRAMS else measure.zipf(_REUSE_ROWS, _ZIPF)
    return measure.hits(law, lookups, shares, REUSE_STEPS, RULES)


def bandwidth_need(model: str) -> dict[str, float]:
    """Calculates what the tables of one of `MODELS` ask of the memory that holds them: look-ups times bytes of a row.

    Returns:
      "tables"; "bytes" of rows, with their state; "least", "middle" and "most", bytes a second of a table; "total", of
      all; "of_half", the share of the bytes that holds the tables which ask for half of it, those that ask for most a
      byte first.
    """
    need = _need(model)
    sizes_T = np.array([table.classes.rows * table.row_bytes for table in need.tables])
    rate_T = need.steps_per_s * np.array([table.ids * table.row_bytes for table in need.tables])
    order_T = np.argsort(-rate_T / sizes_T, kind="stable")
    sizes_T, sorted_T = sizes_T[order_T], rate_T[order_T]
    rates, sizes = (np.concatenate([[0.0], np.cumsum(of_T) / of_T.sum()]) for of_T in (sorted_T, sizes_T))
    return {
        "tables": float(len(rate_T)),
        "bytes": float(sizes_T.sum()),
        "least": float(rate_T.min()),
        "middle": float(np.median(rate_T)),
        "most": float(rate_T.max()),
        "total": float(rate_T.sum()),
        "of_half": float(np.interp(_HALF, rates, sizes)),
    }


def nodes_saved(model: str) -> list[dict[str, Any]]:
    """Nodes for one of `MODELS` at each of `RATES`, with all rows in device memory and with tiers of each kind.

    Returns:
      for each rate and kind of node but the first what `compared` gives, "samples_per_s", and "memory_nodes", those of
      the second kind, whose hosts have memory and no disk.
    """
    samples_per_s, found, whole = MODELS[model][2], [], _need(model)
    for share in RATES:
        need = dataclasses.replace(whole, steps_per_s=share * whole.steps_per_s)
        of_kinds = [compared(need, node) for node in NODES[1:]]
        memory_nodes = of_kinds[0]["with"]["nodes"]
        found += [one | {"samples_per_s": share * samples_per_s, "memory_nodes": memory_nodes} for one in of_kinds]
    return found


def _need(model: str) -> Need:
    """A training of one of `MODELS` at its samples a second."""
    preset, settings, samples_per_s = MODELS[model]
    config = presets.load(preset, list(settings))
    source = config.data.open()
    tables, features = specs(config, source.schema, mean_ids(source))
    size = config.train.batch_size
    all_ = []
    for spec in tables:
        own = [feature for feature in features if feature.table == spec.name]
        values = spec.dim * (2 if spec.dtype == "bfloat16" else 4)
        state = 4 * sum(math.prod(slot.shape) for slot in spec.optimizer.slots(spec.dim).values())
        classes = table_classes(source, spec, own, size, lambda: source.read("train", 0))
        all_.append(Table(classes, values + state, size * sum(feature.ids for feature in own)))
    layers = dense_sizes(config, source.schema, tables, features).layers
    flop = size * _ALL_GRADIENTS * 2 * sum(inputs * outputs for inputs, outputs in layers)
    return Need(model, all_, samples_per_s / size, flop=flop, home_bytes=_HOME_BYTES, slot_bytes=_SLOT_BYTES)
