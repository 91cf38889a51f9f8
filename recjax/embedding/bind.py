"""Binds a plan to a number of devices: stacks segments into groups, and chooses owners that the plan leaves open."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from recjax.embedding.group import Group
from recjax.embedding.layout import ACROSS, IDS, ROWS, SUMMED, BoundPlan, Fetched, Lookup, Pool, PooledExchange, Stream
from recjax.embedding.lines import LANES, Lines
from recjax.embedding.plan import Plan, check_plan
from recjax.embedding.row_order import Band, RowOrder, Split
from recjax.embedding.segment import COPIED, EXACT, HOT_PLACEMENTS, OWNED, Exchange, RowIds, Segment
from recjax.embedding.sharded import EXCHANGES
from recjax.embedding.sharding import (
    BoundSegment,
    ColumnSharding,
    GridSharding,
    HotPerHostSharding,
    HotSharding,
    RowSharding,
    Sharding,
    Source,
)
from recjax.embedding.spec import MAX_ROWS, FeatureSpec, TableSpec, by_table, check_specs
from recjax.errors import ConfigError
from recjax.parallel.mesh import per_host


@dataclasses.dataclass(frozen=True)
class _Part:
    """A segment of a plan on its way to a group: its rows and columns resolved, its owner open."""

    spec: TableSpec
    segment: Segment
    band: Band
    first: int
    last: int
    number: int


def bind(
    plan: Plan,
    tables: tuple[TableSpec, ...],
    features: tuple[FeatureSpec, ...],
    devices: int,
    dedup: bool = True,
    hosts: int = 1,
    replicas: int = 1,
    independent: bool = False,
    atomics: bool = False,
    ragged: bool = False,
    row_pieces: int = 1,
) -> BoundPlan:
    """Stacks the segments of a plan into groups for `devices` devices, equally many in each of `hosts` hosts.

    Both are those of one replica group. `dedup` and all after `hosts` are as `Group` has them.

    Raises:
      ConfigError: what `check_specs` and `check_plan` refuse, hosts that do not divide the devices, an owner that the
        mesh does not have, or a group of more rows on one device than int32 can count.
    """
    check_specs(tables, features)
    check_plan(plan, tables)
    spans = {"table_wise": 1, "table_row_wise": per_host(devices, hosts)}  # devices that hold one segment's rows
    parts = [part for table in tables for part in _parts(table, plan.tables[table.name], devices)]
    owners = _owners(parts, features, devices, spans)
    _check_kinds(tables, features, parts)
    members: dict[tuple[Any, ...], list[_Part]] = {}
    for part in parts:
        _check_kind(part)
        sharding = _sharding(part.segment.placement, devices, hosts)
        key = (sharding, *stack_of(part.spec, part.last - part.first, part.segment.exchange))
        members.setdefault(key, []).append(part)
    groups: list[Group] = []
    streams: list[tuple[Stream, ...]] = []
    names = {f.name for f in features}  # capacities are kept by feature and group name, so these must differ
    for (sharding, dim, divided, held, optimizer, exchange), found in members.items():
        bound = []
        ends = np.zeros(sharding.owners, np.int64)  # rows taken so far in each part
        for part in found:
            placement = part.segment.placement
            split = Split(part.band.size, len(ends))
            if placement in OWNED:
                span = spans[placement]
                split = Split(part.band.size, span, owners[_key(part)] * span)
            elif isinstance(part.segment.owners, tuple):
                split = Split(part.band.size, len(part.segment.owners), named=part.segment.owners)
            offsets = tuple(ends.tolist())
            bound.append(
                BoundSegment(part.spec, placement, split, offsets, part.band, part.first, part.last, part.number)
            )
            starts, stops = split.bounds(np.arange(len(ends)))
            ends += stops - starts
        base = f"{'+'.join(dict.fromkeys(s.placement for s in bound))}_D{dim}_{'_'.join((*held, optimizer.kind))}"
        base += "_of_wider" if divided else ""
        if exchange != EXACT:
            base = f"{base}_{exchange.forward}_{exchange.backward}"
        name = base
        while {
            name,
            *(name + other for other in (ACROSS, SUMMED, IDS, ROWS)),
        } & names:  # two optimizers of one kind that differ in a setting
            name = f"{base}_{len(names)}"
        names.add(name)
        sources = _sources(name, bound, features, plan, "rows", devices)
        size = sharding.padded(max(1, int(ends.max())))
        travel = sharding.spread and devices > 1
        groups.append(
            Group(
                name,
                sharding,
                size,
                tuple(bound),
                sources,
                dedup=dedup,
                exchange=exchange,
                replicas=replicas,
                independent=independent and replicas > 1,
                atomics=atomics,
                ragged=ragged,
                row_pieces=row_pieces if travel else 1,
            )
        )
        streams.append(_streams(groups[-1], _sources(name, bound, features, plan, "pooled", devices)))
        if size > MAX_ROWS:
            raise ConfigError(
                f"group {name}: {size:,} rows on one device exceed int32. Use more devices or fewer rows."
            )
    pooled = _pooled_exchanges(list(zip(groups, streams, strict=True)), names)
    pools = _pools(groups, features)
    return BoundPlan(devices, hosts, tuple(groups), features, pools, replicas, independent and replicas > 1, pooled)


def in_lines(bound: BoundPlan) -> BoundPlan:
    """The plan with buffers in lines, where that saves laying them out again.

    As they are stay: buffers of whole lines; replicated, hot and cached ones, and those of independent replica groups,
    which other programs read and write; and those whose optimizer passes over every row.
    """
    groups = {}
    for group in bound.groups:
        fixed = not group.spread or not group.listed or group.cached or group.independent or group.optimizer.every_row
        if group.width % LANES and not fixed:
            lines = Lines(group.width)
            rows = -(-group.rows // lines.rows) * lines.rows
            groups[group.name] = dataclasses.replace(group, lines=lines, rows=rows)
    return bound.with_groups(groups)


def with_owners(plan: Plan, bound: BoundPlan) -> Plan:
    """The plan with the owners that binding it has chosen, so that on as many devices they stay, whatever data say."""
    segments = {name: list(found) for name, found in plan.tables.items()}
    for part in (part for group in bound.groups for part in group.segments if part.placement in OWNED):
        of_table, owner = segments[part.spec.name], part.split.first // part.split.owners
        of_table[part.number] = dataclasses.replace(of_table[part.number], owners=owner)
    return dataclasses.replace(plan, tables={name: tuple(found) for name, found in segments.items()})


def stack_of(spec: TableSpec, columns: int, exchange: Exchange) -> tuple[Any, ...]:
    """Whatever segments of one sharding must have in common to share a buffer.

    Args:
      spec: the segment's table.
      columns: of the segment.
      exchange: of the segment.

    Returns:
      (columns, whether means over rows are made of several groups' columns, dtype unless it is float32, optimizer,
      exchange of rows: those that travel and those that are pooled may lie side by side).
    """
    divided = spec.optimizer.row_wise and columns < spec.dim
    held = () if spec.dtype == "float32" else (spec.dtype, spec.rounding)
    return columns, divided, held, spec.optimizer, Exchange(exchange.forward, exchange.backward)


def _parts(table: TableSpec, segments: tuple[Segment, ...], devices: int) -> list[_Part]:
    """The segments of one table.

    A column-wise one becomes as many table-wise ones if it has named owners, or exchanges pooled vectors. On one device
    nothing travels, so that all is as it is for rows.
    """
    found = []
    for number, (segment, band) in enumerate(zip(segments, bands(segments, table), strict=True)):
        _check_named(table, segment, devices)
        first, last = (0, table.dim) if segment.columns == "all" else segment.columns
        spread = isinstance(segment.owners, tuple) or (segment.exchange.kind == "pooled" and devices > 1)
        if segment.placement == "column_wise" and spread:
            owners = segment.owners if isinstance(segment.owners, tuple) else tuple(range(devices))
            split = Split(last - first, len(owners))
            for k, owner in enumerate(owners):
                start, stop = (first + int(column) for column in split.bounds(k))
                shard = dataclasses.replace(segment, placement="table_wise", owners=owner)
                if start < stop:
                    found.append(_Part(table, shard, band, start, stop, number))
        else:
            found.append(_Part(table, segment, band, first, last, number))
    return found


def bands(segments: Sequence[Segment], spec: TableSpec) -> tuple[Band, ...]:
    """The rows of each of a table's segments, which must have passed `check_plan`. Equal selectors give equal bands.

    Where all sets of rows are hot, the rest leaves their places vacant, so that other rows can become hot.
    """
    order = RowOrder(spec.rows)

    def positions(ids: set[int]) -> tuple[int, ...]:
        return tuple(np.sort(order.position(np.fromiter(ids, np.int64, len(ids)))).tolist())

    sets = {s.rows.ids for s in segments if isinstance(s.rows, RowIds)}
    chosen = {ids: Band(spec.rows, positions(set(ids))) for ids in sets}
    named = {id for ids in sets for id in ids}
    vacant = all(s.placement in HOT_PLACEMENTS for s in segments if isinstance(s.rows, RowIds))
    rest = Band(spec.rows, positions(named), inverted=True, vacant=vacant) if named else Band(spec.rows)
    alike = {"all": Band(spec.rows), "rest": rest}
    return tuple(alike[s.rows] if isinstance(s.rows, str) else chosen[s.rows.ids] for s in segments)


def _key(part: _Part) -> tuple[str, int, int]:
    return part.spec.name, part.number, part.first


def _sources(
    group: str, segments: list[BoundSegment], features: tuple[FeatureSpec, ...], plan: Plan, kind: str, devices: int
) -> tuple[Source, ...]:
    """The sources of a group, in the order of the features: one for each range of columns of a feature's table.

    Either those of which "rows" travel, or those of which "pooled" vectors do; rows of a sequence travel in any case,
    and so do those of the features that a segment names (`rows_of`).
    """
    found = []
    of_table: dict[str, list[BoundSegment]] = collections.defaultdict(list)
    for segment in segments:
        of_table[segment.spec.name].append(segment)
    for feature in features:
        ranges: dict[tuple[int, int], list[BoundSegment]] = collections.defaultdict(list)
        for segment in of_table[feature.table]:
            own = plan.tables[feature.table][segment.number]
            by_rows = devices == 1 or feature.pooling == "none" or feature.name in own.rows_of
            if kind != ("rows" if by_rows else own.exchange.kind):
                continue
            ranges[segment.first, segment.last].append(segment)
        for (first, last), same in ranges.items():
            alone = len(plan.tables[feature.table]) == 1 and same[0].whole_rows
            name = feature.name if alone else f"{feature.name}[{first}:{last}] in {group}"
            found.append(Source(name, feature, tuple(same)))
    return tuple(found)


def _streams(group: Group, sources: Sequence[Source]) -> tuple[Stream, ...]:
    """The streams of a group, from what its pooled features look up."""
    found = []
    for source in sources:
        owners = sorted({owner for segment in source.segments for owner in group.holders(segment)})
        counted = source.feature.bag is None or len(owners) > 1 or not source.whole
        host = owners[0] // group.per_host
        own = list(range(host * group.per_host, (host + 1) * group.per_host))
        found.append(Stream(source, tuple(owners), counted, owners == own and 1 < group.hosts < group.devices))
    return tuple(found)


def _pooled_exchanges(
    pairs: Sequence[tuple[Group, tuple[Stream, ...]]], taken: Collection[str]
) -> tuple[PooledExchange, ...]:
    """Joins groups with streams by the precision in which these travel.

    Args:
      pairs: groups with their streams, if any.
      taken: names that are not to be used.
    """
    by_exchange: dict[Exchange, list[tuple[Group, tuple[Stream, ...]]]] = {}
    for group, streams in pairs:
        if streams:
            by_exchange.setdefault(group.exchange, []).append((group, streams))
    found = []
    for exchange, members in by_exchange.items():
        name = f"pooled_{exchange.forward}_{exchange.backward}"
        while name in taken:
            name += "_"
        found.append(PooledExchange(name, exchange, tuple(g for g, _ in members), tuple(s for _, s in members)))
    return tuple(found)


def _pools(groups: list[Group], features: tuple[FeatureSpec, ...]) -> tuple[Pool, ...]:
    """Lookups by where their rows come from, in the order of the groups."""
    pools: dict[tuple[Fetched, ...], list[Lookup]] = {
        (Fetched(group.name, 0, group.dim),): []
        for group in groups
        if any(source.name == source.feature.name for source in group.sources)
    }
    of_feature: dict[str, list[tuple[Group, Source]]] = collections.defaultdict(list)
    for group in groups:
        for source in group.sources:
            of_feature[source.feature.name].append((group, source))
    for feature in features:
        own = of_feature[feature.name]
        columns = [(source.segments[0].first, source.segments[0].last) for _, source in own]
        cuts = sorted({cut for pair in columns for cut in pair})
        for first, last in zip(cuts[:-1], cuts[1:], strict=True):
            # In the order of the groups, but hot rows first: alike for all features.
            over = [(g, s, a) for (g, s), (a, z) in zip(own, columns, strict=True) if a <= first and last <= z]
            over.sort(key=lambda of: of[0].listed)
            if not over:  # columns of a feature whose other columns travel as rows
                continue
            rows = tuple(Fetched(group.name, first - a, last - a) for group, _, a in over)
            spec = feature
            if len(cuts) > 2:
                spec = dataclasses.replace(feature, name=f"{feature.name}[{first}:{last}]", source=feature.reads)
            sources = tuple(source.name for _, source, _ in over)
            everywhere = len(over) == 1 and over[0][1].whole
            complete = sum(b.band.members for _, s, _ in over for b in s.segments) == over[0][1].segments[0].spec.rows
            pools.setdefault(rows, []).append(Lookup(spec, feature.name, first, sources, everywhere, complete))
    return tuple(Pool(rows, tuple(lookups)) for rows, lookups in pools.items())


def _sharding(placement: str, devices: int, hosts: int) -> Sharding:
    """With one host a grid has all columns together, so its tables are row-wise; with one device a host column-wise.

    With one device a host a copy on every host is one on every device.
    """
    cls = EXCHANGES[placement][0]
    if cls is GridSharding and hosts in (1, devices):
        cls = RowSharding if hosts == 1 else ColumnSharding
    if cls is HotPerHostSharding and hosts == devices:
        cls = HotSharding
    return cls(devices, hosts)


def _owners(
    parts: list[_Part], features: tuple[FeatureSpec, ...], devices: int, spans: Mapping[str, int]
) -> dict[tuple[str, int, int], int]:
    """The device of each table-wise segment and the host of each table-row-wise one.

    That is the plan's, or else the least loaded one; the segment that loads each of its devices most goes first. A
    segment's load is its share of all bytes plus its share of all lookups, since memory and time are both bounded by
    the fullest device.
    """
    alone = {_key(part): part for part in parts if part.segment.placement in OWNED}
    looking = by_table(features)
    lookups = {key: sum(f.ids for f in looking[part.spec.name]) for key, part in alone.items()}
    values = {key: part.band.size * (part.last - part.first) for key, part in alone.items()}
    span = {key: spans[part.segment.placement] for key, part in alone.items()}
    all_values, all_lookups = sum(values.values()), sum(lookups.values())
    load = {  # on each of its devices
        key: (values[key] / all_values + lookups[key] / all_lookups) / span[key] for key in alone
    }
    owners: dict[tuple[str, int, int], int] = {}
    loads = [0.0] * devices

    def give(key: tuple[str, int, int], owner: int) -> None:
        owners[key] = owner
        for n in range(owner * span[key], (owner + 1) * span[key]):
            loads[n] += load[key]

    for key, part in alone.items():
        owner = part.segment.owners
        if not isinstance(owner, int):
            continue
        unit, there_are = OWNED[part.segment.placement], devices // span[key]
        if owner >= there_are:
            raise ConfigError(
                f"the plan puts table {part.spec.name!r} on {unit} {owner}, but the mesh has only {there_are}, counted "
                f'from 0. Write "owners": "all" to let recjax choose, or use more {unit}s.'
            )
        give(key, owner)
    for key in sorted(load.keys() - owners.keys(), key=lambda key: (-load[key], key)):
        starts = range(0, devices, span[key])
        least = min(starts, key=lambda n: sum(loads[n : n + span[key]]))
        give(key, least // span[key])
    return owners


def _check_kind(part: _Part) -> None:
    """Refuses an exchange of pooled vectors where there is none (ConfigError)."""
    if part.segment.exchange.kind == "pooled" and part.segment.placement == "grid":
        raise ConfigError(
            f"table {part.spec.name!r} is to exchange pooled vectors, which a table placed grid cannot. Choose "
            'exchange kind "rows", or place it table_wise, table_row_wise, column_wise or row_wise.'
        )


def _check_kinds(tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...], parts: list[_Part]) -> None:
    """Refuses two kinds of exchange where a row's columns have a common statistic, and names of no feature.

    Raises:
      ConfigError: one paragraph that names the table.
    """
    of_table: dict[str, list[_Part]] = collections.defaultdict(list)
    for part in parts:
        of_table[part.spec.name].append(part)
    looking_up = by_table(features)
    for table in tables:
        looking = [f.name for f in looking_up[table.name]]
        for name in (name for part in of_table[table.name] for name in part.segment.rows_of if name not in looking):
            raise ConfigError(
                f"the plan exchanges rows of table {table.name!r} for {name!r} (rows_of), but the features that look "
                f"it up are {', '.join(looking)}. Name some of these."
            )
        own = [part for part in of_table[table.name] if part.segment.placement not in COPIED]
        divided = any(part.last - part.first < table.dim for part in own)
        kinds = {(part.segment.exchange.kind, frozenset(part.segment.rows_of)) for part in own}
        if table.optimizer.row_wise and divided and len(kinds) > 1:
            raise ConfigError(
                f"table {table.name!r} is split by columns, its optimizer keeps statistics of whole rows, and some of "
                'its segments exchange rows, others pooled vectors. Give all of them the same exchange "kind", and '
                'the same "rows_of".'
            )


def _check_named(spec: TableSpec, segment: Segment, devices: int) -> None:
    """Refuses a list of owners that names a device which the mesh does not have (ConfigError)."""
    named = segment.owners
    if isinstance(named, tuple) and max(named) >= devices:
        raise ConfigError(
            f"the plan spreads {segment.placement} rows of table {spec.name!r} over the devices "
            f"{', '.join(map(str, named))}, but the mesh has only {devices}, counted from 0. Name others, write "
            '"owners": "all" to use every device, or use more devices.'
        )
