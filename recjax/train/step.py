"""The jitted steps: one that trains, one that predicts. Both run the same forward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recjax.data.batch import Batch
from recjax.embedding.lookup import fetch, pool, send_gradients, update
from recjax.embedding.plan import BoundPlan
from recjax.embedding.route import Routing
from recjax.mesh import BATCH_AXES, MODEL_AXES, sharded
from recjax.train.state import TrainState


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
    """Pads a batch to N * b rows of weight 0 and puts it and its routing on the mesh."""
    total = local * mesh.devices.size

    def padded(x: np.ndarray) -> np.ndarray:
        out = np.zeros((total, *x.shape[1:]), dtype)
        out[: len(x)] = x
        return out

    inputs = Inputs(padded(batch.dense), padded(batch.labels), padded(batch.weights), routing)
    return jax.device_put(inputs, sharded(mesh))


def _forward(graphdef: Any, bound: BoundPlan, dense: Any, rows: dict[str, jax.Array], inputs: Inputs) -> jax.Array:
    """Logits [b] of one device's samples, from the rows that it fetched."""
    samples = inputs.labels_B.shape[0]
    with jax.named_scope("pool"):
        pooled = {
            feature.name: pool(feature, rows[group.name], inputs.routing.features[feature.name], samples)
            for group in bound.groups
            for feature in group.features
        }
    with jax.named_scope("dense_forward"):
        return nnx.merge(graphdef, dense)(inputs.dense_BxK, pooled)


def make_train_step(
    graphdef: Any, bound: BoundPlan, mesh: Mesh, tx: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """The jitted training step. It donates the state and works on the tables in place.

    Collectives: those that `lookup.py` lists, one all-reduce of (dense gradients, sum of w*l, sum of w)
    in dense_grads, and, where tables are row-wise, one of a single integer in finite_check, by which
    all devices agree on whether the step counts.

    Returns:
      step(state, inputs) -> (state, metrics); metrics are replicated scalars: "loss", the weighted
      mean log loss of exactly this step; "ok", false if it was not finite and changed nothing; and
      "bad_loss", "bad_dense", "bad_tables", the numbers of non-finite values that made it so.
    """

    def train_step(state: TrainState, inputs: Inputs) -> tuple[TrainState, dict[str, jax.Array]]:
        rows, asked = {}, {}
        for group in bound.groups:
            routing = inputs.routing.groups[group.name]
            rows[group.name], asked[group.name] = fetch(group, state.tables[group.name], routing)

        def weighted_loss(dense: Any, rows: dict[str, jax.Array]) -> jax.Array:
            logits_B = _forward(graphdef, bound, dense, rows, inputs).astype(inputs.labels_B.dtype)
            losses_B = optax.sigmoid_binary_cross_entropy(logits_B, inputs.labels_B)
            return jnp.sum(inputs.weights_B * losses_B)

        # Made varying, the parameters get gradients of this device's samples alone: the sum over
        # devices is then the one explicit psum below. The tables never enter autodiff.
        dense_here = jax.lax.pcast(state.dense, BATCH_AXES, to="varying")
        loss, backward = jax.vjp(weighted_loss, dense_here, rows)
        with jax.named_scope("dense_backward"):
            dense_grads, row_grads = backward(jnp.ones_like(loss))
        with jax.named_scope("dense_grads"):
            dense_grads, loss, weight = jax.lax.psum((dense_grads, loss, jnp.sum(inputs.weights_B)), BATCH_AXES)
            dense_grads = jax.tree.map(lambda g: g / weight, dense_grads)
            loss = loss / weight
        sent = {}
        for group in bound.groups:
            touched, sums = send_gradients(group, asked[group.name], row_grads[group.name])
            sent[group.name] = touched, sums / weight

        with jax.named_scope("finite_check"):
            by_row = [_not_finite(sent[g.name][1]) for g in bound.groups if g.placement == "row_wise"]
            copied = [_not_finite(sent[g.name][1]) for g in bound.groups if g.placement == "data_parallel"]
            bad_tables = sum(copied, jnp.int32(0))
            if by_row:
                bad_tables += jax.lax.psum(sum(by_row), MODEL_AXES)
            bad = {
                "bad_loss": _not_finite(loss),
                "bad_dense": sum(_not_finite(g) for g in jax.tree.leaves(dense_grads)),
                "bad_tables": bad_tables,
            }
            ok = state.ok & (sum(bad.values()) == 0)

        rate = jnp.float32(1)
        tables, slots = {}, {}
        for group in bound.groups:
            tables[group.name], slots[group.name] = update(
                group, state.tables[group.name], state.slots[group.name], *sent[group.name], state.step, rate, ok
            )
        with jax.named_scope("dense_update"):
            updates, opt = tx.update(dense_grads, state.opt, state.dense)
            dense = optax.apply_updates(state.dense, updates)
            dense, opt = jax.tree.map(lambda new, old: jnp.where(ok, new, old), (dense, opt), (state.dense, state.opt))
        new = TrainState(state.step + ok.astype(jnp.int32), ok, dense, opt, tables, slots)
        return new, {"loss": loss, "ok": ok, **bad}

    specs = state_specs(bound)
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P(BATCH_AXES)), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0)


def make_predict(graphdef: Any, bound: BoundPlan, mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted forward pass: predict(state, inputs) -> logits [N * b], split over the mesh."""

    def predict(state: TrainState, inputs: Inputs) -> jax.Array:
        rows = {
            group.name: fetch(group, state.tables[group.name], inputs.routing.groups[group.name])[0]
            for group in bound.groups
        }
        return _forward(graphdef, bound, state.dense, rows, inputs)

    specs = (state_specs(bound), P(BATCH_AXES))
    return jax.jit(jax.shard_map(predict, mesh=mesh, in_specs=specs, out_specs=P(BATCH_AXES)))


def state_specs(bound: BoundPlan) -> Any:
    """The PartitionSpecs of a TrainState: row-wise tables are split over MODEL_AXES, all else is replicated."""
    tables = {g.name: P(MODEL_AXES) if g.placement == "row_wise" else P() for g in bound.groups}
    specs: Any = tables
    return TrainState(P(), P(), P(), P(), specs, specs)


def _not_finite(x: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)
