"""`plan=auto` with a machine whose devices are too small for all rows: how many bytes of rows they hold, and of what.

1. The plain rule's plan, and the planner's best ones as if rows that are spread took no room, are bound with caches
   that take all the room which the rest of a step leaves in the budget: a larger cache has no more misses.
2. The run's first batches go through each one's directories, and a closed form tells the rest (`tier_run`): rows that
   come and go in a step, over the link, from the disk and to it.
3. A step takes as long as its slowest part, of that traffic and those of a step with all rows on the devices, to which
   the work of moving rows is added where it was measured. The plain rule wins if it is within `BAND`.
"""

from __future__ import annotations

import dataclasses
import math

from recjax.config.run import RunConfig
from recjax.data.source import BlockSource
from recjax.embedding.plan import Plan
from recjax.errors import ConfigError, TrainingError
from recjax.parallel import distributed
from recjax.planning.assign import WAYS, Assignment, as_plan
from recjax.planning.machine import Machine
from recjax.planning.planner import (
    BAND,
    Planner,
    choice_of,
    dense_bucket,
    plain_ways,
    price,
    reasons,
    search,
    with_reasons,
)
from recjax.planning.predict import Prediction
from recjax.planning.question import GIB, USABLE, Answer, Question, TierChoice, needed
from recjax.planning.resolve import bound_as
from recjax.planning.step_sizes import StepSizes, of_plan
from recjax.planning.tier_replay import COUNTS
from recjax.planning.tier_run import Run, costs, modelled, rates, with_moves
from recjax.tiers.caches import with_caches
from recjax.utils.units import size_text

REPLAYED_IDS = 2**23  # some seconds
_ADDRESS_BYTES = 4  # of each row of a cache, beside it: its home
_BLOCK = 4096  # that a cache's bytes are a multiple of


@dataclasses.dataclass(frozen=True)
class _Option:
    """A plan with caches."""

    name: str
    plan: Plan
    ways: Assignment
    sizes: StepSizes
    prediction: Prediction
    tier: TierChoice


def choose(asked: Question, plain: Plan, config: RunConfig, source: BlockSource) -> Answer | str:
    """Chooses a plan with caches for a run of which no plan fits with all rows on the devices.

    Deterministic but for the rates of a disk that the machine file lacks, which are measured.

    Args:
      asked: the question that `planner.answer` has no answer to.
      plain: the plan of the plain rule.
      config: of the run, as it is for so many rows.
      source: its data, of which the first batches are read.

    Returns:
      The answer; or why rows on the host do not help, as a clause for people.
    """
    if refused := _refused(asked, config):
        return refused
    host = dataclasses.replace(asked.host, routes=True)
    demand = dataclasses.replace(asked.demand, host_routes=True)
    planner = Planner(dataclasses.replace(asked, host=host, demand=demand, cache_bytes=1))
    plans = [("the plain rule", plain, plain_ways(demand))]
    if demand.work.devices > 1:
        for number, ways in enumerate(search(planner)):
            why = {t.name: WAYS[ways[t.name]] for t in demand.tables}
            name = f"the planner's {'next' if number else 'best'}"
            plans.append((name, as_plan(demand, ways, why), ways))
    options: list[_Option] = []
    first = ""
    for name, plan, ways in plans:
        try:
            options.append(_option(name, plan, ways, planner, config, source))
        except (ConfigError, TrainingError) as error:
            first = first or str(error)
    if not options:
        return first
    best = min(options, key=lambda option: price(option.prediction))
    chosen = options[0] if price(options[0].prediction) <= (1 + BAND) * price(best.prediction) else best
    return _answered(planner, chosen, options, asked)


def room(asked: Question, sizes: StepSizes) -> int:
    """Bytes of a device that all but rows which are spread leave in the budget; 0 if none."""
    left = asked.budget_bytes - (needed(sizes, asked.dense)["total"] - sizes.spread_bytes)
    return max(0, int(left) // _BLOCK * _BLOCK)


def _refused(asked: Question, config: RunConfig) -> str:
    """Returns why caches cannot do what a config asks for, as far as plans have no part in it; "" if they can."""
    dynamic = [name for name, table in config.embedding.tables.items() if table.ids]
    for what, found in (
        ("hot rows (set embedding.hot.rows=0)", config.embedding.hot.rows),
        ("routing on the devices (set train.routing=auto)", config.train.routing == "device"),
        ("rows that are given to keys (embedding.tables.NAME.ids=dynamic)", dynamic),
        ("a tier.device_bytes that is set (leave it out)", asked.cache_bytes),
    ):
        if found:
            return f"rows on the host do not go with {what}"
    return ""


def _option(
    name: str, plan: Plan, ways: Assignment, planner: Planner, config: RunConfig, source: BlockSource
) -> _Option:
    """A plan with caches as large as they may be; ConfigError or TrainingError if that cannot be."""
    asked = planner.question
    demand, work = asked.demand, asked.demand.work
    shape = (work.replicas, work.hosts, work.devices // work.hosts)
    bound = bound_as(config, plan, demand.tables, demand.features, shape)
    whole = of_plan(bound, work)
    spread = [group for group in bound.groups if group.spread]
    left = room(asked, whole)
    if not left or not spread:
        rest = needed(whole, asked.dense)["total"] - whole.spread_bytes
        raise ConfigError(f"all but the rows of spread tables, which could be on the host, needs {rest / GIB:.3g} GiB")
    row = min(group.row_bytes(work.item_bytes) for group in spread)
    left = left * row // (row + _ADDRESS_BYTES) // _BLOCK * _BLOCK
    cached = with_caches(bound, left, work.item_bytes)
    config = dataclasses.replace(config, tier=dataclasses.replace(config.tier, device_bytes=left))
    run = Run(config, source, cached, distributed.processes())
    sizes = of_plan(cached, work)
    prediction, tier = _traffic(run, planner.predicted(sizes), planner.predicted(whole), asked)
    return _Option(name, plan, ways, sizes, prediction, tier)


def _traffic(run: Run, step: Prediction, whole: Prediction, asked: Question) -> tuple[Prediction, TierChoice]:
    """A predicted step with the traffic of its caches, and what is to be said of them."""
    found = run.replayed(REPLAYED_IDS)
    model = modelled(run)
    counts = dict(model["model_step"])
    replayed = len(found.counts) if found else 0
    if found is not None:
        rest = run.steps - replayed
        counts = {n: (found.total(n) + rest * counts[n]) / run.steps for n in COUNTS}
    parts = model["parts"]
    if found is not None and replayed == run.steps:
        parts = {name: dataclasses.asdict(part) for name, part in found.parts.items()}
    records = {s.title: run.row_bytes[group.name] for group in run.bound.cached for s in group.segments}
    behind, disk = (sum(of[where] * records[name] for name, of in parts.items()) for where in ("dram", "disk"))
    limit = _host_bytes(run, asked)
    if behind > limit:
        raise ConfigError(
            f"rows that leave the devices take {size_text(int(behind))} of the host's memory in the course of the run, "
            f"of which {size_text(int(limit))} can be used: set tier.dram_bytes and tier.disk=DIR"
        )
    times = costs(run, counts, rates(run, asked.machine), None)["ms"]
    step = with_moves(step, run, counts)
    bounds = step.bounds | {f"rows of tables: {name}": 1e3 * ms for name, ms in times.items()}
    prediction = dataclasses.replace(step, bounds=bounds)
    named = counts["hits"] + counts["misses"]
    tables = tuple(dict.fromkeys(s.spec.name for group in run.bound.cached for s in group.segments))
    hit_rate = counts["hits"] / named if named else 1.0
    size = run.config.tier.bytes_of("device_bytes")
    slower = prediction.step_us / whole.step_us
    return prediction, TierChoice(size, tables, hit_rate, counts["misses"], behind, disk, whole.step_us / 1e3, slower)


def _host_bytes(run: Run, asked: Question) -> float:
    """Bytes of the hosts' memory that rows may take; infinite with a disk, or if nothing is known of it."""
    if run.config.tier.disk:
        return math.inf
    if limit := min(run.memory_bytes.values(), default=0):
        return limit
    machine: Machine = asked.machine
    if not machine.shared:
        return math.inf
    work = asked.demand.work
    return max(0.0, USABLE * machine.rate("memory_size") - work.devices * work.replicas * asked.budget_bytes)


def _answered(planner: Planner, chosen: _Option, options: list[_Option], asked: Question) -> Answer:
    others = [option for option in options if option is not chosen]
    following = min(others, key=lambda option: price(option.prediction), default=None)
    tables = {} if asked.demand.work.devices == 1 else reasons(planner, chosen.ways)
    kept = chosen.name == "the plain rule"
    plan = chosen.plan if kept else with_reasons(chosen.plan, tables)
    bucket, _, bucket_choice = dense_bucket(planner, chosen.sizes, chosen.prediction)
    tier, step = chosen.tier, chosen.prediction
    budget = f"{size_text(int(asked.budget_bytes))} of a device are too few for all rows"
    after = None if following is None else f"{following.name} with {size_text(following.tier.device_bytes)} of rows"
    next_step = None if following is None else following.prediction
    choices = [
        choice_of("plan", chosen.name, f"{budget}; rows travel to caches", step, after, next_step),
        choice_of("tiers", f"tier.device_bytes={tier.device_bytes}", tier_text(tier), step),
        bucket_choice,
        choice_of("routing", "host", "it alone knows which rows are on the devices", step),
    ]
    memory = asked.memory(chosen.sizes)
    plain = options[0].prediction if options[0].name == "the plain rule" else chosen.prediction
    return Answer(
        plan, chosen.ways, chosen.prediction, plain, memory, bucket, "host", choices, tables, kept, chosen.tier
    )


def tier_text(tier: TierChoice) -> str:
    """A choice in words."""
    where = f"{size_text(round(tier.host_bytes))} of rows are then in the host's memory"
    where += f", {size_text(round(tier.disk_bytes))} on its disk" if tier.disk_bytes else ""
    few = ", ".join(tier.tables[:4]) + (f" and {len(tier.tables) - 4} more" if len(tier.tables) > 4 else "")
    return (
        f"caches of {few}: {tier.hit_rate:.1%} of the rows that a batch names are there, {tier.misses:,.0f} a step "
        f"come; {where}; {tier.slowdown:.2f} times the {tier.whole_ms:.3g} ms of a step with all rows there"
    )
