"""`plan=balanced`: tables, and where need be parts of them, on named devices, so that all have even loads.

Small tables have a copy on each device, as `plan=auto` has them, and tables with a placement of their own have that.
Each other table is one shard on one device. `cuts.py` splits those that are too large for that. Then the shards are
divided among the devices (`partition.py`), such that bytes held, bytes read, bytes exchanged and ids are even, and what
is allocated exceeds what is held by little: segments of equal width, dtype and optimizer share a buffer, which is on
every device as large as the fullest needs. So a shard's bytes are a load of its buffer's, too.

Where the fullest device still has more than `GOOD_ENOUGH` of the mean of any load, or that much is allocated, shards
above 3/4 of a share are split, and so on. Every split costs exchanges, so that the first plan that is good enough is
taken, else the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from recjax.embedding.bind import bind, stack_of, with_owners
from recjax.embedding.plan import Plan, make_plan, with_exchange
from recjax.embedding.segment import EXACT, Exchange, Segment
from recjax.embedding.sharding import RowSharding
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.cuts import Cut, Demand, Stack, cut_all, cut_width, narrowest
from recjax.planning.loads import LOADS, Workload
from recjax.planning.partition import Item, Owners, divide, loads

GOOD_ENOUGH = 1.1  # of the fullest device's load over the mean, and of bytes allocated over those held
ATTEMPTS = 12
_FINER = 0.75  # a shard's largest share of a load, from one to the next attempt
_ALLOCATED = 1.2  # over what is held, for an exchange of fewer bytes
_MORE = 1.1  # times the least bytes sent, for even loads
_WORTH = 0.01  # of imbalance, that a plan of more shards must gain


@dataclasses.dataclass(frozen=True)
class _Division:
    """Cuts, and the devices of all their shards."""

    cuts: Sequence[Cut]
    owners: Owners
    way: str
    imbalance: float
    pools: bool
    allocated: float  # over what is held
    sent: float  # bytes: see `Shares.costs`


def balance(
    tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], work: Workload, exchange: Exchange = EXACT
) -> Plan:
    """Returns a plan that loads the devices of `work` evenly.

    Deterministic: equal arguments give equal plans.

    Args:
      tables: of the model.
      features: that look them up.
      work: the step's work, and the devices that share it.
      exchange: that of all tables that are not replicated.
    """
    placed = make_plan("auto", tables, exchange)
    free = {
        t.name: t
        for t in tables
        if t.placement in (None, "table_wise") and placed.tables[t.name][0].placement != "data_parallel"
    }
    fixed = tuple(t for t in tables if t.name not in free)
    segments, base = _fixed(placed, fixed, features, work)
    division = _divide([Cut(t, t.dim) for t in free.values()], Demand(work, exchange, *base))
    owners = iter(division.owners)
    for cut in division.cuts:
        found = tuple(_segment(cut, *columns, next(owners), division.way, work.devices) for columns in cut.ranges)
        own = work.resolved(cut.spec, exchange, len(cut.ranges), cut.rows)
        segments[cut.spec.name] = tuple(with_exchange(segment, own) for segment in found)
    return Plan({t.name: segments[t.name] for t in tables})


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


def _divide(cuts: Sequence[Cut], demand: Demand) -> _Division:
    """The division of the first cuts that are good enough, or else of the best.

    Where owners pool, to split rows for even loads makes each part send as many vectors, until distinct rows are fewer.
    So where that made more bytes, or no division good enough, the narrowest ranges of columns are tried too. Then of
    all that allocate little enough the one that sends least is taken, or one that is good enough and sends little more.
    """
    width, finest = cut_width(cuts, demand), narrowest(cuts, demand.work.devices)
    found_all = _attempts(cuts, demand, width)
    best = _evenest(found_all)
    if not any(found.pools for found in found_all) or _is_good(best) and best.sent <= _MORE * _least(found_all).sent:
        return best
    if finest < width:
        found_all += _attempts(cuts, demand, finest)
    small = [found for found in found_all if found.allocated <= _ALLOCATED]
    if not any(found.pools for found in small):
        return best
    least = _least(small)
    return _least([found for found in small if _is_good(found) and found.sent <= _MORE * least.sent] or [least])


def _is_good(found: _Division) -> bool:
    return found.imbalance <= GOOD_ENOUGH


def _least(found_all: Sequence[_Division]) -> _Division:
    """The division that sends least."""
    return min(found_all, key=lambda found: found.sent)


def _attempts(cuts: Sequence[Cut], demand: Demand, width: int) -> list[_Division]:
    """Divisions of finer and finer cuts, until one is good enough."""
    found_all: list[_Division] = []
    most = 1.0  # share of a load that a shard may have
    for _ in range(ATTEMPTS):
        finer = cut_all(cuts, demand, width, most)
        if not found_all or finer != cuts:
            cuts = finer
            found_all.append(_placed(cuts, demand))
            if _is_good(found_all[-1]):
                break
        most *= _FINER
    return found_all


def _evenest(found_all: Sequence[_Division]) -> _Division:
    """The most even division; one of more shards has to be good enough or gain something over those before."""
    best = found_all[0]
    for found in found_all[1:]:
        if _is_good(found) or found.imbalance < best.imbalance - _WORTH:
            best = found
    return best


def _placed(cuts: Sequence[Cut], demand: Demand) -> _Division:
    """The shards of some cuts divided among the devices."""
    shares = demand.shares(cuts)
    items = [Item(shares.of_shard(cut, last - first), cut.rows) for cut in cuts for first, last in cut.ranges]
    owners, way, uneven = divide(items, shares.base_NxM, shares.imbalance)
    costs = shares.costs(loads(items, owners, shares.base_NxM))
    return _Division(cuts, owners, way, uneven, shares.pools, *costs)


def _segment(cut: Cut, first: int, last: int, owners: tuple[int, ...], way: str, devices: int) -> Segment:
    """The segment of one range of a cut table's columns."""
    ranges = len(cut.ranges)
    split = [f"{ranges} ranges of columns"] * (ranges > 1) + [f"{cut.rows} parts of rows"] * (cut.rows > 1)
    why = f"balanced ({way}): " + (f"{cut.why}, so split into {' x '.join(split)}" if split else "whole")
    return Segment(
        "table_wise" if cut.rows == 1 else "row_wise",
        columns="all" if ranges == 1 else (first, last),
        owners=owners[0] if cut.rows == 1 else "all" if cut.rows == devices else owners,
        why=why,
    )
