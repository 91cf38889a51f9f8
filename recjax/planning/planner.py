"""`plan=auto` with a machine: each table's way, the buckets of dense gradients and who routes, by predicted step time.

The search has no clock and no chance in it: equal arguments give equal plans, in every process.

  1. Assignments by two thresholds: tables below so many bytes are copied; of the others those pool whose pooled vectors
     are so many times fewer bytes than distinct rows, or the wide ones of these. The plain rule's assignment is one of
     them. Each also with all tables whole that pool.
  2. From the best, tables (those that are alike together, the ones with most to send first) go another way if the step
     is then predicted to be shorter.
  3. The best few become plans, whose exact sizes are predicted again; or whose steps are compiled, and predicted from
     that. The plain rule wins if it is within `BAND`: a difference that predictions do not resolve is none, and the
     simpler plan is better.
  4. Buckets of dense gradients, and routing by host or device, where the config leaves these open.

A step is predicted from sizes alone (`sketch.py`). What hides behind something longer adds little to a step, but not
nothing: `_HIDDEN` of the devices' time counts besides.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from recjax.embedding.bind import bind
from recjax.embedding.plan import AUTO_REPLICATE_BYTES, Plan
from recjax.embedding.spec import TableSpec
from recjax.errors import ConfigError
from recjax.planning.assign import WAYS, Assignment, Demand, Way, as_plan, sizes
from recjax.planning.costs import Costs
from recjax.planning.cuts import NARROWEST
from recjax.planning.predict import DEVICES, Prediction, predict
from recjax.planning.question import Answer, Question
from recjax.planning.sketch import sketch
from recjax.planning.step_sizes import DenseSizes, StepSizes, of_plan
from recjax.tiers.caches import with_caches

BAND = 0.05  # of a step's time: within it plans are equal
_HIDDEN = 0.05
_COPIED_BYTES = (0, 2**14, AUTO_REPLICATE_BYTES, 2**18, 2**20, 2**22, 2**24)
_FEWER = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.0)  # times by which vectors are fewer bytes than rows
_MOVED_CLASSES = 32  # of tables that are alike, for which other ways are tried one by one
_FINALISTS = 4
BUCKETS_MIB = (0.0, 1.0, 4.0, 16.0, 64.0)


class Planner:
    """Predicts steps of one question; what was predicted is kept."""

    def __init__(self, question: Question) -> None:
        """Starts with nothing known."""
        self.question = question
        self._costs = Costs(question.machine)
        self._known: dict[tuple[Way, ...], tuple[float, float]] = {}

    def predicted(self, found: StepSizes, dense: DenseSizes | None = None) -> Prediction:
        """A step of these sizes."""
        q = self.question
        graph, lists = sketch(found, dense or q.dense, q.machine.shared), found.lists
        resident = "rows" in q.memory(found)
        host = dataclasses.replace(
            q.host,
            placed_bytes=4 * q.host.samples if resident else q.host.placed_bytes + int(sum(lists) * 4 * q.host.devices),
            source="resident" if resident else q.host.source,
            in_rows=q.host.in_rows and not (found.host_routes or found.vectors),
            placed_arrays=q.host.placed_arrays + 2 * len(lists),
            arguments=q.host.arguments + 4 * len(lists),
            routes=found.host_routes,
            routed=found.routed,
        )
        return predict(graph, q.machine, host, self._costs)

    def cost(self, ways: Assignment) -> float:
        """Cost of an assignment, us: the price of its step; infinite if it does not fit."""
        return self._costed(ways)[0]

    def step_us(self, ways: Assignment) -> float:
        """Time of an assignment's step, us; infinite if it does not fit."""
        return self._costed(ways)[1]

    def _costed(self, ways: Assignment) -> tuple[float, float]:
        q = self.question
        key = tuple(ways[t.name] for t in q.demand.tables)
        if key not in self._known:
            found = sizes(q.demand, ways)
            if q.memory(found)["total"] > q.budget_bytes:
                self._known[key] = math.inf, math.inf
            else:
                prediction = self.predicted(found)
                self._known[key] = price(prediction), prediction.step_us
        return self._known[key]


def price(prediction: Prediction) -> float:
    """Price by which plans are compared, us: the step, and a little of the work that it hides."""
    return prediction.step_us + _HIDDEN * prediction.bounds[DEVICES]


def allowed(demand: Demand, table: TableSpec) -> tuple[Way, ...]:
    """The ways that a table may go: what the user has fixed stays.

    With an exchange in reduced precision copies are those of the plain rule, since rows that do not travel are not
    rounded.
    """
    small = table.rows * table.dim * 4 <= AUTO_REPLICATE_BYTES
    if table.placement is not None:
        fixed: dict[str, tuple[Way, ...]] = {"data_parallel": ("copy",), "row_wise": ("rows",)}
        return fixed.get(table.placement, ("pooled",))
    exact = (demand.exchange.forward, demand.exchange.backward) == ("float32", "float32")
    pools = demand.work.profile.tables[table.name].bags > 0 and demand.exchange.kind != "rows"
    found: tuple[Way, ...] = ("rows",) if demand.exchange.kind != "pooled" or not pools else ()
    found += ("whole", "pooled") if pools else ()
    if not exact:
        return ("copy",) if small else found
    return ("copy", *found)


def _ways(demand: Demand, copied: int, pooled: Collection[str]) -> Assignment:
    """Tables of at most so many bytes as copies, those that are named pooled, others as rows; where they may go so."""
    found: dict[str, Way] = {}
    for table in demand.tables:
        ways = allowed(demand, table)
        wanted: Way = "copy" if table.rows * table.dim * 4 <= copied else "pooled" if table.name in pooled else "rows"
        found[table.name] = wanted if wanted in ways else "rows" if "rows" in ways else ways[-1]
    return found


def plain_ways(demand: Demand) -> Assignment:
    """Ways of the plain rule: copies of small tables, else rows."""
    return _ways(demand, AUTO_REPLICATE_BYTES, ())


def by_thresholds(demand: Demand) -> list[Assignment]:
    """The assignments to begin with, the plain rule's first; each also with all tables whole that pool."""
    fewer = {}
    for table in demand.tables:
        rows, vectors = demand.work.bytes_sent(table, demand.exchange, table.dim)
        fewer[table.name] = rows / vectors if vectors else math.inf
    wide = {table.name for table in demand.tables if table.dim > NARROWEST}
    starts = [plain_ways(demand)]
    for copied, least in itertools.product(_COPIED_BYTES, _FEWER):
        pooled = {name for name, times in fewer.items() if times > least}
        starts.append(_ways(demand, copied, pooled))
        if pooled - wide and pooled & wide:  # which share one buffer and one list of ids
            starts.append(_ways(demand, copied, pooled & wide))
    whole = {table.name for table in demand.tables if "whole" in allowed(demand, table)}
    return starts + [
        {name: "whole" if way == "pooled" and name in whole else way for name, way in ways.items()} for ways in starts
    ]


def classes(demand: Demand) -> list[list[TableSpec]]:
    """Tables that are alike, those with most to send first."""
    found: dict[Any, list[TableSpec]] = collections.defaultdict(list)
    for table in demand.tables:
        use = demand.work.profile.tables[table.name]
        alike = (table.rows, table.dim, table.dtype, table.optimizer, round(math.log2(1 + use.distinct) * 8), use.ids)
        found[(*alike, use.bags, table.placement)].append(table)

    def sent(tables: Sequence[TableSpec]) -> float:
        return sum(min(demand.work.bytes_sent(t, demand.exchange, t.dim)) for t in tables)

    return sorted(found.values(), key=lambda tables: (-sent(tables), tables[0].name))


def search(planner: Planner, tell: Callable[[str], None] = lambda text: None) -> list[Assignment]:
    """The best assignments, the best first."""
    demand = planner.question.demand
    starts = by_thresholds(demand)
    best = min(starts, key=planner.cost)
    tell(f"{len(starts)} ways to begin with")
    kinds = classes(demand)[:_MOVED_CLASSES]
    for _ in range(2):
        improved = False
        for tables in kinds:
            for way in allowed(demand, tables[0]):
                other = {**best, **dict.fromkeys((t.name for t in tables), way)}
                if planner.cost(other) < planner.cost(best):
                    best, improved = other, True
        if not improved:
            break
    ranked = sorted((a for a in (best, *starts) if planner.cost(a) < math.inf), key=planner.cost)
    distinct: dict[float, Assignment] = {}
    for ways in ranked:  # of equal cost are those that differ in name alone: one owner without a need to split
        distinct.setdefault(planner.cost(ways), ways)
    return list(distinct.values())[:_FINALISTS]


@dataclasses.dataclass(frozen=True)
class _Final:
    """A plan that may be chosen: its ways and sizes, its step from sizes alone, and as it is compared with others."""

    plan: Plan
    ways: Assignment
    exact: StepSizes
    sketched: Prediction
    compared: Prediction


def answer(
    question: Question,
    plain: Plan,
    tell: Callable[[str], None] = lambda text: None,
    judge: Callable[[Plan], Prediction] | None = None,
) -> Answer | None:
    """Returns the chosen plan; None if no plan fits the budget.

    Args:
      question: what is to be planned.
      plain: the plan of the plain rule.
      tell: called with what is done.
      judge: a better prediction than that from sizes alone: decides among the plain rule's plan and as many of the best
        ones as `planner.compile` says. None: sizes alone decide.
    """
    planner, demand = Planner(question), question.demand
    plain_sizes = exact_sizes(demand, plain)
    simple = planner.predicted(plain_sizes)
    plain_fits = question.memory(plain_sizes)["total"] <= question.budget_bytes
    found = search(planner, tell) if demand.work.devices > 1 else []
    finals = []
    for ways in found:
        plan = as_plan(demand, ways, {t.name: WAYS[ways[t.name]] for t in demand.tables})
        exact = exact_sizes(demand, plan)
        if question.memory(exact)["total"] <= question.budget_bytes and _admits(question, plan):
            sketched = planner.predicted(exact)
            finals.append(_Final(plan, ways, exact, sketched, sketched))
    finals.sort(key=lambda final: price(final.compared))
    if not finals and not plain_fits:
        return None
    rule = _Final(plain, plain_ways(demand), plain_sizes, simple, simple)
    if judge is not None and finals:
        first = finals[: max(1, question.settings.compile)]
        finals = [dataclasses.replace(final, compared=judge(final.plan)) for final in first]
        finals.sort(key=lambda final: price(final.compared))
        rule = dataclasses.replace(rule, compared=judge(plain)) if plain_fits else rule
    kept = plain_fits and (not finals or price(rule.compared) <= (1 + BAND) * price(finals[0].compared))
    best = rule if kept else finals[0]
    compared = [final.compared for final in finals]
    choices: list[dict[str, Any]] = [_of_plans(best.compared, kept, rule.compared, plain_fits, compared)]
    if judge is not None and finals:
        choices[0]["why"] += f"; {len(finals)} were compiled"
    tables = {} if demand.work.devices == 1 else reasons(planner, best.ways)
    plan = best.plan if kept else with_reasons(best.plan, tables)
    bucket, chosen, choice = dense_bucket(planner, best.exact, best.sketched)
    choices.append(choice)
    routing, chosen, choice = _routing(planner, best.exact, chosen, bucket)
    choices.append(choice)
    memory = question.memory(best.exact)
    return Answer(plan, best.ways, chosen, simple, memory, bucket, routing, choices, tables, kept)


def _admits(question: Question, plan: Plan) -> bool:
    """False if `tier.device_bytes` is set, and caches cannot do what the plan asks for."""
    demand, work = question.demand, question.demand.work
    if question.cache_bytes:
        bound = bind(plan, demand.tables, demand.features, work.devices, work.dedup, work.hosts, work.replicas)
        try:
            with_caches(bound, question.cache_bytes, work.item_bytes)
        except ConfigError:
            return False
    return True


def exact_sizes(demand: Demand, plan: Plan) -> StepSizes:
    """The sizes of a step under a plan."""
    work = demand.work
    how = (work.dedup, work.hosts, work.replicas)
    bound = bind(plan, demand.tables, demand.features, work.devices, *how, row_pieces=demand.exchange.pieces)
    return of_plan(bound, work, demand.host_routes)


def _of_plans(
    chosen: Prediction, kept: bool, plain: Prediction, plain_fits: bool, finals: Sequence[Prediction]
) -> dict[str, Any]:
    tried = {"the plain rule": plain} if plain_fits else {}
    tried |= {f"the planner's {'next' if n else 'best'}": found for n, found in enumerate(finals[:2])}
    name = "the plain rule" if kept else "the planner's best"
    others = [other for other in tried if other != name]
    following = min(others, key=lambda other: tried[other].step_us, default=None)
    why = "shortest predicted step" if plain_fits else "the plain rule does not fit"
    if kept:
        why = f"no other plan is predicted to be more than {BAND:.0%} faster: that is within the error of predictions"
    return choice_of("plan", name, why, chosen, following, tried[following] if following else None)


def reasons(planner: Planner, ways: Assignment) -> dict[str, dict[str, Any]]:
    """For each table its way, and the step's time if it, and those like it, went the next best one."""
    demand = planner.question.demand
    found: dict[str, dict[str, Any]] = {}
    own = planner.step_us(ways)
    for number, tables in enumerate(classes(demand)):
        way = ways[tables[0].name]
        others: dict[Way, float] = {}
        if number < _MOVED_CLASSES:
            for other in allowed(demand, tables[0]):
                if other != way:
                    us = planner.step_us({**ways, **dict.fromkeys((t.name for t in tables), other)})
                    others |= {other: us} if us != own else {}  # equal: the same by another name
        after, following = min(((us, other) for other, us in others.items()), default=(math.inf, None))
        for table in tables:
            rows, vectors = demand.work.bytes_sent(table, demand.exchange, table.dim)
            found[table.name] = {
                "way": way,
                "step_ms": own / 1e3,
                "sent_bytes": {"rows": rows, "copy": 0.0}.get(way, vectors),
                "alike": len(tables),
                "class": number,
                "next": following,
                "next_step_ms": after / 1e3 if after < math.inf else None,
                "next_fits": after < math.inf,
            }
    return found


def reason(of: dict[str, Any]) -> str:
    """A table's reason as text."""
    way: Way = of["way"]
    text = f"{WAYS[way]} ({of['sent_bytes']:,.0f} bytes a device and step)"
    if of["next"] is None:
        return text
    who = "it" if of["alike"] == 1 else f"the {of['alike']} alike"
    other = f"with {who} as `{of['next']}`"
    if of["next_step_ms"] is None:
        return f"{text}; {other} it does not fit"
    return f"{text}: {of['step_ms']:.3g} ms a step predicted, {other} {of['next_step_ms']:.3g}"


def with_reasons(plan: Plan, tables: dict[str, dict[str, Any]]) -> Plan:
    """The plan with what `reasons` found in place of each table's way."""

    def better(name: str) -> Any:
        text = reason(tables[name])
        way: Way = tables[name]["way"]
        return tuple(dataclasses.replace(s, why=s.why.replace(WAYS[way], text, 1)) for s in plan.tables[name])

    return Plan({name: better(name) for name in plan.tables})


def dense_bucket(planner: Planner, exact: StepSizes, chosen: Prediction) -> tuple[float, Prediction, dict[str, Any]]:
    """The size of buckets of dense gradients."""
    dense = planner.question.dense
    own = dense.bucket_bytes / 2**20
    if not planner.question.open_bucket or exact.devices == 1:
        return own, chosen, choice_of("bucket", own, "as the config says", chosen)
    tried = {
        mib: chosen if mib == own else planner.predicted(exact, dataclasses.replace(dense, bucket_bytes=mib * 2**20))
        for mib in BUCKETS_MIB
        if mib == 0 or mib * 2**20 < 4 * dense.values
    }
    best = min(tried, key=lambda mib: price(tried[mib]))
    best = 0.0 if price(tried[0.0]) <= (1 + BAND) * price(tried[best]) else best
    following = min((mib for mib in tried if mib != best), key=lambda mib: price(tried[mib]), default=None)
    why = "MiB of dense gradients that are sent at a time; 0: all after the backward pass"
    after = None if following is None else tried[following]
    return best, tried[best], choice_of("bucket", best, why, tried[best], following, after)


def _routing(
    planner: Planner, exact: StepSizes, chosen: Prediction, bucket: float
) -> tuple[str, Prediction, dict[str, Any]]:
    """The one who routes: "host" or "device"."""
    given = "host" if exact.host_routes else "device"
    machine = planner.question.machine
    fixed = ""
    if not planner.question.open_routing:
        fixed = "as the config says"
    elif machine.shared:  # where devices could take no work off the host
        fixed = "devices compute on the cores of the host"
    elif not machine.knows("host_route"):
        fixed = "the plain rule: the machine file says nothing of routing"
    if fixed:
        routing = "auto" if planner.question.open_routing and not machine.shared else given
        return routing, chosen, choice_of("routing", given, fixed, chosen)
    dense = dataclasses.replace(planner.question.dense, bucket_bytes=bucket * 2**20)
    tried = {
        who: planner.predicted(dataclasses.replace(exact, host_routes=who == "host"), dense)
        for who in ("host", "device")
    }
    slower = price(tried["device"]) * (1 + BAND)
    best = "device" if slower < price(tried["host"]) else "host"
    other = "host" if best == "device" else "device"
    why = "who finds the distinct rows of a batch"
    return best, tried[best], choice_of("routing", best, why, tried[best], other, tried[other])


def choice_of(
    what: str, chosen: Any, why: str, of: Prediction, following: Any = None, after: Prediction | None = None
) -> dict[str, Any]:
    """A choice for people, as JSON has it.

    Args:
      what: was chosen, such as "bucket".
      chosen: its value.
      why: that one.
      of: the step with it.
      following: the next best value; None where no other was tried.
      after: the step with that.
    """
    return {
        "what": what,
        "chosen": chosen,
        "step_ms": of.step_us / 1e3,
        "next": following,
        "next_step_ms": None if after is None else after.step_us / 1e3,
        "why": why,
    }
