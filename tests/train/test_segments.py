"""Rows split by columns whose optimizers ask for means over rows. All segments together are in test_contract.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from support.contract import V, problem_of
from support.problems import Placed, compare, run_oracle, run_sharded, trainer_of

from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Segment
from recjax.embedding.spec import TableSpec
from recjax.planning.compiled_collectives import collectives

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

RULES: dict[str, Any] = {
    "some": RowWiseAdagrad(0.2, l2=0.01, weight_decay=0.1),
    "every": RowWiseAdagrad(0.2, l2=0.01, every_row=True),
}
LEFT_AND_RIGHT = (
    Segment("table_wise", columns=(0, 2), owners=2),
    Segment("table_wise", columns=(2, 4), owners=0),
)


def test_columns_of_tables_of_any_width_share_a_buffer() -> None:
    """Tables of 4 and 6 columns in ranges of 2, on three devices: means divide by the columns of the own table."""
    tables = tuple(TableSpec(f"{name} {dim}", V, dim, rule) for name, rule in RULES.items() for dim in (4, 6))
    sources = zip(tables, ("one", "jagged", "three", "jagged_weighted"), strict=True)
    problem = problem_of(tables, {f"{source} {table.name}": (table.name, source, "sum") for table, source in sources})
    ranges: list[dict[str, Any]] = [
        {"placement": "table_wise", "owners": 1},
        {"placement": "row_wise", "owners": (2, 0)},
        {"placement": "row_wise"},
    ]
    segments = [Segment(**how, columns=(2 * n, 2 * n + 2)) for n, how in enumerate(ranges)]
    plan = Plan({table.name: tuple(segments[: table.dim // 2]) for table in tables})
    assert sum(g.divides_row_means for g in trainer_of(problem, 3, plan).bound.groups) == len(RULES)
    with jax.enable_x64(True):
        result = run_sharded(problem, 3, plan, np.float64)
        compare(result, run_oracle(problem, np.float64), loss_rtol=1e-9, atol=1e-9)


def test_rows_split_by_columns_send_two_floats_for_each_row_asked_for() -> None:
    """There and back, for C rows of each of three owners; nothing else in that phase."""
    whole = {name: (Segment("row_wise"),) for name in RULES}
    tables = tuple(TableSpec(name, V, 4, rule) for name, rule in RULES.items())
    problem = problem_of(tables, {name: (name, "jagged", "sum") for name in RULES})
    placed = Placed.of(problem, trainer_of(problem, 3, Plan(whole | {"some": LEFT_AND_RIGHT})))
    (group,) = (group for group in placed.trainer.bound.groups if group.divides_row_means)
    found = [c for c in collectives(placed.compiled.as_text()) if "row_statistic" in c.phases]
    C = placed.capacities[group.name]
    assert [(c.kind, c.result_bytes, c.phases) for c in found] == [("all-to-all", 3 * C * 4, ("row_statistic",))] * 2
