"""Several tasks, BatchNorm and Dropout on any mesh equal the same thing worked out on whole batches, in float64.

The truth is written with whole batches, plain formulas and a loop over samples; nothing of the layers or the losses
under test is in it.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.problems import Placed, Problem, Result, by_row, compare, run_oracle, run_sharded, trainer_of

from recjax.config.tasks import Focal, Huber, LogLoss, Poisson, Softmax
from recjax.config.train import DenseAdagrad, Polynomial
from recjax.data.batch import Bags, Batch, Label
from recjax.embedding.optim import RowWiseAdagrad
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.errors import ConfigError
from recjax.models.stateful import BatchNorm, Dropout
from recjax.train.step import StepOptions
from recjax.train.tasks import Task
from recjax.utils.lazy_arrays import load

pytestmark = [pytest.mark.full, pytest.mark.light_compile]

STEPS, B, V, D, SEED = 4, 21, 31, 4, 7
RATE, DECAY, EPSILON = 0.3, 0.8, 1e-3
WIDTHS = {"click": 1, "rating": 1, "kind": 3, "count": 1, "buy": 1}
SCHEDULE = Polynomial(warmup_steps=2, decay_start=2, decay_steps=4, end=0.1)


@dataclasses.dataclass(frozen=True)
class Net:
    """Config of a small model with every part that has state or draws."""

    kind: ClassVar[str] = "net"
    stateful: bool = True

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> nnx.Module:
        return NetModule(dense + sum(dims.values()), tuple(dims), self.stateful, dtype, nnx.Rngs(seed))


class NetModule(nnx.Module):
    def __init__(self, width: int, names: tuple[str, ...], stateful: bool, dtype: Any, rngs: nnx.Rngs) -> None:
        self.names = names
        self.hidden = nnx.Linear(width, 6, param_dtype=dtype, rngs=rngs)
        self.norm = BatchNorm(6, decay=DECAY, epsilon=EPSILON) if stateful else None
        self.drops = nnx.List([Dropout(RATE), Dropout(RATE)])
        self.out = nnx.Linear(6, sum(WIDTHS.values()), param_dtype=dtype, rngs=rngs)

    def __call__(self, dense_BxK: jax.Array, pooled: dict[str, Any]) -> dict[str, jax.Array]:
        x = self.drops[0](jnp.concatenate([dense_BxK, *(pooled[name] for name in self.names)], axis=1))
        x = self.hidden(x)
        if self.norm is not None:
            x = self.norm(x)
        outputs = self.out(self.drops[1](jnp.tanh(x)))
        return {
            "click": outputs[:, 0],
            "rating": outputs[:, 1],
            "kind": outputs[:, 2:5],
            "count": outputs[:, 5],
            "buy": outputs[:, 6],
        }


def tasks() -> tuple[Task, ...]:
    return (
        Task(Label("click"), LogLoss(), 1.0, 0, 0),
        Task(Label("rating", "number"), Huber(0.7), 0.5, 1, 1),
        Task(Label("kind", "class", 3), Softmax(), 0.3, 2, 2),
        Task(Label("count", "number"), Poisson(), 0.2, 3, 5),
        Task(Label("buy"), Focal(1.5, 0.3), 2.0, 4, 6),
    )


def make_batch(step: int) -> Batch:
    """Of samples with and without weight; in one batch no sample of the last task has any."""
    rng = np.random.default_rng(step)
    size = B if step < STEPS - 1 else 13
    labels = np.stack(
        [
            rng.random(size) < 0.4,
            rng.normal(size=size),
            rng.integers(0, 3, size),
            rng.integers(0, 5, size),
            rng.random(size) < 0.5,
        ],
        axis=1,
    ).astype(np.float32)
    weights = rng.integers(0, 3, (size, 5)).astype(np.float32)
    weights[rng.random(size) < 0.2] = 0
    if step == 1:
        weights[:, 4] = 0
    ids = (rng.random((size, 2)) ** 2 * V).astype(np.int64)
    return Batch(rng.normal(size=(size, 2)).astype(np.float32), {"item": Bags(ids)}, labels, weights)


def dropped(layer: int, step: Any, x: Any) -> Any:
    """The rule of Dropout, sample by sample."""
    key = jax.random.key(SEED, impl="threefry2x32")
    for word in (zlib.crc32(b"dropout"), step, layer):
        key = jax.random.fold_in(key, word)
    rows = []
    for number in range(len(x)):
        bits = jax.random.bits(jax.random.fold_in(key, number), x.shape[1:], jnp.uint32)
        rows.append(jnp.where(bits / 2**32 >= RATE, x[number] / (1 - RATE), 0.0))
    return jnp.stack(rows)


def truth(params: Any, kept: Any, x: Any, pooled: Any, y: Any, w: Any, step: Any) -> Any:
    x = dropped(0, step, jnp.concatenate([x, pooled["item"]], axis=1))
    h = x @ params["hidden.kernel.value"] + params["hidden.bias.value"]
    counted = (w > 0).any(axis=1)[:, None]
    n = counted.sum()
    mean = (h * counted).sum(axis=0) / n
    var = ((h - mean) ** 2 * counted).sum(axis=0) / n
    h = (h - mean) / jnp.sqrt(var + EPSILON) * params["norm.scale.value"] + params["norm.bias.value"]
    kept = {
        "norm.mean.value": DECAY * kept["norm.mean.value"] + (1 - DECAY) * mean,
        "norm.var.value": DECAY * kept["norm.var.value"] + (1 - DECAY) * var * n / (n - 1),
    }
    z = dropped(1, step, jnp.tanh(h)) @ params["out.kernel.value"] + params["out.bias.value"]
    p = 1 / (1 + jnp.exp(-z[:, 6]))
    p_t, a_t = jnp.where(y[:, 4] == 1, p, 1 - p), jnp.where(y[:, 4] == 1, 0.3, 0.7)
    apart = jnp.abs(z[:, 1] - y[:, 1])
    each = [
        -jnp.where(y[:, 0] == 1, jnp.log(1 / (1 + jnp.exp(-z[:, 0]))), jnp.log(1 / (1 + jnp.exp(z[:, 0])))),
        jnp.where(apart <= 0.7, apart**2 / 2, 0.7 * (apart - 0.35)),
        -jnp.log((jnp.exp(z[:, 2:5]) * (y[:, 2:3] == jnp.arange(3))).sum(axis=1) / jnp.exp(z[:, 2:5]).sum(axis=1)),
        jnp.exp(z[:, 5]) - y[:, 3] * z[:, 5],
        -a_t * (1 - p_t) ** 1.5 * jnp.log(p_t),
    ]
    totals = w.sum(axis=0)
    means = [
        jnp.where(totals[t] > 0, (w[:, t] * loss).sum() / jnp.where(totals[t] > 0, totals[t], 1), 0)
        for t, loss in enumerate(each)
    ]
    return sum(weight * mean for weight, mean in zip((1.0, 0.5, 0.3, 0.2, 2.0), means, strict=True)), kept


@functools.cache
def make(stateful: bool = True) -> Problem:
    return Problem(
        [make_batch(step) for step in range(STEPS)],
        B,
        (TableSpec("item", V, D, RowWiseAdagrad(0.2)),),
        (FeatureSpec("item", "item", 2, "sum"),),
        Net(stateful),
        2,
        DenseAdagrad(0.1).build(),
        seed=SEED,
        options=StepOptions(clip_norm=1.0, schedule=SCHEDULE.factor, seed=SEED),
        tasks=tasks(),
        truth=truth,
    )


@functools.cache
def oracle() -> Result:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return run_oracle(make(), np.float64)


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        pytest.param(1, {}, marks=pytest.mark.wide),
        (2, {"held": "sharded"}),
        pytest.param(3, {"bucket_mib": 1e-4}, marks=pytest.mark.wide),
        (8, {"hosts": 2, "replicas": 2}),
    ],
)
def test_tasks_with_batch_norm_and_dropout_equal_the_truth_on_any_mesh(devices: int, how: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        result = run_sharded(make(), devices, "row_wise", np.float64, **how)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)
        assert {"norm.mean.value", "norm.var.value"} <= result.dense.keys()


def test_parts_change_no_number_without_state() -> None:
    problem = dataclasses.replace(make(False), options=dataclasses.replace(make(False).options, accumulate=3))
    with jax.enable_x64(True):
        parts, whole = (run_sharded(each, 2, "row_wise", np.float64) for each in (problem, make(False)))
        compare(parts, whole, loss_rtol=1e-9, atol=1e-9)


def test_parts_and_state_are_refused() -> None:
    problem = dataclasses.replace(make(), options=dataclasses.replace(make().options, accumulate=3))
    with pytest.raises(ConfigError, match=r"train\.accumulate=3 .*\(BatchStat\)"):
        trainer_of(problem, 2)


def test_a_run_goes_on_elsewhere_as_if_it_had_stayed() -> None:
    with jax.enable_x64(True):
        here = Placed.of(make(), trainer_of(make(), 2, "row_wise", np.float64))
        state = here.steps(here.start(), 0, 2)
        saved = load(here.trainer.export(state))
        assert set(saved["module"]) == {"norm.mean.value", "norm.var.value"}
        there = Placed.of(make(), trainer_of(make(), 3, "table_wise", np.float64))
        tables, dense = by_row(there.trainer, there.steps(there.trainer.restore(saved, 2), 2))
        compare(Result(oracle().losses, tables, dense), oracle(), loss_rtol=1e-9, atol=1e-9)


def test_losses_of_the_tasks_are_told_and_nan_where_nothing_has_weight() -> None:
    with jax.enable_x64(True):
        placed = Placed.of(make(), trainer_of(make(), 3, "row_wise", np.float64))
        state = placed.start()
        for step, inputs in enumerate(placed.inputs[:2]):
            state, metrics = placed.trainer.train_step(state, inputs)
            each = np.asarray(metrics["losses"])
            assert np.isnan(each).tolist() == [False] * 4 + [step == 1]
            known = sum(task.weight * loss for task, loss in zip(tasks(), each, strict=True) if not np.isnan(loss))
            np.testing.assert_allclose(known, float(metrics["loss"]), rtol=1e-12)


def test_a_batch_without_any_weight_changes_nothing() -> None:
    with jax.enable_x64(True):
        placed = Placed.of(make(), trainer_of(make(), 2, "row_wise", np.float64))
        before = placed.start()
        bare = dataclasses.replace(placed.inputs[0], weights_B=placed.inputs[0].weights_B * 0)
        kept = load(placed.trainer.export(before))
        state, metrics = placed.trainer.train_step(before, bare)
        assert not bool(metrics["ok"]) and float(metrics["weight"]) == 0 and int(state.step) == 0
        after = load(placed.trainer.export(state))
        for key in ("dense", "module", "opt"):
            for name, array in kept[key].items():
                np.testing.assert_array_equal(after[key][name], array)
