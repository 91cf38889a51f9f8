"""Events that exchanges tell of themselves, against the collectives of compiled programs."""

import collections
from typing import Any

import pytest
from support.problems import Placed, trainer_of
from support.small_steps import ADAGRAD, make

from recjax.embedding.optim import Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.sharded import exchanges_of
from recjax.planning.compiled_collectives import collectives, members

pytestmark = [pytest.mark.full, pytest.mark.light_compile(as_text=True)]

TABLES = ("sparse_0", "sparse_1", "sparse_2")
POOLED = Exchange("bfloat16", "float16", "pooled")


def whole(placement: str, exchange: Exchange | None = None) -> Plan:
    return Plan({name: (Segment(placement, exchange=exchange or Exchange()),) for name in TABLES})


def cut(first: str, second: str, exchange: Exchange | None = None) -> Plan:
    """Columns of every table in two segments, as row-wise optimizers have to agree on means."""
    more: dict[str, Any] = {"exchange": exchange} if exchange else {}
    halves = (Segment(first, columns=(0, 4), **more), Segment(second, columns=(4, 8), **more))
    return Plan(dict.fromkeys(TABLES, halves))


def hot(placement: str) -> Plan:
    return Plan(dict.fromkeys(TABLES, (Segment(placement, RowIds((0, 1, 2))), Segment("row_wise", "rest"))))


CASES: dict[str, tuple[Plan, int, dict[str, Any]]] = {
    "rows": (whole("row_wise"), 8, {}),
    "rows encoded": (whole("row_wise", Exchange("int8", "bfloat16")), 3, {}),
    "rows in pieces": (whole("row_wise"), 4, {"pieces": 3}),
    "rows of hosts": (whole("row_wise", Exchange("bfloat16")), 8, {"hosts": 2}),
    "pieces of hosts": (whole("row_wise"), 4, {"hosts": 2, "pieces": 2}),
    "tables of hosts": (whole("table_row_wise"), 4, {"hosts": 2}),
    "columns": (whole("column_wise"), 3, {}),
    "columns of hosts": (whole("column_wise"), 4, {"hosts": 2}),
    "grid": (whole("grid"), 4, {"hosts": 2}),
    "columns cut": (cut("row_wise", "table_wise"), 4, {}),
    "columns cut over hosts": (cut("row_wise", "column_wise"), 4, {"hosts": 2}),
    "pooled": (whole("table_wise", POOLED), 4, {}),
    "pooled columns": (cut("table_wise", "table_wise", Exchange(kind="pooled")), 4, {}),
    "pooled in hosts": (whole("table_row_wise", POOLED), 4, {"hosts": 2}),
    "hot": (hot("hot"), 4, {}),
    "hot in hosts": (hot("hot_per_host"), 4, {"hosts": 2}),
    "touched rows": (whole("data_parallel_sparse"), 4, {"hosts": 2}),
    "touched rows cut": (cut("data_parallel_sparse", "table_wise"), 3, {}),
    "touched rows in groups": (whole("data_parallel_sparse"), 4, {"replicas": 2}),
    "touched rows of groups apart": (whole("data_parallel_sparse"), 4, {"replicas": 2, "independent": True}),
    "groups that agree": (whole("row_wise", Exchange("float32", "bfloat16")), 4, {"replicas": 2}),
    "columns of groups": (whole("column_wise"), 4, {"replicas": 2}),
    "pooled in groups": (whole("table_wise", POOLED), 4, {"replicas": 2}),
    "groups apart": (whole("row_wise"), 4, {"replicas": 2, "independent": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_exchanges_tell_the_collectives_of_the_program(case: str) -> None:
    """All but sums that XLA may join with those of dense gradients: phase, kind, devices and bytes of each."""
    plan, devices, more = CASES[case]
    optimizer = Sgd(0.1) if "hot" in case else ADAGRAD
    placed = Placed.of(problem := make((900, 370, 2000), optimizer), trainer_of(problem, devices, plan, **more))
    bound = placed.trainer.bound
    told = [
        event
        for exchange in exchanges_of(bound)
        for event in exchange.events(placed.capacities, placed.routed[0].local, 4)
        if not (event.phase == "grad_exchange" and event.kind == "all-reduce")
    ]
    assert told
    phases = {event.phase for event in told}
    found = collections.Counter(
        (c.phase, c.kind, tuple(members(c.groups, bound.all_devices)[0]), c.result_bytes)
        for c in collectives(placed.compiled.as_text())
        if c.phase in phases
    )
    assert collections.Counter((str(e.phase), e.kind, e.members, e.padded_bytes) for e in told) == found
