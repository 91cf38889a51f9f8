"""Labels of the elements of a row: the numbers are those of a row for each element, on any mesh.

A row is a request, with a history and candidates. The truth is the dense oracle on one device, which gets a row for
each candidate, with the history and all else of the request repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.problems import Placed, Problem, Result, run_oracle, trainer_of

from recjax.data.batch import Bags, Batch, ElementGroup, Feature, Schema
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.models.din import DinConfig
from recjax.train.step import StepOptions

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

ROWS = {"user": 9, "item": 23, "action": 4, "author": 6, "tags": 7}
GROUPS = (
    ElementGroup("history", ("history.item", "history.action"), ("candidates.item", "")),
    ElementGroup("candidates", ("candidates.item", "candidates.author")),
)
BAGS = {"user": 1, "tags": None} | dict.fromkeys(
    ("history.item", "history.action", "candidates.item", "candidates.author")
)
SCHEMA = Schema(
    ("price",),
    tuple(Feature(name, ROWS[name.partition(".")[2] or name], bag) for name, bag in BAGS.items()),
    groups=GROUPS,
    label_group="candidates",
)
TABLES = tuple(TableSpec(name, rows, 4, RowWiseAdagrad(0.1), init_scale=0.5) for name, rows in ROWS.items())


def feature_specs(pooled: frozenset[str]) -> tuple[FeatureSpec, ...]:
    return tuple(
        FeatureSpec(
            name,
            name.partition(".")[2] or name,
            1 if name in pooled or name == "user" else None,
            "sum" if name in pooled or name in ("user", "tags") else "none",
            beside="candidates.item" if name == "history.item" and not pooled else "",
        )
        for name in BAGS
    )


@dataclasses.dataclass(frozen=True)
class Scores:
    """`DinConfig`, which knows the groups."""

    config: DinConfig
    of_rows: bool

    def build(self, dense: int, dims: dict[str, int], **how: Any) -> Any:
        groups = (dataclasses.replace(GROUPS[0]),) if self.of_rows else GROUPS
        return self.config.build(dense, dims, groups=groups, label_group="" if self.of_rows else "candidates", **how)


def requests(size: int, seed: int) -> Batch:
    """Requests whose histories and candidates differ in number, some without any; weights, some of them 0."""
    rng = np.random.default_rng(seed)
    lengths = {
        "history": rng.integers(0, 6, size),
        "candidates": rng.integers(0, 5, size),
        "tags": rng.integers(0, 3, size),
    }
    lengths["candidates"][:3] = (0, 9, 1)
    bags = {}
    for name in BAGS:
        rows, of = ROWS[name.partition(".")[2] or name], lengths.get(name.partition(".")[0])
        ids = rng.integers(0, rows, (size, 1) if of is None else int(of.sum()), dtype=np.int32)
        bags[name] = Bags(ids, None if of is None else of.astype(np.int32))
    count = int(lengths["candidates"].sum())
    labels, weights = rng.integers(0, 2, count).astype(np.float32), rng.integers(0, 4, count).astype(np.float32)
    dense = rng.normal(size=(size, 1)).astype(np.float32)
    return Batch(dense, bags, labels, weights, label_lengths=lengths["candidates"].astype(np.int32))


def row_by_row(batch: Batch) -> Batch:
    """A row for each candidate, written with loops."""
    lengths = {name: bags.lengths for name, bags in batch.bags.items() if bags.lengths is not None}
    starts = {name: np.cumsum(of) - of for name, of in lengths.items()}
    ids: dict[str, list[list[int]]] = {name: [] for name in batch.bags}
    dense = []
    for row in range(batch.size):
        for candidate in range(int(lengths["candidates.item"][row])):
            dense.append(batch.dense[row])
            for name, bags in batch.bags.items():
                if name not in lengths:
                    ids[name].append(list(bags.ids[row]))
                elif name.startswith("candidates"):
                    ids[name].append([bags.ids[starts[name][row] + candidate]])
                else:
                    ids[name].append(list(bags.ids[starts[name][row] :][: lengths[name][row]]))
    repeated = {}
    for name, lists in ids.items():
        flat = np.array([x for one in lists for x in one], np.int32)
        fixed = name == "user" or name.startswith("candidates")
        repeated[name] = Bags(flat[:, None]) if fixed else Bags(flat, np.array([len(one) for one in lists], np.int32))
    return Batch(np.array(dense), repeated, batch.labels, batch.weights)


SIZE = 12
BATCHES = [requests(SIZE, seed) for seed in range(3)]


@functools.cache
def problem_of(softmax: bool, repeated: bool, parts: int = 1) -> Problem:
    model = DinConfig(attention=(5,), top=(6, 1), softmax=softmax)
    batches = [row_by_row(batch) if repeated else batch for batch in BATCHES]
    pooled = frozenset(("candidates.item", "candidates.author")) if repeated else frozenset()
    return Problem(
        batches,
        max(batch.size for batch in batches) if repeated else SIZE,
        TABLES,
        feature_specs(pooled),
        Scores(model, repeated),
        1,
        optax.sgd(0.1),
        options=StepOptions(accumulate=parts),
        source=None if repeated else types.SimpleNamespace(schema=SCHEMA),
    )


@functools.cache
def truth(softmax: bool) -> Result:
    return run_oracle(problem_of(softmax, True), np.float64)


def assert_same(found: Result, expected: Result) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    for name, of in expected.tables.items():
        for what, values in of.items():
            np.testing.assert_allclose(
                found.tables[name][what], values, rtol=1e-9, atol=1e-12, err_msg=f"{name} {what}"
            )
    assert found.dense.keys() == expected.dense.keys()
    for name, values in expected.dense.items():
        np.testing.assert_allclose(found.dense[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


POOLED = {"tags": (Segment("row_wise", exchange=Exchange(kind="pooled")),)}
PLAN = Plan({name: POOLED.get(name) or (Segment("row_wise"),) for name in ROWS})


@pytest.mark.parametrize(
    ("devices", "plan", "parts", "how"),
    [
        (1, "row_wise", 1, {}),
        (2, "column_wise", 1, {}),
        (3, "table_wise", 2, {}),
        (8, PLAN, 1, {}),
        (2, "row_wise", 1, {"cache_bytes": 2000}),
    ],
)
def test_training_is_that_of_a_row_for_each_candidate(devices: int, plan: Any, parts: int, how: Any) -> None:
    softmax = devices != 2
    problem = problem_of(softmax, False, parts)
    with jax.enable_x64(True):
        placed = Placed.of(problem, trainer_of(problem, devices, plan, np.float64, **how))
        assert_same(placed.result(placed.start()), truth(softmax))


def test_a_history_is_routed_once_for_all_candidates() -> None:
    """50 candidates beside a history of 100: ids that are looked up, counted, and pairs that have room."""
    rng, size, lengths = np.random.default_rng(0), 4, {"history": 100, "candidates": 50, "tags": 0}
    bags = {}
    for name in BAGS:
        n, rows = lengths.get(name.partition(".")[0], 1), ROWS[name.partition(".")[2] or name]
        ids = rng.integers(0, rows, (size, n), dtype=np.int32)
        bags[name] = Bags(ids) if name == "user" else Bags(ids.ravel(), np.full(size, n, np.int32))
    labels = np.zeros(size * 50, np.float32)
    batch = Batch(np.zeros((size, 1), np.float32), bags, labels, labels, label_lengths=np.full(size, 50, np.int32))
    together, apart = problem_of(True, False), problem_of(True, True)
    counts = []
    for problem, given in ((together, batch), (apart, row_by_row(batch))):
        trainer = trainer_of(problem, 2, "row_wise")
        routed = trainer.route(given, given.size).routed
        counts.append(
            sum(routed.inverse[source.name].size for group in trainer.bound.listing for source in group.sources)
        )
    assert counts == [size * (1 + 2 * 100 + 2 * 50), size * 50 * (1 + 2 * 100 + 2)]
    assert counts[1] > 5 * counts[0]
