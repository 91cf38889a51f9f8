"""The contract where owners of rows pool: sums, means, weights, jagged bags, split tables, mixtures with other kinds.

Tables of several widths and optimizers, one shared with an un-pooled feature; the batches, clipping and schedule of
support/contract.py; compared with the dense oracle.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import DATA, OPTIONS, STEPS, B, Net, V, make_batch
from support.problems import Problem, Result, compare, run_oracle, run_sharded

from recjax.config.train import DenseAdagrad
from recjax.embedding.optim import Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Exchange, Plan, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec

pytestmark = pytest.mark.full

POOLED = Exchange(kind="pooled")
TABLES: dict[str, tuple[int, Any]] = {
    "adagrad": (4, RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1)),
    "adam": (6, PartialRowWiseAdam(0.05, l2=0.01)),
    "momentum": (4, Sgd(0.5, momentum=0.9)),
    "every_row": (6, Adam(0.05, l2=0.01, every_row=True)),
    "means_of_all": (4, RowWiseAdagrad(0.2, l2=0.01, every_row=True)),
}
FEATURES: dict[str, tuple[str, str, Any]] = {  # table, data feature, pooling
    "one": ("adagrad", "one", "sum"),
    "jagged": ("adagrad", "jagged", "mean"),
    "sequence": ("adagrad", "jagged_weighted", "none"),
    "mean": ("adam", "three", "mean"),
    "weighted": ("adam", "jagged_weighted", "sum"),
    "three": ("momentum", "three", "sum"),
    "every row": ("every_row", "jagged", "sum"),
    "all": ("means_of_all", "one", "mean"),
}
HOT = RowIds((0, 1, 2, 5, 30))


def segment(placement: str, rows: Any = "all", **how: Any) -> Segment:
    exchange = Exchange() if placement == "data_parallel" else how.pop("exchange", POOLED)
    return Segment(placement, rows, exchange=exchange, **how)


def ways(dim: int, devices: int) -> list[tuple[Segment, ...]]:
    """Ways to hold a table of `dim` columns: whole, by rows, by columns, mixed with rows that travel."""
    left, right, last = (0, 2), (2, dim), devices - 1
    some = tuple(dict.fromkeys((last, 0)))
    return [
        (segment("table_wise"),),
        (segment("column_wise"),),
        (segment("table_row_wise"),),
        (segment("table_wise", columns=left, owners=last), segment("table_wise", columns=right, owners=0)),
        (segment("data_parallel", HOT), segment("table_wise", "rest")),
        (segment("row_wise", owners=some),),
        (segment("table_wise", HOT, exchange=Exchange()), segment("column_wise", "rest", owners=some, exchange=POOLED)),
        (segment("row_wise", exchange=Exchange()),),
    ]


def plan(devices: int, first: int) -> Plan:
    """Tables held in different ways, beginning with `first`; columns with a common statistic travel alike."""
    found = {}
    for number, (name, (dim, optimizer)) in enumerate(TABLES.items()):
        way = (number + first) % 8
        found[name] = ways(dim, devices)[3 if way == 6 and optimizer.row_wise else way]
    return Plan(found)


@functools.cache
def make() -> Problem:
    return Problem(
        [make_batch(step) for step in range(STEPS)],
        B,
        tuple(TableSpec(name, V, dim, optimizer) for name, (dim, optimizer) in TABLES.items()),
        tuple(
            FeatureSpec(name, table, DATA[source][0], pooling, DATA[source][1], source)
            for name, (table, source, pooling) in FEATURES.items()
        ),
        Net(),
        2,
        DenseAdagrad(0.1, l2=0.01, weight_decay=0.1).build(),
        options=OPTIONS,
    )


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


@pytest.mark.parametrize(
    ("devices", "first", "how"),
    [
        (1, 0, {}),
        (2, 0, {}),
        (3, 3, {"dedup": False}),
        (4, 5, {"hosts": 2}),
        (8, 1, {"hosts": 2}),
        (8, 4, {"hosts": 2, "replicas": 2}),
        (4, 2, {"accumulate": 3}),
    ],
)
def test_it_equals_the_oracle(devices: int, first: int, how: dict[str, int]) -> None:
    problem, own = make(), dict(how)
    if parts := own.pop("accumulate", 0):
        problem = dataclasses.replace(problem, options=dataclasses.replace(OPTIONS, accumulate=parts))
    with jax.enable_x64(True):
        result = run_sharded(problem, devices, plan(devices // how.get("replicas", 1), first), np.float64, **own)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)
