"""`plan=balanced`: tables, and where need be parts of them, on named devices, so that all have even loads.

Small tables have a copy on each device, as `plan=auto` has them, and tables with a placement of their own have that.
Each other table is one shard on one device. `cuts.py` splits those that are too large for that. Then the shards are
divided among the devices (`partition.py`), such that bytes held, bytes read, bytes exchanged and ids are even, and what
is allocated exceeds what is held by little: segments of equal width, dtype and optimizer share a buffer, which is on
every device as large as the fullest needs. So a shard's bytes are a load of its buffer's, too.

Where rows travel, shards above 3/4 of a share are split as long as the fullest device has more than `GOOD_ENOUGH` of
the mean of any load, or that much is allocated, and so on. Every split costs exchanges, so that the first plan that is
good enough is taken, else the best.

Where the kind of exchange is left open, or vectors are pooled, plans are compared by what they send with its padding,
as their exchanges tell it (`padded_bytes`). They differ in how many times fewer bytes vectors must be to be
pooled, in how large a shard may be, and in whether all wide tables are cut: then the tables that pool share one buffer
and one list of ids, and those whose rows travel are spread over all devices.

Shards are divided the heaviest first, each to the device that it leaves least full (LPT, Graham 1969). With a single
load the fullest device has at most 4/3 - 1/(3N) of what is possible; with several there is no such bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from recjax.embedding.bind import bind, stack_of, with_owners
from recjax.embedding.plan import Plan, make_plan, with_exchange
from recjax.embedding.segment import EXACT, Exchange, Segment
from recjax.embedding.sharding import RowSharding
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.cuts import Cut, Demand, Stack, cut_all, cut_to, cut_width, narrowest, spread
from recjax.planning.loads import LOADS, Workload
from recjax.planning.step_sizes import of_plan

GOOD_ENOUGH = 1.1  # of the fullest device's load over the mean, and of bytes allocated over those held
ATTEMPTS = 12
_FINER = 0.75  # a shard's largest share of a load, from one to the next attempt
ALLOCATED = 1.2  # over what is held, for an exchange of fewer bytes
_WORTH = 0.01  # of imbalance, that a plan of more shards must gain
LARGEST = (ALLOCATED, 0.9, 0.6)  # shares of a load that a shard may have, where plans are compared by bytes
_LEAST_TRIED, _MOST_TRIED, _TABLES_TRIED = 4, 16, 4096  # of times by which vectors are fewer bytes; all their tables
_COMPARED, _NEAR = 4, 1.02  # plans of which padded bytes are asked for, at most: within this of the least by the loads


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to be divided.

    Attributes:
      loads: float64 [K], what each of its parts adds to a device; where it adds none of a load, what devices have of
        that does not matter to it.
      parts: equal parts, which must lie on different devices; 1 to N.
    """

    loads: np.ndarray
    parts: int = 1


Owners = list[tuple[int, ...]]  # of each item, the devices of its parts, ascending


@dataclasses.dataclass(frozen=True)
class _Division:
    """Cuts, and the devices of all their shards."""

    cuts: Sequence[Cut]
    owners: Owners
    imbalance: float
    pools: bool
    allocated: float  # over what is held
    sent: float  # bytes: see `Shares.costs`
    padding: float  # of the work of owners, as bytes sent
    demand: Demand

    @property
    def cost(self) -> float:
        """Bytes sent, and those of work on padding; infinite if too much is allocated."""
        return self.sent + self.padding if self.allocated <= ALLOCATED else math.inf


def balance(
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    work: Workload,
    exchange: Exchange = EXACT,
    copies: bool = True,
) -> Plan:
    """Returns a plan that loads the devices of `work` evenly.

    Deterministic: equal arguments give equal plans.

    Args:
      tables: of the model.
      features: that look them up.
      work: the step's work, and the devices that share it.
      exchange: that of all tables that are not replicated.
      copies: whether small tables without a placement are copied; else they are divided, too.
    """
    placed = make_plan("auto", tables, exchange)
    free = {
        t.name: t
        for t in tables
        if t.placement == "table_wise"
        or t.placement is None
        and not (copies and placed.tables[t.name][0].placement == "data_parallel")
    }
    fixed = tuple(t for t in tables if t.name not in free)
    segments, base = _fixed(placed, fixed, features, work)
    cuts = [Cut(t, t.dim) for t in free.values()]

    def plan(division: _Division) -> Plan:
        owners = iter(division.owners)
        for cut in division.cuts:
            found = tuple(_segment(cut, *columns, next(owners), division.demand) for columns in cut.ranges)
            segments[cut.spec.name] = found
        return Plan({t.name: segments[t.name] for t in tables})

    even = Demand(work, exchange, *base)
    divisions = sorted(_pooling(cuts, even), key=lambda division: division.cost)[:_COMPARED]
    if not divisions or divisions[0].cost == math.inf:
        return plan(_evenest(_attempts(cuts, even, cut_width(cuts, even))))
    first = [division for division in divisions if division.cost <= _NEAR * divisions[0].cost]
    costs = [padded_bytes(plan(division), tables, features, work) + division.padding for division in first]
    return plan(first[int(np.argmin(costs))])


def padded_bytes(plan: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], work: Workload) -> float:
    """Returns the bytes that a device sends for the tables in a step under a plan, with padding."""
    bound = bind(plan, tables, features, work.devices, work.dedup, work.hosts, work.replicas)
    return of_plan(bound, work).sent_bytes


def _fixed(
    placed: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], work: Workload
) -> tuple[dict[str, tuple[Segment, ...]], tuple[np.ndarray, dict[Stack, np.ndarray], float]]:
    """The segments of tables that are not for us to place, their hosts named, and what `Demand` has of them."""
    segments = {t.name: placed.tables[t.name] for t in tables}
    if not tables:
        return segments, (np.zeros((work.devices, len(LOADS))), {}, 0.0)
    looking = tuple(f for f in features if f.table in segments)
    bound = bind(Plan(segments), tables, looking, work.devices, hosts=work.hosts)
    stacks: dict[Stack, np.ndarray] = {}
    others = 0.0
    for group in bound.groups:
        if isinstance(group.sharding, RowSharding):
            rows_N = np.sum([group.counts(segment)[0] for segment in group.segments], axis=0)
            stacks[stack_of(group.segments[0].spec, group.dim, group.exchange)] = rows_N * float(
                group.row_bytes(work.item_bytes)
            )
        else:
            others += group.rows * group.row_bytes(work.item_bytes)
    return with_owners(Plan(segments), bound).tables, (work.of_plan(bound), stacks, others)


def _pooling(cuts: Sequence[Cut], even: Demand) -> list[_Division]:
    """Divisions in which owners may pool: by how many times fewer bytes vectors are; the best with other cuts, too.

    Either all tables wider than the narrowest ranges are cut into these, and no others pool; or all tables are whole.
    """
    if not any(even.pools(cut) for cut in cuts):
        return []
    finest = narrowest(cuts, even.work.devices)
    tries = max(_LEAST_TRIED, min(_MOST_TRIED, _TABLES_TRIED // len(cuts)))
    divisions = []
    for width, wider in ((finest, finest), (math.inf, 0)):
        sent = [even.bytes_sent(cut_to(cut, width)) for cut in cuts if cut.spec.dim > wider]
        times = sorted({rows / vectors for rows, vectors in sent if vectors < rows})
        if even.exchange.kind != "auto":
            times, wider = [1.0], 0
        fewer = [least * (1 - 1e-9) for least in times[:: -(-len(times) // tries) or 1]]
        demands = [dataclasses.replace(even, fewer=least, wider=wider) for least in fewer]
        divisions += [_alike(cuts, demand, width, ALLOCATED) for demand in demands]
        if divisions:
            best = min(divisions, key=lambda division: division.sent + division.padding)
            divisions += [_alike(cuts, best.demand, width, most) for most in LARGEST[1:]]
    return divisions


def _alike(cuts: Sequence[Cut], demand: Demand, width: float, most: float) -> _Division:
    """A division of tables of which all that are wider are cut to a width, and those whose rows travel are spread."""
    finest = narrowest(cuts, demand.work.devices)
    alike = cut_all([cut_to(cut, width) for cut in cuts], demand, finest, most)
    return _placed([cut if demand.pools(cut) else spread(cut, demand.work.devices) for cut in alike], demand)


def _attempts(cuts: Sequence[Cut], demand: Demand, width: int) -> list[_Division]:
    """Divisions of finer and finer cuts, until one is good enough."""
    found_all: list[_Division] = []
    most = 1.0  # share of a load that a shard may have
    for _ in range(ATTEMPTS):
        finer = cut_all(cuts, demand, width, most)
        if not found_all or finer != cuts:
            cuts = finer
            found_all.append(_placed(cuts, demand))
            if found_all[-1].imbalance <= GOOD_ENOUGH:
                break
        most *= _FINER
    return found_all


def _evenest(found_all: Sequence[_Division]) -> _Division:
    """The most even division; one of more shards has to be good enough or gain something over those before."""
    best = found_all[0]
    for found in found_all[1:]:
        if found.imbalance <= GOOD_ENOUGH or found.imbalance < best.imbalance - _WORTH:
            best = found
    return best


def _placed(cuts: Sequence[Cut], demand: Demand) -> _Division:
    """The shards of some cuts divided among the devices."""
    shares = demand.shares(cuts)
    items = [Item(shares.of_shard(cut, last - first), cut.rows) for cut in cuts for first, last in cut.ranges]
    owners = divide(items, shares.base_NxM)
    loads_NxM = loads(items, owners, shares.base_NxM)
    return _Division(cuts, owners, shares.imbalance(loads_NxM), shares.pools, *shares.costs(loads_NxM), demand)


def _segment(cut: Cut, first: int, last: int, owners: tuple[int, ...], demand: Demand) -> Segment:
    """The segment of one range of a cut table's columns."""
    ranges = len(cut.ranges)
    split = [f"{ranges} ranges of columns"] * (ranges > 1) + [f"{cut.rows} parts of rows"] * (cut.rows > 1)
    why = "balanced: " + (f"{cut.why}, so split into {' x '.join(split)}" if split else "whole")
    exchange, (rows, vectors) = demand.exchange_of(cut), demand.bytes_sent(cut)
    if demand.exchange.kind == "auto" and vectors < math.inf:
        why += f"; {rows:,.0f} bytes a device and step as rows, {vectors:,.0f} as pooled vectors"
    segment = Segment(
        "table_wise" if cut.rows == 1 else "row_wise",
        columns="all" if ranges == 1 else (first, last),
        owners=owners[0] if cut.rows == 1 else "all" if cut.rows == demand.work.devices else owners,
        why=why,
    )
    return with_exchange(segment, exchange)


def loads(items: Sequence[Item], owners: Owners, base_NxK: np.ndarray) -> np.ndarray:
    """Sums up the loads of each device: float64 [N, K]."""
    sums_NxK = base_NxK.astype(np.float64, copy=True)
    for item, devices in zip(items, owners, strict=True):
        sums_NxK[list(devices)] += item.loads
    return sums_NxK


def divide(items: Sequence[Item], base_NxK: np.ndarray) -> Owners:
    """Gives the heaviest item first, to the devices whose fullest load is the least with it. Deterministic.

    Args:
      items: what to divide.
      base_NxK: loads that the devices have already, all in shares of what is right: 1 is a device's share.
    """
    sums_NxK = base_NxK.astype(np.float64, copy=True)
    owners: Owners = [()] * len(items)
    for n in _heaviest_first(items):
        item = items[n]
        used_K = item.loads > 0
        devices = _least(sums_NxK[:, used_K] + item.loads[used_K])[: item.parts]
        sums_NxK[devices] += item.loads
        owners[n] = tuple(sorted(devices.tolist()))
    return owners


def _heaviest_first(items: Sequence[Item]) -> list[int]:
    return sorted(range(len(items)), key=lambda n: (-float(items[n].loads.max()), -float(items[n].loads.sum()), n))


def _least(sums_NxK: np.ndarray) -> np.ndarray:
    """The devices by their fullest load, then by all their loads, then by number."""
    return np.lexsort((sums_NxK.sum(1), sums_NxK.max(1, initial=0)))
