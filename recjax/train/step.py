"""The jitted steps: one that trains, one that predicts. Both run the same forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.layout import BoundPlan
from recjax.embedding.residuals import UpdateContext
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.models.in_step import Step
from recjax.parallel.mesh import BATCH_AXES
from recjax.train import late as late_sums
from recjax.train.dense import REPLICATED, Dense
from recjax.train.gradients import (
    after,
    bad_in_dense,
    bad_in_tables,
    clip_by_global_norm,
    mean_over_batch,
    sum_over_batch,
)
from recjax.train.loss import Forward, forward_backward, gradient_order
from recjax.train.module import ModuleDef
from recjax.train.state import TrainState
from recjax.train.step_inputs import StepInputs
from recjax.train.tasks import Tasks, divided_weights

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of the training step.

    Attributes:
      clip_norm: largest norm of the gradient of the mean loss, over all dense parameters and all coalesced rows
        together, each distinct row counted once (independent replica groups each have rows of their own); a larger one
        is scaled down to it, before row gradients of independent groups are multiplied with the number of groups. 0
        leaves all as they are.
      accumulate: parts in which each device works on its samples, one after the other, to hold fewer
        activations. The numbers are those of the whole batch. Batches must be routed with equal `parts`.
      schedule: factor of all learning rates, from the steps done before (int32).
      seed: of stochastic rounding and of dropout; see `low_precision.py` and `recjax.models.stateful`.
      per_sample: whether the module asks which samples it sees: see `Forward`.
      late: whether the dense part takes the gradients of the step before: see `recjax.train.late`.
    """

    clip_norm: float = 0.0
    accumulate: int = 1
    schedule: Callable[[jax.Array], Any] = lambda step: 1.0
    seed: int = 0
    per_sample: bool = False
    late: bool = False


PLAIN = StepOptions()


def make_train_step(
    model: ModuleDef,
    bound: BoundPlan,
    mesh: Mesh,
    tx: optax.GradientTransformation,
    options: StepOptions = PLAIN,
    dense: Dense = REPLICATED,
    tasks: Tasks = (),
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Wrapped:
    """Returns the jitted training step. It donates the state and works on the tables in place.

    Collectives: those that the shardings list (embedding/sharding/), one all-reduce of (dense gradients, sum of w*l,
    sum of w) in dense_grads, and, where tables are sharded, one of a few integers in finite_check, by which all devices
    agree on whether the step counts (one, and one for each table group whose optimizer keeps slots); and, to clip, one
    of a single float in clip (both within each replica group, if all groups hold the same). `dense` may ask for an
    all-reduce of each bucket of gradients instead of the one; or for all-gathers of parameters in dense_gather and
    reduce-scatters of gradients in dense_grads, with an all-reduce of the two sums: see `dense.py`. Where an optimizer
    asks for means over rows that are split by columns, those of `row_statistic.py`. For tasks one all-reduce more of
    the sums of their weights, and one of their losses; and those of the module's own layers (`stateful.py`). Where the
    dense part takes its gradients late, the sums of w*l and of w travel on their own in dense_grads, and the number of
    new gradients that are not finite in finite_check.

    Returns:
      step(state, inputs) -> (state, metrics); metrics are replicated scalars: "loss", the weighted
      mean log loss of exactly this step (of tasks: see `recjax.train.tasks`); "losses", of tasks, the mean of each,
      [T], NaN where nothing has weight; "weight", the sum of its samples' weights; "ok", false if it was not finite and
      changed nothing; and "bad_loss", "bad_dense", "bad_tables" and, to clip, "bad_norm", the numbers of
      non-finite values that made it so; "bad_opt" and "bad_slots" those of the state of the dense optimizer and, int32
      [groups that have them], of table groups' slots (`slotted`) that the step would have made infinite or NaN.
    """
    embeddings = ShardedEmbeddings(bound)
    forward = Forward(model, embeddings, tasks, options.per_sample)
    replica_groups = bound.replicas if bound.independent else 1  # which step by their own parts: replica_groups.py

    def train_step(state: TrainState, inputs: StepInputs) -> tuple[TrainState, Metrics]:
        looked_up, residuals = embeddings.fetch(state.tables, inputs.routing, len(inputs.labels_B))
        if tasks:
            weights, totals_T = divided_weights(inputs.weights_B.reshape(len(inputs.weights_B), -1))
            inputs = dataclasses.replace(inputs, weights_B=weights)
        parts, number = options.accumulate, Step(options.seed, state.step)
        order = gradient_order(
            forward, dense, state.dense, looked_up, state.tables, inputs, parts, state.module, number
        )
        whole = dense.gather(state.dense, order)
        loss, own_grads, found_grads, (sums_T, module) = forward_backward(
            forward, whole, looked_up, state.tables, inputs, parts, state.module, number
        )

        kept: Any = {}
        if options.late:
            kept = late_sums.kept(own_grads, jnp.zeros_like(loss) if tasks else jnp.sum(inputs.weights_B))
            late_grads, loss = late_sums.means(dense, state.late, order, loss)
        how, sent = (REPLICATED, ()) if options.late else (dense, own_grads)  # the loss is never late
        if tasks:
            grads, loss, losses, weight = sum_over_batch(how, sent, loss, sums_T, totals_T, order)
            inverse = jnp.ones_like(weight)
        else:
            grads, loss, weight = mean_over_batch(how, sent, loss, inputs.weights_B, order)
            inverse = 1 / weight
        grads = late_grads if options.late else grads
        sparse_grads = embeddings.send_gradients(residuals, inputs.routing, found_grads)  # sums over the batch
        bad = {"bad_loss": (~jnp.isfinite(loss)).astype(jnp.int32)}
        grads, scale, bad_norm = clip_by_global_norm(
            options.clip_norm, dense, grads, embeddings, sparse_grads, inverse, loss, state.homes
        )
        scale = scale * replica_groups if replica_groups > 1 else scale

        # Everything that an update writes is made before the devices agree that it may be written.
        rate = jnp.asarray(options.schedule(state.step), loss.dtype)
        new_params, new_opt = _dense_update(tx, state, grads, rate)
        bad_dense = bad_in_dense(dense, grads, state.opt, new_opt)
        if options.late:
            bad_dense["bad_dense"] += late_sums.not_finite(own_grads)
        late_scale = after(bad_dense["bad_dense"], scale, loss)
        context = UpdateContext(scale, late_scale, state.step, rate, options.seed, state.homes)
        proposed = embeddings.propose(state.tables, state.slots, inputs.routing, residuals, sparse_grads, context)
        bad |= bad_norm | bad_dense | bad_in_tables(embeddings, sparse_grads, scale, proposed)

        ok = state.ok & (sum(jnp.sum(count) for count in bad.values()) == 0)
        tables, slots = embeddings.write(state.tables, state.slots, sparse_grads, context, proposed, ok)
        was = (state.dense, state.opt, state.module, state.late)
        params, opt, module, kept = _keep_if(ok, (new_params, new_opt, module, kept), was)
        new = TrainState(state.step + ok.astype(jnp.int32), ok, params, opt, tables, slots, state.homes, module, kept)
        of_tasks = {"losses": losses} if tasks else {}
        return new, {"loss": loss, **of_tasks, "weight": weight, "ok": ok, **bad}

    specs = state_specs(bound, dense, options.late)
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P(BATCH_AXES)), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0, compiler_options=compiler_options)


def make_predict(
    model: ModuleDef,
    bound: BoundPlan,
    mesh: Mesh,
    dense: Dense = REPLICATED,
    tasks: Tasks = (),
    late: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Wrapped:
    """Returns the jitted forward pass: predict(state, inputs) -> logits [N * b], split over the mesh.

    For tasks it gives the outputs of all: [N * b, O].

    It takes the state of a training step whose `StepOptions.late` is `late`.

    Independent replica groups predict with the mean of their tables, row by row as these are looked up.
    """
    embeddings = ShardedEmbeddings(bound)
    forward = Forward(model, embeddings, tasks)

    def predict(state: TrainState, inputs: StepInputs) -> jax.Array:
        looked_up, _ = embeddings.fetch(state.tables, inputs.routing, len(inputs.labels_B), mean=True)
        params = dense.gather(state.dense, range(len(jax.tree.leaves(state.dense))))
        tables = None if bound.independent else state.tables
        return forward.outputs(params, state.module, looked_up, tables, inputs)

    specs = (state_specs(bound, dense, late), P(BATCH_AXES))
    mapped = jax.shard_map(predict, mesh=mesh, in_specs=specs, out_specs=P(BATCH_AXES))
    return jax.jit(mapped, compiler_options=compiler_options)


def state_specs(bound: BoundPlan, dense: Dense = REPLICATED, late: bool = False) -> Any:
    """Returns the PartitionSpecs of a TrainState: tables split as their groups say, the dense part as `dense` says.

    `late` is that of the step's options.
    """
    embeddings: Any = ShardedEmbeddings(bound)
    specs = embeddings.partition_specs()
    homes: Any = {group.name: specs[group.name] for group in bound.groups if group.mapped}
    sums: Any = P(BATCH_AXES) if late else {}
    dense_specs, opt_specs = dense.specs()
    return TrainState(
        step=P(),
        ok=P(),
        dense=dense_specs,
        opt=opt_specs,
        tables=specs,
        slots=embeddings.slot_specs(),
        homes=homes,
        module=P(),
        late=sums,
    )


def _dense_update(tx: optax.GradientTransformation, state: TrainState, grads: Any, rate: jax.Array) -> tuple[Any, Any]:
    """The dense parameters and their optimizer's state after an update, as a device holds them."""
    with jax.named_scope("dense_update"):
        updates, opt = tx.update(grads, state.opt, state.dense)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return optax.apply_updates(state.dense, updates), opt


def _keep_if(ok: jax.Array, new: Any, old: Any) -> Any:
    with jax.named_scope("dense_update"):
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, old)
