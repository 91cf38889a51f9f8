"""Steps that are not finite: what counts as such, that they change nothing, and that nothing else does."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import to_host
from support.small_steps import ADAGRAD, built, make, placed_once

from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.embedding.optim import Adagrad, Adam, Sgd
from recjax.train.gradients import explain
from recjax.train.routers import StepInputs
from recjax.train.state import TrainState
from recjax.train.step import StepOptions

pytestmark = [pytest.mark.full, pytest.mark.light_compile]


def test_a_norm_that_overflows_is_not_finite_either() -> None:
    """Else the scale would be 0, and steps that change nothing would go unnoticed."""
    placed = placed_once(2, "row_wise", StepOptions(clip_norm=1.0))
    inputs = placed.inputs[0]
    huge = StepInputs(inputs.dense_BxK * 1e21, inputs.labels_B, inputs.weights_B, inputs.routing)
    state, metrics = placed.trainer.counting.train_step(placed.start(), huge)
    assert int(metrics["bad_norm"]) == 1 and not bool(metrics["ok"])
    assert int(metrics["bad_dense"]) == int(metrics["bad_tables"]) == 0


# Optimizer of the tables, of the dense part, plan, devices, and whose slots the squares of huge gradients overflow.
OVERFLOWS = [
    pytest.param(ADAGRAD, optax.sgd(0.1), "row_wise", 8, "bad_slots", marks=pytest.mark.wide),
    (ADAGRAD, optax.sgd(0.1), "column_wise", 3, "bad_slots"),
    (Adam(0.1), optax.sgd(0.1), "data_parallel", 2, "bad_slots"),
    (Adagrad(0.1, every_row=True), optax.sgd(0.1), "row_wise", 2, "bad_slots"),
    (Sgd(1e-30), DenseAdagrad(0.1).build(), "row_wise", 8, "bad_opt"),
    (Sgd(1e-30), optax.sgd(1e-30), "row_wise", 8, ""),
]


@pytest.mark.parametrize(("tables", "dense", "plan", "devices", "where"), OVERFLOWS)
def test_slots_that_finite_gradients_would_make_infinite(tables, dense, plan, devices, where) -> None:
    placed = built(dataclasses.replace(make((900, 37, 2000), tables), tx=dense), devices, plan)
    fresh = placed.start()
    before = to_host(fresh, placed.trainer.bound)
    inputs = placed.inputs[0]
    huge = StepInputs(inputs.dense_BxK * 1e24, inputs.labels_B, inputs.weights_B, inputs.routing)
    state, metrics = placed.trainer.counting.train_step(fresh, huge)
    bad = {name: int(jnp.sum(count)) for name, count in metrics.items() if name.startswith("bad_")}
    assert {name for name, count in bad.items() if count} == ({where} if where else set())
    assert np.isfinite(float(metrics["loss"])) and bool(metrics["ok"]) == (not where)
    if where:
        jax.tree.map(np.testing.assert_array_equal, to_host(state, placed.trainer.bound), before)
        assert int(state.step) == 0
        kind = "rowwise_adagrad" if tables == ADAGRAD else tables.kind
        said = explain(TrainConfig(), placed.trainer.bound, 1, "samples 0 to 96", metrics)
        rows = "the rows of sparse_0, sparse_1, sparse_2"
        whose = f"{kind} for {rows}" if where == "bad_slots" else "adagrad for the dense part"
        assert re.match(
            rf"step 1 is not finite: \d+ slots of {whose}, which would overflow\. It covers samples 0 to", said
        )


def test_slots_that_overflow_by_addition_alone_and_slots_that_are_infinite_already() -> None:
    """Row-wise Adagrad's sums: 2^127 + 2^127 is no float32, though both are; infinity + x is no new infinity."""
    placed = placed_once(2, "row_wise")
    (group,) = placed.trainer.bound.groups
    for start, rows_scale, ok in ((2.0**126, 0.0, True), (2.0**127, 1.0, False), (np.inf, 1.0, True)):
        fresh = placed.start()
        sums = fresh.slots[group.name]["sum_of_squares"]
        full = jax.device_put(jnp.full_like(sums, start), sums.sharding)
        state = dataclasses.replace(fresh, slots={group.name: {"sum_of_squares": full}})
        inputs = placed.inputs[0]
        # gradients of a row are of the size of the bottom MLP's output, which the dense features scale
        huge = StepInputs(inputs.dense_BxK * (1e21 * rows_scale), inputs.labels_B, inputs.weights_B, inputs.routing)
        _, metrics = placed.trainer.counting.train_step(state, huge)
        assert (bool(metrics["ok"]), bool(metrics["bad_slots"][0])) == (ok, not ok)


@pytest.mark.parametrize("where", ["dense", "labels", "table"])
def test_a_step_that_is_not_finite_changes_nothing_and_later_ones_neither(where: str) -> None:
    placed = placed_once(8, "auto" if where == "labels" else "row_wise")
    state, _ = placed.trainer.train_step(placed.start(), placed.inputs[0])
    inputs = placed.inputs[1]
    if where == "dense":
        inputs = StepInputs(inputs.dense_BxK.at[5, 1].set(np.nan), inputs.labels_B, inputs.weights_B, inputs.routing)
    elif where == "labels":
        inputs = StepInputs(inputs.dense_BxK, inputs.labels_B.at[5].set(np.inf), inputs.weights_B, inputs.routing)
    else:
        # one row so large that only gradients overflow is hard to build; a NaN row reaches loss and gradients
        name = placed.trainer.bound.groups[0].name
        slot = int(np.asarray(inputs.routing.groups[name].slots_NxOxC)[0, 0, 0])
        spoilt = {**state.tables, name: state.tables[name].at[slot].set(np.nan)}
        state = TrainState(state.step, state.ok, state.dense, state.opt, spoilt, state.slots)
    before = to_host(state, placed.trainer.bound)
    state, metrics = placed.trainer.train_step(state, inputs)
    assert not bool(metrics["ok"]) and "bad_loss" not in metrics
    again = dataclasses.replace(state, ok=jnp.ones_like(state.ok))  # counted from the state that it left
    state, metrics = placed.trainer.counting.train_step(again, inputs)
    assert not bool(metrics["ok"])
    assert int(metrics["bad_loss"]) + int(metrics["bad_dense"]) + int(metrics["bad_tables"]) > 0
    state, metrics = placed.trainer.train_step(
        state, placed.inputs[2]
    )  # already on its way when the loop reads the metrics
    assert not bool(metrics["ok"])
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, to_host(state, placed.trainer.bound), before)
