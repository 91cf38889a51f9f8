"""Batches and a small model that meet every kind of bag, for tests of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recjax.config.train import DenseAdagrad, Polynomial
from recjax.data.batch import Bags, Batch
from recjax.embedding.elements import Elements
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.train.step import StepOptions
from support.problems import Problem

STEPS, B, V = 5, 21, 31
# Data features by name: ids a bag (None: jagged) and whether they are weighted.
DATA = {"one": (1, False), "three": (3, True), "jagged": (None, False), "jagged_weighted": (None, True)}
SCHEDULE = Polynomial(warmup_steps=2, decay_start=3, decay_steps=4, end=0.1)
OPTIONS = StepOptions(clip_norm=0.8, schedule=SCHEDULE.factor)


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
            if isinstance(found, Elements):  # places count differently, so that their order matters
                seen = jnp.where(found.mask_L[:, None], jnp.tanh(found.rows_LxD + 1), 0)
                found = found.sum(seen / (1 + found.positions_L[:, None].astype(dense_BxK.dtype)))
            columns.append(found)
        return self.out(jnp.tanh(self.hidden(jnp.concatenate(columns, axis=1))))[:, 0]


def make_batch(step: int) -> Batch:
    """The last of the batches is short; ids are skewed, and the upper rows are never named."""
    rng = np.random.default_rng(step)
    size = B if step < STEPS - 1 else 13
    bags = {}
    for name, (bag, weighted) in DATA.items():
        lengths = rng.integers(0, 4, size).astype(np.int32)
        shape = (size, bag) if bag is not None else (int(lengths.sum()),)
        ids = (rng.random(shape) ** 2 * (V - 4)).astype(np.int64)
        bags[name] = Bags(
            ids, lengths if bag is None else None, rng.uniform(0.5, 1.5, shape).astype(np.float32) if weighted else None
        )
    labels, weights = (rng.random(size) < 0.4).astype(np.float32), rng.integers(0, 3, size).astype(np.float32)
    return Batch(rng.normal(size=(size, 2)).astype(np.float32), bags, labels, weights)


def problem_of(tables: tuple[TableSpec, ...], features: Mapping[str, tuple[str, str, Any]]) -> Problem:
    """Training of `Net` on these tables; a feature is given by its table, its data feature and its pooling."""
    specs = (
        FeatureSpec(name, table, DATA[source][0], pooling, DATA[source][1], source)
        for name, (table, source, pooling) in features.items()
    )
    batches, tx = [make_batch(step) for step in range(STEPS)], DenseAdagrad(0.1, l2=0.01, weight_decay=0.1).build()
    return Problem(batches, B, tables, tuple(specs), Net(), 2, tx, options=OPTIONS)
