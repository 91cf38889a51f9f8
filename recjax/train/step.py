"""The jitted steps: one that trains, by the loss and its gradients, one that predicts; both by one forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.embedding.all_rows import AllRows
from recjax.embedding.buffers import Tables
from recjax.embedding.group import Group
from recjax.embedding.layout import BoundPlan
from recjax.embedding.residuals import LookedUp, UpdateContext, Vectors
from recjax.embedding.routing.routed import Routing
from recjax.embedding.sharded import ALL_ROWS, ShardedEmbeddings
from recjax.models import stateful
from recjax.models.batch_losses import AllItems, BatchLoss, make_pairs
from recjax.models.stateful import Samples, Step
from recjax.parallel.mesh import BATCH_AXES, largest_anywhere
from recjax.train import late as late_sums
from recjax.train.dense import REPLICATED, Dense, order_made
from recjax.train.gradients import (
    after,
    agree_on_step,
    clip_by_global_norm,
    count_by_name,
    count_in_dense,
    count_in_tables,
    mean_over_batch,
    sum_over_batch,
)
from recjax.train.module import ModuleDef, both_vectors, item_vectors, kept_state, outputs
from recjax.train.routers import PackedBatches, StepInputs
from recjax.train.state import TrainState
from recjax.train.tasks import Tasks, divided_weights, loss_sums, total


@dataclasses.dataclass(frozen=True)
class Forward:
    """The differentiated part of a step, from dense parameters and fetched rows to outputs and loss.

    Attributes:
      module: the dense module.
      embeddings: the tables that rows were fetched from.
      tasks: see `recjax.train.tasks`; () for one binary label and one logit.
      per_sample: whether the module asks which samples it sees (see `recjax.models.stateful`), as what drops values at
        random or has statistics of the batch does.
      batch_loss: of a module of two sides, which takes the place of the log loss; None: there is none.
    """

    module: ModuleDef
    embeddings: ShardedEmbeddings
    tasks: Tasks = ()
    per_sample: bool = False
    batch_loss: BatchLoss | None = None

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

    def vectors(self, params: Any, others: Any, looked_up: LookedUp, tables: Tables | None, inputs: StepInputs) -> Any:
        """Vectors of one device's users and items, [b, E] each, of a model of two sides; arguments as for `outputs`."""
        return self._run(params, others, looked_up, tables, inputs, vectors=True)[0][:2]

    def _run(
        self,
        params: Any,
        kept: Any,
        looked_up: LookedUp,
        tables: Tables | None,
        inputs: StepInputs,
        vectors: bool = False,
    ) -> tuple[Any, Any]:
        """`outputs`, or the vectors of both sides, and the module's other state after it."""
        with jax.named_scope("pool"):
            pooled = self.embeddings.pool(looked_up, tables, inputs.routing, inputs.dense_BxK.shape[0])
        with jax.named_scope("dense_forward"):
            model = self.module.merge(params, kept)
            if vectors:
                return both_vectors(model, inputs.dense_BxK, pooled), kept_state(model)
            found = outputs(model, inputs.dense_BxK, pooled, self.tasks, inputs.labels_B.shape[0])
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
        with stateful.seeing(samples):
            found, kept = self._run(params, kept, looked_up, tables, inputs, self.batch_loss is not None)
        if self.batch_loss is not None:
            all_items = None
            if (all_rows := self.embeddings.all_rows) is not None:
                vectors = functools.partial(item_vectors, self.module.merge(params, kept))
                all_items = AllItems(looked_up.vectors[ALL_ROWS], all_rows.share()[1], vectors)
            with jax.named_scope("loss"):
                pairs = make_pairs(found, inputs.weights_B, inputs.items, all_items)
                return self.batch_loss.sum_losses(pairs), ((), kept)
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
    step: stateful.Step | None = None,
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
        lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), (samples, stateful.sample_arrays(which))
    )

    def add(sums: Any, part: Any) -> tuple[Any, Vectors]:
        (dense_BxK, labels_B, weights_B, features, of_part), of_which = part
        inputs = StepInputs(dense_BxK, labels_B, weights_B, Routing(groups, features))
        found, grads = of(inputs, stateful.with_sample_arrays(which, of_which), of_part)
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
    step: stateful.Step | None = None,
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


Metrics = dict[str, Any]  # arrays, and of "needs" one by each name


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
      seed: of stochastic rounding and of dropout; see `recjax.embedding.quantize` and `recjax.models.stateful`.
      per_sample: whether the module asks which samples it sees: see `Forward`.
      late: whether the dense part takes the gradients of the step before: see `recjax.train.late`.
      frozen: whether the dense part, with the module's other state, stays as it is to the last bit.
      batch_loss: see `Forward`. Its samples are those with label 1 alone.
      all_rows: the table of the items, for a loss over all of them; None: there is no such loss.
      counts: whether a step also counts values that are not finite by name, for `recjax.train.gradients.explain`; else
        it only finds that there are some.
      tx_of: makes the dense optimizer of a learning rate, []; None: it is as it is, whatever `TrainState.rates` says.
    """

    clip_norm: float = 0.0
    accumulate: int = 1
    schedule: Callable[[jax.Array], Any] = lambda step: 1.0
    seed: int = 0
    per_sample: bool = False
    late: bool = False
    frozen: bool = False
    batch_loss: BatchLoss | None = None
    all_rows: AllRows | None = None
    counts: bool = False
    tx_of: Callable[[Any], optax.GradientTransformation] | None = None


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
    """Returns the jitted training step, or K steps in one program. It donates the state and works on tables in place.

    Collectives: those that the shardings list (embedding/exchange/), one all-reduce of (dense gradients, sum of w*l,
    sum of w) in dense_grads, and, where tables are sharded, one of a few integers in finite_check, by which all devices
    agree on whether the step counts; and, to clip, one of a single float in clip (both within each replica group, if
    all groups hold the same). `dense` may ask for an all-reduce of each bucket of gradients instead of the one; or for
    all-gathers of parameters in dense_gather and reduce-scatters of gradients in dense_grads, with an all-reduce of the
    two sums: see `dense.py`. Where an optimizer asks for means over rows that are split by columns, those of
    `row_statistic.py`. For tasks one all-reduce more of the sums of their weights, and one of their losses; and those
    of the module's own layers (`stateful.py`). Where the dense part takes its gradients late, the sums of w*l and of w
    travel on their own in dense_grads.

    Of `PackedBatches` it takes K steps, one after the other, whose metrics have a leading axis K unless K is 1. Where
    the devices route there, by sizes that may not hold a batch, what it needs goes with the integers of finite_check; a
    batch that does not fit changes nothing, "ok" is false from it on as after a step that is not finite, and who reads
    the metrics takes these steps again.

    Returns:
      step(state, inputs) -> (state, metrics), of `StepInputs` or `PackedBatches`; metrics are replicated scalars:
      "loss", the weighted mean log loss of exactly this step (of tasks: see `recjax.train.tasks`); "losses", of tasks,
      the mean of each, [T], NaN where nothing has weight; "weight", the sum of its samples' weights, without which the
      step changes nothing and its loss is NaN; "ok", false if one with weight was not finite and changed nothing. With
      `StepOptions.counts` also "bad_loss", "bad_dense", "bad_tables" and, to clip, "bad_norm", the numbers of
      non-finite values that made it so; "bad_opt" and "bad_slots" those of the state of the dense optimizer and, int32
      [groups that have them], of table groups' slots (`slotted`) that the step would have made infinite or NaN; their
      sums are further all-reduces in finite_check.
    """
    embeddings = ShardedEmbeddings(bound, options.all_rows)
    forward = Forward(model, embeddings, tasks, options.per_sample, options.batch_loss)
    replica_groups = bound.replicas if bound.independent else 1  # which step by their own parts: replica_groups.py

    def train_step(
        state: TrainState,
        inputs: StepInputs,
        needs: Mapping[str, jax.Array] = MappingProxyType({}),
        batches: PackedBatches | None = None,
    ) -> tuple[TrainState, Metrics]:
        looked_up, residuals = embeddings.fetch(state.tables, inputs.routing, len(inputs.dense_BxK))
        if tasks:
            weights, totals_T = divided_weights(inputs.weights_B.reshape(len(inputs.weights_B), -1))
            inputs = dataclasses.replace(inputs, weights_B=weights)
        if options.batch_loss is not None:
            inputs = dataclasses.replace(inputs, weights_B=inputs.weights_B * inputs.labels_B)
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
        if options.frozen:  # they count neither to clip nor as non-finite ones
            grads = jax.tree.map(jnp.zeros_like, grads)
        sparse_grads = embeddings.send_gradients(residuals, inputs.routing, found_grads)  # sums over the batch
        bad_loss = (~jnp.isfinite(loss)).astype(jnp.int32)
        grads, scale, bad_norm = clip_by_global_norm(
            options.clip_norm, dense, grads, embeddings, sparse_grads, inverse, loss, state.homes
        )
        scale = scale * replica_groups if replica_groups > 1 else scale

        # Everything that an update writes is made before the devices agree that it may be written.
        rate = jnp.asarray(options.schedule(state.step), loss.dtype)
        rates: Any = () if isinstance(state.rates, dict) else state.rates
        dense_tx = options.tx_of(rates[0]) if len(rates) and options.tx_of else tx
        new_params, new_opt = _dense_update(dense_tx, state, grads, rate)
        in_dense = count_in_dense(grads, state.opt, new_opt)
        not_sent = late_sums.not_finite(own_grads) if options.late else jnp.int32(0)
        late_scale = after(in_dense[0], scale, loss)
        learning_rates = {group.name: lr for group, lr in zip(rated(bound), rates[1:], strict=bool(len(rates)))}
        context = UpdateContext(scale, late_scale, state.step, rate, options.seed, state.homes, learning_rates)
        proposed = embeddings.propose(state.tables, state.slots, inputs.routing, residuals, sparse_grads, context)
        in_tables = count_in_tables(sparse_grads, scale, proposed)

        fine, needs = agree_on_step([bad_loss, *bad_norm.values(), in_dense, not_sent, *in_tables.values()], needs)
        empty = weight == 0  # such a batch has no loss, and its step changes nothing
        ok = state.ok & (empty | fine)
        routed: Any = {"fits": batches.fit(needs, bound), "needs": needs} if batches and needs else {}
        ok = ok & routed.get("fits", True)
        changes = ok & ~empty
        tables, slots = embeddings.write(state.tables, state.slots, proposed, changes)
        was = (state.dense, state.opt, state.module, state.late)
        params, opt, module, kept = _keep_if(changes, (new_params, new_opt, module, kept), was)
        if options.frozen:  # not by an update of 0, to which -0.0 would be 0.0
            params, module = state.dense, state.module
        changed: Any = {"dense": params, "opt": opt, "tables": tables, "slots": slots, "module": module, "late": kept}
        new = dataclasses.replace(state, step=state.step + ok.astype(jnp.int32), ok=ok, **changed)
        of_tasks = {"losses": losses} if tasks else {}
        counts: Any = {}
        if options.counts:
            counts = {"bad_loss": bad_loss, **bad_norm, **count_by_name(embeddings, dense, in_dense, in_tables)}
            counts["bad_dense"] += jax.lax.psum(not_sent, BATCH_AXES) if options.late else 0
        return new, {"loss": loss, **of_tasks, "weight": weight, "ok": ok, **routed, **counts}

    specs = state_specs(bound, dense, options.late)

    def mapped(step: Callable[..., tuple[TrainState, Metrics]], *further: P) -> Any:
        return jax.shard_map(step, mesh=mesh, in_specs=(specs, P(BATCH_AXES), *further), out_specs=(specs, P()))

    def train_steps(state: TrainState, inputs: StepInputs | PackedBatches) -> tuple[TrainState, Metrics]:
        if isinstance(inputs, StepInputs):
            return mapped(train_step)(state, inputs)

        def packed_step(state: TrainState, words_NxE: jax.Array, rows: jax.Array | None) -> tuple[TrainState, Metrics]:
            batch, needs = inputs.inputs(words_NxE[0], rows, bound)
            return train_step(state, batch, needs, inputs)

        def step(state: TrainState, words_NxE: jax.Array) -> tuple[TrainState, Metrics]:
            return mapped(packed_step, P())(state, words_NxE, inputs.rows_RxW)

        words_KxNxE = inputs.words_KxNxE
        return step(state, words_KxNxE[0]) if len(words_KxNxE) == 1 else jax.lax.scan(step, state, words_KxNxE)

    train_steps.__name__ = train_step.__name__  # what a profile calls the program
    return jax.jit(train_steps, donate_argnums=0, compiler_options=compiler_options)


def make_predict(
    model: ModuleDef,
    bound: BoundPlan,
    mesh: Mesh,
    dense: Dense = REPLICATED,
    tasks: Tasks = (),
    late: bool = False,
    compiler_options: dict[str, Any] | None = None,
    vectors: bool = False,
) -> jax.stages.Wrapped:
    """Returns the jitted forward pass: predict(state, inputs) -> logits [N * b], split over the mesh.

    For tasks it gives the outputs of all: [N * b, O]; with `vectors`, of a model of two sides, the vectors of users and
    of items, [N * b, E] each. Of `PackedBatches`, of one batch, it gives beside them the sizes that the batch needs, by
    name: where these are more than `inputs.sizes`, the logits are wrong.

    It takes the state of a training step whose `StepOptions.late` is `late`.

    Independent replica groups predict with the mean of their tables, row by row as these are looked up.
    """
    embeddings = ShardedEmbeddings(bound)
    forward = Forward(model, embeddings, tasks)

    def predict(state: TrainState, inputs: StepInputs) -> Any:
        looked_up, _ = embeddings.fetch(state.tables, inputs.routing, len(inputs.dense_BxK), mean=True)
        params = dense.gather(state.dense, range(len(jax.tree.leaves(state.dense))))
        tables = None if bound.independent else state.tables
        give = forward.vectors if vectors else forward.outputs
        return give(params, state.module, looked_up, tables, inputs)

    specs = (state_specs(bound, dense, late), P(BATCH_AXES))

    def predict_packed(state: TrainState, inputs: StepInputs | PackedBatches) -> Any:
        if isinstance(inputs, StepInputs):
            return jax.shard_map(predict, mesh=mesh, in_specs=specs, out_specs=P(BATCH_AXES))(state, inputs)

        def predict_batch(state: TrainState, words_NxE: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            batch, needs = inputs.inputs(words_NxE[0], None, bound)
            return predict(state, batch), largest_anywhere(needs)

        mapped = jax.shard_map(predict_batch, mesh=mesh, in_specs=specs, out_specs=(P(BATCH_AXES), P()))
        return mapped(state, inputs.words_KxNxE[0])

    predict_packed.__name__ = predict.__name__
    return jax.jit(predict_packed, compiler_options=compiler_options)


def state_specs(bound: BoundPlan, dense: Dense = REPLICATED, late: bool = False) -> Any:
    """Returns the PartitionSpecs of a TrainState: tables split as their groups say, the dense part as `dense` says.

    `late` is that of the step's options.
    """
    embeddings: Any = ShardedEmbeddings(bound)
    specs = embeddings.partition_specs()
    homes: Any = {group.name: specs[group.name] for group in bound.cached}
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
        rates=P(),
    )


def rated(bound: BoundPlan) -> list[Group]:
    """The groups whose optimizer has a learning rate, in the order of `TrainState.rates`."""
    return [group for group in bound.groups if hasattr(group.optimizer, "learning_rate")]


def _dense_update(tx: optax.GradientTransformation, state: TrainState, grads: Any, rate: jax.Array) -> tuple[Any, Any]:
    """The dense parameters and their optimizer's state after an update, as a device holds them."""
    with jax.named_scope("dense_update"):
        updates, opt = tx.update(grads, state.opt, state.dense)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return optax.apply_updates(state.dense, updates), opt


def _keep_if(ok: jax.Array, new: Any, old: Any) -> Any:
    with jax.named_scope("dense_update"):
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, old)
