"""`plan=balanced`: tables, and where need be parts of them, on named devices, so that all have even loads.

Small tables have a copy on each device, as `plan=auto` has them, and tables with a placement of their own have that.
Each other table is one shard on one device. A shard of which any load exceeds a device's share of that is split:

  by rows     if its ids do so, since each shard of columns asks for all ids once more
  by columns  else, into equal ones, which then share a buffer: to 32 columns at least, or so many that the rows on a
              device can be counted in int32
  by rows     where columns are as few as they may be

Rows are split evenly among distinct devices. A table that is split by rows and would come to as many shards as there
are devices is split by rows alone, among all of them: that asks for its ids once. Then the shards are divided among the
devices (`partition.py`). Where the fullest still has more than `GOOD_ENOUGH` of the mean of any load, shards above 3/4
of a share are split, and so on. Every split costs exchanges, so that the first plan that is good enough is taken, else
the best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from recjax.embedding.bind import bind
from recjax.embedding.plan import EXACT, OWNED, Exchange, Plan, Segment, make_plan, with_exchange
from recjax.embedding.spec import MAX_ROWS, FeatureSpec, TableSpec
from recjax.planning.loads import LOADS, Workload
from recjax.planning.partition import Item, Owners, divide, loads

NARROWEST = 32  # columns that a split leaves a shard
GOOD_ENOUGH = 1.1  # of the fullest device's load over the mean
ROUNDS = 20
_FINER = 0.75  # a shard's largest share of a load, from one to the next attempt
_WORTH = 0.01  # of imbalance, that a plan of more shards must gain
_IDS = list(LOADS).index("ids")


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A table that is cut into so many ranges of columns, each of so many parts of rows."""

    spec: TableSpec
    columns: int = 1
    rows: int = 1
    why: str = ""

    @property
    def width(self) -> int:
        """Columns of each shard."""
        return self.spec.dim // self.columns


@dataclasses.dataclass(frozen=True)
class _Division:
    """Cuts, and the devices of all their shards."""

    cuts: Sequence[_Cut]
    owners: Owners
    way: str
    imbalance: float


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
    free = [t for t in tables if t.placement in (None, "table_wise") and placed.tables[t.name][0].owners == "all"]
    free = [t for t in free if placed.tables[t.name][0].placement != "data_parallel"]
    fixed = tuple(t for t in tables if t not in free)
    segments, base_NxK = _fixed(placed, fixed, features, work)
    division = _divide([_Cut(t) for t in free], base_NxK, work, exchange)
    owners = iter(division.owners)
    for cut in division.cuts:
        of_shards = [next(owners) for _ in range(cut.columns)]
        if cut.rows == 1 and len(set(of_shards)) == 1:  # back together on one device
            cut, of_shards = _Cut(cut.spec), of_shards[:1]
        found = tuple(_segment(cut, n, own, division.way, work.devices) for n, own in enumerate(of_shards))
        segments[cut.spec.name] = tuple(with_exchange(segment, exchange) for segment in found)
    return Plan({t.name: segments[t.name] for t in tables})


def _fixed(
    placed: Plan, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], work: Workload
) -> tuple[dict[str, tuple[Segment, ...]], np.ndarray]:
    """The segments of tables that are not for us to place, their hosts named, and their loads, [N, K]."""
    segments = {t.name: placed.tables[t.name] for t in tables}
    if not tables:
        return segments, np.zeros((work.devices, len(LOADS)))
    looking = tuple(f for f in features if f.table in segments)
    bound = bind(Plan(segments), tables, looking, work.devices, hosts=work.hosts)
    for group in bound.groups:
        for part in group.segments:
            if part.placement in OWNED:
                host = part.split.first // part.split.owners
                segments[part.spec.name] = (dataclasses.replace(segments[part.spec.name][0], owners=host),)
    return segments, work.of_plan(bound)


def _divide(cuts: Sequence[_Cut], base_NxK: np.ndarray, work: Workload, exchange: Exchange) -> _Division:
    """The division of the first cuts that are good enough, or else of the best."""
    narrowest = _narrowest(cuts, work.devices)
    best: _Division | None = None
    most = 1.0  # share of a load that a shard may have
    for attempt in range(ROUNDS):
        shards = [work.of_columns(cut.spec, cut.width, exchange) / cut.rows for cut in cuts]
        total_K = base_NxK.sum(0) + sum(shard * cut.rows * cut.columns for shard, cut in zip(shards, cuts, strict=True))
        share_K = np.where(total_K > 0, total_K, 1.0) / work.devices
        finer = [
            _split(cut, shard / share_K, most, narrowest, work.devices) for cut, shard in zip(cuts, shards, strict=True)
        ]
        if finer != cuts and attempt < ROUNDS - 1:
            cuts = finer
            continue
        items = [
            Item(shard / share_K, cut.rows) for shard, cut in zip(shards, cuts, strict=True) for _ in range(cut.columns)
        ]
        owners, way = divide(items, base_NxK / share_K)
        found = _Division(cuts, owners, way, float(loads(items, owners, base_NxK / share_K).max()))
        if best is None or found.imbalance < best.imbalance - _WORTH:
            best = found
        if best.imbalance <= GOOD_ENOUGH:
            break
        most *= _FINER
    assert best is not None  # the last round divides whatever there is
    return best


def _narrowest(cuts: Sequence[_Cut], devices: int) -> int:
    """Columns of which a device's share of all values has at most half the rows that int32 can count."""
    values = sum(cut.spec.rows * cut.spec.dim for cut in cuts) / devices
    return max(NARROWEST, math.ceil(values / (MAX_ROWS / 2)))


def _split(cut: _Cut, shares_K: np.ndarray, most: float, narrowest: int, devices: int) -> _Cut:
    """The cut, finer if the loads of one of its shards, in shares of a device, exceed `most`."""
    everywhere = min(devices, cut.spec.rows)
    if shares_K.max() <= most or cut.rows == everywhere or cut.spec.placement is not None:
        return cut
    worst = int(shares_K.argmax())
    why = cut.why or f"{shares_K[worst]:.2f} of a device's {list(LOADS.values())[worst]}"
    counts = [n for n in range(cut.columns + 1, cut.spec.dim // narrowest + 1) if cut.spec.dim % n == 0]
    if counts and shares_K[_IDS] <= most:
        needed = cut.columns * shares_K.max() / most
        columns, rows = next((n for n in counts if n >= needed), counts[-1]), cut.rows
    else:
        columns, rows = cut.columns, min(everywhere, math.ceil(cut.rows * shares_K.max() / most))
    if rows > 1 and rows * columns >= everywhere:
        columns, rows = 1, everywhere
    return dataclasses.replace(cut, columns=columns, rows=rows, why=why)


def _segment(cut: _Cut, number: int, owners: tuple[int, ...], way: str, devices: int) -> Segment:
    """The n-th range of columns of a cut table."""
    split = [f"{cut.columns} ranges of columns"] * (cut.columns > 1) + [f"{cut.rows} parts of rows"] * (cut.rows > 1)
    why = f"balanced ({way}): " + (f"{cut.why}, so split into {' x '.join(split)}" if split else "whole")
    columns = (number * cut.width, (number + 1) * cut.width)
    return Segment(
        "table_wise" if cut.rows == 1 else "row_wise",
        columns="all" if cut.columns == 1 else columns,
        owners=owners[0] if cut.rows == 1 else "all" if cut.rows == devices else owners,
        why=why,
    )
