"""Which segments are a table: a dense count of the cells that they hold decides; messages name cells that it finds."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan, check_plan
from recjax.embedding.segment import RowIds, Segment, check_segments
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError

PLACEMENTS = {  # with owners that each may have
    "row_wise": st.just("all") | st.lists(st.integers(0, 9), min_size=1, unique=True).map(tuple),
    "column_wise": st.just("all") | st.lists(st.integers(0, 9), min_size=1, unique=True).map(tuple),
    "table_wise": st.just("all") | st.integers(0, 9),
    "table_row_wise": st.just("all") | st.integers(0, 9),
    "data_parallel": st.just("all"),
    "grid": st.just("all"),
}


def table(rows: int, dim: int) -> TableSpec:
    return TableSpec("t", rows, dim, Sgd())


def ids(*rows: int) -> RowIds:
    return RowIds(tuple(rows))


@st.composite
def partitions(draw):
    """A table, and segments that partition it, in any order."""
    rows, dim = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    of_row = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    sets = [ids(*(row for row in range(rows) if of_row[row] == n)) for n in sorted(set(of_row))]
    selectors = list(sets)
    if draw(st.booleans()):
        selectors[-1] = "rest"
    if len(sets) == 1 and draw(st.booleans()):
        selectors = ["all"]
    segments = []
    for selector in selectors:
        cuts = sorted({0, dim, *draw(st.sets(st.integers(0, dim), max_size=3))})
        for first, last in zip(cuts, cuts[1:], strict=False):
            whole = (first, last) == (0, dim) and draw(st.booleans())
            placement = draw(st.sampled_from(sorted(PLACEMENTS)))
            owners = draw(PLACEMENTS[placement])
            segments.append(Segment(placement, selector, "all" if whole else (first, last), owners))
    return table(rows, dim), draw(st.permutations(segments))


def accepted(segments, spec) -> str:
    """The message of the refusal, or "" if there is none."""
    try:
        check_segments(segments, spec, "t")
    except ConfigError as error:
        return str(error)
    return ""


@settings(max_examples=100, deadline=None)
@given(partitions())
def test_partitions_are_accepted_and_survive_the_file(case):
    spec, segments = case
    assert accepted(segments, spec) == ""
    plan = Plan({"t": tuple(segments)})
    check_plan(plan, (spec,))
    assert Plan.from_json(plan.to_json()) == plan


def dense_rows(segment: Segment, segments, rows: int) -> set[int]:
    if segment.rows == "all":
        return set(range(rows))
    if segment.rows == "rest":
        return set(range(rows)) - {id for s in segments if isinstance(s.rows, RowIds) for id in s.rows.ids}
    return set(segment.rows.ids)


def is_partition(segments, spec: TableSpec) -> tuple[bool, np.ndarray]:
    """Whether each cell is in one segment, and row selectors that differ are disjoint, and the cells' counts [V, D]."""
    counts = np.zeros((spec.rows, spec.dim), int)
    legal, sets = True, []
    for segment in segments:
        held, (first, last) = dense_rows(segment, segments, spec.rows), segment.column_range(spec.dim)
        legal &= bool(held) and held <= set(range(spec.rows)) and 0 <= first < last <= spec.dim
        sets.append((held, segment.rows))
        counts[np.ix_(sorted(held & set(range(spec.rows))), range(max(first, 0), min(last, spec.dim)))] += 1
    disjoint = all(a == b and ra == rb or not a & b for a, ra in sets for b, rb in sets)
    return legal and disjoint and bool((counts == 1).all()), counts


@st.composite
def mutated(draw):
    """A partition with one to two changes, most of which break it."""
    spec, segments = draw(partitions())
    for _ in range(draw(st.integers(1, 2))):
        if not segments:
            break
        n = draw(st.integers(0, len(segments) - 1))
        segment, others = segments[n], segments[:n] + segments[n + 1 :]
        change = draw(st.sampled_from(["drop", "columns", "add id", "remove id", "repeat", "selector"]))
        first, last = segment.column_range(spec.dim)
        if change == "columns":
            first, last = (first + draw(st.integers(-1, 1)), last + draw(st.integers(-1, 1)))
            others.append(dataclasses.replace(segment, columns=(first, last)))
        elif change == "repeat":
            others += [segment, segment]
        elif change == "selector":
            others.append(dataclasses.replace(segment, rows=draw(st.sampled_from(["all", "rest", ids(0)]))))
        elif change != "drop" and isinstance(segment.rows, RowIds):
            id = draw(st.integers(0, spec.rows))
            moved = set(segment.rows.ids) | {id} if change == "add id" else set(segment.rows.ids[1:])
            alike = draw(st.booleans())  # in all segments of that set
            for k, other in enumerate(segments):
                if k == n or (alike and other.rows == segment.rows):
                    segments[k] = dataclasses.replace(other, rows=ids(*sorted(moved)))
            others = segments
        elif change != "drop":
            others.append(segment)
        segments = others
    return spec, segments


@settings(max_examples=150, deadline=None)
@given(mutated())
def test_what_is_no_partition_is_refused_with_cells_that_are_wrong(case):
    spec, segments = case
    legal, counts = is_partition(segments, spec)
    message = accepted(segments, spec)
    event("accepted" if legal else re.sub(r"\d+", "N", message)[:60])
    assert (message == "") == legal, message
    if found := re.search(r"such as ids? ([\d, ]+)", message):
        for id in found[1].split(","):
            assert (counts[int(id)] == 0).all()
    if found := re.search(r"columns \[(\d+), (\d+)\) of .* (in no segment|in segments)", message):
        wrong = (counts[:, int(found[1]) : int(found[2])] == (0 if found[3] == "in no segment" else 2)).all(axis=1)
        assert wrong.any() or (counts > 2).any()


HOT = ids(3, 17)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "there is no segment, so all its rows are in none"),
        ([("all", "all"), ("rest", "all")], "segment 1 selects all rows, and segment 2 selects the rest of the rows "),
        (
            [(HOT, "all"), ("all", "all")],
            'segment 2 selects all rows, and segment 1 .* ids 3, 17 once more. Write "rest',
        ),
        (
            [(HOT, "all"), ("rest", "all"), (ids(2, 17), "all")],
            "id 17 is in more than one set of rows: id 17 in those of segments 1 and 3",
        ),
        (
            [(ids(0, 1, 2, 3, 4, 5), "all"), (ids(1, 2, 3, 4, 5), "all"), ("rest", "all")],
            "ids 1, 2, 3 and 2 more are in more than one set",
        ),
        ([(HOT, "all")], r'98 of its 100 rows are in no segment, such as ids 0, 1, 2\. Add .* "rows": "rest"'),
        ([(ids(*range(99)), "all")], "1 of its 100 rows is in no segment, such as id 99"),
        ([(ids(3, 100), "all"), ("rest", "all")], "segment 1 selects id 100, but the table has the ids 0 to 99"),
        ([("rest", "all"), (ids(10**30), "all")], "segment 2 selects id 10{30}, but"),
        ([(ids(), "all"), ("rest", "all")], "the set of rows of segment 1 is empty"),
        ([("rest", "all"), (ids(*range(100)), "all")], 'segment 1 selects "rest", but .* others name all 100 rows'),
        ([("all", (0, 16)), ("all", (8, 16))], r"columns \[8, 16\) of all rows are in segments 1 and 2"),
        ([("all", (8, 16)), ("all", (0, 9))], r"columns \[8, 9\) of all rows are in segments 1 and 2"),
        (
            [("rest", "all"), ("rest", "all"), (HOT, "all")],
            r"columns \[0, 16\) of the rest of the rows are in segments 1 and 2",
        ),
        ([("rest", "all"), (HOT, (0, 4)), (HOT, (8, 16))], r"columns \[4, 8\) of ids 3, 17 are in no segment"),
        ([("all", (0, 12))], r"columns \[12, 16\) of all rows are in no segment"),
        ([("all", (0, 20))], r"columns \[0, 20\) of segment 1 go beyond the 16 columns of the table"),
        ([("all", "all"), ("all", (16, 16))], r"columns \[16, 16\) of segment 2 hold nothing"),
    ],
)
def test_refusals_in_words(segments, message):
    plan = Plan({"t": tuple(Segment("row_wise", rows, columns) for rows, columns in segments)})
    with pytest.raises(ConfigError, match=message) as caught:
        check_plan(plan, (table(100, 16),), "my.json")
    assert str(caught.value).startswith("my.json, table 't': ") and "\n" not in str(caught.value)


def test_hot_rows_of_a_table_are_copied_in_one_way_and_whole():
    both = [Segment("hot", ids(1)), Segment("hot_per_host", ids(2)), Segment("row_wise", "rest")]
    with pytest.raises(ConfigError, match=r"copied to every device \(hot\) and to every host \(hot_per_host\)"):
        check_segments(both, table(100, 16), "my.json")
    with pytest.raises(ConfigError, match="segment 1 is hot and has some columns"):
        check_segments(
            [Segment("hot_per_host", "all", (0, 8)), Segment("hot_per_host", "all", (8, 16))], table(9, 16), "p"
        )


def test_an_owner_named_twice_is_refused():
    with pytest.raises(ConfigError, match="segment 1 lists device 4 twice among its owners"):
        check_segments([Segment("row_wise", owners=(0, 4, 1, 4))], table(100, 16), "my.json")


def highest(segments, placements: tuple[str, ...]) -> int:
    """The highest owner that segments of these placements name, -1 if none."""
    named = [s.owners for s in segments if s.placement in placements and s.owners != "all"]
    return max((max(n) if isinstance(n, tuple) else n for n in named), default=-1)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.lists(partitions(), min_size=1, max_size=3), st.integers(1, 64), st.data())
def test_a_plan_from_a_file_bound_to_any_devices_covers_every_element_once(cases, devices, data):
    """Each element in one slot of one part, or of all devices'; each row where it is looked for; no slot twice."""
    hosts = data.draw(st.sampled_from([h for h in (1, 2, 4, 8, 64) if devices % h == 0]))
    tables = tuple(dataclasses.replace(spec, name=f"t{n}") for n, (spec, _) in enumerate(cases))
    features = tuple(FeatureSpec(f"f{n}", f"t{n % len(cases)}") for n in range(len(cases) + 1))
    plan = Plan({f"t{n}": tuple(segments) for n, (_, segments) in enumerate(cases)})
    plan = Plan.from_json(plan.to_json())
    parts = [s for _, segments in cases for s in segments]
    there_are = highest(parts, ("row_wise", "column_wise", "table_wise")) < devices
    there_are &= highest(parts, ("table_row_wise",)) < hosts
    event(f"devices enough: {there_are}")
    if not there_are:
        with pytest.raises(ConfigError, match=r"the mesh has only \d+"):
            bind(plan, tables, features, devices, hosts=hosts)
        return
    bound = bind(plan, tables, features, devices, hosts=hosts)
    for spec in tables:
        counts = np.zeros((spec.rows, spec.dim), int)
        for group, segment in bound.segments(spec.name):
            for piece in group.pieces(segment):
                positions = segment.band.position(np.arange(piece.start, piece.stop))
                counts[np.ix_(segment.order.row(positions), range(piece.first, piece.last))] += 1
        assert (counts == 1).all()
    for group in bound.groups:
        used = np.zeros((group.parts, group.rows, group.width), int)
        for segment in group.segments:
            rows = np.arange(segment.spec.rows, dtype=np.int32)
            owner, home, here = segment.locate(rows)
            held = np.ones(len(rows), bool) if here is None else here
            for piece in group.pieces(segment):
                width = piece.last - piece.first
                used[piece.part, piece.offset : piece.offset + piece.stop - piece.start, :width] += 1
                mine = held & (owner == group.place(piece.part)[0])
                places = piece.offset + segment.band.number(segment.order.position(rows[mine]))[0] - piece.start
                assert (home[mine] == places).all() and ((places >= piece.offset) & (places < group.rows)).all()
        assert used.max() <= 1
    for feature in features:  # lookups have each column of each feature once, in order
        own = sorted(
            (lookup.first, pool.width)
            for pool in bound.pools
            for lookup in pool.lookups
            if lookup.feature == feature.name
        )
        dim = next(spec.dim for spec in tables if spec.name == feature.table)
        assert [first for first, _ in own] == [0, *np.cumsum([width for _, width in own])][:-1]
        assert sum(width for _, width in own) == dim
