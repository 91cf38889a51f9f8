"""Several tasks, BatchNorm and Dropout on any mesh equal the same thing worked out on whole batches, in float64.

The truth is written with whole batches, plain formulas and a loop over samples; nothing of the layers or the losses
under test is in it.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.exactness import Rows, Trained, problem_of, train
from support.problems import Result, compare, run_oracle

from recjax import settings
from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.tasks import Focal, Huber, LogLoss, Poisson, Softmax, TaskConfig
from recjax.config.train import DenseAdagrad, Polynomial, TrainConfig
from recjax.data.batch import Bags, Batch, Feature, Label, Schema
from recjax.embedding.optim import RowWiseAdagrad
from recjax.errors import ConfigError
from recjax.models.stateful import BatchNorm, Dropout
from recjax.parallel.mesh import MeshConfig
from recjax.settings.values import Named
from recjax.train.build import build_trainer

pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

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


LABELS = (Label("click"), Label("rating", "number"), Label("kind", "class", 3), Label("count", "number"), Label("buy"))
TASKS = Named(
    {
        "click": TaskConfig(LogLoss()),
        "rating": TaskConfig(Huber(0.7), 0.5),
        "kind": TaskConfig(Softmax(), 0.3),
        "count": TaskConfig(Poisson(), 0.2),
        "buy": TaskConfig(Focal(1.5, 0.3), 2.0),
    }
)


@dataclasses.dataclass(frozen=True)
class TasksRun(RunConfig):
    """A run of that model: a table of two ids a bag."""

    model: Net = Net()  # type: ignore[assignment]
    seed: int = SEED
    tasks: Named[TaskConfig] = TASKS
    embedding: EmbeddingConfig = EmbeddingConfig(dim=D, optimizer=RowWiseAdagrad(0.2))
    train: TrainConfig = TrainConfig(
        batch_size=B,
        steps=STEPS,
        optimizer=DenseAdagrad(0.1),
        schedule=SCHEDULE,
        clip_norm=1.0,
        shuffle=False,
        log_every=1,
        workers=1,
    )
    mesh: MeshConfig = MeshConfig(1)
    plan: str = "row_wise"
    compute_dtype: Literal["float64"] = "float64"


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
    return Batch(rng.normal(size=(size, 2)).astype(np.float32), {"item": Bags(ids)}, labels, weights, B * step)


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
    if kept:
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
    told = [jnp.where(total > 0, mean, jnp.nan) for total, mean in zip(totals, means, strict=True)]
    return sum(weight * mean for weight, mean in zip((1.0, 0.5, 0.3, 0.2, 2.0), means, strict=True)), (kept, told)


def lagging(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, given in each step what it should have got in the one before, and zeros in the first."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        before, inner = state
        updates, inner = tx.update(before, inner, params)
        return updates, (grads, inner)

    return optax.GradientTransformation(lambda params: (jax.tree.map(jnp.zeros_like, params), tx.init(params)), update)


SOURCE = Rows(Schema(("x", "y"), (Feature("item", V, 2),), LABELS), tuple(make_batch(step) for step in range(STEPS)))


def config_of(*texts: str, stateful: bool = True) -> TasksRun:
    return settings.override(TasksRun(model=Net(stateful)), texts)


def trained(*texts: str, stateful: bool = True) -> Trained:
    return train(config_of(*texts, stateful=stateful), SOURCE)


@functools.cache
def oracle(stateful: bool = True, late: bool = False) -> Result:
    problem = problem_of(config_of(*(LATE if late else ()), stateful=stateful), SOURCE, truth=truth)
    problem = dataclasses.replace(problem, tx=lagging(problem.tx)) if late else problem
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return run_oracle(problem, np.float64)


def check(result: Trained, expected: Result) -> None:
    """Compares losses, those of each task, the table and the dense part with its state."""
    compare(result.result(), expected, loss_rtol=1e-9, atol=1e-9)
    told = np.array([result.of_tasks[name] for name in WIDTHS]).T
    np.testing.assert_allclose(told, expected.of_tasks, rtol=1e-9, atol=0)
    assert np.isnan(told).tolist() == [[False] * 4 + [step == 1] for step in range(STEPS)]


LATE = ("train.dense_delay=1", "train.clip_norm=0")


@pytest.mark.parametrize(
    "texts",
    [
        ("mesh.devices=2", "train.dense=sharded"),
        ("mesh.devices=8", "mesh.hosts=2", "mesh.replicas=2", "train.bucket_mib=0.0001"),
        ("mesh.devices=2", "train.dense=sharded", *LATE),
    ],
    ids=["sharded", "replicas", "late"],
)
def test_tasks_with_batch_norm_and_dropout_equal_the_truth_on_any_mesh(texts: tuple[str, ...]) -> None:
    with jax.enable_x64(True):
        result = trained(*texts)
        check(result, oracle(late=texts[-1] in LATE))
        assert set(result.arrays["module"]) == {"norm.mean.value", "norm.var.value"}


def test_parts_change_no_number_without_state() -> None:
    """Not of the losses of single tasks, either, which are summed part by part."""
    with jax.enable_x64(True):
        check(trained("mesh.devices=2", "train.accumulate=3", stateful=False), oracle(stateful=False))


def test_parts_and_state_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.accumulate=3 .*\(BatchStat\)"):
        build_trainer(config_of("train.accumulate=3"), SOURCE)


def test_a_run_goes_on_elsewhere_as_if_it_had_stayed() -> None:
    with jax.enable_x64(True):
        first = trained("mesh.devices=2", "train.dense=sharded", f"train.steps={STEPS - 2}")
        then = train(config_of("mesh.devices=3", "plan=table_wise"), SOURCE, first.arrays, STEPS - 2)
        result = dataclasses.replace(then.result(), losses=first.losses + then.losses)
        compare(result, oracle(), loss_rtol=1e-9, atol=1e-9)


def test_a_batch_without_any_weight_changes_nothing() -> None:
    bare = dataclasses.replace(SOURCE.blocks[1], weights=SOURCE.blocks[1].weights * 0)
    source = dataclasses.replace(SOURCE, blocks=(SOURCE.blocks[0], bare, *SOURCE.blocks[2:]))
    with jax.enable_x64(True):
        one, two = (
            train(config_of("mesh.devices=2", "train.dense=sharded", f"train.steps={steps}"), source)
            for steps in (1, 2)
        )
    assert np.isnan(two.losses[1]) and two.losses[0] == one.losses[0]
    jax.tree.map(np.testing.assert_array_equal, one.arrays, two.arrays)
