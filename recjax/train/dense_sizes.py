"""Sizes of a config's dense part, from shapes alone; starts no device."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from recjax.config.run import RunConfig
from recjax.data.batch import Schema
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.planning.step_sizes import DenseSizes
from recjax.train.module import parameters
from recjax.train.table_specs import dims
from recjax.train.tasks import outputs_for, tasks_of

_DTYPES = {"bfloat16": "bf16", "float64": "f64"}


def dense_sizes(
    config: RunConfig, schema: Schema, tables: tuple[TableSpec, ...], features: tuple[FeatureSpec, ...]
) -> DenseSizes:
    """Returns the sizes of the dense part of a run.

    Every array of two dimensions counts as a layer that all samples pass, and of three as several.

    Raises:
      ConfigError: as the model's `build`.
    """
    columns = dims(tables, features)
    outputs = outputs_for(config.model, tasks_of(config, schema))
    build = functools.partial(
        config.model.build, len(schema.dense), columns, dtype=jnp.dtype(config.dense_dtype), seed=0, **outputs
    )
    params = parameters(nnx.eval_shape(build))
    leaves = jax.tree.leaves(params)
    values = sum(x.size for x in leaves)
    state = jax.tree.leaves(jax.eval_shape(config.train.optimizer.build().init, params))
    layers = tuple((int(x.shape[-2]), int(x.shape[-1])) for x in leaves if x.ndim > 1 for _ in range(_times(x.shape)))
    dot = getattr(config.model, "interaction", "") == "dot"
    pairs = (len(columns) + bool(schema.dense), max(columns.values())) if dot else None
    return DenseSizes(
        layers,
        values,
        round(sum(x.size for x in state) / max(1, values)),
        len(leaves),
        pairs,
        sum(columns.values()),
        _DTYPES.get(config.compute_dtype, "f32"),
        config.train.bucket_mib * 2**20,
        config.train.dense == "sharded",
        config.train.accumulate,
    )


def _times(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-2])
