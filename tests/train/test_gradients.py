"""Parts of the training step by themselves, without a mesh: against closed forms and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.routing import locate

from recjax.data.batch import Bags, Batch
from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.residuals import LookedUp, SparseGradient
from recjax.embedding.routing import host
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.train.dense import REPLICATED
from recjax.train.gradients import bad_in_dense, clip_by_global_norm
from recjax.train.module import ModuleDef, parameters
from recjax.train.routers import StepInputs
from recjax.train.step import Forward, forward_backward

TABLE, FEATURE = TableSpec("t", 7, 2, Sgd(0.1)), FeatureSpec("t", "t", 3)
IDS = np.array([[0, 1, 1], [4, 4, 4], [6, 0, 2], [3, 1, 0], [2, 2, 5], [5, 6, 6]], np.int32)
LABELS, WEIGHTS = np.array([1.0, 0, 0, 1, 1, 0]), np.array([1.0, 2, 0.5, 1, 0, 3])


class Linear(nnx.Module):
    """A logit x v + sum(pooled)."""

    def __init__(self) -> None:
        self.v_K = nnx.Param(jnp.array([0.3, -0.2]))

    def __call__(self, dense_BxK, pooled):
        return dense_BxK @ self.v_K[...] + pooled["t"].sum(axis=1)


def embeddings() -> ShardedEmbeddings:
    plan = make_plan("data_parallel", (TABLE,))
    return ShardedEmbeddings(bind(plan, (TABLE,), (FEATURE,), 1, True, 1, 1, False))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_loss_and_gradients_are_those_of_logistic_regression(parts: int) -> None:
    """The gradient of a sample's log loss by its logit is w * (sigmoid(z) - y)."""
    with jax.enable_x64(True):
        tables = embeddings()
        (group,) = tables.bound.groups
        dense = np.random.default_rng(0).normal(size=(6, 2))
        batch = Batch(dense, {"t": Bags(IDS, None, None)}, LABELS, WEIGHTS, 0)
        routed = host.route_on_host(batch, tables.bound, 6, parts)
        routing = host.pack(routed, tables.bound, routed.required_capacities, np.float64)
        rows_RxD = np.random.default_rng(1).normal(size=(7, 2))
        _, slot_V = locate(group, "t", np.arange(7, dtype=np.int32))
        slots_C = routing.groups[group.name].slots_NxOxC.reshape(-1)
        fetched_CxD = np.concatenate([rows_RxD, np.zeros((1, 2))])[np.minimum(slots_C, 7)]
        model = Linear()
        params = jax.tree.map(lambda x: x.astype(jnp.float64), parameters(model))
        loss, grads, found_grads, _ = forward_backward(
            Forward(ModuleDef.of(model), tables),
            params,
            LookedUp({group.name: jnp.asarray(fetched_CxD)}, {}),
            {group.name: jnp.asarray(rows_RxD)},
            jax.tree.map(jnp.asarray, StepInputs(dense, LABELS, WEIGHTS, routing)),
            parts,
        )
    z_B = dense @ np.asarray(params["v_K"]["value"]) + rows_RxD.sum(axis=1)[slot_V[IDS]].sum(axis=1)
    by_logit_B = WEIGHTS * (1 / (1 + np.exp(-z_B)) - LABELS)
    np.testing.assert_allclose(loss, WEIGHTS @ (np.logaddexp(0, z_B) - LABELS * z_B), rtol=1e-12)
    np.testing.assert_allclose(grads["v_K"]["value"], by_logit_B @ dense, rtol=1e-12)
    by_slot_R = np.zeros(8)
    np.add.at(by_slot_R, slot_V[IDS].ravel(), np.repeat(by_logit_B, 3))
    expected_CxD = np.where(slots_C < 7, by_slot_R[np.minimum(slots_C, 7)], 0)[:, None] * np.ones(2)
    np.testing.assert_allclose(found_grads.rows[group.name], expected_CxD, rtol=1e-12, atol=1e-15)


def clipped(norm: float, dense: list[float], sums: list[list[float]], scale: float):
    tables = embeddings()
    (group,) = tables.bound.groups
    sparse = {group.name: SparseGradient(jnp.ones(len(sums), bool), jnp.array(sums, jnp.float32))}
    return clip_by_global_norm(
        norm, REPLICATED, {"v": jnp.array(dense, jnp.float32)}, tables, sparse, jnp.float32(scale), jnp.float32(1), {}
    )


def test_one_norm_of_dense_and_scaled_row_gradients() -> None:
    """Dense 3 and rows 8 * 0.5: a norm of 5, of which 2.5 may stay."""
    grads, scale, bad = clipped(2.5, [3, 0], [[0, 8], [0, 0]], 0.5)
    assert grads["v"].tolist() == [1.5, 0] and float(scale) == 0.25 and int(bad["bad_norm"]) == 0


def test_a_smaller_norm_stays_and_so_does_none_at_all() -> None:
    grads, scale, bad = clipped(6, [3, 0], [[0, 8]], 0.5)
    assert grads["v"].tolist() == [3, 0] and float(scale) == 0.5 and int(bad["bad_norm"]) == 0
    grads, scale, _ = clipped(6, [0, 0], [[0, 0]], 0.5)  # 6 / 0 is no factor
    assert grads["v"].tolist() == [0, 0] and float(scale) == 0.5


def test_squares_that_overflow_are_counted_and_no_clipping_counts_nothing() -> None:
    assert int(clipped(1, [1e30, 0], [[0, 0]], 1)[2]["bad_norm"]) == 1
    assert clipped(0, [1e30, 0], [[0, 0]], 1)[2] == {}


def test_what_is_not_finite_in_the_dense_part_is_counted() -> None:
    """A slot that was infinite before counts no more, or a run could never go on."""
    grads = {"a": jnp.array([1.0, jnp.nan, jnp.inf]), "b": jnp.array(2.0)}
    before, after = [jnp.array([1.0, jnp.inf, 3.0])], [jnp.array([jnp.inf, jnp.inf, 4.0])]
    counts = {name: int(count) for name, count in bad_in_dense(REPLICATED, grads, before, after).items()}
    assert counts == {"bad_dense": 2, "bad_opt": 1}
