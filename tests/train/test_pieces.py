"""Rows that come in pieces: the bits of a training are those of rows in one piece, and each piece is gathered apart."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from support.commands import SMALL, assert_refused, inside
from support.contract import V, problem_of
from support.graphs import fetching
from support.problems import Placed, Problem, trainer_of

from recjax.bench.roofline import wire_bytes
from recjax.comms.compiled import collectives
from recjax.embedding.exchange import cuts
from recjax.embedding.layout import ACROSS
from recjax.embedding.optim import Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Exchange, Plan, RowIds, Segment
from recjax.embedding.spec import TableSpec
from recjax.planning.graph import read_graph
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile(optimised=True)

REDUCED, POOLED = Exchange("int8", "bfloat16"), Exchange(kind="pooled")
TABLES = (
    TableSpec("rows", V, 5, RowWiseAdagrad(0.2)),
    TableSpec("columns", V, 5, PartialRowWiseAdam(0.05)),
    TableSpec("partly hot", V, 4, Sgd(0.5, momentum=0.9)),
    TableSpec("owned", V, 4, Adam(0.05), dtype="bfloat16"),
    TableSpec("pooled", V, 4, RowWiseAdagrad(0.2)),
)
FEATURES: dict[str, tuple[str, str, Any]] = {  # table, data feature, pooling
    "one": ("rows", "one", "sum"),
    "sequence": ("rows", "jagged", "none"),
    "weighted": ("columns", "jagged_weighted", "mean"),
    "three": ("columns", "three", "sum"),
    "in part": ("partly hot", "three", "mean"),
    "jagged": ("owned", "jagged", "sum"),
    "vectors": ("pooled", "jagged", "sum"),
}
PLAN = Plan({
    "rows": (Segment("row_wise", exchange=REDUCED),),
    "columns": (Segment("column_wise", exchange=Exchange("bfloat16")),),
    "partly hot": (Segment("hot", RowIds((0, 3, 7))), Segment("row_wise", "rest")),
    "owned": (Segment("table_wise"),),
    "pooled": (Segment("table_wise", exchange=POOLED),),
})  # fmt: skip
ON_HOSTS = Plan(PLAN.tables | {"rows": (Segment("grid"),), "owned": (Segment("table_row_wise"),)})
CASES: dict[str, tuple[int, Plan, dict[str, Any]]] = {
    "one host": (3, PLAN, {}),
    "hosts and replicas": (8, ON_HOSTS, {"hosts": 2, "replicas": 2}),
    "without dedup": (2, PLAN, {"dedup": False}),
    "by devices": (2, PLAN, {"routing": "device"}),
    "own values": (4, PLAN, {"replicas": 2, "independent": True}),
}


@functools.cache
def make() -> Problem:
    return problem_of(TABLES, FEATURES)


@functools.cache
def placed(case: str, pieces: int) -> Placed:
    devices, plan, how = CASES[case]
    how = dict(how)
    routing = how.pop("routing", "host")
    trainer = trainer_of(make(), devices, plan, pieces=pieces, **how)
    train = dataclasses.replace(trainer.config.train, routing=routing)
    trainer = dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, train=train))
    return Placed.of(make(), trainer)


@functools.cache
def bits(case: str, pieces: int) -> list[Any]:
    """Of losses, of all that a training ends with, and of predictions."""
    here = placed(case, pieces)
    state, found = here.start(), []
    for inputs in here.inputs:
        state, metrics = here.trainer.train_step(state, inputs)
        assert bool(metrics["ok"])
        found.append(np.asarray(metrics["loss"]).tobytes())
    found.append(jax.tree.map(np.ndarray.tobytes, load(here.trainer.export(state))))
    stream = here.trainer.inputs_of(make().batches[:1], make().batch_size)
    return [*found, *(np.asarray(logits).tobytes() for _, logits in here.trainer.predict(state, stream))]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        ("one host", 3),
        pytest.param("one host", 2, marks=pytest.mark.wide),
        pytest.param("one host", 4, marks=pytest.mark.wide),
        ("hosts and replicas", 3),
        pytest.param("without dedup", 4, marks=pytest.mark.wide),
        pytest.param("by devices", 2, marks=pytest.mark.wide),
        pytest.param("own values", 2, marks=pytest.mark.wide),
    ],
)
def test_no_bit_depends_on_the_number_of_pieces(case: str, pieces: int) -> None:
    """Of reduced precision, columns, hot rows, owners, pooled vectors, sequences, and jagged and weighted bags."""
    assert bits(case, pieces) == bits(case, 1)


@pytest.mark.full
@pytest.mark.parametrize("case", ["one host", "hosts and replicas"])
def test_each_all_to_all_of_rows_becomes_as_many_and_no_byte_is_added(case: str) -> None:
    whole, cut = placed(case, 1), placed(case, 3)
    assert whole.capacities == cut.capacities
    texts = [p.compiled.as_text() or "" for p in (whole, cut)]
    before, after = (
        collections.Counter((c.phase, c.kind, c.group_size, c.result_bytes) for c in collectives(text))
        for text in texts
    )
    wanted: collections.Counter[tuple[str, str, int, int]] = collections.Counter()
    sizes = [cut.capacities[g.name + step] for g in cut.trainer.bound.listing for step in ("", ACROSS)
             if g.name + step in cut.capacities]  # fmt: skip
    for key, count in before.items():
        phase, kind, devices, moved = key
        if (phase, kind) != ("row_exchange", "all-to-all"):
            wanted[key] += count
            continue
        fitting = {C for C in sizes if moved % C == 0 and moved // C in row_bytes(cut, devices)}
        assert len(fitting) == 1, (key, sizes)
        (C,) = fitting
        for first, last in cuts(C, 3):
            wanted[phase, kind, devices, moved // C * (last - first)] += count
    assert after == wanted
    lines = [wire_bytes(text, p.trainer.bound, p.inputs[0].routing, 4, samples=p.routed[0].local)
             for text, p in zip(texts, (whole, cut), strict=True)]  # fmt: skip
    for one, other in zip(*(sorted(of, key=str) for of in lines), strict=True):
        times = 3 if (one["phase"], one["kind"]) == ("row_exchange", "all-to-all") else 1
        assert other == one | {"count": times * one["count"]}


def row_bytes(placed: Placed, devices: int) -> set[int]:
    """Bytes of one place of all lists of an all-to-all of rows among so many devices."""
    found = set()
    for group in placed.trainer.bound.listing:
        wide = {"float32": 4 * group.width, "bfloat16": 2 * group.width, "int8": group.width + 8}
        wide["float32"] //= 1 + (group.dtype == "bfloat16")
        found.add(devices * wide[group.exchange.forward])
        if group.two_step:  # float32 inside a host; of columns those of all hosts
            found.add(devices * 4 * group.width * (1 if group.sharding.kind == "rows" else group.hosts))
    return found


@pytest.mark.full
def test_a_piece_waits_for_its_own_rows_alone() -> None:
    """In the order of operations that the program leaves to its devices: so the next gather may run beside it."""
    here = placed("one host", 3)
    gathers = fetching(read_graph(here.compiled.as_text() or "", 3))
    assert len(gathers) == 3 * len([group for group in here.trainer.bound.listing if group.spread])
    assert all(gathers) and not any(a & b for a, b in itertools.combinations(gathers, 2))


@pytest.mark.full
def test_on_one_device_nothing_is_cut() -> None:
    one, other = (Placed.of(make(), trainer_of(make(), 1, "row_wise", pieces=pieces)) for pieces in (1, 4))
    assert {group.row_pieces for group in other.trainer.bound.groups} == {1}
    assert one.trainer.bound == other.trainer.bound


@pytest.mark.parametrize(
    ("entries", "pieces", "lengths"),
    [
        (8, 8, [1] * 8),
        (8, 4, [2] * 4),
        (16, 4, [2, 3, 5, 6]),
        (336, 3, [111, 112, 113]),
        (40, 8, [1, 2, 3, 4, 6, 7, 8, 9]),
        (5, 1, [5]),
    ],
)
def test_pieces_leave_nothing_out_and_differ_where_they_can(entries: int, pieces: int, lengths: list[int]) -> None:
    found = cuts(entries, pieces)
    assert [n for first, last in found for n in range(first, last)] == list(range(entries))
    assert [last - first for first, last in found] == lengths


@pytest.mark.full
def test_more_pieces_than_the_shortest_list_has_rows_are_refused(preset: Any, tmp_path: Any) -> None:
    done = inside("train", preset, *SMALL, "embedding.exchange.pieces=9", "--out", tmp_path / "run")
    assert_refused(done, 2, "pieces is 9; it must be 1 to 8")
