"""The contract: every optimizer under every placement and pooling, on 1, 3 and 8 devices, equals the dense oracle.

One model holds them all, so that a case compiles once: a table for each optimizer, looked up as a sum, as a mean and
un-pooled, by bags that are fixed or jagged, weighted or not. Rates follow a schedule, gradients are clipped in some
steps and not in others, and some samples weigh 0, so that rows are touched by a gradient of zero.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import Problem, Result, compare, run_oracle, run_sharded

from recjax.data.batch import Bags, Batch
from recjax.embedding.lookup import Sequence
from recjax.embedding.optim import Adagrad, Adam, Ftrl, PartialRowWiseAdam, RowWiseAdagrad, Sgd
from recjax.embedding.plan import PLACEMENTS, Plan, Segment
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.train.options import DenseAdagrad
from recjax.train.schedule import Polynomial
from recjax.train.step import StepOptions

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
STEPS, B, V = 5, 21, 31
# Data features by name: ids a bag (None: jagged) and whether they are weighted.
DATA = {"one": (1, False), "three": (3, True), "jagged": (None, False), "jagged_weighted": (None, True)}


@dataclasses.dataclass(frozen=True)
class Net:
    """Config of a small model that takes pooled and un-pooled lookups of any width."""

    kind: ClassVar[str] = "net"

    def build(self, dense: int, dims: dict[str, int], *, dtype: Any, seed: int) -> nnx.Module:
        return NetModule(dense, dims, dtype, nnx.Rngs(seed))


class NetModule(nnx.Module):
    def __init__(self, dense: int, dims: dict[str, int], dtype: Any, rngs: nnx.Rngs) -> None:
        self.names = tuple(dims)
        self.hidden = nnx.Linear(dense + sum(dims.values()), 6, param_dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(6, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, dense_BxK: jax.Array, lookups: dict[str, Any]) -> jax.Array:
        columns = [dense_BxK]
        for name in self.names:
            found = lookups[name]
            if isinstance(found, Sequence):  # places count differently, so that their order matters
                place_H = 1 + jnp.arange(found.mask_BxH.shape[1]).astype(dense_BxK.dtype)
                seen = jnp.where(found.mask_BxH[..., None], jnp.tanh(found.rows_BxHxD + 1), 0)
                found = (seen / place_H[:, None]).sum(axis=1)
            columns.append(found)
        return self.out(jnp.tanh(self.hidden(jnp.concatenate(columns, axis=1))))[:, 0]


def make_batch(step: int) -> Batch:
    """The last of the batches is short; ids are skewed, and the upper rows are never named."""
    rng = np.random.default_rng(step)
    size = B if step < STEPS - 1 else 13
    bags = {}
    for name, (bag, weighted) in DATA.items():
        lengths = rng.integers(0, 4, size).astype(np.int32) if bag is None else None
        shape = (size, bag) if lengths is None else (int(lengths.sum()),)
        ids = (rng.random(shape) ** 2 * (V - 4)).astype(np.int64)
        bags[name] = Bags(ids, lengths, rng.uniform(0.5, 1.5, shape).astype(np.float32) if weighted else None)
    labels, weights = (rng.random(size) < 0.4).astype(np.float32), rng.integers(0, 3, size).astype(np.float32)
    return Batch(rng.normal(size=(size, 2)).astype(np.float32), bags, labels, weights)


@functools.cache
def make() -> Problem:
    tables, features = [], []
    reads = itertools.cycle(DATA.items())
    for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        tables.append(TableSpec(name, V + number, (5, 3)[number % 2], optimizer))
        for pooling in ("sum", "mean", "none"):
            source, (bag, weighted) = next(reads)
            features.append(FeatureSpec(f"{name}.{pooling}", name, bag, pooling, weighted, source))
    schedule = Polynomial(warmup_steps=2, decay_start=3, decay_steps=4, end=0.1)
    return Problem(
        [make_batch(step) for step in range(STEPS)],
        B,
        tuple(tables),
        tuple(features),
        Net(),
        2,
        DenseAdagrad(0.1, l2=0.01, weight_decay=0.1).build(),
        options=StepOptions(clip_norm=0.45, schedule=schedule.factor),
    )


@functools.cache
def oracle() -> Result:
    return run_oracle(make(), np.float64)


def mixed() -> Plan:
    """Placements in turn, beginning elsewhere than with the first, so that neighbours differ."""
    turn = itertools.cycle(reversed(PLACEMENTS))
    return Plan({table.name: (Segment(next(turn)),) for table in make().tables})


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("plan", PLACEMENTS)
def test_every_optimizer_and_pooling_equals_the_oracle(plan: str, devices: int) -> None:
    with jax.enable_x64(True):
        compare(run_sharded(make(), devices, plan, np.float64), oracle(), loss_rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", [1, 2])
def test_placements_mixed_in_one_model(parts: int) -> None:
    """With the batch whole, and in parts."""
    problem = dataclasses.replace(make(), options=dataclasses.replace(make().options, accumulate=parts))
    with jax.enable_x64(True):
        compare(run_sharded(problem, 3, mixed(), np.float64), oracle(), loss_rtol=1e-9, atol=1e-9)


def test_the_problem_shows_what_it_should() -> None:
    """Read from the oracle: the contract would be empty if nothing were clipped, lazy, dense or pulled to zero."""
    with jax.enable_x64(True):
        clipped, free = oracle(), run_oracle(dataclasses.replace(make(), options=StepOptions()), np.float64)
    assert clipped.losses[0] == free.losses[0] and clipped.losses[1:] != free.losses[1:]
    for name, optimizer in OPTIMIZERS.items():
        untouched = clipped.tables[name]["rows"][-4:]
        before = run_rows(name)[-4:]
        assert (untouched != before).all() if optimizer.l2 and optimizer.every_row else (untouched == before).all()
    assert (clipped.tables["ftrl"]["rows"][: V - 4] == 0).any()


def run_rows(name: str) -> np.ndarray:
    """A table before the first step, in row order."""
    none = dataclasses.replace(make(), batches=[])
    return run_oracle(none, np.float64).tables[name]["rows"]
