"""The loss of one device's samples, from dense parameters and fetched rows, and its gradients by both.

All of it runs inside `jax.shard_map` over BATCH_AXES and sees one device's block of `StepInputs`: b samples. Nothing
travels, unless a layer of the module sums over the batch. U rows were fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from recjax.embedding.buffers import Tables
from recjax.embedding.residuals import LookedUp, Vectors
from recjax.embedding.routing.routed import Routing
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.models import in_step
from recjax.models.in_step import Samples
from recjax.train.dense import Dense, order_made
from recjax.train.module import ModuleDef, kept_state, outputs
from recjax.train.step_inputs import StepInputs
from recjax.train.tasks import Tasks, loss_sums, total


@dataclasses.dataclass(frozen=True)
class Forward:
    """The differentiated part of a step, from dense parameters and fetched rows to outputs and loss.

    Attributes:
      module: the dense module.
      embeddings: the tables that rows were fetched from.
      tasks: see `recjax.train.tasks`; () for one binary label and one logit.
      per_sample: whether the module asks which samples it sees (see `recjax.models.in_step`), as what drops values at
        random or has statistics of the batch does.
    """

    module: ModuleDef
    embeddings: ShardedEmbeddings
    tasks: Tasks = ()
    per_sample: bool = False

    def outputs(self, params: Any, kept: Any, looked_up: LookedUp, tables: Tables | None, inputs: StepInputs) -> Any:
        """Outputs of the model for one device's samples: logits [b], or [b, O] for tasks.

        Args:
          params: the module's parameters, whole.
          kept: its other state.
          looked_up: as `ShardedEmbeddings.fetch` brought it.
          tables: None, or this device's parts, from which bags may be summed where they hold all rows.
          inputs: of the same samples.
        """
        return self._run(params, kept, looked_up, tables, inputs)[0]

    def _run(
        self, params: Any, kept: Any, looked_up: LookedUp, tables: Tables | None, inputs: StepInputs
    ) -> tuple[Any, Any]:
        """`outputs`, and the module's other state after it."""
        with jax.named_scope("pool"):
            pooled = self.embeddings.pool(looked_up, tables, inputs.routing, inputs.labels_B.shape[0])
        with jax.named_scope("dense_forward"):
            model = self.module.merge(params, kept)
            found = outputs(model, inputs.dense_BxK, pooled, self.tasks)
            return found, kept_state(model)

    def loss(
        self, params: Any, kept: Any, looked_up: LookedUp, tables: Tables, inputs: StepInputs, samples: Samples | None
    ) -> tuple[jax.Array, Any]:
        """The loss of one device's samples, [], and what else is found.

        Args:
          params: as for `outputs`.
          kept: likewise.
          looked_up: likewise.
          tables: likewise.
          inputs: likewise; for tasks weights are divided: see `divided_weights`.
          samples: which ones these are, for a module that asks.

        Returns:
          The sum of w * loss, of tasks with their weights; the sums of each task, [T], () without tasks; and the
          module's other state after it.
        """
        with in_step.of(samples):
            found, kept = self._run(params, kept, looked_up, tables, inputs)
        found = found.astype(inputs.labels_B.dtype)
        with jax.named_scope("loss"):
            if not self.tasks:
                losses_b = optax.sigmoid_binary_cross_entropy(found, inputs.labels_B)
                return jnp.sum(inputs.weights_B * losses_b), ((), kept)
            labels, weights = (x.reshape(len(x), -1) for x in (inputs.labels_B, inputs.weights_B))
            sums_T = loss_sums(self.tasks, found.reshape(len(found), -1), labels, weights)
            return jnp.asarray(total(self.tasks, sums_T)), (sums_T, kept)

    def loss_and_gradients(
        self, params: Any, looked_up: LookedUp, kept: Any, tables: Tables, inputs: StepInputs, samples: Samples | None
    ) -> tuple[jax.Array, Any, LookedUp, Any]:
        """Returns `loss`, its gradients by `params` and `looked_up`, and what else it finds.

        The tables themselves never enter autodiff.
        """

        def of(params: Any, looked_up: LookedUp) -> tuple[jax.Array, Any]:
            return self.loss(params, kept, looked_up, tables, inputs, samples)

        loss, vjp, more = jax.vjp(of, params, looked_up, has_aux=True)
        with jax.named_scope("dense_backward"):
            return loss, *vjp(jnp.ones_like(loss)), more


def forward_backward(
    forward: Forward,
    params: Any,
    looked_up: LookedUp,
    tables: Tables,
    inputs: StepInputs,
    parts: int = 1,
    kept: Any = None,
    step: in_step.Step | None = None,
) -> tuple[jax.Array, Any, LookedUp, Any]:
    """Returns the loss of this device's samples, [], its gradients by `params` and `looked_up`, and what else it finds.

    They are sums over this device's samples alone: nothing travels but what the module itself sums over the batch.

    Args:
      forward: the forward pass.
      params: whole dense parameters, which vary over the devices (see `Replicated.gather`).
      looked_up: what was looked up for them.
      tables: this device's parts of the tables; read only.
      inputs: this device's samples.
      parts: equal parts in which it works on them, one after the other, to hold only one part's activations at a time.
      kept: the module's other state; None: it has none.
      step: which step this is, for a module that asks.

    Returns:
      The third last are (sums of each task, state of the module): see `Forward.loss`.
    """
    kept = {} if kept is None else kept
    samples = None if step is None or not forward.per_sample else step.samples(inputs.weights_B)
    if parts == 1:
        return forward.loss_and_gradients(params, looked_up, kept, tables, inputs, samples)

    def of(inputs: StepInputs, samples: Samples | None, vectors: Vectors) -> tuple[Any, Vectors]:
        of_part = LookedUp(looked_up.rows, vectors)
        loss, grads, of_part, (sums, _) = forward.loss_and_gradients(params, of_part, kept, tables, inputs, samples)
        return (loss, grads, of_part.rows, sums), of_part.vectors

    sums_T = jnp.zeros(len(forward.tasks), inputs.labels_B.dtype) if forward.tasks else ()
    zero = inputs.labels_B[(0,) * inputs.labels_B.ndim]
    zeros: Any = jax.tree.map(jnp.zeros_like, (zero, params, looked_up.rows))
    zeros = (*zeros, jax.tree.map(lambda x: x + zero * 0, sums_T))
    (loss, grads, rows, sums), vectors = _accumulate(of, zeros, inputs, samples, looked_up.vectors, parts)
    return loss, grads, LookedUp(rows, vectors), (sums, kept)


def _accumulate(
    of: Callable[..., tuple[Any, Vectors]],
    zeros: Any,
    inputs: StepInputs,
    which: Samples | None,
    vectors: Vectors,
    parts: int,
) -> tuple[Any, Vectors]:
    """Goes over the samples in equal parts; each row is fetched once for all.

    Returns:
      the sums of what is found `of` the parts; and the gradients of the vectors of all samples.
    """
    groups = inputs.routing.groups
    samples = (inputs.dense_BxK, inputs.labels_B, inputs.weights_B, inputs.routing.features, vectors)
    slices = jax.tree.map(
        lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), (samples, in_step.arrays(which))
    )

    def add(sums: Any, part: Any) -> tuple[Any, Vectors]:
        (dense_BxK, labels_B, weights_B, features, of_part), of_which = part
        inputs = StepInputs(dense_BxK, labels_B, weights_B, Routing(groups, features))
        found, grads = of(inputs, in_step.with_arrays(which, of_which), of_part)
        return jax.tree.map(jnp.add, sums, found), grads

    sums, grads = jax.lax.scan(add, zeros, slices)
    return sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads)


def gradient_order(
    forward: Forward,
    dense: Dense,
    held: Any,
    looked_up: LookedUp,
    tables: Tables,
    inputs: StepInputs,
    parts: int,
    kept: Any = None,
    step: in_step.Step | None = None,
) -> list[int]:
    """The dense parameters' leaves in the order in which `forward_backward` makes their gradients, for buckets.

    Args:
      forward: the forward pass.
      dense: how dense parameters are held.
      held: the parameters as a TrainState has them.
      looked_up: what was looked up.
      tables: this device's parts of the tables.
      inputs: this device's samples.
      parts: in which it works on them.
      kept: as for `forward_backward`.
      step: likewise.
    """
    like = dense.like(held)
    if not dense.bucket_bytes or parts > 1:  # parts give all their gradients at once, at the end
        return list(range(len(jax.tree.leaves(like))))
    return order_made(
        lambda params: forward_backward(forward, params, looked_up, tables, inputs, 1, kept, step)[1], like
    )
