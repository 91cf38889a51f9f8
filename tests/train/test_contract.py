"""The contract: every optimizer under every placement and pooling, on any mesh, equals the dense oracle.

One model holds them all, so that a case compiles once: a table for each optimizer, looked up as a sum, as a mean and
un-pooled, by bags that are fixed or jagged, weighted or not. Rates follow a schedule, gradients are clipped in some
steps and not in others, and some samples weigh 0, so that rows are touched by a gradient of zero.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import DATA, OPTIONS, STEPS, B, Net, V, make_batch
from support.problems import ON_ONE_HOST, Problem, Result, compare, new_weights, run_oracle, run_sharded

from recjax.config.train import DenseAdagrad
from recjax.embedding import segment_sums
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.row_order import RowOrder
from recjax.embedding.segment import PLACEMENTS, Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

OPTIMIZERS: dict[str, Any] = {
    "sgd": Sgd(0.5, l2=0.01),
    "momentum": Sgd(0.5, momentum=0.9),
    "nesterov": Sgd(0.5, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adagrad": Adagrad(0.2, l2=0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "adam": Adam(0.05, weight_decay=0.1),
    "partial_rowwise_adam": PartialRowWiseAdam(0.05, l2=0.01),
    "ftrl": Ftrl(0.5, l1=1e-4, l2=0.1),
    "momentum-every_row": Sgd(0.5, momentum=0.9, every_row=True),
    "rowwise_adagrad-every_row": RowWiseAdagrad(0.2, l2=0.01, every_row=True),
    "adam-every_row": Adam(0.05, l2=0.01, every_row=True),
}


@functools.cache
def make(names: tuple[str, ...] = tuple(OPTIMIZERS)) -> Problem:
    tables, features = [], []
    reads = itertools.cycle(DATA.items())
    for number, name in enumerate(names):
        tables.append(TableSpec(name, V, (5, 3)[number % 2], OPTIMIZERS[name]))
        for pooling in ("sum", "mean", "none"):
            source, (bag, weighted) = next(reads)
            features.append(FeatureSpec(f"{name}.{pooling}", name, bag, pooling, weighted, source))
    return Problem(
        [make_batch(step) for step in range(STEPS)],
        B,
        tuple(tables),
        tuple(features),
        Net(),
        2,
        DenseAdagrad(0.1, l2=0.01, weight_decay=0.1).build(),
        options=OPTIONS,
    )


@functools.cache
def oracle(names: tuple[str, ...]) -> Result:
    return run_oracle(make(names), np.float64)


def check(
    problem: Problem,
    devices: int,
    plan: str | Plan,
    hosts: int = 1,
    replicas: int = 1,
    dedup: bool = True,
    lines: bool = False,
) -> None:
    with jax.enable_x64(True):
        how: dict[str, Any] = {"hosts": hosts, "replicas": replicas, "dedup": dedup, "lines": lines}
        result = run_sharded(problem, devices, plan, np.float64, **how)
        compare(result, oracle(tuple(table.name for table in problem.tables)), loss_rtol=1e-9, atol=1e-9)


@pytest.mark.wide  # all placements are in the mixtures below
@pytest.mark.parametrize(
    ("plan", "devices"),
    [*((plan, 3) for plan in ON_ONE_HOST), ("row_wise", 1), ("column_wise", 8)],
)
def test_every_optimizer_and_pooling_equals_the_oracle(plan: str, devices: int) -> None:
    check(make(), devices, plan)


@pytest.mark.parametrize(
    ("parts", "hosts", "devices", "first", "platform"),
    [(1, 2, 8, 0, "gpu"), (2, 4, 8, 2, "cpu"), pytest.param(1, 2, 8, 0, "cpu", marks=pytest.mark.wide)],
)
def test_placements_mixed_on_several_hosts(
    parts: int, hosts: int, devices: int, first: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours placed differently; with each device's samples at once, and in two parts; sums as on a GPU, too.

    With these beginnings rules that need means over rows meet a grid, every row or not, and columns over all devices.
    """
    monkeypatch.setattr(segment_sums, "target_platform", lambda: platform)
    turn = itertools.islice(itertools.cycle(reversed(PLACEMENTS)), first, None)
    plan = Plan({table.name: (Segment(next(turn)),) for table in make().tables})
    placed = {name: segments[0].placement for name, segments in plan.tables.items()}
    if hosts == 2:
        assert placed["partial_rowwise_adam"] == "grid" and placed["rowwise_adagrad-every_row"] == "column_wise"
    else:
        assert placed["rowwise_adagrad"] == "grid"
    check(dataclasses.replace(make(), options=dataclasses.replace(OPTIONS, accumulate=parts)), devices, plan, hosts)


def test_every_optimizer_where_owners_pool() -> None:
    """Two hosts of two devices. Sequences exchange rows of the same tables."""
    turn = itertools.cycle(("column_wise", "table_wise", "table_row_wise"))
    pooled = Exchange(kind="pooled")
    plan = Plan({table.name: (Segment(next(turn), exchange=pooled),) for table in make().tables})
    check(make(), 4, plan, hosts=2)


@pytest.mark.wide  # test_lines.py trains to the bits of rows
def test_rows_in_lines_as_on_a_tpu() -> None:
    """Neighbours exchange rows and pooled vectors."""
    turn = itertools.cycle((Exchange(), Exchange(kind="pooled")))
    placed = itertools.cycle(("row_wise", "column_wise", "table_wise"))
    plan = Plan({table.name: (Segment(next(placed), exchange=next(turn)),) for table in make().tables})
    check(make(), 2, plan, lines=True)


def test_replicated_sums_by_segments_without_dedup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row then has several places on a device. With slots of elements and of rows, and an update of every row."""
    monkeypatch.setattr(segment_sums, "target_platform", lambda: "gpu")
    check(make(("adagrad", "rowwise_adagrad", "adam-every_row")), 2, "data_parallel", dedup=False)


def test_placements_mixed_in_replica_groups() -> None:
    """Two groups of two hosts of two devices."""
    turn = itertools.cycle(PLACEMENTS)
    check(make(), 8, Plan({table.name: (Segment(next(turn)),) for table in make().tables}), hosts=2, replicas=2)


def test_the_problem_shows_what_it_should() -> None:
    """The contract would say little if nothing were clipped, every row touched, or no weight of FTRL exactly 0."""
    with jax.enable_x64(True):
        truth, before = oracle(tuple(OPTIMIZERS)), new_weights(make(), np.float64)["tables"]
    norms, after = truth.norms, truth.tables
    assert min(norms) < OPTIONS.clip_norm < max(norms)
    named = np.unique(np.concatenate([b.ids.ravel() for batch in make().batches for b in batch.bags.values()]))
    untouched = np.setdiff1d(np.arange(V), named)
    assert len(untouched) >= 4
    for name, optimizer in OPTIMIZERS.items():
        order = RowOrder(V).position(untouched)
        same = after[name]["rows"][untouched] == before[name]["rows"][order]
        assert not same.any() if optimizer.every_row and optimizer.l2 else same.all()
    assert (after["ftrl"]["rows"][named] == 0).any()
