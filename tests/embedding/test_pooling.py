"""Sums of bags and their gradient against NumPy, for bags of every kind at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.problems import equations

from recjax import kernels
from recjax.embedding import segment_sums
from recjax.embedding.pooling import SortedIds, pool, sum_bags
from recjax.embedding.routing.routed import FeatureRouting
from recjax.embedding.spec import FeatureSpec

pytestmark = pytest.mark.light_compile

D = 3


def random_bags(rng, count, size, rows, weighted):
    """Indices, a third of them padding, and weights, with the matrix [count, rows] that they stand for."""
    inverse = rng.integers(0, rows, (count, size)).astype(np.int32)
    inverse[rng.random(inverse.shape) < 1 / 3] = rows
    weights = rng.integers(-3, 4, inverse.shape).astype(np.float32) if weighted else None
    matrix = np.zeros((count, rows + 1), np.float32)
    np.add.at(matrix, (np.arange(count)[:, None], inverse), 1 if weights is None else weights)
    return (inverse, weights), matrix[:, :rows]


@pytest.mark.parametrize(("size", "loops"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1)])
def test_only_long_bags_are_summed_in_a_loop(size: int, loops: int) -> None:
    """A loop that never runs costs nothing in the program, but its body is traced in each start of a training."""
    inverse_NxH = jnp.zeros((5, size), jnp.int32)
    traced = jax.make_jaxpr(lambda rows_UxD: sum_bags(rows_UxD, ((inverse_NxH, None),)))(jnp.zeros((7, D)))
    assert [e.primitive.name for e in equations(traced.jaxpr)].count("scan") == loops


@pytest.mark.full
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 16, 17, 35]), st.booleans()), min_size=1, max_size=3),
    st.integers(0),
    st.sampled_from(["cpu", "gpu"]),
)
@example([(32, False)], 0, "cpu")  # two whole loops
@example([(33, True), (1, False)], 0, "cpu")
@example([(33, True), (1, False)], 0, "gpu")
def test_sums_and_gradients_are_the_matrix_products(kinds, seed, platform):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_sums, "target_platform", lambda: platform)
        check_products(kinds, seed)


def sums_and_gradient(rows, bags, upstream):
    """Returns sums and the gradient by one program; outside of one every operation is compiled by itself."""

    def both(rows, bags, upstream):
        sums, backward = jax.vjp(lambda r: sum_bags(r, bags), rows)
        return sums, backward(upstream)

    return jax.jit(both)(rows, bags, upstream)


def check_products(kinds, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-9, 10, (7, D)).astype(np.float32)  # whole numbers add up exactly in any order
    made = [random_bags(rng, 5, size, 7, weighted) for size, weighted in kinds]
    bags = tuple(bags for bags, _ in made)
    upstream = tuple(jnp.asarray(rng.integers(-9, 10, (5, D)), jnp.float32) for _ in made)
    sums, (gradient,) = sums_and_gradient(jnp.asarray(rows), bags, upstream)
    for found, (_, matrix) in zip(sums, made, strict=True):
        np.testing.assert_array_equal(found, matrix @ rows)
    expected = sum(matrix.T @ np.asarray(grads) for (_, matrix), grads in zip(made, upstream, strict=True))
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_features_of_all_kinds_are_pooled_together(platform, monkeypatch):
    """Two fixed bags of one size, of which one has weights; a jagged one, a sequence: each gets its own sums."""
    monkeypatch.setattr(segment_sums, "target_platform", lambda: platform)
    rows = np.arange(1, 5, dtype=np.float32)[:, None] * [1, 10]
    features = (
        FeatureSpec("a", "t", 2),
        FeatureSpec("b", "t", 2, weighted=True),
        FeatureSpec("jagged", "t", None),
        FeatureSpec("sequence", "t", 1, "none"),
    )
    routing = {
        "a": FeatureRouting(np.array([[0, 1], [3, 4]]), None, None),
        "b": FeatureRouting(np.array([[0, 1], [3, 4]]), np.array([[2.0, 3.0], [-1.0, 0.0]], np.float32), None),
        "jagged": FeatureRouting(np.array([0, 1, 2, 4]), None, np.array([1, 1, 1, 2])),
        "sequence": FeatureRouting(np.array([[2], [4]]), None, None),
    }
    pooled = pool(features, jnp.asarray(rows), routing, 2)
    assert list(pooled) == ["a", "b", "jagged", "sequence"]
    assert pooled["a"].tolist() == [[3, 30], [4, 40]]
    assert pooled["b"].tolist() == [[8, 80], [-4, -40]]
    assert pooled["jagged"].tolist() == [[0, 0], [6, 60]]
    assert pooled["sequence"].rows_LxD.tolist() == [[3, 30], [0, 0]]
    assert pooled["sequence"].segments_L.tolist() == [0, 2]
    rows_BxHxD, mask_BxH = pooled["sequence"].padded()
    assert (rows_BxHxD.tolist(), mask_BxH.tolist()) == ([[[3, 30]], [[0, 0]]], [[True], [False]])


def test_no_row_for_every_id_is_held():
    """A batch of long bags needs little more than rows, indices and sums; [b, H, D] would be eight times as much."""
    b, H, U, dim = 512, 64, 1024, 64
    inverse = jnp.zeros((b, H), jnp.int32)

    def step(rows, inverse):
        (sums,), backward = jax.vjp(lambda r: sum_bags(r, ((inverse, None),)), rows)
        return backward((jnp.sin(sums),))[0]

    analysis = jax.jit(step).lower(jnp.zeros((U, dim)), inverse).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 4 * b * H * dim / 8


def test_an_order_that_is_known_gives_the_gradient_of_a_sort(monkeypatch):
    """Sums of fixed bags, of weighted ones and of jagged ones, whose ids the sorted order numbers in another order."""
    monkeypatch.setattr(segment_sums, "target_platform", lambda: "gpu")
    rng = np.random.default_rng(0)
    features = [FeatureSpec("a", "t", 2), FeatureSpec("b", "t", 2), FeatureSpec("c", "t", 3, weighted=True)]
    features.append(FeatureSpec("d", "t", None))

    def routing(shape, weighted=False, segments=None):
        weights = jnp.asarray(rng.integers(1, 5, shape), jnp.float32) if weighted else None
        return FeatureRouting(jnp.asarray(rng.integers(0, 8, shape), jnp.int32), weights, segments)

    segments = jnp.asarray([0, 0, 1, 3, 3, 4, 5], jnp.int32)  # the last one of no sample
    routed = {
        "a": routing((5, 2)),
        "b": routing((5, 2)),
        "c": routing((5, 3), True),
        "d": routing((7,), False, segments),
    }
    names = ("c", "a", "d", "b")
    ids = np.concatenate([np.ravel(routed[name].inverse) for name in names])
    at = np.argsort(ids, kind="stable").astype(np.int32)
    starts = jnp.asarray(np.searchsorted(ids[at], np.arange(7)), jnp.int32)
    rows = jnp.asarray(rng.integers(-9, 10, (7, D)), jnp.float32)
    table = jnp.concatenate([jnp.full((3, D), 1000.0), rows[::-1]])  # has all rows, in places of its own
    slots = jnp.asarray(np.where(ids < 7, 9 - ids, 10), jnp.int32)
    order = SortedIds(names, jnp.asarray(at), jnp.asarray(ids[at]), starts)
    at_home = order._replace(table_RxD=table, slot_M=slots)
    upstream = {f.name: jnp.asarray(rng.integers(-9, 10, (5, D)), jnp.float32) for f in features}

    def pulled(order, fetched=rows):
        with kernels.switched_off():
            pooled, back = jax.vjp(lambda rows: pool(features, rows, routed, 5, order=order), fetched)
        return pooled, back({name: upstream[name] for name in pooled})[0]

    expected = np.zeros((8, D))
    for name, of in routed.items():
        for place, row in np.ndenumerate(np.asarray(of.inverse)):
            sample = place[0] if of.segments is None else int(of.segments[place])
            weight = 1 if of.weights is None else float(of.weights[place])
            if sample < 5:
                expected[row] += weight * np.asarray(upstream[name][sample])
    plain, gradient = pulled(None)
    np.testing.assert_array_equal(gradient, expected[:7])
    for found, of in (pulled(order), pulled(at_home, rows * jnp.nan)):  # the last reads no fetched row
        np.testing.assert_array_equal(of, expected[:7])
        jax.tree.map(np.testing.assert_array_equal, found, plain)
