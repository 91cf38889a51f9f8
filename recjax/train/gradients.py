"""Gradients of one step: of the dense parameters and of the fetched rows, and the factor that clips them all.

All of it runs inside `jax.shard_map` over BATCH_AXES and sees one device's block. Shape suffixes: b samples of a
device, U rows that it fetched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from recjax.embedding.collection import Tables
from recjax.embedding.routing.host import Routing
from recjax.embedding.sharded import Gradients, Rows, ShardedEmbeddings
from recjax.train.dense import Dense, order_made
from recjax.train.module import logits
from recjax.train.step_inputs import StepInputs


@dataclasses.dataclass(frozen=True)
class Forward:
    """The differentiated part of a step, from dense parameters and fetched rows to logits and loss.

    Attributes:
      graphdef: of the dense module.
      embeddings: the tables that rows were fetched from.
    """

    graphdef: Any
    embeddings: ShardedEmbeddings

    def logits(self, params: Any, rows: Rows, tables: Tables | None, inputs: StepInputs) -> jax.Array:
        """Logits [b] of one device's samples.

        Args:
          params: the module's parameters, whole.
          rows: as `ShardedEmbeddings.fetch` brought them.
          tables: None, or this device's parts, from which bags may be summed where they hold all rows.
          inputs: of the same samples.
        """
        with jax.named_scope("pool"):
            pooled = self.embeddings.pool(rows, tables, inputs.routing, inputs.labels_B.shape[0])
        with jax.named_scope("dense_forward"):
            return logits(nnx.merge(self.graphdef, params), inputs.dense_BxK, pooled)

    def loss(self, params: Any, rows: Rows, tables: Tables, inputs: StepInputs) -> jax.Array:
        """The sum of w * log loss over one device's samples, []; arguments as for `logits`."""
        logits_b = self.logits(params, rows, tables, inputs).astype(inputs.labels_B.dtype)
        with jax.named_scope("loss"):
            losses_b = optax.sigmoid_binary_cross_entropy(logits_b, inputs.labels_B)
            return jnp.sum(inputs.weights_B * losses_b)

    def backward(self, params: Any, rows: Rows, tables: Tables, inputs: StepInputs) -> tuple[jax.Array, Any, Rows]:
        """Returns `loss` and its gradients by `params` and `rows`. The tables themselves never enter autodiff."""
        loss, vjp = jax.vjp(lambda params, rows: self.loss(params, rows, tables, inputs), params, rows)
        with jax.named_scope("dense_backward"):
            return loss, *vjp(jnp.ones_like(loss))


def forward_backward(
    forward: Forward, params: Any, rows: Rows, tables: Tables, inputs: StepInputs, parts: int = 1
) -> tuple[jax.Array, Any, Rows]:
    """Returns the sum of w * log loss over this device's samples, [], and its gradients by `params` and `rows`.

    They are sums over this device's samples alone: nothing travels.

    Args:
      forward: the forward pass.
      params: whole dense parameters, which vary over the devices (see `Replicated.gather`).
      rows: fetched rows, group name -> [U, D].
      tables: this device's parts of the tables; read only.
      inputs: this device's samples.
      parts: equal parts in which it works on them, one after the other, to hold only one part's activations at a time.
    """
    if parts == 1:
        return forward.backward(params, rows, tables, inputs)
    zeros = jax.tree.map(jnp.zeros_like, (inputs.labels_B[0], params, rows))
    return _accumulate(functools.partial(forward.backward, params, rows, tables), zeros, inputs, parts)


def _accumulate(gradients: Callable[[StepInputs], Any], zeros: Any, inputs: StepInputs, parts: int) -> Any:
    """The sum of `gradients` over `parts` equal parts. The routing's groups stay whole: each row is fetched once."""
    groups = inputs.routing.groups
    samples = (inputs.dense_BxK, inputs.labels_B, inputs.weights_B, inputs.routing.features)
    slices = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), samples)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        dense_BxK, labels_B, weights_B, features = part
        of_part = gradients(StepInputs(dense_BxK, labels_B, weights_B, Routing(groups, features)))
        return jax.tree.map(jnp.add, sums, of_part), None

    return jax.lax.scan(add, zeros, slices)[0]


def gradient_order(
    forward: Forward, dense: Dense, held: Any, rows: Rows, tables: Tables, inputs: StepInputs, parts: int
) -> list[int]:
    """The dense parameters' leaves in the order in which `forward_backward` makes their gradients, for buckets.

    Args:
      forward: the forward pass.
      dense: how dense parameters are held.
      held: the parameters as a TrainState has them.
      rows: fetched rows.
      tables: this device's parts of the tables.
      inputs: this device's samples.
      parts: in which it works on them.
    """
    like = dense.like(held)
    if not dense.bucket_bytes or parts > 1:  # parts give all their gradients at once, at the end
        return list(range(len(jax.tree.leaves(like))))
    return order_made(lambda params: forward.backward(params, rows, tables, inputs)[1], like)


def mean_over_batch(
    dense: Dense, grads: Any, loss: jax.Array, weights_B: jax.Array, order: list[int]
) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the dense gradients and the loss as weighted means over the global batch, and the sum of its weights.

    Args:
      dense: how dense parameters are held; its `reduce` sums over the devices.
      grads: gradients of this device's samples.
      loss: sum of w * log loss of these.
      weights_B: their weights.
      order: of the leaves, as `gradient_order` gives it.
    """
    with jax.named_scope("dense_grads"):
        grads, loss, weight = dense.reduce(grads, loss, jnp.sum(weights_B), order)
        return jax.tree.map(lambda g: g / weight, grads), loss / weight, weight


def clip_by_global_norm(
    norm: float,
    dense: Dense,
    dense_grads: Any,
    embeddings: ShardedEmbeddings,
    sparse_grads: Gradients,
    scale: jax.Array,
    loss: jax.Array,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Scales all gradients down to a largest norm of them together, each distinct row counted once.

    Args:
      norm: the largest; 0 leaves all as they are.
      dense: how dense parameters are held.
      dense_grads: means over the batch.
      embeddings: the tables.
      sparse_grads: their gradients, summed over the batch; independent replica groups have rows of their own.
      scale: [], what turns those into means.
      loss: [], the mean over the batch; the sum of the dense part's squares starts from 0 times it.

    Returns:
      dense gradients, clipped; `scale` times the factor of clipping; and {"bad_norm": int32 [], whether the norm is
      not finite: squares of finite gradients may overflow}, {} if nothing is clipped.
    """
    if not norm:
        return dense_grads, scale, {}
    with jax.named_scope("clip"):
        of_dense = dense.total(sum((_squares(g) for g in jax.tree.leaves(dense_grads)), loss * 0))
        of_tables = {name: _squares(grads.sums * scale) for name, grads in sparse_grads.items()}
        squares = embeddings.total(of_tables, of_dense)
        factor = jnp.minimum(1, norm / jnp.sqrt(squares))
        factor = jnp.where(squares > 0, factor, 1)
        dense_grads = jax.tree.map(lambda g: g * factor, dense_grads)
    return dense_grads, scale * factor, {"bad_norm": (~jnp.isfinite(squares)).astype(jnp.int32)}


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))
