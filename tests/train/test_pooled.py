"""Where owners of rows pool: what travels, and what is refused. That it changes no number is in test_contract.py."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import numpy as np
import pytest
from support.contract import Net, V, problem_of
from support.problems import Placed, Problem, trainer_of

from recjax.config.train import DenseAdagrad
from recjax.data.batch import Bags, Batch
from recjax.data.source import between
from recjax.embedding.bind import bind
from recjax.embedding.layout import IDS, ROWS
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.plan import Plan
from recjax.embedding.routing import host
from recjax.embedding.routing.capacity import rung
from recjax.embedding.segment import Exchange, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.parallel.mesh import Share
from recjax.planning.compiled_collectives import collectives as all_collectives
from recjax.planning.compiled_collectives import wire_bytes

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

POOLED = Exchange(kind="pooled")
FEATURES: dict[str, tuple[str, str, Any]] = {  # table, data feature, pooling
    "one": ("t", "one", "sum"),
    "jagged": ("t", "jagged", "mean"),
    "sequence": ("t", "jagged_weighted", "none"),
}


def segment(placement: str, **more: Any) -> Segment:
    """One whose exchange is of pooled vectors."""
    return Segment(placement, exchange=POOLED, **more)


@functools.cache
def make() -> Problem:
    return problem_of((TableSpec("t", V, 4, RowWiseAdagrad(0.2)),), FEATURES)


def test_rows_of_named_features_travel_beside_vectors_of_others() -> None:
    plan = Plan({"t": (segment("column_wise", rows_of=("one",)),)})
    bound = bind(plan, make().tables, make().features, 4, hosts=2)
    of_rows = {source.feature.name for group in bound.groups if group.spread for source in group.sources}
    of_vectors = {s.feature.name for exchange in bound.pooled for of_group in exchange.streams for s in of_group}
    assert of_rows == {"one", "sequence"} and of_vectors == {"jagged"}


def wide(ids: int, samples: int) -> Problem:
    """One feature of long bags, of which rows and vectors can be told apart by their sizes."""
    table, rng = TableSpec("t", 5000, 12, RowWiseAdagrad(0.1)), np.random.default_rng(0)
    batch = Batch(
        rng.normal(size=(samples, 2)).astype(np.float32),
        {"f": Bags(rng.integers(0, 5000, (samples, ids)))},
        np.zeros(samples, np.float32),
        np.ones(samples, np.float32),
    )
    return Problem([batch], samples, (table,), (FeatureSpec("f", "t", ids),), Net(), 2, DenseAdagrad(0.1).build())


def test_no_row_travels_and_no_array_has_a_row_for_each_id() -> None:
    """4 devices of 1,024 samples with 40 ids: an owner pools 163,840 ids, and sends 1,024 vectors to each."""
    problem = wide(40, 4096)
    how = Plan({"t": (segment("column_wise"),)})
    placed = Placed.of(problem, trainer_of(problem, 4, how))
    text = placed.compiled.as_text() or ""
    found = {(c.phase, c.kind): c.result_bytes for c in all_collectives(text)}
    assert found["pooled_exchange", "all-to-all"] == found["pooled_grad_exchange", "all-to-all"] == 4 * 1024 * 3 * 4
    assert found["id_exchange", "all-to-all"] == 4 * placed.capacities["pooled_float32_float32"] * 4
    assert placed.capacities["pooled_float32_float32"] == rung(int(1024 * 40 * 1.03))
    assert not {"row_exchange", "grad_exchange"} & {phase for phase, _ in found}
    arrays = [int(n) * int(d) for n, d in re.findall(r"f32\[(\d+),(\d+)\]", text)]
    assert max(arrays) < 163_840 * 3 / 2
    lines = wire_bytes(text, placed.trainer.bound, placed.inputs[0].routing, 4, samples=1024)
    useful = {line["phase"]: line["useful_bytes"] for line in lines}
    assert useful["pooled_exchange"] == useful["pooled_grad_exchange"] == 3 * 1024 * 3 * 4
    assert useful["id_exchange"] == 3 * 1024 * 40 * 4


def test_partial_sums_are_added_up_in_their_host_before_they_leave_it() -> None:
    """2 hosts of 2: 64 samples a device of 12 columns go once to the other host's device, not once from each of two."""
    problem = wide(5, 256)
    placed = Placed.of(problem, trainer_of(problem, 4, Plan({"t": (segment("table_row_wise"),)}), hosts=2))
    text = placed.compiled.as_text() or ""
    size = 64 * 12 * 4
    found = collections.Counter((c.phase, c.kind, c.group_size, c.result_bytes) for c in all_collectives(text))
    assert found["pooled_exchange", "all-to-all", 2, 2 * size] == 1
    assert found["pooled_exchange", "reduce-scatter", 2, 2 * size] == 1
    assert found["pooled_grad_exchange", "all-to-all", 2, 2 * size] == 1
    assert found["pooled_grad_exchange", "all-gather", 2, 4 * size] == 1
    lines = wire_bytes(text, placed.trainer.bound, placed.inputs[0].routing, 4, samples=64)
    across = {line["phase"]: line["across_useful_bytes"] for line in lines if line["kind"] == "all-to-all"}
    # one host alone has the table: its two devices send, the other two are sent to
    assert across["pooled_exchange"] == across["pooled_grad_exchange"] == size / 2


def test_counts_of_rows_at_an_owner_are_enough_for_any_share_of_the_devices() -> None:
    """Twice what each of two processes finds for itself is no less than what both find together."""
    problem = wide(3, 64)
    trainer = trainer_of(problem, 4, Plan({"t": (segment("table_wise"),)}))
    (exchange,) = trainer.bound.pooled
    (group,) = exchange.groups
    batch = problem.batches[0]
    whole = host.route_on_host(batch, trainer.bound, 64).required_capacities
    distinct = len(np.unique(batch.bags["f"].ids))
    assert whole[group.name + ROWS] == distinct
    halves = []
    for first in (0, 2):
        share = Share(4, first, 2)
        of_share = between(batch, *host.samples_of(share, 64))
        halves.append(host.route_on_host(of_share, trainer.bound, 64, share=share).required_capacities)
    assert max(half[group.name + ROWS] for half in halves) >= distinct
    assert max(half[group.name + IDS] for half in halves) == whole[group.name + IDS] == 16 * 3


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((segment("grid"),), "table 't' is to exchange pooled vectors, which a table placed grid cannot"),
        (
            (segment("table_wise", columns=(0, 2)), Segment("row_wise", columns=(2, 4))),
            "table 't' is split by columns, .* some of its segments exchange rows, others pooled vectors",
        ),
        (
            (segment("table_wise", columns=(0, 2), rows_of=("one",)), segment("table_wise", columns=(2, 4))),
            "table 't' is split by columns, .* and the same \"rows_of\"",
        ),
        (
            (segment("table_wise", rows_of=("one", "mean")),),
            "rows of table 't' for 'mean' .* the features that look it up are one, jagged, sequence",
        ),
    ],
)
def test_what_cannot_exchange_pooled_vectors_is_refused(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(make(), 4, Plan({"t": segments}), hosts=2)
