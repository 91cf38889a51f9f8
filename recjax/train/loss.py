"""The loss of one device's samples, from dense parameters and fetched rows, and its gradients by both.

All of it runs inside `jax.shard_map` over BATCH_AXES and sees one device's block of `StepInputs`: b samples. Nothing
travels. U rows were fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from recjax.embedding.buffers import Tables
from recjax.embedding.pooled.lookup import Vectors
from recjax.embedding.routing.host import Routing
from recjax.embedding.sharded import LookedUp, ShardedEmbeddings
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

    def logits(self, params: Any, found: LookedUp, tables: Tables | None, inputs: StepInputs) -> jax.Array:
        """Logits [b] of one device's samples.

        Args:
          params: the module's parameters, whole.
          found: as `ShardedEmbeddings.fetch` brought it.
          tables: None, or this device's parts, from which bags may be summed where they hold all rows.
          inputs: of the same samples.
        """
        with jax.named_scope("pool"):
            pooled = self.embeddings.pool(found, tables, inputs.routing, inputs.labels_B.shape[0])
        with jax.named_scope("dense_forward"):
            return logits(nnx.merge(self.graphdef, params), inputs.dense_BxK, pooled)

    def loss(self, params: Any, found: LookedUp, tables: Tables, inputs: StepInputs) -> jax.Array:
        """The sum of w * log loss over one device's samples, []; arguments as for `logits`."""
        logits_b = self.logits(params, found, tables, inputs).astype(inputs.labels_B.dtype)
        with jax.named_scope("loss"):
            losses_b = optax.sigmoid_binary_cross_entropy(logits_b, inputs.labels_B)
            return jnp.sum(inputs.weights_B * losses_b)

    def loss_and_gradients(
        self, params: Any, found: LookedUp, tables: Tables, inputs: StepInputs
    ) -> tuple[jax.Array, Any, LookedUp]:
        """Returns `loss` and its gradients by `params` and `found`. The tables themselves never enter autodiff."""
        loss, vjp = jax.vjp(lambda params, found: self.loss(params, found, tables, inputs), params, found)
        with jax.named_scope("dense_backward"):
            return loss, *vjp(jnp.ones_like(loss))


def forward_backward(
    forward: Forward, params: Any, found: LookedUp, tables: Tables, inputs: StepInputs, parts: int = 1
) -> tuple[jax.Array, Any, LookedUp]:
    """Returns the sum of w * log loss over this device's samples, [], and its gradients by `params` and `found`.

    They are sums over this device's samples alone: nothing travels.

    Args:
      forward: the forward pass.
      params: whole dense parameters, which vary over the devices (see `Replicated.gather`).
      found: what was looked up for them.
      tables: this device's parts of the tables; read only.
      inputs: this device's samples.
      parts: equal parts in which it works on them, one after the other, to hold only one part's activations at a time.
    """
    if parts == 1:
        return forward.loss_and_gradients(params, found, tables, inputs)

    def of(inputs: StepInputs, vectors: Vectors) -> tuple[Any, Vectors]:
        of_part = LookedUp(found.rows, vectors)
        loss, own_grads, (row_grads, vector_grads) = forward.loss_and_gradients(params, of_part, tables, inputs)
        return (loss, own_grads, row_grads), vector_grads

    zeros = jax.tree.map(jnp.zeros_like, (inputs.labels_B[0], params, found.rows))
    (loss, own_grads, row_grads), vector_grads = _accumulate(of, zeros, inputs, found.vectors, parts)
    return loss, own_grads, LookedUp(row_grads, vector_grads)


def _accumulate(
    of: Callable[[StepInputs, Vectors], tuple[Any, Vectors]],
    zeros: Any,
    inputs: StepInputs,
    vectors: Vectors,
    parts: int,
) -> tuple[Any, Vectors]:
    """Goes over the samples in equal parts; each row is fetched once for all.

    Returns:
      the sums of loss and gradients `of` the parts; and the gradients of the vectors of all samples.
    """
    groups = inputs.routing.groups
    samples = (inputs.dense_BxK, inputs.labels_B, inputs.weights_B, inputs.routing.features, vectors)
    slices = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), samples)

    def add(sums: Any, part: Any) -> tuple[Any, Vectors]:
        dense_BxK, labels_B, weights_B, features, of_part = part
        found, grads = of(StepInputs(dense_BxK, labels_B, weights_B, Routing(groups, features)), of_part)
        return jax.tree.map(jnp.add, sums, found), grads

    sums, grads = jax.lax.scan(add, zeros, slices)
    return sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads)


def gradient_order(
    forward: Forward, dense: Dense, held: Any, found: LookedUp, tables: Tables, inputs: StepInputs, parts: int
) -> list[int]:
    """The dense parameters' leaves in the order in which `forward_backward` makes their gradients, for buckets.

    Args:
      forward: the forward pass.
      dense: how dense parameters are held.
      held: the parameters as a TrainState has them.
      found: what was looked up.
      tables: this device's parts of the tables.
      inputs: this device's samples.
      parts: in which it works on them.
    """
    like = dense.like(held)
    if not dense.bucket_bytes or parts > 1:  # parts give all their gradients at once, at the end
        return list(range(len(jax.tree.leaves(like))))
    return order_made(lambda params: forward.loss_and_gradients(params, found, tables, inputs)[1], like)
