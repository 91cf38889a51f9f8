"""The jitted steps: one that trains, one that predicts. Both run the same forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Batch
from recjax.embedding.collection import Tables
from recjax.embedding.layout import BoundPlan
from recjax.embedding.routing.host import Routing
from recjax.embedding.sharded import Rows, ShardedEmbeddings
from recjax.embedding.sharding.base import UpdateContext
from recjax.parallel.mesh import BATCH_AXES, Share, put_share
from recjax.train.dense import REPLICATED, Dense, order_made
from recjax.train.finite import slotted, spoilt
from recjax.train.module import logits
from recjax.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What a training step does beside the plain update.

    Attributes:
      clip_norm: largest norm of the gradient of the mean loss, over all dense parameters and all coalesced rows
        together, each distinct row counted once (independent replica groups each have rows of their own); a larger one
        is scaled down to it. 0 leaves all as they are.
      accumulate: parts in which each device works on its samples, one after the other, to hold fewer
        activations. The numbers are those of the whole batch. Batches must be counted with equal `parts`.
      schedule: factor of all learning rates, from the steps done before (int32).
      seed: of stochastic rounding; see `low_precision.py`.
    """

    clip_norm: float = 0.0
    accumulate: int = 1
    schedule: Callable[[jax.Array], Any] = lambda step: 1.0
    seed: int = 0


PLAIN = StepOptions()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """One global batch as the step takes it; every leading axis is device-major and split over the mesh.

    Attributes:
      dense_BxK: float [N * b, K], zeros in padding rows.
      labels_B: float [N * b].
      weights_B: float [N * b], 0 in padding rows.
      routing: the routed ids.
    """

    dense_BxK: Any
    labels_B: Any
    weights_B: Any
    routing: Routing


def place(batch: Batch, routing: Routing, local: int, mesh: Mesh, dtype: Any) -> Inputs:
    """Pads a batch to b rows a device, of weight 0, and puts it and its routing on the mesh.

    Of several processes each gives the samples of its own devices: see `Share`.
    """
    total = local * Share.of(mesh).count

    def padded(x: np.ndarray) -> np.ndarray:
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    inputs = Inputs(padded(batch.dense), padded(batch.labels), padded(batch.weights), routing)
    return put_share(inputs, mesh)


def _forward(
    graphdef: Any, embeddings: ShardedEmbeddings, dense: Any, rows: Rows, tables: Tables | None, inputs: Inputs
) -> jax.Array:
    """Logits [b] of one device's samples, from the rows that it fetched and its part of the tables, if that will do."""
    with jax.named_scope("pool"):
        pooled = embeddings.pool(rows, tables, inputs.routing, inputs.labels_B.shape[0])
    with jax.named_scope("dense_forward"):
        return logits(nnx.merge(graphdef, dense), inputs.dense_BxK, pooled)


def make_train_step(
    graphdef: Any,
    bound: BoundPlan,
    mesh: Mesh,
    tx: optax.GradientTransformation,
    options: StepOptions = PLAIN,
    held: Dense = REPLICATED,
) -> jax.stages.Wrapped:
    """The jitted training step. It donates the state and works on the tables in place.

    Collectives: those that the shardings list (embedding/sharding/), one all-reduce of (dense gradients, sum of w*l,
    sum of w) in dense_grads, and, where tables are sharded, one of a few integers in finite_check, by which all devices
    agree on whether the step counts (one, and one for each table group whose optimizer keeps slots); and, to clip, one
    of a single float in clip (both within each replica group, if all groups hold the same). `held` may ask for an
    all-reduce of each bucket of gradients instead of the one; or for all-gathers of parameters in dense_gather and
    reduce-scatters of gradients in dense_grads, with an all-reduce of the two sums: see `dense.py`.

    Returns:
      step(state, inputs) -> (state, metrics); metrics are replicated scalars: "loss", the weighted
      mean log loss of exactly this step; "weight", the sum of its samples' weights; "ok", false if it was not finite
      and changed nothing; and "bad_loss", "bad_dense", "bad_tables" and, to clip, "bad_norm", the numbers of
      non-finite values that made it so; "bad_opt" and "bad_slots" those of the state of the dense optimizer and, int32
      [groups that have them], of table groups' slots (`slotted`) that the step would have made infinite or NaN.
    """
    embeddings = ShardedEmbeddings(bound)

    def train_step(state: TrainState, inputs: Inputs) -> tuple[TrainState, dict[str, jax.Array]]:
        rows, residuals = embeddings.fetch(state.tables, inputs.routing)

        def weighted_loss(dense: Any, rows: dict[str, jax.Array], inputs: Inputs) -> jax.Array:
            logits_B = _forward(graphdef, embeddings, dense, rows, state.tables, inputs).astype(inputs.labels_B.dtype)
            with jax.named_scope("loss"):
                losses_B = optax.sigmoid_binary_cross_entropy(logits_B, inputs.labels_B)
                return jnp.sum(inputs.weights_B * losses_B)

        def gradients(dense: Any, inputs: Inputs) -> Any:
            loss, backward = jax.vjp(functools.partial(weighted_loss, inputs=inputs), dense, rows)
            with jax.named_scope("dense_backward"):
                return loss, *backward(jnp.ones_like(loss))

        # Gradients of dense_here are those of this device's samples alone: the sum over devices is the
        # explicit `reduce` below. The tables never enter autodiff.
        like = held.like(state.dense)
        order = list(range(len(jax.tree.leaves(like))))
        if held.bucket_bytes and options.accumulate == 1:  # parts give all their gradients at once, at the end
            order = order_made(lambda dense: gradients(dense, inputs)[1], like)
        dense_here = held.gather(state.dense, order)
        if options.accumulate == 1:
            loss, dense_grads, row_grads = gradients(dense_here, inputs)
        else:
            zeros = jax.tree.map(jnp.zeros_like, (inputs.labels_B[0], dense_here, rows))
            of_part = functools.partial(gradients, dense_here)
            loss, dense_grads, row_grads = _accumulate(of_part, zeros, inputs, options.accumulate)
        with jax.named_scope("dense_grads"):
            dense_grads, loss, weight = held.reduce(dense_grads, loss, jnp.sum(inputs.weights_B), order)
            dense_grads = jax.tree.map(lambda g: g / weight, dense_grads)
            loss = loss / weight
        row_gradients = embeddings.send_gradients(residuals, row_grads)
        scale = 1 / weight  # of the tables' gradients

        bad = {"bad_loss": (~jnp.isfinite(loss)).astype(jnp.int32)}
        if options.clip_norm:
            with jax.named_scope("clip"):
                of_dense = held.total(sum((_squares(g) for g in jax.tree.leaves(dense_grads)), loss * 0))
                of_tables = {name: _squares(found.sums * scale) for name, found in row_gradients.items()}
                squares = embeddings.total(of_tables, of_dense)
                # Finite gradients may have squares that overflow.
                bad["bad_norm"] = (~jnp.isfinite(squares)).astype(jnp.int32)
                clip = jnp.minimum(1, options.clip_norm / jnp.sqrt(squares))
                clip = jnp.where(squares > 0, clip, 1)
                dense_grads = jax.tree.map(lambda g: g * clip, dense_grads)
            clipped = scale * clip
        else:
            clipped = scale
        if bound.independent:  # see `replica_groups.py`
            clipped = clipped * bound.replicas

        # Everything that an update writes is made before the devices agree that it may be written.
        rate = jnp.asarray(options.schedule(state.step), loss.dtype)
        with jax.named_scope("dense_update"):
            updates, opt = tx.update(dense_grads, state.opt, state.dense)
            updates = jax.tree.map(lambda u: u * rate, updates)
            dense = optax.apply_updates(state.dense, updates)
        with jax.named_scope("finite_check"):
            of_dense = held.total(spoilt(jax.tree.leaves(dense_grads), jnp.ones((), loss.dtype), state.opt, opt))
        # No count is negative, which XLA does not know: means over rows that are spread over devices come after all
        # dense gradients and the loss, or it would combine these with them, and let them wait.
        after_dense = jnp.where(of_dense[0] < 0, loss, clipped)
        context = UpdateContext(clipped, state.step, rate, options.seed)
        late = context._replace(scale=after_dense)
        contexts = {g.name: late if g.columns.owners > 1 else context for g in bound.groups}
        proposed = embeddings.propose(state.tables, state.slots, row_gradients, contexts)

        with jax.named_scope("finite_check"):
            slotted_groups = [group.name for group in slotted(bound)]
            counts = {
                name: _in_place_among(slotted_groups, name, spoilt([found.sums], clipped, new.before, new.slots))
                for (name, found), new in zip(row_gradients.items(), proposed.values(), strict=True)
            }
            bad_tables = embeddings.total(counts, jnp.zeros(1 + len(slotted_groups), jnp.int32))
            bad |= {"bad_dense": of_dense[0], "bad_opt": of_dense[1]}
            bad |= {"bad_tables": bad_tables[0], "bad_slots": bad_tables[1:]}

        ok = state.ok & (sum(jnp.sum(count) for count in bad.values()) == 0)
        tables, slots = embeddings.write(state.tables, state.slots, row_gradients, contexts, proposed, ok)
        with jax.named_scope("dense_update"):
            dense, opt = jax.tree.map(lambda new, old: jnp.where(ok, new, old), (dense, opt), (state.dense, state.opt))
        new = TrainState(state.step + ok.astype(jnp.int32), ok, dense, opt, tables, slots)
        return new, {"loss": loss, "weight": weight, "ok": ok, **bad}

    specs = state_specs(bound, held)
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P(BATCH_AXES)), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0)


def _accumulate(gradients: Callable[[Inputs], Any], zero: Any, inputs: Inputs, parts: int) -> Any:
    """The sum of `gradients` over `parts` equal parts of the samples, one after the other.

    Only one part's activations are held at a time. The routing's groups stay whole: each row is fetched once.
    """
    groups = inputs.routing.groups
    samples = (inputs.dense_BxK, inputs.labels_B, inputs.weights_B, inputs.routing.features)
    slices = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), samples)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        dense_BxK, labels_B, weights_B, features = part
        found = gradients(Inputs(dense_BxK, labels_B, weights_B, Routing(groups, features)))
        return jax.tree.map(jnp.add, total, found), None

    return jax.lax.scan(add, zero, slices)[0]


def make_predict(graphdef: Any, bound: BoundPlan, mesh: Mesh, held: Dense = REPLICATED) -> jax.stages.Wrapped:
    """The jitted forward pass: predict(state, inputs) -> logits [N * b], split over the mesh.

    Independent replica groups predict with the mean of their tables, row by row as these are looked up.
    """
    embeddings = ShardedEmbeddings(bound)

    def predict(state: TrainState, inputs: Inputs) -> jax.Array:
        rows, _ = embeddings.fetch(state.tables, inputs.routing, mean=True)
        dense = held.gather(state.dense, range(len(jax.tree.leaves(state.dense))))
        return _forward(graphdef, embeddings, dense, rows, None if bound.independent else state.tables, inputs)

    specs = (state_specs(bound, held), P(BATCH_AXES))
    return jax.jit(jax.shard_map(predict, mesh=mesh, in_specs=specs, out_specs=P(BATCH_AXES)))


def state_specs(bound: BoundPlan, held: Dense = REPLICATED) -> Any:
    """The PartitionSpecs of a TrainState: tables split as their groups say, the dense part as `held` says."""
    specs: Any = ShardedEmbeddings(bound).partition_specs()
    return TrainState(P(), P(), *held.specs(), specs, specs)


def _in_place_among(names: Sequence[str], name: str, counts: jax.Array) -> jax.Array:
    """Counts of one group's gradients and slots, the latter in their place among those of `names`: int32 [1 + n]."""
    gradients, slots = counts
    return jnp.stack([gradients, *(slots if other == name else slots * 0 for other in names)])


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))
