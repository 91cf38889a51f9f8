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
from support.contract import V, problem_of
from support.graphs import fetching
from support.problems import Placed, Problem, trainer_of

from recjax.embedding.exchange.wire import cuts
from recjax.embedding.layout import ACROSS
from recjax.embedding.optim import Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.sharding import RowSharding
from recjax.embedding.spec import TableSpec
from recjax.planning.compiled_collectives import collectives, wire_bytes
from recjax.planning.graph import read_graph
from recjax.utils.lazy_arrays import load

pytestmark = pytest.mark.light_compile(as_text=True)

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
PLAN = Plan(
    {
        "rows": (Segment("row_wise", exchange=REDUCED),),
        "columns": (Segment("column_wise", exchange=Exchange("bfloat16")),),
        "partly hot": (Segment("hot", RowIds((0, 3, 7))), Segment("row_wise", "rest")),
        "owned": (Segment("table_wise"),),
        "pooled": (Segment("table_wise", exchange=POOLED),),
    }
)
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
    """Bytes of the losses, of all that a training ends with, and of its predictions."""
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
@pytest.mark.wide  # test_contract.py has pieces against the oracle
@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        *(("one host", pieces) for pieces in (2, 3, 4)),
        ("hosts and replicas", 3),
        ("without dedup", 4),
        ("by devices", 2),
        ("own values", 2),
    ],
)
def test_no_bit_depends_on_the_number_of_pieces(case: str, pieces: int) -> None:
    """Cases have reduced precision, columns, hot rows, owners, pooled vectors, sequences, jagged and weighted bags."""
    assert bits(case, pieces) == bits(case, 1)


@pytest.mark.full
# Of two hosts the pieces are counted in tests/lab/trace/test_record.py, too.
@pytest.mark.parametrize("case", ["one host", pytest.param("hosts and replicas", marks=pytest.mark.wide)])
def test_each_all_to_all_of_rows_becomes_as_many_and_no_byte_is_added(case: str) -> None:
    others, lines = [], []
    for pieces in (1, 3):
        here = placed(case, pieces)
        text = here.compiled.as_text() or ""
        found = collections.Counter((c.phase, c.kind, c.group_size, c.result_bytes) for c in collectives(text))
        rows = {key: n for key, n in found.items() if key[:2] == ("row_exchange", "all-to-all")}
        assert rows == collections.Counter(
            ("row_exchange", "all-to-all", devices, devices * (last - first) * place_bytes)
            for devices, C, place_bytes in lists_of_rows(here)
            for first, last in ([(0, C)] if pieces == 1 else cuts(C, pieces))
        )
        others.append({key: n for key, n in found.items() if key not in rows})
        routing, b = here.inputs[0].routing, here.routed[0].local
        lines.append(sorted(wire_bytes(text, here.trainer.bound, routing, 4, samples=b), key=str))
    assert others[0] == others[1]
    for one, other in zip(*lines, strict=True):
        times = 3 if (one["phase"], one["kind"]) == ("row_exchange", "all-to-all") else 1
        assert other == one | {"count": times * one["count"]}


def lists_of_rows(placed: Placed) -> list[tuple[int, int, int]]:
    """Devices, capacity and bytes of a place of each exchange of rows: of both steps where there are two."""
    found = []
    for group in (group for group in placed.trainer.bound.listing if group.spread):
        C, W = placed.capacities[group.name], group.width
        wire = {"float32": 4 * W, "bfloat16": 2 * W, "int8": W + 8}[group.exchange.forward]
        wire = 2 * W if group.dtype == "bfloat16" else wire
        if group.two_step:  # inside a host all is float32, and columns are those of all hosts
            found.append((group.hosts, placed.capacities[group.name + ACROSS], wire))
            found.append((group.per_host, C, 4 * W * (1 if type(group.sharding) is RowSharding else group.hosts)))
        else:
            found.append((group.devices, C, wire))
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
