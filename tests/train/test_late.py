"""Late dense gradients: the oracle's numbers with an optimizer that lags, what may overlap, and what is on the disk."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.hlo_text import ancestors
from support.problems import Placed, Problem, Result, by_row, compare, problem, run_oracle, trainer_of

from recjax.config.train import DenseAdagrad, DenseSharding, TrainConfig
from recjax.data.synthetic.clicks import Synthetic
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import ConfigError
from recjax.lab.bench.breakdown import part_of, scopes
from recjax.models.dlrm import DLRMConfig
from recjax.planning.compiled_collectives import collectives
from recjax.train.compile_only import abstract_state
from recjax.train.step import StepOptions
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

STEPS, B = 4, 97
SIZES = (16, 1, 9 * 16, 16, 16 * 8, 8, 4 * 16, 16)


def lagging(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, given in each step what it should have got in the one before, and zeros in the first."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        before, inner = state
        updates, inner = tx.update(before, inner, params)
        return updates, (grads, inner)

    return optax.GradientTransformation(lambda params: (jax.tree.map(jnp.zeros_like, params), tx.init(params)), update)


@functools.cache
def make(lags: bool = False) -> Problem:
    """The last batch is short: its gradients' weight is another than that of the step in which they are used."""
    source = Synthetic(rows=(50,), dense=4, train_rows=300).open()
    model = DLRMConfig(bottom=(16, 8), top=(16, 1))
    tx = DenseAdagrad(0.05, weight_decay=0.1).build()
    made = problem(
        source, model, RowWiseAdagrad(0.05), 8, steps=STEPS + 1, batch_size=B, tx=lagging(tx) if lags else tx
    )
    return dataclasses.replace(made, options=StepOptions(late=not lags))


@functools.cache
def truth() -> Result:
    with jax.enable_x64(True):
        return run_oracle(make(lags=True), np.float64)


@functools.cache
def placed(held: DenseSharding, bucket_mib: float, devices: int) -> Placed:
    return Placed.of(make(), trainer_of(make(), devices, dtype=np.float64, held=held, bucket_mib=bucket_mib))


CASES: list[tuple[DenseSharding, float, int]] = [("replicated", 1 / 1024, 4), ("sharded", 0.0, 3)]


@pytest.mark.parametrize(("held", "bucket_mib", "devices"), CASES)
def test_float64_equals_the_oracle_with_an_optimizer_that_lags(
    held: DenseSharding, bucket_mib: float, devices: int
) -> None:
    assert {batch.size for batch in make().batches} == {B, 300 % B}
    with jax.enable_x64(True):
        on_mesh = placed(held, bucket_mib, devices)
        state, losses = on_mesh.trainer.init_state(), []
        for inputs in on_mesh.inputs:
            state, metrics = on_mesh.trainer.train_step(state, inputs)
            losses.append(float(metrics["loss"]))
        found = Result(losses, *by_row(on_mesh.trainer, state))
        on_time = run_oracle(dataclasses.replace(make(), options=StepOptions()), np.float64)
    compare(found, truth(), loss_rtol=1e-9, atol=1e-9)
    assert max(np.abs(found.dense[name] - x).max() for name, x in on_time.dense.items()) > 1e-3


def test_a_run_goes_on_elsewhere_with_what_was_late() -> None:
    with jax.enable_x64(True):
        first, second = (placed(*case) for case in CASES)
        saved = load(first.trainer.export(first.steps(first.trainer.init_state(), last=3)))
        assert float(saved["late"]["weight"]) == B and set(saved) == {"tables", "dense", "opt", "late"}
        state = second.trainer.restore(saved, 3)
        jax.tree.map(np.testing.assert_array_equal, load(second.trainer.export(state)), saved)
        tables, dense = by_row(second.trainer, second.steps(state, 3))
        logits = [
            np.asarray(p.trainer.predict_program(p.trainer.restore(saved, 3), p.inputs[0]))[:B] for p in (first, second)
        ]
    compare(Result(truth().losses, tables, dense), truth(), loss_rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-12)


def test_the_all_reduce_waits_for_no_layer_and_no_layer_for_it() -> None:
    with jax.enable_x64(True):
        hlo = placed(*CASES[0]).compiled.as_text() or ""
    needs, scope = ancestors(hlo), scopes(hlo)
    sent = [c for c in collectives(hlo) if c.phase == "dense_grads"]
    late = [c.name for c in sent if any(dims and dims[0] > 2 for _, dims in c.shapes)]
    layers = [n for n in needs if part_of(scope[n]) in ("dense_forward", "dense_backward") and "dot" in n]
    exchanged = [c.name for c in collectives(hlo) if c.phase in ("row_exchange", "grad_exchange")]
    assert late and layers and exchanged
    assert not any(needs[name].intersection((*layers, *exchanged)) for name in late)
    assert not any(needs[name].intersection(late) for name in (*layers, *exchanged))


def test_what_is_not_finite_is_found_in_the_step_that_makes_it() -> None:
    with jax.enable_x64(True):
        on_mesh = placed(*CASES[1])
        state = on_mesh.steps(on_mesh.trainer.init_state(), last=1)
        before = load(on_mesh.trainer.export(state))
        first = on_mesh.inputs[1]
        spoilt = dataclasses.replace(first, dense_BxK=first.dense_BxK.at[5, 1].set(np.nan))
        after, metrics = on_mesh.trainer.counting.train_step(state, spoilt)
        assert not bool(metrics["ok"]) and 0 < int(metrics["bad_dense"]) <= sum(SIZES)
        jax.tree.map(np.testing.assert_array_equal, load(on_mesh.trainer.export(after)), before)


def test_shapes_are_known_without_a_state() -> None:
    with jax.enable_x64(True):
        trainer = placed(*CASES[1]).trainer

        def shape(x: Any) -> Any:
            return x.shape, x.dtype, x.sharding

        made = jax.tree.map(shape, trainer.init_state().late), jax.tree.map(shape, abstract_state(trainer).late)
    assert made[0] == made[1]


def test_a_norm_that_is_not_known_cannot_clip() -> None:
    with pytest.raises(ConfigError, match="dense_delay is 1 and clip_norm 0.5: the norm of all gradients"):
        TrainConfig(dense_delay=1, clip_norm=0.5)
    with pytest.raises(ConfigError, match="dense_delay"):
        TrainConfig(dense_delay=2)
