"""The kernels of recjax-kernels against brute force, and against the plain formulations."""

import concurrent.futures
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.kernels import BF16, F32, check_sums, pull
from support.problems import mesh_of

from recjax import kernels
from recjax.embedding.pooling import sum_bags
from recjax.errors import ConfigError
from recjax.models.layers import dot_interaction
from recjax.parallel.mesh import MODEL_AXES

needs_them = pytest.mark.skipif(not kernels.installed(), reason="not installed: pip install ./kernels")

# B, F, D, with the diagonal. D beside multiples of 4, 8 and 16; F beside tiles of 6 and 9; enough for threads; empty.
SHAPES = [(500, 27, 16, False), (500, 27, 16, True), (3, 27, 64, False), (2, 27, 128, False), (1, 1, 5, True)]
SHAPES += [(1, 1, 5, False), (5, 2, 3, False), (2, 30, 130, True), (3, 9, 17, False), (3, 10, 1, True)]
SHAPES += [(2, 33, 15, False), (0, 4, 4, False), (3, 0, 4, True), (3, 4, 0, False), (2, 60, 20, True)]


@needs_them
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interaction_is_the_triangle_of_products_and_its_gradient(shape: Any, dtype: Any, variant: str) -> None:
    *shape, itself = shape
    samples, F, dim = shape
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal(shape).astype(dtype)
    pairs = [(i, j) for i in range(F) for j in range(i + itself)]
    cotangent = rng.standard_normal((samples, len(pairs))).astype(dtype)
    value, gradient = pull(lambda x: kernels.interaction(x, itself), vectors, cotangent)
    assert value.dtype == gradient.dtype == dtype

    exact, ct = vectors.astype(np.float64), cotangent.astype(np.float64)
    products, sums = np.zeros(value.shape), np.zeros(shape)
    magnitudes, all_magnitudes = np.zeros(value.shape), np.zeros(shape)
    for p, (i, j) in enumerate(pairs):
        products[:, p] = (exact[:, i] * exact[:, j]).sum(axis=1)
        magnitudes[:, p] = np.abs(exact[:, i] * exact[:, j]).sum(axis=1)
        for a, b in ((i, j), (j, i)):
            sums[:, a] += ct[:, p, None] * exact[:, b]
            all_magnitudes[:, a] += np.abs(ct[:, p, None] * exact[:, b])
    check_sums(value, products, magnitudes, dim)
    check_sums(gradient, sums, all_magnitudes, F + 1)


@needs_them
@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_library_asks_no_more_of_a_system_than_manylinux_2_28_has() -> None:
    import recjax_kernels

    names = (Path(recjax_kernels.__file__).parent / "_kernels.so").read_bytes()
    newest = {"GLIBC_2.": 28, "GLIBCXX_3.4.": 24, "CXXABI_1.3.": 11}  # as auditwheel knows them
    for prefix, most in newest.items():
        versions = [int(found) for found in re.findall(rb"\0" + re.escape(prefix).encode() + rb"(\d+)", names)]
        assert versions and max(versions) <= most, prefix


@needs_them
def test_interaction_by_hand() -> None:
    vectors = np.array([[[1, 2], [3, 5], [7, 11]]], F32)
    value, gradient = pull(kernels.interaction, vectors, np.array([[1, 10, 100]], F32))
    assert value.tolist() == [[13, 29, 76]]  # (1,0), (2,0), (2,1)
    assert gradient.tolist() == [[[3 + 70, 5 + 110], [1 + 700, 2 + 1100], [10 + 300, 20 + 500]]]


@needs_them
def test_values_that_are_not_finite_stay_with_their_pairs(variant: str) -> None:
    vectors = np.ones((2, 20, 16), BF16)
    vectors[0, 3, 5] = np.nan
    vectors[1, 4, 0] = np.inf
    i, j = np.tril_indices(20, -1)
    value = np.asarray(kernels.interaction(jnp.asarray(vectors)))
    assert (np.isnan(value[0]) == ((i == 3) | (j == 3))).all()
    assert (np.isposinf(value[1]) == ((i == 4) | (j == 4))).all()


@needs_them
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(variant: str) -> None:
    # 1 + k 2^-8 lies between neighbours (k odd: half-way). As products 1 * 1 + 2^-4 * k 2^-4.
    vectors = np.zeros((64, 2, 2), BF16)
    vectors[:, :, 0] = 1
    vectors[:, 0, 1] = 2.0**-4
    vectors[:, 1, 1] = np.arange(64) * 2.0**-4
    value = np.asarray(kernels.interaction(jnp.asarray(vectors)))
    assert (value[:, 0] == (1 + np.arange(64) * 2.0**-8).astype(BF16)).all()


# U, N, H, D: D beside multiples of 4, 8 and 16; large enough for several ranges of rows, and for several threads.
BAGS = [(10, 7, 3, 5), (5000, 900, 10, 64), (300, 500, 20, 130), (3, 1, 1, 16), (70_000, 2000, 7, 16)]
BAGS += [
    (2000, 999, 4, 128),
    (1, 5000, 2, 17),
    (9, 9, 9, 12),
    (40, 30, 1, 32),
    (3, 0, 2, 4),
    (3, 4, 0, 4),
    (3, 4, 2, 0),
]


@needs_them
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", BAGS, ids=str)
def test_bags_are_sums_of_rows_and_gradients_sums_over_occurrences(shape: Any, weighted: bool, variant: str) -> None:
    U, N, H, dim = shape
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((U, dim)).astype(np.float32)
    inverse = np.minimum(rng.zipf(1.2, (N, H)) - 2, U).astype(np.int32)  # from -1, nothing, to U, padding
    inverse[: N // 7] = U
    weights = rng.standard_normal((N, H)).astype(np.float32) if weighted else None
    cotangent = rng.standard_normal((N, dim)).astype(np.float32)
    given = (jnp.asarray(inverse), None if weights is None else jnp.asarray(weights))
    value, gradient = pull(lambda x: kernels.bags(x, *given), rows, cotangent)

    n, h = np.nonzero((inverse >= 0) & (inverse < U))  # in the order of (n, h)
    u = inverse[n, h]
    if weights is None:  # in float32, one after the other: the same to the bit
        pooled, sums = np.zeros((N, dim), np.float32), np.zeros((U, dim), np.float32)
        np.add.at(pooled, n, rows[u])
        np.add.at(sums, u, cotangent[n])
        assert (value == pooled).all() and (gradient == sums).all()
        return
    for result, at, terms, longest in (
        (value, n, weights[n, h, None] * rows[u].astype(np.float64), H),
        (gradient, u, weights[n, h, None] * cotangent[n].astype(np.float64), np.bincount(u).max(initial=0)),
    ):
        exact, magnitudes = np.zeros(result.shape), np.zeros(result.shape)
        np.add.at(exact, at, terms)
        np.add.at(magnitudes, at, np.abs(terms))
        check_sums(result, exact, magnitudes, longest)


@needs_them
def test_no_rows_at_all() -> None:
    value, gradient = pull(
        lambda x: kernels.bags(x, jnp.zeros((3, 2), jnp.int32)), np.ones((0, 4), F32), np.ones((3, 4), F32)
    )
    assert value.tolist() == [[0] * 4] * 3 and gradient.shape == (0, 4)


@needs_them
def test_what_stands_for_nothing_adds_nothing_not_even_nan() -> None:
    rows, inverse = jnp.ones((2, 3)), jnp.array([[0, 2, -1, 2**31 - 1, -(2**31)]], jnp.int32)
    weights = jnp.array([[2.0, np.nan, np.inf, np.nan, np.nan]])
    value, gradient = pull(lambda x: kernels.bags(x, inverse, weights), rows, np.ones((1, 3), F32))
    assert value.tolist() == [[2, 2, 2]]
    assert gradient.tolist() == [[2, 2, 2], [0, 0, 0]]


def plain_bags(rows_UxD: jax.Array, inverse_NxH: jax.Array, weights_NxH: jax.Array) -> jax.Array:
    return sum_bags(rows_UxD, ((inverse_NxH, weights_NxH),))[0]


@needs_them
def test_gradients_are_those_of_the_plain_formulations() -> None:
    rng = np.random.default_rng(0)
    vectors = jnp.asarray(rng.standard_normal((6, 27, 16)), jnp.float32)
    rows, weights = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((50, 16), (30, 4)))
    inverse = jnp.asarray(rng.integers(0, 51, (30, 4)), jnp.int32)

    def loss(interaction: Any, bags: Any) -> Any:
        def of(vectors: jax.Array, rows: jax.Array) -> jax.Array:
            return jnp.sin(interaction(vectors)).sum() + jnp.sin(bags(rows, inverse, weights)).sum()

        return jax.jit(jax.grad(of, argnums=(0, 1)))(vectors, rows)

    with kernels.switched_off():
        plain = loss(dot_interaction, plain_bags)
    for a, b in zip(loss(kernels.interaction, kernels.bags), plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@needs_them
def test_bfloat16_bags_are_summed_in_float32() -> None:
    rows, inverse = jnp.full((1, 4), 1, jnp.bfloat16), jnp.zeros((1, 1000), jnp.int32)
    value, gradient = pull(lambda x: kernels.bags(x, inverse), rows, np.ones((1, 4), BF16))
    assert value.dtype == gradient.dtype == BF16
    assert value.tolist() == gradient.tolist() == [[1000] * 4]


@needs_them
def test_repeats_agree_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((20_000, 64)), jnp.float32)
    inverse = jnp.asarray(rng.integers(0, 20_000, (5000, 10)), jnp.int32)
    cotangent = jnp.asarray(rng.standard_normal((5000, 64)), jnp.float32)
    vectors = jnp.asarray(rng.standard_normal((500, 27, 16)), jnp.float32)

    @jax.jit
    def everything() -> Any:
        pooled, back = jax.vjp(lambda x: kernels.bags(x, inverse), rows)
        products, turn = jax.vjp(kernels.interaction, vectors)
        return pooled, back(cotangent), products, turn(products)

    first = [np.asarray(x) for x in jax.tree.leaves(everything())]
    for _ in range(10):
        for a, b in zip(first, jax.tree.leaves(everything()), strict=True):
            assert (a == np.asarray(b)).all()


@needs_them
def test_on_eight_devices_in_a_scan_with_donation_the_numbers_are_those_of_one() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((64, 27, 16)).astype(np.float32)
    rows = rng.standard_normal((100, 16)).astype(np.float32)
    inverse = rng.integers(0, 101, (64, 5)).astype(np.int32)

    def steps(axes: Any, rows: jax.Array, vectors: jax.Array, inverse: jax.Array) -> Any:
        """Three steps of descent for rows that all devices hold and vectors that are split."""

        def loss(rows: jax.Array, vectors: jax.Array) -> jax.Array:
            return jnp.square(kernels.bags(rows, inverse)).sum() + jnp.square(kernels.interaction(vectors)).sum()

        def step(carry: Any, _: None) -> Any:
            value, grads = jax.value_and_grad(loss, argnums=(0, 1))(*carry)
            return jax.tree.map(lambda x, g: x - 1e-5 * g, carry, grads), jax.lax.psum(value, axes) if axes else value

        return jax.lax.scan(step, (rows, vectors), None, length=3)

    def on(devices: int) -> Any:
        split = P(MODEL_AXES)
        mapped = jax.shard_map(
            functools.partial(steps, MODEL_AXES),
            mesh=mesh_of(devices),
            in_specs=(P(), split, split),
            out_specs=((P(), split), P()),
            check_vma=True,
        )
        return jax.jit(mapped, donate_argnums=(0, 1))(jnp.asarray(rows), jnp.asarray(vectors), jnp.asarray(inverse))

    alone = jax.jit(functools.partial(steps, ()))(jnp.asarray(rows), jnp.asarray(vectors), jnp.asarray(inverse))
    for devices in (1, 8):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), on(devices), alone)


BUSY = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from recjax import kernels

assert kernels.available("float32") and len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
vectors = jnp.asarray(rng.standard_normal((8 * 500, 27, 16)), jnp.float32)
rows = jnp.asarray(rng.standard_normal((8 * 3000, 32)), jnp.float32)
inverse = jnp.asarray(rng.integers(0, 3000, (8 * 500, 5)), jnp.int32)

def many(vectors, rows, inverse):
    # XLA runs calls that do not depend on each other at once, on the very threads that are to help them.
    pooled = [kernels.bags(rows + k, inverse) for k in range(12)]
    pulled = [jax.vjp(lambda r: kernels.bags(r, inverse), rows)[1](p)[0] for p in pooled]
    return [kernels.interaction(vectors + k) for k in range(12)], pulled

step = jax.jit(jax.shard_map(many, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
results = [step(vectors, rows, inverse) for _ in range(5)]  # none is waited for
print(all(bool((a == b).all()) for r in results for a, b in zip(*map(jax.tree.leaves, (r, results[0])))))
"""


@needs_them
def test_eight_devices_on_two_threads_do_not_wait_for_each_other_for_ever() -> None:
    environment = os.environ | {"NPROC": "2", "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", BUSY], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


@needs_them
def test_available_for_the_types_that_the_kernels_have() -> None:
    assert kernels.available(jnp.float32) and kernels.available("bfloat16")
    assert not kernels.available(jnp.float64) and not kernels.available(jnp.float16)
    with kernels.switched_off():
        assert not kernels.available(jnp.float32)
    assert kernels.available(jnp.float32)


class Library:
    """In place of recjax_kernels, on a processor with AVX2."""

    INTERFACE = kernels._INTERFACE
    taken = "avx2"

    def use(self, name: str) -> bool:
        self.taken = name if name in ("avx2", "plain") else self.taken
        return name in ("avx2", "plain")

    def instruction_set(self) -> str:
        return self.taken


@pytest.mark.parametrize(("choice", "taken"), [("", "avx2"), ("plain", "plain"), ("off", "none")])
def test_the_environment_chooses_a_variant(choice: str, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recjax_kernels", Library())
    monkeypatch.setattr(kernels, "installed", functools.cache(kernels.installed.__wrapped__))
    monkeypatch.setenv("RECJAX_KERNELS", choice)
    assert kernels.variant() == taken and kernels.installed() == (taken != "none")
    with kernels.switched_off():
        assert kernels.variant() == "none"


@pytest.mark.parametrize(("there", "says"), [(True, "no such variant.*its best is avx2"), (False, "is not installed")])
def test_a_variant_that_there_is_not_is_refused(there: bool, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recjax_kernels", Library() if there else None)
    monkeypatch.setenv("RECJAX_KERNELS", "avx1024")
    with pytest.raises(ConfigError, match=says):
        kernels.installed.__wrapped__()


def test_not_available_where_they_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recjax_kernels", None)
    kernels.installed.cache_clear()
    assert not kernels.available(jnp.float32)
    kernels.installed.cache_clear()


@needs_them
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("limit", "size"), [(1, 9), (64, 0), (65, 500), (2**22, 3000), (2**31, 3000), (2**31, 0)])
def test_distinct_keys_are_those_of_sorting_them_whole(limit: int, size: int, dtype: type) -> None:
    """A bit for each possible key where those are few, a sort where they are many; in several threads at once."""
    limit = limit if dtype is np.int32 else 2**9 * limit

    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        pool = np.append(rng.integers(0, limit, 1 + size // 3), [0, limit - 1])
        keys: np.ndarray = rng.choice(pool, size).astype(dtype)
        found = kernels.distinct(keys, limit)
        assert found is not None
        expected, inverse = np.unique(keys, return_inverse=True)
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[1], inverse)
        assert found[0].dtype == dtype and found[1].dtype == np.int32

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(check, range(6)))


@needs_them
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("N", "H", "D"), [(300, 10, 64), (40, 1, 7), (0, 2, 4)])
def test_bags_of_a_table_are_those_of_its_fetched_rows(N: int, H: int, D: int, weighted: bool) -> None:
    rng = np.random.default_rng(N)
    table: Any = rng.normal(size=(1000, D)).astype(np.float32)
    slots: Any = np.append(np.sort(rng.choice(1000, 80, replace=False)), [1000, 1000]).astype(np.int32)
    inverse: Any = rng.integers(-1, 84, (N, H)).astype(np.int32)  # beyond the list, and entries that are not in use
    weights: Any = rng.normal(size=(N, H)).astype(np.float32) if weighted else None
    cotangent = rng.normal(size=(N, D)).astype(np.float32)
    fetched = jnp.asarray(table).at[slots].get(mode="fill", fill_value=0)
    value, grad = pull(lambda rows: kernels.bags(rows, inverse, weights), fetched, cotangent)
    nothing = jnp.full_like(fetched, jnp.nan)  # only its gradient is asked for
    found, found_grad = pull(lambda rows: kernels.table_bags(table, slots, rows, inverse, weights), nothing, cotangent)
    np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(found_grad, grad)


@needs_them
@pytest.mark.parametrize("D", [1, 16, 50])
@pytest.mark.parametrize("ok", [True, False])
def test_row_wise_adagrad_in_place(D: int, ok: bool) -> None:
    """Against the rule in float64: s += mean(G^2); w = w (1 - lr wd) - lr G / (sqrt(s) + eps), with G = c g + l2 w."""
    rng = np.random.default_rng(D)
    table, sums = rng.normal(size=(500, D)), rng.uniform(0, 2, 500)
    touched = np.append(np.sort(rng.choice(500, 300, replace=False)), [500, 501, 502])
    grads = 40 * rng.normal(size=(303, D))
    step = jax.jit(
        functools.partial(kernels.update_rowwise_adagrad, eps=1e-3, l2=0.02, weight_decay=0.1), donate_argnums=(0, 1)
    )
    scalars = (jnp.float32(1 / 40), jnp.float32(0.3), jnp.asarray(ok))
    arrays = (jnp.asarray(x, jnp.float32) for x in (table, sums))
    found = step(*arrays, jnp.asarray(touched, jnp.int32), jnp.asarray(grads, jnp.float32), scalars)
    if ok:
        at = touched[:300]
        G = grads[:300] / 40 + 0.02 * table[at]
        sums[at] += (G**2).mean(axis=1)
        table[at] = table[at] * (1 - 0.3 * 0.1) - 0.3 * G / (np.sqrt(sums[at]) + 1e-3)[:, None]
    np.testing.assert_allclose(found[0], table, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1], sums, rtol=1e-6)
