"""The contract where owners of rows pool: sums, means, weights, jagged bags, split tables, mixtures with other kinds.

Tables of several widths and optimizers, one shared with an un-pooled feature; the batches, clipping and schedule of
support/contract.py; compared with the dense oracle.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from support.contract import OPTIONS, Net, V, problem_of
from support.problems import Placed, Problem, Result, compare, new_weights, run_oracle, run_sharded, trainer_of

from recjax.config.train import DenseAdagrad
from recjax.data.batch import Bags, Batch
from recjax.data.source import between
from recjax.embedding import segment_sums
from recjax.embedding.bind import bind
from recjax.embedding.optim import Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import Plan
from recjax.embedding.pooled.layout import IDS, ROWS
from recjax.embedding.routing import host
from recjax.embedding.routing.capacity import rung
from recjax.embedding.segment import Exchange, RowIds, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.parallel.mesh import Share
from recjax.planning.compiled_collectives import collectives as all_collectives
from recjax.planning.wire_bytes import wire_bytes
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

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


def plan(devices: int, first: int, rows_of: tuple[str, ...] = ()) -> Plan:
    """Tables held in different ways, beginning with `first`; columns with a common statistic travel alike."""
    found = {}
    for number, (name, (dim, optimizer)) in enumerate(TABLES.items()):
        way = (number + first) % 8
        segments = ways(dim, devices)[3 if way == 6 and optimizer.row_wise else way]
        own = tuple(f for f in rows_of if FEATURES[f][0] == name)
        found[name] = tuple(dataclasses.replace(s, rows_of=own) if s.exchange == POOLED else s for s in segments)
    return Plan(found)


@functools.cache
def make() -> Problem:
    tables = tuple(TableSpec(name, V, dim, optimizer) for name, (dim, optimizer) in TABLES.items())
    return problem_of(tables, FEATURES)


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


@pytest.mark.parametrize(
    ("devices", "first", "how"),
    [
        pytest.param(1, 0, {}, marks=pytest.mark.wide),
        pytest.param(2, 0, {}, marks=pytest.mark.wide),
        (3, 3, {"dedup": False, "accumulate": 3}),
        pytest.param(4, 5, {"hosts": 2, "accumulate": 3}, marks=pytest.mark.wide),
        (8, 4, {"hosts": 2, "replicas": 2}),
        (4, 1, {"hosts": 2, "rows_of": 1}),
    ],
)
def test_it_equals_the_oracle(devices: int, first: int, how: dict[str, int]) -> None:
    problem, own = make(), dict(how)
    by_rows = ("one", "weighted") if own.pop("rows_of", 0) else ()
    if parts := own.pop("accumulate", 0):
        problem = dataclasses.replace(problem, options=dataclasses.replace(OPTIONS, accumulate=parts))
    with jax.enable_x64(True):
        placed = plan(devices // how.get("replicas", 1), first, by_rows)
        result = run_sharded(problem, devices, placed, np.float64, **own)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)


def test_rows_of_named_features_travel_beside_vectors_of_others() -> None:
    bound = bind(plan(4, 1, ("one", "weighted")), make().tables, make().features, 4, hosts=2)
    of_rows = {source.feature.name for group in bound.groups if group.spread for source in group.sources}
    of_vectors = {s.feature.name for exchange in bound.pooled for of_group in exchange.streams for s in of_group}
    assert {"one", "sequence", "weighted"} <= of_rows and not {"one", "sequence", "weighted"} & of_vectors
    assert {"jagged", "mean"} <= of_vectors and not {"jagged", "mean"} & of_rows


def test_sums_by_segments_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_sums, "target_platform", lambda: "gpu")
    with jax.enable_x64(True):
        compare(run_sharded(make(), 2, plan(2, 0), np.float64), oracle(), loss_rtol=1e-9, atol=1e-9)


@pytest.mark.wide  # so are two runs in `test_routing_on_the_devices_gives_the_same`
def test_two_runs_are_equal_to_the_bit() -> None:
    placed = Placed.of(make(), trainer_of(make(), 3, plan(3, 1)))
    ends = [load(placed.trainer.export(placed.steps(placed.start()))) for _ in range(2)]
    assert jax.tree.map(np.ndarray.tobytes, ends[0]) == jax.tree.map(np.ndarray.tobytes, ends[1])


def test_a_run_goes_on_with_another_kind_on_another_mesh() -> None:
    problem = make()
    with jax.enable_x64(True):
        first = Placed.of(problem, trainer_of(problem, 3, plan(3, 0), np.float64))
        half = load(first.trainer.export(first.steps(first.start(), last=2)))
        placed = Placed.of(problem, trainer_of(problem, 2, "row_wise", np.float64))
        truth = dataclasses.replace(oracle(), losses=oracle().losses[2:])
        compare(placed.result(placed.trainer.restore(half, 2), 2), truth, loss_rtol=1e-9, atol=1e-9)


def test_routing_on_the_devices_gives_the_same() -> None:
    """To the bit: only where distinct rows are sought differs."""
    ends = []
    for routing in ("host", "device"):
        trainer = trainer_of(make(), 4, plan(4, 5))
        how = dataclasses.replace(trainer.config.train, routing=routing)
        trainer = dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, train=how))
        state = trainer.restore(new_weights(make(), trainer.dtype), 0)
        for inputs in trainer.inputs_of(make().batches, make().batch_size):
            state, _ = trainer.train_step(state, inputs)
        ends.append(load(trainer.export(state)))
    assert jax.tree.map(np.ndarray.tobytes, ends[0]) == jax.tree.map(np.ndarray.tobytes, ends[1])


def test_predictions_of_independent_groups_are_made_with_their_mean_rows() -> None:
    """Those of one group that holds the means."""
    with jax.enable_x64(True):
        problem = make()
        apart = Placed.of(problem, trainer_of(problem, 4, plan(2, 0), np.float64, replicas=2, independent=True))
        state = apart.steps(apart.start(), last=3)
        logits = apart.trainer.predict_program(state, apart.inputs[3])
        exported = load(apart.trainer.export(state))
        together = Placed.of(problem, trainer_of(problem, 4, "row_wise", np.float64))
        expected = together.trainer.predict_program(together.trainer.restore(exported, 3), together.inputs[3])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["int8"])  # for the others see test_quantize.py
def test_vectors_travel_in_a_reduced_precision(precision: Any) -> None:
    """Both ways; the loss stays within what its rounding allows, and is not that of float32."""
    exact, reduced = (
        run_sharded(make(), 4, Plan({name: (segment("table_wise", exchange=e),) for name in TABLES}), np.float32)
        for e in (POOLED, Exchange(precision, precision, "pooled"))
    )
    apart = np.abs(np.subtract(reduced.losses, exact.losses))
    assert 1e-6 < apart.max() < 0.01


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
        ((segment("grid"),), "table 'adagrad' is to exchange pooled vectors, which a table placed grid cannot"),
        (
            (segment("table_wise", columns=(0, 2)), Segment("row_wise", columns=(2, 4))),
            "table 'adagrad' is split by columns, .* some of its segments exchange rows, others pooled vectors",
        ),
        (
            (segment("table_wise", columns=(0, 2), rows_of=("one",)), segment("table_wise", columns=(2, 4))),
            "table 'adagrad' is split by columns, .* and the same \"rows_of\"",
        ),
        (
            (segment("table_wise", rows_of=("one", "mean")),),
            "rows of table 'adagrad' for 'mean' .* the features that look it up are one, jagged, sequence",
        ),
    ],
)
def test_what_cannot_exchange_pooled_vectors_is_refused(segments: tuple[Segment, ...], message: str) -> None:
    plans = {name: (Segment("row_wise"),) for name in TABLES} | {"adagrad": segments}
    with pytest.raises(ConfigError, match=message):
        trainer_of(make(), 4, Plan(plans), hosts=2)
