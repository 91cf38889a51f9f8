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

from recjax.config import presets
from recjax.config.run import RunConfig
from recjax.data.source import mean_ids
from recjax.lab.predict.nodes import Need, Node, Table, compared
from recjax.lab.predict.tier_plan import run_of, with_share
from recjax.lab.studies.finished import Finished
from recjax.lab.studies.tiers.measure import Arm, by_turns, medians
from recjax.planning.tier_model import Cache, cache, table_classes, together
from recjax.planning.tier_replay import Homes, replay
from recjax.planning.tier_run import Run
from recjax.tiers.directory import CacheTooSmallError
from recjax.train.table_specs import specs

ALL = 1 << 30  # batches in sight: Belady's rule
RULES = {"LRU": 1, "4 batches in sight": 4, "16 batches in sight": 16, "Belady": ALL}
_USABLE = 0.8  # of memories, for rows

NODES = (
    Node("8 GPUs of 40 GB", _USABLE * 320e9, 8 * 1.555e12, 8 * 25e9),
    Node("8 GPUs of 40 GB, 1.5 TB of memory", _USABLE * 320e9, 8 * 1.555e12, 8 * 25e9, _USABLE * 1.5e12),
    Node(
        "8 GPUs of 40 GB, 1.5 TB of memory, 4 NVMe disks of 4 TB",
        _USABLE * 320e9,
        8 * 1.555e12,
        8 * 25e9,
        _USABLE * 1.5e12,
        _USABLE * 16e12,
        4e6,
        16e9,
    ),
)
# Model -> preset, settings, samples/s: of model A as published for 128 V100; the others are chosen.
MODELS = {
    "model A": ("bench_model_a", (), 1.2e6),
    "model F": ("bench_model_f", (), 1.0e6),
    "MLPerf DLRM-DCNv2": ("bench_mlperf_dcnv2", ("data.scale=1",), 5.0e6),
}
RATES = (0.1, 0.3, 1.0)  # of those samples/s


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
      (`nodes_saved`).

    Raises:
      ConfigError: the folder holds parts of a study with other settings.
    """
    setup = dataclasses.asdict(options)
    kept = Finished(out, setup)
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
    classes = together(list(run.classes(group).values()))
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


def nodes_saved(model: str) -> list[dict[str, Any]]:
    """Nodes for one of `MODELS` at each of `RATES`, with all rows in device memory and with tiers of each kind.

    Returns:
      for each rate and kind of node but the first what `compared` gives, and "samples_per_s".
    """
    preset, settings, samples_per_s = MODELS[model]
    config = presets.load(preset, list(settings))
    source = config.data.open()
    tables, features = specs(config, source.schema, mean_ids(source))
    size, found = config.train.batch_size, []
    all_ = []
    for spec in tables:
        own = [feature for feature in features if feature.table == spec.name]
        values = spec.dim * (2 if spec.dtype == "bfloat16" else 4)
        state = 4 * sum(math.prod(slot.shape) for slot in spec.optimizer.slots(spec.dim).values())
        classes = table_classes(source, spec, own, size, lambda: source.read("train", 0))
        all_.append(Table(classes, values + state, size * sum(feature.ids for feature in own)))
    for share in RATES:
        need = Need(model, all_, share * samples_per_s / size)
        for node in NODES[1:]:
            found.append(compared(need, node) | {"samples_per_s": share * samples_per_s})
    return found
