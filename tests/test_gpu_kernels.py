"""The kernels for GPUs: interpreted against float64; compiled for an H200 and read, which no GPU is needed for."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recjax import kernels
from recjax.embedding.optim import Adagrad, OptimizerContext, RowWiseAdagrad, Sgd
from recjax.gpu_kernels import interaction
from recjax.gpu_kernels.bag_sums import sum_rows_of_bags
from recjax.gpu_kernels.row_sums import PIECE, sum_rows
from recjax.gpu_kernels.row_update import RowRule, update_in_place
from recjax.lab.predict.targets import devices, missing
from recjax.planning.graph import read_graph

WIDTHS = [16, 64, 128]
HIGHEST = jax.lax.Precision.HIGHEST
RULES = {
    "rowwise_adagrad": RowWiseAdagrad(0.1, l2=0.01, weight_decay=0.1),
    "adagrad": Adagrad(0.1, l2=0.01, weight_decay=0.1),
    "sgd": Sgd(0.1, l2=0.01, weight_decay=0.1),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize(("F", "itself"), [(27, False), (5, True)])
def test_the_interaction_and_its_gradient_are_those_of_float64(F: int, D: int, itself: bool) -> None:
    vectors = normal(3, F, D)
    i, j = np.tril_indices(F, 0 if itself else -1)
    grads = normal(3, len(i), seed=1)
    square = np.zeros((3, F, F))
    square[:, i, j] += grads
    square[:, j, i] += grads  # twice on the diagonal
    wide = vectors.astype(np.float64)
    z = interaction.multiply_pairs(jnp.asarray(vectors), itself, HIGHEST, interpret=True)
    into = interaction.pull_back_pairs(jnp.asarray(vectors), jnp.asarray(grads), itself, HIGHEST, interpret=True)
    lengths = np.linalg.norm(wide, axis=2)  # to which sums of D products are rounded
    expected = np.einsum("bid,bjd->bij", wide, wide)[:, i, j]
    assert np.max(np.abs(z - expected) / (lengths[:, i] * lengths[:, j])) < 1e-6
    terms = np.einsum("bij,bjd->bid", np.abs(square), np.abs(wide))
    assert np.max(np.abs(into - np.einsum("bij,bjd->bid", square, wide)) / terms) < 1e-6


def entries(segments: int, long: int, M: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sorted segments, one with `long` entries, some with none, some past the end; and which row each entry reads."""
    rng = np.random.default_rng(seed)
    some = rng.choice(np.arange(0, segments + 3, 2), M - long)
    return np.sort(np.concatenate([np.full(long, 7), some])).astype(np.int32), rng.integers(-1, 402, M).astype(np.int32)


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize(("long", "M"), [(1, 300), (PIECE, 500), (PIECE + 1, 500), (10_000, 12_000)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.full
def test_sums_of_segments_are_those_of_float64_and_have_the_same_bits_again(
    D: int, long: int, M: int, weighted: bool
) -> None:
    values, (segment, source) = normal(400, D), entries(40, long, M)
    weights = normal(M, seed=2) if weighted else None
    exact, terms = np.zeros((40, D)), np.zeros((40, D))
    there = (source >= 0) & (source < 400) & (segment < 40)
    each = values[source[there]].astype(np.float64) * (1 if weights is None else weights[there, None])
    np.add.at(exact, segment[there], each)
    np.add.at(terms, segment[there], np.abs(each))
    summed = jax.jit(functools.partial(sum_rows, interpret=True))
    starts = np.searchsorted(segment, np.arange(40)).astype(np.int32)
    starts = np.where(np.isin(np.arange(40), segment), starts, M).astype(np.int32)
    found, again = (np.asarray(summed(values, source, segment, starts, weights)) for _ in range(2))
    assert np.max(np.abs(found - exact) / np.maximum(terms, 1e-30)) < 1e-6
    assert np.array_equal(found, again) and not found[np.bincount(segment, minlength=44)[:40] == 0].any()


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize(("N", "H"), [(13, 2), (5, 8), (9, 27)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.full
def test_sums_of_bags_are_those_of_float64_and_have_the_same_bits_again(D: int, N: int, H: int, weighted: bool) -> None:
    rows, weights = normal(50, D), normal(N, H, seed=1) if weighted else None
    index = np.random.default_rng(2).integers(-2, 53, (N, H)).astype(np.int32)  # some name no row
    there = (index >= 0) & (index < 50)
    each = np.where(there[..., None], rows[np.where(there, index, 0)].astype(np.float64), 0)
    each = each if weights is None else each * weights[..., None]
    summed = jax.jit(functools.partial(sum_rows_of_bags, interpret=True))
    found, again = (np.asarray(summed(rows, index, weights)) for _ in range(2))
    assert np.max(np.abs(found - each.sum(1)) / np.maximum(np.abs(each).sum(1), 1e-30)) < 1e-6
    assert np.array_equal(found, again) and not found[~there.any(1)].any()


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.full
def test_rows_are_updated_as_the_rule_says_it_in_float64_or_not_at_all(kind: Any, D: int, ok: bool) -> None:
    rule, R = RULES[kind], 60
    table, grads = normal(R, D), normal(50, D, seed=1)
    shape = {"rowwise_adagrad": (R,), "adagrad": (R, D), "sgd": None}[kind]
    slot = None if shape is None else np.abs(normal(*shape, seed=2))
    touched = np.concatenate([np.random.default_rng(0).permutation(R)[:40], np.arange(R, R + 10)]).astype(np.int32)
    with jax.enable_x64(True):
        wide = {} if slot is None else {"sum_of_squares": jnp.asarray(slot[touched[:40]], np.float64)}
        at = OptimizerContext(jnp.int32(0), jnp.float64(0.5), lambda x: jnp.mean(x, axis=1))
        after, slots = rule.apply(
            jnp.asarray(table[touched[:40]], np.float64), wide, jnp.asarray(grads[:40], np.float64) * 0.25, at
        )
        rows, sums = np.asarray(after), {name: np.asarray(x) for name, x in slots.items()}
    expected, expected_slot = table.astype(np.float64), None if slot is None else slot.astype(np.float64)
    if ok:
        expected[touched[:40]] = rows
        if expected_slot is not None:
            expected_slot[touched[:40]] = sums["sum_of_squares"]
    scalars = (jnp.float32(0.25), jnp.float32(0.5 * rule.learning_rate), jnp.bool_(ok))
    constants = RowRule(kind, getattr(rule, "eps", 0.0), rule.l2, rule.weight_decay)
    before = None if slot is None else jnp.asarray(slot)
    rows_in = jnp.asarray(table)
    found, found_slot = update_in_place(
        rows_in, before, jnp.asarray(touched), jnp.asarray(grads), scalars, constants, interpret=True
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    if expected_slot is not None:
        np.testing.assert_allclose(np.asarray(found_slot), expected_slot, rtol=1e-6)


ROWS, TOUCHED, BATCH = 2_000_000, 30_000, 4096


def program(what: str, D: int):
    """A kernel's function, shapes of what it takes, and how many of these it works on in place."""
    floats, ints = (functools.partial(jax.ShapeDtypeStruct, dtype=x) for x in (jnp.float32, jnp.int32))
    if what == "segment_sums":
        shapes = [floats((BATCH * 15, D)), ints((BATCH * 15,)), ints((BATCH * 15,)), ints((TOUCHED,))]
        return lambda v, s, t, first: sum_rows(v, s, t, first, None), shapes, 0
    if what == "bag_sums":
        return lambda r, i: sum_rows_of_bags(r, i, None), [floats((ROWS, D)), ints((BATCH * 15, 12))], 0
    if what == "interaction":
        return lambda v: interaction.multiply_pairs(v, False, HIGHEST), [floats((BATCH, 27, D))], 0
    if what == "interaction_backward":
        shapes = [floats((BATCH, 27, D)), floats((BATCH, 351))]
        return lambda v, g: interaction.pull_back_pairs(v, g, False, HIGHEST), shapes, 0
    rule = RowRule(what, 1e-8)  # type: ignore[arg-type]
    slots = {"rowwise_adagrad": [floats((ROWS,))], "adagrad": [floats((ROWS, D))], "sgd": []}[what]
    rest = [ints((TOUCHED,)), floats((TOUCHED, D)), floats(()), floats(()), floats(())]

    def update(table, *operands):
        slot, (touched, grads, *scalars) = (operands[0], operands[1:]) if slots else (None, operands)
        found = update_in_place(table, slot, touched, grads, tuple(scalars), rule)
        return found if slots else found[0]

    return update, [floats((ROWS, D)), *slots, *rest], 1 + len(slots)


def compiled(what: str, D: int, mapped: bool):
    """For one H200, or inside `jax.shard_map` for two, each with arrays of its own."""
    if lacking := missing("h200"):
        pytest.skip(lacking)
    function, shapes, in_place = program(what, D)
    mesh = Mesh(np.array(devices("h200", 8)[: 2 if mapped else 1]), ("x",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("x"))
    several = len(mesh.devices)
    shapes = [
        jax.ShapeDtypeStruct((several * x.shape[0], *x.shape[1:]), x.dtype, sharding=spread)
        if x.shape
        else jax.ShapeDtypeStruct((), x.dtype, sharding=NamedSharding(mesh, P()))
        for x in shapes
    ]
    specs = tuple(P("x") if x.shape else P() for x in shapes)
    inside = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("x"))
    jitted = jax.jit(inside, donate_argnums=tuple(range(in_place)))
    return jitted.lower(*shapes).compile(), shapes[:in_place], several


@pytest.mark.aot
@pytest.mark.full
@pytest.mark.fresh_compile
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize(
    "what", ["rowwise_adagrad", "adagrad", "sgd", "interaction", "interaction_backward", "segment_sums", "bag_sums"]
)
def test_compiled_for_a_gpu_they_work_in_place_beside_nothing(what: str, D: int, mapped: bool) -> None:
    made, donated, several = compiled(what, D, mapped)
    memory, text = made.memory_analysis(), made.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == (2 if what == "segment_sums" else 1)
    assert memory.alias_size_in_bytes >= sum(x.size * 4 for x in donated) // several
    # Sums of pieces; scalars side by side; else nothing.
    scalars = 1024 if donated else 0
    pieces = 4 * (BATCH * 15 // PIECE + 1) * D + 1024 if what == "segment_sums" else scalars
    assert memory.temp_size_in_bytes <= pieces
    again, _, _ = compiled(what, D, mapped)

    def plain(text: str) -> str:
        return re.sub(r"metadata=\{[^}]*\}", "", text)

    assert plain(again.as_text()) == plain(text)


def test_they_compute_on_gpus_unless_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    assert not kernels.available_on_gpu(jnp.float32, 16, 1000)  # a CPU
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=gpu)):
        assert all(kernels.available_on_gpu(jnp.float32, D, 1000) for D in WIDTHS)
        assert not kernels.available_on_gpu(jnp.float32, 48, 1000) and not kernels.available_on_gpu(
            jnp.bfloat16, 16, 1000
        )
        assert not kernels.available_on_gpu(jnp.float32, 16, 2**31)  # places are int32
        with kernels.switched_off():
            assert not kernels.available_on_gpu(jnp.float32, 16, 1000)
        monkeypatch.setenv(kernels.CHOICE, "off")
        assert not kernels.available_on_gpu(jnp.float32, 16, 1000)


def test_a_table_that_is_updated_in_place_is_not_read_whole_in_a_prediction() -> None:
    """One line of a program for an H200: 30,000 of 2,000,000 rows of 16 numbers and one slot."""
    text = """\
ENTRY %main (t: f32[32000000], s: f32[2000000], r: s32[30000], g: f32[480000], n: f32[3]) -> f32[32000000] {
  %t = f32[32000000]{0} parameter(0)
  %s = f32[2000000]{0} parameter(1)
  %r = s32[30000]{0} parameter(2)
  %g = f32[480000]{0} parameter(3)
  %n = f32[3]{0} parameter(4)
  %u = (f32[32000000]{0}, f32[2000000]{0}) custom-call(%t, %s, %r, %g, %n), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(train_step)/sparse_update/recjax_update_rows/pallas_call"}
  ROOT %v = f32[32000000]{0} get-tuple-element(%u), index=0
}
"""
    (node,) = read_graph(text, 1).nodes
    (work,) = node.works
    assert work.kernel == "scatter.sorted" and work.sizes["rows"] == 30_000 and work.sizes["row_bytes"] == 17 * 4
    assert work.bytes < 30_000 * 17 * 4 * 4


def test_a_table_that_bags_are_summed_from_is_not_read_whole_in_a_prediction() -> None:
    """1,000 bags of 12 of 2,000,000 rows of 16 numbers."""
    text = """\
ENTRY %main (t: f32[32000000], i: s32[12000]) -> f32[16000] {
  %t = f32[32000000]{0} parameter(0)
  %i = s32[12000]{0} parameter(1)
  ROOT %s = f32[16000]{0} custom-call(%t, %i), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(train_step)/pool/recjax_bag_sums_16/pallas_call"}
}
"""
    (node,) = read_graph(text, 1).nodes
    (work,) = node.works
    assert (work.kernel, work.sizes["rows"], work.sizes["row_bytes"]) == ("gather", 12_000, 64)
    assert work.bytes == 12_000 * (64 + 4) + 16_000 * 4
