"""Parts of the training step by themselves, without a mesh: against closed forms and by hand."""

import jax.numpy as jnp

from recjax.embedding.bind import bind
from recjax.embedding.optim import Sgd
from recjax.embedding.plan import make_plan
from recjax.embedding.residuals import SparseGradient
from recjax.embedding.sharded import ShardedEmbeddings
from recjax.embedding.spec import FeatureSpec, TableSpec
from recjax.train.dense import REPLICATED
from recjax.train.gradients import clip_by_global_norm, count_in_dense

TABLE, FEATURE = TableSpec("t", 7, 2, Sgd(0.1)), FeatureSpec("t", "t", 3)


def embeddings() -> ShardedEmbeddings:
    plan = make_plan("data_parallel", (TABLE,))
    return ShardedEmbeddings(bind(plan, (TABLE,), (FEATURE,), 1, True, 1, 1, False))


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
    assert count_in_dense(grads, before, after).tolist() == [2, 1]  # gradients, slots
