"""Gradients over the whole batch: their means, and the one factor that clips them all.

Inside `jax.shard_map` over BATCH_AXES, on one device's block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from recjax.embedding.address import Homes
from recjax.embedding.residuals import Gradients
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.parallel.mesh import BATCH_AXES
from recjax.train.dense import Dense


def mean_over_batch(
    dense: Dense, grads: Any, loss: jax.Array, weights_b: jax.Array, order: list[int]
) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the dense gradients and the loss as weighted means over the global batch, and the sum of its weights.

    Args:
      dense: how dense parameters are held; its `reduce` sums over the devices.
      grads: gradients of this device's samples.
      loss: sum of w * log loss of these.
      weights_b: their weights.
      order: of the leaves, as `gradient_order` gives it.
    """
    with jax.named_scope("dense_grads"):
        grads, loss, weight = dense.reduce(grads, loss, jnp.sum(weights_b), order)
        return jax.tree.map(lambda g: g / weight, grads), loss / weight, weight


def sum_over_batch(
    dense: Dense, grads: Any, loss: jax.Array, sums_T: jax.Array, totals_T: jax.Array, order: list[int]
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The same for tasks, whose weights are divided already: gradients, loss, mean loss of each task and total weight.

    Args:
      dense: as for `mean_over_batch`.
      grads: likewise.
      loss: of this device's samples.
      sums_T: that of each task.
      totals_T: sums of the weights over the global batch. A batch without any weight has no loss: NaN.
      order: as for `mean_over_batch`.
    """
    with jax.named_scope("dense_grads"):
        grads, loss, _ = dense.reduce(grads, loss, loss * 0, order)
        losses_T = jax.lax.psum(sums_T, BATCH_AXES)
        nan = jnp.full((), jnp.nan, loss.dtype)
        weight = jnp.sum(totals_T)
        return grads, jnp.where(weight > 0, loss, nan), jnp.where(totals_T > 0, losses_T, nan), weight


def clip_by_global_norm(
    norm: float,
    dense: Dense,
    dense_grads: Any,
    embeddings: ShardedEmbeddings,
    sparse_grads: Gradients,
    scale: jax.Array,
    loss: jax.Array,
    homes: Homes,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Scales all gradients down to a largest norm of them together, each distinct row counted once.

    Args:
      norm: the largest; 0 leaves all as they are.
      dense: how dense parameters are held.
      dense_grads: means over the batch.
      embeddings: the tables.
      sparse_grads: their gradients, summed over the batch; independent replica groups have rows of their own.
      scale: [], what turns those into means.
      loss: [], the mean over the batch. The sum of squares starts from 0 times it, which ties the norm to the
        all-reduce that the loss came with.
      homes: of the slots of mapped groups.

    Returns:
      dense gradients, clipped; `scale` times the factor of clipping; and {"bad_norm": int32 [], whether the norm is
      not finite: squares of finite gradients may overflow}, {} if nothing is clipped.
    """
    if not norm:
        return dense_grads, scale, {}
    with jax.named_scope("clip"):
        of_dense = dense.total(sum((_squares(g) for g in jax.tree.leaves(dense_grads)), loss * 0))
        of_tables = embeddings.squares(sparse_grads, scale, homes)
        squares = embeddings.total(of_tables, of_dense)
        factor = jnp.minimum(1, norm / jnp.sqrt(squares))
        factor = jnp.where(squares > 0, factor, 1)
        dense_grads = jax.tree.map(lambda g: g * factor, dense_grads)
    return dense_grads, scale * factor, {"bad_norm": (~jnp.isfinite(squares)).astype(jnp.int32)}


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))
